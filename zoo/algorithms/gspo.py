"""GSPO: GRPO with one ratio for a whole completion, since the reward is of the whole completion.

    A_i = (r_i − mean(r)) / (std(r) + 1e-6)
    s_i = (π(y_i) / π_old(y_i))^(1/n_i) = exp(1/n_i · Σ_t log ρ_{i,t})
    L   = mean_i −min(s_i A_i, clip(s_i, 1 − ε_low, 1 + ε_high) A_i)

The geometric mean moves far less than a token's ratio, hence the narrow ε. The first update on a
batch (s = 1) has GRPO's gradient with `average=sequence`: the two differ from the second on, so
`epochs` or `minibatches` is what to raise when comparing them.

Source: Zheng et al. 2025, arXiv:2507.18071, eq. 5 and 7 (loss), §5.1 (ε_low = 3e-4, ε_high = 4e-4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from zoo.algorithms import common
from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.batch import Batch
from zoo.functional import Average, RatioLevel, aggregate, clipped_surrogate, group_advantages
from zoo.models.models import Models


@dataclass(frozen=True)
class GSPO(Algorithm):
    clip_eps: float = 3e-4  # ε_low; of the geometric mean of a completion's ratios
    clip_eps_high: float | None = 4e-4  # ε_high; null: the same as clip_eps
    scale_by_std: bool = True

    name: ClassVar[str] = "gspo"

    def __post_init__(self) -> None:
        super().__post_init__()
        common.check_clip(self.clip_eps, self.clip_eps_high, 0.0)

    @property
    def needs(self) -> Needs:
        return Needs(DataKind.prompts, min_group_size=2, silent_without_advantage=True)

    def prepare(self, batch: Batch, models: Models) -> Batch:
        assert batch.rewards is not None
        advantages = group_advantages(
            batch.rewards, batch.group_size, scored=batch.scored, scale_by_std=self.scale_by_std
        )
        return batch.replace(
            advantages=common.over_tokens(advantages, batch),
            old_logprobs=common.old_logprobs(self, batch, models),
        )

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.advantages is not None and batch.scale is not None
        mask = batch.completion_mask
        out = models.policy(batch)
        surrogate = clipped_surrogate(
            out.logprobs,
            batch.old_logprobs,
            batch.advantages,
            mask,
            clip_eps=self.clip_eps,
            clip_eps_high=self.clip_eps_high,
            ratio_level=RatioLevel.sequence,
        )
        # The loss is the same in every token of a row, so its mean over tokens is the row's.
        loss = aggregate(surrogate.loss, mask, batch.scale, Average.sequence)
        yield LossTerm("policy", loss, common.surrogate_metrics(surrogate, out, batch))
