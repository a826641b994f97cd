"""Shaping of rewards by length and ending, and pass@k."""

from collections.abc import Sequence
from math import comb

import torch
from torch import Tensor

from zoo.functional import _checks
from zoo.functional._masks import last_true


def overlong_penalty(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """DAPO's soft punishment of long completions: a slope from 0 to −1 over the last tokens.

        0                                 L ≤ L_max − L_cache
        ((L_max − L_cache) − L)/L_cache   L_max − L_cache < L ≤ L_max
        −1                                L > L_max

    Add it to the reward.
    Source: Yu et al. 2025, arXiv:2503.14476, Eq. 13 (L_max 20480, L_cache 4096).

    Args:
        lengths: [B] integers, completion tokens (not characters, not the prompt).
        max_length: L_max, tokens.
        cache: L_cache, tokens, between 1 and L_max.
    Returns:
        [B] float32, between −1 and 0.
    Raises:
        ValueError: a wrong shape or dtype, or a cache outside 1 … L_max.
    """
    lengths = _checks.integers("lengths", lengths, ndim=1)
    _checks.within("cache", cache, 1, max_length)
    return ((max_length - cache - lengths) / cache).clamp(-1.0, 0.0)


def missing_eos_penalty(
    completion_ids: Tensor, mask: Tensor, stop_ids: Sequence[int], penalty: float
) -> Tensor:
    """Minus the penalty for each completion whose last token is not one of the stop tokens.

        −penalty · 1[last token under the mask ∉ stop_ids]

    Only the completion is looked at: a stop token in the prompt excuses nothing. An empty
    completion did not stop. Add it to the reward.
    Source: the EOS trick of Huang et al. 2024, arXiv:2403.17031 (there the score is *replaced* by
    −1).

    Args:
        completion_ids: [B, T] integers; prompts may be in it, outside the mask.
        mask: [B, T] bool, the completion's own tokens.
        stop_ids: the sampler's stop tokens, at least one.
        penalty: ≥ 0; it is subtracted.
    Returns:
        [B] float32, −penalty or 0.
    Raises:
        ValueError: a wrong shape or dtype, no stop token, or a negative penalty.
    """
    ids = _checks.integers("completion_ids", completion_ids, ndim=2)
    mask = _checks.bools("mask", mask, ids.shape)
    if not len(stop_ids):
        raise ValueError("stop_ids is empty: name the tokens at which the sampler stops.")
    if not penalty >= 0:
        raise ValueError(
            f"penalty must be at least 0, got {penalty}: it is subtracted from the reward. "
            f"Try penalty={abs(penalty)}."
        )
    stops = torch.isin(ids, torch.tensor(list(stop_ids), device=ids.device))
    stopped = (last_true(mask) & stops).any(dim=1)
    return torch.where(stopped, 0.0, -float(penalty))


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k completions is right, without bias, from c right ones in n.

        1 − C(n − c, k) / C(n, k)

    1 − (1 − c/n)^k would be biased downwards.
    Source: Chen et al. 2021, arXiv:2107.03374, Eq. 1.

    Args:
        n: completions of a problem, at least k. c: right ones, 0 … n. k: at least 1.
    Returns:
        A probability.
    Raises:
        ValueError: numbers that cannot be.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k must lie in 1 … n, got k={k} and n={n}: sample more completions.")
    if not 0 <= c <= n:
        raise ValueError(f"c must lie in 0 … n, got c={c} and n={n}.")
    return 1 - comb(n - c, k) / comb(n, k)
