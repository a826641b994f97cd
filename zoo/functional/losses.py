"""Losses per token, per row or per pair: all elementwise, `zoo.functional.aggregate` reduces.

Log-probabilities of the current policy and values of the current critic carry the gradient;
everything else (old and reference log-probs, advantages, returns) is treated as constant. Entries
outside a mask may hold anything.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from zoo.functional import _checks

LOG_RATIO_LIMIT = 20.0  # e^20 is 5e8; past it exp overflows and inf · 0 makes NaN


class RatioLevel(StrEnum):
    """Whose ratio is clipped: each token's (PPO, GRPO), or the sequence's geometric mean (GSPO)."""

    token = "token"
    sequence = "sequence"


class ImportanceKind(StrEnum):
    """What happens to a ratio trainer/sampler beyond the cap, a token's or a whole sequence's."""

    truncated = "truncated"
    masked = "masked"
    sequence_truncated = "sequence_truncated"
    sequence_masked = "sequence_masked"


class Surrogate(NamedTuple):
    """A policy loss per token and what clipping did to it; [B, T], only `loss` has a gradient."""

    loss: Tensor
    ratio: Tensor
    clipped_high: Tensor
    clipped_low: Tensor


class ValueLoss(NamedTuple):
    """A critic's loss per token, and where clipping decided it (bool); both [B, T]."""

    loss: Tensor
    clipped: Tensor


class PreferenceMargins(NamedTuple):
    """Implicit rewards, their difference, and whether it is positive (bool); [N], no gradient."""

    chosen: Tensor
    rejected: Tensor
    margin: Tensor
    correct: Tensor


# --- policy gradients -----------------------------------------------------------------------------


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    dual_clip: float | None = None,
    ratio_level: RatioLevel | str = RatioLevel.token,
) -> Surrogate:
    """PPO's clipped policy loss; a wider upper bound, a dual clip, a sequence ratio as options.

        l_t = −min(ρ_t·A_t, clip(ρ_t, 1 − ε_low, 1 + ε_high)·A_t);    ρ_t = π(x_t)/π_old(x_t)
        dual clip, where A_t < 0:   l_t = min(that, −c·A_t)
        sequence:   ρ_t = exp(1/n · Σ_t log π(x_t)/π_old(x_t)), the same for all n tokens of a row

    A token counts as clipped only where clipping removes its gradient: high is ρ > 1 + ε_high with
    A > 0, low is ρ < 1 − ε_low with A < 0; outside the mask neither. With a sequence ratio and an
    advantage that is constant in a row, the mean over tokens and then rows (`Average.sequence`) is
    GSPO's loss and has its gradient.
    Sources: Schulman et al. 2017, arXiv:1707.06347, Eq. 7; Yu et al. 2025, arXiv:2503.14476, Eq. 8
    (ε_high); Ye et al. 2020, arXiv:1912.09729 (dual clip); Zheng et al. 2025, arXiv:2507.18071, Eq.
    5 and 7 (sequence).
    Deviations: log ρ is limited to ±20, beyond which the exponential overflows; OpenRLHF and verl
    do the same, TRL does not. TRL's `delta` is this c where it exceeds 1 + ε_high; below, it caps ρ
    where A_t > 0 too.

    Args:
        logprobs: [B, T] float, current policy.
        old_logprobs: [B, T] float, the policy that the batch was frozen under; None: the current
            one, detached, so that ρ is exactly 1 and the gradient is the policy gradient (right
            only for the first update on a batch).
        advantages: [B, T] float.
        mask: [B, T] bool, the trained tokens.
        clip_eps: ε_low ≥ 0, and ε_high where that is None.
        clip_eps_high: ε_high ≥ 0.
        dual_clip: c > 1, or None for none.
        ratio_level: `token` or `sequence`.
    Returns:
        loss, ratio (detached; 1 outside the mask), clipped_high and clipped_low (bool).
    Raises:
        ValueError: a wrong shape, dtype or option.
    """
    clip_eps_high = clip_eps if clip_eps_high is None else clip_eps_high
    _checks.within("clip_eps", clip_eps, 0.0)
    _checks.within("clip_eps_high", clip_eps_high, 0.0)
    if dual_clip is not None:
        _checks.within("dual_clip", dual_clip, 1.0, open_low=True)
    ratio_level = _checks.member("ratio_level", ratio_level, RatioLevel)
    log_ratio, advantages, mask = _policy_inputs(logprobs, old_logprobs, advantages, mask)[1:]
    if ratio_level is RatioLevel.sequence:
        trained = mask.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio = torch.where(mask, log_ratio.sum(dim=1, keepdim=True) / trained, 0.0)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    low, high = 1 - clip_eps, 1 + clip_eps_high
    objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if dual_clip is not None:
        objective = torch.where(
            advantages < 0, torch.maximum(objective, dual_clip * advantages), objective
        )
    ratio = ratio.detach()
    return Surrogate(
        loss=-objective,
        ratio=ratio,
        clipped_high=(ratio > high) & (advantages > 0),
        clipped_low=(ratio < low) & (advantages < 0),
    )


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_eps_high: float = 5.0,
    clip_eps_low: float | None = None,
) -> Surrogate:
    """Policy gradient with a clipped, constant importance weight: no token loses its gradient.

        l_t = −sg(clip(ρ_t, 1 − ε_low, 1 + ε_high)) · A_t · log π(x_t)

    The value of this loss means nothing; its gradient does. Clipped means here that the weight was
    cut, whatever the advantage's sign.
    Source: MiniMax 2025, arXiv:2506.13585, Eq. 4–5. The paper sets no lower bound (ε_low = None)
    and leaves ε_high to tuning. Deviation: log ρ is limited to ±20, as in `clipped_surrogate`. In
    TRL the weight is at most `epsilon_high`, which is 1 + ε_high here.

    Args:
        logprobs, old_logprobs, advantages, mask: as `clipped_surrogate`.
        clip_eps_high: ε_high ≥ 0; the weight is at most 1 + ε_high.
        clip_eps_low: ε_low ≥ 0; None: no lower bound.
    Returns:
        loss, ratio (unclipped, detached; 1 outside the mask), clipped_high and clipped_low (bool).
    Raises:
        ValueError: a wrong shape, dtype or option.
    """
    _checks.within("clip_eps_high", clip_eps_high, 0.0)
    low = 0.0
    if clip_eps_low is not None:
        low = 1 - _checks.within("clip_eps_low", clip_eps_low, 0.0)
    logprobs, log_ratio, advantages, _ = _policy_inputs(logprobs, old_logprobs, advantages, mask)
    high = 1 + clip_eps_high
    ratio = log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return Surrogate(
        loss=-ratio.clamp(low, high) * advantages * logprobs,
        ratio=ratio,
        clipped_high=ratio > high,
        clipped_low=ratio < low,
    )


