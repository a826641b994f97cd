"""Instructions that a program can check, such as "no commas" or "at least three bullet points".

The ids and their arguments are IFEval's (Zhou et al. 2023, arXiv:2311.07911, Table 1); the checks
are written from their descriptions. Where IFEval's own program is known to accept what the
instruction does not ask for, these do not:

- a keyword is a whole word (`cat` is not in `concatenate`), a bullet has a space after its mark, a
  section mark begins a line, and the sections have different numbers;
- of the options of a constrained response exactly one is given, and JSON is an object or a list;
- what is repeated is followed by an answer, and a postscript says something;
- commas of other scripts are commas.

Every check reads the text a fixed number of times.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from zoo.config import settle_choices
from zoo.rewards.language import written_in
from zoo.types import Completion, Prompt, RewardOutput

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


class Mode(StrEnum):
    all = "all"  # 1 when every instruction is followed, else 0
    share = "share"  # the share of the instructions that are followed


@dataclass(frozen=True)
class Verdict:
    """Whether one instruction is followed, and why (not)."""

    instruction: str
    followed: bool | None  # None: cannot be told
    reason: str


@dataclass(frozen=True)
class Constraints:
    """How far a completion follows the instructions of its prompt.

    Reads the columns `instruction_id_list` and `kwargs` (one mapping of arguments an instruction).
    An empty completion follows nothing. The components hold the verdict on each instruction under
    its id; the reason of the whole is `matched`, or the first id that decided otherwise. An
    instruction that cannot be judged (an unknown id, an argument that is missing, a language that
    cannot be told) leaves the completion unscored, unless mode=all and another one is not followed.

    Raises:
        ValueError: an unknown mode; (when called) a prompt without instructions, or whose lists do
            not match.
    """

    mode: Mode = Mode.all  # all: everything or nothing; share: the share of what is followed
    require_end: bool = False  # True: a completion cut off by the limit follows nothing

    def __post_init__(self) -> None:
        settle_choices(self, "reward")

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        scores: list[float | None] = []
        reasons = []
        each: dict[str, list[float | None]] = {}
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            verdicts = check_instructions(completion.text, *instructions_of(prompt))
            for verdict in verdicts:
                column = each.setdefault(verdict.instruction, [None] * len(prompts))
                # An id may stand twice in one prompt: then both are to be followed.
                same = [v.followed for v in verdicts if v.instruction == verdict.instruction]
                column[row] = None if None in same else float(all(same))
            if self.require_end and completion.truncated:
                scores.append(0.0)
                reasons.append("truncated")
            else:
                score, reason = self._score(verdicts)
                scores.append(score)
                reasons.append(reason)
        components = {"constraints": list(scores), **dict(sorted(each.items()))}
        return RewardOutput(total=scores, components=components, reasons=reasons)

    def _score(self, verdicts: list[Verdict]) -> tuple[float | None, str]:
        failed = next((v.instruction for v in verdicts if v.followed is False), None)
        unknown = next((v for v in verdicts if v.followed is None), None)
        if unknown is not None and (failed is None or self.mode is Mode.share):
            return None, f"unjudged {unknown.instruction}"
        if failed is None:
            return 1.0, "matched"
        followed = sum(bool(v.followed) for v in verdicts)
        return (0.0 if self.mode is Mode.all else followed / len(verdicts)), failed


def instructions_of(prompt: Prompt) -> tuple[list[str], list[Mapping[str, Any]]]:
    """The ids and arguments of a prompt's instructions.

    Raises:
        ValueError: none, or lists of different lengths.
    """
    ids = prompt.columns.get("instruction_id_list")
    kwargs = prompt.columns.get("kwargs")
    if not isinstance(ids, list | tuple) or not ids:
        raise ValueError(
            f"prompt {prompt.id!r} has no instructions in its column `instruction_id_list` (got "
            f"{ids!r:.80}), so none can be checked. Use data=ifeval, or choose another reward."
        )
    if kwargs is None:
        kwargs = [{} for _ in ids]
    if not isinstance(kwargs, list | tuple) or len(kwargs) != len(ids):
        raise ValueError(
            f"prompt {prompt.id!r} has {len(ids)} instructions, and its column `kwargs` must hold "
            f"one mapping for each, got {kwargs!r:.80}. Give {{}} where there are no arguments."
        )
    return [str(name) for name in ids], [dict(one or {}) for one in kwargs]


def check_instructions(
    text: str, ids: Sequence[str], kwargs: Sequence[Mapping[str, Any]]
) -> list[Verdict]:
    """One verdict for each instruction, in their order."""
    return [check_instruction(text, *pair) for pair in zip(ids, kwargs, strict=True)]


def check_instruction(text: str, instruction: str, arguments: Mapping[str, Any]) -> Verdict:
    """Whether a text follows one instruction.

    Args:
        instruction: an id of `CHECKS`; any other one is not judged.
        arguments: as in IFEval's `kwargs`; those that are None count as missing.
    """
    check = CHECKS.get(instruction)
    if check is None:
        from zoo.instantiate import did_you_mean

        hint = did_you_mean(instruction, CHECKS)
        return Verdict(instruction, None, f"unknown instruction {instruction!r}.{hint}")
    if not text.strip():
        return Verdict(instruction, False, "empty")
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        followed, reason = check(text.strip(), given)
    except _MissingError as error:
        return Verdict(instruction, None, str(error))
    return Verdict(instruction, followed, reason)


# arguments ---------------------------------------------------------------------------------------

Found = tuple[bool | None, str]
Arguments = Mapping[str, Any]


class _MissingError(Exception):
    """An argument that a check needs is missing or of another type."""


def _number(arguments: Arguments, name: str) -> int:
    value = arguments.get(name)
    if isinstance(value, float) and value.is_integer():  # tables turn 3 into 3.0
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _MissingError(f"{name} must be a whole number, got {value!r:.40}")
    return value


def _word(arguments: Arguments, name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or not value.strip():
        raise _MissingError(f"{name} must be a text, got {value!r:.40}")
    return value.strip()


def _list(arguments: Arguments, name: str) -> list[str]:
    value = arguments.get(name)
    if not isinstance(value, list | tuple) or not value:
        raise _MissingError(f"{name} must be a list of texts, got {value!r:.40}")
    return [_word({name: one}, name) for one in value]


def _related(count: int, arguments: Arguments, relation: str, number: str, what: str) -> Found:
    """`count` against «at least» or «less than» a number."""
    wanted, how = _number(arguments, number), arguments.get(relation)
    if how == "at least":
        return count >= wanted, f"{count} {what}, wanted at least {wanted}"
    if how in ("less than", "at most"):
        inside = count < wanted if how == "less than" else count <= wanted
        return inside, f"{count} {what}, wanted {how} {wanted}"
    raise _MissingError(f"{relation} must be 'at least' or 'less than', got {how!r:.40}")


# words -------------------------------------------------------------------------------------------


def _inside_word(character: str) -> bool:
    return character.isalnum() or unicodedata.category(character).startswith("M")


def _unspaced(character: str) -> bool:
    """Of a script that writes no spaces between words: any place is a border there."""
    point = ord(character)
    return 0xE00 <= point <= 0xEFF or 0x1000 <= point <= 0x109F or 0x2E80 <= point <= 0x9FFF


def occurrences(text: str, phrase: str) -> int:
    """How often a phrase occurs as whole words, whatever its case and the width of its spaces."""
    text, phrase = (" ".join(part.casefold().split()) for part in (text, phrase))
    found, start = 0, text.find(phrase)
    while start >= 0:
        end = start + len(phrase)
        if _border(text, start) and _border(text, end):
            found += 1
        else:
            end = start + 1
        start = text.find(phrase, end)
    return found


def _border(text: str, place: int) -> bool:
    """Whether no word goes on over a place."""
    if place in (0, len(text)):
        return True
    before, after = text[place - 1], text[place]
    if not (_inside_word(before) and _inside_word(after)):
        return True
    return _unspaced(before) and _unspaced(after)


_DASHES = re.compile("[—–…/]|--+")


def words_of(text: str) -> list[str]:
    """What spaces and dashes separate, where it has a letter or digit: `don't` is one word."""
    words = _DASHES.sub(" ", text).split()
    return [word for word in words if any(map(str.isalnum, word))]


def _existence(text: str, arguments: Arguments) -> Found:
    missing = [word for word in _list(arguments, "keywords") if not occurrences(text, word)]
    return not missing, f"missing: {', '.join(missing)}" if missing else "all there"


def _frequency(text: str, arguments: Arguments) -> Found:
    count = occurrences(text, _word(arguments, "keyword"))
    return _related(count, arguments, "relation", "frequency", "times")


def _forbidden(text: str, arguments: Arguments) -> Found:
    found = [word for word in _list(arguments, "forbidden_words") if occurrences(text, word)]
    return not found, f"found: {', '.join(found)}" if found else "none found"


def _letter_frequency(text: str, arguments: Arguments) -> Found:
    letter = _word(arguments, "letter")
    if len(letter) != 1:
        raise _MissingError(f"letter must be one character, got {letter!r:.40}")
    count = text.lower().count(letter.lower())
    return _related(count, arguments, "let_relation", "let_frequency", "times")


def _language(text: str, arguments: Arguments) -> Found:
    language = _word(arguments, "language")
    found = written_in(text, language)
    verdict = {True: "written in", False: "not written in", None: "cannot tell whether it is"}
    return found, f"{verdict[found]} {language}"


# lengths -----------------------------------------------------------------------------------------

# Where a sentence may end: marks with the brackets and quotes that close behind them. Without the
# look-behind a long row of dots would be read once from each of them.
_END = re.compile(r"(?<![.!?…])[.!?…]+[\"'”’»)\]*_]*(?=\s|$)|[。！？।॥؟۔]+[\"'”’」』)]*")
_WORD = re.compile(r"[^\W_]")
_ABBREVIATIONS = frozenset(
    {"mr", "mrs", "ms", "dr", "prof", "st", "sr", "jr", "gen", "col", "capt", "lt", "sgt", "rev"}
    | {"hon", "mt", "vs", "e.g", "i.e", "cf", "fig", "approx", "dept", "al"}
)


def count_sentences(text: str) -> int:
    """Pieces with a word that end in . ! ? (or their like), and what is left behind the last.

    No end: abbreviations (Dr., e.g.), initials, the number of a list's item, and a mark before a
    small letter in a text that has capital ones.
    """
    has_capitals = text != text.lower()
    count, read, has_word = 0, 0, False
    for match in _END.finditer(text):
        # Each stretch is looked at once, however many marks end nothing.
        has_word = has_word or _WORD.search(text, read, match.end()) is not None
        read = match.end()
        if has_word and not _goes_on(text, match, has_capitals):
            count, has_word = count + 1, False
    return count + (has_word or _WORD.search(text, read) is not None)


def _goes_on(text: str, match: re.Match[str], has_capitals: bool) -> bool:
    """Whether a mark ends no sentence."""
    after = text[match.end() : match.end() + 2].lstrip()
    if has_capitals and after[:1].islower():
        return True
    if match[0] != ".":
        return False
    # Only as far back as an abbreviation may reach: a text without spaces is not read again.
    before = text[max(0, match.start() - 12) : match.start()]
    bare = re.split(r"[\s(\"'“‘*_]", before)[-1]
    if bare.isdigit():  # the number of a list's item stands alone in front of its line
        line = before.rpartition("\n")[2]
        return line.strip() == bare and ("\n" in before or match.start() < 12)
    initial = len(bare) == 1 and bare.isupper() and bare != "I"
    return bare.lower() in _ABBREVIATIONS or initial


def _sentences(text: str, arguments: Arguments) -> Found:
    return _related(count_sentences(text), arguments, "relation", "num_sentences", "sentences")


def _words(text: str, arguments: Arguments) -> Found:
    return _related(len(words_of(text)), arguments, "relation", "num_words", "words")


def _paragraphs(text: str, arguments: Arguments) -> Found:
    """Separated by ***; an empty first or last one does not count, one between is wrong."""
    wanted = _number(arguments, "num_paragraphs")
    parts = [part.strip() for part in re.split(r"(?<!\*)\*{3}(?!\*)", text)]
    parts = parts[1:] if not parts[0] else parts
    parts = parts[:-1] if parts and not parts[-1] else parts
    if not all(parts):
        return False, "an empty paragraph"
    return len(parts) == wanted, f"{len(parts)} paragraphs, wanted {wanted}"


def _first_word(text: str, arguments: Arguments) -> Found:
    """Paragraphs are separated by blank lines here."""
    wanted, nth = _number(arguments, "num_paragraphs"), _number(arguments, "nth_paragraph")
    first = _word(arguments, "first_word").casefold()
    if not 1 <= nth <= wanted:
        raise _MissingError(f"nth_paragraph must lie in 1 … {wanted}, got {nth}")
    parts: list[str] = [""]
    for line in text.splitlines():
        if not line.strip():
            parts.append("")
        elif not parts[-1]:  # its first line is all that is asked about
            parts[-1] = line
    parts = [part for part in parts if part]
    if len(parts) != wanted:
        return False, f"{len(parts)} paragraphs, wanted {wanted}"
    words = words_of(parts[nth - 1])
    found = _stripped(words[0]).casefold() if words else ""
    return found == first, f"paragraph {nth} begins with {found!r:.40}, wanted {first!r}"


def _stripped(word: str) -> str:
    """A word without punctuation around it."""
    start, end = 0, len(word)
    while start < end and not word[start].isalnum():
        start += 1
    while end > start and not _inside_word(word[end - 1]):
        end -= 1
    return word[start:end]


# contents and formats ----------------------------------------------------------------------------

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_BULLET = re.compile(r"^[ \t]*[*+-][ \t]+(?=\S)(.*)$", re.MULTILINE)
_HIGHLIGHT = re.compile(r"(?<!\*)(\*{1,3})(?![\s*])([^\n*]+)(?<!\s)\1")
_TITLE = re.compile(r"<<([^\n<>]+)>>")
_FENCE = re.compile(r"```[a-zA-Z]*\n?")


def _placeholders(text: str, arguments: Arguments) -> Found:
    count = sum(bool(inner.strip()) for inner in _BRACKETS.findall(text))
    wanted = _number(arguments, "num_placeholders")
    return count >= wanted, f"{count} placeholders, wanted at least {wanted}"


def _postscript(text: str, arguments: Arguments) -> Found:
    """The marker as a word of its own, with words after it."""
    marker = _word(arguments, "postscript_marker")
    letters = [letter for letter in marker if letter.isalnum()]
    if not letters:
        raise _MissingError(f"postscript_marker must hold letters, got {marker!r:.40}")
    # «PS» without points is a word of its own only where the marker has none either.
    point = r"\.[ ]?" if "." in marker else ""
    pattern = point.join(map(re.escape, letters)) + r"\b\.?"
    match = re.search(rf"(?<![\w.]){pattern}", text, re.IGNORECASE)
    if match is None:
        return False, f"no {marker}"
    there = any(map(str.isalnum, text[match.end() :]))
    return there, "there" if there else "nothing behind it"


def _bullets(text: str, arguments: Arguments) -> Found:
    lines = [content for content in _BULLET.findall(text) if set(content) - set("*-_+ \t")]
    wanted = _number(arguments, "num_bullets")
    return len(lines) == wanted, f"{len(lines)} bullets, wanted {wanted}"


def _constrained(text: str, arguments: Arguments) -> Found:
    found = [option for option in OPTIONS if option in text]
    return len(found) == 1, f"{len(found)} of the options, wanted one"


def _highlights(text: str, arguments: Arguments) -> Found:
    count = sum(1 for _ in _HIGHLIGHT.finditer(text))
    wanted = _number(arguments, "num_highlights")
    return count >= wanted, f"{count} highlights, wanted at least {wanted}"


def _sections(text: str, arguments: Arguments) -> Found:
    mark, wanted = _word(arguments, "section_spliter"), _number(arguments, "num_sections")
    pattern = rf"^[ \t#*_>]*{re.escape(mark)}[ \t]*(\d+)"
    count = len({number.lstrip("0") for number in re.findall(pattern, text, re.MULTILINE)})
    return count >= wanted, f"{count} sections, wanted at least {wanted}"


def _json(text: str, arguments: Arguments) -> Found:
    """All of it, perhaps inside one fence of Markdown."""
    opening = _FENCE.match(text)
    if opening is not None and text.endswith("```"):
        text = text[opening.end() : -3]
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return False, f"no JSON ({str(error)[:60]})"
    return isinstance(value, dict | list), f"a JSON {type(value).__name__}"


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _title(text: str, arguments: Arguments) -> Found:
    there = any(inner.strip() for inner in _TITLE.findall(text))
    return there, "there" if there else "no <<title>>"


# the whole ---------------------------------------------------------------------------------------

_QUOTES = (('"', '"'), ("“", "”"), ("„", "“"), ("«", "»"), ("「", "」"))
_COMMAS = ",，،、"


def _two_responses(text: str, arguments: Arguments) -> Found:
    parts = [part.strip() for part in re.split(r"(?<!\*)\*{6}(?!\*)", text)]
    parts = [part for i, part in enumerate(parts) if part or 0 < i < len(parts) - 1]
    if len(parts) != 2 or not all(parts):
        return False, f"{len(parts)} responses, wanted 2"
    return parts[0] != parts[1], "two responses" if parts[0] != parts[1] else "the same one twice"


def _repeat(text: str, arguments: Arguments) -> Found:
    text, prompt = (
        " ".join(part.casefold().split()) for part in (text, _word(arguments, "prompt_to_repeat"))
    )
    if not text.startswith(prompt):
        return False, "not repeated first"
    there = any(map(str.isalnum, text[len(prompt) :]))
    return there, "repeated" if there else "no answer behind it"


def _end(text: str, arguments: Arguments) -> Found:
    """Spaces, quotes and emphasis behind the phrase do not matter."""
    phrase = " ".join(_word(arguments, "end_phrase").strip('"').casefold().split())
    # Only the end is looked at: spaces are not counted over the whole text.
    tail = " ".join(text.rstrip("\"'”’»*_ \t\r\n").casefold()[-4 * len(phrase) - 64 :].split())
    phrase = phrase.rstrip("\"'”’»*_ ")
    if not phrase:
        raise _MissingError("end_phrase must hold more than quotation marks")
    place = len(tail) - len(phrase)
    ends = tail.endswith(phrase) and _border(tail, place)
    return ends, "there" if ends else "ends otherwise"


def _quotation(text: str, arguments: Arguments) -> Found:
    wrapped = any(
        len(text) > 2 and text.startswith(left) and text.endswith(right) and text[1:-1].strip()
        for left, right in _QUOTES
    )
    return wrapped, "wrapped" if wrapped else "not wrapped in quotation marks"


def _capital_words(text: str, arguments: Arguments) -> Found:
    count = sum(map(str.isupper, words_of(text)))
    return _related(count, arguments, "capital_relation", "capital_frequency", "capital words")


def _capital(text: str, arguments: Arguments) -> Found:
    return _cased(text, text.isupper(), "capitals")


def _lowercase(text: str, arguments: Arguments) -> Found:
    return _cased(text, text.islower(), "small letters")


def _cased(text: str, kept: bool, what: str) -> Found:
    if not kept:
        return False, f"not all in {what}"
    # A short text in nobody's words may be English: only what surely is not is refused.
    if written_in(text, "en") is False:
        return False, "not English"
    return True, f"all in {what}"


def _no_comma(text: str, arguments: Arguments) -> Found:
    count = sum(map(text.count, _COMMAS))
    return not count, f"{count} commas"


CHECKS: dict[str, Callable[[str, Arguments], Found]] = {
    "keywords:existence": _existence,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _language,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": _words,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat,
    "startend:end_checker": _end,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": _capital,
    "change_case:english_lowercase": _lowercase,
    "punctuation:no_comma": _no_comma,
}
