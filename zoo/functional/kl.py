"""Estimators of KL(π‖ref) from sampled tokens, and what each is good for.

With d = log π(x) − log ref(x) for a token x sampled from π, k1 = d, k2 = d²/2, k3 = e^(−d) − 1 + d.
What an estimator is worth as a *number* (a metric, a price in the reward) and as a *loss* (what its
gradient moves) are two different things; x is drawn once, so a gradient does not see how the
sampling distribution would move:

| name     | expected value | expected gradient | remarks                                          |
|----------|----------------|-------------------|--------------------------------------------------|
| k1       | KL(π‖ref)      | 0                 | a value only: as a loss it is noise              |
| k2       | ½·E d², biased | ∇KL(π‖ref)        | a loss only                                      |
| k3       | KL(π‖ref)      | ∇KL(ref‖π)        | the other direction; ≥ 0; heavy tail: π ≪ ref    |
| k1_k2    | KL(π‖ref)      | ∇KL(π‖ref)        | k1's value, k2's gradient (verl: `k1+`)          |
| k3_k2    | KL(π‖ref)      | ∇KL(π‖ref)        | k3's value, k2's gradient (verl: `k3+`)          |
| k1_ratio | KL(π‖ref)      | ∇KL(π‖ref)        | ρ·k1, ρ = π/π_old with its gradient              |
| k3_ratio | KL(π‖ref)      | ∇KL(π‖ref)        | ρ·k3; less variance than k1_ratio                |

The first five are right only on policy (x ~ π); the last two stay unbiased, in value and gradient,
for x ~ π_old ≠ π. "Gradient" is that of a token's own conditional distribution; the effect of a
token on later prefixes is what a KL price in the *reward* accounts for, and none of these as a
loss.
Sources: Schulman 2020, "Approximating KL divergence" (k1–k3); Shao et al. 2024, arXiv:2402.03300,
Eq. 4 (k3 as a loss); the expectations above are checked by exact enumeration in the tests.
Deviation: nothing is clamped.
"""

import math
from enum import StrEnum

import torch
from torch import Tensor

from zoo.functional import _checks


class KLEstimator(StrEnum):
    """Names of the estimators; the module's table says what each estimates."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    k1_k2 = "k1_k2"
    k3_k2 = "k3_k2"
    k1_ratio = "k1_ratio"
    k3_ratio = "k3_ratio"


def k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """The log-ratio: unbiased for KL(π‖ref) as a value; as a loss its expected gradient is 0.

        k1 = log π(x) − log ref(x)

    Source: Schulman 2020.

    Args:
        logprobs: float, any shape, of the sampled tokens; anything where the mask is False.
        ref_logprobs: the same shape; treated as constant.
        mask: bool, the same shape; None: everything counts.
    Returns:
        float32 (float64 if given it), nats a token, the shape of `logprobs`, 0 outside the mask.
    Raises:
        ValueError: a wrong shape or dtype.
    """
    return _log_ratio(logprobs, ref_logprobs, mask)


def k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Half the squared log-ratio: biased as a value; as a loss its expected gradient is ∇KL(π‖ref).

        k2 = (log π(x) − log ref(x))² / 2

    Source: Schulman 2020. Arguments, result and errors as `k1`.
    """
    return _log_ratio(logprobs, ref_logprobs, mask).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """The log-ratio with a control variate: unbiased, ≥ 0; its expected gradient is ∇KL(ref‖π).

        k3 = ref(x)/π(x) − 1 − log(ref(x)/π(x)) = e^(−d) − 1 + d

    Source: Schulman 2020; Shao et al. 2024, arXiv:2402.03300, Eq. 4. Arguments, result and errors
    as `k1`.
    """
    return _k3(_log_ratio(logprobs, ref_logprobs, mask))


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    estimator: KLEstimator | str,
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """The estimator of KL(π‖ref) of that name, a value per token.

        a_b:     value of a, gradient of b:  sg(a) + b − sg(b)
        a_ratio: ρ·a, ρ = π(x)/π_old(x), with gradient through ρ and a

    E over x ~ π_old of ρ·a is the sum over x of π·a, so its gradient is exactly that of E_π a =
    KL(π‖ref).
    Source: the table of this module; straight-through forms as in verl; the ratio-corrected k3 is
    the unbiased KL estimate of DeepSeek-V3.2, arXiv:2512.02556, and what TRL's GRPO adds unless
    `use_bias_correction_kl=False`, which is the plain k3.

    Args:
        logprobs, ref_logprobs, mask: as `k1`.
        estimator: a `KLEstimator` or its name.
        old_logprobs: the shape of `logprobs`, log-probs under the policy that sampled, treated as
            constant; used by the `_ratio` forms alone. None: the current ones (ρ = 1 with its
            gradient).
    Returns:
        float32 (float64 if given it), nats a token, the shape of `logprobs`, 0 outside the mask.
    Raises:
        ValueError: a wrong shape or dtype, or an unknown name.
    """
    estimator = _checks.member("estimator", estimator, KLEstimator)
    d = _log_ratio(logprobs, ref_logprobs, mask)
    if estimator is KLEstimator.k1:
        return d
    if estimator is KLEstimator.k2:
        return d.square() / 2
    if estimator is KLEstimator.k3:
        return _k3(d)
    if estimator is KLEstimator.k1_k2:
        return _straight_through(d, d.square() / 2)
    if estimator is KLEstimator.k3_k2:
        return _straight_through(_k3(d), d.square() / 2)
    old = logprobs if old_logprobs is None else old_logprobs  # detached by _log_ratio
    ratio = _log_ratio(logprobs, old, mask, "old_logprobs").exp()
    return ratio * (d if estimator is KLEstimator.k1_ratio else _k3(d))


def adaptive_kl_coef(coef: float, kl: float, target: float, steps: int, horizon: int) -> float:
    """The next coefficient of a proportional controller that steers the measured KL to a target.

        β ← β · (1 + clip((KL − target)/target, −0.2, 0.2) · steps / horizon)

    Source: Ziegler et al. 2019, arXiv:1909.08593, §2.2 (its code counts episodes; the paper's gain
    is 0.1).

    Args:
        coef: β > 0. kl: the measured KL, in the units of `target` (nats a completion, usually).
            target: > 0.
        steps: episodes since the last change. horizon: episodes over which β may change by a fifth.
    Returns:
        The new β.
    Raises:
        ValueError: a coefficient, target or horizon that is not positive, a KL that is no number,
            or a negative number of steps.
    """
    _checks.within("coef", coef, 0.0, open_low=True)
    _checks.within("kl", kl, -math.inf)  # NaN would be the coefficient for ever
    _checks.within("target", target, 0.0, open_low=True)
    _checks.within("steps", steps, 0)
    _checks.within("horizon", horizon, 0, open_low=True)
    error = min(max((kl - target) / target, -0.2), 0.2)
    return coef * (1 + error * steps / horizon)


def _log_ratio(
    logprobs: Tensor, other: Tensor, mask: Tensor | None, name: str = "ref_logprobs"
) -> Tensor:
    logprobs = _checks.floats("logprobs", logprobs)
    other = _checks.floats(name, other, logprobs.shape).detach()
    if mask is None:
        return logprobs - other
    mask = _checks.bools("mask", mask, logprobs.shape)
    # On the inputs: a where after an exponential would leave NaN in the gradient.
    return torch.where(mask, logprobs, 0.0) - torch.where(mask, other, 0.0)


def _k3(d: Tensor) -> Tensor:
    return torch.expm1(-d) + d


def _straight_through(value: Tensor, gradient: Tensor) -> Tensor:
    return value.detach() + (gradient - gradient.detach())
