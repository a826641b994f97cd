"""IPO: preferences with a finite target, so that a certain label does not push without end.

    h = (log π(y_w|x) − log π_ref(y_w|x)) − (log π(y_l|x) − log π_ref(y_l|x))
    L = (h − 1/(2β))², averaged over the pairs of the optimizer step

DPO's sigmoid wants h → ∞ for a pair that is always labelled the same way; here h stops at 1/(2β).
At the start h = 0 and L = 1/(4β²). With `average_logprobs` each log-prob is the mean over its
completion's tokens (as in TRL) instead of their sum (the paper; OpenRLHF), and the same β then
asks for a far larger change.

Source: Azar et al. 2023, arXiv:2310.12036, eq. 17 (τ there is β here).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from zoo.algorithms import common
from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.batch import Batch
from zoo.functional import aggregate_rows, ipo
from zoo.models.models import Models


@dataclass(frozen=True)
class IPO(Algorithm):
    beta: float = 0.1  # β; the log-ratio margin is driven to 1/(2β)
    average_logprobs: bool = False  # means over tokens instead of sums

    name: ClassVar[str] = "ipo"

    def __post_init__(self) -> None:
        super().__post_init__()
        common.check_positive(beta=self.beta)

    @property
    def needs(self) -> Needs:
        return Needs(data=DataKind.pairs, reference=True, min_group_size=2, rows_coupled=True)

    def prepare(self, batch: Batch, models: Models) -> Batch:
        return batch.replace(ref_logprobs=models.reference_logprobs(batch))

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.scale is not None and batch.ref_logprobs is not None
        out = models.policy(batch)
        chosen, rejected = common.pair_logprobs(out.logprobs, batch, self.average_logprobs)
        reference = common.pair_logprobs(batch.ref_logprobs, batch, self.average_logprobs)
        loss = ipo(chosen, rejected, *reference, beta=self.beta)
        margin = self.beta * ((chosen - reference[0]) - (rejected - reference[1]))
        yield LossTerm(
            "policy",
            aggregate_rows(loss, batch.scale.groups),
            common.preference_metrics(margin, chosen, rejected, out, batch),
        )
