"""Proximal policy optimisation with a learned critic and a KL price in the reward.

    R_t = −β · kl_t(π_old, π_ref) + [t is the last token] · r
    δ_t = R_t + γ V_{t+1} − V_t,   A_t = Σ_l (γλ)^l δ_{t+l},   returns = A + V        (GAE)
    L_policy = average_t −min(ρ_t A_t, clip(ρ_t, 1 − ε, 1 + ε) A_t),   A whitened
    L_value  = c · average_t ½ max((V − R̂)², (V_old + clip(V − V_old, ±ε_v) − R̂)²)

V_t is the value of the prefix before token t. After a completion that stopped by itself the value
is 0; after one that the length limit cut, `truncation=bootstrap` takes the critic's own V(s_T) and
`terminal` takes 0. Policy and critic are backpropagated one after the other: their activations
never exist together. With one update a step V_old is V, so a single pass of the critic reads the
values for GAE and learns from them, micro-batch by micro-batch.

With `kl_target` β steers itself: after each step, from the step's mean KL a completion,
β ← β (1 + clip((KL − target)/target, ±0.2) / horizon); β is state, logged as state/kl_coef and
checkpointed. With `kl_stop` the updates still to come of a step are skipped once an update has
seen KL(π_old‖π) above it, by k3 on its own tokens; that update itself is made, and skipped ones do
not count as updates. So a linear or cosine schedule, which spans the updates that could be made,
does not come down to `lr_end`.

Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; GAE: arXiv:1506.02438, eq. 16; the KL price
and the value clip as in Ziegler et al. 2019, arXiv:1909.08593, §2, and Ouyang et al. 2022, eq. 2;
adaptive β: Ziegler et al. §2.2, whose gain of 0.1 an update is a horizon of 10 steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.algorithms.common import (
    check_clip,
    check_positive,
    check_priced,
    old_logprobs,
    start_logprobs,
    surrogate_metrics,
)
from zoo.batch import Batch
from zoo.distributed import pooled
from zoo.functional import (
    Average,
    KLEstimator,
    adaptive_kl_coef,
    aggregate,
    clipped_surrogate,
    gae,
    k3,
    kl_penalty,
    kl_token_rewards,
    masked_sum,
    moments,
    value_loss,
    whiten,
)
from zoo.models.models import Models


class Truncation(StrEnum):
    bootstrap = "bootstrap"
    terminal = "terminal"


@dataclass(frozen=True)
class PPO(Algorithm):
    clip_eps: float = 0.2  # ε; trust region of the probability ratio
    clip_eps_high: float | None = None  # null: the same as clip_eps
    kl_coef: float = 0.05  # β; price per nat of drift, in the reward; 0: no reference is loaded
    kl_estimator: KLEstimator = KLEstimator.k1
    kl_target: float | None = None  # nats a completion to steer to by moving β; null: β is fixed
    kl_horizon: int = 10  # steps over which β may change by a fifth
    kl_stop: float | None = None  # nats a token from the sampling policy; beyond, a step ends early
    gamma: float = 1.0
    gae_lambda: float = 0.95  # 1: Monte Carlo; 0: one-step TD
    value_coef: float = 1.0  # the critic has an optimizer of its own, so this only scales its clip
    value_clip: float | None = 0.2  # ε_v; null: plain squared error
    whiten_advantages: bool = True  # zero mean, unit std over the tokens of the step, all ranks
    truncation: Truncation = Truncation.terminal  # an answer cut short is a failed answer
    average: Average = Average.token

    name: ClassVar[str] = "ppo"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clip(self.clip_eps, self.clip_eps_high, self.kl_coef)
        check_positive(value_coef=self.value_coef)
        for key in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(
                    f"algorithm.{key} must lie in [0, 1], got {getattr(self, key)}. "
                    f"Leave it out for the default."
                )
        self._check_kl()
        if self.value_clip is not None and not self.value_clip > 0:
            raise ValueError(
                f"algorithm.value_clip must be above 0 or null, got {self.value_clip}."
            )

    def _check_kl(self) -> None:
        check_priced(self, kl_estimator=KLEstimator.k1)
        for key in ("kl_target", "kl_stop"):
            if getattr(self, key) is not None and not getattr(self, key) > 0:
                raise ValueError(
                    f"algorithm.{key} must be above 0 or null, got {getattr(self, key)}."
                )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError(
                f"algorithm.kl_target={self.kl_target} steers kl_coef, which is 0 and would stay "
                "so. Start from algorithm.kl_coef=0.05, or leave kl_target out."
            )
        if self.kl_horizon < 1:
            raise ValueError(
                f"algorithm.kl_horizon must be at least 1 step, got {self.kl_horizon}."
            )
        if self.kl_target is None and self.kl_horizon != PPO.kl_horizon:
            raise ValueError(
                f"algorithm.kl_horizon={self.kl_horizon} has no effect without algorithm.kl_target"
                ". Set a target, or leave kl_horizon out."
            )
        if self.kl_stop is not None and self.updates_per_step < 3:
            raise ValueError(
                f"algorithm.kl_stop={self.kl_stop} has nothing to skip with fewer than 3 updates a "
                "step: the drift is measured as an update is made, and the first is made at the "
                "sampling policy. Raise algorithm.epochs or algorithm.minibatches, or leave it out."
            )

    @property
    def needs(self) -> Needs:
        return Needs(
            DataKind.prompts,
            reference=self.kl_coef > 0,
            critic=True,
            trains=("policy", "critic"),
        )

    def prepare(self, batch: Batch, models: Models) -> Batch:
        rewards = batch.rewards
        assert rewards is not None and batch.scored is not None
        mask = batch.completion_mask
        # An abstention teaches nothing: the row keeps its place in the critic's eyes but not in
        # the losses.
        mask = mask & batch.scored[:, None]
        batch = batch.replace(completion_mask=mask)
        old = old_logprobs(self, batch, models)
        kl = torch.zeros_like(batch.input_ids, dtype=torch.float32)
        if self.kl_coef > 0:
            reference = models.reference_logprobs(batch)
            now = start_logprobs(old, batch, models)
            kl = kl_penalty(now, reference, mask, self.kl_estimator)
            batch = batch.replace(ref_logprobs=reference)
        price = models.state.get("kl_coef", self.kl_coef)
        token_rewards = kl_token_rewards(rewards, kl, mask, price)
        batch = batch.with_extra(token_rewards=token_rewards)
        if models.gradients is None:
            values, final = models.critic_values(batch)
            advantages, returns = self._gae(batch, values, final)
        else:  # the only update: what a row is worth and what the critic learns of it, in one pass
            values, advantages = models.learn(batch, partial(self._learn_values, models=models))
            returns = None
        if self.whiten_advantages:
            advantages = whiten(advantages, mask, total=pooled(moments(advantages, mask)))
        return batch.replace(
            old_logprobs=old,
            values=values,
            advantages=advantages,
            returns=returns,
        ).with_extra(kl_ref=kl)

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.advantages is not None and batch.scale is not None
        mask, tokens = batch.completion_mask, batch.completion_mask.sum()
        out = models.policy(batch)
        surrogate = clipped_surrogate(
            out.logprobs,
            batch.old_logprobs,
            batch.advantages,
            mask,
            clip_eps=self.clip_eps,
            clip_eps_high=self.clip_eps_high,
        )
        metrics = surrogate_metrics(surrogate, out, batch)
        if self.kl_stop is not None and batch.old_logprobs is not None:
            # Never negative, where k1 on the very samples that are trained on can be.
            moved = k3(batch.old_logprobs, out.logprobs.detach(), mask)
            metrics["kl_old_k3"] = (masked_sum(moved, mask), tokens)
        if self.kl_coef > 0:
            drift = masked_sum(batch.extra["kl_ref"], mask)
            metrics["kl_ref"] = (drift, tokens)
            metrics["kl_ref_sequence"] = (drift, mask.any(1).sum())
        yield LossTerm(
            "policy", aggregate(surrogate.loss, mask, batch.scale, self.average), metrics
        )

        if batch.returns is not None:  # else `prepare` has taught the critic already
            yield self._value_term(batch, models.critic(batch).values)

    def _gae(self, batch: Batch, values: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """advantages [B, T] and returns [B, T]."""
        bootstrap = None
        if self.truncation is Truncation.bootstrap:
            bootstrap = torch.where(batch.truncated, final, torch.zeros_like(final))
        return gae(
            batch.extra["token_rewards"],
            values,
            batch.completion_mask,
            bootstrap=bootstrap,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )

    def _learn_values(self, batch: Batch, models: Models) -> tuple[LossTerm, tuple[Tensor, Tensor]]:
        """The value term of a micro-batch at the values that its own GAE reads."""
        out = models.critic(batch)
        values = out.values.detach()
        advantages, returns = self._gae(batch, values, out.final.detach())
        term = self._value_term(batch.replace(values=values, returns=returns), out.values)
        return term, (values, advantages)

    def _value_term(self, batch: Batch, values: Tensor) -> LossTerm:
        assert batch.returns is not None and batch.scale is not None
        mask, tokens = batch.completion_mask, batch.completion_mask.sum()
        term = value_loss(values, batch.returns, batch.values, mask, clip=self.value_clip)
        loss = self.value_coef * aggregate(term.loss, mask, batch.scale, self.average)
        error = (batch.returns - values.detach()).square()
        metrics = {
            "value_clip": (masked_sum(term.clipped.float(), mask), tokens),
            "value_error": (masked_sum(error, mask), tokens),
            "value": (masked_sum(values.detach(), mask), tokens),
            "return": (masked_sum(batch.returns, mask), tokens),
            "return_squared": (masked_sum(batch.returns.square(), mask), tokens),
        }
        return LossTerm("value", loss, metrics)

    def initial_state(self) -> dict[str, float]:
        return {} if self.kl_target is None else {"kl_coef": self.kl_coef}

    def next_state(self, state: dict[str, float], metrics: dict[str, Any]) -> dict[str, float]:
        if self.kl_target is None or "kl_ref_sequence" not in metrics:  # no update was made
            return state
        kl = metrics["kl_ref_sequence"]
        coef = adaptive_kl_coef(state["kl_coef"], kl, self.kl_target, 1, self.kl_horizon)
        return {**state, "kl_coef": coef}

    def enough(self, metrics: Mapping[str, float]) -> bool:
        return self.kl_stop is not None and metrics.get("kl_old_k3", 0.0) > self.kl_stop