def importance_weights(
    logprobs_trainer: Tensor,
    logprobs_sampler: Tensor,
    mask: Tensor,
    *,
    kind: ImportanceKind | str = ImportanceKind.truncated,
    cap: float = 2.0,
    floor: float = 0.0,
) -> Tensor:
    """Weights that correct for a sampler which is not quite the trainer's policy.

        w = π_trainer(x)/π_sampler(x)
        truncated: min(w, cap);   masked: w if floor ≤ w ≤ cap, else 0

    Per token, or for the `sequence_` kinds with the product over a row's trained tokens, one weight
    for all of them. Multiply a loss per token by it before `aggregate`. Token weights are biased
    but tame; sequence weights are unbiased below the cap, and vary exponentially with length.
    Source: truncated, Yao et al. 2025 ("Your efficient RL framework secretly brings you off-policy
    RL training"); sequence and masked forms as in TRL's and verl's options. Deviation: log w is
    limited to ±20.

    Args:
        logprobs_trainer: [B, T] float, by the training forward, before the update.
        logprobs_sampler: [B, T] float, as recorded while sampling.
        mask: [B, T] bool, the trained tokens.
        kind: an `ImportanceKind` or its name.
        cap: > 0, the largest weight.
        floor: in [0, cap], the smallest weight that the masked kinds keep; the truncated kinds take
            none.
    Returns:
        [B, T] float32 (float64 if given it), 0 outside the mask, without gradient.
    Raises:
        ValueError: a wrong shape, dtype or option, or a floor with a truncated kind.
    """
    kind = _checks.member("kind", kind, ImportanceKind)
    _checks.within("cap", cap, 0.0, open_low=True)
    _checks.within("floor", floor, 0.0, cap)
    truncates = kind in (ImportanceKind.truncated, ImportanceKind.sequence_truncated)
    if truncates and floor:
        raise ValueError(
            f"floor={floor} has no effect with kind={kind.value}. Use floor=0, or a masked kind."
        )
    trainer = _checks.floats("logprobs_trainer", logprobs_trainer, ndim=2).detach()
    sampler = _checks.floats("logprobs_sampler", logprobs_sampler, trainer.shape).detach()
    mask = _checks.bools("mask", mask, trainer.shape)
    log_weights = torch.where(mask, trainer - sampler, 0.0)
    if kind in (ImportanceKind.sequence_truncated, ImportanceKind.sequence_masked):
        log_weights = log_weights.sum(dim=1, keepdim=True).expand_as(mask)
    weights = log_weights.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if truncates:
        weights = weights.clamp(max=cap)
    else:
        weights = torch.where((weights >= floor) & (weights <= cap), weights, 0.0)
    return torch.where(mask, weights, 0.0)


