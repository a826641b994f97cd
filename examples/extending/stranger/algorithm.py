"""Policy gradient with the best of the group as the baseline.

    A_i = r_i − max_j r_j ≤ 0,   L = −average_t A_i log π(y_t)

Only completions that are worse than their group's best are pushed down. A made-up example.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from einops import rearrange, reduce

from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.algorithms.common import over_tokens
from zoo.batch import Batch
from zoo.functional import Average, aggregate, masked_sum
from zoo.models.models import Models


@dataclass(frozen=True)
class BestOfGroup(Algorithm):
    average: Average = Average.token

    name: ClassVar[str] = "best_of_group"

    @property
    def needs(self) -> Needs:
        return Needs(DataKind.prompts, min_group_size=2)

    def prepare(self, batch: Batch, models: Models) -> Batch:
        assert batch.rewards is not None and batch.scored is not None
        scored = batch.scored
        rewards = batch.rewards.masked_fill(~scored, float("-inf"))  # an abstention is not the best
        grouped = rearrange(rewards, "(n g) -> n g", g=batch.group_size)
        best = reduce(grouped, "n g -> n 1", "max")
        advantages = rearrange(grouped - best, "n g -> (n g)").masked_fill(~scored, 0.0)
        return batch.replace(advantages=over_tokens(advantages, batch))

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.advantages is not None and batch.scale is not None
        mask = batch.completion_mask
        out = models.policy(batch)
        loss = aggregate(-out.logprobs * batch.advantages, mask, batch.scale, self.average)
        yield LossTerm("policy", loss, {"entropy": (masked_sum(out.entropy, mask), mask.sum())})
