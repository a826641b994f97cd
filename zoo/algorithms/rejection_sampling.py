"""Rejection sampling: sample G completions, keep the best one, imitate it.

    y* = the completion of largest reward among G samples of one prompt
    L  = −(1/S) Σ_i Σ_t log π(y*_{i,t} | x_i, y*_{i,<t}),   S by `average`

The simplest way to learn from a verifier: no baseline, no ratio, no reference, and only what was
done well is repeated. A group of equal rewards has no best: `keep` drops it.

Source: best-of-n in Stiennon et al. 2020, arXiv:2009.01325, §4; as training, Dong et al. 2023
(RAFT), arXiv:2304.06767, and Touvron et al. 2023, arXiv:2307.09288, §3.2.3. Deviations: the step is
on the policy's own fresh samples, where the sources sample a whole data set first; RAFT also
imitates the best of groups that are all wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from zoo.algorithms import common
from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.batch import Batch
from zoo.functional import Average, aggregate, dead_groups, masked_sum, nll
from zoo.models.models import Models


@dataclass(frozen=True)
class RejectionSampling(Algorithm):
    average: Average = Average.token  # sequence: every completion weighs the same

    name: ClassVar[str] = "rejection_sampling"

    @property
    def needs(self) -> Needs:
        return Needs(DataKind.prompts, min_group_size=2)

    def keep(self, batch: Batch) -> Tensor:
        if batch.rewards is None:
            return super().keep(batch)
        return ~dead_groups(batch.rewards, batch.group_size, batch.scored).dead

    def prepare(self, batch: Batch, models: Models) -> Batch:
        alive = ~common.in_dead_group(batch)
        batch = batch.replace(completion_mask=batch.completion_mask & alive[:, None])
        return batch.select_rows(common.best_and_worst(batch)[:, 0], 1)

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.scale is not None
        mask = batch.completion_mask
        out = models.policy(batch)
        tokens = mask.sum()
        yield LossTerm(
            "policy",
            aggregate(nll(out.logprobs, mask), mask, batch.scale, self.average),
            {
                "nll": (masked_sum(-out.logprobs.detach(), mask), tokens),
                "entropy": (masked_sum(out.entropy, mask), tokens),
            },
        )
