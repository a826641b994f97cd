"""Where a result comes from: commit, versions, machine, command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("torch", "transformers", "datasets", "accelerate", "hydra-core", "wandb", "einops")


def meta(device: str = "cpu") -> dict[str, Any]:
    """What meta.json says before the run adds its hashes: commit, versions, machine, command.

    The machine is described without its name. `commit` and `dirty` are None where zoo does not run
    from a git checkout. Takes some ten milliseconds; git has five seconds to answer.

    Args:
        device: of the run, "cpu" or "cuda:0".
    """
    import torch

    commit, dirty = _commit(Path(__file__).resolve().parents[2])
    return {
        "commit": commit,
        "dirty": dirty,
        "versions": versions(),
        "device": device,
        "machine": machine(device),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "argv": list(sys.argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str]:
    """Versions of zoo, of what it stands on, and of Python; absent packages are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    try:
        found["zoo"] = metadata.version("zoo-rl")
    except metadata.PackageNotFoundError:  # run from a folder that was never installed
        found["zoo"] = "source"
    return found


def machine(device: str = "cpu") -> dict[str, Any]:
    """Processor, cores this process may use, memory in bytes, and the GPU's name or None."""
    gpu = None
    if device.startswith("cuda"):
        import torch

        gpu = torch.cuda.get_device_name(device)
    return {
        "cpu": _processor(),
        "cores": _cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _commit(checkout: Path) -> tuple[str | None, bool | None]:
    if not (checkout / ".git").exists():  # an installed wheel has no commit of its own
        return None, None
    commit = _git(checkout, "rev-parse", "HEAD")
    if commit is None:
        return None, None
    changes = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


def _git(checkout: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), *arguments],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
            # Reading must not take the lock that a commit in the same checkout needs.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
