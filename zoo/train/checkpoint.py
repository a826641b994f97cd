"""Checkpoints at step boundaries: written aside, renamed, verified by hash before use."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zoo.measure.files import RecordError, remove, sha256, way_out

MANIFEST = "manifest.json"
SELF = "sha256"  # of everything else in the manifest


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    step: int
    manifest: dict[str, Any]

    def load(self, name: str) -> Any:
        """A saved state, on the CPU."""
        return torch.load(self.folder / f"{name}.pt", map_location="cpu", weights_only=True)

    @property
    def state(self) -> dict[str, Any]:
        """The loop's own numbers."""
        return self.manifest["state"]

    @property
    def steps(self) -> list[int]:
        """The steps of the run's checkpoints up to this one."""
        return [*self.manifest.get("before", []), self.step]


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: dict[str, Any],
    state: dict[str, Any],
    *,
    offsets: dict[str, int],
    hashes: dict[str, str],
    config_hash: str,
    seed: int,
    before: Sequence[int],
    keep: int,
) -> Path:
    """Write step `step` of a run and drop all but the last `keep` of it and those `before`.

    A checkpoint exists when its folder has its final name: everything is written and synced under
    another name first, so a kill at any moment leaves the previous one as it was.

    Args:
        tensors: name → state dict (policy, critic, optimizers).
        state: JSON-able numbers of the loop, the source and the algorithm.
        offsets: bytes of each JSONL file at this step; a resumed run cuts the files to them.
        hashes: SHA-256 of these bytes.
        before: the steps of this run's checkpoints (`Checkpoint.steps`). Others were refused when
            it was resumed, so they must not count.
    Raises:
        RecordError: the disk is full or the folder cannot be written; the checkpoints before stay.
    """
    target = folder / _name(step)
    temporary, replaced = (folder / f".{target.name}.{end}" for end in ("tmp", "old"))
    *before, _ = [*(known for known in before if known < step), step][-keep:]
    facts = {
        "step": step,
        "config_hash": config_hash,
        "seed": seed,
        "before": before,
        "offsets": offsets,
        "hashes": hashes,
        "state": state,
    }
    try:
        folder.mkdir(exist_ok=True)  # not its parents: a run's folder that is gone stays gone
        remove(temporary)
        _write(temporary, tensors, facts)
        remove(replaced)
        if os.path.lexists(target):  # also a link that leads nowhere
            target.rename(replaced)
        temporary.rename(target)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        shutil.rmtree(temporary, ignore_errors=True)  # it holds the space that is missing
        raise RecordError(
            f"the checkpoint of step {step} cannot be written to {folder}: {error}. "
            f"{'The ones before stay. ' if before else ''}{way_out(error)}, then run the same "
            "command again."
        ) from error
    kept = {_name(known) for known in before}
    # A later step than this one was refused, but may be of use to whoever mends it.
    outdated = [p for p in folder.glob("step_*") if 0 <= _step(p) < step and p.name not in kept]
    for path in [replaced, *(p for p in outdated if p.is_dir())]:
        with contextlib.suppress(OSError):  # what may not be removed harms nobody
            remove(path)
    return target


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _step(path: Path) -> int:
    """The step in a checkpoint's name; -1 where there is none."""
    number = path.name.removeprefix("step_")
    return int(number) if number.isdecimal() else -1


def _write(folder: Path, tensors: dict[str, Any], facts: dict[str, Any]) -> None:
    folder.mkdir()
    files = {}
    for name, value in tensors.items():
        path = folder / f"{name}.pt"
        with path.open("wb") as out:
            torch.save(value, out)
            out.flush()
            os.fsync(out.fileno())
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    with (folder / MANIFEST).open("w", encoding="utf-8") as out:
        manifest = {**facts, "files": files}
        json.dump({**manifest, SELF: _own_hash(manifest)}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def last_good_checkpoint(
    folder: Path,
    config_hash: str,
    seed: int,
    problem: Callable[[dict[str, Any]], str] = lambda manifest: "",
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole and belongs to this configuration and seed; the refusals.

    Args:
        problem: why a whole checkpoint cannot be used after all, from its manifest; "" if it can.
    Returns:
        the checkpoint or None, and one line for each refused one: its name and the reason.
    """
    refused = []
    for path in sorted(folder.glob("step_*"), key=lambda p: (_step(p), p.name), reverse=True):
        reason, manifest = _examine(path, config_hash, seed)
        reason = reason or problem(manifest)
        if not reason:
            return Checkpoint(path, manifest["step"], manifest), refused
        refused.append(f"{path}: {reason}")
    return None, refused


def _examine(path: Path, config_hash: str, seed: int) -> tuple[str, dict[str, Any]]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        found_hash = manifest["config_hash"]
        files = {
            name: (facts["bytes"], facts["sha256"]) for name, facts in manifest["files"].items()
        }
        if not {"step", "state", "offsets"} <= set(manifest):
            return "its manifest lacks entries", {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read ({type(error).__name__})", {}
    if found_hash != config_hash:
        return f"it belongs to another configuration ({found_hash}, not {config_hash})", {}
    if manifest.get("seed", seed) != seed:  # those of older versions do not say
        return f"it belongs to another seed ({manifest['seed']}, not {seed})", {}
    if manifest.get(SELF, _own_hash(manifest)) != _own_hash(manifest):
        return "its manifest was altered (its hash differs)", {}
    if path.name != _name(manifest["step"]):
        return f"it is of step {manifest['step']}: it was copied or renamed", {}
    for name, (size, digest) in files.items():
        file = path / name
        if not file.exists():
            return f"{name} is missing", {}
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}", {}
        if sha256(file) != digest:
            return f"{name} was altered (its hash differs)", {}
    return "", manifest


def _own_hash(manifest: dict[str, Any]) -> str:
    """Of the manifest as it is read back, without its own hash."""
    facts = {key: value for key, value in manifest.items() if key != SELF}
    text = json.dumps(json.loads(json.dumps(facts)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
