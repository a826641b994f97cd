"""Bradley–Terry on pairs and rankings: numbers by hand, and what is no pair."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from zoo.algorithms.base import LossTerm
from zoo.algorithms.reward_model import BradleyTerry
from zoo.batch import Batch, collate
from zoo.functional import bradley_terry_ranked
from zoo.models.models import Models


class Scores(nn.Module):
    """A reward model that gives row i the number i of a list."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.values[batch.input_ids[torch.arange(batch.n_rows), batch.lengths - 1]]


def groups(size: int, order: list[float], present: list[bool] | None = None) -> Batch:
    """Row i is the token i; `order` says who is preferred."""
    rows = len(order)
    batch = collate(
        [[i // size] for i in range(rows)],
        [[i] for i in range(rows)],
        group_size=size,
        prompt_ids=[str(i) for i in range(rows // size)],
    )
    there = present or [True] * rows
    batch = batch.replace(rewards=torch.tensor(order), scored=torch.tensor(there))
    return batch.replace(scale=batch.local_scale(8))


def term(batch: Batch, *scores: float, **settings: Any) -> LossTerm:
    models = Models(policy=None, reward_model=Scores(*scores))
    (only,) = BradleyTerry(**settings).losses(batch, models)
    return only


def minus_log_sigmoid(x: float) -> float:
    return math.log(1 + math.exp(-x))


def metric(found: LossTerm, name: str) -> float:
    total, count = found.metrics[name]
    return float(total) / float(count)


@pytest.mark.parametrize(("chosen", "rejected", "expected"), [(1, 0, 0.313262), (0, 100, 100.0)])
def test_B65_pair_without_overflow(chosen: float, rejected: float, expected: float) -> None:
    found = term(groups(2, [1.0, 0.0]), float(chosen), float(rejected))
    assert float(found.loss.detach()) == pytest.approx(expected, abs=1e-5)
    found.loss.backward()


def test_equal_scores_cost_ln_2_and_are_not_right() -> None:
    found = term(groups(2, [1.0, 0.0]), 3.0, 3.0)
    assert float(found.loss.detach()) == pytest.approx(math.log(2))
    assert metric(found, "preference_accuracy") == 0


def test_ranking_counts_all_pairs_of_unequal_rank_once() -> None:
    # Preferred: row 2, then rows 0 and 1 alike. Pairs: (2, 0) and (2, 1).
    found = term(groups(3, [1.0, 1.0, 5.0]), 0.5, 2.0, 1.0)
    expected = (minus_log_sigmoid(0.5) + minus_log_sigmoid(-1.0)) / 2
    assert float(found.loss.detach()) == pytest.approx(expected, abs=1e-6)
    assert metric(found, "preference_accuracy") == 0.5
    assert metric(found, "margin") == pytest.approx((0.5 - 1.0) / 2)


def test_group_weighs_the_same_however_many_pairs_it_has() -> None:
    batch = groups(3, [3.0, 2.0, 1.0, 1.0, 0.0, 0.0], [True] * 5 + [False])
    scores = [0.3, 0.1, 0.6, 0.2, 0.9, math.nan]
    found = term(batch, *scores)
    # Three pairs in the first; in the second one output is missing, so one pair.
    first = sum(map(minus_log_sigmoid, (0.2, -0.3, -0.5))) / 3
    assert float(found.loss.detach()) == pytest.approx(
        (first + minus_log_sigmoid(-0.7)) / 2, abs=1e-6
    )
    assert metric(found, "preference_accuracy") == pytest.approx((1 / 3 + 0) / 2)
    assert metric(found, "score") == pytest.approx(sum(scores[:5]) / 5)


def test_missing_output_gets_no_gradient() -> None:
    model = Scores(0.3, 0.1, math.nan)
    models = Models(policy=None, reward_model=model)
    (found,) = BradleyTerry(centre=0.1).losses(groups(3, [1, 0, 0.5], [True, True, False]), models)
    found.loss.backward()
    # d/dr₀ = −σ(−0.2) + 2·0.1·(0.3 + 0.1) = −0.450166 + 0.08
    assert model.values.grad is not None
    assert model.values.grad.tolist() == pytest.approx([-0.370166, 0.530166, 0.0], abs=1e-5)


def test_margin_asks_for_a_lead_by_the_strength_of_the_preference() -> None:
    batch = groups(2, [1.0, 0.0])
    lead = float(term(batch, 1.0, 0.0, margin=0.5).loss.detach())
    assert lead == pytest.approx(minus_log_sigmoid(1 - 0.5), abs=1e-6)
    strong = batch.with_extra(strength=torch.tensor([3.0, 0.0]))
    assert float(term(strong, 1.0, 0.0, margin=0.5).loss.detach()) == pytest.approx(
        minus_log_sigmoid(1 - 0.5 * 3), abs=1e-6
    )
    assert float(term(strong, 1.0, 0.0).loss.detach()) == pytest.approx(
        minus_log_sigmoid(1), abs=1e-6
    )


def test_centring_pulls_the_sum_of_a_pair_to_zero() -> None:
    found = term(groups(2, [1.0, 0.0]), 2.0, 1.0, centre=0.01)
    assert float(found.loss.detach()) == pytest.approx(minus_log_sigmoid(1) + 0.01 * 9, abs=1e-6)


def test_pairs_of_two_are_rankings_of_two() -> None:
    scores, ranks = torch.tensor([[0.4, 1.0]]), torch.tensor([[1, 2]])
    ranked = bradley_terry_ranked(scores, ranks, margin=torch.full((1, 2, 2), 0.3), centre=0.02)
    expected = minus_log_sigmoid(0.4 - 1.0 - 0.3) + 0.02 * 1.4**2
    assert float(ranked) == pytest.approx(expected, abs=1e-6)


def test_negative_coefficients_are_refused() -> None:
    for name in ("margin", "centre"):
        with pytest.raises(ValueError, match=rf"algorithm\.{name} must be at least 0, got -1"):
            BradleyTerry(**{name: -1.0})
