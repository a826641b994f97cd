"""Advantages: how much better than expected a completion, or a token, was.

Everything here is a target, so results never carry a gradient. Statistics are over the rows given:
when a batch is spread over ranks, groups must not be (sources shard whole groups), and batch
statistics are pooled by the caller with `moments`.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from zoo.functional import _checks
from zoo.functional._masks import last_true


class DeadGroups(NamedTuple):
    """Which groups carry no signal, and why: bool [N] each; the last three partition the first."""

    dead: Tensor
    all_right: Tensor
    all_wrong: Tensor
    tied: Tensor


def group_advantages(
    rewards: Tensor,
    group_size: int,
    *,
    scored: Tensor | None = None,
    scale_by_std: bool = True,
    std_over: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Each reward minus its group's mean, over the deviation of the group (or of the batch).

        A_i = (r_i − mean(r)) / (std(r) + ε)          scale_by_std=False:  A_i = r_i − mean(r)

    A group is dead when its largest reward equals its smallest (also: one scored row, or none); its
    advantages are exactly 0. The test is not `std == 0`: eight rewards of 0.7 have a mean that
    rounds, hence a tiny std, and dividing by it gave |A| = 0.81. Rows that the reward could not
    score enter no statistic and get 0.
    Source: Shao et al. 2024, arXiv:2402.03300, §4.1.2; without the std, Liu et al. 2025,
    arXiv:2503.20783.
    Deviations: the paper states neither ddof nor ε; the sample's std (ddof = 1) is what TRL and
    verl take, with ε = 1e-4 and 1e-6. TRL has no test for a dead group: its rounding passes.

    Args:
        rewards: [N·G] float, groups contiguous, any scale; anything where `scored` is False.
        group_size: G, at least 1; a group of one has advantage 0.
        scored: [N·G] bool, False where the reward abstained; None: all scored.
        scale_by_std: divide by the standard deviation.
        std_over: `group`, or `batch`: one deviation of all scored rewards (means stay the groups').
        ddof: 1, the sample's deviation, or 0, the population's.
        eps: ε, added to the deviation, in units of the reward.
    Returns:
        [N·G] float32 (float64 if given it), without gradient.
    Raises:
        ValueError: a wrong shape, dtype or option, N·G is no multiple of G, or a scored reward is
            not finite.
    """
    rewards, scored = _rewards(rewards, scored)
    _group_size(rewards, group_size, least=1)
    groups = _contiguous(rewards, scored, group_size)
    return _normalised(rewards, groups, scale_by_std, std_over, ddof, eps, loo=False)


