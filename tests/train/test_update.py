"""One optimizer step: its loss and gradient belong to the batch and not to how it was cut."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.models.tiny import full_logprobs, llama, ragged_batch
from tests.train.modules import ScriptedCritic, ScriptedPolicy, captured, rows
from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.algorithms.dpo import DPO
from zoo.algorithms.grpo import GRPO
from zoo.algorithms.ppo import PPO, Truncation
from zoo.algorithms.sft import SFT
from zoo.batch import Batch
from zoo.config import ConfigError
from zoo.functional import Average, KLEstimator
from zoo.models.critic import Critic
from zoo.models.models import Models
from zoo.models.policy import Policy
from zoo.train import gradients as gradients_module
from zoo.train.gradients import Trainable
from zoo.train.metrics import Pool
from zoo.train.update import Updated, update

LIMIT = 10  # max_completion_length


def step(
    batch: Batch,
    algorithm: Algorithm,
    models: Models,
    trainables: dict[str, Trainable],
    *,
    budget: int = 10**6,
    max_grad_norm: float | None = None,
) -> tuple[Updated, dict[str, float]]:
    pool = Pool()
    done = update(
        batch,
        algorithm,
        models,
        trainables,
        max_completion_length=LIMIT,
        micro_batch_tokens=budget,
        max_grad_norm=max_grad_norm,
        step_on_zero_gradient=True,  # the gradient itself is looked at
        pool=pool,
    )
    return done, pool.means()


def scripted(batch: Batch, algorithm: Algorithm, budget: int = 10**6) -> dict[str, float]:
    """Metrics of a step with the scripted policy and critic."""
    policy, critic = ScriptedPolicy(), ScriptedCritic()
    models = Models(policy=policy, critic=critic)
    made = captured(policy=policy, critic=critic)
    done, metrics = step(batch, algorithm, models, {k: made[k] for k in algorithm.needs.trains},
                         budget=budget)  # fmt: skip
    assert done.applied
    return metrics


# --- numbers by hand ------------------------------------------------------------------------------

A_ROW = 11  # columns of rows whose longest completion is 10: a budget of one such row
TWO = {"advantages": [1.0, -1.0]}


@pytest.mark.parametrize("budget", [10**6, 1])
@pytest.mark.parametrize(
    ("average", "loss"),
    [
        (Average.token, 0.6),  # −(2·1 − 8·1)/10
        (Average.sequence, 0.0),  # −(1 − 1)/2
        (Average.constant, 0.3),  # −(2 − 8)/(2·10)
    ],
)
def test_B01_B10_two_rows_together_or_apart(budget: int, average: Average, loss: float) -> None:
    metrics = scripted(rows([2, 8], TWO), GRPO(average=average), budget)
    assert metrics["loss/policy"] == pytest.approx(loss, abs=1e-12)


def test_B10_a_doubled_batch_has_the_same_constant_length_loss() -> None:
    doubled = rows([2, 8, 2, 8], {"advantages": [1.0, -1.0, 1.0, -1.0]})
    metrics = scripted(doubled, GRPO(average=Average.constant), 18)
    assert metrics["loss/policy"] == pytest.approx(0.3, abs=1e-12)


def test_B03_a_masked_row_leaves_numerator_and_denominator() -> None:
    batch = rows([3, 5], TWO)
    kept = batch.completion_mask & torch.tensor([[True], [False]])
    for average in (Average.token, Average.sequence):
        metrics = scripted(batch.replace(completion_mask=kept), GRPO(average=average), 6)
        assert metrics["loss/policy"] == pytest.approx(-1.0, abs=1e-12)  # bug: −.375


@pytest.mark.parametrize(
    ("lengths", "advantages"),
    [([2, 8, 4, 6], [1.0, -1.0, 1.0, -1.0]), ([2, 4, 8, 6], [1.0, 1.0, -1.0, -1.0])],
)
def test_B08_the_order_of_rows_in_micro_batches_of_two_does_not_matter(
    lengths: list[int], advantages: list[float]
) -> None:
    # −(2 + 4 − 8 − 6)/20
    metrics = scripted(rows(lengths, {"advantages": advantages}), GRPO(average="token"), 18)
    assert metrics["loss/policy"] == pytest.approx(0.4, abs=1e-12)


@pytest.mark.parametrize("budget", [10**6, 1])
def test_B11_the_value_loss_is_normalised_like_the_policy_loss(budget: int) -> None:
    # the critic says 0; returns 1 on 2 tokens and 2 on 8: ½·(2·1 + 8·4)/10
    batch = rows([2, 8], {**TWO, "returns": [1.0, 2.0], "values": [0.0, 0.0]})
    metrics = scripted(batch, PPO(kl_coef=0.0, value_clip=None), budget)
    assert metrics["loss/value"] == pytest.approx(1.7, rel=1e-12)  # bug: 1.25
    assert metrics["loss/policy"] == pytest.approx(0.6, rel=1e-12)
    assert metrics["value_error"] == pytest.approx(3.4, rel=1e-12)


@pytest.mark.parametrize("budget", [10**6, 1])
def test_B13_dead_groups_feel_the_kl_price_only_where_that_is_wanted(budget: int) -> None:
    # d = −1 − (−1.5) = .5; k3 = e^−.5 − 1 + .5 = .1065307; times .05
    batch = rows([4, 2], {"logprobs": [-1.0, -1.0]}, group_size=2)
    reference = torch.where(batch.completion_mask, -1.5, 0.0)
    batch = batch.replace(rewards=torch.tensor([0.7, 0.7]), ref_logprobs=reference)
    for kl_on_dead, loss in ((True, 0.00532653), (False, 0.0)):
        algorithm = GRPO(kl_coef=0.05, kl_on_dead=kl_on_dead, average="token")
        prepared = algorithm.prepare(batch, Models(policy=None))
        metrics = scripted(prepared, algorithm, budget)
        assert metrics["loss/policy"] == pytest.approx(loss, rel=1e-5, abs=1e-12)
        assert metrics["kl_ref"] == pytest.approx(0.1065307, rel=1e-5)


def test_B13_a_row_of_average_reward_in_a_living_group_is_not_dead() -> None:
    # rewards 0, ½, 1: the middle row has advantage 0, and its group is alive: it pays as well
    batch = rows([2, 2, 2], {}, group_size=3)
    reference = torch.where(batch.completion_mask, -1.5, 0.0)
    batch = batch.replace(rewards=torch.tensor([0.0, 0.5, 1.0]), ref_logprobs=reference)
    for kl_on_dead in (True, False):
        algorithm = GRPO(kl_coef=0.05, kl_on_dead=kl_on_dead)
        prepared = algorithm.prepare(batch, Models(policy=None))
        metrics = scripted(prepared, algorithm)
        # the advantages sum to 0, so only the price is left
        assert metrics["loss/policy"] == pytest.approx(0.00532653, rel=1e-5)


def test_B45_the_old_log_probs_are_those_of_the_rollout() -> None:
    batch = rows([1], {"advantages": [1.0], "logprobs": [-0.5], "old_logprobs": [-1.0]})
    metrics = scripted(batch, GRPO(epochs=2))
    assert metrics["ratio"] == pytest.approx(1.648721, rel=1e-6)
    assert metrics["loss/policy"] == pytest.approx(-1.2, rel=1e-6)
    assert metrics["clip_high"] == 1.0 and metrics["clip_low"] == 0.0
    assert metrics["kl_old"] == pytest.approx(-0.5)


def test_B55_clip_fractions_are_shares_of_all_trained_tokens_across_micro_batches() -> None:
    # (ρ, A) = (1.5, 1) (1.5, −1) (.5, 1) (.5, −1), one token each, plus four tokens at ρ = 1
    logs = [math.log(r) - 1 for r in (1.5, 1.5, 0.5, 0.5, 1.0)]
    batch = rows(
        [1, 1, 1, 1, 4],
        {
            "advantages": [1.0, -1.0, 1.0, -1.0, 1.0],
            "logprobs": logs,
            "old_logprobs": [-1.0] * 5,
        },
    )
    for budget in (10**6, 1):
        metrics = scripted(batch, GRPO(average="token"), budget)
        assert metrics["clip_high"] == metrics["clip_low"] == 0.125
        # (−1.2 + 1.5 − .5 + .8 − 4·1)/8
        assert metrics["loss/policy"] == pytest.approx(-3.4 / 8, rel=1e-9)


def test_B58_the_dpo_example_through_the_update_path() -> None:
    # π_c −10, π_r −12, ref −11 and −11, β .1: m = .2, loss .598139; d/dπ_c = −.0450166
    batch = rows([2, 4], {"logprobs": [-5.0, -3.0], "ref_logprobs": [-5.5, -2.75]}, group_size=2)
    policy = ScriptedPolicy()
    trainables = captured(policy=policy)
    _, metrics = step(batch, DPO(beta=0.1), Models(policy=policy), trainables)
    assert metrics["loss/policy"] == pytest.approx(0.598139, rel=1e-5)
    assert metrics["margin"] == pytest.approx(0.2, rel=1e-6)
    assert metrics["preference_accuracy"] == 1.0
    # the weight multiplies both sums: d/dw = −.0450166·(−10) + .0450166·(−12)
    (gradient,) = trainables["policy"].optimizer.grads
    assert float(gradient) == pytest.approx(-0.0450166 * -10 + 0.0450166 * -12, rel=1e-5)
    smoothed = scripted(batch, DPO(beta=0.1, label_smoothing=0.1))
    assert smoothed["loss/policy"] == pytest.approx(0.618139, rel=1e-5)


# --- real models ----------------------------------------------------------------------------------

GRPOS = {
    f"grpo {average}": GRPO(
        epochs=2, average=average, kl_coef=0.1, kl_estimator=KLEstimator.k3, clip_eps_high=0.28
    )
    for average in Average
}
ALGORITHMS: dict[str, Algorithm] = {
    **GRPOS,
    "grpo one update": GRPO(),
    "grpo dead": GRPO(kl_coef=0.1, kl_on_dead=False),
    "ppo": PPO(epochs=2, kl_coef=0.1, value_clip=0.05),
    "ppo bootstrap": PPO(minibatches=2, truncation=Truncation.bootstrap, average="sequence"),
    "dpo": DPO(beta=0.3, label_smoothing=0.1),
    "sft": SFT(),
    "sft sequence": SFT(average=Average.sequence),
}


class Setting:
    """A prepared batch, and models that have moved since: ratios differ from 1, clips bite."""

    def __init__(self, algorithm: Algorithm, dtype: torch.dtype) -> None:
        self.algorithm = algorithm
        self.policy = Policy(llama(1, dtype))
        self.critic = Critic(llama(2, dtype).base_model, 32).to(dtype)
        self.reference = Policy(llama(3, dtype)).requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.critic.head.weight.copy_(torch.randn(1, 32, generator=generator) / 10)
        self.models = Models(policy=self.policy, critic=self.critic, reference=self.reference)
        batch = ragged_batch(8, 1) if isinstance(algorithm, SFT) else ragged_batch(8, 2)
        count = batch.n_rows
        if not isinstance(algorithm, SFT | DPO):
            reward = torch.rand(count, generator=generator)
            reward[2:4] = 0.5  # a dead group
            scored = torch.ones(count, dtype=torch.bool)
            scored[5] = False
            batch = batch.replace(
                rewards=reward, scored=scored, truncated=torch.arange(count) % 3 == 0
            )
        with torch.no_grad():
            batch = batch.replace(sampling_logprobs=self.policy(batch).logprobs + 0.01)
        self.batch = algorithm.prepare(batch, self.models)
        self.final = [self._value_after(i) for i in range(count)]
        with torch.no_grad():
            for parameter in [*self.policy.parameters(), *self.critic.parameters()]:
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator).to(dtype)

    @torch.no_grad()
    def _value_after(self, i: int) -> float:
        """The critic's value of a whole row, read from the row alone."""
        row = self.batch.input_ids[i : i + 1, : int(self.batch.lengths[i])]
        hidden = self.critic.backbone(input_ids=row).last_hidden_state[0, -1]
        return float(hidden @ self.critic.head.weight[0] + self.critic.head.bias[0])

    def gradients(self, batch: Batch, budget: int) -> tuple[list[Tensor], dict[str, float]]:
        trainables = captured(**{name: getattr(self, name) for name in self.algorithm.needs.trains})
        done, metrics = step(batch, self.algorithm, self.models, trainables, budget=budget)
        assert done.applied, done.reason
        grads = [g for t in trainables.values() for g in t.optimizer.grads]
        return grads, metrics


