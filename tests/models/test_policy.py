"""The policy: alignment, dropout, tied embeddings, and independence of padding and neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    GPTNeoXConfig,
    OPTConfig,
    PhiConfig,
)

from tests.models.tiny import (
    MODELS,
    VOCABULARY,
    family,
    full_logprobs,
    gpt2,
    llama,
    ragged_batch,
)
from zoo.batch import Batch, collate
from zoo.config import ConfigError
from zoo.models.policy import Policy
from zoo.models.trunk import backbone_of

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
# architectures that hold their dropout in different places: modules, attributes, the config
WITH_DROPOUT: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(attention_dropout=0.5).config,
    "gpt2": lambda: gpt2(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).config,
    "opt": lambda: OPTConfig(
        **SIZES, ffn_dim=64, word_embed_proj_dim=32, dropout=0.5, attention_dropout=0.5
    ),
    "bloom": lambda: BloomConfig(**SIZES, hidden_dropout=0.5, attention_dropout=0.5),
    "falcon": lambda: FalconConfig(**SIZES, hidden_dropout=0.5, attention_dropout=0.5),
    "gpt_neox": lambda: GPTNeoXConfig(
        **SIZES, intermediate_size=64, hidden_dropout=0.5, attention_dropout=0.5
    ),
    "phi": lambda: PhiConfig(**SIZES, intermediate_size=64, resid_pdrop=0.5, embd_pdrop=0.5),
}


def first_rows(batch: Batch) -> list[list[int]]:
    return [batch.input_ids[i, : int(n)].tolist() for i, n in enumerate(batch.lengths)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_each_row_alone_from_its_whole_logits(
    name: str, temperature: float
) -> None:
    model = MODELS[name](dtype=torch.float64)
    batch = ragged_batch()
    with torch.no_grad():
        out = Policy(model, temperature)(batch)
        for i, row in enumerate(first_rows(batch)):
            wanted = full_logprobs(model, row, temperature)
            mask = batch.completion_mask[i, : len(row)]
            torch.testing.assert_close(out.logprobs[i, : len(row)][mask], wanted[mask])
    assert not bool(out.logprobs[~batch.completion_mask].any())
    assert not bool(out.entropy[~batch.completion_mask].any())


class Favourites(nn.Module):
    """A model whose hidden state is the one-hot of what it has read; logits follow a table."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.model = llama(vocab_size=table.shape[0], hidden_size=table.shape[0])
        self.model.config.tie_word_embeddings = False
        self.model.lm_head = nn.Linear(table.shape[0], table.shape[0], bias=False)
        self.model.lm_head.weight = nn.Parameter(table.t().contiguous())


def test_B51_the_logits_of_a_token_score_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # ids [5, 3, 8]: after 5 the model favours 3, after 3 it favours 8, by e^20
    table = torch.zeros(12, 12)
    table[5, 3] = table[3, 8] = 20.0
    model = Favourites(table).model
    policy = Policy(model)

    def one_hot(input_ids: torch.Tensor, **_: Any) -> Any:
        hidden = torch.nn.functional.one_hot(input_ids, 12).float()
        return type("Output", (), {"last_hidden_state": hidden})()

    monkeypatch.setattr(model.base_model, "forward", one_hot)
    batch = collate([[5]], [[3, 8]], group_size=1, prompt_ids=["p"])
    logprobs = policy(batch).logprobs[0]
    # log(e^20 / (e^20 + 11)) = −11·e^−20 to first order: −2.3e-8
    assert logprobs[1:].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    shifted = collate([[3]], [[5, 8]], group_size=1, prompt_ids=["p"])
    assert float(policy(shifted).logprobs.detach().min()) < -2  # 5 after 3, 8 after 5: not favoured


@pytest.mark.parametrize("architecture", WITH_DROPOUT)
def test_B33_dropout_is_off_even_in_train_mode(architecture: str) -> None:
    config = WITH_DROPOUT[architecture]()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    batch = ragged_batch()
    model.train()
    with torch.no_grad():
        noisy = [model(input_ids=batch.input_ids).logits for _ in range(2)]
    assert not torch.equal(*noisy), "this architecture has no dropout, so the test shows nothing"
    policy = Policy(model).train()
    first, second = policy(batch).logprobs, policy(batch).logprobs
    assert torch.equal(first, second)
    assert torch.equal(first, policy.eval()(batch).logprobs)


