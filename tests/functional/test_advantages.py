"""Advantages, against hand arithmetic, slow loops and identities."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.functional import (
    dead_groups,
    gae,
    group_advantages,
    group_advantages_by_id,
    kl_token_rewards,
    leave_one_out,
    moments,
    terminal_rewards,
    whiten,
)

F64 = torch.float64
NAN = math.nan


def f64(values):
    return torch.tensor(values, dtype=F64)


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance
    )


def by_hand(group, scale=True, ddof=1, eps=0.0, loo=False):
    """One group's advantages with the statistics module of Python; None: not scored."""
    scored = [r for r in group if r is not None]
    if len(set(scored)) < 2:
        return [0.0] * len(group)
    std = (statistics.stdev if ddof else statistics.pstdev)(scored) + eps if scale else 1.0
    out = []
    for i, r in enumerate(group):
        if r is None:
            out.append(0.0)
            continue
        others = [s for j, s in enumerate(group) if s is not None and j != i]
        out.append((r - statistics.fmean(others if loo else scored)) / std)
    return out


# --- group mean and deviation ---------------------------------------------------------------------


def test_group_advantages_of_two_groups_by_hand():
    # [1, 0]: mean .5, sample std √(.25+.25) = .70710678; [2, 6]: mean 4, std √8 = 2.8284271
    out = group_advantages(f64([1.0, 0.0, 2.0, 6.0]), 2, eps=0.0)
    half = math.sqrt(0.5)
    close(out, [half, -half, -half, half])
    out = group_advantages(f64([1.0, 0.0, 2.0, 6.0]), 2, eps=0.5)
    a, b = 0.5 / (half + 0.5), 2 / (math.sqrt(8) + 0.5)
    close(out, [a, -a, -b, b])


def test_default_epsilon_is_one_millionth():
    # r = ±d about its mean, std = √2·d; with d = 1e-6 the epsilon is visible.
    d = 1e-6
    out = group_advantages(f64([d, -d]), 2)
    a = d / (math.sqrt(2) * d + 1e-6)
    close(out, [a, -a])
    close(leave_one_out(f64([d, -d]), 2, scale_by_std=True), [2 * a, -2 * a])


def test_population_deviation_is_an_option():
    out = group_advantages(f64([1.0, 0.0]), 2, ddof=0, eps=0.0)
    close(out, [1.0, -1.0])
    out = leave_one_out(f64([1.0, 0.0]), 2, scale_by_std=True, ddof=0, eps=0.0)
    close(out, [2.0, -2.0])


def test_without_scaling_it_is_the_centred_reward():
    close(group_advantages(f64([1.0, 0.0, 2.0]), 3, scale_by_std=False), [0.0, -1.0, 1.0])


def test_deviation_over_the_batch_keeps_the_groups_means():
    rewards = [1.0, 0.0, 2.0, 6.0, 5.0, 5.0]
    std = statistics.stdev(rewards)
    out = group_advantages(f64(rewards), 2, std_over="batch", eps=0.25)
    s = std + 0.25
    close(out, [0.5 / s, -0.5 / s, -2 / s, 2 / s, 0.0, 0.0])
    # Unscored rows are in no statistic, the batch's included.
    scored = torch.tensor([True, True, True, True, False, True])
    rewards[4] = NAN
    s = statistics.stdev([1, 0, 2, 6, 5])
    out = group_advantages(f64(rewards), 2, std_over="batch", scored=scored, eps=0.0)
    close(out, [0.5 / s, -0.5 / s, -2 / s, 2 / s, 0.0, 0.0])
    # and not the group's deviation, and unused without scaling
    out = group_advantages(f64(rewards), 2, std_over="batch", scored=scored, scale_by_std=False)
    close(out, [0.5, -0.5, -2.0, 2.0, 0.0, 0.0])


def test_result_is_float32_and_float64_stays():
    assert group_advantages(torch.tensor([1.0, 0.0]).bfloat16(), 2).dtype == torch.float32
    assert group_advantages(torch.tensor([1.0, 0.0]).half(), 2).dtype == torch.float32
    assert group_advantages(torch.tensor([1.0, 0.0]), 2).dtype == torch.float32
    assert group_advantages(f64([1.0, 0.0]), 2).dtype == F64


def test_B15_population_per_row_and_group_of_one():
    out = group_advantages(f64([1, 2, 3, 4, 5, 6]), 3, ddof=0, eps=0.0)
    close(out, [-1.224745, 0, 1.224745] * 2, 1e-6)
    assert group_advantages(f64([1.0]), 1).tolist() == [0.0]
    assert group_advantages(f64([1.0]), 1, scale_by_std=False).tolist() == [0.0]
    assert group_advantages(f64([1.0, 7.0]), 1, std_over="batch").tolist() == [0.0, 0.0]


