"""Files that can be made anew: one process makes each, behind a lock, and it appears whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError

from zoo.config import ConfigError


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Holds the lock that belongs to a file; its folder is created.

    Raises:
        ConfigError: the folder cannot be written.
    """
    lock = FileLock(f"{file}.lock")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise _refused(file.parent, error) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def written_aside(file: Path) -> Iterator[Path]:
    """A path to write to, renamed to `file` at the end; call it under the file's lock.

    Raises:
        ConfigError: the disk is full or the folder cannot be written.
    """
    temporary = file.with_suffix(f".tmp{os.getpid()}")
    try:
        for left in file.parent.glob(f"{file.stem}.tmp*"):  # by a process that was killed
            left.unlink(missing_ok=True)
        yield temporary
        temporary.replace(file)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise _refused(file, error) from error


def _refused(path: Path, error: Exception) -> ConfigError:
    if isinstance(error, IsADirectoryError):
        return ConfigError(
            f"the cache {path} cannot be written: {error}. A folder is in the place of that file: "
            "delete it."
        )
    return ConfigError(
        f"the cache {path} cannot be written: {error}. Free space, or set the environment "
        "variable ZOO_CACHE to a folder that can be written."
    )
