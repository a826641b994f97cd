"""REINFORCE leave-one-out: each completion is judged by the mean of the others of its prompt.

    R_i = r_i − β · Σ_t log(π_old(y_{i,t}) / π_ref(y_{i,t}))
    A_i = R_i − 1/(G−1) · Σ_{j≠i} R_j
    L   = average_t −min(ρ_t A_i, clip(ρ_t, 1 − ε, 1 + ε) A_i)

The whole completion is one action, so no token is weighed by its row's length: `average=constant`
is the paper's sum over tokens and mean over completions, divided by a constant. A_i is G/(G−1)
times GRPO's without the deviation. The baseline does not depend on completion i: unbiased.

Source: Ahmadian et al. 2024, arXiv:2402.14740, §3.3 (RLOO), after Kool et al. 2019. Deviations: a
second update on a batch is clipped token by token (the paper makes one and clips nothing); β = 0
by default, so that no reference is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from zoo.algorithms import common
from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.batch import Batch
from zoo.functional import (
    Average,
    KLEstimator,
    aggregate,
    clipped_surrogate,
    kl_penalty,
    leave_one_out,
    masked_sum,
)
from zoo.models.models import Models


@dataclass(frozen=True)
class RLOO(Algorithm):
    clip_eps: float = 0.2  # ε; only felt from a batch's second update on
    kl_coef: float = 0.0  # β; price per nat of a completion's drift, in the reward
    average: Average = Average.constant

    name: ClassVar[str] = "rloo"

    def __post_init__(self) -> None:
        super().__post_init__()
        common.check_clip(self.clip_eps, None, self.kl_coef)

    @property
    def needs(self) -> Needs:
        kl = self.kl_coef > 0
        return Needs(DataKind.prompts, kl, min_group_size=2, silent_without_advantage=True)

    def prepare(self, batch: Batch, models: Models) -> Batch:
        rewards, mask = batch.rewards, batch.completion_mask
        assert rewards is not None
        old = common.old_logprobs(self, batch, models)
        if self.kl_coef > 0:
            reference = models.reference_logprobs(batch)
            now = common.start_logprobs(old, batch, models)
            kl = kl_penalty(now, reference, mask, KLEstimator.k1)  # 0 outside the mask
            rewards = rewards - self.kl_coef * kl.sum(1)
            batch = batch.replace(ref_logprobs=reference).with_extra(kl_ref=kl)
        advantages = leave_one_out(rewards, batch.group_size, scored=batch.scored)  # [B]
        return batch.replace(
            advantages=common.over_tokens(advantages, batch),
            old_logprobs=old,
        )

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.advantages is not None and batch.scale is not None
        mask = batch.completion_mask
        out = models.policy(batch)
        surrogate = clipped_surrogate(
            out.logprobs, batch.old_logprobs, batch.advantages, mask, clip_eps=self.clip_eps
        )
        metrics = common.surrogate_metrics(surrogate, out, batch)
        if self.kl_coef > 0:
            metrics["kl_ref"] = (masked_sum(batch.extra["kl_ref"], mask), mask.sum())
        yield LossTerm(
            "policy", aggregate(surrogate.loss, mask, batch.scale, self.average), metrics
        )
