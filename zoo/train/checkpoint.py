"""Checkpoints at step boundaries: written aside, renamed, verified by hash before use."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zoo.measure.files import RecordError

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


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: dict[str, Any],
    state: dict[str, Any],
    *,
    offsets: dict[str, int],
    config_hash: str,
    keep: int,
) -> Path:
    """Write step `step` of a run and drop all but the last `keep`.

    A checkpoint exists when its folder has its final name: everything is written and synced under
    another name first, so a kill at any moment leaves the previous one as it was.

    Args:
        tensors: name → state dict (policy, critic, optimizers).
        state: JSON-able numbers of the loop, the source and the algorithm.
        offsets: bytes of each JSONL file at this step; a resumed run cuts the files to them.
    Raises:
        RecordError: the disk is full or the folder cannot be written; the checkpoints before stay.
    """
    target = folder / f"step_{step:06d}"
    temporary = folder / f".step_{step:06d}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    facts = {"step": step, "config_hash": config_hash, "offsets": offsets, "state": state}
    try:
        _write(temporary, tensors, facts)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        shutil.rmtree(temporary, ignore_errors=True)  # it holds the space that is missing
        raise RecordError(
            f"the checkpoint of step {step} cannot be written to {folder}: {error}. The ones "
            "before stay. Free space, then run the same command again: it resumes."
        ) from error
    replaced = folder / f".step_{step:06d}.old"
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    temporary.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
    # A later step than this one was refused (damaged, foreign): it must not push this one out.
    for old in sorted(path for path in folder.glob("step_*") if path <= target)[:-keep]:
        if old.is_dir():  # anything else of that name is none of ours
            shutil.rmtree(old)
    return target


def _write(folder: Path, tensors: dict[str, Any], facts: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
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
    problem: Callable[[dict[str, Any]], str] = lambda manifest: "",
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole and belongs to this configuration, and the refusals.

    Args:
        problem: why a whole checkpoint cannot be used after all, from its manifest; "" if it can.
    Returns:
        the checkpoint or None, and one line for each refused one: its name and the reason.
    """
    refused = []
    for path in sorted(folder.glob("step_*"), reverse=True):
        reason, manifest = _examine(path, config_hash)
        reason = reason or problem(manifest)
        if not reason:
            return Checkpoint(path, manifest["step"], manifest), refused
        refused.append(f"{path}: {reason}")
    return None, refused


def _examine(path: Path, config_hash: str) -> tuple[str, dict[str, Any]]:
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
    if manifest.get(SELF, _own_hash(manifest)) != _own_hash(manifest):
        return "its manifest was altered (its hash differs)", {}
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


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
