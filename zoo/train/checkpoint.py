"""Checkpoints at step boundaries: written aside, renamed, verified by hash before use."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MANIFEST = "manifest.json"


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
    """
    target = folder / f"step_{step:06d}"
    temporary = folder / f".step_{step:06d}.tmp"
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    files = {}
    for name, value in tensors.items():
        path = temporary / f"{name}.pt"
        with path.open("wb") as out:
            torch.save(value, out)
            out.flush()
            os.fsync(out.fileno())
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    manifest = {
        "step": step,
        "config_hash": config_hash,
        "files": files,
        "offsets": offsets,
        "state": state,
    }
    with (temporary / MANIFEST).open("w", encoding="utf-8") as out:
        json.dump(manifest, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    replaced = folder / f".step_{step:06d}.old"
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    temporary.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
    # A later step than this one was refused (damaged, foreign): it must not push this one out.
    for old in sorted(path for path in folder.glob("step_*") if path <= target)[:-keep]:
        shutil.rmtree(old)
    return target


def last_good_checkpoint(folder: Path, config_hash: str) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole and belongs to this configuration, and the refusals.

    Returns:
        the checkpoint or None, and one line for each refused one: its name and the reason.
    """
    refused = []
    for path in sorted(folder.glob("step_*"), reverse=True):
        reason, manifest = _examine(path, config_hash)
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
    for name, (size, digest) in files.items():
        file = path / name
        if not file.exists():
            return f"{name} is missing", {}
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}", {}
        if sha256(file) != digest:
            return f"{name} was altered (its hash differs)", {}
    return "", manifest


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
