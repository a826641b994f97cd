"""AdamW by hand, and the learning rate at every update of a short run."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from zoo.config import Schedule, TrainConfig
from zoo.train.optimizer import lr_factor, make_optimizer


def factors(total: int, decay_from: int | None = None, decay_updates: int = 0, **changes):
    config = TrainConfig(**changes)
    return [lr_factor(u, total, config, decay_from, decay_updates) for u in range(total)]


def test_constant() -> None:
    assert factors(4, schedule=Schedule.constant) == [1, 1, 1, 1]


def test_linear_from_one_to_the_end() -> None:
    # 1 − 0.9·(0, ¼, ½, ¾, 1)
    wanted = [1.0, 0.775, 0.55, 0.325, 0.1]
    assert factors(5, schedule=Schedule.linear, lr_end=0.1) == pytest.approx(wanted)


def test_cosine_from_one_to_the_end() -> None:
    # progress (1 − cos(πk/4))/2 = 0, .1464466, .5, .8535534, 1; the factor is 1 − 0.8·progress
    wanted = [1.0, 0.8828427, 0.6, 0.3171573, 0.2]
    assert factors(5, schedule=Schedule.cosine, lr_end=0.2) == pytest.approx(wanted)


def test_warm_up_then_decay() -> None:
    # two updates at 1/3 and 2/3, then 1 → 0 over the four that are left
    wanted = [1 / 3, 2 / 3, 1.0, 2 / 3, 1 / 3, 0.0]
    made = factors(6, schedule=Schedule.linear, lr_end=0.0, warmup_updates=2)
    assert made == pytest.approx(wanted)


def test_past_the_planned_end_the_rate_stays_at_its_end() -> None:
    config = TrainConfig(schedule=Schedule.linear, lr_end=0.1)
    assert lr_factor(50, 5, config, None, 0) == pytest.approx(0.1)


def test_a_run_of_one_update_has_the_full_rate() -> None:
    assert factors(1, schedule=Schedule.linear) == [1.0]


def test_a_target_reached_ends_a_constant_rate_linearly() -> None:
    made = factors(8, decay_from=3, decay_updates=4, schedule=Schedule.constant)
    assert made[3:] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_a_target_reached_goes_on_from_the_rate_it_had() -> None:
    # linear to 0 over 11 updates is at ½ at update 5: it must not jump up to 1
    config = TrainConfig(schedule=Schedule.linear, lr_end=0.0)
    assert [lr_factor(u, 11, config, 5, 4) for u in (5, 6, 7, 8, 9, 20)] == pytest.approx(
        [0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
    )


def test_adamw_takes_the_first_two_steps_by_hand() -> None:
    module = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        module.weight.fill_(2.0)
    config = TrainConfig(betas=[0.5, 0.75], adam_eps=0.0, weight_decay=0.1)
    optimizer = make_optimizer(module, config, lr=0.01)

    def step(gradient: float) -> float:
        module.weight.grad = torch.full((1, 1), gradient, dtype=torch.float64)
        optimizer.step()
        return module.weight.item()

    # 1: decay 2·(1 − .001) = 1.998; m̂ = 3, v̂ = 9, so −.01·3/3
    assert step(3.0) == pytest.approx(1.988, rel=1e-12)
    # 2: m = .5·1.5 + .5·(−1) = .25, m̂ = .25/.75; v = .75·2.25 + .25·1 = 1.9375, v̂ = 1.9375/.4375
    wanted = 1.988 * 0.999 - 0.01 * (0.25 / 0.75) / math.sqrt(1.9375 / 0.4375)
    assert step(-1.0) == pytest.approx(wanted, rel=1e-12)


def test_frozen_parameters_have_no_optimizer_state() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    optimizer = make_optimizer(module, TrainConfig(), lr=0.1)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [p is q for p, q in zip(held, module[1].parameters(), strict=True)] == [True, True]
    assert optimizer.param_groups[0]["lr"] == 0.1
