"""Group relative policy optimisation: the group is the baseline, there is no critic.

    A_i = (r_i − mean(r)) / (std(r) + 1e-6)          over the G completions of one prompt
    ρ_t = π(y_t) / π_old(y_t)
    L   = average_t [ −min(ρ_t A_i, clip(ρ_t, 1 − ε, 1 + ε_high) A_i) + β · kl_t(π, π_ref) ]

Source: Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4 (`average=sequence`, β = 0.04, k3).
Defaults differ: β = 0, so that no reference is loaded (as in DAPO, arXiv:2503.14476, and Dr. GRPO,
arXiv:2503.20783). `scale_by_std=false average=constant` is Dr. GRPO; `average=token` and
`clip_eps_high=0.28` are DAPO's. The standard deviation is the sample's (ddof 1). A group of equal
rewards has A = 0; with `kl_on_dead=false` its tokens do not feel the KL price either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from zoo.algorithms import common
from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.batch import Batch
from zoo.functional import (
    Average,
    KLEstimator,
    aggregate,
    clipped_surrogate,
    group_advantages,
    kl_penalty,
    masked_sum,
)
from zoo.models.models import Models


@dataclass(frozen=True)
class GRPO(Algorithm):
    clip_eps: float = 0.2  # ε; trust region of the probability ratio
    clip_eps_high: float | None = None  # DAPO's clip-higher; null: the same as clip_eps
    kl_coef: float = 0.0  # β; price per nat of drift; 0: no reference model is loaded
    kl_estimator: KLEstimator = KLEstimator.k3
    kl_on_dead: bool = True  # groups of equal rewards still feel the KL price
    scale_by_std: bool = True  # False: Dr. GRPO
    mask_truncated: bool = False  # leave completions that the limit cut out of the loss
    average: Average = Average.sequence

    name: ClassVar[str] = "grpo"

    def __post_init__(self) -> None:
        super().__post_init__()
        common.check_clip(self.clip_eps, self.clip_eps_high, self.kl_coef)
        common.check_priced(self, kl_estimator=KLEstimator.k3, kl_on_dead=True)
        common.warn_of_k1(self.kl_coef, self.kl_estimator)

    @property
    def needs(self) -> Needs:
        kl = self.kl_coef > 0
        return Needs(DataKind.prompts, kl, min_group_size=2, silent_without_advantage=not kl)

    def prepare(self, batch: Batch, models: Models) -> Batch:
        batch = common.without_truncated(batch) if self.mask_truncated else batch
        assert batch.rewards is not None
        advantages = group_advantages(
            batch.rewards, batch.group_size, scored=batch.scored, scale_by_std=self.scale_by_std
        )  # [B]
        return batch.replace(
            advantages=common.over_tokens(advantages, batch),
            old_logprobs=common.old_logprobs(self, batch, models),
            ref_logprobs=models.reference_logprobs(batch) if self.kl_coef > 0 else None,
        ).with_extra(dead=common.in_dead_group(batch))

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.advantages is not None and batch.scale is not None
        mask = batch.completion_mask
        out = models.policy(batch)
        clip = {"clip_eps": self.clip_eps, "clip_eps_high": self.clip_eps_high}
        surrogate = clipped_surrogate(
            out.logprobs, batch.old_logprobs, batch.advantages, mask, **clip
        )
        loss, metrics = surrogate.loss, common.surrogate_metrics(surrogate, out, batch)
        if (ref := batch.ref_logprobs) is not None:
            kl = kl_penalty(out.logprobs, ref, mask, self.kl_estimator, batch.old_logprobs)
            price = kl if self.kl_on_dead else torch.where(batch.extra["dead"][:, None], 0.0, kl)
            loss = loss + self.kl_coef * price
            metrics["kl_ref"] = (masked_sum(kl.detach(), mask), mask.sum())
        yield LossTerm("policy", aggregate(loss, mask, batch.scale, self.average), metrics)
