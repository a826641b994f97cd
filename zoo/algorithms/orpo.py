"""ORPO: imitation of the chosen completion and a push on the odds, in one stage, no reference.

    log p = 1/n · log π(y|x);   odds = p / (1 − p)
    L = −log p_w + λ · −log σ(log odds_w − log odds_l), averaged over the pairs of the step

It is meant to start from a base model: the first term is supervised fine-tuning, and the second
keeps it from raising the rejected completions along with the chosen ones.

Source: Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7 (λ = 0.1 for Mistral 7B). The likelihood
term is each completion's mean over its own tokens, as p is; some codes take one mean over all
tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from zoo.algorithms import common
from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.batch import Batch
from zoo.functional import aggregate_rows, orpo
from zoo.models.models import Models


@dataclass(frozen=True)
class ORPO(Algorithm):
    odds_coef: float = 0.1  # λ; weight of the odds ratio beside the likelihood

    name: ClassVar[str] = "orpo"

    def __post_init__(self) -> None:
        super().__post_init__()
        common.check_positive(odds_coef=self.odds_coef)

    @property
    def needs(self) -> Needs:
        return Needs(data=DataKind.pairs, min_group_size=2, rows_coupled=True)

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.scale is not None
        out = models.policy(batch)
        chosen, rejected = common.pair_logprobs(out.logprobs, batch, average=True)
        odds = orpo(chosen, rejected)
        metrics = common.preference_metrics(chosen - rejected, chosen, rejected, out, batch)
        metrics["nll"] = (-chosen.detach().sum(), batch.n_groups)
        metrics["odds"] = (odds.detach().sum(), batch.n_groups)
        yield LossTerm(
            "policy",
            aggregate_rows(-chosen + self.odds_coef * odds, batch.scale.groups),
            metrics,
        )
