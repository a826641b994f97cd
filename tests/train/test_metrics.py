"""Means as pooled sums and counts."""

from __future__ import annotations

import pytest
import torch

from zoo.train import metrics as metrics_module
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
