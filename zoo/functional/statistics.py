"""Error bars and tests for comparing runs: what is no difference must not be called one."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.functional import _checks


class Interval(NamedTuple):
    """An estimate with its confidence interval."""

    estimate: float
    low: float
    high: float


def wilson(successes: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a proportion; it holds at 0, at n and for small n.

        (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n),     p = successes/n

    Source: Wilson 1927, JASA 22:209–212.

    Args:
        successes: 0 … n. n: trials, at least 1. z: normal quantile; 1.959964 for 95 %.
    Returns:
        (low, high), both in [0, 1].
    Raises:
        ValueError: numbers that cannot be.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"successes must lie in 0 … n with n ≥ 1, got {successes} of {n}.")
    _checks.within("z", z, 0.0)
    p, z2 = successes / n, z * z
    centre = p + z2 / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # At 0 and n the exact bound is 0 or 1; rounding may step over it by an ulp.
    low, high = (centre - half) / (1 + z2 / n), (centre + half) / (1 + z2 / n)
    return max(0.0, low), min(1.0, high)


def mcnemar_exact(b: int, c: int) -> float:
    """Exact two-sided p-value of two systems on one set of problems, from their disagreements.

        p = min(1, 2·P[X ≤ min(b, c)]),     X ~ Binomial(b + c, ½)

    Source: McNemar 1947, Psychometrika 12:153–157, in its exact binomial form.

    Args:
        b: problems that only the first solved. c: problems that only the second solved.
    Returns:
        The p-value; 1 without disagreement.
    Raises:
        ValueError: a negative count.
    """
    if b < 0 or c < 0:
        raise ValueError(f"b and c count problems and cannot be negative, got b={b} and c={c}.")
    tail = sum(math.comb(b + c, i) for i in range(min(b, c) + 1))
    return min(1.0, 2 * tail / 2 ** (b + c))


def paired_bootstrap(
    first: Tensor | Sequence[float],
    second: Tensor | Sequence[float],
    *,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """The mean paired difference, with a percentile interval over resampled problems.

        d_i = first_i − second_i;   mean(d),  [quantile_{(1−level)/2}, quantile_{(1+level)/2}] of
        means of n draws of d

    Pairs are resampled together, so the difficulty that both share cancels.
    Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", ch. 13.

    Args:
        first, second: n outcomes each (0/1 or scores), problem by problem in one order.
        resamples: how many. level: of confidence, in (0, 1). seed: of the draws, which touch no
            global generator.
    Returns:
        (estimate, low, high).
    Raises:
        ValueError: no problems, unequal numbers of them, an outcome that is not finite, no
            resamples, or a level outside (0, 1).
    """
    a = torch.as_tensor(first, dtype=torch.float64).cpu()
    b = torch.as_tensor(second, dtype=torch.float64).cpu()
    if a.ndim != 1 or a.shape != b.shape or not a.numel():
        raise ValueError(
            f"first and second must hold the same problems, at least one: "
            f"got shapes {tuple(a.shape)} and {tuple(b.shape)}."
        )
    if not bool((a.isfinite() & b.isfinite()).all()):
        raise ValueError(
            "first and second must be finite: a problem without an outcome is left out of both."
        )
    _checks.within("resamples", resamples, 1)
    _checks.within("level", level, 0.0, 1.0, open_low=True, open_high=True)
    differences = a - b
    generator = torch.Generator().manual_seed(seed)
    n = differences.numel()
    # One resample at a time would be slow, all at once 100 MB for GSM8K.
    means: list[Tensor] = []
    for start in range(0, resamples, 512):
        rows = min(512, resamples - start)
        drawn = torch.randint(n, (rows, n), generator=generator)
        means.append(differences[drawn].mean(dim=1))
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.quantile(torch.cat(means), tails).tolist()
    return Interval(differences.mean().item(), low, high)


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """The mean over seeds with Student's t interval.

        x̄ ± t_{n−1, (1+level)/2} · s/√n,     s with ddof = 1

    One value says nothing about spread: its interval is (−inf, inf).
    Source: Student 1908, Biometrika 6:1–25.

    Args:
        values: one number a seed, at least one. level: of confidence, in (0, 1).
    Returns:
        (estimate, low, high).
    Raises:
        ValueError: no values, one that is not finite, or a level outside (0, 1).
    """
    if not len(values):
        raise ValueError("values is empty: a mean needs at least one run.")
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"values must be finite, got {list(values)}: leave a failed run out.")
    _checks.within("level", level, 0.0, 1.0, open_low=True, open_high=True)
    mean = fmean(values)
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf)
    from scipy.stats import t  # here, so that the rest of the package needs torch and einops alone

    half = float(t.ppf((1 + level) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)