def test_B16_abstained_reward_is_excluded():
    scored = torch.tensor([True, True, False, True])
    for garbage in (0.0, 1e4, NAN, math.inf):
        rewards = f64([1.0, 0.0, garbage, 0.0])
        out = group_advantages(rewards, 4, scored=scored, ddof=1, eps=1e-4)
        close(out, [1.154501, -0.577250, 0.0, -0.577250], 1e-6)
        out = leave_one_out(rewards, 4, scored=scored)
        close(out, [1.0, -0.5, 0.0, -0.5])  # 1 − 0;  0 − (1+0)/2
    none = torch.zeros(4, dtype=torch.bool)
    for function in (group_advantages, leave_one_out):
        assert function(f64([1.0, 0.0, 5.0, NAN]), 4, scored=none).tolist() == [0.0] * 4
        one = torch.tensor([False, True, False, False])
        assert function(f64([1.0, 3.0, 5.0, NAN]), 4, scored=one).tolist() == [0.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_equal_rewards_have_exactly_zero_advantage(dtype, eps):
    # Eight times 0.7: the mean rounds, so a test for std == 0 would not see that the group is dead.
    rewards = torch.full((8,), 0.7, dtype=dtype)
    for options in ({}, {"scale_by_std": False}):
        assert group_advantages(rewards, 8, eps=eps, **options).tolist() == [0.0] * 8
        assert leave_one_out(rewards, 8, eps=eps, **options).tolist() == [0.0] * 8
    mixed = torch.cat([rewards, torch.tensor([1.0, 0.0] * 4, dtype=dtype)])
    out = group_advantages(mixed, 8, std_over="batch", eps=eps)
    assert out[:8].tolist() == [0.0] * 8 and (out[8:] != 0).all()


def test_B18_leave_one_out_over_the_full_deviation_is_bounded():
    rewards = f64([0.0] + [0.95] * 7)
    close(group_advantages(rewards, 8, eps=0.0)[0], -2.474874, 1e-6)
    out = leave_one_out(rewards, 8, scale_by_std=True, eps=0.0)
    close(out[0], -2.828427, 1e-6)
    assert out.abs().max() <= math.sqrt(8) + 1e-6
    rewards = f64([1.0, 0.0, 0.0, 0.0])
    close(group_advantages(rewards, 4, eps=0.0)[0], 1.5, 1e-6)
    close(leave_one_out(rewards, 4, scale_by_std=True, eps=0.0)[0], 2.0, 1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=6, max_size=6))
def test_B18_bound_holds_for_any_rewards(rewards):
    out = leave_one_out(f64(rewards), 6, scale_by_std=True, eps=1e-6)
    assert out.abs().max() <= math.sqrt(6) + 1e-6


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e-6, 1.0, 1e6, 1e25])
def test_deviation_of_tiny_and_of_huge_rewards_neither_vanishes_nor_overflows(size):
    # The square of 1e-30 is 0 in float32, that of 1e25 infinite; (0, 1, 2) → −1, 0, 1 at any size.
    rewards = size * torch.tensor([0.0, 1.0, 2.0])
    close(group_advantages(rewards, 3, eps=0.0), [-1.0, 0.0, 1.0], 1e-4)
    close(leave_one_out(rewards, 3, scale_by_std=True, eps=0.0), [-1.5, 0.0, 1.5], 1e-4)
    batch = group_advantages(rewards, 3, std_over="batch", ddof=0, eps=0.0)
    close(batch, [-1.224745, 0.0, 1.224745], 1e-4)


def test_no_rows_are_no_error():
    none = torch.zeros(0)
    for options in ({}, {"std_over": "batch"}, {"scale_by_std": False}):
        assert group_advantages(none, 4, **options).shape == (0,)
    assert leave_one_out(none, 4).shape == (0,)
    assert dead_groups(none, 4).dead.shape == (0,)
    assert whiten(none, none.bool()).shape == (0,)
    assert whiten(torch.zeros(2, 0), torch.zeros(2, 0).bool()).shape == (2, 0)