# --- critic ---------------------------------------------------------------------------------------


def value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor | None,
    mask: Tensor,
    *,
    clip: float | None = None,
) -> ValueLoss:
    """Half the squared error of the critic, pessimistic about moves larger than `clip`.

        l_t = ½·max((V_t − R_t)², (clip(V_t, V_old − c, V_old + c) − R_t)²)
        clip=None:   l_t = ½·(V_t − R_t)²

    Source: PPO's reference code (baselines `ppo2`); no equation in the paper, whose Eq. 9 has the
    plain square.

    Args:
        values: [B, T] float, current critic.
        returns: [B, T] float, the targets.
        old_values: [B, T] float, the critic's when the batch was prepared; may be None without
            clip.
        mask: [B, T] bool, the trained tokens.
        clip: c > 0, in units of the value; None: not clipped.
    Returns:
        loss, and where the clipped error was the larger (bool).
    Raises:
        ValueError: a wrong shape or dtype, c ≤ 0, or a clip without old values.
    """
    values = _checks.floats("values", values, ndim=2)
    returns = _checks.floats("returns", returns, values.shape).detach()
    mask = _checks.bools("mask", mask, values.shape)
    values = torch.where(mask, values, 0.0)
    returns = torch.where(mask, returns, 0.0)
    squares = (values - returns).square()
    if clip is None:
        return ValueLoss(squares / 2, torch.zeros_like(mask))
    _checks.within("clip", clip, 0.0, open_low=True)
    if old_values is None:
        raise ValueError(f"clip={clip} needs old_values, got None. Pass them, or clip=None.")
    old_values = _checks.floats("old_values", old_values, values.shape).detach()
    old_values = torch.where(mask, old_values, 0.0)
    clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return ValueLoss(torch.maximum(squares, clipped) / 2, (clipped > squares).detach())


# --- likelihood -----------------------------------------------------------------------------------


def nll(logprobs: Tensor, mask: Tensor) -> Tensor:
    """The negative log-likelihood of the trained tokens, 0 elsewhere.

        l_t = −log p(x_t | x_<t)

    Source: none needed; with `Average.token` it is the usual cross-entropy of supervised
    fine-tuning.

    Args:
        logprobs: [B, T] float. mask: [B, T] bool, the trained tokens.
    Returns:
        [B, T] float32 (float64 if given it).
    Raises:
        ValueError: a wrong shape or dtype.
    """
    logprobs = _checks.floats("logprobs", logprobs, ndim=2)
    return torch.where(_checks.bools("mask", mask, logprobs.shape), -logprobs, 0.0)


def sequence_logprobs(logprobs: Tensor, mask: Tensor, average: bool) -> Tensor:
    """The log-probability of each completion: the sum over its trained tokens, or their mean.

        Σ_t log p(x_t | x_<t)         average:  1/n · Σ_t log p(x_t | x_<t)

    DPO, KTO and the IPO paper take the sum; SimPO and ORPO the mean; IPO in TRL the mean. An empty
    completion is refused: its sum of 0 would be the most likely of all, its mean 0/0.
    Source: the mean, Meng et al. 2024, arXiv:2405.14734, Eq. 3; the sum is the chain rule.

    Args:
        logprobs: [B, T] float. mask: [B, T] bool, the trained tokens. average: mean instead of sum.
    Returns:
        [B] float32 (float64 if given it), nats.
    Raises:
        ValueError: a wrong shape or dtype, or rows without trained tokens, named by index.
    """
    logprobs = _checks.floats("logprobs", logprobs, ndim=2)
    mask = _checks.bools("mask", mask, logprobs.shape)
    trained = mask.sum(dim=1)
    empty = (trained == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"mask has no trained token in row(s) {empty}: an empty completion has no likelihood "
            f"to compare. Drop the pair, and count it."
        )
    total = torch.where(mask, logprobs, 0.0).sum(dim=1)
    return total / trained if average else total


