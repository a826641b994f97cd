"""Arithmetic in bfloat16 on float32 masters: gradients, freshness, ties, and what stays wide."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.models.tiny import MODELS, llama, ragged_batch
from zoo.models.critic import Critic
from zoo.models.policy import Policy
from zoo.models.twin import Casts, Twin

HALF = torch.bfloat16


def cosine(first: Any, second: Any) -> float:
    one, two = (torch.cat([g.flatten().double() for g in x]) for x in (first, second))
    return float(one @ two / one.norm() / two.norm())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_bfloat16_arithmetic_reach_float32_masters(name: str, packed: bool) -> None:
    model, batch = MODELS[name](initializer_range=0.1), ragged_batch()
    found = []
    for dtype in (None, HALF):
        model.zero_grad()
        policy = Policy(model, packed=packed, compute_dtype=dtype)
        out = policy(batch)
        assert out.logprobs.dtype == torch.float32
        out.logprobs.sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        assert all(g.dtype == torch.float32 for g in found[-1])
    assert cosine(*found) > 0.995
    assert not torch.equal(found[0][0], found[1][0])


def test_casts_are_bit_for_bit_the_model_in_bfloat16() -> None:
    batch = ragged_batch()
    model, half = llama(), llama().to(HALF)
    half.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()  # pyright: ignore
    with torch.no_grad():
        mine = Policy(model, compute_dtype=HALF)(batch).logprobs
        assert torch.equal(mine, Policy(half)(batch).logprobs)


def test_rotary_frequencies_stay_wide() -> None:
    model: Any = llama()
    body = Twin(model, None, Casts(model, HALF))()
    assert body.model.rotary_emb.inv_freq.dtype == torch.float32
    assert body.dtype == HALF and model.dtype == torch.float32


def test_micro_batches_add_up_in_float32() -> None:
    model, batch = llama(initializer_range=0.1), ragged_batch()
    policy = Policy(model, compute_dtype=HALF)
    parts = batch.split(4, rows_coupled=False)
    alone = []
    for part in parts:
        model.zero_grad()
        policy(part).logprobs.sum().backward()
        alone.append([p.grad.clone() for p in model.parameters()])  # pyright: ignore
    model.zero_grad()
    for part in parts:
        policy(part).logprobs.sum().backward()
    for i, parameter in enumerate(model.parameters()):
        wanted = alone[0][i] + alone[1][i] + alone[2][i] + alone[3][i]
        assert torch.equal(parameter.grad, wanted)  # pyright: ignore


def test_small_steps_are_not_rounded_away() -> None:
    """Pure bfloat16 weights would not move: 1e-5 is far below their last digit."""
    model, batch = llama(), ragged_batch()
    policy = Policy(model, packed=True, compute_dtype=HALF)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, weight_decay=0.0)
    policy(batch).logprobs.sum().neg().backward()
    optimizer.step()
    moved = [(p != b).float().mean() for p, b in zip(model.parameters(), before, strict=True)]
    assert min(float(m) for m in moved[1:]) > 0.9  # the embedding has unused rows


@pytest.mark.parametrize("way", ["optimizer", "load_state_dict", "assignment"])
def test_the_copy_follows_its_masters(way: str) -> None:
    model, batch = llama(), ragged_batch()
    policy = Policy(model, packed=True, compute_dtype=HALF)
    first = policy(batch).logprobs
    if way == "optimizer":
        first.sum().backward()
        torch.optim.AdamW(policy.parameters(), lr=0.05, fused=True).step()
    elif way == "load_state_dict":
        policy.load_state_dict(Policy(llama(seed=9)).state_dict())
    else:
        for name, parameter in llama(seed=9).named_parameters():
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, parameter)
        model.tie_weights()
    second = policy(batch).logprobs
    assert (second - first).abs().max() > 0.01
    fresh = Policy(model, packed=True, compute_dtype=HALF)
    with torch.no_grad():
        assert torch.equal(second, fresh(batch).logprobs)


def test_a_copy_is_no_part_of_the_policy() -> None:
    policy = Policy(llama(), packed=True, compute_dtype=HALF)
    plain = Policy(llama())
    policy(ragged_batch()).logprobs.sum().backward()
    assert policy.state_dict().keys() == plain.state_dict().keys()
    assert [n for n, _ in policy.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert all(p.dtype == torch.float32 for p in policy.parameters())


def test_tied_weights_are_one_copy() -> None:
    model: Any = llama()
    body = Twin(model, None, Casts(model, HALF))()
    assert body.lm_head.weight is body.model.embed_tokens.weight


def test_frozen_masters_make_no_graph() -> None:
    policy = Policy(llama(), packed=True, compute_dtype=HALF).requires_grad_(False)
    assert not policy(ragged_batch()).logprobs.requires_grad


def test_freezing_and_thawing_are_noticed() -> None:
    policy, batch = Policy(llama(), packed=True, compute_dtype=HALF), ragged_batch()
    for wanted in (True, False, True):
        policy.requires_grad_(wanted)
        assert policy(batch).logprobs.requires_grad == wanted


def test_a_copied_policy_stands_on_its_own() -> None:
    policy, batch = Policy(llama(), packed=True, compute_dtype=HALF), ragged_batch()
    before = policy(batch).logprobs
    other = copy.deepcopy(policy)
    assert torch.equal(other(batch).logprobs, before)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    assert torch.equal(policy(batch).logprobs, before)
    assert not torch.equal(other(batch).logprobs, before)
    other(batch).logprobs.sum().backward()
    assert all(p.grad is None for p in policy.parameters())
    assert any(p.grad is not None for p in other.parameters())


def test_a_twin_shares_memory_with_its_source() -> None:
    model: Any = llama()
    body = Twin(model, "eager")()
    assert [p.data_ptr() for p in body.parameters()] == [p.data_ptr() for p in model.parameters()]
    assert body.config._attn_implementation == "eager" != model.config._attn_implementation


def test_recomputed_activations_in_bfloat16_give_the_same_gradient() -> None:
    batch, found = ragged_batch(), []
    for checkpointing in (False, True):
        model = llama()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = Policy(model, packed=True, compute_dtype=HALF).train()
        out = policy(batch)
        with torch.no_grad():
            policy(batch)
        out.logprobs.sum().backward()
        found.append([p.grad for p in model.parameters()])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def test_the_critics_head_computes_in_float32() -> None:
    critic = Critic(llama().base_model, 32, packed=True, compute_dtype=HALF)
    with torch.no_grad():
        critic.head.weight.fill_(1e-3)
        critic.head.bias.fill_(1.0)
    out = critic(ragged_batch())
    assert out.values.dtype == out.final.dtype == torch.float32
    # near 1 bfloat16 has steps of 1/128: values that differ less would be equal
    assert len(set(out.final.tolist())) == len(out.final)
