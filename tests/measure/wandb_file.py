"""Reads wandb's offline file: blocks of 32 KiB with protobuf records (LevelDB's log format)."""

import json
import struct
import time
from pathlib import Path

BLOCK = 32768
HEAD = 7  # of the file (":W&B", magic, version) and of each piece (checksum, length, kind)
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path):
    """Yield the records that are whole; a torn tail ends the file."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, parts = HEAD, b""
    while position + HEAD <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEAD:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEAD])
        position += HEAD
        if kind not in (FULL, FIRST, MIDDLE, LAST) or position + length > len(data):
            return
        if kind in (FULL, FIRST):
            parts = b""
        parts += data[position : position + length]
        position += length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record


def finished(run_dir: Path) -> list:
    """The records of the only offline file of `run_dir`, once its run has ended.

    `finish` only tells wandb's process to close the file, so it is awaited here.
    """
    (path,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = list(records(path))
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.02)
    raise AssertionError(f"{path} was never finished: {len(found)} records")


def history(run_dir: Path) -> list[dict]:
    """What was logged, a dictionary for each call."""
    return [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in finished(run_dir)
        if record.WhichOneof("record_type") == "history"
    ]


def tables(run_dir: Path) -> list[dict]:
    """The content of every table file of `run_dir`."""
    found = run_dir.glob("wandb/offline-run-*/files/media/table/*.table.json")
    return [json.loads(path.read_text()) for path in sorted(found)]
