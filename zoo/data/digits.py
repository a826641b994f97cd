"""One-digit arithmetic in plain words: what a small chat model can learn in minutes on a CPU."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from zoo.data.plain_texts import PLAIN_TEXTS
from zoo.rewards.verifiable import LastNumber
from zoo.types import EvaluationSet, Prompt, Reward

_WORDS = {"+": "plus", "-": "minus", "*": "times"}
Sum = tuple[str, int, int]  # operation, left, right


@dataclass(frozen=True)
class Digits:
    """ "What is 3 + 4?" for all operands up to `largest`; right is the last number of a reply that
    ended by itself.

    Held out are whole unordered pairs: where 3 + 4 is held out, so is 4 + 3. The independent set
    asks for the held-out pairs in words. Differences are never negative.

    Raises:
        ValueError: a setting out of range.
    """

    operations: str = "+"  # any of + - *, for example "+*"
    smallest: int = 1  # operand
    largest: int = 9  # operand
    heldout: float = 0.4  # share of the unordered pairs that is held out
    system: str | None = None  # a system turn in front; null: the template's own default
    suffix: str = ""  # added to every question, for example " Answer briefly."
    max_new_tokens: int = 24  # an answer is a short sentence

    def __post_init__(self) -> None:
        if not self.operations or not set(self.operations) <= set(_WORDS):
            raise ValueError(
                f"data.operations must be some of + - *, got {self.operations!r}. "
                "Try data.operations='+'."
            )
        if not 0 <= self.smallest < self.largest <= 999:
            raise ValueError(
                f"data.smallest and data.largest must satisfy 0 ≤ smallest < largest ≤ 999, got "
                f"{self.smallest} and {self.largest}. Try data.smallest=1 data.largest=9."
            )
        if not 0.0 < self.heldout < 1.0:
            raise ValueError(
                f"data.heldout must lie between 0 and 1, got {self.heldout}: both sides need "
                "problems. Try data.heldout=0.4."
            )
        if self.max_new_tokens < 1:
            raise ValueError(
                f"data.max_new_tokens must be at least 1, got {self.max_new_tokens}: the model "
                "could write nothing. Try data.max_new_tokens=24."
            )

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({"prompts"})

    def prompts(self) -> list[Prompt]:
        return [self._prompt(problem, words=False) for problem in self._sides()[0]]

    def verifier(self) -> Reward:
        return LastNumber(require_end=True)

    def evaluation_sets(self) -> list[EvaluationSet]:
        heldout = self._sides()[1]
        symbols, words = (
            tuple(self._prompt(problem, words) for problem in heldout) for words in (False, True)
        )
        return [
            EvaluationSet("heldout", "accuracy", symbols, self.verifier()),
            EvaluationSet("independent", "accuracy", words, self.verifier()),
            EvaluationSet("guard", "perplexity", texts=PLAIN_TEXTS),
        ]

    def _sides(self) -> tuple[list[Sum], list[Sum]]:
        """Training and held-out problems; both sides are in one fixed, mixed order."""
        train: list[Sum] = []
        heldout: list[Sum] = []
        for operation in self.operations:
            numbers = range(self.smallest, self.largest + 1)
            pairs = sorted(
                ((a, b) for a in numbers for b in numbers if a <= b),
                key=lambda pair: _order(operation, *pair),
            )
            cut = min(max(round(self.heldout * len(pairs)), 1), len(pairs) - 1)
            for index, (a, b) in enumerate(pairs):
                side = heldout if index < cut else train
                side.append((operation, b, a))
                if operation != "-" and a != b:
                    side.append((operation, a, b))
        return tuple(  # type: ignore[return-value]
            sorted(dict.fromkeys(side), key=lambda problem: _order(*problem))
            for side in (train, heldout)
        )

    def _prompt(self, problem: Sum, words: bool) -> Prompt:
        operation, left, right = problem
        value = {"+": left + right, "-": left - right, "*": left * right}[operation]
        sign = _WORDS[operation] if words else operation
        question = f"What is {left} {sign} {right}?{self.suffix}"
        turns = [] if self.system is None else [{"role": "system", "content": self.system}]
        return Prompt(
            id=f"digits/{left}{sign}{right}",
            messages=(*turns, {"role": "user", "content": question}),
            columns={"answer": str(value)},
        )


def _order(operation: str, left: int, right: int) -> bytes:
    text = f"{left}{operation}{right}"
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
