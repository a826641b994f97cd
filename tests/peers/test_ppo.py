"""PPO as TRL had it until 1.12: rewards, GAE, whitening and both losses beside zoo's.

TRL computes all of it inside `PPOTrainer.train`. A small run is made with real models, and the
numbers are read from that method's own variables where it calls `masked_whiten` and `masked_mean`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.peers.common import (
    PROMPTS,
    assert_differ,
    assert_same,
    llama,
    moved,
    plain,
    tokenizer,
    words,
)
from zoo.functional import (
    clipped_surrogate,
    gae,
    k1,
    k3,
    kl_token_rewards,
    masked_mean,
    missing_eos_penalty,
    terminal_rewards,
    value_loss,
    whiten,
)

pytestmark = pytest.mark.peers

ROWS = 6
LENGTH = 16
STOP = 2
READ = ("rewards", "values", "advantages", "returns", "scores", "kl")


@pytest.fixture(scope="module")
def ppo() -> ModuleType:
    pytest.importorskip("trl", reason="TRL is not installed")
    pytest.importorskip(
        "trl.experimental.ppo", reason="this TRL has no PPO: pip install trl==1.12.0"
    )
    from trl.experimental.ppo import ppo_trainer

    return ppo_trainer


def run(ppo: ModuleType, folder: Path, patch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """One rollout and its updates; `seen.rollout` and `seen.updates` hold `train`'s variables."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification

    seen = SimpleNamespace(rollout=None, updates=[])
    whiten_theirs, mean_theirs = ppo.masked_whiten, ppo.masked_mean

    def variables() -> dict[str, Any]:
        """Of `train`, copied: it deletes and overwrites them."""
        local = sys._getframe(2).f_locals
        return {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in local.items()
            if isinstance(value, (torch.Tensor, int, float)) or name in ("args", "micro_batch_inds")
        }

    def whiten_spy(values: Any, mask: Any, shift_mean: bool = True) -> Any:
        if shift_mean:  # of the advantages, not of the rewards
            seen.rollout = variables()
        return whiten_theirs(values, mask, shift_mean)

    def mean_spy(values: Any, mask: Any, axis: Any = None) -> Any:
        local = variables()
        if "pg_loss_max" in local and "loss" in local and "pg_clipfrac" not in local:
            seen.updates.append(local)
        return mean_theirs(values, mask, axis)

    patch.setattr(ppo, "masked_whiten", whiten_spy)
    patch.setattr(ppo, "masked_mean", mean_spy)

    def scorer(seed: int) -> Any:
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float32
        )
        model.config.pad_token_id = 0
        torch.nn.init.normal_(model.score.weight, std=0.5)
        return model

    names = tokenizer()
    names.padding_side = "left"
    prompts = [names(words(PROMPTS[i % 3]))["input_ids"] for i in range(ROWS)]
    data = Dataset.from_dict({"input_ids": prompts})
    reference = llama(folder)
    moved(reference, 0.05)
    given: dict[str, Any] = {
        "total_episodes": ROWS,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 1,
        "num_mini_batches": 1,
        "num_ppo_epochs": 2,
        "response_length": LENGTH,
        "stop_token": "eos",
        "temperature": 5.0,  # about one token in 24 is the stop token, so some rows fill up
        "learning_rate": 0.05,  # far enough for the second epoch's ratios to be clipped
        "num_sample_generations": 0,
        "kl_coef": 0.3,
        "gamma": 0.9,
        "lam": 0.8,
        "missing_eos_penalty": 1.0,
    }
    torch.manual_seed(4)
    trainer = ppo.PPOTrainer(
        args=ppo.PPOConfig(**plain(folder, **(given | settings))),
        processing_class=names,
        model=llama(folder),
        ref_model=reference,
        reward_model=scorer(1),
        value_model=scorer(2),
        train_dataset=data,
        eval_dataset=data,
    )
    trainer.train()
    return seen


def read(rollout: dict[str, Any]) -> Any:
    """The rollout in zoo's terms, and TRL's two masks."""
    columns = torch.arange(rollout["responses"].shape[1])
    last = rollout["sequence_lengths"]  # the index of the last token, not a length
    return SimpleNamespace(
        mask=columns <= last[:, None],
        # One position more where there is room: the state after the last token.
        mask_p1=columns <= last[:, None] + 1,
        full=last == rollout["responses"].shape[1] - 1,
        **{name: rollout[name] for name in READ},
    )


