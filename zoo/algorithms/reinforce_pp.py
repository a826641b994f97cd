"""REINFORCE++: no critic; the deviation over the whole batch is the yardstick.

    plain:           A_t = r − β · Σ_{s ≥ t} log(π_old(y_s) / π_ref(y_s))
    group_baseline:  A_t = r − mean of the group's r;   β · k2_t(π, π_ref) is part of the loss
    both:            Â_t = (A_t − mean(A)) / std(A)      over all tokens of the step, all processes
    L = average_t −min(ρ_t Â_t, clip(ρ_t, 1 − ε, 1 + ε) Â_t)   [+ β · k2_t]

Without groups the batch's mean is the baseline, so one completion a prompt will do. Since one
deviation serves all prompts, an easy prompt does not weigh more than a hard one, as it does in
GRPO, where it is divided by its own small deviation. After whitening, a group of equal rewards may
have a small advantage: the mean is over tokens and a group's rows differ in length.

Source: Hu et al. 2025, arXiv:2501.03262, §3 (both forms). Deviations: β = 0 by default, so that no
reference is loaded; the deviation is the sample's (ddof 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from zoo.algorithms import common
from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.batch import Batch
from zoo.distributed import pooled
from zoo.functional import (
    Average,
    KLEstimator,
    aggregate,
    clipped_surrogate,
    gae,
    group_advantages,
    kl_penalty,
    kl_token_rewards,
    masked_sum,
    moments,
    whiten,
)
from zoo.models.models import Models


@dataclass(frozen=True)
class ReinforcePP(Algorithm):
    clip_eps: float = 0.2  # ε; trust region of the probability ratio
    kl_coef: float = 0.0  # β; price per nat of drift; 0: no reference is loaded
    group_baseline: bool = False  # take each group's mean off first; KL moves into the loss
    average: Average = Average.token

    name: ClassVar[str] = "reinforce_pp"

    def __post_init__(self) -> None:
        super().__post_init__()
        common.check_clip(self.clip_eps, None, self.kl_coef)

    @property
    def needs(self) -> Needs:
        least = 2 if self.group_baseline else 1
        return Needs(DataKind.prompts, reference=self.kl_coef > 0, min_group_size=least)

    def prepare(self, batch: Batch, models: Models) -> Batch:
        rewards = batch.rewards
        assert rewards is not None and batch.scored is not None
        # An abstention has no reward: its row leaves the statistics and the loss.
        mask = batch.completion_mask & batch.scored[:, None]
        batch = batch.replace(completion_mask=mask)
        priced = self.kl_coef > 0 and not self.group_baseline
        old = common.old_logprobs(self, batch, models)
        if self.kl_coef > 0:
            batch = batch.replace(ref_logprobs=models.reference_logprobs(batch))
        if self.group_baseline:
            centred = group_advantages(
                rewards, batch.group_size, scored=batch.scored, scale_by_std=False
            )
            advantages = common.over_tokens(centred, batch)
        else:
            kl = torch.zeros_like(batch.input_ids, dtype=torch.float32)
            if priced:
                assert batch.ref_logprobs is not None
                now = common.start_logprobs(old, batch, models)
                kl = kl_penalty(now, batch.ref_logprobs, mask, KLEstimator.k1)
            token_rewards = kl_token_rewards(rewards, kl, mask, self.kl_coef)
            # Without values and with λ = 1 the advantage is the sum of the rewards to come.
            zeros = torch.zeros_like(token_rewards)
            advantages, _ = gae(token_rewards, zeros, mask, gamma=1.0, gae_lambda=1.0)
        return batch.replace(
            advantages=whiten(advantages, mask, total=pooled(moments(advantages, mask))),
            old_logprobs=old,
        )

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.advantages is not None and batch.scale is not None
        mask = batch.completion_mask
        out = models.policy(batch)
        surrogate = clipped_surrogate(
            out.logprobs, batch.old_logprobs, batch.advantages, mask, clip_eps=self.clip_eps
        )
        loss, metrics = surrogate.loss, common.surrogate_metrics(surrogate, out, batch)
        if (reference := batch.ref_logprobs) is not None:
            kl = kl_penalty(out.logprobs, reference, mask, KLEstimator.k2)
            if self.group_baseline:
                loss = loss + self.kl_coef * kl
            drift = kl_penalty(out.logprobs.detach(), reference, mask, KLEstimator.k1)
            metrics["kl_ref"] = (masked_sum(drift, mask), mask.sum())
        yield LossTerm("policy", aggregate(loss, mask, batch.scale, self.average), metrics)