@pytest.mark.parametrize("name", MODELS)
def test_B46_right_padding_and_neighbours_change_no_log_prob(name: str) -> None:
    policy = Policy(MODELS[name]())
    batch = ragged_batch()
    with torch.no_grad():
        together = policy(batch).logprobs
        pad = collate(
            [[9]] * 2, [[5], [5] * (batch.input_ids.shape[1] + 6)], group_size=2, prompt_ids=["p"]
        )
        for i, row in enumerate(first_rows(batch)):
            start = int(batch.prompt_lengths[i])
            alone = collate([row[:start]], [row[start:]], group_size=1, prompt_ids=["x"])
            wide = collate(
                [row[:start], [9]],
                [row[start:], [5] * (pad.input_ids.shape[1])],
                group_size=1,
                prompt_ids=["x", "y"],
                pad_token_id=17,
            )
            mine = together[i, : len(row)]
            assert (policy(alone).logprobs[0] - mine).abs().max() < 1e-5
            assert (policy(wide).logprobs[0, : len(row)] - mine).abs().max() < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_padding_ids_do_not_matter(name: str) -> None:
    policy = Policy(MODELS[name]())
    batch = ragged_batch()
    other = torch.where(batch.attention_mask, batch.input_ids, 63)
    with torch.no_grad():
        first = policy(batch).logprobs
        second = policy(batch.replace(input_ids=other)).logprobs
    assert torch.equal(first, second)


def test_only_trained_tokens_reach_the_gradient() -> None:
    policy = Policy(llama(dtype=torch.float64))
    batch = ragged_batch()
    out = policy(batch)
    weights = torch.where(batch.completion_mask, 0.0, torch.inf)
    kept = torch.where(batch.completion_mask, out.logprobs, 0.0)
    grads = torch.autograd.grad(kept.sum(), list(policy.parameters()), retain_graph=True)
    # The unmasked entries are constants: any finite weight on them adds nothing.
    more = out.logprobs.sum() + (out.logprobs * weights.nan_to_num(posinf=1e6)).sum()
    again = torch.autograd.grad(more, list(policy.parameters()))
    for one, two in zip(grads, again, strict=True):
        assert torch.equal(one, two)


# --- tied embeddings ------------------------------------------------------------------------------


def test_B53_tied_embeddings_stay_tied_through_a_step_and_a_folder(tmp_path) -> None:
    policy = Policy(llama())
    model: Any = policy.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    before = model.lm_head.weight.detach().clone()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    policy(ragged_batch()).logprobs.sum().neg().backward()
    optimizer.step()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not torch.equal(before, model.lm_head.weight)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_B53_the_gradient_of_a_tied_weight_is_that_of_both_its_uses() -> None:
    model: Any = llama(dtype=torch.float64)
    batch = ragged_batch()
    Policy(model)(batch).logprobs.sum().backward()
    ours = model.lm_head.weight.grad.clone()
    model.zero_grad()
    total = sum(
        full_logprobs(model, row)[int(batch.prompt_lengths[i]) :].sum()
        for i, row in enumerate(first_rows(batch))
    )
    total.backward()  # pyright: ignore
    assert (ours - model.lm_head.weight.grad).abs().max() < 1e-10 * ours.abs().max()


def test_untied_head_and_embedding_are_two_weights() -> None:
    model: Any = llama(tie_word_embeddings=False)
    assert model.lm_head.weight is not model.model.embed_tokens.weight


# --- models with a cap or a scale -----------------------------------------------------------------


def test_a_model_with_a_soft_cap_gives_its_own_log_probs() -> None:
    config = Gemma2Config(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        final_logit_softcapping=2.0,
        initializer_range=0.5,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    policy = Policy(model, temperature=0.5)
    assert policy.softcap == 2.0
    batch = ragged_batch()
    with torch.no_grad():
        out = policy(batch).logprobs
        for i, row in enumerate(first_rows(batch)):
            start = int(batch.prompt_lengths[i])
            wanted = full_logprobs(model, row, temperature=0.5)
            torch.testing.assert_close(out[i, start : len(row)], wanted[start:])


@pytest.mark.parametrize("name", MODELS)
def test_check_head_accepts_an_ordinary_head(name: str) -> None:
    Policy(MODELS[name](), temperature=0.7).check_head()


def test_check_head_refuses_a_head_that_is_not_what_we_recompute() -> None:
    policy = Policy(llama())
    policy.logit_scale = 0.5
    with pytest.raises(ConfigError, match="not linear in the last hidden state"):
        policy.check_head()


def test_a_backbone_is_found_where_base_model_is_the_model_itself() -> None:
    model: Any = family("llama4_text")
    assert model.base_model is model
    policy = Policy(model, packed=True)
    policy.check_head()
    policy.add_value_head()
    assert policy.backbone is backbone_of(model) is model.model
    assert backbone_of(model.model) is model.model
    assert policy(ragged_batch()).values is not None
