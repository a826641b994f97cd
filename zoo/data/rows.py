"""Rows of a file or table → prompts, examples, pairs, rankings and labelled completions.

Every row that cannot be used is named by its line and its reason. A few are left out with one
warning; more than `max_malformed` of them are refused, because a file with many has another fault
than its rows.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import itertools
import json
import math
import re
import unicodedata
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from zoo.config import ConfigError, member
from zoo.data.left_out import LeftOut
from zoo.rewards.math import STYLES
from zoo.types import Example, LabelledCompletion, PreferencePair, Prompt

T = TypeVar("T")
Row = tuple[int, dict[str, Any]]  # line (1-based), content
SHOWN = 5  # reasons in a message, and lines of each
# Scores and margins become float32, in which the difference of two must be finite as well.
LARGEST = 1e38


class Kind(StrEnum):
    """What a row of the data is."""

    prompts = "prompts"  # prompt, and answer where there is a gold
    examples = "examples"  # prompt, completion
    pairs = "pairs"  # prompt, chosen, rejected; or two whole dialogues that begin alike
    rankings = "rankings"  # prompt, completions (a list), and ranks or scores
    labelled = "labelled"  # prompt, completion, label


REQUIRED = {
    Kind.prompts: ("prompt",),
    Kind.examples: ("prompt", "completion"),
    Kind.pairs: ("prompt", "chosen", "rejected"),
    Kind.rankings: ("prompt", "completions"),
    Kind.labelled: ("prompt", "completion", "label"),
}
OPTIONAL = {
    Kind.prompts: ("answer",),
    Kind.examples: ("answer",),
    Kind.pairs: ("margin", "preferred"),
    Kind.rankings: ("scores", "ranks"),
    Kind.labelled: (),
}


@dataclass(frozen=True)
class Ranking:
    """A prompt with K completions and a score for each; equal scores are ties."""

    prompt: Prompt
    completions: tuple[str, ...]
    scores: tuple[float, ...]

    def pairs(self) -> list[PreferencePair]:
        """All pairs of unequal score, the better one first."""
        rows = list(zip(self.completions, self.scores, strict=True))
        return [
            PreferencePair(self.prompt, better, worse, margin=high - low)
            for better, high in rows
            for worse, low in rows
            if high > low
        ]


@dataclass
class Malformed:
    """The rows that were left out: their lines and reasons."""

    source: str
    rows: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, reason: str) -> None:
        self.rows.append((line, reason))

    def settle(self, total: int, max_malformed: float, setting: str = "") -> None:
        """Warn about the rows left out, or refuse the whole.

        Args:
            total: rows there were.
            max_malformed: the largest share that may be left out.
            setting: its name, where a user can raise it.
        Raises:
            ConfigError: more than `max_malformed` of `total` rows, or all of them.
        """
        if not self.rows:
            return
        rows = sorted(self.rows)
        lines: dict[str, list[int]] = {}
        for line, reason in rows:
            lines.setdefault(reason, []).append(line)
        told = list(lines.items())[:SHOWN]
        shown = "; ".join(f"{_lines(found)}: {reason}" for reason, found in told)
        rest = len(rows) - sum(len(found) for _, found in told)
        more = f"; and {rest} more" if rest else ""
        if len(rows) > max_malformed * total or len(rows) == total:
            limit = f"{setting}={max_malformed:g} is" if setting else f"{max_malformed:g} is"
            raise ConfigError(
                f"{self.source}: {len(rows)} of {total} rows cannot be used, and {limit} the "
                f"largest share allowed ({shown}{more}). "
                f"{f'Correct them, or raise {setting}.' if setting else 'Correct the file.'}"
            )
        warnings.warn(
            f"{self.source}: left out {len(rows)} of {total} rows ({shown}{more}).",
            LeftOut,
            stacklevel=2,
        )


def _lines(numbers: list[int]) -> str:
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    named = ", ".join(map(str, numbers[:SHOWN]))
    return f"line{'s' if len(numbers) > 1 else ''} {named}{more}"


# reading -----------------------------------------------------------------------------------------


def read_jsonl(
    path: str | Path, malformed: Malformed, used: Iterable[str] = ()
) -> tuple[list[Row], int]:
    """The JSON objects of a file with one a line, and how many lines there were, blank ones apart.

    A byte order mark, CRLF line ends and lines of any length are fine; `.gz` is unpacked. A line
    that is no JSON object goes to `malformed`. A `.json` file may be one array of objects instead,
    and a `.parquet` file a table; their rows are numbered from 1. A column of a table whose values
    Python cannot hold is left out with a warning.

    Args:
        used: columns that must not be left out.
    Raises:
        ConfigError: no such file, one that cannot be read, or it holds no rows at all.
    """
    file = existing(path)
    if (form := _format(file)) in (".csv", ".tsv"):
        raise ConfigError(
            f"{file} is not read: {form} is none of .jsonl (one JSON object a line), .json (also "
            "an array of them) and .parquet. pandas makes one of it: pandas.read_csv(…).to_json("
            "'rows.jsonl', orient='records', lines=True)."
        )
    try:
        if form == ".parquet":
            return _from_table(file, used)
        return _from_lines(file, malformed)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{file} cannot be read: {error}. A file that is cut, or no {file.suffix} inside, has "
            "to be made anew."
        ) from error


def _format(file: Path) -> str:
    """The last suffix in lower case, that of packing apart."""
    return Path(file.stem if _packed(file) else file.name).suffix.lower()


def _packed(file: Path) -> bool:
    return file.suffix.lower() == ".gz"


def _opened(file: Path) -> Any:
    return gzip.open(file, "rb") if _packed(file) else file.open("rb")


def _from_table(file: Path, used: Iterable[str]) -> tuple[list[Row], int]:
    import pyarrow
    import pyarrow.parquet

    try:
        with _opened(file) as content:
            table = pyarrow.parquet.ParquetFile(content).read()
    except (pyarrow.ArrowException, ValueError) as error:
        what = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(f"{file} is no readable parquet file: {what}.") from error
    if not (table.num_rows and table.num_columns):
        raise ConfigError(f"{file} has no rows. Give a table with one row an example.")
    return rows_of(table, str(file), used), table.num_rows


def rows_of(table: Any, source: str, used: Iterable[str]) -> list[Row]:
    """The rows of a table of pyarrow, numbered from 1.

    A column whose values Python cannot hold is left out with a warning.

    Args:
        used: columns that must not be left out.
    Raises:
        ConfigError: one of these cannot be held, or a name is there twice.
    """
    import pyarrow

    names = table.schema.names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"{source} has the column {twice[0]!r} twice, so no row has one value of it. Rename "
            "one of them."
        )
    items: list[dict[str, Any]] = [{} for _ in range(table.num_rows)]
    for name, column in zip(names, table.columns, strict=True):
        try:
            values = column.to_pylist()
        except (pyarrow.ArrowException, ValueError, ArithmeticError, LookupError) as error:
            # A time before year 1, an unknown time zone, text that is no UTF-8.
            what = (
                f"the column {name!r} ({column.type!s:.60}), which Python cannot hold "
                f"({type(error).__name__}: {str(error).partition(chr(10))[0]:.80})"
            )
            if name in used:
                raise ConfigError(
                    f"{source} has {what}. Write it as texts or numbers, or name another column in "
                    "data.columns."
                ) from error
            warnings.warn(f"{source}: left out {what}.", LeftOut, stacklevel=2)
            continue
        if "float" in str(column.type):  # neither "double" nor "decimal128"
            values = [_widened(value, column.type) for value in values]
        for item, value in zip(items, values, strict=True):
            item[name] = value
    return list(enumerate(items, 1))


def _widened(value: Any, kind: Any) -> Any:
    """The value with each short float as the double of its shortest decimal.

    As doubles, 3.1 in float32 is 3.0999999046325684: no gold that an answer could match.
    """
    import numpy
    from pyarrow import types

    if value is None:
        return None
    if types.is_float16(kind) or types.is_float32(kind):
        if float(value).is_integer():  # exact as it is; the shortest of 65504 is 65500
            return float(value)
        short = numpy.float16 if types.is_float16(kind) else numpy.float32
        return float(str(short(value)))
    if types.is_struct(kind):
        return {field.name: _widened(value[field.name], field.type) for field in kind}
    if types.is_map(kind):
        return [(_widened(k, kind.key_type), _widened(v, kind.item_type)) for k, v in value]
    if types.is_nested(kind):
        return [_widened(one, kind.value_type) for one in value]
    return value


def _from_lines(file: Path, malformed: Malformed) -> tuple[list[Row], int]:
    rows: list[Row] = []
    total, opened = 0, False
    if _format(file) == ".json":
        with _opened(file) as content:
            whole = content.read().removeprefix(b"\xef\xbb\xbf").lstrip()
        if whole.startswith(b"["):
            return _from_array(file, whole, malformed)
    with _opened(file) as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            total += 1
            text = line.strip()
            opened = text == b"{" if total == 1 else opened
            if (total == 1 and text == b"[") or (
                total == 2 and opened and not text.endswith(b"}")  # else a row that was cut
            ):
                raise ConfigError(
                    f"{file} is one JSON document over many lines, not one object a line. Write "
                    "one object a line, or an array of objects into a file named .json."
                )
            try:
                content = _JSON.decode(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                malformed.add(number, f"not UTF-8 (byte {error.start})")
            except _TwiceError as error:
                malformed.add(number, str(error))
            except (ValueError, RecursionError) as error:
                malformed.add(number, f"not JSON ({str(error)[:60] or type(error).__name__})")
            else:
                if isinstance(content, dict):
                    rows.append((number, content))
                else:
                    malformed.add(number, f"a JSON {type(content).__name__}, not an object")
    if not total:
        raise ConfigError(f"{file} has no rows. Give a file with one JSON object a line.")
    return rows, total


def _from_array(file: Path, whole: bytes, malformed: Malformed) -> tuple[list[Row], int]:
    try:
        items = _JSON.decode(whole.decode("utf-8"))
    except _TwiceError as error:
        raise ConfigError(f"{file} has a row with {error}. Correct it.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} begins as a JSON array but is none: {error}.") from error
    if not items:
        raise ConfigError(f"{file} has no rows. Give an array with one JSON object a row.")
    rows = []
    for number, item in enumerate(items, 1):
        if isinstance(item, dict):
            rows.append((number, item))
        else:
            malformed.add(number, f"a JSON {type(item).__name__}, not an object")
    return rows, len(items)


def expanded(path: str | Path, setting: str) -> Path:
    """The path, user's home expanded.

    Raises:
        ConfigError: one that the system cannot even look up.
    """
    try:
        file = Path(path).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            file.stat()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a zero byte
        what = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"{setting}={str(path)[:60]!r} ({len(str(path))} characters) is no path that this "
            f"system can look up: {what}. Check {setting}."
        ) from error
    return file


def existing(path: str | Path) -> Path:
    """The path, user's home expanded.

    Raises:
        ConfigError: there is no such file, with the nearest names beside it.
    """
    from zoo.instantiate import did_you_mean  # here, not at the top: it imports every group

    file = expanded(path, "data.path")
    if file.is_file():
        return file
    folder = file.parent
    if file.is_dir():
        names = [entry.name for entry in sorted(file.iterdir())][:8]
        raise ConfigError(
            f"{file} is a folder, not a file. Name one of its files: {', '.join(names) or 'none'}."
        )
    if file.exists():
        raise ConfigError(
            f"{file} is no regular file but a device or a pipe, which cannot be read twice. Write "
            "its rows to a file first, and name that."
        )
    if not folder.is_dir():
        raise ConfigError(f"there is no file {file}: its folder {folder} does not exist either.")
    hint = did_you_mean(file.name, [entry.name for entry in folder.iterdir()], f"{folder}/")
    raise ConfigError(f"there is no file {file}.{hint or ' Check data.path.'}")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


class _TwiceError(ValueError):
    """An object of JSON has a key twice, and so no one value of it."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _TwiceError(f"the key {twice!r:.40} twice")
    return made


