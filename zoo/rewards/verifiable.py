"""Right or wrong: a completion's answer against the gold answer of its prompt."""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Number

from zoo.rewards.math import STYLES, Reason, verify
from zoo.types import Completion, Prompt, RewardOutput

# At most 40 digits before and after the point: longer ones are nobody's answer here.
_NUMBER = re.compile(r"(?<![\d.,])(-?)\$?(\d{1,3}(?:,\d{3}){1,12}|\d{1,40})(?:\.(\d{1,40}))?(?!\d)")


@dataclass(frozen=True)
class Verifier:
    """1.0 for a right answer and 0.0 otherwise, with the reason.

    Reads the column `answer` (the gold) of a prompt and, unless `style` is set, its column `style`.
    The reason (matched, wrong, no_answer, truncated, …) is the verdict's own: a truncated
    completion and a wrong one are different things. A gold that the verifier cannot read makes the
    row impossible to score, which is not 0.

    Raises:
        ValueError: an unknown style, or (when called) a prompt without a gold answer.
    """

    style: str | None = None  # gsm8k, math, …; null: the prompt's column `style`, else math
    require_end: bool = False  # True: a right answer counts only when the model stopped by itself

    def __post_init__(self) -> None:
        if self.style is not None and self.style not in STYLES:
            raise ValueError(
                f"reward.style must be null or one of {', '.join(STYLES)}, got {self.style!r}. "
                "Try reward.style=null, which reads each prompt's own."
            )

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        scores: list[float | None] = []
        reasons = []
        for prompt, completion in zip(prompts, completions, strict=True):
            gold = gold_answer(prompt)
            style = self.style or prompt.columns.get("style") or "math"
            verdict = verify(completion.text, gold, style, truncated=completion.truncated)
            if verdict.reason is Reason.UNPARSED_GOLD:
                scores.append(None)
                reasons.append(str(verdict.reason))
            elif completion.truncated and (self.require_end or not verdict.score):
                scores.append(0.0)
                reasons.append(str(Reason.TRUNCATED))
            else:
                scores.append(float(verdict.score))
                reasons.append(str(verdict.reason))
        return RewardOutput(total=scores, components={"verifier": list(scores)}, reasons=reasons)


@dataclass(frozen=True)
class LastNumber:
    """1.0 when the last number of a completion equals the gold and the model stopped by itself.

    For models that were never taught an answer format. Exact on integers and decimals with
    thousands separators: `1,234.50` equals 1234.5.
    """

    require_end: bool = True  # False: a completion cut off by the limit may count as well

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        scores: list[float | None] = []
        reasons = []
        for prompt, completion in zip(prompts, completions, strict=True):
            gold = last_number(gold_answer(prompt))
            found = last_number(completion.text)
            right = found is not None and found == gold
            if completion.truncated and (self.require_end or not right):
                reason = "truncated"
            elif found is None:
                reason = "no_answer"
            else:
                reason = "matched" if right else "wrong"
            scores.append(float(reason == "matched"))
            reasons.append(reason)
        return RewardOutput(total=scores, components={"verifier": list(scores)}, reasons=reasons)


def gold_answer(prompt: Prompt) -> str:
    """The gold of a prompt; an empty one is missing, lest an empty answer equal it."""
    gold = prompt.columns.get("answer")
    if gold is None or not str(gold).strip():
        raise ValueError(
            f"prompt {prompt.id!r} has no gold in its column `answer` (got {gold!r}), so nothing "
            "can be verified. Give its data a gold answer, or choose another reward."
        )
    if isinstance(gold, bool) or not isinstance(gold, str | Number):
        raise ValueError(
            f"prompt {prompt.id!r}: its gold in the column `answer` must be a text or a number, "
            f"got {gold!r:.40}. Write it as an answer would stand there, or choose another reward."
        )
    return str(gold)


def last_number(text: str) -> tuple[str, str, str] | None:
    """The last number of a text as (sign, whole part, decimals), normalised; None without one."""
    last = None
    for match in _NUMBER.finditer(text.replace("−", "-")):
        # "7-5" is no minus five: a sign belongs to a number only where nothing stands before it.
        before = text[match.start() - 1 : match.start()] if match.start() else ""
        last = ("" if before.isalnum() or before == ")" else match[1]), match[2], match[3]
    if last is None:
        return None
    sign, whole, decimals = last[0], last[1].replace(",", "").lstrip("0"), last[2] or ""
    decimals = decimals.rstrip("0")
    return (sign if whole or decimals else "", whole or "0", decimals)
