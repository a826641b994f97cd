"""Two tokens, one of them right: every algorithm must learn it, and unlearn it when told so."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from zoo.algorithms.base import Algorithm
from zoo.algorithms.dpo import DPO
from zoo.algorithms.grpo import GRPO
from zoo.algorithms.ppo import PPO
from zoo.batch import Batch, collate
from zoo.data.source import DatasetSource, Group
from zoo.functional import Average
from zoo.models.critic import CriticOutput
from zoo.models.models import Models
from zoo.models.policy import PolicyOutput
from zoo.rollout.pairs import pair_up
from zoo.rollout.source import rollout_batch
from zoo.rollout.torch_engine import sample
from zoo.train.gradients import Trainable
from zoo.train.metrics import Pool
from zoo.train.update import update
from zoo.types import Completion, Prompt, RewardOutput

GROUP = 8
PROMPT = Prompt(id="bandit", token_ids=(0,))


class TwoTokens(nn.Module):
    """A policy over {0, 1} that starts at (½, ½) and reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(2))

    def forward(self, batch: Batch) -> PolicyOutput:
        logprobs = self.logits.log_softmax(0)
        entropy = -(logprobs.exp() * logprobs).sum().detach()
        mask, zero = batch.completion_mask, torch.zeros(())
        chosen = logprobs[batch.input_ids.clamp(max=1)]
        return PolicyOutput(torch.where(mask, chosen, zero), torch.where(mask, entropy, zero))

    def probability(self) -> float:
        return float(self.logits.detach().softmax(0)[1])


class OneValue(nn.Module):
    """A critic of a single state."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(()))

    def forward(self, batch: Batch) -> CriticOutput:
        mask = batch.completion_mask
        values = torch.where(mask, self.value, torch.zeros(()))
        return CriticOutput(values, self.value.expand(batch.n_rows))


def rollout(policy: TwoTokens, step: int, seed: int) -> list[Completion]:
    """Eight completions of one token each, drawn by the engine's sampler."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    draws = torch.rand(GROUP, generator=generator)
    token, logprob = sample(policy.logits.detach().expand(GROUP, 2), 1.0, draws)
    return [
        Completion(str(t), (t,), (p,), False)
        for t, p in zip(token.tolist(), logprob.tolist(), strict=True)
    ]


def dpo_batch(completions: list[Completion], scores: list[float]) -> Batch | None:
    pairs = list(pair_up(PROMPT, completions, scores))
    if not pairs:
        return None
    groups = [
        Group(p.prompt, (p.chosen_ids or (), p.rejected_ids or ()), (p.chosen, p.rejected))
        for p in pairs
    ]
    return DatasetSource(groups, len(groups), 0, 0).collate(groups)


def learn(algorithm: Algorithm, sign: float, seed: int, steps: int = 20) -> list[float]:
    """π(1) after each step, with reward `sign` for token 1 and 0 for token 0."""
    policy, critic = TwoTokens(), OneValue()
    reference = copy.deepcopy(policy).requires_grad_(False)
    models = Models(policy=policy, reference=reference, critic=critic)
    trainables = {
        name: Trainable(module, torch.optim.SGD(module.parameters(), lr=0.5), 0.5)
        for name, module in (("policy", policy), ("critic", critic))
        if name in algorithm.needs.trains
    }
    path = []
    for step in range(steps):
        completions = rollout(policy, step, seed)
        scores = [sign * c.token_ids[0] for c in completions]
        batch: Batch | None
        if isinstance(algorithm, DPO):
            batch = dpo_batch(completions, scores)
        else:
            batch = rollout_batch([PROMPT], completions, RewardOutput([*scores]), GROUP, 0)
        if batch is not None:
            batch = algorithm.prepare(batch, models)
            for _ in range(algorithm.epochs):
                done = update(
                    batch,
                    algorithm,
                    models,
                    trainables,
                    max_completion_length=1,
                    micro_batch_tokens=10,
                    max_grad_norm=None,
                    pool=Pool(),
                )
                assert done.applied, done.reason
        path.append(policy.probability())
    return path


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": GRPO(),
    "grpo two epochs": GRPO(epochs=2, kl_coef=0.04),
    "grpo without std": GRPO(scale_by_std=False, average=Average.constant),
    "ppo": PPO(),
    "ppo two epochs": PPO(epochs=2, kl_coef=0.0),
    "ppo without whitening": PPO(whiten_advantages=False),
    "dpo": DPO(beta=0.5),
    "dpo smoothed": DPO(beta=0.5, label_smoothing=0.1),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_right_token_is_learnt(name: str, seed: int) -> None:
    assert learn(ALGORITHMS[name], 1.0, seed)[-1] > 0.6


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_same_token_is_unlearnt_with_the_reward_negated(name: str, seed: int) -> None:
    assert learn(ALGORITHMS[name], -1.0, seed)[-1] < 0.4


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_constant_reward_teaches_nothing(name: str) -> None:
    """Control: reward 0 for both tokens leaves the policy exactly where it was."""
    assert learn(ALGORITHMS[name], 0.0, 0)[-1] == 0.5


def test_the_bandit_starts_at_one_half() -> None:
    assert TwoTokens().probability() == 0.5
    batch = collate([[0]], [[1]], group_size=1, prompt_ids=["b"])
    assert float(TwoTokens()(batch).logprobs.detach()[0, 1]) == pytest.approx(-0.693147, rel=1e-6)
