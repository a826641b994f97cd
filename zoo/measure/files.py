"""Files that survive a kill: JSON lines cut back to a known length, and JSON written by rename."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class RecordError(RuntimeError):
    """A file of the run directory that cannot be written, or is not what a checkpoint recorded."""


def strict(value: Any) -> tuple[Any, int]:
    """`value` in types that strict JSON has, and how many non-finite numbers became null.

    Zero-dimensional tensors and numpy scalars become numbers; mappings, sequences, paths and enums
    become their plain counterparts.
    """
    if isinstance(value, float):
        return (float(value), 0) if math.isfinite(value) else (None, 1)
    if value is None or isinstance(value, bool | str):
        return value, 0
    if isinstance(value, int):
        return int(value), 0
    if isinstance(value, Mapping):
        items = {str(key): strict(item) for key, item in value.items()}
        return {key: item for key, (item, _) in items.items()}, sum(n for _, n in items.values())
    if isinstance(value, Sequence | set | frozenset):
        elements = [strict(item) for item in value]
        return [item for item, _ in elements], sum(n for _, n in elements)
    if callable(tolist := getattr(value, "tolist", None)):  # torch and numpy
        return strict(tolist())
    return str(value), 0


def dumps(value: Any, indent: int | None = None) -> str:
    """Strict JSON in ASCII: no NaN, and no character that a reader takes for the end of a line."""
    return json.dumps(strict(value)[0], allow_nan=False, indent=indent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON so that `path` holds the old or the new content, never a part.

    Raises:
        RecordError: the disk is full or the folder cannot be written.
    """
    write_text(path, dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write `text` so that `path` holds the old or the new content, never a part.

    Raises:
        RecordError: the disk is full or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _refused(path, error) from error


class JsonLines:
    """One JSON object a line, appended; a line is in the file whole or not at all.

    Args:
        path: the file, created where it is absent.
        keep: bytes of an existing file to keep; what lies behind them is cut off.
    Raises:
        RecordError: the file is shorter than `keep`, `keep` is not the end of a line, or the file
            cannot be written.
    """

    def __init__(self, path: Path, keep: int = 0):
        self.path = path
        check_length(path, keep)
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._file, keep)
        except OSError as error:
            raise _refused(path, error) from error
        self._length = keep

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write `rows`; they reach the operating system before this returns (SIGKILL-safe)."""
        data = "".join(dumps(row) + "\n" for row in rows).encode("ascii")
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            os.ftruncate(self._file, self._length)  # a full disk leaves no torn line behind
            raise _refused(self.path, error) from error
        self._length += len(data)

    def sync(self) -> int:
        """Bytes in the file, once they are on the disk (power-loss-safe)."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise _refused(self.path, error) from error
        return self._length

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def check_length(path: Path, keep: int) -> None:
    """Refuse a file that no longer holds the first `keep` bytes as whole lines.

    Raises:
        RecordError: names the file and both lengths.
    """
    if keep == 0:
        return
    length = path.stat().st_size if path.exists() else 0
    if length < keep:
        raise RecordError(
            f"{path} has {length} bytes, but the checkpoint was written at {keep}: the file was "
            "cut or replaced. Resume from an older checkpoint, or start a new run elsewhere."
        )
    with path.open("rb") as file:
        file.seek(keep - 1)
        if file.read(1) != b"\n":
            raise RecordError(
                f"{path} has no end of line at byte {keep}, where the checkpoint was written: the "
                "file was altered. Resume from an older checkpoint, or start a new run elsewhere."
            )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; [] where there is none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def _refused(path: Path, error: OSError) -> RecordError:
    return RecordError(
        f"cannot write {path}: {error.strerror or error}. Free space or choose another folder "
        "(output=…), then run the same command again: it resumes."
    )


def _sync_folder(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open a folder
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