_JSON = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_once)


# converting --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """How rows become what an algorithm reads; the settings that JSONL files and hub share."""

    kind: Kind
    columns: Mapping[str, str]  # our name → the column's name in the data
    source: str  # for messages and prompt ids
    style: str = "math"
    instruction: str = ""
    chat: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", member("kind", self.kind, Kind))

    def convert(self, rows: Iterable[Row], malformed: Malformed) -> list[Any]:
        """One object a usable row; the others go to `malformed`.

        Raises:
            ConfigError: a required column that no row has.
        """
        rows = list(rows)
        self._check_columns(rows)
        found = []
        best_first = all(self._unmarked(row) for _, row in rows)
        for line, row in rows:
            try:
                if self._unmarked(row) and not best_first:
                    raise _BadRowError("no scores or ranks, which other rows have")
                found.append(self._one(line, row))
            except _BadRowError as error:
                malformed.add(line, str(error))
        return found

    def _check_columns(self, rows: list[Row]) -> None:
        from zoo.instantiate import did_you_mean

        known = REQUIRED[self.kind] + OPTIONAL[self.kind]
        for name in self.columns:
            if name not in known:
                raise ConfigError(
                    f"data.columns.{name} is unknown for kind={self.kind}."
                    f"{did_you_mean(name, known)} It has: {', '.join(known)}."
                )
        present = {key for _, row in rows for key in row}
        required = {name: self.columns.get(name, name) for name in REQUIRED[self.kind]}
        named = {name: self.columns[name] for name in OPTIONAL[self.kind] if name in self.columns}
        if self.kind is Kind.rankings:
            named = {}  # they may lie inside the completions
        if self._dialogues(present) and rows and _is_dialogue(self._value(rows[0][1], "chosen")):
            required.pop("prompt")
        for name, column in (required | named).items():
            if rows and column not in present:
                way_out = f"Set data.columns.{name} to one of them."
                first, told = rows[0][1], self.used() - {self.columns.get("prompt", "prompt")}
                if whole := [k for k in sorted(first) if k not in told and _is_whole(first[k])]:
                    way_out = (
                        f"{whole[0]!r} holds whole dialogues: write all turns but the last as "
                        f"prompt, and the text of the last as {known[1]}."
                    )
                raise ConfigError(
                    f"{self.source} has no column {column!r} for {name}."
                    f"{did_you_mean(column, present)} It has: {', '.join(sorted(present))}. "
                    f"{way_out}"
                )

    def _unmarked(self, row: Mapping[str, Any]) -> bool:
        """Whether a ranking says by no number what is better; an output may where one is mapped."""
        own = self.kind is Kind.rankings and not {"scores", "ranks"} & self.columns.keys()
        return own and row.get("scores") is None and row.get("ranks") is None

    def _dialogues(self, columns: Iterable[str]) -> bool:
        """Whether pairs come without a prompt, which then is how both dialogues begin."""
        return self.kind is Kind.pairs and self.columns.get("prompt", "prompt") not in columns

    def _value(self, row: Mapping[str, Any], name: str) -> Any:
        return row.get(self.columns.get(name, name))

    def _one(self, line: int, row: dict[str, Any]) -> Any:
        if self._dialogues(row):
            row = self._split_dialogues(row)
        prompt = self._prompt(line, row)
        if self.kind is Kind.prompts:
            return prompt
        if self.kind is Kind.examples:
            return Example(prompt, self._text(row, "completion"))
        if self.kind is Kind.pairs:
            better, worse = "chosen", "rejected"
            if self.columns.get("preferred", "preferred") in row or "preferred" in self.columns:
                which = self._value(row, "preferred")
                if isinstance(which, bool) or which not in (1, 2):
                    raise _BadRowError(f"preferred must be 1 or 2, got {which!r:.40}")
                better, worse = (better, worse) if which == 1 else (worse, better)
            chosen = self._text(row, better)
            # To have written nothing at all can be what is rejected.
            rejected = self._text(row, worse, may_be_empty=True)
            if chosen == rejected:
                raise _BadRowError("chosen and rejected are the same")
            margin = self._value(row, "margin")
            if margin is not None:
                margin = _finite(margin, "margin")
                if margin < 0:
                    raise _BadRowError(
                        f"margin must be at least 0, got {margin:g}: it is how much better the "
                        "preferred one is"
                    )
            return PreferencePair(prompt, chosen, rejected, margin=margin)
        if self.kind is Kind.labelled:
            label = self._value(row, "label")
            if not isinstance(label, bool) and label not in (0, 1):
                raise _BadRowError(f"label must be true or false, got {label!r}")
            return LabelledCompletion(prompt, self._text(row, "completion"), bool(label))
        return self._ranking(prompt, row)

    def _prompt(self, line: int, row: Mapping[str, Any]) -> Prompt:
        value = self._value(row, "prompt")
        answer = self._value(row, "answer") if "answer" in OPTIONAL[self.kind] else None
        columns = {k: v for k, v in row.items() if k not in self.used()}
        if answer is not None:
            number = isinstance(answer, int | float | Decimal) and not isinstance(answer, bool)
            if not (number or (isinstance(answer, str) and answer.strip())):
                raise _BadRowError(f"answer must be a text or a number, got {answer!r:.40}")
            if isinstance(answer, float | Decimal) and not math.isfinite(answer):
                raise _BadRowError(f"answer must be finite, got {answer!r:.40}")
            style = row.get("style", self.style)
            if style not in STYLES:
                raise _BadRowError(
                    f"style must be one of {', '.join(STYLES)}, got {style!r:.40} (the row's own "
                    "column style goes before data.style; rename it where it says something else)"
                )
            columns |= {"answer": _plain_number(answer), "style": style}
        elif "answer" in self.columns:
            raise _BadRowError(f"no {self.columns['answer']!r} (answer)")
        for name, kept in columns.items():
            if fault := half_character_within((name, kept)):
                raise _BadRowError(f"{name!r} has {fault}")
        turns: tuple[dict[str, str], ...] = ()
        text: str | None = None
        if isinstance(value, str) and value.strip():
            _check_unicode(value)
            value = f"{value}\n\n{self.instruction}" if self.instruction else value
            turns, text = ((_user(value),), None) if self.chat else ((), value)
        elif isinstance(value, list):
            turns = tuple(_turns(value))
            if self.instruction:
                last = turns[-1]
                turns = (*turns[:-1], _user(f"{last['content']}\n\n{self.instruction}"))
        else:
            raise _BadRowError(
                "no prompt"
                if value is None
                else f"prompt must be a text or turns, got {value!r:.40}"
            )
        # The line, not a column `id`: it is unique.
        return Prompt(f"{self.source}:{line}", messages=turns, text=text, columns=columns)

    def used(self) -> set[str]:
        """The columns that have a meaning for this kind."""
        names = REQUIRED[self.kind] + OPTIONAL[self.kind]
        return {self.columns.get(name, name) for name in names}

    def _text(self, row: Mapping[str, Any], name: str, may_be_empty: bool = False) -> str:
        """A completion; of a whole dialogue that begins with the prompt, the last turn."""
        value = self._value(row, name)
        if isinstance(value, list) and _is_dialogue(value):
            asked = self._value(row, "prompt")
            before = _turns(asked) if isinstance(asked, list) else [_user(str(asked))]
            *begins, last = _dialogue(value, name)
            if begins != before:
                raise _BadRowError(f"{name} has turns before its last that are not the prompt")
            value = last["content"]
        return _reply(value, name, may_be_empty)

    def _split_dialogues(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row with prompt, chosen and rejected apart; the dialogues differ in their last turn."""
        sides = {name: _dialogue(self._value(row, name), name) for name in ("chosen", "rejected")}
        chosen, rejected = sides.values()
        if chosen[:-1] != rejected[:-1]:
            raise _BadRowError("the dialogues differ before their last turn")
        named = {self.columns.get(name, name): side[-1]["content"] for name, side in sides.items()}
        return {**row, **named, self.columns.get("prompt", "prompt"): chosen[:-1]}

    def _ranking(self, prompt: Prompt, row: Mapping[str, Any]) -> Ranking:
        outputs = self._value(row, "completions")
        if not isinstance(outputs, list) or len(outputs) < 2:
            raise _BadRowError("completions must be a list of at least two")
        outputs = [_only_turn(output) for output in outputs]
        texts = tuple(_reply(output, "completions", may_be_empty=True) for output in outputs)
        scores, ranks = (self._marks(row, name, outputs) for name in ("scores", "ranks"))
        if scores is None and ranks is None:
            self._refuse_unnamed_marks(row, outputs)
            ranks = tuple(range(1, len(texts) + 1))  # best first
        values = scores or tuple(len(texts) + 1.0 - rank for rank in ranks or ())
        if len(set(values)) == 1:
            raise _BadRowError(
                f"all {'scores' if scores else 'ranks'} are equal: nothing is preferred"
            )
        for i, j in itertools.permutations(range(len(texts)), 2):
            if values[i] > values[j] and texts[i] == texts[j]:
                raise _BadRowError(
                    f"completions {i + 1} and {j + 1} are the same ({texts[i]!r:.40}) and yet one "
                    "is better"
                )
            if values[i] > values[j] and ranks and ranks[i] > ranks[j]:
                raise _BadRowError(
                    f"completion {i + 1} has a higher score than completion {j + 1} and a worse "
                    "rank"
                )
            if values[i] == values[j] and ranks and ranks[i] != ranks[j]:
                raise _BadRowError(
                    f"completions {min(i, j) + 1} and {max(i, j) + 1} have equal scores and "
                    "unequal ranks"
                )
        return Ranking(prompt, texts, values)

    def _marks(
        self, row: Mapping[str, Any], name: str, outputs: list[Any]
    ) -> tuple[float, ...] | None:
        """The numbers of one of our names, in the row or, where it is mapped, in each output."""
        marks = self._value(row, name)
        if marks is None and name in self.columns:
            inside = self.columns[name]
            if not all(isinstance(output, dict) and inside in output for output in outputs):
                raise _BadRowError(f"no {inside!r} ({name}), neither in the row nor in each output")
            marks = [output[inside] for output in outputs]
        if marks is None:
            return None
        if not isinstance(marks, list) or len(marks) != len(outputs):
            raise _BadRowError(f"{name} must be a list of {len(outputs)} numbers")
        return tuple(_finite(mark, name) for mark in marks)

    def _refuse_unnamed_marks(self, row: Mapping[str, Any], outputs: list[Any]) -> None:
        """A number for each completion under another name may say that they are not best first."""
        found = [name for name in row.keys() - self.used() if _numbers(row[name], len(outputs))]
        beside = [_beside_the_text(output) for output in outputs]
        names = {name for own in beside for name in own}
        found += [n for n in names if _numbers([own.get(n) for own in beside], len(outputs))]
        if found:
            name = min(found)
            raise _BadRowError(
                f"no scores or ranks, but a number for each completion in {name!r}: set "
                f"data.columns.scores={name} (higher is better) or data.columns.ranks={name} (1 is "
                "best), or take it out of the rows where completions are best first"
            )


class _BadRowError(Exception):
    """Why a row cannot be used."""


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _reply(value: Any, name: str, may_be_empty: bool = False) -> str:
    """A completion: a text, {content}, {text}, {value}, or a list that holds one such turn."""
    value = _only_turn(value)
    if isinstance(value, dict):
        value = value.get(_text_key(value))
    if not isinstance(value, str) or not (may_be_empty or value.strip()):
        if value is None:
            raise _BadRowError(f"no {name}")
        raise _BadRowError(f"an empty or unusable {name}, got {value!r:.40}")
    return _check_unicode(value)


def _only_turn(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _text_key(turn: Mapping[str, Any]) -> str | None:
    return next((key for key in TEXT_KEYS if key in turn), None)


def _beside_the_text(output: Any) -> dict[str, Any]:
    """What a completion that is a mapping says of itself."""
    if not isinstance(output, dict):
        return {}
    return {name: value for name, value in output.items() if name != _text_key(output)}


def half_character(text: str) -> str:
    """Where a text has one (a lone surrogate, as JSON can hold), or ""; no tokenizer accepts it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"half a character at position {error.start}"
    return ""


def half_character_within(value: Any) -> str:
    """`half_character` of the first text that has one, in whatever containers it lies."""
    if isinstance(value, str):
        return half_character(value)
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = itertools.chain(value.keys(), value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    return next(filter(None, map(half_character_within, parts)), "")


def _check_unicode(text: str) -> str:
    if fault := half_character(text):
        raise _BadRowError(fault)
    return text


_SPEAKER = re.compile(r"\n\n(Human|Assistant):[ \n]?")  # as in Anthropic's hh-rlhf


def _is_dialogue(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) > 1 and all(isinstance(turn, dict) for turn in value)
    return isinstance(value, str) and len(_SPEAKER.findall(value)) > 1


def _is_whole(value: Any) -> bool:
    """Whether these are turns, the last one the assistant's."""
    if not isinstance(value, list) or not _is_dialogue(value):
        return False
    return _ROLES.get(str(value[-1].get("role", value[-1].get("from")))) == "assistant"


def _dialogue(value: Any, name: str) -> list[dict[str, str]]:
    """Turns of a whole dialogue, the last one the assistant's (it may be empty)."""
    if not _is_dialogue(value):
        raise _BadRowError(f"no prompt, and {name} is no dialogue")
    if isinstance(value, str):
        _, *pieces = _SPEAKER.split(value)
        texts = [text.strip() for text in pieces[1::2]]
        value = [
            {"role": speaker.lower(), "content": text}
            for speaker, text in zip(pieces[::2], texts, strict=True)
        ]
    last = value[-1]
    role, text = str(last.get("role", last.get("from"))), last.get("content", last.get("value"))
    if _ROLES.get(role) != "assistant" or not isinstance(text, str):
        raise _BadRowError(f"{name} must end with a reply of the assistant, not {role!r}")
    return [*_turns(value[:-1]), {"role": "assistant", "content": _check_unicode(text)}]


_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}


def _turns(values: list[Any]) -> list[dict[str, str]]:
    if not values:
        raise _BadRowError("the prompt has no turns")
    turns = [_turn(value) for value in values]
    if turns[-1]["role"] != "user":
        raise _BadRowError(f"the prompt must end with a user's turn, not {turns[-1]['role']!r}")
    return turns


def _turn(value: Any) -> dict[str, str]:
    """{role, content}, or {from, value} as ShareGPT has it."""
    if not isinstance(value, dict):
        raise _BadRowError(f"a turn must be an object, got {value!r:.40}")
    role = _ROLES.get(str(value.get("role", value.get("from"))))
    text = value.get("content", value.get("value"))
    if role is None or not isinstance(text, str) or not text.strip():
        raise _BadRowError(f"a turn needs role and content, got {value!r:.60}")
    return {"role": role, "content": _check_unicode(text)}


TEXT_KEYS = ("content", "text", "value")  # where a completion that is a mapping has its text
UNRATED = ("", "-", "n/a", "na", "nan", "none", "null")  # what stands where a rating is missing


def _numbers(values: Any, count: int) -> bool:
    """Whether these are `count` ratings: numbers, also as texts, of which some may be missing."""
    if not isinstance(values, list) or len(values) != count:
        return False
    there = [v for v in values if v is not None and str(v).strip().lower() not in UNRATED]
    return bool(there) and all(map(_reads_as_number, there))


def _reads_as_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | str):
        return False
    with contextlib.suppress(ValueError, OverflowError):
        return math.isfinite(float(value)) or not isinstance(value, str)
    return not isinstance(value, str)


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise _BadRowError(f"{name} must be numbers, got {value!r:.40}")
    try:
        number = float(value)
    except (OverflowError, ValueError):  # the latter of a signalling NaN of decimals
        number = float("inf")
    if number - number != 0:
        raise _BadRowError(f"{name} must be finite, got {value!r:.40}")
    if abs(number) > LARGEST:
        raise _BadRowError(f"{name} must lie within ±{LARGEST:g}, got {value!r:.40}")
    return number


