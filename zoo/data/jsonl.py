"""Prompts, examples, pairs, rankings or labelled completions from JSON-lines files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.config import settle_choices
from zoo.data.left_out import remembered
from zoo.data.rows import Kind, Malformed, Reader, expanded, read_jsonl, without_overlap
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


@dataclass(frozen=True)
class JSONL(Table):
    """A file with one JSON object a line.

    | kind | columns |
    |---|---|
    | prompts | `prompt` (a text, or turns {role, content}), `answer` where there is a gold |
    | examples | `prompt`, `completion` |
    | pairs | `prompt`, `chosen`, `rejected`, perhaps `margin`, or `preferred` (2: `rejected` is) |
    | rankings | `prompt`, `completions` (best first, or with `scores` or `ranks`) |
    | labelled | `prompt`, `completion`, `label` (true: desirable) |

    Pairs may come without a prompt as two whole dialogues (turns, or a text with `Human:` and
    `Assistant:`) that differ in the last reply; beside a prompt a completion may be a dialogue of
    turns that begins with it. A `.json` file may hold one array of such objects,
    a `.parquet` file a table with these columns. Other columns of a row stay with its prompt,
    where rewards can read them.

    Raises:
        ValueError: a setting out of range.
        ConfigError: (when read) no such file, missing columns, or too many malformed rows.
    """

    path: str = ""  # the file; .gz is unpacked
    kind: Kind = Kind.prompts  # what a row is
    columns: dict[str, str] = field(default_factory=dict)  # our name: the column's name
    heldout_path: str | None = None  # evaluation prompts of their own
    heldout: float = 0.1  # without heldout_path: share of the prompts held out, by their content
    style: str = "math"  # how answers are read and compared: math, gsm8k
    instruction: str = ""  # added to every prompt, after a blank line
    chat: bool = True  # False: a text prompt is raw text (base models), not a user's turn
    max_malformed: float = 0.01  # largest share of rows that may be left out
    max_new_tokens: int = 256  # a limit of new tokens that fits the answers

    def __post_init__(self) -> None:
        settle_choices(self, "data")
        if not self.path:
            raise ValueError(
                "data.path is not set: name a JSON-lines or parquet file. Try data.path=my.jsonl."
            )
        check_heldout("heldout_path", self.heldout_path, self.kind)
        check_reader_settings(self.heldout, self.max_malformed, self.max_new_tokens, self.style)

    def _rows(self, path: str) -> tuple[Any, ...]:
        reader = Reader(
            self.kind, self.columns, Path(path).name, self.style, self.instruction, self.chat
        )
        return _read(path, reader_key(reader), self.max_malformed)

    def _only(self, kind: Kind) -> list[Any]:
        wrong_kind(self.kind, kind, "jsonl")
        return list(self._rows(self.path))

    def _split(self) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
        """Training prompts and held-out prompts."""
        wrong_kind(self.kind, Kind.prompts, "jsonl")
        rows = self._rows(self.path)
        if self.heldout_path is None:
            return split_by_content(rows, self.heldout)
        expanded(self.heldout_path, "data.heldout_path")
        heldout = self._rows(self.heldout_path)
        setting = f"data.heldout_path={self.heldout_path}"
        check_heldout_golds(rows, heldout, self.path, setting)
        return tuple(without_overlap(list(rows), list(heldout), self.path)), heldout


@remembered
def _read(path: str, key: tuple[Any, ...], max_malformed: float) -> tuple[Any, ...]:
    kind, columns, *rest = key
    reader = Reader(kind, dict(columns), *rest)
    malformed = Malformed(path)
    rows, total = read_jsonl(path, malformed, reader.used())
    found = reader.convert(rows, malformed)
    return finish(found, total, malformed, reader, max_malformed)