def test_the_kl_price_and_the_score_agree_up_to_the_position_of_the_score(
    ppo: ModuleType, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for estimator, function in [("k1", k1), ("k3", k3)]:
        rollout = run(ppo, tiny, monkeypatch, kl_estimator=estimator).rollout
        has = read(rollout)
        assert 0 < int(has.full.sum()) < ROWS, "both kinds of row are needed"
        kl = function(rollout["logprobs"], rollout["ref_logprobs"], has.mask)
        assert_same(kl, torch.where(has.mask, has.kl, 0.0))
        # A completion that fills the row: on its last token, as in zoo.
        ours = kl_token_rewards(has.scores, kl, has.mask, 0.3)
        assert_same(ours[has.full], has.rewards[has.full])
        # A shorter one: TRL puts the score on the padding after the stop token.
        shifted = terminal_rewards(has.scores, has.mask_p1) - torch.where(has.mask, 0.3 * kl, 0.0)
        assert_same(shifted, has.rewards)
        assert_differ(ours[~has.full], has.rewards[~has.full], 1e-3)


def test_the_penalty_for_no_stop_token_agrees(
    ppo: ModuleType, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced = read(run(ppo, tiny, monkeypatch, missing_eos_penalty=1.5).rollout)
    monkeypatch.undo()
    seen = run(ppo, tiny, monkeypatch, missing_eos_penalty=None).rollout
    free = read(seen)
    ids = seen["postprocessed_responses"]
    ours = missing_eos_penalty(ids, free.mask, [STOP], 1.5)
    # TRL finds a row's end by looking for the filler: a row that samples the filler ends there for
    # its losses, yet its stop token further on still excuses it. zoo's masks come from lengths.
    last = ids.gather(1, seen["sequence_lengths"][:, None]).squeeze(1)
    sampled_filler = (last != STOP) & (ids == STOP).any(1)
    assert 0 < int((ours != 0)[~sampled_filler].sum()) < ROWS
    expected = free.scores + torch.where(sampled_filler, 0.0, ours)
    assert_same(expected, priced.scores)


def test_gae_agrees_on_rows_with_one_state_more(
    ppo: ModuleType, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = read(run(ppo, tiny, monkeypatch).rollout)
    advantages, returns = gae(has.rewards, has.values, has.mask_p1, gamma=0.9, gae_lambda=0.8)
    assert_same(advantages[has.mask_p1], has.advantages[has.mask_p1])
    assert_same(returns[has.mask_p1], has.returns[has.mask_p1])
    # zoo ends at the last token with value 0. The difference is that of one TD error with V(s_T).
    scored = terminal_rewards(has.scores, has.mask)
    own, _ = gae(
        torch.where(has.mask, has.rewards, 0.0) + torch.where(has.full[:, None], 0.0, scored),
        has.values,
        has.mask,
        gamma=0.9,
        gae_lambda=0.8,
    )
    assert_same(own[has.full], has.advantages[has.full])
    rows = torch.arange(ROWS)[~has.full]
    end = has.mask.sum(1)[~has.full] - 1
    final = has.values[rows, end + 1]
    # δ_T: R + s − V_T here; R + γ·V(s_T) − V_T there, and then γλ·(s − V(s_T)) of the state more.
    gap = has.scores[rows] - 0.9 * final - 0.9 * 0.8 * (has.scores[rows] - final)
    assert_same(own[rows, end] - has.advantages[rows, end], gap)


def test_whitening_agrees_with_and_without_the_mean_up_to_the_place_of_epsilon(
    ppo: ModuleType,
) -> None:
    values, mask = torch.randn(4, 9) * 3 + 1, torch.rand(4, 9) > 0.3
    for shift_mean in (True, False):
        theirs = ppo.masked_whiten(values, mask, shift_mean)
        assert_same(whiten(values, mask, shift_mean=shift_mean)[mask], theirs[mask])
        assert (
            float(theirs[~mask].abs().min()) > 0
        )  # TRL whitens what is masked, and fills it later
    # ε: σ² + 1e-8 in TRL, σ + 1e-8 in zoo. At σ = 1e-4 (a critic that is nearly right) the factor
    # is √(1 + 1e-8/1e-8) = √2 against 1 + 1e-4.
    small = torch.where(mask, torch.arange(36.0).view(4, 9), 0.0)
    small = torch.where(mask, (small - small[mask].mean()) / small[mask].std() * 1e-4, 0.0)
    ratio = whiten(small, mask)[mask] / ppo.masked_whiten(small, mask)[mask]
    assert_same(ratio, torch.full_like(ratio, 2**0.5 / (1 + 1e-4)), 1e-4)


def test_advantages_are_whitened_over_the_tokens_alone(
    ppo: ModuleType, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = run(ppo, tiny, monkeypatch)
    has = read(seen.rollout)
    first = seen.updates[0]
    order = torch.as_tensor(first["micro_batch_inds"])
    ours = whiten(has.advantages, has.mask)[order]
    assert_same(ours, first["mb_advantage"])


def test_the_clipped_policy_loss_and_the_clipped_value_loss_agree(
    ppo: ModuleType, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = run(ppo, tiny, monkeypatch)
    has = read(seen.rollout)
    assert len(seen.updates) == 2
    for at, local in enumerate(seen.updates):
        order = torch.as_tensor(local["micro_batch_inds"])
        mask, mask_p1 = has.mask[order], has.mask_p1[order]
        surrogate = clipped_surrogate(
            local["new_logprobs"], local["mb_logprobs"], local["mb_advantage"], mask
        )
        assert_same(masked_mean(surrogate.loss, mask), local["pg_loss"])
        value = value_loss(
            local["vpred"], local["mb_return"], local["mb_values"], mask_p1, clip=0.2
        )
        # TRL's mean is over one state more a row than zoo's, which trains the tokens' values.
        assert_same(masked_mean(value.loss, mask_p1), local["vf_loss"])
        assert_same(masked_mean(value.clipped.float(), mask_p1), local["vf_clipfrac"])
        assert_same(
            masked_mean(surrogate.loss, mask) + 0.1 * masked_mean(value.loss, mask_p1),
            local["loss"],
        )
        if at:
            assert bool((surrogate.clipped_high | surrogate.clipped_low).any())
            assert bool(value.clipped.any())
