"""What a run says of its folder: which it is, and that it has begun there and may write there.

A process of a job says so to the launcher that started it, by a file, and to itself.
"""

from __future__ import annotations

import os
from pathlib import Path

RUN_DIR_FILE = "ZOO_RUN_DIR_FILE"  # names the file in which a job tells its launcher
_BEGUN = "begun\n"  # ends that file, once the folder is the job's own

_claimed: set[str] = set()


def announce(folder: Path) -> None:
    """Say which folder the run will have, which may still be another's."""
    _claimed.discard(os.path.realpath(folder))
    if told := os.environ.get(RUN_DIR_FILE):
        Path(told).write_text(f"{folder}\n", encoding="utf-8")


def claim(folder: Path, tell: bool = True) -> None:
    """Say that the run has begun in its folder. Of several processes one has to `tell`."""
    _claimed.add(os.path.realpath(folder))
    if tell and (told := os.environ.get(RUN_DIR_FILE)):
        Path(told).write_text(f"{os.path.realpath(folder)}\n{_BEGUN}", encoding="utf-8")


def claimed(folder: Path) -> bool:
    """Whether the last run of this process in this folder has begun there."""
    return os.path.realpath(folder) in _claimed


def announced(file: Path) -> tuple[Path, bool]:
    """What a job told in its file: (its folder, whether it has begun there)."""
    text = file.read_text(encoding="utf-8")
    return Path(text.removesuffix(_BEGUN).strip()), text.endswith(f"\n{_BEGUN}")
