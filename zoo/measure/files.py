"""Files that survive a kill: JSON lines cut back to a known length, and JSON written by rename."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP)
BLOCK = 2**20  # bytes hashed at once


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


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link (not what it leads to), if any.

    Raises:
        OSError: it may not be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def way_out(error: Exception) -> str:
    """What helps where a file could not be written."""
    if isinstance(error, OSError) and error.errno in IN_THE_WAY:
        return "Delete what is in its place"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "Raise the limit on the size of files (ulimit -f)"
    return "Free space or choose another folder (output=…)"


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
            self._hash = _hash(path, keep)
        except OSError as error:
            raise _refused(path, error) from error
        self._length = keep

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write `rows`; they reach the operating system before this returns (SIGKILL-safe).

        Raises:
            RecordError: the disk is full, or the file is no longer the one that was opened.
        """
        self._check()
        data = "".join(dumps(row) + "\n" for row in rows).encode("ascii")
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            os.ftruncate(self._file, self._length)  # a full disk leaves no torn line behind
            raise _refused(self.path, error) from error
        self._length += len(data)
        self._hash.update(data)

    def sync(self) -> int:
        """Bytes in the file, once they are on the disk (power-loss-safe)."""
        self._check()
        try:
            os.fsync(self._file)
        except OSError as error:
            raise _refused(self.path, error) from error
        return self._length

    def _check(self) -> None:
        """Refuse a file that lost its name, or that somebody else wrote to."""
        ours = os.fstat(self._file)
        try:
            found = os.stat(self.path)
        except OSError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino):
            happened = "was deleted, moved or replaced"
        elif ours.st_size != self._length:
            happened = f"was altered (it has {ours.st_size} bytes, not {self._length})"
        else:
            return
        raise RecordError(
            f"{self.path} {happened} while the run was writing to it. The run stops, since what it "
            "does from here on would not be recorded. Put the folder back as it was, or start anew "
            "in another one (name=… or output=…)."
        )

    def sha256(self) -> str:
        """Of all that was written; kept up line by line, so that no checkpoint reads the file."""
        return self._hash.hexdigest()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def check_length(path: Path, keep: int, sha256: str | None = None) -> None:
    """Refuse a file that no longer holds the first `keep` bytes as whole lines, unaltered.

    Args:
        sha256: of these bytes; None where a checkpoint of an older version did not keep it.
    Raises:
        RecordError: names the file and both lengths.
    """
    if keep == 0:
        return
    try:
        _check_length(path, keep, sha256)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}.") from error


def _check_length(path: Path, keep: int, sha256: str | None) -> None:
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
    if sha256 is not None and _hash(path, keep).hexdigest() != sha256:
        raise RecordError(
            f"{path} was altered before byte {keep}, where the checkpoint was written (its hash "
            "differs). Resume from an older checkpoint, or start a new run elsewhere."
        )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; [] where there is none.

    Raises:
        RecordError: the file cannot be read, or a line is damaged; names the line.
    """
    if not path.exists():
        return []
    found, place = [], ""
    try:
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            place = f" in line {number}"
            if line:
                found.append(json.loads(line))
                if not isinstance(found[-1], dict):
                    raise ValueError("no object")
    except (OSError, ValueError) as error:
        raise RecordError(
            f"{path} is damaged{place} ({error}). Restore it from a copy, or delete {path.parent} "
            "to start anew."
        ) from error
    return found


def sha256(path: Path) -> str:
    """Of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash(path: Path, length: int) -> hashlib._Hash:
    """The running hash of a file's first `length` bytes."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while length > 0 and (block := file.read(min(length, BLOCK))):
            found.update(block)
            length -= len(block)
    return found


def _refused(path: Path, error: OSError) -> RecordError:
    return RecordError(
        f"cannot write {path}: {error.strerror or error}. {way_out(error)}, then run the same "
        "command again."
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
