"""Choices that a configuration names: each has its own number, none is silently without effect."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import yaml

from tests.train.modules import ScriptedCritic, ScriptedPolicy, captured, rows
from tests.train.test_update import scripted, step
from zoo.algorithms.base import Algorithm, DataKind, Needs, checked_state, needs_of
from zoo.algorithms.cispo import CISPO
from zoo.algorithms.dapo import DAPO
from zoo.algorithms.dpo import DPO, PairLoss
from zoo.algorithms.grpo import GRPO
from zoo.algorithms.ppo import PPO, Truncation
from zoo.algorithms.reinforce_pp import ReinforcePP
from zoo.algorithms.rloo import RLOO
from zoo.batch import Batch
from zoo.build import check
from zoo.compose import compose, config_dir
from zoo.config import ConfigError
from zoo.functional import Average, KLEstimator
from zoo.instantiate import build, structured
from zoo.models.models import Models

PAIR = {"logprobs": [-5.0, -3.0], "ref_logprobs": [-5.5, -2.75]}  # sums −10, −12, −11, −11


def pair() -> Batch:
    return rows([2, 4], PAIR, group_size=2)


# --- losses of a pair -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0.598139),
        ({"loss": "hinge"}, 0.8),
        ({"label_smoothing": 0.1}, 0.618139),
        ({"loss": "robust", "label_smoothing": 0.1}, 0.573139),
        ({"loss": "robust"}, 0.598139),  # without flipped labels it is DPO
    ],
    ids=str,
)
def test_B58_each_loss_that_the_config_names_has_its_own_number(
    settings: dict[str, Any], expected: float
) -> None:
    found = build({"_target_": "zoo.algorithms.dpo.DPO", "beta": 0.1, **settings}, "algorithm")
    assert scripted(pair(), found)["loss/policy"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("average", "expected"), [(False, 9.0), (True, 18.0625)])
def test_B56_ipo_of_sums_or_of_means_as_the_config_says(average: bool, expected: float) -> None:
    # chosen of 4 tokens, rejected of 2; sums −10, −12, −11, −11: h = 2, or 1/4 + 1/2 = 3/4;
    # 1/(2β) = 5: (2 − 5)² and (3/4 − 5)²
    batch = rows([4, 2], {"logprobs": [-2.5, -6.0], "ref_logprobs": [-2.75, -5.5]}, group_size=2)
    node = yaml.safe_load((config_dir() / "algorithm" / "ipo.yaml").read_text())
    node["average_logprobs"] = average
    assert scripted(batch, build(node, "algorithm"))["loss/policy"] == pytest.approx(expected)


def test_B58_likelihood_of_the_chosen_is_added_by_its_weight() -> None:
    # the chosen completion has a mean log-prob of −5, so a weight of .2 adds 1
    found = scripted(pair(), DPO(beta=0.1, nll_coef=0.2))
    assert found["loss/policy"] == pytest.approx(1.598139, rel=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (DPO(loss=PairLoss.hinge), 1.0),
        (DPO(loss=PairLoss.robust, label_smoothing=0.2), math.log(2)),
        (DPO(label_smoothing=0.2), math.log(2)),
    ],
    ids=lambda x: getattr(x, "loss", None),
)
def test_losses_at_the_start(algorithm: DPO, expected: float) -> None:
    same = {"logprobs": [-5.0, -3.0], "ref_logprobs": [-5.0, -3.0]}
    metrics = scripted(rows([2, 4], same, group_size=2), algorithm)
    assert metrics["loss/policy"] == pytest.approx(expected, rel=1e-6)
    assert metrics["margin"] == 0.0


# --- completions that were cut --------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GRPO, DAPO])
@pytest.mark.parametrize(("masked", "expected"), [(True, -1.0), (False, 0.25)])
def test_B03_cut_completion_leaves_numerator_and_denominator(
    kind: type[Any], masked: bool, expected: float
) -> None:
    # A = (1, −1)/√2 → times √2: −1·3/3, or (−1·3 + 1·5)/8 with both
    batch = rows([3, 5], {}, group_size=2).replace(
        rewards=torch.tensor([1.0, 0.0]),
        scored=torch.ones(2, dtype=torch.bool),
        truncated=torch.tensor([False, True]),
    )
    algorithm = kind(mask_truncated=masked, average=Average.token)
    prepared = algorithm.prepare(batch, Models(policy=None))
    for budget in (10**6, 1):
        loss = scripted(prepared, algorithm, budget)["loss/policy"]
        assert loss * math.sqrt(2) == pytest.approx(expected, rel=1e-5)  # ε = 1e-6 on a std of .7


def test_B03_all_cut_is_a_loss_of_zero_with_a_graph() -> None:
    batch = rows([3, 5], {}, group_size=2).replace(
        rewards=torch.tensor([1.0, 0.0]), truncated=torch.ones(2, dtype=torch.bool)
    )
    algorithm = GRPO(mask_truncated=True)
    prepared = algorithm.prepare(batch, Models(policy=None))
    metrics = scripted(prepared, algorithm)
    assert metrics["loss/policy"] == metrics["grad_norm/policy"] == 0.0


# --- the price of drift ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (GRPO, {"kl_estimator": "k2"}, r"kl_estimator=k2 has no effect with algorithm.kl_coef=0"),
        (GRPO, {"kl_on_dead": False}, r"kl_on_dead=False has no effect"),
        (PPO, {"kl_coef": 0.0, "kl_estimator": "k3"}, r"kl_estimator=k3 has no effect"),
        (PPO, {"kl_horizon": 3}, r"kl_horizon=3 has no effect without algorithm.kl_target"),
        (DPO, {"loss": "hinge", "label_smoothing": 0.1}, r"label_smoothing=0.1 has no effect"),
        (DPO, {"nll_coef": -1.0}, r"nll_coef must be at least 0"),
    ],
)
def test_B30_setting_without_effect_is_refused(
    kind: type[Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)


@pytest.mark.parametrize("key", ["kl_in_loss", "kl_in_reward", "use_kl_loss"])
@pytest.mark.parametrize("name", ["ppo", "grpo", "rloo", "reinforce_pp"])
def test_B30_no_algorithm_takes_a_second_place_for_the_price(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.{key}"):
        structured(compose([f"algorithm={name}", f"+algorithm.{key}=true"]))


@pytest.mark.parametrize("name", ["ppo", "rloo", "reinforce_pp"])
def test_B30_price_in_the_reward_is_in_no_loss(name: str) -> None:
    # the same advantages, another reference: the loss does not see it
    node = yaml.safe_load((config_dir() / "algorithm" / f"{name}.yaml").read_text())
    algorithm: Algorithm = build(node | {"kl_coef": 0.5}, "algorithm")
    batch = rows([3, 2, 2, 4], {}, group_size=2)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    batch = batch.replace(rewards=rewards, scored=torch.ones(4, dtype=torch.bool))
    near = torch.where(batch.completion_mask, -1.0, 0.0)
    models = Models(policy=ScriptedPolicy(), critic=ScriptedCritic())
    prepared = algorithm.prepare(batch.replace(ref_logprobs=near), models)
    losses = [
        scripted(prepared.replace(ref_logprobs=ref), algorithm)["loss/policy"]
        for ref in (near, near * 3)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp_baseline"])
def test_B30_price_in_the_loss_is_in_no_reward(name: str) -> None:
    node = yaml.safe_load((config_dir() / "algorithm" / f"{name}.yaml").read_text())
    algorithm: Algorithm = build(node | {"kl_coef": 0.5}, "algorithm")
    batch = rows([3, 2, 2, 4], {}, group_size=2)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    batch = batch.replace(rewards=rewards, scored=torch.ones(4, dtype=torch.bool))
    near = torch.where(batch.completion_mask, -1.0, 0.0)
    models = Models(policy=ScriptedPolicy())
    one, other = (
        algorithm.prepare(batch.replace(ref_logprobs=ref), models).advantages
        for ref in (near, near * 3)
    )
    assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize("algorithm", [RLOO(kl_coef=0.5), ReinforcePP(kl_coef=0.5), PPO()])
@pytest.mark.parametrize("shared", [True, False])
def test_B40_price_is_zero_at_the_start_whatever_the_sampler_rounds(
    algorithm: Algorithm, shared: bool
) -> None:
    # A sampler in bfloat16 is a copy whose log-probs are off; the policy's own are the reference's.
    batch = rows([3, 2, 2, 4], {}, group_size=2)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    same = torch.where(batch.completion_mask, -1.0, 0.0)
    sampled = same if shared else same * 1.03
    batch = batch.replace(rewards=rewards, scored=torch.ones(4, dtype=torch.bool))
    batch = batch.replace(ref_logprobs=same, sampling_logprobs=sampled)
    policy, critic = ScriptedPolicy(), ScriptedCritic()
    models = Models(policy=policy, critic=critic, sampler_is_policy=shared)
    made = captured(policy=policy, critic=critic)
    prepared = algorithm.prepare(batch, models)
    _, metrics = step(prepared, algorithm, models, {k: made[k] for k in algorithm.needs.trains})
    assert metrics["kl_ref"] == pytest.approx(0.0, abs=1e-7)


def test_B28_k1_as_a_loss_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="no KL gradient on average"):
        GRPO(kl_coef=0.1, kl_estimator=KLEstimator.k1)


@pytest.mark.parametrize("estimator", [each.value for each in KLEstimator])
def test_B26_every_name_that_the_config_takes_runs(estimator: str) -> None:
    node = {"_target_": "zoo.algorithms.grpo.GRPO", "kl_coef": 0.1, "kl_estimator": estimator}
    if estimator == "k1":
        with pytest.warns(UserWarning, match="no KL gradient"):
            algorithm = build(node, "algorithm")
    else:
        algorithm = build(node, "algorithm")
    batch = rows([4, 2], {"logprobs": [-1.0, -1.0]}, group_size=2)
    reference = torch.where(batch.completion_mask, -1.5, 0.0)
    batch = batch.replace(rewards=torch.tensor([1.0, 0.0]), ref_logprobs=reference)
    prepared = algorithm.prepare(batch, Models(policy=None))
    # d = .5: k1 = .5, k2 = .125, k3 = e^−.5 − .5 = .106531, whatever gradient they have
    value = {"k1": 0.5, "k2": 0.125, "k3": 0.1065307}[estimator[:2]]
    assert scripted(prepared, algorithm)["kl_ref"] == pytest.approx(value, rel=1e-5)


# --- names and numbers ----------------------------------------------------------------------------


def test_choice_given_by_name_is_its_member() -> None:
    assert PPO(truncation="bootstrap").truncation is Truncation.bootstrap  # pyright: ignore
    assert DPO(loss="hinge").loss is PairLoss.hinge  # pyright: ignore
    assert GRPO(average="token").average is Average.token  # pyright: ignore


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPO(truncation="bootstrapped"), "one of bootstrap, terminal; got 'bootstrapped'"),  # pyright: ignore
        (lambda: DPO(loss="ipo"), "loss must be one of sigmoid, robust, hinge; got 'ipo'"),  # pyright: ignore
        (lambda: GRPO(average="mean"), "average must be one of token, sequence, constant"),  # pyright: ignore
        (lambda: GRPO(kl_coef=math.nan), "kl_coef must be finite, got nan"),
        (lambda: DPO(beta=math.inf), "beta must be finite, got inf"),
        (lambda: CISPO(clip_eps_high=math.nan), "clip_eps_high must be finite"),
        (lambda: PPO(gamma=math.nan), "gamma must be finite"),
    ],
)
def test_wrong_name_or_number_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- an algorithm of somebody else ----------------------------------------------------------------


@dataclass(frozen=True)
class Asks(Algorithm):
    """Needs what a function says."""

    make: Any = None
    name: ClassVar[str] = "mine"

    @property
    def needs(self) -> Any:
        return self.make()


def test_needs_take_a_kind_by_its_name() -> None:
    assert needs_of(Asks(make=lambda: Needs("prompts"))).data is DataKind.prompts  # pyright: ignore


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (lambda: None, "must be a property that returns Needs(…), got None"),
        (lambda: {"data": "prompts"}, "got {'data': 'prompts'}"),
        (lambda: Needs("promptz"), "needs.data must be one of prompts, "),
        (lambda: Needs("pairs", trains="policy"), "needs.trains must be a tuple of modules"),
        (lambda: Needs("pairs", trains=()), "needs.trains must be a tuple of modules"),
        (lambda: Needs("pairs", trains=("polizy",)), "got ('polizy',)"),
        (lambda: Needs("pairs", trains=("policy", "critic")), "Return Needs(critic=True) too"),
        (lambda: Needs("pairs", trains=("reference",)), "trains 'reference'"),
        (lambda: Needs("prompts", min_group_size=0), "needs.min_group_size must be a whole"),
        (lambda: Needs("prompts", min_group_size="2"), "needs.min_group_size must be a whole"),
    ],
)
def test_needs_that_cannot_be_are_refused_before_anything_loads(made: Any, found: str) -> None:
    config = replace(structured(compose([])), algorithm=Asks(make=made))
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert str(caught.value).startswith("algorithm=mine") and found in str(caught.value)


class Keeps(GRPO):
    """Has a state."""

    def initial_state(self) -> dict[str, float]:
        return {"t": 0}

    def next_state(self, state: Any, metrics: Any) -> dict[str, float]:
        return {"t": state["t"] + 1}


@pytest.mark.parametrize(
    "state",
    [
        *(None, [0.1], {3: 0.1}),
        *({"a": value} for value in ("b", math.nan, math.inf, torch.ones(3), 10**400)),
    ],
)
def test_state_is_finite_numbers_by_name(state: Any) -> None:
    for verb in ("initial_state", "next_state"):
        with pytest.raises(ConfigError) as caught:
            checked_state(Keeps(), state, verb)
        assert f"algorithm=grpo: {verb} must return finite numbers by name" in str(caught.value)
    found = checked_state(Keeps(), {"kl_coef": 0.1, "n": 3}, "next_state")
    assert found == {"kl_coef": 0.1, "n": 3}


def test_a_state_of_each_process_s_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.algorithms.base.gathered", lambda mine: [mine, {"t": 2}])
    with pytest.raises(ConfigError, match=r"next_state returned another .*1 \{'t': 2\}\), so"):
        checked_state(Keeps(), {"t": 1}, "next_state")
    assert checked_state(Keeps(), {"t": 2}, "next_state") == {"t": 2}
    assert checked_state(GRPO(), {}, "next_state") == {}  # no state of its own: nothing to gather
    # What is unfit on one process alone is refused on all, after the exchange
    monkeypatch.setattr("zoo.algorithms.base.gathered", lambda mine: [mine, "{'t': nan}"])
    with pytest.raises(ConfigError, match=r"finite numbers by name, got \{'t': nan\}"):
        checked_state(Keeps(), {"t": 1}, "next_state")


@pytest.mark.parametrize("value", [-1.0, 0.0])
def test_a_critic_is_not_trained_away_from_its_returns(value: float) -> None:
    with pytest.raises(ValueError, match=r"algorithm.value_coef must be above 0, got"):
        PPO(value_coef=value)
