"""Any data set of the Hugging Face hub, by name."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.config import ConfigError, settle_choices
from zoo.data.left_out import remembered
from zoo.data.rows import Kind, Malformed, Reader, Row, rows_of, without_overlap
from zoo.data.table import (
    Table,
    check_heldout,
    check_heldout_golds,
    check_reader_settings,
    finish,
    reader_key,
    split_by_content,
    wrong_kind,
)
from zoo.types import Prompt

_SECONDS = 5.0  # how long the hub may take to answer at all


@dataclass(frozen=True)
class Hub(Table):
    """One split of a hub data set, its columns mapped to ours.

    The kinds and their columns are those of JSON-lines files (see `zoo.data.jsonl.JSONL`).

    Raises:
        ValueError: a setting out of range.
        ConfigError: (when read) no hub within reach and nothing cached, no such data set or
            column, or too many malformed rows.
    """

    name: str = ""  # owner/name on the hub
    subset: str | None = None  # the data set's configuration, where it has several
    split: str = "train"  # rows to train on
    heldout_split: str | None = None  # evaluation prompts of their own
    revision: str | None = None  # a commit, so that the rows never change
    kind: Kind = Kind.prompts  # what a row is
    columns: dict[str, str] = field(default_factory=dict)  # our name: the column's name
    heldout: float = 0.1  # without heldout_split: share of the prompts held out, by their content
    style: str = "math"  # how answers are read and compared: math, gsm8k
    instruction: str = ""  # added to every prompt, after a blank line
    chat: bool = True  # False: a text prompt is raw text (base models), not a user's turn
    max_malformed: float = 0.01  # largest share of rows that may be left out
    max_new_tokens: int = 256  # a limit of new tokens that fits the answers

    def __post_init__(self) -> None:
        settle_choices(self, "data")
        if not self.name:
            raise ValueError("data.name is not set: name a data set. Try data.name=openai/gsm8k.")
        check_heldout("heldout_split", self.heldout_split, self.kind)
        check_reader_settings(self.heldout, self.max_malformed, self.max_new_tokens, self.style)

    def _rows(self, split: str) -> tuple[Any, ...]:
        reader = Reader(self.kind, self.columns, self.name, self.style, self.instruction, self.chat)
        place = (self.name, self.subset, split, self.revision)
        return _read(*place, reader_key(reader), self.max_malformed)

    def _only(self, kind: Kind) -> list[Any]:
        wrong_kind(self.kind, kind, "hub")
        return list(self._rows(self.split))

    def _split(self) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
        wrong_kind(self.kind, Kind.prompts, "hub")
        rows = self._rows(self.split)
        if self.heldout_split is None:
            return split_by_content(rows, self.heldout)
        heldout = self._rows(self.heldout_split)
        setting = f"data.heldout_split={self.heldout_split}"
        check_heldout_golds(rows, heldout, f"{self.name} ({self.split})", setting)
        return tuple(without_overlap(list(rows), list(heldout), self.name)), heldout


@remembered
def _read(
    name: str,
    subset: str | None,
    split: str,
    revision: str | None,
    key: tuple[Any, ...],
    max_malformed: float,
) -> tuple[Any, ...]:
    kind, columns, *rest = key
    reader = Reader(kind, dict(columns), *rest)
    malformed = Malformed(f"{name} ({split})")
    rows = load_hub(name, subset, split, revision, used=reader.used())
    return finish(reader.convert(rows, malformed), len(rows), malformed, reader, max_malformed)


def load_hub(
    name: str,
    subset: str | None = None,
    split: str = "train",
    revision: str | None = None,
    used: Iterable[str] = (),
) -> list[Row]:
    """The rows of a hub data set, numbered from 1.

    Whether the hub answers at all is asked first, with a limit of seconds: without a network the
    client's own retries take minutes. Then the local cache alone is tried.

    Args:
        used: columns that must not be left out (see `rows_of`).
    Raises:
        ConfigError: not on the hub, neither within reach nor cached, one that cannot be read, or a
            column of no use.
    """
    import datasets
    import datasets.config
    import huggingface_hub.constants as hub_constants
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import LocalEntryNotFoundError

    reachable = not hub_constants.HF_HUB_OFFLINE and hub_answers(hub_constants.ENDPOINT)
    before = hub_constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if not reachable:
        hub_constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        table: Any = datasets.load_dataset(name, subset, split=split, revision=revision)
    except Exception as error:
        if Path(name).expanduser().is_file():
            raise ConfigError(
                f"data.name={name} is a file, not a data set of the hub. Write data=jsonl "
                f"data.path={name} where it holds JSON lines, or name the folder that it is in."
            ) from error
        absent = isinstance(error, ConnectionError | DatasetNotFoundError | LocalEntryNotFoundError)
        if reachable or not absent:
            raise ConfigError(
                f"there is no usable data set {name!r} (subset {subset}, split {split}): "
                f"{_reason(error)}. Check data.name, data.subset and data.split."
            ) from error
        why = (
            "HF_HUB_OFFLINE is set"
            if before[0]
            else f"{hub_constants.ENDPOINT} did not answer within {_SECONDS:g} s"
        )
        raise ConfigError(
            f"the data set {name!r} is not in the local cache and the hub cannot be asked: {why}. "
            "Connect once, set HF_ENDPOINT to a mirror, or use a local file (data.path=…)."
        ) from error
    finally:
        hub_constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
    return rows_of(table.with_format("arrow")[:], name, used)


def _reason(error: BaseException) -> str:
    """What it says on one line; the innermost cause, where it was raised from others."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return (text if len(text) <= 300 else f"{text[:299]}…").rstrip(".")


def hub_answers(endpoint: str) -> bool:
    """Whether the hub gives any answer within seconds; proxies of the environment are used."""
    request = urllib.request.Request(
        os.environ.get("HF_ENDPOINT", endpoint), method="HEAD", headers={"User-Agent": "zoo"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True  # it answers, if only to refuse
    except (OSError, ValueError):
        return False
