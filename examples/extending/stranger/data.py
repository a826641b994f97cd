"""Prompts that ask to repeat a number; right is the number itself."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.rewards.verifiable import Verifier
from zoo.types import EvaluationSet, Prompt, Reward


@dataclass(frozen=True)
class Echo:
    n_problems: int = 80  # training prompts: the numbers from 10 on
    n_heldout: int = 10  # evaluation prompts: the numbers after those
    max_new_tokens: int = 12

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({"prompts"})

    def prompts(self) -> list[Prompt]:
        return [self._prompt(n) for n in range(10, 10 + self.n_problems)]

    def verifier(self) -> Reward:
        return Verifier(style="gsm8k")

    def evaluation_sets(self) -> list[EvaluationSet]:
        first = 10 + self.n_problems
        heldout = tuple(self._prompt(n) for n in range(first, first + self.n_heldout))
        return [EvaluationSet("heldout", "accuracy", heldout, self.verifier())]

    def _prompt(self, number: int) -> Prompt:
        turn = {"role": "user", "content": f"Repeat after ####: {number}"}
        return Prompt(id=f"echo/{number}", messages=(turn,), columns={"answer": str(number)})
