"""Rewards for how an answer is given, not for what it says. Each is one named component."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import torch

from zoo.config import member, settle_choices
from zoo.functional.rewards import overlong_penalty
from zoo.rewards.extract import extract
from zoo.types import Completion, Prompt, RewardOutput

# Special tokens that a decoder left in the text, at its end.
_TRAILING = re.compile(r"(?:\s*(?:<\|[^<>|\s]{1,40}\|>|</s>|<eos>|<pad>|<end_of_turn>))+\s*$")
_NUMBER = re.compile(r"[-+−]?[$€£]?\d[\d,]{0,40}(?:\.\d{1,40})?(?:/\d{1,40})?%?")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class Rule(StrEnum):
    hash = "hash"  # exactly one `#### number`
    boxed = "boxed"  # exactly one complete \boxed{…}, not empty
    think = "think"  # <think>…</think> first, then the rest
    think_answer = "think_answer"  # <think>…</think> and then <answer>…</answer>, nothing else
    regex = "regex"  # the whole text matches `pattern`


@dataclass(frozen=True)
class Ended:
    """1 when the model stopped by itself, 0 when the length limit cut it off."""

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        return _output("ended", [float(not c.truncated) for c in completions])


@dataclass(frozen=True)
class NumberInPlace:
    """1 when a number stands where the answer belongs, whatever its value.

    The place is the one that the verifier reads: the last box, else after the last `####`, else
    after "answer is". A number elsewhere, such as a step of the working, earns nothing.
    """

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        return _output("number_in_place", [float(number_in_place(c.text)) for c in completions])


@dataclass(frozen=True)
class Format:
    r"""1 when the text keeps to a format, 0 otherwise; special tokens at its end do not matter.

    A tag that is missing is not a tag that is empty: an empty thought is accepted, a missing one
    is not, and an answer must hold something.

    Raises:
        ValueError: an unknown rule, a pattern without rule=regex, rule=regex without one, or an
            invalid one.
    """

    rule: Rule = Rule.hash
    pattern: str | None = None  # for rule=regex; `.` matches line breaks as well

    def __post_init__(self) -> None:
        settle_choices(self, "reward")
        if (self.rule is Rule.regex) != (self.pattern is not None):
            raise ValueError(
                f"reward.pattern goes with rule=regex, got rule={self.rule} and pattern="
                f"{self.pattern!r}. Set both, or neither."
            )
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(
                    f"reward.pattern={self.pattern!r} is no regular expression: {error}. "
                    "Correct it; special characters need a backslash."
                ) from error

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        scores = [float(keeps_format(c.text, self.rule, self.pattern)) for c in completions]
        return _output("format", scores)


@dataclass(frozen=True)
class LengthPenalty:
    """DAPO's soft punishment of long completions, between −1 and 0; length is in tokens.

        0                                    L ≤ max_length − cache
        ((max_length − cache) − L)/cache     up to max_length
        −1                                   beyond

    Source: Yu et al. 2025, arXiv:2503.14476, Eq. 13.

    Raises:
        ValueError: a cache outside 1 … max_length.
    """

    max_length: int = 256  # tokens of a completion, the stop token included
    cache: int = 64  # the last so many tokens cost more and more

    penalty: ClassVar[bool] = True  # at most 0: a negative weight would pay for length

    def __post_init__(self) -> None:
        if not 1 <= self.cache <= self.max_length:
            raise ValueError(
                f"reward.cache must lie in 1 … max_length={self.max_length}, got {self.cache}: the "
                "penalty grows over the last `cache` tokens. "
                f"Try reward.cache={max(1, self.max_length // 4)}."
            )

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.long)
        penalties = overlong_penalty(lengths, self.max_length, self.cache).tolist()
        assert all(value <= 0 for value in penalties)
        return _output("length_penalty", penalties)


@dataclass(frozen=True)
class MissingEnd:
    """Minus `size` for a completion that did not stop by itself, 0 for one that did.

    It stopped if the sampler met one of the policy's stop tokens in the completion; what the prompt
    holds excuses nothing.
    Source: the EOS trick of Huang et al. 2024, arXiv:2403.17031, which replaces the score instead.

    Raises:
        ValueError: a negative penalty.
    """

    size: float = 1.0  # it is subtracted

    penalty: ClassVar[bool] = True  # at most 0: a negative weight would pay for not ending

    def __post_init__(self) -> None:
        if not 0 <= self.size < float("inf"):
            raise ValueError(
                f"reward.size must be at least 0 and finite, got {self.size}: it is subtracted. "
                "Try reward.size=1.0."
            )

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        return _output("missing_end", [-self.size if c.truncated else 0.0 for c in completions])


def number_in_place(text: str) -> bool:
    found = extract(text)
    if found is None:
        return False
    words = found.text.strip(" *_`$()\\.").replace("\\$", "$").split()
    # A unit of a word or two may follow: "12 red apples".
    return bool(words) and len(words) <= 4 and _NUMBER.fullmatch(words[0].rstrip(".,")) is not None


def keeps_format(text: str, rule: Rule | str, pattern: str | None = None) -> bool:
    rule = member("rule", rule, Rule)
    text = _TRAILING.sub("", text).strip()
    if rule is Rule.regex:
        assert pattern is not None
        return re.fullmatch(pattern, text, re.DOTALL) is not None
    if rule is Rule.hash:
        _, marker, rest = text.rpartition("####")
        once = bool(marker) and text.count("####") == 1
        return once and _NUMBER.fullmatch(rest.strip()) is not None
    if rule is Rule.boxed:
        found = extract(text)
        once = text.count("\\boxed") + text.count("\\fbox") == 1
        return once and found is not None and found.source == "boxed" and bool(found.text)
    return _keeps_tags(text, _TAGS if rule is Rule.think_answer else _TAGS[:2])


def _keeps_tags(text: str, tags: tuple[str, ...]) -> bool:
    """Each tag once, in order, the first at the start; the thought may be empty, the answer not."""
    if any(text.count(tag) != 1 for tag in tags):
        return False
    places = [text.index(tag) for tag in tags]
    if places != sorted(places) or places[0] != 0:
        return False
    ends = [place + len(tag) for place, tag in zip(places, tags, strict=True)]
    after = text[ends[-1] :].strip()
    if len(tags) == 2:
        return bool(after)
    between, answer = text[ends[1] : places[2]].strip(), text[ends[2] : places[3]].strip()
    return not between and bool(answer) and not after


def _output(name: str, scores: list[float]) -> RewardOutput:
    return RewardOutput(total=list(scores), components={name: list(scores)})
