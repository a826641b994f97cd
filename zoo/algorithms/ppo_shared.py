"""PPO whose values come from the policy's own backbone: one module, one forward, one term.

    R_t = −β · kl_t(π_old, π_ref) + [t is the last token] · r
    δ_t = R_t + γ V_{t+1} − V_t,   A_t = Σ_l (γλ)^l δ_{t+l},   returns = A + V        (GAE)
    L   = average_t [ −min(ρ_t A_t, clip(ρ_t, 1 − ε, 1 + ε) A_t)
                      + c · ½ max((V − R̂)², (V_old + clip(V − V_old, ±ε_v) − R̂)²) ],   A whitened

Half of PPO's models: no second backbone, gradients or optimizer states. The price is that both
losses pull on one backbone, so c matters (in `ppo` it only scales the critic's gradient clip). The
head starts at zero.

Source: Schulman et al. 2017, arXiv:1707.06347, eq. 9 (joint loss; its entropy bonus is left out)
and eq. 7; GAE: arXiv:1506.02438, eq. 16; the KL price and value clip as in Ziegler et al. 2019,
arXiv:1909.08593, §2. A completion that the length limit cut counts as ended.
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
    kl_penalty,
    kl_token_rewards,
    masked_sum,
    moments,
    value_loss,
    whiten,
)
from zoo.models.models import Models


@dataclass(frozen=True)
class SharedPPO(Algorithm):
    clip_eps: float = 0.2  # ε; trust region of the probability ratio
    kl_coef: float = 0.05  # β; price per nat of drift, in the reward; 0: no reference is loaded
    gamma: float = 1.0
    gae_lambda: float = 0.95  # 1: Monte Carlo; 0: one-step TD
    value_coef: float = 0.1  # c; how much of the backbone the values may claim
    value_clip: float | None = 0.2  # ε_v; null: plain squared error
    average: Average = Average.token

    name: ClassVar[str] = "ppo_shared"

    def __post_init__(self) -> None:
        super().__post_init__()
        common.check_clip(self.clip_eps, None, self.kl_coef)
        common.check_positive(value_coef=self.value_coef)
        for key in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(
                    f"algorithm.{key} must lie in [0, 1], got {getattr(self, key)}. "
                    f"Leave it out for the default."
                )
        if self.value_clip is not None:
            common.check_positive(value_clip=self.value_clip)

    @property
    def needs(self) -> Needs:
        return Needs(DataKind.prompts, reference=self.kl_coef > 0, value_head=True)

    def prepare(self, batch: Batch, models: Models) -> Batch:
        rewards = batch.rewards
        assert rewards is not None and batch.scored is not None
        # An abstention teaches nothing: its row leaves the statistics and the loss.
        mask = batch.completion_mask & batch.scored[:, None]
        batch = batch.replace(completion_mask=mask)
        old, values, _ = models.policy_values(batch)
        kl = torch.zeros_like(old)
        if self.kl_coef > 0:
            reference = models.reference_logprobs(batch)
            kl = kl_penalty(old, reference, mask, KLEstimator.k1)
            batch = batch.replace(ref_logprobs=reference)
        token_rewards = kl_token_rewards(rewards, kl, mask, self.kl_coef)
        advantages, returns = gae(
            token_rewards, values, mask, gamma=self.gamma, gae_lambda=self.gae_lambda
        )
        return batch.replace(
            advantages=whiten(advantages, mask, total=pooled(moments(advantages, mask))),
            old_logprobs=old if self.updates_per_step > 1 else None,
            values=values,
            returns=returns,
        ).with_extra(kl_ref=kl)

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.advantages is not None and batch.returns is not None
        assert batch.scale is not None
        mask, tokens = batch.completion_mask, batch.completion_mask.sum()
        out = models.policy(batch)
        assert out.values is not None
        surrogate = clipped_surrogate(
            out.logprobs, batch.old_logprobs, batch.advantages, mask, clip_eps=self.clip_eps
        )
        value = value_loss(out.values, batch.returns, batch.values, mask, clip=self.value_clip)
        metrics = common.surrogate_metrics(surrogate, out, batch)
        if self.kl_coef > 0:
            metrics["kl_ref"] = (masked_sum(batch.extra["kl_ref"], mask), tokens)
        error = (batch.returns - out.values.detach()).square()
        metrics |= {
            "value_clip": (masked_sum(value.clipped.float(), mask), tokens),
            "value_error": (masked_sum(error, mask), tokens),
            "value": (masked_sum(out.values.detach(), mask), tokens),
            "return": (masked_sum(batch.returns, mask), tokens),
            "return_squared": (masked_sum(batch.returns.square(), mask), tokens),
        }
        loss = surrogate.loss + self.value_coef * value.loss
        yield LossTerm("policy", aggregate(loss, mask, batch.scale, self.average), metrics)