def _plain_number(value: Any) -> str:
    """Golds are texts; 145.0 is the number 145."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


# whole lists -------------------------------------------------------------------------------------


def content_of(prompt: Prompt) -> str:
    """What a prompt says, for finding the same one twice."""
    if prompt.text is not None:
        return prompt.text
    return "\x1f".join(turn["content"] for turn in prompt.messages)


def reading_of(prompt: Prompt) -> str:
    """`content_of` as a reader has it: characters composed (NFC), any whitespace one space."""
    turns = content_of(prompt).split("\x1f")
    return "\x1f".join(" ".join(unicodedata.normalize("NFC", turn).split()) for turn in turns)


def side_digests(prompts: Sequence[Prompt]) -> list[bytes]:
    """What decides on which side of a split each prompt falls: 8 bytes of a hash of its text.

    Prompts that read alike fall on one side, that of the least of their texts.
    """
    readings = [reading_of(prompt) for prompt in prompts]
    least: dict[str, str] = {}
    for reading, text in zip(readings, map(content_of, prompts), strict=True):
        least[reading] = min(least.get(reading, text), text)
    return [hashlib.blake2b(least[one].encode(), digest_size=8).digest() for one in readings]


def without_overlap(train: list[Prompt], heldout: list[Prompt], source: str) -> list[Prompt]:
    """The training prompts that no reader takes for held-out ones; those left out are said."""
    judged = {reading_of(prompt) for prompt in heldout}
    kept = [prompt for prompt in train if reading_of(prompt) not in judged]
    if len(kept) < len(train):
        warnings.warn(
            f"{source}: {len(train) - len(kept)} of {len(train)} training prompts are also "
            "held-out ones; they are not trained on.",
            LeftOut,
            stacklevel=2,
        )
    if train and not kept:
        raise ConfigError(
            f"{source}: every training prompt is also a held-out one. Give another held-out set."
        )
    return kept


def without_duplicates(items: list[T], key: Callable[[T], str], source: str) -> list[T]:
    """The items without those that say what an earlier one says; what is left out is said.

    A prompt with the answer of an earlier one, where it has any, and another value in another
    column stays: a reward may read that column. Columns that no two rows share, such as numbers of
    rows, tell nothing.
    """
    found: dict[str, tuple[T, set[str]]] = {}  # the first of each, and the columns of all
    kept: list[T] = []
    others, apart = [], []
    telling: set[str] | None = None
    for item in items:
        name = key(item)
        if name not in found:
            found[name] = (item, set())
            kept.append(item)
            continue
        first, seen = found[name]
        if isinstance(item, Prompt) and isinstance(first, Prompt):
            telling = _shared_columns(items) if telling is None else telling
            seen.add(_columns_of(first, telling))
            if told := another_answer(item, first):
                others.append(told)
            elif item.id != first.id and (columns := _columns_of(item, telling)) not in seen:
                seen.add(columns)
                kept.append(item)
                apart.append((item, first))
    if len(kept) < len(items):
        warnings.warn(
            f"{source}: left out {len(items) - len(kept)} rows that repeat an earlier one"
            f"{of_them(others)}.",
            LeftOut,
            stacklevel=2,
        )
    if apart:
        item, first = apart[0]
        name = min(
            name for name in telling or () if item.columns.get(name) != first.columns.get(name)
        )
        warnings.warn(
            f"{source}: {len(apart)} prompts repeat an earlier one and differ from it in another "
            f"column (the first: {item.id} and {first.id} in {name!r}). They are kept, as a reward "
            "may read it; take out those that are the same problem.",
            LeftOut,
            stacklevel=2,
        )
    return kept


def another_answer(prompt: Prompt, first: Prompt) -> str:
    """What two prompts that say the same have for an answer, where it differs; else ""."""
    answer, before = (one.columns.get("answer") for one in (prompt, first))
    same = answer == before
    return "" if same else f"{prompt.id} says {answer!r:.40} and {first.id} {before!r:.40}"


def of_them(others: Sequence[str]) -> str:
    """How many repeats have `another_answer`, and which first, behind what was left out."""
    more = f"; and {len(others) - 3} more" if len(others) > 3 else ""
    named = f", {len(others)} of them with another answer ({'; '.join(others[:3])}{more})"
    return named if others else ""


def _columns_of(prompt: Prompt, names: set[str]) -> str:
    return repr(sorted((k, v) for k, v in prompt.columns.items() if v is not None and k in names))


def _shared_columns(items: Sequence[Any]) -> set[str]:
    """The columns in which some rows have the same value."""
    seen: set[tuple[str, str]] = set()
    shared: set[str] = set()
    for item in items:
        for name, value in item.columns.items():
            if name not in shared:
                told = (name, repr(value))
                shared |= {name} if told in seen else set()
                seen.add(told)
    return shared