def assert_same(
    first: tuple[list[Tensor], dict[str, float]],
    second: tuple[list[Tensor], dict[str, float]],
    tolerance: float,
) -> None:
    largest = max(float(g.abs().max()) for g in first[0])
    assert largest > 1e-4
    for one, two in zip(first[0], second[0], strict=True):
        assert float((one - two).abs().max()) <= tolerance * largest
    assert first[1].keys() == second[1].keys()
    for name, value in first[1].items():
        assert second[1][name] == pytest.approx(value, rel=100 * tolerance, abs=100 * tolerance)


@pytest.fixture(params=ALGORITHMS)
def algorithm(request: pytest.FixtureRequest) -> Algorithm:
    return ALGORITHMS[request.param]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_B01_micro_batches_of_8_2_and_1_give_one_loss_and_gradient(
    algorithm: Algorithm, dtype: torch.dtype, tolerance: float
) -> None:
    setting = Setting(algorithm, dtype)
    tokens = setting.batch.input_ids.numel()
    whole = setting.gradients(setting.batch, tokens)
    assert whole[0][0].dtype == dtype
    for parts in (2, 8):
        needed = setting.batch.micro_batches_needed(tokens // parts, algorithm.needs.rows_coupled)
        assert needed == parts
        assert_same(whole, setting.gradients(setting.batch, tokens // parts), tolerance)


def test_order_of_groups_and_of_rows_in_them_does_not_matter(algorithm: Algorithm) -> None:
    setting = Setting(algorithm, torch.float64)
    batch, size = setting.batch, setting.batch.group_size
    whole = setting.gradients(batch, 40)
    shuffled = batch.select_groups(torch.tensor([3, 7, 0, 5, 1, 6, 2, 4]))
    assert_same(whole, setting.gradients(shuffled, 40), 1e-10)
    if not algorithm.needs.rows_coupled and size == 2:  # a pair says who is preferred
        swapped = batch.select_rows(torch.arange(batch.n_rows).view(-1, 2).flip(1).reshape(-1), 2)
        assert_same(whole, setting.gradients(swapped, 40), 1e-10)


def test_B05_right_padding_does_not_matter(algorithm: Algorithm) -> None:
    setting = Setting(algorithm, torch.float64)
    batch = setting.batch

    def padded(value: Any) -> Any:
        wide = isinstance(value, Tensor) and value.dim() == 2
        return torch.nn.functional.pad(value, (0, 7)) if wide else value

    wide = Batch(
        **{
            item.name: padded(getattr(batch, item.name))
            for item in fields(Batch)
            if item.name != "extra"
        },
        extra={name: padded(value) for name, value in batch.extra.items()},
    )
    # split() trims, one part as well; so look at the losses without it
    scale = batch.local_scale(LIMIT)
    for one, two in zip(
        algorithm.losses(batch.replace(scale=scale), setting.models),
        algorithm.losses(wide.replace(scale=scale), setting.models),
        strict=True,
    ):
        assert one.loss.item() == pytest.approx(two.loss.item(), rel=1e-10)


@pytest.mark.parametrize("garbage", [1e4, float("nan")])
def test_garbage_under_the_mask_changes_nothing(algorithm: Algorithm, garbage: float) -> None:
    setting = Setting(algorithm, torch.float64)
    batch = setting.batch
    outside = ~batch.completion_mask

    def soiled(value: Tensor) -> Tensor:
        if value.is_floating_point() and value.shape == outside.shape:
            return torch.where(outside, garbage, value)
        return value

    names = [n for n, _ in batch._tensors() if not n.startswith("extra[")]
    dirty = batch.replace(
        **{name: soiled(getattr(batch, name)) for name in names},
        extra={name: soiled(value) for name, value in batch.extra.items()},
    )
    assert_same(setting.gradients(batch, 60), setting.gradients(dirty, 60), 1e-12)


def test_garbage_rewards_of_unscored_rows_change_nothing() -> None:
    for algorithm in (GRPO(), PPO()):
        setting = Setting(algorithm, torch.float64)
        assert setting.batch.scored is not None and not setting.batch.scored[5]
        rewards = setting.batch.rewards
        assert rewards is not None
        clean = algorithm.prepare(setting.batch, setting.models)
        soiled = torch.where(setting.batch.scored, rewards, torch.nan)
        dirty = algorithm.prepare(setting.batch.replace(rewards=soiled), setting.models)
        mask = clean.completion_mask
        assert torch.equal(mask, dirty.completion_mask)
        assert clean.advantages is not None and dirty.advantages is not None
        assert torch.equal(clean.advantages[mask], dirty.advantages[mask])
        assert not bool(clean.advantages[5][mask[5]].any())


# --- real models against slow loops ---------------------------------------------------------------


def token_logprobs(policy: Policy, batch: Batch) -> list[list[float]]:
    """Log-probs of each row's trained tokens, from the whole logits of the row alone."""
    found = []
    with torch.no_grad():
        for i in range(batch.n_rows):
            n, start = int(batch.lengths[i]), int(batch.prompt_lengths[i])
            row = full_logprobs(policy.model, batch.input_ids[i, :n].tolist())
            found.append(row[start:].tolist())
    return found


def on_tokens(values: Tensor | None, batch: Batch) -> list[list[float]]:
    assert values is not None
    return [values[i][batch.completion_mask[i]].tolist() for i in range(batch.n_rows)]


@pytest.mark.parametrize("average", list(Average))
def test_grpo_is_the_papers_formula_in_a_slow_loop(average: Average) -> None:
    setting = Setting(GRPOS[f"grpo {average}"], torch.float64)
    batch = setting.batch
    new, old = token_logprobs(setting.policy, batch), on_tokens(batch.old_logprobs, batch)
    ref = token_logprobs(setting.reference, batch)
    assert batch.rewards is not None and batch.scored is not None
    total, clipped = 0.0, 0
    tokens = sum(len(row) for row in new)
    for g in range(batch.n_groups):
        mine = [i for i in (2 * g, 2 * g + 1) if batch.scored[i]]
        reward = [float(batch.rewards[i]) for i in mine]
        mean = sum(reward) / len(reward)
        # sample deviation; a group of one scored row, or of equal rewards, has no advantage
        spread = sum((r - mean) ** 2 for r in reward) / max(len(reward) - 1, 1)
        for i in (2 * g, 2 * g + 1):
            advantage = 0.0
            if i in mine and max(reward) > min(reward):
                advantage = (float(batch.rewards[i]) - mean) / (math.sqrt(spread) + 1e-6)
            for p, q, r in zip(new[i], old[i], ref[i], strict=True):
                ratio = math.exp(p - q)
                bounded = min(max(ratio, 0.8), 1.28)
                clipped += bounded != ratio and ratio * advantage > bounded * advantage
                price = math.exp(r - p) - 1 + (p - r)
                loss = -min(ratio * advantage, bounded * advantage) + 0.1 * price
                total += {
                    "token": loss / tokens,
                    "sequence": loss / len(new[i]) / batch.n_rows,
                    "constant": loss / batch.n_rows / LIMIT,
                }[average]
    _, metrics = setting.gradients(batch, 40)
    assert clipped > 0, "the setting has nothing clipped"
    # advantages are float32
    assert metrics["loss/policy"] == pytest.approx(total, rel=1e-5)
    assert metrics["clip_high"] + metrics["clip_low"] == pytest.approx(clipped / tokens)


@pytest.mark.parametrize("name", ["ppo", "ppo bootstrap"])
def test_ppo_is_its_formulas_in_a_slow_loop(name: str) -> None:
    algorithm = ALGORITHMS[name]
    assert isinstance(algorithm, PPO)
    setting = Setting(algorithm, torch.float64)
    batch = setting.batch
    assert batch.rewards is not None and batch.scored is not None
    trained = [i for i in range(batch.n_rows) if batch.scored[i]]
    assert not bool(batch.completion_mask[5].any())  # the abstention is in no loss
    old, values = on_tokens(batch.old_logprobs, batch), on_tokens(batch.values, batch)
    ref = token_logprobs(setting.reference, batch)
    advantages: dict[int, list[float]] = {}
    returns: dict[int, list[float]] = {}
    bootstrap = algorithm.truncation is Truncation.bootstrap
    for i in trained:
        n = len(old[i])
        reward = [-algorithm.kl_coef * (p - r) for p, r in zip(old[i], ref[i], strict=True)]
        reward[-1] += float(batch.rewards[i])
        after, advantage = 0.0, 0.0
        if bootstrap and bool(batch.truncated[i]):
            after = setting.final[i]
        row: list[float] = []
        for t in reversed(range(n)):
            following = values[i][t + 1] if t + 1 < n else after
            delta = reward[t] + following - values[i][t]
            advantage = delta + 0.95 * advantage
            row.insert(0, advantage)
        advantages[i] = row
        returns[i] = [a + v for a, v in zip(row, values[i], strict=True)]
    flat = [a for i in trained for a in advantages[i]]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((a - mean) ** 2 for a in flat) / (len(flat) - 1))
    new = token_logprobs(setting.policy, batch)
    with torch.no_grad():
        said = on_tokens(setting.critic(batch).values, batch)
    policy_loss = value_loss = 0.0
    for i in trained:
        n = len(old[i])
        each = 1 / len(flat) if algorithm.average is Average.token else 1 / n / len(trained)
        for t in range(n):
            a = (advantages[i][t] - mean) / (std + 1e-8)
            ratio = math.exp(new[i][t] - old[i][t])
            policy_loss -= each * min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
            v, before, target = said[i][t], values[i][t], returns[i][t]
            clip = algorithm.value_clip or math.inf
            bounded = before + min(max(v - before, -clip), clip)
            value_loss += each * max((v - target) ** 2, (bounded - target) ** 2) / 2
    _, metrics = setting.gradients(batch, 60)
    assert metrics["loss/policy"] == pytest.approx(policy_loss, rel=1e-5)
    assert metrics["loss/value"] == pytest.approx(value_loss, rel=1e-5)
    assert 0 < metrics["value_clip"] < 1 or name == "ppo bootstrap"


def test_B25_bootstrap_takes_the_critics_value_after_a_truncated_completion() -> None:
    # γ = 1, λ = .95, V = .2 everywhere: truncated, no reward: δ = 0, so A = 0 and returns .2;
    # terminal: the last δ is −.2, and A_t = −.2·.95^(n−1−t)
    batch = rows([3, 3], {"logprobs": [-1.0, -1.0]}, group_size=2).replace(
        rewards=torch.zeros(2),
        scored=torch.ones(2, dtype=torch.bool),
        truncated=torch.tensor([True, False]),
    )
    models = Models(policy=ScriptedPolicy(), critic=ScriptedCritic(0.2))
    off = {"kl_coef": 0.0, "whiten_advantages": False}
    cut = [-0.2 * 0.95**2, -0.2 * 0.95, -0.2]
    for truncation, first in ((Truncation.bootstrap, [0.0] * 3), (Truncation.terminal, cut)):
        prepared = PPO(truncation=truncation, **off).prepare(batch, models)
        advantages = on_tokens(prepared.advantages, prepared)
        assert advantages[0] == pytest.approx(first, abs=1e-9)
        assert advantages[1] == pytest.approx(cut, abs=1e-9)


def test_B30_the_kl_price_is_in_the_reward_by_hand() -> None:
    # β = .05, k1 = (.5, −.2, .1), score 1 on the last token: rewards (−.025, .01, .995);
    # the critic says 0 and λ = 1: returns are their sums from each token on
    batch = rows([3], {}).replace(rewards=torch.ones(1), scored=torch.ones(1, dtype=torch.bool))
    k1 = torch.tensor([[0.0, 0.5, -0.2, 0.1]])
    batch = batch.replace(ref_logprobs=torch.where(batch.completion_mask, -1 - k1, 0.0))
    models = Models(policy=ScriptedPolicy(), critic=ScriptedCritic())
    algorithm = PPO(kl_coef=0.05, gae_lambda=1.0, whiten_advantages=False)
    prepared = algorithm.prepare(batch, models)
    assert on_tokens(prepared.returns, prepared)[0] == pytest.approx([0.98, 1.005, 0.995], rel=1e-6)
    assert scripted(prepared, algorithm)["kl_ref"] == pytest.approx(0.4 / 3, rel=1e-6)
    # without a price the reference is not even asked for
    bare = PPO(kl_coef=0.0, gae_lambda=1.0, whiten_advantages=False)
    prepared = bare.prepare(batch.replace(ref_logprobs=None), models)
    assert on_tokens(prepared.returns, prepared)[0] == [1.0, 1.0, 1.0]


# --- what is refused ------------------------------------------------------------------------------


def adam(setting: Setting) -> dict[str, Trainable]:
    return {
        name: Trainable(module, torch.optim.AdamW(module.parameters(), lr=1e-2), 1e-2)
        for name, module in (("policy", setting.policy), ("critic", setting.critic))
        if name in setting.algorithm.needs.trains
    }


def snapshot(trainables: dict[str, Trainable]) -> Any:
    return copy.deepcopy(
        {n: (t.module.state_dict(), t.optimizer.state_dict()) for n, t in trainables.items()}
    )


def assert_bitwise(first: Any, second: Any) -> None:
    if isinstance(first, Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_bitwise(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, two in zip(first, second, strict=True):
            assert_bitwise(one, two)
    else:
        assert first == second


@pytest.mark.parametrize(
    ("name", "fields", "reason", "value", "budget", "broken"),
    [
        ("grpo one update", ["advantages"], "loss/policy", math.nan, 10**6, "policy"),
        ("grpo one update", ["advantages"], "loss/policy", math.inf, 60, "policy"),
        ("ppo", ["advantages"], "loss/policy", math.nan, 60, "policy"),
        # the critic's term alone: the policy stays as it was too
        ("ppo", ["returns"], "loss/value", math.inf, 60, "critic"),
        ("ppo", ["advantages", "returns"], "loss/policy", math.nan, 60, ""),
    ],
)
def test_a_step_with_a_loss_that_is_not_finite_is_refused_whole(
    name: str, fields: list[str], reason: str, value: float, budget: int, broken: str
) -> None:
    setting = Setting(ALGORITHMS[name], torch.float32)
    trainables = adam(setting)
    good = setting.batch
    for _ in range(2):  # so that there is optimizer state to spoil
        assert step(good, setting.algorithm, setting.models, trainables)[0].applied
    before = snapshot(trainables)
    row, column = good.completion_mask.nonzero()[-1].tolist()
    held = {field: getattr(good, field).clone() for field in fields}
    for values in held.values():
        values[row, column] = value
    bad = good.replace(**held)
    done, metrics = step(bad, setting.algorithm, setting.models, trainables, budget=budget,
                         max_grad_norm=1.0)  # fmt: skip
    assert not done.applied and reason in done.reason and done.broken == broken
    assert_bitwise(before, snapshot(trainables))
    assert metrics == {}, "a refused step leaves no numbers"
    assert all(p.grad is None for t in trainables.values() for p in t.module.parameters())
    # and the next good step is as if nothing had been
    twin = Setting(ALGORITHMS[name], torch.float32)
    others = adam(twin)
    for _ in range(3):
        step(good, twin.algorithm, twin.models, others)
    assert step(good, setting.algorithm, setting.models, trainables)[0].applied
    assert_bitwise(snapshot(others), snapshot(trainables))


class Cliff(nn.Module):
    """A policy whose loss is finite and whose gradient is not: √w at w = 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, batch: Batch) -> Any:
        out = ScriptedPolicy()(batch)
        said = torch.where(batch.completion_mask, -self.weight.sqrt(), 0.0)
        return replace(out, logprobs=said)


def test_a_gradient_that_is_not_finite_is_refused_too() -> None:
    policy = Cliff()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    done, _ = step(rows([2, 3], TWO), SFT(), Models(policy=policy),
                   {"policy": Trainable(policy, optimizer, 1.0)})  # fmt: skip
    assert not done.applied and done.reason.startswith("the gradient norm of the policy is")
    assert done.broken == "policy"
    assert policy.weight.item() == 0.0


# --- dead batches, clipping, counts ---------------------------------------------------------------


def test_a_dead_batch_has_a_finite_loss_and_no_gradient() -> None:
    setting = Setting(GRPO(), torch.float64)
    batch = setting.batch.replace(rewards=torch.full((16,), 0.7))
    prepared = setting.algorithm.prepare(batch, setting.models)
    grads, metrics = setting.gradients(prepared, 10**6)
    assert metrics["loss/policy"] == 0.0 and metrics["grad_norm/policy"] == 0.0
    assert not any(bool(g.any()) for g in grads)


def test_gradients_are_clipped_for_each_module_by_itself() -> None:
    setting = Setting(ALGORITHMS["ppo"], torch.float64)
    free, metrics = setting.gradients(setting.batch, 10**6)
    split = len(list(setting.policy.parameters()))

    def norm(grads: list[Tensor]) -> float:
        return math.sqrt(sum(float(g.square().sum()) for g in grads))

    policy, critic = norm(free[:split]), norm(free[split:])
    assert metrics["grad_norm/policy"] == pytest.approx(policy, rel=1e-9)
    assert metrics["grad_norm/critic"] == pytest.approx(critic, rel=1e-9)
    assert abs(policy - critic) > 0.1 * max(policy, critic)
    limit = (policy + critic) / 2  # clips one of the two
    trainables = captured(policy=setting.policy, critic=setting.critic)
    _, clipped = step(setting.batch, setting.algorithm, setting.models, trainables,
                      max_grad_norm=limit)  # fmt: skip
    for name, wanted in (("policy", policy), ("critic", critic)):
        assert clipped[f"grad_norm/{name}"] == pytest.approx(wanted, rel=1e-9)  # before clipping
        mine = norm(trainables[name].optimizer.grads)
        assert mine == pytest.approx(min(wanted, limit), rel=1e-5)


def test_only_what_the_algorithm_trains_gets_a_gradient(algorithm: Algorithm) -> None:
    setting = Setting(algorithm, torch.float64)
    setting.gradients(setting.batch, 40)
    for name in ("policy", "critic", "reference"):
        assert all(p.grad is None for p in getattr(setting, name).parameters())


def test_prepare_builds_no_graph(algorithm: Algorithm) -> None:
    batch = Setting(algorithm, torch.float32).batch
    assert not [name for name, value in batch._tensors() if value.requires_grad]


def test_an_update_counts_the_tokens_that_it_trained(algorithm: Algorithm) -> None:
    setting = Setting(algorithm, torch.float32)
    trainables = captured(**{n: getattr(setting, n) for n in algorithm.needs.trains})
    done, _ = step(setting.batch, algorithm, setting.models, trainables, budget=40)
    lengths = setting.batch.completion_lengths.clone()
    if isinstance(algorithm, PPO):
        lengths[5] = 0  # the abstention
    assert done.tokens == int(lengths.sum())


def test_terms_are_backpropagated_before_the_next_forward() -> None:
    """PPO's policy activations are freed before the critic's exist."""
    setting = Setting(ALGORITHMS["ppo"], torch.float32)
    events: list[str] = []
    inner = setting.models.critic.forward

    def forward(batch: Batch) -> Any:
        done = all(p.grad is not None for p in setting.policy.model.parameters())
        events.append("after" if done else "before")
        return inner(batch)

    setting.models.critic.forward = forward
    setting.gradients(setting.batch, 10**6)
    assert events == ["after"]


# --- what an algorithm of somebody else yields ----------------------------------------------------


@dataclass(frozen=True)
class Yields(Algorithm):
    """Makes its losses of the policy's log-probs with a function."""

    make: Any = None
    name: ClassVar[str] = "mine"

    @property
    def needs(self) -> Needs:
        return Needs(DataKind.examples)

    def losses(self, batch: Batch, models: Models) -> Any:
        return self.make(models.policy(batch).logprobs)


def yields(made: Any) -> dict[str, float]:
    batch = rows([2, 3], {})
    policy = ScriptedPolicy()
    trainables = captured(policy=policy)
    return step(batch, Yields(make=made), Models(policy=policy), trainables, budget=4)[1]


def metric(name: Any, value: Any = (1.0, 1)) -> Any:
    return lambda x: [LossTerm("policy", x.sum(), {name: value})]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda x: [], "losses yielded no LossTerm for a batch of 2 rows"),
        (lambda x: None, "losses must yield LossTerms, and returned NoneType"),
        (lambda x: x.sum(), "losses must yield LossTerms, and returned Tensor"),
        (lambda x: [("policy", x.sum())], "losses must yield LossTerms, got tuple"),
        (lambda x: [LossTerm("a", x)], "the loss of the term 'a' must be a scalar tensor"),
        (lambda x: [LossTerm("a", 0.5)], "must be a scalar tensor, got 0.5"),  # pyright: ignore
        (lambda x: [LossTerm("a", x.sum().detach())], "must depend on a module under training"),
        (lambda x: [LossTerm("a", x.sum(), [1])], "metrics must be a mapping"),  # pyright: ignore
        (lambda x: [LossTerm(None, x.sum())], "the name of a term must be a text, got None"),  # pyright: ignore
        (lambda x: [LossTerm("", x.sum())], "the name of a term must be a text, got ''"),
        (lambda x: [LossTerm("a", x.sum() * 1j)], "'a' must be a real number, got torch.complex"),
        (lambda x: [LossTerm("a", x.sum())] * 2, "two terms called 'a'"),
        (metric(3), "the name of a metric must be a text, got 3"),
        (metric("m", (torch.ones(()) * 1j, 1)), "the metric 'm' must be (sum, count)"),
        (metric("m", 3.0), "the metric 'm' must be (sum, count), two numbers, got 3.0"),
        (metric("m", ("a", 1)), "the metric 'm' must be (sum, count)"),
        (metric("m", (torch.ones(2), 1)), "the metric 'm' must be (sum, count)"),
        *((metric(name), f"the metric {name!r} is the name of one of zoo's own") for name in
          ("step", "updates", "flops", "lr/policy", "loss/policy", "reward/total", "seconds/step")),
    ],
)  # fmt: skip
def test_what_losses_yield_is_checked(made: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        yields(made)
    assert "algorithm=mine: " in str(caught.value) and message in str(caught.value)


def test_a_micro_batch_may_yield_nothing_where_another_does() -> None:
    left = iter([1])  # the first of two micro-batches
    metrics = yields(lambda x: [LossTerm("policy", x.sum(), {"m": (2, 4)}) for _ in left])
    assert metrics["loss/policy"] == -2.0 and metrics["m"] == 0.5


def test_processes_whose_terms_differ_are_told_before_the_gradient_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = lambda mine: [mine, "" if isinstance(mine, str) else mine]  # noqa: E731
    monkeypatch.setattr(gradients_module, "gathered", shared)
    with pytest.raises(ConfigError, match=r"\(rank 0 policy, rank 1 none\)"):
        yields(lambda x: [LossTerm("policy", x.sum())])