# --- preferences ----------------------------------------------------------------------------------


def dpo_sigmoid(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """DPO: logistic loss of the implicit reward's margin; with label smoothing, conservative DPO.

        m = β·[(π_c − ref_c) − (π_r − ref_r)];     l = −(1 − ε)·log σ(m) − ε·log σ(−m)

    At the start (π = ref) it is ln 2 whatever ε is.
    Sources: Rafailov et al. 2023, arXiv:2305.18290, Eq. 7; Mitchell 2023, "A note on DPO with noisy
    preferences" (ε). TRL's `sigmoid` ignores its label_smoothing: it has no cDPO under that name.

    Args:
        policy_chosen, policy_rejected: [N] float, log-probs of whole completions (sums) by the
            current policy.
        ref_chosen, ref_rejected: [N] float, by the reference; constants.
        beta: β > 0; larger holds the policy closer to the reference.
        label_smoothing: ε in [0, ½), the assumed share of labels that are the wrong way round.
    Returns:
        [N] float32 (float64 if given it).
    Raises:
        ValueError: a wrong shape, dtype or option.
    """
    chosen, rejected = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta)
    margin = beta * (chosen - rejected)
    _checks.within("label_smoothing", label_smoothing, 0.0, 0.5, open_high=True)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def dpo_robust(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    """DPO corrected for flipped labels: its mean over flips of rate ε is the loss of clean ones.

        l = (−(1 − ε)·log σ(m) + ε·log σ(−m)) / (1 − 2ε)

    It is ln 2 at the start, and not bounded below.
    Source: Chowdhury et al. 2024, arXiv:2403.00409. Arguments, result and errors as `dpo_sigmoid`.
    """
    chosen, rejected = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta)
    margin = beta * (chosen - rejected)
    _checks.within("label_smoothing", label_smoothing, 0.0, 0.5, open_high=True)
    clean = -(1 - label_smoothing) * logsigmoid(margin) + label_smoothing * logsigmoid(-margin)
    return clean / (1 - 2 * label_smoothing)


def nll_mixed(
    losses: Tensor, policy_chosen: Tensor, chosen_lengths: Tensor, nll_coef: float
) -> Tensor:
    """A preference loss mixed with the chosen completion's likelihood, which DPO alone lets fall.

        l = l_preference − α·1/|y_c| · log π(y_c)

    The second term is each completion's mean over its own tokens, so a long one weighs as much as a
    short one. With `dpo_sigmoid` it is DPO + NLL.
    Source: Pang et al. 2024, arXiv:2404.19733, the DPO + NLL objective of §2, in which α stands
    before the preference loss instead; Llama 3, arXiv:2407.21783, §4.1.4, adds it with α = 0.2.
    Deviation from TRL (`loss_type=["sigmoid", "sft"]`), whose likelihood is one mean over all
    chosen tokens of a micro-batch.

    Args:
        losses: [N] float, a loss of each pair.
        policy_chosen: [N] float, log-probs (sums) of the chosen completions by the current policy.
        chosen_lengths: [N] integers, trained tokens of each chosen completion, at least 1.
        nll_coef: α ≥ 0.
    Returns:
        [N] float32 (float64 if given it).
    Raises:
        ValueError: a wrong shape, dtype or option, or a length below 1.
    """
    losses, policy_chosen = _pair(losses, policy_chosen, "losses", "policy_chosen")
    lengths = _checks.integers("chosen_lengths", chosen_lengths, losses.shape)
    _checks.within("nll_coef", nll_coef, 0.0)
    if bool((lengths < 1).any()):
        raise ValueError(
            f"chosen_lengths must be at least 1, got {int(lengths.min())}: an empty completion has "
            f"no mean log-prob. Drop the pair, and count it."
        )
    return losses - nll_coef * policy_chosen / lengths


