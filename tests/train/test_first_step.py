"""What must hold before anything is learnt: ratio 1, nothing clipped, no drift, ln 2."""

from __future__ import annotations

import math

import pytest
import torch

from tests.models.tiny import llama, ragged_batch
from tests.train.modules import captured
from zoo.algorithms.base import Algorithm
from zoo.algorithms.dpo import DPO
from zoo.algorithms.grpo import GRPO
from zoo.algorithms.ppo import PPO
from zoo.functional import KLEstimator
from zoo.models.critic import Critic
from zoo.models.models import Models
from zoo.models.policy import Policy
from zoo.rollout.engine import Sampling
from zoo.rollout.source import rollout_batch
from zoo.rollout.torch_engine import TorchEngine
from zoo.train.metrics import Pool
from zoo.train.update import update
from zoo.types import Prompt, RewardOutput

LN2 = 0.693147


def models(temperature: float = 1.0) -> Models:
    reference = Policy(llama(), temperature).requires_grad_(False)
    reference.with_entropy = False
    return Models(
        policy=Policy(llama(), temperature).train(),
        reference=reference,
        critic=Critic(llama(1).base_model, 32),
    )


def first_update(algorithm: Algorithm, loaded: Models, temperature: float) -> dict[str, float]:
    """A real rollout, scored by chance, and the first update on it."""
    prompts = [Prompt(id=str(i), token_ids=tuple(range(5, 7 + i))) for i in range(4)]
    engine = TorchEngine().engine(lambda ids: "", 0)
    engine.sync(loaded.policy)
    made = engine.generate(
        [p.token_ids for p in prompts], [p.id for p in prompts], 4, Sampling(temperature, 8, (9,))
    )
    completions = [c for group in made for c in group]
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(16, generator=generator).tolist()
    batch = rollout_batch(prompts, completions, RewardOutput(scores), 4, 0)
    batch = algorithm.prepare(batch, loaded)
    return run(algorithm, batch, loaded)


def run(algorithm: Algorithm, batch, loaded: Models) -> dict[str, float]:
    pool = Pool()
    done = update(
        batch,
        algorithm,
        loaded,
        captured(**{name: getattr(loaded, name) for name in algorithm.needs.trains}),
        max_completion_length=8,
        micro_batch_tokens=10**6,
        max_grad_norm=1.0,
        pool=pool,
    )
    assert done.applied, done.reason
    return pool.means()


ON_POLICY = {
    **{
        f"grpo {estimator}": GRPO(epochs=2, kl_coef=0.1, kl_estimator=estimator)
        for estimator in KLEstimator
        if estimator is not KLEstimator.k1
    },
    "grpo one update": GRPO(),
    "grpo sequence constant": GRPO(epochs=2, average="constant", scale_by_std=False),
    **{f"ppo {e}": PPO(epochs=2, kl_coef=0.1, kl_estimator=e) for e in ("k1", "k2", "k3")},
    "ppo one update": PPO(kl_coef=0.0),
}


@pytest.mark.parametrize("name", ON_POLICY)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_B40_B31_ratio_is_one_and_nothing_has_drifted(name: str, temperature: float) -> None:
    algorithm = ON_POLICY[name]
    metrics = first_update(algorithm, models(temperature), temperature)
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["clip_high"] == metrics["clip_low"] == 0.0
    assert metrics.get("kl_old", 0.0) == pytest.approx(0.0, abs=1e-6)
    assert ("kl_ref" in metrics) == algorithm.needs.reference
    assert metrics.get("kl_ref", 0.0) == pytest.approx(0.0, abs=1e-6)
    assert metrics["mismatch/sampler"] < 1e-5  # mean |trainer − sampler|
    assert metrics.get("value", 0.0) == 0.0  # the critic's head starts at zero
    assert 0 < metrics["entropy"] < math.log(64)


@pytest.mark.parametrize("algorithm", [GRPO(epochs=2, kl_coef=0.1), PPO(minibatches=2)])
def test_B40_every_ratio_is_one_and_not_only_their_mean(algorithm: Algorithm) -> None:
    loaded = models()
    loaded.reference = Policy(llama(5)).requires_grad_(False)  # not the policy: no mixing up
    batch = ragged_batch(4, 2).replace(
        rewards=torch.arange(8.0), scored=torch.ones(8, dtype=torch.bool)
    )
    prepared = algorithm.prepare(batch, loaded)
    assert prepared.old_logprobs is not None
    with torch.no_grad():
        gap = loaded.policy(batch).logprobs - prepared.old_logprobs
    assert float(gap.abs().max()) < 1e-6


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_B31_dpo_starts_at_ln_2_with_no_margin(beta: float, label_smoothing: float) -> None:
    algorithm, loaded = DPO(beta=beta, label_smoothing=label_smoothing), models()
    metrics = run(algorithm, algorithm.prepare(ragged_batch(4, 2), loaded), loaded)
    assert metrics["loss/policy"] == pytest.approx(LN2, abs=1e-5)
    for name in ("margin", "implicit_reward/chosen", "implicit_reward/rejected"):
        assert metrics[name] == pytest.approx(0.0, abs=1e-5)


def test_with_one_update_the_gradient_is_that_of_frozen_old_log_probs() -> None:
    batch = ragged_batch(4, 2).replace(rewards=torch.arange(8.0))
    grads = []
    for algorithm in (GRPO(), GRPO(epochs=2)):
        loaded = models()
        prepared = algorithm.prepare(batch, loaded)
        assert (prepared.old_logprobs is None) == (algorithm.updates_per_step == 1)
        trainables = captured(policy=loaded.policy)
        update(
            prepared,
            algorithm,
            loaded,
            trainables,
            max_completion_length=8,
            micro_batch_tokens=10**6,
            max_grad_norm=None,
            pool=Pool(),
        )
        grads.append(trainables["policy"].optimizer.grads)
    largest = max(float(g.abs().max()) for g in grads[0])
    for one, two in zip(*grads, strict=True):
        assert float((one - two).abs().max()) <= 1e-5 * largest
