"""A reward that pays for short completions that stop by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.types import Completion, Prompt, RewardOutput


@dataclass(frozen=True)
class Brief:
    tokens: int = 8  # completions up to this long are paid in full, twice as long nothing

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"reward.tokens must be at least 1, got {self.tokens}. Try 8.")

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        scores: list[float | None] = [
            min(max(2 - len(c.token_ids) / self.tokens, 0.0), 1.0) * (not c.truncated)
            for c in completions
        ]
        return RewardOutput(scores, {"brief": list(scores)}, ["" for _ in completions])
