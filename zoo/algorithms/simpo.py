"""SimPO: preferences without a reference, on the mean log-prob of a token, with a target margin.

    L = −log σ(β/n_w · log π(y_w|x) − β/n_l · log π(y_l|x) − γ), averaged over the pairs of the step

The implicit reward is what generation maximises, and length no longer buys any: in DPO a long
completion has a large log-ratio. γ asks the chosen one to win by a margin. Nothing holds the policy
to its start, so learning rates are small (the paper: 3e-7 to 1e-6 at 7B).

Source: Meng et al. 2024, arXiv:2405.14734, eq. 6; β = 2 to 10 and γ/β about 0.5 there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from zoo.algorithms import common
from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.batch import Batch
from zoo.functional import aggregate_rows, simpo
from zoo.models.models import Models


@dataclass(frozen=True)
class SimPO(Algorithm):
    beta: float = 2.0  # β; scale of the mean log-probs; not a price of drift
    margin: float = 1.0  # γ; by how much the chosen one should win, in units of β nats

    name: ClassVar[str] = "simpo"

    def __post_init__(self) -> None:
        super().__post_init__()
        common.check_positive(beta=self.beta)
        if self.margin < 0:
            raise ValueError(f"algorithm.margin must be at least 0, got {self.margin}. Try 1.")

    @property
    def needs(self) -> Needs:
        return Needs(data=DataKind.pairs, min_group_size=2, rows_coupled=True)

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.scale is not None
        out = models.policy(batch)
        chosen, rejected = common.pair_logprobs(out.logprobs, batch, average=True)
        loss = simpo(chosen, rejected, beta=self.beta, margin=self.margin)
        yield LossTerm(
            "policy",
            aggregate_rows(loss, batch.scale.groups),
            common.preference_metrics(
                self.beta * (chosen - rejected), chosen, rejected, out, batch
            ),
        )
