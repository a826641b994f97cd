"""TRL's RLOO beside zoo's: the baseline is the same, the ratio is another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.peers.common import (
    LIMIT,
    PROMPTS,
    REWARDS,
    assert_differ,
    assert_same,
    gradient,
    llama,
    moved,
    only_term,
    plain,
    sampled_batch,
    tokenizer,
    words,
    zoo_models,
)
from zoo.algorithms.rloo import RLOO
from zoo.batch import Batch
from zoo.functional import leave_one_out, sequence_logprobs

pytestmark = pytest.mark.peers


class Side:
    """RLOOTrainer with a batch that it sampled itself, and zoo's batch of the same tokens."""

    def __init__(self, folder: Path, rewards: Sequence[float | None] = REWARDS, **settings: Any):
        from datasets import Dataset
        from trl import RLOOConfig, RLOOTrainer

        given = {"num_generations": 4, "per_device_train_batch_size": len(rewards), "beta": 0.0}
        given |= {"steps_per_generation": 1, "max_completion_length": LIMIT}
        self.trainer: Any = RLOOTrainer(
            model=llama(folder),
            reward_funcs=lambda completions, **_: list(rewards),
            args=RLOOConfig(**plain(folder, **(given | settings))),
            train_dataset=Dataset.from_dict({"prompt": [words(p) for p in PROMPTS]}),
            processing_class=tokenizer(),
        )
        self.model = self.trainer.model.train()
        if self.trainer.ref_model is not None:  # another model, so that there is some drift
            moved(self.trainer.ref_model, 0.05)
        self.inputs = self.trainer._generate_and_score_completions(
            [{"prompt": words(PROMPTS[i // 4])} for i in range(len(rewards))]
        )
        masks = self.inputs["completion_mask"].bool()
        rows = [r[m].tolist() for r, m in zip(self.inputs["completion_ids"], masks, strict=True)]
        self.batch: Batch = sampled_batch(rewards, rows)
        self.models = zoo_models(self.model, self.trainer.ref_model)

    def trl(self) -> tuple[Tensor, Tensor]:
        loss = self.trainer.compute_loss(self.model, self.inputs)
        return loss.detach(), gradient(self.model, loss)

    def advantages(self, prepared: Batch) -> Tensor:
        return prepared.advantages[prepared.completion_mask]  # type: ignore[index]

    def theirs(self) -> Tensor:
        given = self.inputs["advantages"][:, None].expand(self.batch.completion_mask.shape)
        return given[self.batch.completion_mask]


def test_the_leave_one_out_baseline_agrees(tiny: Path) -> None:
    side = Side(tiny)
    assert_same(side.advantages(RLOO().prepare(side.batch, side.models)), side.theirs())


def test_an_abstained_reward_is_left_out_of_the_baseline_alike(tiny: Path) -> None:
    side = Side(tiny, [None if i in (1, 6) else r for i, r in enumerate(REWARDS)])
    assert_same(side.advantages(RLOO().prepare(side.batch, side.models)), side.theirs())


def test_the_kl_price_of_a_whole_completion_agrees(tiny: Path) -> None:
    side = Side(tiny, beta=0.2)
    prepared = RLOO(kl_coef=0.2).prepare(side.batch, side.models)
    assert_same(side.advantages(prepared), side.theirs())
    assert_differ(side.theirs(), side.advantages(RLOO().prepare(side.batch, side.models)), 1e-3)


def test_trl_normalises_over_the_batch_and_zoo_by_the_groups_deviation(tiny: Path) -> None:
    rewards = torch.tensor(REWARDS)
    theirs = Side(tiny, normalize_advantages=True).inputs["advantages"]
    loo = leave_one_out(rewards, 4)
    # TRL: the mean and deviation (ddof 1) of all advantages, ε = 1e-4. zoo: each group's rewards.
    assert_same(theirs, (loo - loo.mean()) / (loo.std() + 1e-4))
    std = rewards.view(3, 4).std(dim=1).repeat_interleave(4)
    assert_same(leave_one_out(rewards, 4, scale_by_std=True), loo / (std + 1e-6))
    assert_differ(theirs, leave_one_out(rewards, 4, scale_by_std=True), 0.1)


def test_the_first_update_has_one_direction_and_differs_by_the_longest_length(tiny: Path) -> None:
    # At ρ = 1 the gradient of a product of ratios is the sum of their gradients. TRL divides by B;
    # zoo's `average=constant` by B · L_max.
    side, algorithm = Side(tiny), RLOO()
    prepared = algorithm.prepare(side.batch, side.models)
    ours = gradient(side.model, only_term(algorithm, prepared, side.models).loss)
    assert_same(ours * LIMIT, side.trl()[1])


def test_later_updates_clip_tokens_in_zoo_and_the_product_of_all_ratios_in_trl(tiny: Path) -> None:
    side, algorithm = Side(tiny), RLOO(epochs=2)
    prepared = algorithm.prepare(side.batch, side.models)
    moved(side.model, 0.05)
    out = side.models.policy(side.batch)
    mask = side.batch.completion_mask
    new, old = sequence_logprobs(out.logprobs, mask, False), prepared.old_logprobs
    ratio = (new - sequence_logprobs(old, mask, False)).exp()  # type: ignore[arg-type]
    advantages = side.inputs["advantages"]
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss, theirs = side.trl()
    assert_same(-clipped.mean(), loss)
    ours = gradient(side.model, only_term(algorithm, prepared, side.models).loss)
    assert_differ(ours * LIMIT, theirs, 1e-2)
