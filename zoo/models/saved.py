"""Hashes of saved models and tokenizers: written beside them, compared before they are loaded."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zoo.config import ConfigError
from zoo.measure.files import sha256, write_json

BEST = "best.json"  # in best/, with the evaluation that the policy was best by
HASHES = "sha256.json"  # in the folder of what a run made at its end
# What decides, beside the weights, what a model computes.
CONFIGS = ("config.json", "adapter_config.json")
# What decides the tokens of a text; its settings and templates are there to be edited.
TOKENS = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


def hashes_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of each of these files that is in a folder; of `tokenizer.json`, what it decides."""
    return {name: _hash_of(folder / name) for name in names if (folder / name).is_file()}


def record_hashes(folder: Path, name: str = HASHES, **facts: Any) -> None:
    """Write the hashes of a folder's weights, settings and tokenizer into it, for `check_saved`.

    Args:
        facts: what else the file says.
    Raises:
        RecordError: it cannot be written.
    """
    weights = sorted(file.name for file in folder.glob("*.safetensors"))
    write_json(folder / name, {**facts, "sha256": hashes_of(folder, [*weights, *CONFIGS, *TOKENS])})


def check_saved(folder: Path, setting: str, tokens: bool = False) -> None:
    """Refuse weights or settings that are not what a run saved; without a record nothing is said.

    Args:
        setting: where the folder was given, for the message.
        tokens: look at the tokenizer's files instead.
    Raises:
        ConfigError: names the file, and what to do.
    """
    for record in (folder / name for name in (HASHES, BEST)):
        for name, known in _known(record).items():
            if (name in TOKENS) is not tokens:
                continue
            file = folder / name
            if not file.is_file():
                what = f"{name} is gone"
            elif _hash_of(file) != known:
                what = f"{name} is not the file that was saved (its SHA-256 is another)"
            else:
                continue
            raise ConfigError(
                f"{setting}={folder}: {what}. Restore it from a copy; where you changed it "
                f"on purpose, delete {record}."
            )


def _known(record: Path) -> dict[str, str]:
    """The hashes in a record; {} in anybody else's file of that name."""
    try:
        found = json.loads(record.read_text(encoding="utf-8"))["sha256"]
        return {str(name): str(known) for name, known in found.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _hash_of(file: Path) -> str:
    status = file.stat()
    return _remembered(file, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=256)  # a start is loaded again for each evaluation's drift
def _remembered(file: Path, *_of_this_state: int) -> str:
    if file.name == TOKENS[0]:
        # With them transformers keeps how the last batch was padded and cut; it decides no token.
        with contextlib.suppress(ValueError, AttributeError):
            facts = json.loads(file.read_bytes())
            told = {key: facts[key] for key in facts.keys() - {"padding", "truncation"}}
            return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return sha256(file)
