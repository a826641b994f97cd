"""Packed rows against padded ones: log-probs, values and gradients, and who is packed at all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BloomConfig, MistralConfig, Qwen3Config

from tests.models.tiny import MODELS, VOCABULARY, llama, ragged_batch
from zoo.batch import Batch, collate
from zoo.models import flex, packing
from zoo.models.critic import Critic
from zoo.models.packing import Layout, read
from zoo.models.policy import Policy
from zoo.models.twin import Twin

SHAPES: dict[str, Any] = {
    "pairs": {"n_groups": 4, "group_size": 2},
    "groups of four": {"n_groups": 3, "group_size": 4},
    "examples": {"n_groups": 5, "group_size": 1},
    "one row": {"n_groups": 1, "group_size": 1},
    "an empty completion": {"n_groups": 2, "group_size": 2, "completion_lengths": (3, 0, 2, 5)},
    "longer than a block": {
        "n_groups": 2,
        "group_size": 3,
        "prompt_lengths": (21, 16),
        "completion_lengths": (17, 3, 33, 16, 1, 5),
    },
}


def weights(batch: Batch) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch.input_ids.shape, generator=generator)


def gradients(module: Any, loss: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    return [torch.zeros(1) if g is None else g for g in found]


def assert_close(first: list[Tensor], second: list[Tensor], tolerance: float) -> None:
    """Each tensor to `tolerance` of the largest entry of all."""
    largest = max(float(t.abs().max()) for t in first)
    for one, two in zip(first, second, strict=True):
        assert float((one - two).abs().max()) <= tolerance * largest


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_packed_log_probs_and_gradients_are_the_padded_ones(
    name: str, shape: str, dtype: torch.dtype, tolerance: float
) -> None:
    # In float64 the RMS norm and the rotary angles of Llama are float32 all the same.
    model, batch = MODELS[name](dtype=dtype), ragged_batch(**SHAPES[shape])
    packed, padded = Policy(model, 0.8, packed=True), Policy(model, 0.8)
    found, wanted = packed(batch), padded(batch)
    assert packed.trunk.packed and not padded.trunk.packed
    assert_close([wanted.logprobs, wanted.entropy], [found.logprobs, found.entropy], tolerance)
    each = [gradients(model, (out.logprobs * weights(batch)).sum()) for out in (wanted, found)]
    assert_close(*each, tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_values_and_their_gradients_are_the_padded_ones(shape: str) -> None:
    batch, outputs = ragged_batch(**SHAPES[shape]), []
    for packed in (False, True):
        critic = Critic(llama().base_model, 32, packed=packed)
        with torch.no_grad():
            critic.head.weight.copy_(torch.linspace(-1, 1, 32))
        out = critic(batch)
        loss = (out.values * weights(batch)).sum() + out.final.square().sum()
        outputs.append([out.values, out.final, *gradients(critic, loss)])
    assert_close(outputs[0][:2], outputs[1][:2], 1e-5)
    assert_close(outputs[0][2:], outputs[1][2:], 1e-5)


def test_values_of_a_shared_trunk_are_the_padded_ones() -> None:
    batch, outputs = ragged_batch(), []
    for packed in (False, True):
        policy = Policy(llama(), packed=packed)
        policy.add_value_head()
        with torch.no_grad():
            policy.value_head.weight.copy_(torch.linspace(-1, 1, 32))  # pyright: ignore
        out = policy(batch)
        loss = (out.values * weights(batch)).sum() + out.logprobs.sum()
        outputs.append([out.values, out.final, out.logprobs, *gradients(policy, loss)])
    assert_close(outputs[0][:3], outputs[1][:3], 1e-5)
    assert_close(outputs[0][3:], outputs[1][3:], 1e-5)


def test_layout_by_hand() -> None:
    # prompts (5 6), (5 6), (7); completions (8 9), (3), (4 4 4): 2 + 2 + 1 + 1 + 3 = 9 tokens
    batch = collate(
        [[5, 6], [5, 6], [7]], [[8, 9], [3], [4, 4, 4]], group_size=1, prompt_ids=["a", "b", "c"]
    )
    layout = Layout.of(batch, torch.float32)
    assert layout.tokens == 9 and layout.input_ids.shape == (1, 64)
    assert layout.input_ids[0, :9].tolist() == [5, 6, 7, 8, 9, 3, 4, 4, 4]
    assert layout.position_ids[0, :9].tolist() == [0, 1, 0, 2, 3, 2, 1, 2, 3]
    assert layout.place.tolist() == [[0, 1, 3, 4], [0, 1, 5, 63], [2, 6, 7, 8]]
    assert layout.prompts.shape == (2, 16) and layout.completions.shape == (2, 2, 16)
    assert layout.prompts[:, :3].tolist() == [[0, 1, 63], [2, 63, 63]]
    assert layout.completions[:, :, :4].tolist() == [
        [[3, 4, 63, 63], [5, 63, 63, 63]],
        [[6, 7, 8, 63], [63, 63, 63, 63]],
    ]
    # the second token of a completion of the second prompt sees the prompt's one and two of its own
    seen = (layout.bias[1, 0, 1] == 0).nonzero().squeeze(1).tolist()
    assert seen == [0, 16, 17]


def test_rows_share_a_prompt_only_where_all_of_it_is_the_same() -> None:
    batch = collate(
        [[5, 6], [5], [5, 7], [5, 7]], [[6, 1], [6, 6], [1], [1, 1]], group_size=1,
        prompt_ids=list("abcd"),
    )  # fmt: skip
    layout = Layout.of(batch, torch.float32)
    assert layout.prompts.shape[0] == 3 and layout.tokens == (2 + 2) + (1 + 2) + (2 + 1 + 2)


def test_a_prompt_is_computed_once_for_all_its_rows() -> None:
    model: Any = llama()
    policy, seen = Policy(model, packed=True), []
    policy(ragged_batch())
    body = policy.trunk._packed_body()
    body.model.layers[0].mlp.register_forward_pre_hook(lambda m, a: seen.append(a[0].shape[1]))
    # 4 prompts of 50 tokens, 8 completions each of 10: 4·(50 + 80) = 520 and a filler, to 576;
    # padded it would be 32·60 = 1920
    batch = ragged_batch(4, 8, prompt_lengths=(50,), completion_lengths=(10,))
    policy(batch)
    assert seen == [576]
    # rows alone find their shared prompt again
    policy(batch.split(8, rows_coupled=False)[0])
    # 4 rows: 50 + 40 = 90, to 128
    assert seen == [576, 128]


def test_reading_adds_up_the_gradients_of_what_is_read_twice() -> None:
    source = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([2, 5, 2, 0, 2, 5])
    weight = torch.randn(6, 3, dtype=torch.float64)
    (found,) = torch.autograd.grad((read(source, index) * weight).sum(), source)
    (wanted,) = torch.autograd.grad((source[index] * weight).sum(), source)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_padding_ids_do_not_matter(name: str) -> None:
    policy, batch = Policy(MODELS[name](), packed=True), ragged_batch()
    other = torch.where(batch.attention_mask, batch.input_ids, 63)
    with torch.no_grad():
        first = policy(batch).logprobs
        assert torch.equal(first, policy(batch.replace(input_ids=other)).logprobs)


@pytest.mark.parametrize("packed", [False, True])
def test_recomputed_activations_give_the_same_gradient(packed: bool) -> None:
    batch, found = ragged_batch(), []
    for checkpointing in (False, True):
        model = llama()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = Policy(model, packed=packed).train()
        loss = (policy(batch).logprobs * weights(batch)).sum()
        with torch.no_grad():
            policy(batch)  # a pass between forward and backward changes nothing
        found.append(gradients(model, loss))
    assert_close(*found, 1e-6)


def test_models_that_do_not_fit_are_read_padded_which_is_said_once() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    )
    batch = ragged_batch()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        policy = Policy(model, packed=True)
        found = [policy(batch).logprobs for _ in range(2)]
    said = [str(w.message) for w in seen if "cannot read packed rows" in str(w.message)]
    assert len(said) == 1 and "BloomForCausalLM" in said[0] and "model.packed=false" in said[0]
    assert torch.equal(found[0], Policy(model)(batch).logprobs) and not policy.trunk.packed


@pytest.mark.parametrize("window", [4, 512])
def test_rows_within_a_models_window_are_packed_and_longer_ones_are_not(window: int) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, sliding_window=window,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    batch = ragged_batch()
    policy = Policy(model, packed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, wanted = policy(batch).logprobs, Policy(model)(batch).logprobs
        layout = policy.trunk(batch).layout
    assert (layout is not None) == (window == 512)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_normed_queries_and_keys_are_packed_too() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, head_dim=12,
    )  # fmt: skip
    model, batch = AutoModelForCausalLM.from_config(config), ragged_batch()
    policy = Policy(model, packed=True)
    found, wanted = policy(batch).logprobs, Policy(model)(batch).logprobs
    assert policy.trunk.packed
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    weights = list(model.parameters())
    ours, theirs = (torch.autograd.grad(x.square().sum(), weights) for x in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_model_whose_packed_gradients_are_wrong_is_read_padded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def crooked(ctx: Any, *grads: Any) -> Any:
        weight = ctx.saved_tensors[1]
        return grads[0] * weight, torch.zeros_like(weight), None

    monkeypatch.setattr("zoo.models.fused._RMSNorm.backward", staticmethod(crooked))
    model, batch = llama(), ragged_batch()
    policy = Policy(model, packed=True)
    with pytest.warns(UserWarning, match="its gradients differ"), torch.no_grad():
        policy(batch)
    assert not policy.trunk.packed


@pytest.mark.parametrize("name", ["tied", "one key head"])
def test_flex_attention_sees_what_the_matrix_products_see(name: str) -> None:
    """Its forward pass; a CPU has no other."""
    heads = {"tied": {}, "one key head": {"num_key_value_heads": 1}}[name]
    model, batch = llama(**heads), ragged_batch()
    layout = Layout.of(batch, torch.float32)
    rows, columns = batch.attention_mask.nonzero(as_tuple=True)
    states = []
    with torch.no_grad():
        for attention in (packing.ATTENTION, flex.ATTENTION):
            body = Twin(model, attention)()
            states.append(layout.hidden(body.base_model)[layout.place[rows, columns]])
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=1e-5)


def test_a_token_sees_its_prompt_and_its_own_completion_before_it() -> None:
    # Prompts [5, 6] and [7]; two completions of the first, one of the second (and one empty).
    batch = collate(
        [[5, 6], [5, 6], [7], [7]],
        [[1, 2], [3], [4], []],
        group_size=2,
        prompt_ids=["a", "b"],
    )
    layout = Layout.of(batch, torch.float32)
    # The packed row: 5 6 | 7 | 1 2 | 3 | 4
    order = layout.input_ids[0, : layout.tokens].tolist()
    assert order == [5, 6, 7, 1, 2, 3, 4]
    seen = {1: [5, 6, 1], 2: [5, 6, 1, 2], 3: [5, 6, 3], 4: [7, 4], 5: [5], 6: [5, 6], 7: [7]}
    sees = flex.block_mask(layout).mask_mod
    zero = torch.tensor(0)
    for query, token in enumerate(order):
        found = [
            order[key]
            for key in range(len(order))
            if bool(sees(zero, zero, torch.tensor(query), torch.tensor(key)))
        ]
        assert found == seen[token]