def test_leave_one_out_is_G_over_G_minus_1_times_the_centred_reward():
    rewards = f64([3.0, -1.0, 0.5, 2.0, 1.0, 7.0, 7.0, -4.0])
    centred = group_advantages(rewards, 4, scale_by_std=False)
    close(leave_one_out(rewards, 4), 4 / 3 * centred)
    # and, literally, the reward minus the mean of the others
    assert leave_one_out(rewards, 4)[0].item() == pytest.approx(3.0 - (-1 + 0.5 + 2) / 3)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([None, 0.0, 0.25, 1.0, -3.0]), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
    st.sampled_from([0, 1]),
)
def test_groups_agree_with_a_slow_loop(groups, scale, ddof):
    flat = [r for group in groups for r in group]
    scored = torch.tensor([r is not None for r in flat])
    rewards = f64([NAN if r is None else r for r in flat])
    options = {"scored": scored, "scale_by_std": scale, "ddof": ddof, "eps": 0.125}
    for function, loo in ((group_advantages, False), (leave_one_out, True)):
        expected = [a for g in groups for a in by_hand(g, scale, ddof, 0.125, loo)]
        close(function(rewards, 3, **options), expected)
    ids = torch.arange(len(groups)).repeat_interleave(3)
    close(group_advantages_by_id(rewards, ids, **options), group_advantages(rewards, 3, **options))


def test_scaled_and_shifted_rewards_have_the_same_advantages():
    rewards = f64([3.0, -1.0, 0.5, 2.0, 1.0, 7.0, 7.0, -4.0])
    for function in (group_advantages, leave_one_out):
        one = function(rewards, 4, scale_by_std=True, eps=0.0)
        close(function(rewards * 5 - 100, 4, scale_by_std=True, eps=0.0), one)


def test_advantages_of_a_permuted_batch_are_permuted():
    rewards = f64([3.0, -1.0, 0.5, 2.0, 1.0, 7.0, 7.0, -4.0])
    order = torch.tensor([6, 4, 7, 5, 1, 3, 0, 2])  # groups swapped, rows shuffled inside
    for function in (group_advantages, leave_one_out):
        close(function(rewards[order], 4), function(rewards, 4)[order])


def test_B20_groups_by_prompt_id():
    rewards = f64([1.0, 3.0, 5.0])
    for ids in (torch.tensor([7, 7, 2]), ["a", "a", "b"], [("x", 1), ("x", 1), ("x", 2)]):
        out = group_advantages_by_id(rewards, ids, scale_by_std=False)
        assert out.tolist() == [-1.0, 1.0, 0.0]
    shuffled = group_advantages_by_id(f64([3.0, 5.0, 1.0]), ["a", "b", "a"], scale_by_std=False)
    assert shuffled.tolist() == [1.0, 0.0, -1.0]
    # Uneven groups, scaled: [1, 3] → ±1/√2, [5, 6, 10] → mean 7, std √7
    out = group_advantages_by_id(
        f64([5.0, 1.0, 6.0, 3.0, 10.0]), torch.tensor([0, 9, 0, 9, 0]), eps=0.0
    )
    r2, r7 = math.sqrt(2), math.sqrt(7)
    close(out, [-2 / r7, -1 / r2, -1 / r7, 1 / r2, 3 / r7])
    out = group_advantages_by_id(
        f64([5.0, 1.0, 6.0, 3.0, 10.0]),
        torch.tensor([0, 9, 0, 9, 0]),
        std_over="batch",
        ddof=0,
        eps=0.0,
    )
    std = statistics.pstdev([5, 1, 6, 3, 10])
    close(out, [-2 / std, -1 / std, -1 / std, 1 / std, 3 / std])


def test_B20_by_id_has_the_same_defaults_and_abstentions():
    rewards = f64([1e-6, NAN, -1e-6, 4.0])
    scored = torch.tensor([True, False, True, True])
    a = 1e-6 / (math.sqrt(2) * 1e-6 + 1e-6)
    out = group_advantages_by_id(rewards, torch.tensor([1, 1, 1, 0]), scored=scored)
    close(out, [a, 0.0, -a, 0.0])
    assert group_advantages_by_id(torch.zeros(0), []).shape == (0,)
    assert group_advantages_by_id(torch.zeros(0), torch.zeros(0).long()).shape == (0,)
    assert group_advantages(torch.zeros(0), 4).shape == (0,)


# --- dead groups ----------------------------------------------------------------------------------


def test_B91_dead_groups_are_counted_per_group():
    dead = dead_groups(f64([1, 1, 0, 0]), 2)
    assert dead.dead.tolist() == [True, True] and dead.dead.float().mean() == 1.0
    assert dead.all_right.tolist() == [True, False]
    assert dead.all_wrong.tolist() == [False, True]
    assert dead.tied.tolist() == [False, False]
    assert dead_groups(f64([1, 0, 1, 1]), 2).dead.float().mean() == 0.5


