"""A pass of the critic that reads and learns at once, against a pass for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.small import run_small
from zoo.algorithms.ppo import PPO, Truncation
from zoo.batch import Batch
from zoo.models.critic import Critic
from zoo.models.models import LIGHTER, Models
from zoo.testing import (
    MAX_COMPLETION,
    Outcome,
    Shape,
    make_batch,
    moved_models,
    nudge,
    one_step,
    tiny_models,
    with_logprobs,
)
from zoo.train.gradients import Gradients

VARIANTS = [
    PPO(),
    PPO(truncation=Truncation.bootstrap, gamma=0.9),
    PPO(value_clip=None, whiten_advantages=False, value_coef=0.5),
    PPO(kl_coef=0.0, gae_lambda=1.0),
]


def ready(algorithm: PPO, **changes: Any) -> tuple[Batch, Models]:
    """Ragged rows, some cut and some not scored, for a policy that has moved from its start."""
    models = moved_models(tiny_models(algorithm.needs), algorithm.needs)
    nudge(models.critic, 0.05, 1)
    batch = make_batch(algorithm.needs, Shape(truncated="some", abstained="some"))
    return with_logprobs(batch, algorithm.needs, models), models


def outcome(algorithm: PPO, budget: int, learning: bool) -> Outcome:
    batch, models = ready(algorithm)
    models.micro_batch_tokens = budget
    if learning:
        models.gradients = Gradients(algorithm, {}, MAX_COMPLETION, budget)
    prepared = algorithm.prepare(batch, models)
    for module in (models.policy, models.critic):
        learned = any(p.grad is not None for p in module.parameters())
        assert learned == (learning and module is models.critic)
    found = one_step(algorithm, prepared, models, budget)
    assert models.gradients is None  # the next update begins with none
    return found


@pytest.mark.parametrize("budget", [1 << 20, 60])
@pytest.mark.parametrize("algorithm", VARIANTS, ids=range(len(VARIANTS)))
def test_one_pass_gives_the_gradients_of_two(algorithm: PPO, budget: int) -> None:
    two, one = (outcome(algorithm, budget, learning) for learning in (False, True))
    assert not one.refused and one.metrics.keys() == two.metrics.keys()
    for name, value in two.metrics.items():
        assert one.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    for role in ("policy", "critic"):
        there, here = two.gradients[role], one.gradients[role]
        assert there.norm() > 1e-3
        assert (here - there).norm() <= 1e-6 * there.norm()


def test_loss_of_no_number_in_that_pass_refuses_the_update() -> None:
    algorithm = PPO()
    batch, models = ready(algorithm)
    with torch.no_grad():
        models.critic.head.bias.fill_(torch.nan)
    models.gradients = Gradients(algorithm, {}, MAX_COMPLETION, 1 << 20)
    found = one_step(algorithm, algorithm.prepare(batch, models), models)
    assert found.refused == "loss/value is nan"


def test_there_is_nothing_to_learn_in_where_no_update_is_open() -> None:
    batch, models = ready(PPO())
    with pytest.raises(ValueError, match="several or none"):
        models.learn(batch, lambda piece: None)  # pyright: ignore


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ([], ["learns"]),
        (["algorithm.epochs=2"], ["reads", "learns", "learns"]),
        (["algorithm.minibatches=2"], ["reads", "learns", "learns"]),
    ],
)
def test_a_run_makes_one_pass_of_the_critic_where_one_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], passes: list[str]
) -> None:
    made, forward = [], Critic.forward

    def seen(self: Critic, batch: Batch) -> Any:
        made.append("learns" if torch.is_grad_enabled() else "reads")
        return forward(self, batch)

    monkeypatch.setattr(Critic, "forward", seen)
    run_small(tmp_path, "algorithm=ppo", "train.steps=1", "measure.memory=false", *settings)
    assert made == passes


def test_passes_without_gradient_take_larger_micro_batches() -> None:
    batch, models = ready(PPO())
    rows, width = batch.input_ids.shape
    models.micro_batch_tokens = width * rows // (2 * LIGHTER)
    seen = []
    models.in_micro_batches(batch, lambda b: (seen.append(b.n_rows) or b.rewards,))  # pyright: ignore
    assert len(seen) == 2 and sum(seen) == rows
