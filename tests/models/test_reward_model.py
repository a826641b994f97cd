"""The score is read at the last real token, whatever pads the row, and survives a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig

from tests.models.tiny import gpt2, llama, ragged_batch
from zoo.batch import collate
from zoo.config import ConfigError, ModelConfig
from zoo.data.tokenizer import arithmetic_tokenizer
from zoo.models.reward_model import RewardModel, from_policy, last_real, load_reward_model

EOS = 2
A, B = 11, 12  # two words


def by_hand(model: Any, row: list[int]) -> float:
    """The row alone, without padding: head times the last hidden state."""
    backbone = model.model.base_model
    hidden = backbone(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0, -1]
    return float((hidden @ model.model.score.weight[0]).detach())


def scores(model: RewardModel, rows: list[list[int]], mask: list[list[int]]) -> list[float]:
    return model.scores(torch.tensor(rows), torch.tensor(mask).bool()).tolist()


def test_B38_last_real_token_comes_from_the_mask_on_either_side() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 0, 0]]).bool()
    assert last_real(mask).tolist() == [4, 2, 2]


@pytest.mark.parametrize("pad", [0, EOS, B])
def test_B38_padding_on_either_side_gives_one_score(pad: int) -> None:
    model = from_policy(llama(), 0)
    left, right = [pad, pad, A, B, EOS], [A, B, EOS, pad, pad]
    found = scores(model, [left, right], [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert found == pytest.approx([by_hand(model, [A, B, EOS])] * 2, abs=1e-5)


def test_B38_text_that_holds_the_filler_is_not_cut_there() -> None:
    model = from_policy(llama(), 0)
    row = [A, EOS, B, A, EOS]
    (found,) = scores(model, [[*row, EOS]], [[1, 1, 1, 1, 1, 0]])
    assert found == pytest.approx(by_hand(model, row), abs=1e-5)
    assert abs(found - by_hand(model, [A, EOS])) > 1e-3


def test_B43_filler_that_is_eos_neither_drops_nor_keeps_a_token() -> None:
    model = from_policy(llama(), 0)
    (found,) = scores(model, [[A, EOS, EOS]], [[1, 1, 0]])
    assert found == pytest.approx(by_hand(model, [A, EOS]), abs=1e-5)
    assert abs(found - by_hand(model, [A])) > 1e-3


@pytest.mark.parametrize("make", [llama, gpt2])
def test_batch_is_scored_row_by_row_with_dropout_off(make: Any) -> None:
    model = from_policy(make(), 0).train()
    batch = ragged_batch()
    expected = []
    for row, length in zip(batch.input_ids.tolist(), batch.lengths.tolist(), strict=True):
        expected.append(by_hand(model, row[:length]))
    assert model(batch).tolist() == pytest.approx(expected, abs=1e-5)


def test_backbone_is_shared_and_gradients_reach_it() -> None:
    policy = llama()
    before = policy.base_model.embed_tokens.weight.data_ptr()
    model = from_policy(policy, 0)
    assert model.model.base_model.embed_tokens.weight.data_ptr() == before
    model(ragged_batch()).sum().backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in model.parameters() if p.grad is not None)
    assert {name for name, p in model.named_parameters() if p.grad is None} == set()


def test_head_depends_on_the_seed_alone() -> None:
    policy = llama()
    before = torch.random.get_rng_state()
    weights = [from_policy(policy, seed).model.score.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert torch.equal(before, torch.random.get_rng_state())


def test_score_is_float32_where_the_weights_are_not() -> None:
    model = from_policy(llama(dtype=torch.bfloat16), 0)
    assert model(ragged_batch()).dtype == torch.float32
    assert model.model.score.weight.dtype == torch.bfloat16


def saved(folder: Path, model: RewardModel) -> ModelConfig:
    model.save(folder, arithmetic_tokenizer())
    return ModelConfig(path=str(folder))


def test_folder_gives_the_same_scores_and_the_spread_back(tmp_path: Path) -> None:
    model = from_policy(llama(), 0)
    model.remember(-0.5, 2.0)
    again = load_reward_model(saved(tmp_path, model))
    batch = ragged_batch()
    assert torch.equal(model(batch), again(batch))
    assert float(again.score_mean) == -0.5 and float(again.score_std) == 2.0


def test_only_weights_that_were_judged_are_saved_with_a_spread(tmp_path: Path) -> None:
    model = from_policy(llama(), 0)
    for folder, judged in (("never", False), ("judged", True), ("since trained", False)):
        if judged:
            model.remember(-0.5, 2.0)
        else:
            model.forget()
        config = saved(tmp_path / folder, model)
        written = json.loads((tmp_path / folder / "config.json").read_text())
        names = {"zoo_score_mean", "zoo_score_std"}
        assert written.keys() & names == (names if judged else set())
        assert float(load_reward_model(config).score_std) == (2.0 if judged else 0.0)


@pytest.mark.parametrize("place", ["model.norm", "score"])
def test_weights_that_are_not_finite_are_refused(place: str, tmp_path: Path) -> None:
    model = from_policy(llama(), 0)
    with torch.no_grad():
        model.model.get_submodule(place).weight.view(-1)[0] = float("nan")  # pyright: ignore
    with pytest.raises(ConfigError, match=rf"reward\.path=.*{place}\.weight are not finite"):
        load_reward_model(saved(tmp_path, model))


def test_folder_is_an_ordinary_classifier_for_transformers(tmp_path: Path) -> None:
    model = from_policy(llama(), 0)
    saved(tmp_path, model)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    batch = collate([[A, B]], [[A, A, EOS]], group_size=1, prompt_ids=["p"])  # no filler
    logits = theirs(input_ids=batch.input_ids).logits
    assert float(model(batch).detach()) == pytest.approx(float(logits.detach()), abs=1e-6)


def test_language_model_is_refused_as_reward_model(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no weights for score\.weight.*\n?.*reward_model"):
        load_reward_model(ModelConfig(path=str(tmp_path)))


def test_two_labels_are_refused() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_labels=2,
        num_attention_heads=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="has 2 labels"):
        RewardModel(AutoModelForSequenceClassification.from_config(config))
