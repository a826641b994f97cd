"""Means as pooled sums and counts."""

from __future__ import annotations

import pytest
import torch

from zoo.rewards.check import REASONS
from zoo.train import metrics as metrics_module
from zoo.train.figures import reward_metrics, value_metrics
from zoo.train.metrics import Pool


def test_B90_ragged_parts_are_pooled_and_not_averaged() -> None:
    pool = Pool()
    pool.add("rate", 3.0, 12)
    pool.add("rate", torch.tensor(3.0), torch.tensor(4))
    assert pool.means() == {"rate": 0.375}  # 6/16; a mean of means is .5


def test_B90_processes_are_pooled_by_sums_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = []
    for total, count in ((3.0, 12), (3.0, 4)):
        pool = Pool()
        pool.add("rate", total, count)
        ranks.append(pool)
    ranks[1].add("rare", 1.0, 2)  # a name that only one process has

    def everybody(mine: object) -> list[object]:
        assert mine is ranks[0]._totals
        return [pool._totals for pool in ranks]

    monkeypatch.setattr(metrics_module, "gathered", everybody)
    assert ranks[0].over_processes().means() == {"rate": 0.375, "rare": 0.5}
    assert ranks[0].means() == {"rate": 0.25}, "pooling changed the process's own numbers"


def test_a_name_without_a_count_has_a_sum_and_no_mean() -> None:
    pool = Pool()
    pool.add_all({"reason/unparsed": (2.0, 0), "x": (6.0, 3)})
    pool.add("reason/unparsed", 1.0, 0)
    assert pool.means() == {"x": 2.0}
    assert pool.sum("reason/unparsed") == 3.0 and pool.sum("absent") == 0.0


@pytest.mark.parametrize(
    ("rewards", "std"),
    [
        ([0.7] * 48, 0.0),  # E[r²] − E[r]² is 1e-16 here, whose root is 1.7e-8
        ([1e8, 1e8 + 2], 1.0),  # squares of 1e16 have steps of 2
        ([0.0, 1.0, 1.0, 0.0], 0.5),
        ([], None),
    ],
)
def test_the_deviation_of_rewards_is_centred(rewards: list[float], std: float | None) -> None:
    assert reward_metrics(Pool(), rewards, []).get("reward/std") == std


def test_returns_that_are_all_equal_leave_no_variance_to_explain() -> None:
    returns = torch.full((7,), 0.7)
    squared = float(returns.square().sum()) / 7
    means = {"return": float(returns.sum()) / 7, "return_squared": squared, "value_error": 0.1}
    assert "explained_variance" not in value_metrics(means)
    spread = {"return": 0.5, "return_squared": 0.5, "value_error": 0.1}  # variance 1/4
    assert value_metrics(spread)["explained_variance"] == pytest.approx(1 - 0.1 / 0.25)


def test_a_run_has_at_most_so_many_reasons() -> None:
    """A reward that quotes completions has new reasons at each step; those known keep their own."""
    known: list[str] = []
    for step in range(3):
        pool = Pool()
        pool.add("rows", 100, 0)
        pool.add("reason/wrong", 40, 0)
        pool.add("reason/timeout", 10, 0)
        for i in range(50):
            pool.add(f"reason/got {step * 50 + i}", 1, 0)
        metrics = reward_metrics(pool, [], known)
        assert metrics["reason/wrong"] == 0.4 and metrics["reason/timeout"] == 0.1
        quoted = REASONS - 1 if step == 0 else 0  # the first step took all the places
        assert metrics["reason/other"] == pytest.approx((50 - quoted) / 100)
        assert len(metrics) == 3 + quoted
    assert len(known) == REASONS