def ipo(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
) -> Tensor:
    """IPO: squared distance of the log-ratio margin from the finite target 1/(2β).

        h = (π_c − ref_c) − (π_r − ref_r);     l = (h − 1/(2β))²

    Its minimum is at h = 1/(2β); at the start it is 1/(4β²). Whether h is of sums (the paper,
    OpenRLHF) or of means over each completion's tokens (TRL) is the caller's choice in
    `sequence_logprobs`; the same β means another thing.
    Source: Azar et al. 2023, arXiv:2310.12036, Eq. 17 (τ there is β here).

    Args:
        policy_chosen, policy_rejected, ref_chosen, ref_rejected: [N] float, sums or means.
        beta: β > 0.
    Returns:
        [N] float32 (float64 if given it).
    Raises:
        ValueError: a wrong shape or dtype, or β ≤ 0.
    """
    chosen, rejected = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta)
    return (chosen - rejected - 1 / (2 * beta)).square()


def hinge(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
) -> Tensor:
    """The hinge loss of the implicit reward's margin: no gradient once it reaches 1.

        l = max(0, 1 − m)

    Source: Zhao et al. 2023, arXiv:2305.10425 (SLiC-HF), with the normalised likelihoods of Liu et
    al. 2023, arXiv:2309.06657. Arguments, result and errors as `ipo`.
    """
    chosen, rejected = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta)
    return torch.relu(1 - beta * (chosen - rejected))


def simpo(policy_chosen: Tensor, policy_rejected: Tensor, beta: float, margin: float) -> Tensor:
    """SimPO: a logistic loss without reference, on mean log-probs, that asks for a margin.

        l = −log σ(β·(π̄_c − π̄_r) − γ),     π̄ = 1/|y| · log π(y)

    Source: Meng et al. 2024, arXiv:2405.14734, Eq. 6.

    Args:
        policy_chosen, policy_rejected: [N] float, *mean* log-probs (`sequence_logprobs(…,
            average=True)`).
        beta: β > 0 (the paper: 2 to 10).
        margin: γ ≥ 0, in units of β times nats (the paper: 0.3 to 1.6).
    Returns:
        [N] float32 (float64 if given it).
    Raises:
        ValueError: a wrong shape or dtype, β ≤ 0 or γ < 0.
    """
    chosen, rejected = _pair(policy_chosen, policy_rejected, "policy_chosen", "policy_rejected")
    _checks.within("beta", beta, 0.0, open_low=True)
    _checks.within("margin", margin, 0.0)
    return -logsigmoid(beta * (chosen - rejected) - margin)


def orpo(policy_chosen: Tensor, policy_rejected: Tensor) -> Tensor:
    """ORPO's odds-ratio term: the chosen completion's odds over the rejected one's.

        l_OR = −log σ(log odds_c − log odds_r);     odds = p/(1 − p),   log p = 1/|y| · log π(y)

    The whole loss is nll(chosen) + λ·l_OR; the caller adds the two. No reference.
    Source: Hong et al. 2024, arXiv:2403.07691, Eq. 6–7. Deviation: log p is at most −ε of the
    dtype, since odds of a certain completion are infinite.

    Args:
        policy_chosen, policy_rejected: [N] float, *mean* log-probs, at most 0.
    Returns:
        [N] float32 (float64 if given it).
    Raises:
        ValueError: a wrong shape or dtype.
    """
    chosen, rejected = _pair(policy_chosen, policy_rejected, "policy_chosen", "policy_rejected")
    return -logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def kto_baseline(policy: Tensor, reference: Tensor) -> Tensor:
    """KTO's reference point: the mean log-ratio of *mismatched* prompts and completions, if > 0.

        z₀ = max(0, 1/N · Σ_i (log π(y'_i | x_i) − log ref(y'_i | x_i)))

    A statistic of the whole optimizer step over all ranks: give it all rows.
    Source: Ethayarajh et al. 2024, arXiv:2402.01306, the estimate of z₀ in §4.1. Deviation: the
    paper and TRL take it of each micro-batch, where z₀ varies with how the step was cut.

    Args:
        policy, reference: [N] float, log-probs (sums) of the mismatched completions; N ≥ 1.
    Returns:
        A scalar, without gradient.
    Raises:
        ValueError: a wrong shape or dtype, or no rows.
    """
    policy, reference = _pair(policy, reference, "policy", "reference")
    if not policy.numel():
        raise ValueError("policy has no rows: the baseline is a mean over mismatched pairs.")
    return (policy - reference).mean().clamp(min=0).detach()


