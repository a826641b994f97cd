"""What several algorithms say in the same words: range checks, old log-probs, ratio metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.algorithms.base import Algorithm
from zoo.batch import Batch
from zoo.functional import Surrogate, dead_groups, k1, masked_sum

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


def over_tokens(values: Tensor, batch: Batch) -> Tensor:
    """[B] → [B, T]: the row's value on each of its trained tokens, 0 elsewhere."""
    mask = batch.completion_mask
    return torch.where(mask, values[:, None], torch.zeros((), device=values.device))


def in_dead_group(batch: Batch) -> Tensor:
    """[B] bool: rows of groups whose rewards are all equal (not: rows at their group's mean)."""
    assert batch.rewards is not None
    dead = dead_groups(batch.rewards, batch.group_size, batch.scored).dead  # [N]
    return dead.repeat_interleave(batch.group_size)


def old_logprobs(
    algorithm: Algorithm, batch: Batch, models: Models, always: bool = False
) -> Tensor | None:
    """[B, T] log-probs before the first update; None when one update makes them the current ones.

    With a single update the surrogate's detached current log-probs are the old ones: the same
    gradient, one forward saved.
    """
    if algorithm.updates_per_step == 1 and not always:
        return None
    return models.policy_logprobs(batch)


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
