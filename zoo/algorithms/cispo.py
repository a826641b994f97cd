"""CISPO: the importance weight is clipped, not the loss, so that no token loses its gradient.

    A_i = (r_i − mean(r)) / (std(r) + 1e-6)
    L   = Σ_i Σ_t −sg(clip(ρ_t, 1 − ε_low, 1 + ε_high)) A_i log π(y_t) / Σ_i n_i

PPO's clip silences rare tokens whose probability has just grown, often the ones at which a line of
reasoning forks; here they keep a bounded weight. The value of the loss means nothing. On a batch's
first update (ρ = 1) the gradient is that of GRPO with `average=token`.

Source: MiniMax 2025, arXiv:2506.13585, eq. 4 and 5; ε_high is left to tuning there, and no lower
bound is set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from zoo.algorithms import common
from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.batch import Batch
from zoo.functional import Average, aggregate, cispo, group_advantages
from zoo.models.models import Models


@dataclass(frozen=True)
class CISPO(Algorithm):
    clip_eps_high: float = 5.0  # ε_high; the weight of a token is at most 1 + ε_high
    clip_eps_low: float | None = None  # ε_low; null: no lower bound
    average: Average = Average.token

    name: ClassVar[str] = "cispo"

    def __post_init__(self) -> None:
        super().__post_init__()
        common.check_positive(clip_eps_high=self.clip_eps_high)
        if self.clip_eps_low is not None and not 0 <= self.clip_eps_low <= 1:
            raise ValueError(
                f"algorithm.clip_eps_low must lie in [0, 1] or be null, got {self.clip_eps_low}."
            )

    @property
    def needs(self) -> Needs:
        return Needs(DataKind.prompts, min_group_size=2, silent_without_advantage=True)

    def prepare(self, batch: Batch, models: Models) -> Batch:
        assert batch.rewards is not None
        advantages = group_advantages(batch.rewards, batch.group_size, scored=batch.scored)
        return batch.replace(
            advantages=common.over_tokens(advantages, batch),
            old_logprobs=common.old_logprobs(self, batch, models),
        )

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.advantages is not None and batch.scale is not None
        mask = batch.completion_mask
        out = models.policy(batch)
        surrogate = cispo(
            out.logprobs,
            batch.old_logprobs,
            batch.advantages,
            mask,
            clip_eps_high=self.clip_eps_high,
            clip_eps_low=self.clip_eps_low,
        )
        metrics = common.surrogate_metrics(surrogate, out, batch)
        yield LossTerm(
            "policy", aggregate(surrogate.loss, mask, batch.scale, self.average), metrics
        )