def group_advantages_by_id(
    rewards: Tensor,
    prompt_ids: Tensor | Sequence[Hashable],
    *,
    scored: Tensor | None = None,
    scale_by_std: bool = True,
    std_over: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """`group_advantages` for uneven or shuffled groups: rows of one prompt id form a group.

        A_i = (r_i − mean_{j: id_j = id_i} r_j) / (std + ε)

    Source and deviations as `group_advantages`.

    Args:
        rewards: [B] float, in any order; anything where `scored` is False.
        prompt_ids: one id a row: [B] integers, or a sequence of B hashable values.
        scored, scale_by_std, std_over, ddof, eps: as in `group_advantages`.
    Returns:
        [B] float32 (float64 if given it), without gradient, in the order of the rows.
    Raises:
        ValueError: as `group_advantages`; or the number of ids is not B.
    """
    rewards, scored = _rewards(rewards, scored)
    if not isinstance(prompt_ids, Tensor):
        numbers: dict[Hashable, int] = {}
        prompt_ids = torch.tensor([numbers.setdefault(each, len(numbers)) for each in prompt_ids])
        prompt_ids = prompt_ids.long()  # an empty list makes a float tensor
    ids = _checks.integers("prompt_ids", prompt_ids, rewards.shape).to(rewards.device)
    unique, group_of = torch.unique(ids, return_inverse=True)
    # A matrix of membership, not scatter_add, whose order of summation varies on some devices.
    members = ids == unique[:, None]  # [N, B]
    groups = _Groups(rewards.expand(members.shape), members & scored, group_of, scored)
    return _normalised(rewards, groups, scale_by_std, std_over, ddof, eps, loo=False)


def leave_one_out(
    rewards: Tensor,
    group_size: int,
    *,
    scored: Tensor | None = None,
    scale_by_std: bool = False,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Each reward minus the mean of the *other* rewards in its group.

        A_i = r_i − 1/(G−1) · Σ_{j≠i} r_j            scale_by_std=True:  A_i / (std(r_1 … r_G) + ε)

    Unbiased: the baseline does not depend on completion i. Equals G/(G−1) times the centred reward.
    When scaled, the deviation is the *full* group's, which bounds |A| by √G (ddof = 1); the
    deviation of the others alone is 0 as soon as they agree, and A then explodes. Unscored rows
    enter no statistic and get 0; so does a group whose largest reward equals its smallest.
    Source: Kool et al. 2019 ("Buy 4 REINFORCE samples, get a baseline for free!"); Ahmadian et al.
    2024, arXiv:2402.14740, the RLOO estimator. Deviation: neither scales. TRL's
    `normalize_advantages` whitens the A_i of the whole batch instead.

    Args:
        rewards: [N·G] float, groups contiguous; any scale; anything where `scored` is False.
        group_size: G, at least 2.
        scored: [N·G] bool, False where the reward abstained; None: all scored.
        scale_by_std: divide by the full group's standard deviation.
        ddof: 1, the sample's deviation, or 0, the population's.
        eps: ε, added to the deviation, in units of the reward.
    Returns:
        [N·G] float32 (float64 if given it), without gradient.
    Raises:
        ValueError: G < 2, N·G is no multiple of G, a wrong shape or dtype, or a scored reward is
            not finite.
    """
    rewards, scored = _rewards(rewards, scored)
    _group_size(rewards, group_size, least=2)
    groups = _contiguous(rewards, scored, group_size)
    return _normalised(rewards, groups, scale_by_std, "group", ddof, eps, loo=True)


def dead_groups(
    rewards: Tensor,
    group_size: int,
    scored: Tensor | None = None,
    *,
    best: float = 1.0,
    worst: float = 0.0,
) -> DeadGroups:
    """Which groups have advantage 0 in every row: all right, all wrong, or merely tied.

        dead = (max r == min r over the scored rows)
        all_right = dead ∧ r ≥ best;   all_wrong = dead ∧ r ≤ worst;   tied = the other dead ones

    From the rewards, per group, whatever the normalisation. A group without a scored row is dead
    and tied.
    Source: the groups that dynamic sampling drops, Yu et al. 2025, arXiv:2503.14476, Eq. 11.
    Deviation: by the reward, where the paper counts right answers.

    Args:
        rewards: [N·G] float, groups contiguous; anything where `scored` is False.
        group_size: G, at least 1.
        scored: [N·G] bool, False where the reward abstained; None: all scored.
        best: the reward of a right completion.
        worst: the reward of a wrong one, below `best`.
    Returns:
        Four bool tensors [N].
    Raises:
        ValueError: a wrong shape or dtype, worst ≥ best, or a scored reward is not finite.
    """
    if not worst < best:
        raise ValueError(f"worst must be below best, got worst={worst} and best={best}.")
    rewards, scored = _rewards(rewards, scored)
    _group_size(rewards, group_size, least=1)
    grouped = rearrange(rewards, "(n g) -> n g", g=group_size)
    counted = rearrange(scored, "(n g) -> n g", g=group_size)
    smallest, largest = _extremes(grouped, counted)
    dead = largest <= smallest
    some = counted.any(dim=1)
    all_right = dead & some & (smallest >= best)
    all_wrong = dead & some & (largest <= worst)
    return DeadGroups(dead, all_right, all_wrong, dead & ~all_right & ~all_wrong)


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    bootstrap: Tensor | None = None,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the trained tokens of each row.

        δ_t = r_t + γ·V_{t+1} − V_t;     A_t = δ_t + γλ·A_{t+1};     R_t = A_t + V_t

    t+1 is the *next trained token*: positions outside the mask (prompt, padding, a tool's tokens
    between two turns) are stepped over, neither rewarded nor discounted. After the last one V is
    `bootstrap` and A is 0. λ = 1 is the Monte Carlo return minus V; λ = 0 is the one-step error δ.
    Source: Schulman et al. 2016, arXiv:1506.02438, Eq. 16, in the truncated form of
    arXiv:1707.06347, Eq. 11–12.
    Deviation from TRL's PPO, which reads V once more at the padding after a stop token and puts the
    score there: its row is one step longer than its completion.

    Args:
        token_rewards: [B, T] float; anything where the mask is False.
        values: [B, T] float, the value of the prefix *before* token t; anything where the mask is
            False.
        mask: [B, T] bool, the trained tokens.
        bootstrap: [B] float, V(s_T) of rows that were cut by length, 0 for rows that ended; None:
            all ended.
        gamma: γ in [0, 1].
        gae_lambda: λ in [0, 1].
    Returns:
        advantages and returns, [B, T] float32 (float64 if given it), 0 outside the mask, without
        gradient.
    Raises:
        ValueError: a wrong shape or dtype, or γ or λ outside [0, 1].
    """
    token_rewards = _checks.floats("token_rewards", token_rewards, ndim=2).detach()
    values = _checks.floats("values", values, token_rewards.shape).detach()
    mask = _checks.bools("mask", mask, token_rewards.shape)
    _checks.within("gamma", gamma, 0.0, 1.0)
    _checks.within("gae_lambda", gae_lambda, 0.0, 1.0)
    advantages = torch.zeros_like(token_rewards + values)
    next_advantage = next_value = advantages.new_zeros(len(advantages))  # [B]
    if bootstrap is not None:
        next_value = _checks.floats("bootstrap", bootstrap, next_value.shape).detach()
    for t in reversed(range(mask.shape[1])):
        trained = mask[:, t]
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * gae_lambda * next_advantage
        advantages[:, t] = torch.where(trained, advantage, 0.0)
        next_advantage = torch.where(trained, advantage, next_advantage)
        next_value = torch.where(trained, values[:, t], next_value)
    return advantages, torch.where(mask, advantages + values, 0.0)


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares under a mask, to be added up over ranks for `whiten`.

        [Σ m, Σ m·x, Σ m·x²]

    In float64, in which squares of float32 numbers are exact: the variance then survives a mean of
    a million deviations.
    Source: none needed.

    Args:
        values: float, any shape; anything where the mask is False. mask: bool, the same shape.
    Returns:
        [3] float64, without gradient.
    Raises:
        ValueError: a wrong shape or dtype.
    """
    values = _checks.floats("values", values).detach()
    mask = _checks.bools("mask", mask, values.shape)
    kept = torch.where(mask, values, 0.0).double()
    return torch.stack([mask.sum().double(), kept.sum(), (kept * kept).sum()])


def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    ddof: int = 1,
    eps: float = 1e-8,
    total: Tensor | Sequence[float] | None = None,
) -> Tensor:
    """Scales the entries under a mask to deviation 1, and shifts their mean to 0 or leaves it.

        shift_mean=True:  (x − μ) / (σ + ε)            shift_mean=False:  (x − μ) / (σ + ε) + μ

    Entries without spread (all equal, or at most ddof of them) have deviation 0 from μ, not 0/0.
    The statistics are of the entries given, or of `total`: one rank's entries are whitened with the
    moments of all.
    Source: the whitening of Ziegler et al. 2019, arXiv:1909.08593 (its code; no equation).
    Deviation: ε is added to σ, where TRL and verl add 1e-8 to σ².

    Args:
        values: float, any shape; anything where the mask is False.
        mask: bool, the same shape.
        shift_mean: True: mean 0. False: the mean stays.
        ddof: 1, the sample's deviation, or 0, the population's.
        eps: ε, in units of the values.
        total: (count, sum, sum of squares) over all ranks, from `moments`; None: of these entries.
    Returns:
        float32 (float64 if given it), the shape of `values`, 0 outside the mask, without gradient.
    Raises:
        ValueError: a wrong shape, dtype or option, or a total that is not three numbers.
    """
    values = _checks.floats("values", values).detach()
    mask = _checks.bools("mask", mask, values.shape)
    _ddof(ddof)
    _checks.within("eps", eps, 0.0)
    if not values.numel():
        return values
    kept = torch.where(mask, values, 0.0).double()
    if total is None:
        _, mean, std = _deviations(kept.reshape(1, -1), mask.reshape(1, -1), ddof)
        smallest, largest = _extremes(kept.reshape(1, -1), mask.reshape(1, -1))
        flat = largest <= smallest
    else:
        pooled = torch.as_tensor(total, dtype=torch.float64, device=values.device)
        if pooled.shape != (3,):
            raise ValueError(
                f"total must be (count, sum, sum of squares), got shape {tuple(pooled.shape)}. "
                f"Add up what moments() returns on each rank."
            )
        count, sum_, sum_of_squares = pooled.unbind()
        mean = sum_ / count
        squares = sum_of_squares - sum_ * mean
        std = (squares / (count - ddof)).sqrt()
        # Less than the rounding of the sums is noise, not spread.
        flat = squares <= 4 * torch.finfo(torch.float64).eps * sum_of_squares
    deviation = torch.where(flat, 0.0, (kept - mean) / (std + eps))
    whitened = deviation if shift_mean else deviation + mean
    return torch.where(mask, whitened, 0.0).to(values.dtype)


def terminal_rewards(scores: Tensor, mask: Tensor) -> Tensor:
    """Puts each completion's score on its last trained token.

        r_t = score_i · 1[t is the last token of row i under the mask]

    A row without trained tokens has nowhere to put it and stays 0.
    Source: Ouyang et al. 2022, arXiv:2203.02155, §3.5 (a reward for a prompt and its completion
    ends the episode).

    Args:
        scores: [B] float; anything in rows without trained tokens.
        mask: [B, T] bool, the trained tokens.
    Returns:
        [B, T] float32 (float64 if given it), without gradient.
    Raises:
        ValueError: a wrong shape or dtype.
    """
    scores = _checks.floats("scores", scores, ndim=1).detach()
    mask = _checks.bools("mask", mask, ndim=2)
    _checks.floats("scores", scores, mask.shape[:1])
    return torch.where(last_true(mask), scores[:, None], 0.0)


def kl_token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Token rewards of RLHF: a price for drift on every token, and the score on the last.

        r_t = −β·kl_t + score_i · 1[t is the last token of row i]

    With β = 0 this is bitwise `terminal_rewards`, whatever `kl` holds. A KL price in the reward
    excludes one in the loss: the caller decides for one place.
    Source: Ziegler et al. 2019, arXiv:1909.08593, Eq. 2; Ouyang et al. 2022, arXiv:2203.02155.

    Args:
        scores: [B] float.
        kl: [B, T] float, nats a token (k1 usually); anything where the mask is False.
        mask: [B, T] bool, the trained tokens.
        kl_coef: β ≥ 0, reward a nat.
    Returns:
        [B, T] float32 (float64 if given it), 0 outside the mask, without gradient.
    Raises:
        ValueError: a wrong shape or dtype, or a negative coefficient.
    """
    token_rewards = terminal_rewards(scores, mask)
    kl = _checks.floats("kl", kl, mask.shape).detach()
    _checks.within("kl_coef", kl_coef, 0.0)
    if kl_coef == 0:  # 0 · inf would be NaN
        return token_rewards
    return token_rewards - torch.where(mask, kl_coef * kl, 0.0)


def _rewards(rewards: Tensor, scored: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rewards with unscored ones set to 0, and who was scored."""
    rewards = _checks.floats("rewards", rewards, ndim=1).detach()
    if scored is None:
        scored = torch.ones_like(rewards, dtype=torch.bool)
    scored = _checks.bools("scored", scored, rewards.shape)
    rewards = torch.where(scored, rewards, 0.0)
    wrong = (~rewards.isfinite()).nonzero()
    if wrong.numel():
        row = int(wrong[0])
        raise ValueError(
            f"rewards[{row}] is {float(rewards[row])}. A reward that cannot be given is "
            f"scored=False, not a number."
        )
    return rewards, scored


def _group_size(rewards: Tensor, group_size: int, least: int) -> None:
    if group_size < least:
        raise ValueError(f"group_size must be at least {least}, got {group_size}.")
    if rewards.numel() % group_size:
        raise ValueError(
            f"rewards must hold whole groups of group_size={group_size}, "
            f"got {rewards.numel()} rows. For uneven groups use group_advantages_by_id."
        )


def _ddof(ddof: int) -> None:
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 (population) or 1 (sample), got {ddof}.")


class _Groups(NamedTuple):
    rewards: Tensor  # [N, M] a group a row
    counted: Tensor  # [N, M] which of them are scored members of the group
    group_of: Tensor  # [B] the row of each reward's group
    scored: Tensor  # [B]


def _contiguous(rewards: Tensor, scored: Tensor, group_size: int) -> _Groups:
    grouped = rearrange(rewards, "(n g) -> n g", g=group_size)
    counted = rearrange(scored, "(n g) -> n g", g=group_size)
    group_of = torch.arange(len(grouped), device=rewards.device).repeat_interleave(group_size)
    return _Groups(grouped, counted, group_of, scored)


def _extremes(grouped: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest counted entry of each row: (inf, −inf) where none is counted."""
    smallest = torch.where(counted, grouped, torch.inf).amin(dim=1)
    largest = torch.where(counted, grouped, -torch.inf).amax(dim=1)
    return smallest, largest


def _deviations(grouped: Tensor, counted: Tensor, ddof: int) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and deviation of the counted entries of each row; NaN where too few are."""
    count = counted.sum(dim=1)
    mean = torch.where(counted, grouped, 0.0).sum(dim=1) / count
    centred = torch.where(counted, grouped - mean[:, None], 0.0)
    # Squares of 1e-25 are 0 and of 1e25 infinite in float32; a power of two rounds nothing.
    exponent = torch.frexp(centred.abs().amax(dim=1)).exponent
    exponent = exponent.clamp(min=8 - math.frexp(torch.finfo(centred.dtype).max)[1])
    squares = torch.ldexp(centred, -exponent[:, None]).square().sum(dim=1)
    return count, mean, torch.ldexp((squares / (count - ddof)).sqrt(), exponent)


def _normalised(
    rewards: Tensor,
    groups: _Groups,
    scale_by_std: bool,
    std_over: str,
    ddof: int,
    eps: float,
    loo: bool,
) -> Tensor:
    if std_over not in ("group", "batch"):
        raise ValueError(f"std_over must be one of group, batch; got {std_over!r}.")
    _ddof(ddof)
    _checks.within("eps", eps, 0.0)
    if not rewards.numel():
        return rewards
    count, mean, std = _deviations(groups.rewards, groups.counted, ddof)
    smallest, largest = _extremes(groups.rewards, groups.counted)
    alive = (largest > smallest)[groups.group_of] & groups.scored  # [B]
    centred = rewards - mean[groups.group_of]
    if loo:
        # n/(n−1)·(r − mean) is r minus the mean of the others, without subtracting r from a sum.
        n = count[groups.group_of]
        centred = centred * n / (n - 1)
    if scale_by_std and std_over == "batch":
        centred = centred / (_deviations(rewards[None], groups.scored[None], ddof)[2] + eps)
    elif scale_by_std:
        centred = centred / (std[groups.group_of] + eps)
    return torch.where(alive, centred, 0.0)  # no gradient passes: NaN of dead groups may go by
