"""Intervals and paired tests, against known figures, scipy and exact enumeration."""

import itertools
import math

import pytest
import scipy.stats
import torch

from zoo.functional import mcnemar_exact, mean_interval, paired_bootstrap, wilson


def test_crosscheck_7_error_bars():
    assert wilson(989, 1319) == pytest.approx((0.725734, 0.772437), abs=1e-6)
    assert wilson(250, 500) == pytest.approx((0.456341, 0.543659), abs=1e-6)
    assert mcnemar_exact(10, 2) == pytest.approx(0.0385742, abs=1e-7)


@pytest.mark.parametrize("successes,n", [(0, 1), (1, 1), (0, 20), (20, 20), (3, 7), (999, 1000)])
def test_wilson_agrees_with_scipy(successes, n):
    expected = scipy.stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
    low, high = wilson(successes, n)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-7)
    assert 0.0 <= low <= successes / n <= high <= 1.0
    expected = scipy.stats.binomtest(successes, n).proportion_ci(0.9, method="wilson")
    z = scipy.stats.norm.ppf(0.95)
    assert wilson(successes, n, z) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_stays_inside_zero_and_one():
    for n in range(1, 200):
        assert wilson(0, n)[0] == pytest.approx(0.0, abs=1e-15) and wilson(0, n)[0] >= 0.0
        assert wilson(n, n)[1] == pytest.approx(1.0, abs=1e-15) and wilson(n, n)[1] <= 1.0
    assert wilson(3, 4, z=0.0) == (0.75, 0.75)


@pytest.mark.parametrize("successes,n", [(1, 0), (-1, 5), (6, 5), (0, 0)])
def test_wilson_refuses(successes, n):
    with pytest.raises(ValueError, match=rf"0 … n with n ≥ 1, got {successes} of {n}"):
        wilson(successes, n)
    with pytest.raises(ValueError, match=r"^z must lie in \[0, inf\], got -1"):
        wilson(1, 2, z=-1)


def test_mcnemar_agrees_with_the_binomial_test():
    for b, c in itertools.product(range(8), range(8)):
        expected = scipy.stats.binomtest(b, b + c).pvalue if b + c else 1.0
        assert mcnemar_exact(b, c) == pytest.approx(expected, rel=1e-9)
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(3, 3) == 1.0
    assert mcnemar_exact(700, 800) == pytest.approx(
        scipy.stats.binomtest(700, 1500).pvalue, rel=1e-9
    )


@pytest.mark.parametrize("b,c", [(-1, 2), (2, -1)])
def test_mcnemar_refuses(b, c):
    with pytest.raises(ValueError, match=rf"cannot be negative, got b={b} and c={c}"):
        mcnemar_exact(b, c)


def test_bootstrap_agrees_with_enumeration_of_all_resamples():
    first, second = [1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.5, 2.0]  # differences 1, 0, .5, −1
    differences = [1.0, 0.0, 0.5, -1.0]
    means = torch.tensor(
        [sum(drawn) / 4 for drawn in itertools.product(differences, repeat=4)], dtype=torch.float64
    )
    for level in (0.5, 0.8):
        out = paired_bootstrap(first, second, resamples=20_000, level=level)
        assert all(type(number) is float for number in out)
        assert out.estimate == pytest.approx(0.125)
        # the means lie on a grid of 1/8, so that the quantiles of 20 000 draws meet the exact ones
        low = torch.quantile(means, (1 - level) / 2).item()
        high = torch.quantile(means, (1 + level) / 2).item()
        assert out.low == pytest.approx(low, abs=1e-9) and out.high == pytest.approx(high, abs=1e-9)


def test_bootstrap_width_is_that_of_the_normal_for_many_problems():
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(400, generator=generator) + 0.3
    second = torch.randn(400, generator=generator)
    out = paired_bootstrap(first, second)
    d = first.double() - second.double()
    se = d.std().item() / 20
    assert out.estimate == pytest.approx(d.mean().item())
    # 10 000 resamples: the 2.5 % quantile is known to about .03 standard errors; 4 of these
    assert out.low == pytest.approx(out.estimate - 1.96 * se, abs=0.12 * se)
    assert out.high == pytest.approx(out.estimate + 1.96 * se, abs=0.12 * se)


