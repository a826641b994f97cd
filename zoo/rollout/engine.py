"""What an engine is: token ids in, completions with log-probs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from zoo.types import Completion


@dataclass(frozen=True)
class Sampling:
    """How to sample. There is no top-p or top-k: they renormalise what the trainer does not."""

    temperature: float = 1.0  # 0: argmax
    max_new_tokens: int = 40  # a limit of new tokens; the prompt does not count
    stop_token_ids: tuple[int, ...] = ()
    seed: tuple[int | str, ...] = (0,)  # with the prompt's key, fixes every draw


class Engine(Protocol):
    """Samples completions of the policy's current weights."""

    def generate(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[str], n: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """`n` completions of each prompt, in order; draws depend on (seed, key, sample) alone."""
        ...

    def sync(self, policy: Any) -> None:
        """Take over the policy's weights; cheap where they are shared."""
        ...