def test_dead_groups_by_cause():
    nan, yes, no = NAN, True, False
    rewards = f64([0.5, 0.5, 2.0, 2.0, -1.0, -1.0, nan, nan, nan, 1.0, 0.0, nan, 0.7, 0.7])
    scored = torch.tensor([yes] * 6 + [no, no, no, yes, yes, no, yes, yes])
    dead = dead_groups(rewards, 2, scored)
    assert dead.dead.tolist() == [yes] * 7
    assert dead.all_right.tolist() == [no, yes, no, no, yes, no, no]
    assert dead.all_wrong.tolist() == [no, no, yes, no, no, yes, no]
    assert dead.tied.tolist() == [yes, no, no, yes, no, no, yes]
    dead = dead_groups(rewards, 2, scored, best=0.5, worst=-0.5)
    assert dead.all_right.tolist() == [yes, yes, no, no, yes, no, yes]
    assert dead.all_wrong.tolist() == [no, no, yes, no, no, no, no]
    alive = dead_groups(f64([1.0, 0.0]), 2)
    assert not any(bool(each) for each in alive)
    # A live group above `best` or below `worst` is neither.
    assert not any(bool(each) for each in dead_groups(f64([2.0, 3.0]), 2))
    assert not any(bool(each) for each in dead_groups(f64([-2.0, -3.0]), 2))


def test_dead_groups_of_size_one_and_bad_thresholds():
    assert dead_groups(f64([1.0, 0.5]), 1).dead.tolist() == [True, True]
    with pytest.raises(ValueError, match=r"^worst must be below best, got worst=1 and best=1"):
        dead_groups(f64([1.0]), 1, best=1, worst=1)
    with pytest.raises(ValueError, match=r"^group_size must be at least 1, got 0"):
        dead_groups(f64([1.0]), 0)


# --- GAE ------------------------------------------------------------------------------------------


def slow_gae(rewards, values, mask, bootstrap, gamma, lam):
    """The definition, A_t = Σ_l (γλ)^l δ_{t+l}, over the trained tokens of one row."""
    at = [t for t, m in enumerate(mask) if m]
    v = [values[t] for t in at] + [bootstrap]
    deltas = [rewards[t] + gamma * v[i + 1] - v[i] for i, t in enumerate(at)]
    out = [0.0] * len(mask)
    for i, t in enumerate(at):
        out[t] = sum((gamma * lam) ** k * d for k, d in enumerate(deltas[i:]))
    return out


@pytest.mark.parametrize(
    "gamma,lam", [(1.0, 0.95), (0.9, 0.8), (0.99, 1.0), (0.9, 0.0), (0.0, 0.5)]
)
@pytest.mark.parametrize("garbage", [0.0, 1e4, NAN])
def test_gae_agrees_with_the_definition(gamma, lam, garbage):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(5, 7, generator=generator, dtype=F64)
    values = torch.randn(5, 7, generator=generator, dtype=F64)
    mask = torch.rand(5, 7, generator=generator) > 0.4  # gaps in the middle: a tool's tokens
    mask[3] = False
    bootstrap = torch.randn(5, generator=generator, dtype=F64)
    expected = [
        slow_gae(r, v, m, b, gamma, lam)
        for r, v, m, b in zip(
            rewards.tolist(), values.tolist(), mask.tolist(), bootstrap.tolist(), strict=True
        )
    ]
    bad = f64(garbage)
    advantages, returns = gae(
        torch.where(mask, rewards, bad),
        torch.where(mask, values, bad),
        mask,
        bootstrap=bootstrap,
        gamma=gamma,
        gae_lambda=lam,
    )
    close(advantages, expected)
    close(returns, torch.where(mask, f64(expected) + values, 0.0))
    assert mask[:3].any() and not advantages[3].any() and not returns[3].any()


