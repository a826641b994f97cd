"""What several algorithms say in the same words: range checks, old log-probs, ratio metrics."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor

from zoo.algorithms.base import Algorithm
from zoo.batch import Batch
from zoo.functional import (
    KLEstimator,
    Surrogate,
    dead_groups,
    k1,
    masked_sum,
    sequence_logprobs,
)

if TYPE_CHECKING:
    from zoo.models.models import Models
    from zoo.models.policy import PolicyOutput


def check_clip(clip_eps: float, clip_eps_high: float | None, kl_coef: float) -> None:
    """Refuse a trust region or a KL price that makes no sense."""
    if not 0 < clip_eps < 1:
        raise ValueError(f"algorithm.clip_eps must lie in (0, 1), got {clip_eps}. Try 0.2.")
    if clip_eps_high is not None and not clip_eps_high > 0:
        raise ValueError(
            f"algorithm.clip_eps_high must be above 0 or null, got {clip_eps_high}. Try 0.28."
        )
    if kl_coef < 0:
        raise ValueError(
            f"algorithm.kl_coef must be at least 0, got {kl_coef}: a negative price pays for "
            "drift. Use 0 for no reference."
        )


def check_priced(algorithm: Any, **defaults: object) -> None:
    """Refuse settings of the KL price where there is none: they would do nothing, silently."""
    for name, default in defaults.items():
        value = getattr(algorithm, name)
        if algorithm.kl_coef == 0 and value != default:
            raise ValueError(
                f"algorithm.{name}={value} has no effect with algorithm.kl_coef=0. Set a price, as "
                f"in algorithm.kl_coef=0.05, or leave {name} out."
            )


def warn_of_k1(kl_coef: float, estimator: KLEstimator) -> None:
    """Say that k1 as a loss is noise (zoo.functional.kl has the table)."""
    if kl_coef > 0 and estimator is KLEstimator.k1:
        warnings.warn(
            "algorithm.kl_estimator=k1 in the loss has no KL gradient on average. Try k3.",
            stacklevel=4,
        )


def without_truncated(batch: Batch) -> Batch:
    """No token of a completion that the length limit cut is trained, or counted in a mean."""
    return batch.replace(completion_mask=batch.completion_mask & ~batch.truncated[:, None])


def over_tokens(values: Tensor, batch: Batch) -> Tensor:
    """[B] → [B, T]: the row's value on each of its trained tokens, 0 elsewhere."""
    mask = batch.completion_mask
    return torch.where(mask, values[:, None], torch.zeros((), device=values.device))


def in_dead_group(batch: Batch) -> Tensor:
    """[B] bool: rows of groups whose rewards are all equal (not: rows at their group's mean)."""
    assert batch.rewards is not None
    dead = dead_groups(batch.rewards, batch.group_size, batch.scored).dead  # [N]
    return dead.repeat_interleave(batch.group_size)


def old_logprobs(algorithm: Algorithm, batch: Batch, models: Models) -> Tensor | None:
    """[B, T] log-probs before the first update; None when one update makes them the current ones.

    With a single update the surrogate's detached current log-probs are the old ones: the same
    gradient, one forward saved.
    """
    if algorithm.updates_per_step == 1:
        return None
    return models.policy_logprobs(batch)


def start_logprobs(old: Tensor | None, batch: Batch, models: Models) -> Tensor:
    """[B, T] log-probs of the policy before the step: `old`, the sampler's own, or a forward.

    The sampler's only where it decodes with the policy's own weights: a bfloat16 copy's rounding
    would be priced as drift, and KL would not be 0 at the start.
    """
    if old is None and models.sampler_is_policy:
        old = batch.sampling_logprobs
    return old if old is not None else models.policy_logprobs(batch)


def surrogate_metrics(
    surrogate: Surrogate, out: PolicyOutput, batch: Batch
) -> dict[str, tuple[Tensor, Tensor]]:
    """(sum, count) of entropy, clip fractions and the drift since the rollout."""
    mask = batch.completion_mask
    tokens = mask.sum()
    metrics = {
        "entropy": (masked_sum(out.entropy, mask), tokens),
        "clip_high": (masked_sum(surrogate.clipped_high.float(), mask), tokens),
        "clip_low": (masked_sum(surrogate.clipped_low.float(), mask), tokens),
        "ratio": (masked_sum(surrogate.ratio, mask), tokens),
    }
    if batch.old_logprobs is not None:
        # k1 with the arguments swapped estimates KL(π_old‖π) on the old policy's samples.
        drift = k1(batch.old_logprobs, out.logprobs.detach(), mask)
        metrics["kl_old"] = (masked_sum(drift, mask), tokens)
    if batch.sampling_logprobs is not None:
        gap = (out.logprobs.detach() - batch.sampling_logprobs).abs()
        metrics["mismatch/sampler"] = (masked_sum(gap, mask), tokens)
    return metrics


def pair_logprobs(logprobs: Tensor, batch: Batch, average: bool) -> tuple[Tensor, Tensor]:
    """[B, T] → chosen [N], rejected [N]: the log-prob of each completion, or its mean a token."""
    rows = sequence_logprobs(logprobs, batch.completion_mask, average=average)
    chosen, rejected = rearrange(rows, "(n two) -> two n", two=2)
    return chosen, rejected


def preference_metrics(
    margin: Tensor, chosen: Tensor, rejected: Tensor, out: PolicyOutput, batch: Batch
) -> dict[str, tuple[Tensor, Tensor | float]]:
    """(sum, count) of the margin that a loss widens, of who is ahead, and of both log-probs."""
    margin, pairs, mask = margin.detach(), batch.n_groups, batch.completion_mask
    return {
        "margin": (margin.sum(), pairs),
        "preference_accuracy": ((margin > 0).float().sum(), pairs),
        "logprob/chosen": (chosen.detach().sum(), pairs),
        "logprob/rejected": (rejected.detach().sum(), pairs),
        "entropy": (masked_sum(out.entropy, mask), mask.sum()),
    }


def best_and_worst(batch: Batch) -> Tensor:
    """[N, 2] rows of largest and of smallest reward in each group, among the scored ones.

    Equal rewards are told apart by content, so the order of the rows does not matter. A group
    without a scored row gives two rows of no meaning: see `in_dead_group`.
    """
    assert batch.rewards is not None
    scored = torch.ones_like(batch.truncated) if batch.scored is None else batch.scored
    shape = (batch.n_groups, batch.group_size)
    by_content = batch.row_keys.view(shape).argsort(1)  # [N, G]
    start = torch.arange(batch.n_groups, device=batch.device)[:, None] * batch.group_size
    rows = by_content + start
    high = torch.where(scored, batch.rewards, -torch.inf)[rows].argmax(1, keepdim=True)
    low = torch.where(scored, batch.rewards, torch.inf)[rows].argmin(1, keepdim=True)
    return rows.gather(1, torch.cat([high, low], 1))


def check_positive(**settings: float) -> None:
    """Refuse a coefficient that must be above 0."""
    for name, value in settings.items():
        if not value > 0:
            raise ValueError(
                f"algorithm.{name} must be above 0, got {value}. Leave it out for the default."
            )
