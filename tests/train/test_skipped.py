"""Groups without advantage are left out of the passes, and the gradient does not notice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.tiny import llama, ragged_batch
from tests.train.modules import captured
from zoo.algorithms.base import Algorithm, Needs
from zoo.algorithms.cispo import CISPO
from zoo.algorithms.dapo import DAPO
from zoo.algorithms.grpo import GRPO
from zoo.algorithms.gspo import GSPO
from zoo.algorithms.rloo import RLOO
from zoo.batch import Batch
from zoo.functional import Average
from zoo.models.models import Models
from zoo.models.policy import Policy
from zoo.train.metrics import Pool
from zoo.train.update import update

DEAD = (0, 3, 5)  # of eight groups
ALGORITHMS: dict[str, Algorithm] = {
    **{f"grpo {a}": GRPO(average=a) for a in Average},
    "grpo two epochs": GRPO(epochs=2),
    "cispo": CISPO(),
    "dapo": DAPO(),
    "gspo": GSPO(),
    "rloo": RLOO(kl_coef=0.0),
}


class Watched(Policy):
    """Remembers the prompts of the batches that it read with gradient."""

    def __init__(self, **options: Any) -> None:
        super().__init__(llama(), **options)
        self.seen: list[tuple[str, ...]] = []

    def forward(self, batch: Batch) -> Any:
        if torch.is_grad_enabled():
            self.seen.append(batch.prompt_ids)
        return super().forward(batch)


def loud(algorithm: Algorithm) -> Algorithm:
    """The same algorithm, that leaves nothing out."""

    class Loud(type(algorithm)):
        @property
        def needs(self) -> Needs:
            return replace(super().needs, silent_without_advantage=False)

    made = object.__new__(Loud)
    made.__dict__.update(algorithm.__dict__)
    return made


def rewarded(dead: tuple[int, ...] = DEAD) -> Batch:
    batch = ragged_batch(8, 2)
    rewards = torch.tensor([[0.25, 1.0] for _ in range(8)])
    rewards[list(dead)] = 0.5
    return batch.replace(rewards=rewards.flatten(), scored=torch.ones(16, dtype=torch.bool))


def stepped(
    algorithm: Algorithm, batch: Batch, budget: int, **options: Any
) -> tuple[list[Tensor], dict[str, float], Watched]:
    policy, pool = Watched(**options), Pool()
    models = Models(policy=policy, reference=Policy(llama(4)))
    batch = algorithm.prepare(batch, models)
    made = captured(policy=policy)
    done = update(
        batch, algorithm, models, made, max_completion_length=10, micro_batch_tokens=budget,
        max_grad_norm=None, pool=pool, step_on_zero_gradient=True,
    )  # fmt: skip
    assert done.applied and done.tokens == int(batch.completion_mask.sum())
    return made["policy"].optimizer.grads, pool.means(), policy


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [10**6, 30, 1])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_is_that_of_all_groups(name: str, budget: int, packed: bool) -> None:
    algorithm, batch = ALGORITHMS[name], rewarded()
    found, metrics, quiet = stepped(algorithm, batch, budget, packed=packed)
    wanted, loudly, all_read = stepped(loud(algorithm), batch, budget, packed=packed)
    largest = max(float(g.abs().max()) for g in wanted)
    assert largest > 1e-4
    for one, two in zip(found, wanted, strict=True):
        assert float((one - two).abs().max()) <= 1e-6 * largest
    assert metrics["loss/policy"] == pytest.approx(loudly["loss/policy"], abs=1e-6)
    assert {p for ids in quiet.seen for p in ids} == {f"p{i}" for i in range(8) if i not in DEAD}
    assert {p for ids in all_read.seen for p in ids} == {f"p{i}" for i in range(8)}
    assert metrics["skipped/groups"] == 3 / 8 and "skipped/groups" not in loudly
    # completions of 5 2 | 8 1 | 4 7 | 3 6, twice: groups 0 and 3 and 5 hold 7 + 9 + 9 of 72
    assert metrics["skipped/tokens"] == pytest.approx(25 / 72)


def test_a_step_of_dead_groups_reads_one_and_has_no_gradient() -> None:
    found, metrics, policy = stepped(GRPO(), rewarded(tuple(range(8))), 10**6)
    assert not any(bool(g.any()) for g in found)
    assert policy.seen == [("p0",)] and metrics["skipped/groups"] == 7 / 8


def test_a_price_for_drift_is_paid_by_dead_groups_too() -> None:
    _, metrics, policy = stepped(GRPO(kl_coef=0.1), rewarded(), 10**6)
    assert policy.seen == [tuple(f"p{i}" for i in range(8))]
    assert "skipped/groups" not in metrics


def test_other_processes_with_more_to_do_are_not_left_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every process makes as many passes as the one with the most."""
    monkeypatch.setattr("zoo.train.update.largest", lambda parts: max(parts, 6))
    for dead in (DEAD, tuple(range(8))):
        found, _, policy = stepped(GRPO(), rewarded(dead), 10**6)
        wanted, *_ = stepped(loud(GRPO()), rewarded(dead), 10**6)
        assert len(policy.seen) == 6
        for one, two in zip(found, wanted, strict=True):
            assert float((one - two).abs().max()) < 1e-6