def test_bootstrap_is_repeatable_and_leaves_the_global_generator_alone():
    first, second = torch.rand(30).tolist(), torch.rand(30)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = paired_bootstrap(first, second, resamples=700)
    assert torch.equal(torch.rand(3), expected)
    assert one == paired_bootstrap(first, second, resamples=700, seed=0)
    assert one != paired_bootstrap(first, second, resamples=700, seed=1)
    assert one != paired_bootstrap(first, second, resamples=701)
    same = paired_bootstrap(second, second)
    assert (same.estimate, same.low, same.high) == (0.0, 0.0, 0.0)
    # .1 in float32 is not .1: lists are read in float64
    assert paired_bootstrap([0.1], torch.tensor([0.1], dtype=torch.float64)).estimate == 0.0
    assert paired_bootstrap(torch.tensor([0.1], dtype=torch.float64), [0.1]).estimate == 0.0


def test_one_resample_is_its_own_interval():
    out = paired_bootstrap([1.0, 0.0, 0.0], [0.0, 0.0, 0.0], resamples=1)
    assert out.low == out.high


def test_bootstrap_draws_as_many_resamples_as_asked(monkeypatch):
    drawn = []
    original = torch.quantile

    def spy(values, tails):
        drawn.append(values.numel())
        return original(values, tails)

    monkeypatch.setattr(torch, "quantile", spy)
    for resamples in (1, 511, 512, 513, 1500):
        paired_bootstrap([1.0, 0.0], [0.0, 0.0], resamples=resamples)
    paired_bootstrap([1.0, 0.0], [0.0, 0.0])
    assert drawn == [1, 511, 512, 513, 1500, 10_000]


def test_bootstrap_refuses():
    with pytest.raises(
        ValueError, match=r"same problems, at least one: got shapes \(2,\) and \(1,\)"
    ):
        paired_bootstrap([1.0, 0.0], [1.0])
    with pytest.raises(ValueError, match=r"got shapes \(0,\) and \(0,\)"):
        paired_bootstrap([], [])
    with pytest.raises(ValueError, match=r"got shapes \(1, 2\) and \(1, 2\)"):
        paired_bootstrap(torch.zeros(1, 2), torch.zeros(1, 2))
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"^first and second must be finite"):
            paired_bootstrap([1.0, bad], [0.0, 0.0])
        with pytest.raises(ValueError, match=r"^first and second must be finite"):
            paired_bootstrap([1.0, 0.0], [0.0, bad])
    with pytest.raises(ValueError, match=r"^resamples must lie in \[1, inf\], got 0"):
        paired_bootstrap([1.0], [0.0], resamples=0)
    for level in (0.0, 1.0):
        with pytest.raises(ValueError, match=rf"^level must lie in \(0, 1\), got {level}"):
            paired_bootstrap([1.0], [0.0], level=level)
        with pytest.raises(ValueError, match=rf"^level must lie in \(0, 1\), got {level}"):
            mean_interval([1.0, 2.0], level)


def test_mean_interval_of_three_seeds_by_hand():
    # 1, 2, 3: mean 2, s = 1, t_{2, .975} = 4.302653, half-width 4.302653/√3 = 2.484138
    out = mean_interval([1.0, 2.0, 3.0])
    assert tuple(out) == pytest.approx((2.0, 2 - 2.484138, 2 + 2.484138), rel=1e-6)
    # t_{1, .75} = tan(π/4) = 1: level .5 of two values has half-width s/√2 = |a − b|/2
    assert tuple(mean_interval([1.0, 5.0], 0.5)) == pytest.approx((3.0, 1.0, 5.0))


def test_mean_interval_agrees_with_scipy():
    values = [0.31, 0.42, 0.38, 0.29, 0.51]
    out = mean_interval(values, 0.9)
    expected = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(0.9)
    assert (out.low, out.high) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_one_seed_says_nothing_about_spread():
    assert tuple(mean_interval([0.5])) == (0.5, -math.inf, math.inf)
    with pytest.raises(ValueError, match=r"^values is empty"):
        mean_interval([])
    with pytest.raises(ValueError, match=r"^values must be finite, got \[0.5, nan\]"):
        mean_interval([0.5, math.nan])


def test_equal_values_and_equal_differences_have_no_width():
    assert tuple(mean_interval([0.5, 0.5, 0.5])) == (0.5, 0.5, 0.5)
    assert tuple(paired_bootstrap([1.0, 0.5, 0.75], [0.5, 0.0, 0.25])) == (0.5, 0.5, 0.5)
    assert tuple(paired_bootstrap([1.0, 0.0], [1.0, 0.0])) == (0.0, 0.0, 0.0)
    assert mcnemar_exact(0, 0) == 1.0
