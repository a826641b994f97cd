"""The cross-checks that are not clauses of the contract, for every algorithm of conf/algorithm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.contract.test_contract import NAMES, configured
from zoo.algorithms.base import Algorithm, DataKind
from zoo.algorithms.grpo import GRPO
from zoo.batch import Batch
from zoo.models.models import Models
from zoo.testing import (
    ROLES,
    Littered,
    littered,
    make_batch,
    moved_models,
    one_step,
    one_step_untrimmed,
    scaled,
    tiny_models,
    train_on,
    widened,
    with_logprobs,
    with_roles,
)


def setting(algorithm: Algorithm, **changes: Any) -> tuple[Batch, Models]:
    """A batch of the algorithm's kind, and models as the loop has them."""
    needs = algorithm.needs
    models = tiny_models(needs, drift=0.02)
    batch = with_logprobs(make_batch(needs, **changes), needs, models)
    roles: dict[str, Any] = {}
    if needs.data is not DataKind.prompts and not needs.reference_live:
        roles["reference"] = None  # its log-probs came with the data
    models = with_roles(models, **roles)
    models.state = algorithm.initial_state()
    return batch, models


# evaluation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_B06_loss_while_evaluating_is_that_of_training(name: str) -> None:
    algorithm = configured(name)
    batch, models = setting(algorithm)
    prepared = algorithm.prepare(batch, models)
    later = moved_models(models, algorithm.needs)
    in_training = one_step(algorithm, prepared, later, 40).metrics  # in several micro-batches
    for role in ROLES:
        if getattr(later, role) is not None:
            getattr(later, role).eval()
    with torch.no_grad():
        terms = list(algorithm.losses(scaled(prepared), later))
    assert terms
    for term in terms:
        assert not term.loss.requires_grad
        assert float(term.loss) == pytest.approx(in_training[f"loss/{term.name}"], abs=1e-5)


# padding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [100.0, float("nan")])
@pytest.mark.parametrize("name", NAMES)
def test_B05_B61_log_probs_of_prompts_and_padding_are_in_no_loss(name: str, garbage: float) -> None:
    algorithm = configured(name)
    batch, models = setting(algorithm)
    prepared = algorithm.prepare(batch, models)
    later = moved_models(models, algorithm.needs)
    clean = one_step_untrimmed(algorithm, prepared, later)
    modules = {role: getattr(later, role) for role in ROLES}
    noisy = with_roles(
        later, **{r: Littered(m, garbage) for r, m in modules.items() if m is not None}
    )
    dirty = one_step_untrimmed(algorithm, littered(widened(prepared, 7), garbage), noisy)
    assert not dirty.refused
    for key in (key for key in clean.metrics if key.startswith("loss/")):
        assert dirty.metrics[key] == pytest.approx(clean.metrics[key], abs=1e-6, rel=1e-6)
    for role, gradient in clean.gradients.items():
        largest = float(gradient.abs().max())
        assert float((gradient - dirty.gradients[role]).abs().max()) <= 5e-5 * largest


# dead batches -------------------------------------------------------------------------------------

# Where the group is the baseline: a critic, or a mean over the batch, learns from dead groups too.
BY_GROUP = [
    name
    for name in NAMES
    if configured(name).needs.data is DataKind.prompts and configured(name).needs.min_group_size > 1
]


@pytest.mark.parametrize("name", BY_GROUP)
def test_dead_batch_has_a_finite_loss_and_no_gradient(name: str) -> None:
    algorithm = configured(name)
    batch, models = setting(algorithm, rewards="dead")
    kept = algorithm.keep(batch)
    assert bool(kept.all()) or not bool(kept.any())
    outcome = one_step(algorithm, algorithm.prepare(batch, models), models)
    assert not outcome.refused and outcome.metrics["loss/policy"] == pytest.approx(0.0, abs=1e-7)
    assert not bool(outcome.gradients["policy"].any())


@pytest.mark.parametrize("name", BY_GROUP)
def test_dead_batch_after_a_live_one_moves_neither_weights_nor_moments(name: str) -> None:
    algorithm = configured(name)
    live, models = setting(algorithm)
    dead = setting(algorithm, rewards="dead")[0]
    twin = with_roles(models, policy=copy.deepcopy(models.policy))
    train_on(algorithm, [live], models)
    train_on(algorithm, [live, dead], twin)
    for one, two in zip(models.policy.parameters(), twin.policy.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(("kl_on_dead", "moves"), [(True, True), (False, False)])
def test_dead_batch_feels_the_price_of_drift_where_the_config_says_so(
    kl_on_dead: bool, moves: bool
) -> None:
    algorithm = GRPO(kl_coef=0.1, kl_on_dead=kl_on_dead)
    batch, models = setting(algorithm, rewards="dead")
    outcome = one_step(algorithm, algorithm.prepare(batch, models), models)
    assert bool(outcome.gradients["policy"].any()) is moves
