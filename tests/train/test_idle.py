"""A step from which nothing can be learnt leaves the weights alone."""

from __future__ import annotations

import pytest
import torch

from tests.train.test_bandit import GROUP, PROMPT, TwoTokens
from zoo.algorithms.grpo import GRPO
from zoo.models.models import Models
from zoo.rollout.source import rollout_batch
from zoo.train.gradients import Trainable
from zoo.train.metrics import Pool
from zoo.train.update import update
from zoo.types import Completion, RewardOutput


def completion(token: int) -> Completion:
    return Completion(str(token), (token,), (0.0,), truncated=False)


@pytest.mark.parametrize("step_on_zero_gradient", [False, True])
def test_dead_batch_moves_nothing_unless_asked(step_on_zero_gradient: bool) -> None:
    """Cross-check 4: every group dead, after a step that left momentum behind."""
    policy = TwoTokens()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
    models, algorithm = Models(policy=policy), GRPO()
    made = [completion(i % 2) for i in range(GROUP)]

    def step(rewards: list[float]) -> Pool:
        batch = rollout_batch([PROMPT], made, RewardOutput(list(rewards)), GROUP, 0)
        pool = Pool()
        update(
            algorithm.prepare(batch, models),
            algorithm,
            models,
            {"policy": Trainable(policy, optimizer, 0.1)},
            max_completion_length=1,
            micro_batch_tokens=100,
            max_grad_norm=None,
            pool=pool,
            step_on_zero_gradient=step_on_zero_gradient,
        )
        return pool

    step([float(i % 2) for i in range(GROUP)])
    weights = policy.logits.detach().clone()
    moments = optimizer.state[policy.logits]["exp_avg"].clone()
    assert not torch.equal(weights, torch.zeros(2))
    pool = step([1.0] * GROUP)
    assert torch.equal(policy.logits, weights) is not step_on_zero_gradient
    same = torch.equal(optimizer.state[policy.logits]["exp_avg"], moments)
    assert same is not step_on_zero_gradient
    assert pool.means()["idle_updates/policy"] == float(not step_on_zero_gradient)
