"""A control: a reward that knows nothing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from zoo.types import Completion, Prompt, RewardOutput


@dataclass(frozen=True)
class Random:
    """1 with probability `p`, 0 otherwise, whatever the completion says.

    The draw is a hash of seed, prompt and tokens: the same completion always gets the same reward,
    in every process and after every resume, and rightness plays no part in it.

    Raises:
        ValueError: p outside [0, 1].
    """

    p: float = 0.5  # share of completions that get 1; 0.5 gives the groups the largest spread
    seed: int = 0  # another seed pays other completions

    def __post_init__(self) -> None:
        if not 0.0 <= self.p <= 1.0:
            raise ValueError(
                f"reward.p must lie in [0, 1], got {self.p}: it is a probability. Try reward.p=0.5."
            )

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        scores: list[float | None] = [
            float(self._draw(prompt, completion) < self.p)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        return RewardOutput(total=scores, components={"random": list(scores)})

    def _draw(self, prompt: Prompt, completion: Completion) -> float:
        tokens = ",".join(map(str, completion.token_ids))
        content = f"{self.seed}\x1f{prompt.id}\x1f{tokens}\x1f{completion.text}"
        digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64
