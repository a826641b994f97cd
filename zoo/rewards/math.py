"""The math verifier: is the answer of a completion the gold answer, and if not, why.

    from zoo.rewards.math import verify
    verify("So it is $\\\\boxed{\\\\frac12}$.", "0.5")   # Verdict(score=1.0,
    reason=Reason.MATCHED, …)

An answer is found (`extract`), read (`answer`) and compared exactly (`compare`, `evaluate`). Only
what this reader does not understand is shown to math-verify, in a worker process with a deadline
(`pool`). Nothing is executed, no signal or timer is set, and no input raises.
"""

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from zoo.rewards.answer import MAX_CHARACTERS, Parsed, Scalar, parse_answer
from zoo.rewards.compare import is_several, same_answer
from zoo.rewards.evaluate import has_symbols
from zoo.rewards.expression import FORMULA_COMMANDS
from zoo.rewards.extract import extract, last_box

logger = logging.getLogger(__name__)

STYLES = ("math", "gsm8k")


class Reason(StrEnum):
    """Why a verdict is what it is; the value goes to `rollouts.jsonl` and the curves."""

    MATCHED = "matched"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    SEVERAL_ANSWERS = "several_answers"
    TRUNCATED = "truncated"
    TIMEOUT = "timeout"
    UNPARSED_GOLD = "unparsed_gold"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One judgement.

    Attributes:
        score: 1.0 for a right answer, else 0.0.
        reason: see `Reason`; MATCHED exactly when the score is 1.
        answer: the text that was judged, None if there was none.
        source: where it was read: "boxed", "hash", "tag", "phrase", "whole", or "" without an
        answer. second_opinion: math-verify was asked.
    """

    score: float
    reason: Reason
    answer: str | None = None
    source: str = ""
    second_opinion: bool = False


def verify(
    completion: str,
    gold: str,
    style: str = "math",
    *,
    truncated: bool = False,
    second_opinion: bool = True,
    deadline_seconds: float = 0.7,
) -> Verdict:
    """Judge a completion against a gold answer: exact, deterministic, bounded in time and memory.

    The last complete `\\\\boxed{}` counts, else what follows the last `####`, else the last
    `<answer>` tag, else "answer is", else a completion that is nothing but an answer (`extract`).
    Equality is by value and exact: no relative tolerance. Several alternatives for a gold with one
    value are wrong.

    Args:
        completion: what the model wrote; any length.
        gold: the reference answer, bare, in a `\\\\boxed{}`, or a GSM8K solution ending in `####
        …`. style: "math", or "gsm8k", under which (and for any answer behind `####`) an answer's
        percent sign is ignored,
            because GSM8K's golds drop it.
        truncated: the completion was cut off. Without an answer, or with one that ends where the
        text ends and is
            not in a box, the verdict is TRUNCATED.
        second_opinion: ask math-verify, if it is installed, about answers this module cannot read.
        deadline_seconds: how long that may take; then the verdict is TIMEOUT.
    Returns:
        the verdict; never an exception for any text.
    Raises:
        ValueError: an unknown style.
    """
    if style not in STYLES:
        raise ValueError(f"style must be one of {', '.join(STYLES)}, got {style!r}.")
    found = extract(completion, style)
    if found is None or not found.text:
        return Verdict(0.0, Reason.TRUNCATED if truncated else Reason.NO_ANSWER)
    if truncated and found.at_end:
        return Verdict(0.0, Reason.TRUNCATED, found.text[:MAX_CHARACTERS], found.source)
    loose = style == "gsm8k" or found.source == "hash"
    reason, asked = _judge(found.text, gold, loose, second_opinion, deadline_seconds)
    return Verdict(
        float(reason is Reason.MATCHED), reason, found.text[:MAX_CHARACTERS], found.source, asked
    )


def check_gold(gold: str, style: str = "math") -> str | None:
    """Why a gold does not verify against itself, bare after `####` and in a box; None if it does.

    Call it when data is loaded: a gold that fails scores every answer wrong, and the curve blames
    the model.

    Args:
        gold: the reference answer, as given to `verify`.
        style: as in `verify`.
    Returns:
        None, or a reason with what was read.
    """
    answer = _gold_text(gold)
    for completion in (f"The answer is $\\boxed{{{answer}}}$.", f"#### {answer}"):
        verdict = verify(completion, gold, style)
        if verdict.score != 1.0:
            return f"{verdict.reason.value}: read as {verdict.answer!r:.60}"
    return None


def check_golds(golds: Iterable[str], style: str = "math") -> int:
    """Raise for the first gold that `check_gold` refuses.

    Returns:
        how many golds there were.
    Raises:
        ValueError: with the row (counted from 0), the gold and the reason.
    """
    count = 0
    for row, gold in enumerate(golds):
        reason = check_gold(gold, style)
        if reason is not None:
            raise ValueError(
                f"The gold in row {row} does not verify against itself: {gold[:200]!r} ({reason}). "
                "Correct the row or drop it."
            )
        count = row + 1
    return count


def _judge(
    text: str, gold: str, loose: bool, ask: bool, deadline_seconds: float
) -> tuple[Reason, bool]:
    quick = _quick_numbers(text, gold)
    if quick is not None:
        return (Reason.MATCHED if quick else Reason.WRONG), False
    reason = _judge_exactly(text, gold, loose)
    if reason is not None:
        return reason, False
    if not ask or _is_plain_number(gold) or not worth_asking(text, _gold_text(gold)):
        return Reason.WRONG, False
    from zoo.rewards.pool import second_opinion

    answer = second_opinion(_gold_text(gold), text, deadline_seconds)
    if answer is None:
        return Reason.TIMEOUT, True
    return (Reason.MATCHED if answer else Reason.WRONG), True


def _is_plain_number(gold: str) -> bool:
    """A number: what cannot be read as one is not worth a second opinion."""
    parsed = _parsed_gold(gold)
    answer = None if parsed is None else parsed.answer
    return isinstance(answer, Scalar) and not has_symbols(answer.node)


def _quick_numbers(text: str, gold: str) -> bool | None:
    """Whole numbers on both sides: most of GSM8K, decided without reading anything."""
    if len(text) > 30 or len(gold) > 30:
        return None
    answer, wanted = text.lstrip("-"), gold.lstrip("-")
    if not (answer.isdigit() and wanted.isdigit() and answer.isascii() and wanted.isascii()):
        return None
    if len(text) - len(answer) > 1 or len(gold) - len(wanted) > 1:
        return None
    return int(text) == int(gold)


@lru_cache(maxsize=16384)
def _judge_exactly(text: str, gold: str, loose: bool) -> Reason | None:
    wanted = _parsed_gold(gold)
    if wanted is None:
        return Reason.UNPARSED_GOLD
    if len(text) > MAX_CHARACTERS:
        return Reason.MATCHED if text == wanted.text else Reason.WRONG
    answer = parse_answer(text)
    if not answer.text:
        return Reason.NO_ANSWER
    try:
        same = same_answer(wanted, answer, ignore_percent=loose)
    except RecursionError:
        # The caller's stack was nearly full: our own depth is capped.
        return Reason.WRONG
    if same:
        return Reason.MATCHED
    if same is None:
        return None
    return Reason.SEVERAL_ANSWERS if is_several(wanted.answer, answer.answer) else Reason.WRONG


@lru_cache(maxsize=16384)
def _gold_text(gold: str) -> str:
    text = gold.strip()
    if "####" in text:
        text = text[text.rfind("####") + 4 :].strip()
    if "boxed" in text or "fbox" in text:
        box = last_box(text)
        if box is not None:
            text = box.strip()
    return text


@lru_cache(maxsize=16384)
def _parsed_gold(gold: str) -> Parsed | None:
    text = _gold_text(gold)
    if not text or len(text) > MAX_CHARACTERS:
        return None
    parsed = parse_answer(text)
    return (
        parsed
        if parsed.text and any(mark.isalnum() or mark == "\\" for mark in parsed.text)
        else None
    )


_COMMAND = re.compile(r"\\[A-Za-z]+")
# Words, code, long numbers and powers of powers are nothing to show to a computer algebra system.
_REFUSED = re.compile(
    r"[A-Za-z]{3,}|\d{7,}|__|[\"'`#@?~!]|\\(?![A-Za-z{}|,;:! ])"
    r"|\^\s*\{?[^{}]*\^|\^\s*\{?\s*-?\d{3,}"
)
_KNOWN = (FORMULA_COMMANDS - {"pm", "mp", "binom", "dbinom", "tbinom", "boxed", "fbox"}) | {
    "partial", "nabla", "forall", "exists", "substack", "pmod", "bmod", "cases", "aligned",
    "otimes", "oplus", "dagger", "underbrace", "overbrace", "mathrm",
}  # fmt: skip
_HEAVY = frozenset(("int", "sum", "prod", "lim", "oint", "iint", "iiint"))
_ASK_LIMIT = 200


def worth_asking(answer: str, gold: str) -> bool:
    """Whether math-verify could know better: short formulas, no words, no towers, nothing it must
    evaluate at length.

    A sum, integral or limit is only shown to it when the gold has one too: an unevaluated integral
    for a plain number is work for minutes.
    """
    names = []
    for text in (answer, gold):
        bare = _COMMAND.sub(" ", text)
        if (
            len(text) > _ASK_LIMIT
            or text.count("^") > 4
            or text.count("{") > 30
            or not text.isascii()
            or not _is_balanced(text)
        ):
            return False
        if _REFUSED.search(bare) or not any(mark.isalnum() for mark in bare):
            return False
        names.append({command[1:] for command in _COMMAND.findall(text)})
    if not names[0] or not names[0] | names[1] <= _KNOWN:
        return False
    return not names[0] & _HEAVY - names[1]


def _is_balanced(text: str) -> bool:
    """As many brackets open as close; `[0,1)` is balanced."""
    openings = sum(text.count(mark) for mark in ("(", "[", "{", "\\lfloor", "\\lceil"))
    return openings == sum(text.count(mark) for mark in (")", "]", "}", "\\rfloor", "\\rceil"))
