"""One process at a time in a run's folder."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

from zoo.config import ConfigError
from zoo.measure.files import RecordError


class FolderLock:
    """The lock of a run's folder; it ends with the process, however that ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".lock"
        self._lock = FileLock(str(self._path))
        self._taken: tuple[int, int] | None = None  # the file that was locked

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            ConfigError: another process has it, or there can be none.
        """
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(
                f"another process is running in {self._path.parent}. Wait for it, or use another "
                "seed, name or output."
            ) from None
        except (OSError, NotImplementedError) as error:
            # A file may be the lock of a process that runs, on another machine perhaps.
            way_out = "Choose" if self._path.is_file() else "Delete it, or choose"
            raise ConfigError(
                f"{self._path} cannot be locked: {error}. {way_out} another output."
            ) from error
        self._taken = _which(self._path)

    def check(self) -> None:
        """Whether the lock still keeps others out; where it was never taken nothing is said.

        Raises:
            RecordError: its file was deleted or replaced, so that another process may be running.
        """
        if self._taken is not None and _which(self._path) != self._taken:
            raise RecordError(
                f"{self._path} was deleted or replaced while the run held it, so another process "
                "may be running in this folder: this one stops, and has saved nothing since. Let "
                "the other one end, then run the same command again: it resumes."
            )

    def release(self) -> None:
        self._lock.release()


def _which(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