def test_gae_defaults_are_gamma_1_and_lambda_95():
    rewards, values = f64([[0.0, 0.0, 1.0]]), f64([[0.5, 0.4, 0.3]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    one = gae(rewards, values, mask)
    two = gae(rewards, values, mask, gamma=1.0, gae_lambda=0.95, bootstrap=torch.zeros(1))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_B23_values_on_padding_are_not_read():
    mask = torch.tensor([[True, True, False]])
    for pad in (100.0, 0.0, NAN):
        advantages, returns = gae(f64([[0.0, 1.0, 0.0]]), f64([[0.0, 0.0, pad]]), mask)
        close(advantages, [[0.95, 1.0, 0.0]])
        close(returns, [[0.95, 1.0, 0.0]])


def test_B23_a_tools_tokens_are_stepped_over():
    # The same row with and without tokens of a tool (and a prompt) between its own.
    plain = gae(f64([[0.1, 0.2, 1.0]]), f64([[0.5, 0.4, 0.3]]), torch.ones(1, 3).bool(), gamma=0.9)
    gaps = torch.tensor([[False, True, False, False, True, True]])
    n = NAN
    advantages, returns = gae(
        f64([[n, 0.1, n, n, 0.2, 1.0]]), f64([[n, 0.5, n, n, 0.4, 0.3]]), gaps, gamma=0.9
    )
    close(advantages[gaps], plain[0][0])
    close(returns[gaps], plain[1][0])


def test_B25_terminal_or_bootstrapped():
    values = f64([[0.5, 0.4, 0.3], [0.5, 0.4, 0.3]])
    mask = torch.ones(2, 3, dtype=torch.bool)
    rewards = f64([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    advantages, returns = gae(rewards, values, mask, bootstrap=f64([0.0, 0.2]))
    close(advantages, [[0.43675, 0.565, 0.7], [-0.28525, -0.195, -0.1]])
    close(returns[0], [0.93675, 0.965, 1.0])
    close(gae(rewards[:1], values[:1], mask[:1])[0], [[0.43675, 0.565, 0.7]])


def test_gae_at_lambda_1_is_monte_carlo_and_at_0_the_one_step_error():
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randn(2, 4, generator=generator, dtype=F64)
    values = torch.randn(2, 4, generator=generator, dtype=F64)
    mask = torch.ones(2, 4, dtype=torch.bool)
    g = 0.9
    discounts = torch.tensor(
        [[g ** (u - t) if u >= t else 0.0 for u in range(4)] for t in range(4)]
    )
    monte_carlo = rewards @ discounts.to(F64).T
    advantages, returns = gae(rewards, values, mask, gamma=g, gae_lambda=1.0)
    close(returns, monte_carlo, 1e-6)
    close(advantages, monte_carlo - values, 1e-6)
    following = torch.cat([values[:, 1:], torch.zeros(2, 1, dtype=F64)], dim=1)
    advantages, _ = gae(rewards, values, mask, gamma=g, gae_lambda=0.0)
    close(advantages, rewards + g * following - values)


def test_gae_dtypes_gradients_and_arguments():
    mask = torch.ones(1, 2, dtype=torch.bool)
    values = torch.zeros(1, 2, requires_grad=True)
    rewards = torch.tensor([[1.0, 2.0]])
    advantages, returns = gae(rewards, values, mask)
    assert advantages.dtype == returns.dtype == torch.float32
    assert not advantages.requires_grad and not returns.requires_grad
    assert gae(rewards.bfloat16(), values.bfloat16(), mask)[0].dtype == torch.float32
    mixed = gae(f64([[1.0, 1 + 1e-12]]), values, mask, gae_lambda=0.0)
    assert mixed[0].dtype == F64 and mixed[0][0, 1].item() == 1 + 1e-12
    assert torch.equal(rewards, torch.tensor([[1.0, 2.0]]))  # arguments are left alone
    empty = gae(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0).bool())
    assert empty[0].shape == empty[1].shape == (2, 0)
    bootstrap = torch.ones(1, requires_grad=True)
    assert not gae(rewards, values, mask, bootstrap=bootstrap)[0].requires_grad


# --- whitening ------------------------------------------------------------------------------------


def test_B21_whitened_values_have_mean_zero():
    mask = torch.tensor([True, True, True, False])
    for pad in (0.0, 1e4, NAN):
        values = f64([1.0, 2.0, 3.0, pad])
        close(whiten(values, mask), [-1, 0, 1, 0], 1e-7)
        close(whiten(values, mask, ddof=0), [-1.224745, 0, 1.224745, 0], 1e-6)
        close(whiten(values, mask, shift_mean=False), [1, 2, 3, 0], 1e-7)
        close(whiten(values, mask, shift_mean=False, ddof=0), [2 - 1.224745, 2, 3.224745, 0], 1e-6)


def test_B15_one_entry_or_equal_entries_are_not_divided_by_zero():
    for eps in (0.0, 1e-8):
        for total in (False, True):
            for values, mask in (
                (f64([[5.0, NAN]]), torch.tensor([[True, False]])),
                (torch.full((2, 4), 0.7, dtype=F64), torch.ones(2, 4, dtype=torch.bool)),
                (f64([[5.0, NAN]]), torch.tensor([[False, False]])),
            ):
                pooled = moments(values, mask) if total else None
                for ddof in (0, 1):
                    out = whiten(values, mask, eps=eps, ddof=ddof, total=pooled)
                    assert out.abs().max() == 0
                    out = whiten(values, mask, shift_mean=False, eps=eps, ddof=ddof, total=pooled)
                    close(out, torch.where(mask, values, 0.0))


def test_epsilon_of_whitening_is_added_to_the_deviation():
    mask = torch.ones(2, dtype=torch.bool)
    # ±d: std √2·d; d = 1e-8 makes the default visible
    d = 1e-8
    a = d / (math.sqrt(2) * d + 1e-8)
    close(whiten(f64([d, -d]), mask), [a, -a])
    close(
        whiten(f64([1.0, -1.0]), mask, eps=0.5),
        [1 / (math.sqrt(2) + 0.5)] * 1 + [-1 / (math.sqrt(2) + 0.5)],
    )
    total = moments(f64([1.0, -1.0]), mask)
    close(whiten(f64([1.0, -1.0]), mask, eps=0.5, total=total, ddof=0), [1 / 1.5, -1 / 1.5])


def test_moments_by_hand_and_whitening_pooled_over_ranks():
    values = f64([[1.0, 2.0, NAN], [4.0, 9.0, 3.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    first, second = (moments(values[i], mask[i]) for i in range(2))
    assert first.tolist() == [2.0, 3.0, 5.0] and second.tolist() == [3.0, 16.0, 106.0]
    assert first.dtype == F64 and not moments(values.requires_grad_(), mask).requires_grad
    values = values.detach()
    total = first + second
    for options in ({}, {"shift_mean": False}, {"ddof": 0}, {"eps": 0.3}):
        whole = whiten(values, mask, **options)
        for i in range(2):
            close(whiten(values[i], mask[i], total=total, **options), whole[i])
        close(whiten(values[0], mask[0], total=total.tolist(), **options), whole[0])
    # and against the statistics module: mean 3.8, over 1, 2, 4, 9, 3
    std = statistics.stdev([1, 2, 4, 9, 3])
    close(whiten(values, mask, eps=0.0)[1], [(x - 3.8) / std for x in (4, 9, 3)])


def test_pooled_statistics_survive_a_large_mean():
    values = torch.tensor([100000.0, 100001.0, 100002.0])
    mask = torch.ones(3, dtype=torch.bool)
    expected = torch.tensor([-1.0, 0.0, 1.0])
    torch.testing.assert_close(whiten(values, mask), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        whiten(values, mask, total=moments(values, mask)), expected, rtol=1e-4, atol=1e-4
    )


def test_pooled_statistics_are_taken_in_float64_from_a_list_too():
    # 2^25 + 1 is no float32 number; deviations of 1e-3 about a mean of 1000 need the digits.
    values = f64([1000.0, 1000.001, 1000.002])
    mask = torch.ones(3, dtype=torch.bool)
    out = whiten(values, mask, total=moments(values, mask).tolist())
    close(out, [-1.0, 0.0, 1.0], 1e-3)
    assert moments(torch.tensor([33554432.0, 1.0]), mask[:2])[1].item() == 33554433.0


def test_whitening_of_float32_has_a_mean_that_float32_has_not():
    # The mean, 2^24 + 1, is between two float32 numbers; deviations ±1, std √(1000/999).
    values = torch.tensor([16777216.0, 16777218.0]).repeat(500)
    expected = torch.tensor([-1.0, 1.0]).repeat(500) * math.sqrt(0.999)
    mask = torch.ones(1000, dtype=torch.bool)
    torch.testing.assert_close(whiten(values, mask), expected, rtol=1e-6, atol=1e-6)


def test_pooled_whitening_of_zeros_and_of_any_unit():
    mask = torch.ones(3, dtype=torch.bool)
    zeros = f64([0.0, 0.0, 0.0])
    assert whiten(zeros, mask, total=moments(zeros, mask), eps=0.0).tolist() == [0.0, 0.0, 0.0]
    for unit in (1e-9, 1e9):
        values = unit * f64([1.0, 2.0, 3.0])
        close(whiten(values, mask, total=moments(values, mask), eps=0.0), [-1.0, 0.0, 1.0])


def test_whitening_shows_a_nan_that_is_not_masked():
    mask = torch.ones(3, dtype=torch.bool)
    values = f64([1.0, NAN, 2.0])
    assert whiten(values, mask).isnan().all()
    assert whiten(values, mask, total=moments(values, mask)).isnan().all()


def test_whitening_dtype_and_gradient():
    mask = torch.ones(2, 2, dtype=torch.bool)
    values = torch.randn(2, 2, requires_grad=True)
    out = whiten(values, mask)
    assert out.dtype == torch.float32 and not out.requires_grad and out.shape == (2, 2)
    assert whiten(values.bfloat16(), mask).dtype == torch.float32
    assert whiten(values.double(), mask).dtype == F64


# --- token rewards --------------------------------------------------------------------------------


def test_score_is_on_the_last_trained_token():
    mask = torch.tensor(
        [[False, True, True, False], [True, False, False, True], [True, False, False, False],
         [False, False, False, False]]
    )  # fmt: skip
    out = terminal_rewards(f64([1.0, -2.0, 3.0, NAN]), mask)
    assert out.tolist() == [[0, 0, 1.0, 0], [0, 0, 0, -2.0], [3.0, 0, 0, 0], [0, 0, 0, 0]]
    assert out.dtype == F64
    scores = torch.ones(1, requires_grad=True)
    out = terminal_rewards(scores, torch.ones(1, 2).bool())
    assert not out.requires_grad and out.dtype == torch.float32


def test_B30_kl_price_per_token():
    mask = torch.tensor([[True, True, True, False]])
    for pad in (0.0, 1e4, NAN):
        kl = f64([[0.5, -0.2, 0.1, pad]])
        out = kl_token_rewards(f64([1.0]), kl, mask, 0.05)
        close(out, [[-0.025, 0.01, 0.995, 0.0]])
    assert not kl_token_rewards(f64([1.0]), kl.requires_grad_(), mask, 0.05).requires_grad


def test_B30_coefficient_zero_is_bitwise_no_reference():
    mask = torch.tensor([[True, True, True], [True, True, False]])
    scores = torch.tensor([0.1, -0.0])
    kl = torch.tensor([[0.3, math.inf, -math.inf], [NAN, -1e4, NAN]])
    with_reference = kl_token_rewards(scores, kl, mask, 0.0)
    without = terminal_rewards(scores, mask)
    assert torch.equal(with_reference.view(torch.int32), without.view(torch.int32))


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [group_advantages, leave_one_out, dead_groups])
def test_errors_of_group_functions(function):
    with pytest.raises(
        ValueError, match=r"^rewards must be floating point, got torch.int64 of shape \(4,\). Conv"
    ):
        function(torch.tensor([1, 0, 1, 0]), 2)
    with pytest.raises(
        ValueError, match=r"^rewards must have 1 dimension\(s\), got 2: shape \(2, 2\)"
    ):
        function(torch.zeros(2, 2), 2)
    with pytest.raises(ValueError, match=r"^rewards must be a torch.Tensor, got list"):
        function([1.0, 0.0], 2)
    with pytest.raises(ValueError, match=r"whole groups of group_size=3, got 4 rows.*_by_id"):
        function(torch.zeros(4), 3)
    with pytest.raises(ValueError, match=r"^scored must have shape \(4,\), got \(3,\)"):
        function(torch.zeros(4), 2, scored=torch.ones(3).bool())
    with pytest.raises(
        ValueError, match=r"^scored must be bool, got torch.float32 of shape \(4,\)"
    ):
        function(torch.zeros(4), 2, scored=torch.ones(4))
    with pytest.raises(ValueError, match=r"^rewards\[2\] is nan.*scored=False, not a number"):
        function(torch.tensor([0.0, 1.0, NAN, math.inf]), 2)
    with pytest.raises(ValueError, match=r"^rewards\[0\] is inf"):
        function(torch.tensor([math.inf, 1.0]), 2)


def test_errors_of_options():
    with pytest.raises(ValueError, match=r"^group_size must be at least 2, got 1"):
        leave_one_out(torch.zeros(4), 1)
    with pytest.raises(ValueError, match=r"^group_size must be at least 1, got 0"):
        group_advantages(torch.zeros(4), 0)
    with pytest.raises(ValueError, match=r"^std_over must be one of group, batch; got 'none'"):
        group_advantages(torch.zeros(4), 2, std_over="none")
    for function in (group_advantages, leave_one_out):
        with pytest.raises(
            ValueError, match=r"^ddof must be 0 \(population\) or 1 \(sample\), got 2"
        ):
            function(torch.zeros(4), 2, ddof=2)
        with pytest.raises(ValueError, match=r"^eps must lie in \[0, inf\], got -1"):
            function(torch.zeros(4), 2, eps=-1)
    with pytest.raises(ValueError, match=r"^prompt_ids must have shape \(4,\), got \(3,\)"):
        group_advantages_by_id(torch.zeros(4), torch.zeros(3).long())
    with pytest.raises(ValueError, match=r"^prompt_ids must have shape \(4,\), got \(3,\)"):
        group_advantages_by_id(torch.zeros(4), ["a", "b", "c"])
    with pytest.raises(ValueError, match=r"^prompt_ids must hold integers, got torch.float32"):
        group_advantages_by_id(torch.zeros(4), torch.zeros(4))
    with pytest.raises(ValueError, match=r"^rewards\[1\] is nan"):
        group_advantages_by_id(torch.tensor([0.0, NAN]), torch.zeros(2).long())
    with pytest.raises(ValueError, match=r"^scored must have shape \(2,\), got \(1,\)"):
        group_advantages_by_id(torch.zeros(2), [0, 0], scored=torch.ones(1).bool())


def test_errors_of_gae():
    good = torch.zeros(2, 3)
    mask = good.bool()
    with pytest.raises(ValueError, match=r"^token_rewards must have 2 dimension\(s\), got 1"):
        gae(torch.zeros(3), good, mask)
    with pytest.raises(
        ValueError, match=r"^values must have shape \(2, 3\), got \(2, 1\): nothing is broadcast"
    ):
        gae(good, good[:, :1], mask)
    with pytest.raises(ValueError, match=r"^mask must have shape \(2, 3\), got \(1, 3\)"):
        gae(good, good, mask[:1])
    with pytest.raises(ValueError, match=r"^mask must be bool, got torch.float32"):
        gae(good, good, good)
    with pytest.raises(ValueError, match=r"^bootstrap must have shape \(2,\), got \(2, 1\)"):
        gae(good, good, mask, bootstrap=torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"^gamma must lie in \[0, 1\], got 1.1"):
        gae(good, good, mask, gamma=1.1)
    with pytest.raises(ValueError, match=r"^gae_lambda must lie in \[0, 1\], got -0.1"):
        gae(good, good, mask, gae_lambda=-0.1)
    with pytest.raises(ValueError, match=r"^gae_lambda must lie in \[0, 1\], got nan"):
        gae(good, good, mask, gae_lambda=NAN)
    with pytest.raises(ValueError, match=r"^gamma must lie"):
        gae(good, good, mask, gamma=-1e-9)


def test_errors_of_whitening():
    good = torch.zeros(2, 3)
    for function in (whiten, moments):
        with pytest.raises(ValueError, match=r"^mask must have shape \(2, 3\), got \(2,\)"):
            function(good, torch.zeros(2).bool())
        with pytest.raises(ValueError, match=r"^values must be floating point"):
            function(good.long(), good.bool())
        with pytest.raises(ValueError, match=r"^mask must be bool"):
            function(good, good)
    with pytest.raises(
        ValueError,
        match=r"^total must be \(count, sum, sum of squares\), got shape \(2,\).*moments",
    ):
        whiten(good, good.bool(), total=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"^ddof must be 0 .* got 3"):
        whiten(good, good.bool(), ddof=3)
    with pytest.raises(ValueError, match=r"^eps must lie in"):
        whiten(good, good.bool(), eps=-1e-9)


def test_errors_of_token_rewards():
    mask = torch.ones(2, 3).bool()
    with pytest.raises(ValueError, match=r"^scores must have shape \(2,\), got \(3,\)"):
        terminal_rewards(torch.zeros(3), mask)
    with pytest.raises(ValueError, match=r"^scores must have 1 dimension\(s\), got 2"):
        terminal_rewards(torch.zeros(2, 1), mask)
    with pytest.raises(ValueError, match=r"^scores must be floating point"):
        terminal_rewards(torch.zeros(2).long(), mask)
    with pytest.raises(ValueError, match=r"^mask must have 2 dimension\(s\), got 1"):
        terminal_rewards(torch.zeros(2), mask[0])
    with pytest.raises(ValueError, match=r"^mask must be bool"):
        terminal_rewards(torch.zeros(2), mask.float())
    with pytest.raises(ValueError, match=r"^kl must have shape \(2, 3\), got \(2, 1\)"):
        kl_token_rewards(torch.zeros(2), torch.zeros(2, 1), mask, 0.0)
    with pytest.raises(ValueError, match=r"^kl must be floating point"):
        kl_token_rewards(torch.zeros(2), mask, mask, 0.1)
    with pytest.raises(ValueError, match=r"^kl_coef must lie in \[0, inf\], got -0.1"):
        kl_token_rewards(torch.zeros(2), torch.zeros(2, 3), mask, -0.1)


def test_nothing_here_carries_a_gradient():
    def leaf(*shape):
        return torch.rand(*shape, requires_grad=True)

    mask = torch.ones(2, 3).bool()
    total = torch.tensor([6.0, 3.0, 2.0], requires_grad=True)
    results = [
        group_advantages(leaf(4), 2),
        group_advantages_by_id(leaf(4), [0, 0, 1, 1]),
        leave_one_out(leaf(4), 2),
        *gae(leaf(2, 3), torch.zeros(2, 3), mask),
        *gae(torch.zeros(2, 3), leaf(2, 3), mask),
        *gae(torch.zeros(2, 3), torch.zeros(2, 3), mask, bootstrap=leaf(2)),
        moments(leaf(2, 3), mask),
        whiten(leaf(2, 3), mask),
        whiten(leaf(2, 3), mask, total=total.detach()),
        terminal_rewards(leaf(2), mask),
        kl_token_rewards(leaf(2), torch.zeros(2, 3), mask, 0.1),
        kl_token_rewards(torch.zeros(2), leaf(2, 3), mask, 0.1),
    ]
    assert not any(each.requires_grad for each in results)