def kto(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    kl_baseline: Tensor | float,
    beta: float,
    *,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO: a saturating loss on single completions that are labelled desirable or not.

        desirable:    l = λ_D·(1 − σ(β·(h − z₀)))         h = log π(y|x) − log ref(y|x)
        undesirable:  l = λ_U·(1 − σ(β·(z₀ − h)))

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, Eq. 8 (Eq. 7 in the first version).

    Args:
        policy, reference: [N] float, log-probs (sums) of whole completions.
        desirable: [N] bool.
        kl_baseline: z₀ from `kto_baseline`: a number, a scalar tensor, or [N] with the same number
            in each row.
        beta: β > 0.
        desirable_weight, undesirable_weight: λ_D, λ_U ≥ 0; λ_D·n_D/(λ_U·n_U) between 1 and 4/3 is
            the paper's advice (3/2 in its last version).
    Returns:
        [N] float32 (float64 if given it).
    Raises:
        ValueError: a wrong shape, dtype or option.
    """
    policy, reference = _pair(policy, reference, "policy", "reference")
    desirable = _checks.bools("desirable", desirable, policy.shape)
    _checks.within("beta", beta, 0.0, open_low=True)
    _checks.within("desirable_weight", desirable_weight, 0.0)
    _checks.within("undesirable_weight", undesirable_weight, 0.0)
    if not isinstance(kl_baseline, (int, float)):
        single = isinstance(kl_baseline, Tensor) and not kl_baseline.ndim
        shape = () if single else policy.shape
        kl_baseline = _checks.floats("kl_baseline", kl_baseline, shape).detach()
    gain = beta * (policy - reference.detach() - kl_baseline)
    # 1 − σ(x) = σ(−x), without the cancellation.
    return torch.where(
        desirable,
        desirable_weight * torch.sigmoid(-gain),
        undesirable_weight * torch.sigmoid(gain),
    )


def preference_margins(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
) -> PreferenceMargins:
    """Implicit rewards of both completions, their margin, who is right: metrics, no gradient.

        r = β·(log π(y) − log ref(y));     margin = r_c − r_r;     correct = margin > 0

    Source: Rafailov et al. 2023, arXiv:2305.18290, Eq. 5 (without the partition function, which
    cancels). Arguments and errors as `ipo`.
    """
    chosen, rejected = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta)
    chosen, rejected = beta * chosen.detach(), beta * rejected.detach()
    margin = chosen - rejected
    return PreferenceMargins(chosen, rejected, margin, margin > 0)


# --- reward models --------------------------------------------------------------------------------


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float | None = None, centre: float = 0.0
) -> Tensor:
    """The negative log-likelihood that the chosen completion wins, with scores as log-strengths.

        l = −log σ(r_c − r_r − margin) + centre·(r_c + r_r)²

    Sources: Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, Eq. 1; margin, Touvron et
    al. 2023, arXiv:2307.09288, Eq. 2; centring, Eisenstein et al. 2023, arXiv:2312.09244. log σ is
    computed without overflow.

    Args:
        chosen, rejected: [N] float scores.
        margin: how much better, in units of the score: [N] float or a number; None: 0.
        centre: coefficient ≥ 0 that pulls scores to mean 0, which the likelihood leaves free.
    Returns:
        [N] float32 (float64 if given it).
    Raises:
        ValueError: a wrong shape or dtype, or a negative coefficient.
    """
    chosen = _checks.floats("chosen", chosen, ndim=1)
    rejected = _checks.floats("rejected", rejected, chosen.shape)
    _checks.within("centre", centre, 0.0)
    difference = chosen - rejected
    if margin is not None and not isinstance(margin, (int, float)):
        margin = _checks.floats("margin", margin, chosen.shape).detach()
    if margin is not None:
        difference = difference - margin
    losses = -logsigmoid(difference)
    if centre:  # 0 · inf would be NaN
        losses = losses + centre * (chosen + rejected).square()
    return losses


def bradley_terry_ranked(
    scores: Tensor,
    ranks: Tensor,
    *,
    present: Tensor | None = None,
    margin: Tensor | None = None,
    centre: float = 0.0,
) -> Tensor:
    """Bradley–Terry over all pairs of unequal rank among K outputs, divided by their number.

        l = 1/P · Σ_{(i,j): rank_i < rank_j} [−log σ(r_i − r_j − margin_ij) + centre·(r_i + r_j)²]

    with P the number of such pairs. Rank 1 is the best; equal ranks are ties and form no pair; a
    row of ties alone gives 0. A prompt counts once, however many outputs were ranked, so that K
    outputs need K forwards and do not overfit as K(K−1)/2 separate pairs would.
    Source: Ouyang et al. 2022, arXiv:2203.02155, Eq. 1 and §3.5. K = 2 is `bradley_terry`, where
    the sources of margin and centring are.

    Args:
        scores: [N, K] float.
        ranks: [N, K] integers or floats, smaller is better.
        present: [N, K] bool; False: a place without an output (fewer than K were ranked), which is
            in no pair. None: all are there.
        margin: [N, K, K] float, how much better i is than j in units of the score; None: 0.
        centre: coefficient ≥ 0 that pulls scores to mean 0.
    Returns:
        [N] float32 (float64 if given it).
    Raises:
        ValueError: a wrong shape or dtype, or a negative coefficient.
    """
    scores = _checks.floats("scores", scores, ndim=2)
    _checks.within("centre", centre, 0.0)
    wins = ranked_pairs(_ranks(ranks, scores.shape), present)
    if present is not None:
        scores = torch.where(present, scores, 0.0)  # absent ones may hold NaN
    difference = scores[:, :, None] - scores[:, None, :]
    if margin is not None:
        margin = _checks.floats("margin", margin, wins.shape).detach()
        difference = difference - torch.where(wins, margin, 0.0)
    losses = -logsigmoid(difference)
    if centre:  # 0 · inf would be NaN
        losses = losses + centre * (scores[:, :, None] + scores[:, None, :]).square()
    pairs = wins.sum(dim=(1, 2)).clamp(min=1)
    return torch.where(wins, losses, 0.0).sum(dim=(1, 2)) / pairs


def ranked_pairs(ranks: Tensor, present: Tensor | None = None) -> Tensor:
    """Which output i has the better (smaller) rank than which output j, both being there.

        w_ij = rank_i < rank_j ∧ present_i ∧ present_j

    Source: the pairs of Ouyang et al. 2022, arXiv:2203.02155, Eq. 1.

    Args:
        ranks: [N, K] integers or floats.
        present: [N, K] bool; None: all are there.
    Returns:
        [N, K, K] bool.
    Raises:
        ValueError: a wrong shape or dtype.
    """
    ranks = _ranks(ranks)
    wins = ranks[:, :, None] < ranks[:, None, :]
    if present is not None:
        present = _checks.bools("present", present, ranks.shape)
        wins = wins & present[:, :, None] & present[:, None, :]
    return wins


def _ranks(ranks: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    check = _checks.integers
    if isinstance(ranks, Tensor) and ranks.is_floating_point():
        check = _checks.floats
    return check("ranks", ranks, shape, ndim=2)


# --- shared ---------------------------------------------------------------------------------------


def _policy_inputs(
    logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Checked logprobs, log-ratio, advantages (all 0 outside the mask) and mask."""
    logprobs = _checks.floats("logprobs", logprobs, ndim=2)
    old = logprobs if old_logprobs is None else old_logprobs
    old = _checks.floats("old_logprobs", old, logprobs.shape).detach()
    advantages = _checks.floats("advantages", advantages, logprobs.shape).detach()
    mask = _checks.bools("mask", mask, logprobs.shape)
    # On the inputs: a where after an exponential would leave NaN in the gradient.
    logprobs = torch.where(mask, logprobs, 0.0)
    old = torch.where(mask, old, 0.0)
    return logprobs, logprobs - old, torch.where(mask, advantages, 0.0), mask


def _pair(
    first: Tensor, second: Tensor, first_name: str, second_name: str
) -> tuple[Tensor, Tensor]:
    first = _checks.floats(first_name, first, ndim=1)
    return first, _checks.floats(second_name, second, first.shape)


def _log_ratios(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """log π/ref of the chosen and of the rejected completions, after all checks."""
    chosen, rejected = _pair(policy_chosen, policy_rejected, "policy_chosen", "policy_rejected")
    ref_chosen = _checks.floats("ref_chosen", ref_chosen, chosen.shape).detach()
    ref_rejected = _checks.floats("ref_rejected", ref_rejected, chosen.shape).detach()
    _checks.within("beta", beta, 0.0, open_low=True)
    return chosen - ref_chosen, rejected - ref_rejected


def _log_odds(logprobs: Tensor) -> Tensor:
    logprobs = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    return logprobs - torch.log(-torch.expm1(logprobs))
