"""Supervised fine-tuning: the start of everything else.

    L = −(1/S) Σ_i Σ_t log π(y_{i,t} | x_i, y_{i,<t}),   S by `average`

over completion tokens, the stop token included; the prompt is not trained. With
`average=token` S is the number of trained tokens of the whole optimizer step over all ranks, so
micro-batches do not change the gradient.

Source: Ouyang et al. 2022, arXiv:2203.02155, §3.5 (SFT).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.batch import Batch
from zoo.functional import Average, aggregate, masked_sum
from zoo.models.models import Models


@dataclass(frozen=True)
class SFT(Algorithm):
    average: Average = Average.token  # sequence: every example weighs the same

    name: ClassVar[str] = "sft"

    @property
    def needs(self) -> Needs:
        return Needs(data=DataKind.examples)

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.scale is not None
        mask = batch.completion_mask
        out = models.policy(batch)
        tokens = mask.sum()
        yield LossTerm(
            "policy",
            aggregate(-out.logprobs, mask, batch.scale, self.average),
            {
                "nll": (masked_sum(-out.logprobs.detach(), mask), tokens),
                "entropy": (masked_sum(out.entropy, mask), tokens),
            },
        )
