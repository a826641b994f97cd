"""Prompts, examples, pairs, rankings or labelled completions from JSON-lines files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from zoo.config import ConfigError
from zoo.data.golds import check_golds
from zoo.data.plain_texts import PLAIN_TEXTS
from zoo.data.rows import (
    REQUIRED,
    Kind,
    Malformed,
    Ranking,
    Reader,
    content_of,
    read_jsonl,
    without_duplicates,
    without_overlap,
)
from zoo.rewards.verifiable import Verifier
from zoo.types import (
    EvaluationSet,
    Example,
    LabelledCompletion,
    PreferencePair,
    Prompt,
    Reward,
)


@dataclass(frozen=True)
class JSONL:
    """A file with one JSON object a line.

    | kind | columns |
    |---|---|
    | prompts | `prompt` (a text, or a list of turns {role, content}), `answer` where there is a gold |
    | examples | `prompt`, `completion` |
    | pairs | `prompt`, `chosen`, `rejected`, perhaps `margin` |
    | rankings | `prompt`, `completions` (best first, or with `scores`) |
    | labelled | `prompt`, `completion`, `label` (true: desirable) |

    Other columns of a row stay with its prompt, where rewards can read them.

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
        if not self.path:
            raise ValueError(
                "data.path is not set: name a JSON-lines file. Try data.path=my.jsonl."
            )
        check_reader_settings(self.heldout, self.max_malformed, self.max_new_tokens)

    @property
    def offers(self) -> frozenset[str]:
        return offers(self.kind)

    def prompts(self) -> list[Prompt]:
        return list(self._split()[0])

    def examples(self) -> list[Example]:
        return self._only(Kind.examples)

    def pairs(self) -> list[PreferencePair]:
        """The pairs; of rankings, all pairs of unequal score."""
        if self.kind is Kind.rankings:
            return [pair for ranking in self.rankings() for pair in ranking.pairs()]
        return self._only(Kind.pairs)

    def rankings(self) -> list[Ranking]:
        return self._only(Kind.rankings)

    def labelled(self) -> list[LabelledCompletion]:
        return self._only(Kind.labelled)

    def verifier(self) -> Reward | None:
        """The check against `answer`, where every prompt has one."""
        if self.kind is not Kind.prompts:
            return None
        return Verifier() if has_golds(self._split()[0]) else None

    def evaluation_sets(self) -> list[EvaluationSet]:
        return evaluation_sets(self._split()[1] if self.kind is Kind.prompts else (), self.path)

    def _rows(self, path: str) -> tuple[Any, ...]:
        reader = Reader(
            self.kind, self.columns, Path(path).name, self.style, self.instruction, self.chat
        )
        return _read(path, _stamp(path), reader_key(reader), self.max_malformed)

    def _only(self, kind: Kind) -> list[Any]:
        wrong_kind(self.kind, kind, "jsonl")
        return list(self._rows(self.path))

    def _split(self) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
        """Training prompts and held-out prompts."""
        wrong_kind(self.kind, Kind.prompts, "jsonl")
        rows = self._rows(self.path)
        if self.heldout_path is None:
            return split_by_content(rows, self.heldout)
        heldout = self._rows(self.heldout_path)
        return tuple(without_overlap(list(rows), list(heldout), self.path)), heldout


# What every set of rows shares ---------------------------------------------------------------


def offers(kind: Kind) -> frozenset[str]:
    if kind is Kind.rankings:
        return frozenset({"rankings", "pairs"})
    return frozenset({kind.value})


def check_reader_settings(heldout: float, max_malformed: float, max_new_tokens: int) -> None:
    for name, value in (("heldout", heldout), ("max_malformed", max_malformed)):
        if not 0.0 <= value < 1.0:
            raise ValueError(
                f"data.{name} must be a share of the rows, at least 0 and below 1, got {value}. "
                f"Try data.{name}={0.1 if name == 'heldout' else 0.01}."
            )
    if max_new_tokens < 1:
        raise ValueError(
            f"data.max_new_tokens must be at least 1, got {max_new_tokens}: the model could write "
            "nothing. Try data.max_new_tokens=256."
        )


def wrong_kind(have: Kind, want: Kind, data: str) -> None:
    if have is not want:
        raise ConfigError(
            f"data={data} was asked for {want}, but data.kind={have}. Set data.kind={want}, whose "
            f"rows have the columns {', '.join(REQUIRED[want])}."
        )


def has_golds(prompts: tuple[Prompt, ...]) -> bool:
    return bool(prompts) and all("answer" in prompt.columns for prompt in prompts)


def evaluation_sets(heldout: tuple[Prompt, ...], source: str) -> list[EvaluationSet]:
    sets = [EvaluationSet("guard", "perplexity", texts=PLAIN_TEXTS)]
    if has_golds(heldout):
        sets.insert(0, EvaluationSet("heldout", "accuracy", heldout, Verifier()))
    return sets


def split_by_content(
    prompts: tuple[Prompt, ...], share: float
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Train and held out; a prompt's side depends on nothing but what it says.

    Raises:
        ConfigError: one side would be empty.
    """
    sides: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt in prompts:
        digest = hashlib.blake2b(content_of(prompt).encode(), digest_size=8).digest()
        sides[int.from_bytes(digest, "big") / 2**64 < share].append(prompt)
    if not sides[0] or (share > 0 and not sides[1]):
        raise ConfigError(
            f"data.heldout={share} of {len(prompts)} prompts leaves {len(sides[0])} to train on "
            f"and {len(sides[1])} to hold out. Give more rows, or data.heldout_path."
        )
    return tuple(sides[0]), tuple(sides[1])


def finish(
    found: list[Any], total: int, malformed: Malformed, reader: Reader, max_malformed: float
) -> tuple[Any, ...]:
    """The last checks of all rows: malformed ones, duplicates, golds."""
    malformed.settle(total, max_malformed)
    if reader.kind is Kind.prompts:
        found = without_duplicates(found, content_of, reader.source)
        with_golds = [prompt for prompt in found if "answer" in prompt.columns]
        if 0 < len(with_golds) < len(found):
            bare = next(prompt.id for prompt in found if "answer" not in prompt.columns)
            raise ConfigError(
                f"{reader.source}: {len(found) - len(with_golds)} of {len(found)} prompts have no "
                f"answer (the first is {bare}). Give all of them one, or none."
            )
        check_golds(found, reader.source)
    else:
        found = without_duplicates(found, repr_of, reader.source)
    return tuple(found)


def repr_of(item: Any) -> str:
    values = {name: value for name, value in vars(item).items() if name != "prompt"}
    return f"{content_of(item.prompt)}\x1f{values!r}"


def reader_key(reader: Reader) -> tuple[Any, ...]:
    columns = tuple(sorted(reader.columns.items()))
    return (reader.kind, columns, reader.source, reader.style, reader.instruction, reader.chat)


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = Path(path).expanduser().stat()
    except OSError:
        return None  # the reader says what is wrong
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=8)
def _read(
    path: str, stamp: tuple[int, int] | None, key: tuple[Any, ...], max_malformed: float
) -> tuple[Any, ...]:
    # Read once however often a run asks; `stamp` is in the key so that a changed file is read anew.
    kind, columns, *rest = key
    reader = Reader(kind, dict(columns), *rest)
    malformed = Malformed(path)
    rows, total = read_jsonl(path, malformed)
    found = reader.convert(rows, malformed)
    return finish(found, total, malformed, reader, max_malformed)
