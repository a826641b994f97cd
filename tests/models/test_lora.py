"""Adapters: the identity at the start, parity with peft everywhere, sharing, folders, refusals."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.tiny import MODELS, family, gpt2, llama, ragged_batch, tokens
from zoo.config import ConfigError, LoraConfig, ModelConfig
from zoo.data.tokenizer import arithmetic_tokenizer
from zoo.measure.cost import ModelCost
from zoo.measure.memory import component_bytes
from zoo.models.critic import Critic
from zoo.models.loading import (
    check_model_config,
    load_base,
    load_model,
    load_tokenizer,
    load_trained,
    save_policy,
)
from zoo.models.lora import (
    TrainingDropout,
    adapted,
    add_adapter,
    branch,
    load_trained_state,
    low_rank,
    merge_into,
    trained_state,
)
from zoo.models.policy import Policy
from zoo.models.reference import shared_reference
from zoo.models.reward_model import from_policy, merged_reward_model
from zoo.models.saved import record_hashes
from zoo.rollout.decoding import BlockDecoding, PlainDecoding
from zoo.rollout.engine import Sampling
from zoo.rollout.lean import LeanDecoding
from zoo.rollout.torch_engine import TorchEngine

pytest.importorskip("peft")

HALF = torch.bfloat16
RANK = 3


def settings(**changes: Any) -> ModelConfig:
    model = {key: changes.pop(key) for key in ("path", "compute_dtype") if key in changes}
    return ModelConfig(
        **{"path": "base", **model}, lora=LoraConfig(**{"rank": RANK, "alpha": 6.0, **changes})
    )


def with_adapter(model: Any, moved: bool = True, **changes: Any) -> Any:
    """The model with an adapter; `moved`: one that has been trained, so that B is not 0."""
    add_adapter(model, settings(**changes), seed=0)
    if moved:
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.copy_(torch.randn(weight.shape, generator=draw) * 0.2)
    return model


def logits(model: Any, batch: Any) -> Tensor:
    """Of peft's own forward, padded."""
    mask = batch.attention_mask.long()
    with torch.no_grad():
        return model.eval()(input_ids=batch.input_ids, attention_mask=mask).logits


# --- the start ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_at_the_start_the_policy_is_its_reference_bit_for_bit(name: str, dtype: str | None) -> None:
    config = settings(compute_dtype=dtype)
    half = None if dtype is None else HALF
    model, batch = add_adapter(MODELS[name](), config, 0), ragged_batch()
    policy = Policy(model, packed=True, compute_dtype=half)
    reference = shared_reference(policy, config, with_adapter=False)
    plain = Policy(MODELS[name](), packed=True, compute_dtype=half)
    with torch.no_grad():
        found = policy(batch).logprobs
        assert torch.equal(found, reference(batch).logprobs)  # B = 0, so KL is 0
        assert torch.equal(found, plain(batch).logprobs)


def test_what_is_trained_is_a_and_b_of_every_linear_map_but_the_head() -> None:
    model = with_adapter(llama(), moved=False)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    # 2 layers × (q, k, v, o, gate, up, down) × (A, B)
    assert len(trained) == 2 * 7 * 2 and all(".lora_" in name for name in trained)
    # rank × (in + out): q 32+32, k and v 32+16, o 32+32, gate and up 32+48, down 48+32
    assert sum(p.numel() for p in trained.values()) == 2 * RANK * (64 + 48 * 2 + 64 + 80 * 3)
    assert all(p.dtype == torch.float32 for p in trained.values())


def test_the_draw_of_a_depends_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    one, two = (with_adapter(llama(), moved=False) for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    three = add_adapter(llama(), settings(), seed=1)
    draws = [torch.cat([a.lora_A["default"].weight.flatten() for a in adapted(m).values()])
             for m in (one, two, three)]  # fmt: skip
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


# --- parity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_pefts_forward(name: str, packed: bool) -> None:
    model, batch = with_adapter(MODELS[name]()), ragged_batch()
    policy = Policy(model, packed=packed)
    found = policy(batch).logprobs
    assert policy.trunk.packed == packed
    wanted = logits(model, batch)[:, :-1].log_softmax(-1)
    wanted = wanted.gather(2, batch.input_ids[:, 1:, None]).squeeze(2)
    mask = batch.completion_mask[:, 1:]
    torch.testing.assert_close(found[:, 1:][mask], wanted[mask], rtol=0, atol=2e-5)
    base = Policy(MODELS[name]())(batch).logprobs
    assert (found - base).abs().max() > 0.1


@pytest.mark.parametrize("name", MODELS)
def test_the_packed_gradient_is_the_padded_one(name: str) -> None:
    batch, found = ragged_batch(), []
    weight = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(3))
    for packed in (False, True):
        model = with_adapter(MODELS[name]())
        (Policy(model, packed=packed)(batch).logprobs * weight).sum().backward()
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    for key, wanted in found[0].items():
        gap = (found[1][key] - wanted).abs().max() / wanted.abs().max()
        assert gap < 2e-5, (key, gap)


def test_the_gradient_is_that_of_the_merged_weight_by_the_chain_rule() -> None:
    """W' = W + s·B·A, so dL/dA = s·Bᵀ·dL/dW' and dL/dB = s·dL/dW'·Aᵀ."""
    model, batch = with_adapter(llama().double()), ragged_batch()
    with torch.no_grad():
        for layer in adapted(model).values():  # the adapter is float32: here all are float64
            for part in (layer.lora_A, layer.lora_B):
                part.double()
    merged = merge_into(llama().double(), model)
    Policy(merged)(batch).logprobs.sum().backward()
    Policy(model)(batch).logprobs.sum().backward()
    scale = 6.0 / RANK
    for name, layer in adapted(model).items():
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        dw: Any = merged.get_submodule(name).weight.grad
        # the merge adds in float32
        torch.testing.assert_close(a.grad, scale * b.T @ dw, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(b.grad, scale * dw @ a.T, rtol=1e-4, atol=1e-4)


def test_bfloat16_arithmetic_gives_float32_gradients_near_the_wide_ones() -> None:
    batch, found = ragged_batch(), []
    for dtype in (None, "bfloat16"):
        model = with_adapter(llama(initializer_range=0.1), compute_dtype=dtype)
        Policy(model, packed=True, compute_dtype=dtype and HALF)(batch).logprobs.sum().backward()
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        assert all(g is not None and g.dtype == torch.float32 for g in grads)
        found.append(torch.cat([g.flatten().double() for g in grads]))  # pyright: ignore
    assert float(found[0] @ found[1] / found[0].norm() / found[1].norm()) > 0.995


# --- the sampler ----------------------------------------------------------------------------------

PROMPTS = [tokens(torch.Generator().manual_seed(i), n) for i, n in enumerate([3, 9, 1, 5])]


def decoder(policy: Policy, **changes: Any) -> Any:
    made = TorchEngine(**changes).engine(lambda ids: "", pad_token_id=0)
    made.sync(policy)
    return made


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj"], ["k_proj", "down_proj"]])
def test_hand_fused_decoding_sees_the_adapter(targets: list[str] | None, dtype: str | None) -> None:
    model = with_adapter(llama(), targets=targets, compute_dtype=dtype)
    policy = Policy(model, packed=True, compute_dtype=dtype and HALF)
    made, half = decoder(policy), dtype is not None
    body = made._model
    assert LeanDecoding.fits(body)
    found = {}
    for kind in (LeanDecoding, BlockDecoding, PlainDecoding):
        first, cache, mask = made._prefill(PROMPTS)
        with torch.no_grad(), kind(body, cache, mask, 2) as decoding:
            token = first.argmax(-1).repeat_interleave(2, 0)
            found[kind] = torch.stack([decoding.step(token) for _ in range(3)]).float()
    scale = found[PlainDecoding].abs().max()
    for kind in (LeanDecoding, BlockDecoding):
        gap = float((found[kind] - found[PlainDecoding]).abs().max() / scale)
        assert gap < (0.03 if half else 1e-5), kind
    # joined projections are one product, also where an adapter lies between them and the cast
    with torch.no_grad():
        _, cache, mask = made._prefill(PROMPTS)
        joined = LeanDecoding(body, cache, mask, 2)._layers[0]
    assert (joined.qkv.weight is not None) == half and (joined.gate_up.weight is not None) == half


@pytest.mark.parametrize("fast", [True, False])
def test_sampled_logprobs_are_the_trainers_after_every_step(fast: bool) -> None:
    from zoo.batch import collate

    model = with_adapter(llama(), moved=False)
    policy = Policy(model, packed=True)
    made = decoder(policy, fast=fast)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    seen = []
    for step in range(3):
        made.sync(policy)
        groups = made.generate(PROMPTS, ["a", "b", "c", "d"], 2, Sampling(1.0, 6, (), (step,)))
        flat = [c for group in groups for c in group]
        batch = collate(
            [p for p in PROMPTS for _ in range(2)], [c.token_ids for c in flat], group_size=2,
            prompt_ids=["a", "b", "c", "d"],
        )  # fmt: skip
        found = policy(batch).logprobs
        drawn = torch.cat([torch.tensor(c.logprobs) for c in flat])
        torch.testing.assert_close(found[batch.completion_mask], drawn, rtol=0, atol=2e-5)
        seen.append(found.detach())
        optimizer.zero_grad()
        found.sum().neg().backward()
        optimizer.step()
    assert made._kinds == {id(model): LeanDecoding if fast else PlainDecoding}


def test_anything_but_a_plain_adapter_is_left_to_the_modules() -> None:
    model = with_adapter(llama())
    layer: Any = next(iter(adapted(model).values()))
    assert low_rank(layer) is not None and low_rank(nn.Linear(2, 2)) is None
    layer.enable_adapters(False)
    assert low_rank(layer) is None and not LeanDecoding.fits(model)


# --- one base -------------------------------------------------------------------------------------


def nbytes(*modules: nn.Module) -> int:
    found = component_bytes({str(i): m for i, m in enumerate(modules)})
    return sum(kinds["parameters"] for kinds in found.values())


def test_reference_and_critic_share_the_frozen_weights() -> None:
    config = settings(compute_dtype="bfloat16")
    model = add_adapter(llama(), config, 0)
    policy = Policy(model, packed=True, compute_dtype=HALF)
    reference = shared_reference(policy, config, with_adapter=False)
    other = add_adapter(branch(model, with_adapter=False), config, 0, "critic")
    critic = Critic(other.base_model, 32, packed=True, compute_dtype=HALF)
    adapter = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    assert {id(p) for p in reference.parameters()} == frozen
    buffers = 2 * nbytes(*(m for m in [model.model.rotary_emb]))  # one pair a body
    head = 4 * 33
    assert nbytes(policy, reference, critic) == nbytes(policy) + adapter + head + buffers
    # a bfloat16 base: 2 bytes a weight, and no copy of it beside
    assert all(p.dtype == HALF for p in model.parameters() if not p.requires_grad)
    policy(ragged_batch())
    copies = policy.trunk.casts.copies()  # pyright: ignore
    assert sum(c.numel() for c in copies) == adapter // 4
    mine, theirs = (
        {id(p) for p in m.parameters() if p.requires_grad} for m in (policy, critic.backbone)
    )
    assert not mine & theirs


def test_training_moves_the_adapter_and_never_the_reference() -> None:
    config = settings()
    model, batch = with_adapter(llama(), moved=False), ragged_batch()
    policy = Policy(model, packed=True)
    fresh = shared_reference(policy, config, with_adapter=False)
    started = shared_reference(policy, config, with_adapter=True)
    before = fresh(batch).logprobs
    policy(batch).logprobs.sum().neg().backward()
    torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1.0).step()
    assert torch.equal(fresh(batch).logprobs, before)
    assert torch.equal(started(batch).logprobs, before)
    assert (policy(batch).logprobs - before).abs().max() > 1e-3
    assert not fresh(batch).logprobs.requires_grad and not started(batch).logprobs.requires_grad


def test_the_frozen_copy_of_a_trained_adapter_is_the_start() -> None:
    model, batch = with_adapter(llama()), ragged_batch()
    policy = Policy(model, packed=True)
    reference = shared_reference(policy, settings(), with_adapter=True)
    assert torch.equal(policy(batch).logprobs, reference(batch).logprobs)
    base = shared_reference(policy, settings(), with_adapter=False)
    assert (base(batch).logprobs - reference(batch).logprobs).abs().max() > 0.1


def test_only_what_is_trained_is_in_the_state() -> None:
    policy = Policy(with_adapter(llama()))
    policy.add_value_head()
    state = trained_state(policy)
    weights = {name for name in state if "inv_freq" not in name}
    assert all(".lora_" in name or name.startswith("value_head") for name in weights)
    other = Policy(with_adapter(llama(), moved=False))
    other.add_value_head()
    load_trained_state(other, state)
    batch = ragged_batch()
    assert torch.equal(policy(batch).logprobs, other(batch).logprobs)
    state.pop("value_head.bias")
    with pytest.raises(RuntimeError, match=r"value_head\.bias"):
        load_trained_state(other, state)
    full = Policy(llama())
    assert trained_state(full).keys() == full.state_dict().keys()


def test_frozen_weights_cost_no_gradient_of_their_own() -> None:
    cost = ModelCost.of(Policy(with_adapter(llama(), moved=False)))
    # q and o 32·32, k and v 32·16, gate, up and down 32·48, in two layers; V = 64·32
    base, head = 2 * (2 * 1024 + 2 * 512 + 3 * 1536), 64 * 32
    adapter = 2 * RANK * (64 + 48 * 2 + 64 + 80 * 3)
    assert (cost.body, cost.head) == (base + adapter, head)
    # 5 tokens, 3 of them read by the head; attention: 4 · 2 layers · 32 · (1+2+3+4+5)
    attention = 4 * 2 * 32 * 15
    forward = 2 * (base + adapter) * 5 + 2 * head * 3 + attention
    assert cost.forward([5], 3) == forward
    # gradients of all inputs cost as much again; those of weights only the adapter's
    assert cost.backward([5], 3) == forward + 2 * adapter * 5 + attention


# --- dropout --------------------------------------------------------------------------------------


def test_dropout_is_on_where_gradients_are_made_and_nowhere_else() -> None:
    model, batch = with_adapter(llama(), dropout=0.5), ragged_batch()
    plain = Policy(with_adapter(llama()), packed=True)
    policy = Policy(model, packed=True)
    assert all(isinstance(a.lora_dropout["default"], TrainingDropout)
               for a in adapted(model).values())  # fmt: skip
    with torch.no_grad():
        assert torch.equal(policy(batch).logprobs, plain(batch).logprobs)
    torch.manual_seed(0)
    one, two = policy(batch).logprobs, policy(batch).logprobs
    torch.manual_seed(0)
    assert torch.equal(policy(batch).logprobs, one) and not torch.equal(one, two)


# --- folders --------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_policy(llama(vocab_size=512), arithmetic_tokenizer(), tmp_path / "base")
    return tmp_path / "base"


def trained_on(base: Path, **changes: Any) -> tuple[Any, ModelConfig]:
    config = settings(path=str(base), **changes)
    model, _ = load_trained(config, seed=0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=draw) * 0.2)
    return model, config


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_saved_adapter_is_read_by_peft_and_by_us(base: Path, dtype: str | None) -> None:
    from peft import AutoPeftModelForCausalLM

    model, _ = trained_on(base, compute_dtype=dtype)
    folder = base.parent / "adapter"
    save_policy(model, arithmetic_tokenizer(), folder)
    assert not (folder / "model.safetensors").exists()
    wide, _ = trained_on(base)  # the same adapter on a float32 base
    batch = ragged_batch()
    wanted = logits(wide, batch)
    theirs = AutoPeftModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(theirs, batch), wanted)
    check_model_config(ModelConfig(path=str(folder)))
    merged = load_model(ModelConfig(path=str(folder)))
    torch.testing.assert_close(logits(merged, batch), wanted, rtol=0, atol=1e-4)
    assert all(p.requires_grad for p in merged.parameters()) and not adapted(merged)
    assert merged.state_dict().keys() == llama().state_dict().keys()
    assert len(load_tokenizer(ModelConfig(path=str(folder)))) == len(arithmetic_tokenizer())


@pytest.mark.parametrize("rank", [3, None])
def test_an_adapter_that_is_not_the_one_that_was_saved_is_refused(
    base: Path, rank: int | None
) -> None:
    model, _ = trained_on(base)
    folder = base.parent / "adapter"
    save_policy(model, arithmetic_tokenizer(), folder)
    record_hashes(folder)
    config = settings(path=str(folder)) if rank else ModelConfig(path=str(folder))
    load_trained(config)
    file = folder / "adapter_model.safetensors"
    spoilt = bytearray(file.read_bytes())
    spoilt[-4] ^= 1
    file.write_bytes(spoilt)
    with pytest.raises(ConfigError, match=r"adapter_model.safetensors is not the file .* delete"):
        load_trained(config)


def test_an_adapter_is_trained_further(base: Path) -> None:
    model, config = trained_on(base)
    folder = base.parent / "adapter"
    save_policy(model, arithmetic_tokenizer(), folder)
    again, start_hash = load_trained(settings(path=str(folder)), seed=7)
    batch = ragged_batch()
    assert torch.equal(logits(again, batch), logits(model, batch))
    assert [n for n, p in again.named_parameters() if p.requires_grad] == [
        n for n, p in model.named_parameters() if p.requires_grad
    ]
    assert start_hash != load_trained(config, seed=0)[1]
    with pytest.raises(ConfigError, match=r"has rank 3, alpha 6 .*model\.lora\.rank=3"):
        load_trained(settings(path=str(folder), rank=4))
    with pytest.raises(ConfigError, match=r"targets \['down_proj'"):
        load_trained(settings(path=str(folder), targets=["q_proj"]))


def test_merging_adds_in_float32_what_a_bfloat16_base_would_swallow(base: Path) -> None:
    model, config = trained_on(base, compute_dtype="bfloat16")
    with torch.no_grad():
        for layer in adapted(model).values():
            layer.lora_B["default"].weight.mul_(1e-3)
    found = merge_into(load_base(config), model)
    plain: Any = load_base(config)
    for name, layer in adapted(model).items():
        a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
        wanted = plain.get_submodule(name).weight.double() + 6.0 / RANK * b @ a
        gap = (found.get_submodule(name).weight - wanted).abs().max()  # pyright: ignore
        assert gap < 2e-7  # half a unit in the last place of numbers near 1


def test_a_merged_reward_model_gives_the_scores_of_the_adapted_one() -> None:
    model, batch = with_adapter(llama()), ragged_batch()
    trained = from_policy(model, 0)
    trained.remember(0.5, 2.0)
    with torch.no_grad():
        trained.model.score.weight.mul_(3.0)  # pyright: ignore
    assert trained.model.score.weight.requires_grad  # pyright: ignore
    merged = merged_reward_model(trained, llama())
    torch.testing.assert_close(merged(batch), trained(batch), rtol=0, atol=1e-4)
    plain = from_policy(llama(), 0)
    assert (merged(batch) - 3.0 * plain(batch)).abs().max() > 1e-2
    assert float(merged.score_mean) == 0.5 and float(merged.score_std) == 2.0
    assert not adapted(merged)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, r"model\.lora\.rank must be at least 1.*got 0"),
        ({"alpha": 0.0}, r"model\.lora\.alpha must be above 0"),
        ({"dropout": 1.0}, r"model\.lora\.dropout must be at least 0 and below 1, got 1\.0"),
        ({"targets": []}, r"model\.lora\.targets is an empty list"),
    ],
)
def test_settings_out_of_range_are_refused_before_anything_loads(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model_config(settings(path="some/hub", **changes))


def made_by_peft(base: Path, **offered: Any) -> tuple[Path, Any]:
    """An adapter folder that peft wrote after some training, and peft's model."""
    from peft import LoraConfig as Described
    from peft import get_peft_model

    described = Described(
        **{"r": RANK, "lora_alpha": 6, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"],
           **offered}
    )  # fmt: skip
    made: Any = get_peft_model(load_base(settings(path=str(base))), described)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in (p for p in made.parameters() if p.requires_grad):
            weight.add_(torch.randn(weight.shape, generator=draw) * 0.2)
    made.peft_config["default"].base_model_name_or_path = str(base)
    folder = base.parent / "adapter"
    made.save_pretrained(str(folder), save_embedding_layers=False)
    arithmetic_tokenizer().save_pretrained(str(folder))
    return folder, made


@pytest.mark.parametrize(
    ("offered", "named"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, "adapts model.embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, "adapts lm_head"),
        ({"trainable_token_indices": [5, 6]}, "trainable_token_indices=[5, 6]"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"use_dora": True}, "use_dora=True"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern={'q_proj': 2}"),
        ({"bias": "lora_only"}, "bias=lora_only"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"alora_invocation_tokens": [7, 8]}, "alora_invocation_tokens=[7, 8]"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication=[[0, 2], [1, 2]]"),
        ({"use_qalora": True}, "use_qalora=True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"init_lora_weights": "olora"}, "init_lora_weights=olora"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_is_more_than_b_times_a_is_not_trained_further(
    base: Path, offered: dict[str, Any], named: str
) -> None:
    folder, _ = made_by_peft(base, **offered)
    with pytest.raises(ConfigError, match=r"model\.lora\.rank=null it is merged") as refused:
        load_trained(settings(path=str(folder)))
    assert named in str(refused.value)


@pytest.mark.parametrize("init", ["orthogonal", "eva", False])
@pytest.mark.filterwarnings("ignore")
def test_a_start_that_leaves_the_base_alone_is_trained_further(base: Path, init: Any) -> None:
    rank = 4  # orthogonal takes even ones
    folder, made = made_by_peft(base, r=rank, init_lora_weights=init)
    model, _ = load_trained(settings(path=str(folder), rank=rank))
    batch = ragged_batch()
    wanted = logits(made, batch)
    assert (wanted - logits(load_base(settings(path=str(base))), batch)).abs().max() > 0.1
    torch.testing.assert_close(logits(model, batch), wanted, rtol=0, atol=1e-5)
    save_policy(model, arithmetic_tokenizer(), base.parent / "again")
    again, _ = load_trained(settings(path=str(base.parent / "again"), rank=rank))
    assert torch.equal(logits(again, batch), logits(model, batch))


@pytest.mark.parametrize(
    ("kind", "settings_of_it"),
    [
        ("PromptTuningConfig", {"num_virtual_tokens": 4}),
        ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
        ("AdaptionPromptConfig", {"adapter_len": 4, "adapter_layers": 1}),
        ("of a later peft", {}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_adds_nothing_to_weights_is_neither_merged_nor_said_to_be(
    base: Path, kind: str, settings_of_it: dict[str, Any]
) -> None:
    import peft

    folder, _ = made_by_peft(base)
    if settings_of_it:
        described = getattr(peft, kind)(task_type="CAUSAL_LM", **settings_of_it)
        made: Any = peft.get_peft_model(load_base(settings(path=str(base))), described)
        made.peft_config["default"].base_model_name_or_path = str(base)
        made.save_pretrained(str(folder))
    else:
        facts = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(facts | {"peft_type": kind}))
    start = rf"peft_type=[\s\S]*Start from .* base \(model\.path={base}\)\.$"
    with pytest.raises(ConfigError, match=f"cannot be merged into its base.*{start}"):
        load_model(ModelConfig(path=str(folder)))
    with pytest.raises(ConfigError, match=rf"no plain LoRA \({start}"):
        load_trained(settings(path=str(folder)))


@pytest.mark.parametrize("content", ["[]", "{}", "3", "{", '{"base_model_name_or_path": null}'])
def test_a_folder_that_names_no_base_is_refused(base: Path, content: str) -> None:
    folder, _ = made_by_peft(base)
    (folder / "adapter_config.json").write_text(content)
    for config in (ModelConfig(path=str(folder)), settings(path=str(folder))):
        with pytest.raises(ConfigError, match=r"adapter_config\.json does not say which model"):
            load_trained(config)


def rewrite(folder: Path, **facts: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def refused_by_both(folder: Path, *named: str) -> None:
    """Whoever merges the adapter and whoever trains it further says so, by the setting's name."""
    for config in (ModelConfig(path=str(folder)), settings(path=str(folder))):
        for setting in ("model.path", "model.critic"):
            with pytest.raises(ConfigError) as refused:
                load_trained(config, setting=setting)
            told = str(refused.value)
            assert all(part in told for part in (*named, str(folder), setting)), told
            assert len(told.splitlines()) < 4 and "repo" not in told


LAYER = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ("missing", ["lacks", "layers.0.self_attn.q_proj.lora_A"]),
        ("surplus", ["beyond", "nowhere.lora_A"]),
        ("of the base", ["beyond", "q_proj"]),
        ("excluded", ["beyond", "layers.1.self_attn.q_proj.lora_A", "and 1 more"]),
        ("other kind", ["IA3"]),
        ("other shape", ["[1, 32]", f"[{RANK}, 32]"]),
        ("cut", ["cannot be read", "adapter_model.safetensors"]),
        ("empty", ["cannot be read", "adapter_model.safetensors"]),
        ("gone", ["adapter_model.safetensors is missing"]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_weights_that_are_not_the_adapters_are_refused(
    base: Path, edit: str, named: list[str]
) -> None:
    from safetensors.torch import load_file, save_file

    folder, _ = made_by_peft(base)
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    assert set(weights) == {LAYER.format(i, part) for i in (0, 1) for part in "AB"}
    if edit == "missing":
        del weights[LAYER.format(0, "A")]
    elif edit == "surplus":
        weights["base_model.model.nowhere.lora_A.weight"] = torch.ones(2, 2)
    elif edit == "of the base":
        weights["base_model.model.model.layers.0.self_attn.q_proj.weight"] = torch.zeros(32, 32)
    elif edit == "other shape":
        weights[LAYER.format(1, "A")] = torch.ones(1, 32)
    save_file(weights, file, metadata={"format": "pt"})
    if edit == "excluded":
        rewrite(folder, layers_to_transform=[0])
    elif edit == "other kind":
        rewrite(folder, peft_type="IA3", feedforward_modules=[])
        with pytest.raises(ConfigError, match=r"lacks .*ia3_l"):
            load_model(ModelConfig(path=str(folder)))
        with pytest.raises(ConfigError, match=r"no plain LoRA \(peft_type=IA3"):
            load_trained(settings(path=str(folder)))
        return
    elif edit in ("cut", "empty"):
        file.write_bytes(file.read_bytes()[: 100 if edit == "cut" else 0])
    elif edit == "gone":
        file.unlink()
    refused_by_both(folder, *named)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"r": 0}, "r=0, which is not a whole number from 1"),
        ({"r": "2"}, 'r="2", which is not a whole number from 1'),
        ({"r": True}, "r=true"),
        ({"lora_alpha": float("nan")}, "lora_alpha=NaN, which is not a finite number"),
        ({"lora_alpha": "6"}, 'lora_alpha="6"'),
        ({"lora_alpha": None}, "lora_alpha=null"),
        ({"target_modules": 5}, "target_modules=5"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is null"),
        ({"base_model_name_or_path": 5}, "base_model_name_or_path is 5"),
        ({"base_model_name_or_path": "itself"}, "which is an adapter itself"),
        ({"rank_pattern": 5}, "rank_pattern=5"),
    ],
    ids=str,
)
def test_a_value_of_the_adapters_config_that_cannot_be_is_refused_by_name(
    base: Path, facts: dict[str, Any], named: str
) -> None:
    folder, _ = made_by_peft(base)
    if "itself" in facts.values():
        facts = {"base_model_name_or_path": str(folder)}
    rewrite(folder, **facts)
    if "rank_pattern" in facts:  # peft's to judge, where it is merged
        with pytest.raises(ConfigError, match=f"adapter model.path={folder} does not fit"):
            load_model(ModelConfig(path=str(folder)))
        return
    refused_by_both(folder, named)
    for key in ("path", "critic"):
        places: dict[str, Any] = {"path": str(base), key: str(folder)}
        with pytest.raises(ConfigError, match=rf"model\.{key}"):
            check_model_config(ModelConfig(**places))


@pytest.mark.filterwarnings("ignore")
def test_weights_that_layers_share_are_read_once(base: Path) -> None:
    import peft

    described = peft.VBLoRAConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], r=2, num_vectors=8, vector_length=8,
        topk=2,
    )  # fmt: skip
    made: Any = peft.get_peft_model(load_base(settings(path=str(base))), described)
    made.peft_config["default"].base_model_name_or_path = str(base)
    made.save_pretrained(str(base.parent / "adapter"))
    found = logits(load_model(ModelConfig(path=str(base.parent / "adapter"))), ragged_batch())
    torch.testing.assert_close(found, logits(made, ragged_batch()), rtol=0, atol=1e-4)


@pytest.mark.parametrize("other", ["another architecture", "another width"])
@pytest.mark.parametrize("resumed", [True, False])
def test_an_adapter_whose_base_is_another_points_at_its_name(
    base: Path, other: str, resumed: bool
) -> None:
    folder, _ = made_by_peft(base)
    model = gpt2() if other == "another architecture" else llama(hidden_size=64)
    save_policy(model, arithmetic_tokenizer(), base.parent / "other")
    facts = json.loads((folder / "adapter_config.json").read_text())
    facts["base_model_name_or_path"] = str(base.parent / "other")
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    config = settings(path=str(folder)) if resumed else ModelConfig(path=str(folder))
    with pytest.raises(ConfigError, match=r"q_proj.*\s.*base_model_name_or_path") as refused:
        load_trained(config)
    assert "model.lora.targets" not in str(refused.value)
    assert len(str(refused.value).splitlines()) < 4


@pytest.mark.parametrize("place", ["load_adapter", "forward", "merge_and_unload"])
def test_a_lack_of_memory_is_told_as_such(
    place: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    folder, _ = made_by_peft(base)
    owner = peft.LoraModel if place == "merge_and_unload" else peft.PeftModel
    monkeypatch.setattr(peft.PeftModelForCausalLM if place == "forward" else owner, place, full)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        load_model(ModelConfig(path=str(folder)))


def test_what_this_version_of_peft_does_not_know_is_not_trained_further(base: Path) -> None:
    folder, _ = made_by_peft(base, init_lora_weights="gaussian", layers_to_transform=[0])
    assert len(adapted(load_trained(settings(path=str(folder)))[0])) == 1
    facts = json.loads((folder / "adapter_config.json").read_text())
    for value, refused in ((None, False), (0.5, True)):
        facts["use_later_lora"] = value
        (folder / "adapter_config.json").write_text(json.dumps(facts))
        if not refused:
            load_trained(settings(path=str(folder)))
            continue
        with pytest.raises(ConfigError, match=r"no plain LoRA \(use_later_lora=0\.5\)"):
            load_trained(settings(path=str(folder)))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "offered",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["lm_head", "embed_tokens"]},
        {"target_modules": ["lm_head", "embed_tokens"], "ensure_weight_tying": True},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"lora_bias": True},
        {"alora_invocation_tokens": [7, 8]},
        {"use_dora": True},
        {"init_lora_weights": "pissa"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_a_merged_adapter_is_what_peft_computes_or_it_is_refused(
    tmp_path: Path, offered: dict[str, Any], tied: bool
) -> None:
    base = tmp_path / "base"
    save_policy(llama(vocab_size=512, tie_word_embeddings=tied), arithmetic_tokenizer(), base)
    folder, made = made_by_peft(base, **offered)
    never = {"layer_replication", "lora_bias", "alora_invocation_tokens"} & offered.keys()
    two_places = tied and "target_modules" in offered
    if never or two_places:
        with pytest.raises(ConfigError, match=r"cannot be merged into its base[\s\S]*model\.path="):
            load_model(ModelConfig(path=str(folder)))
        return
    batch = ragged_batch()
    wanted = logits(made, batch)
    assert (wanted - logits(load_base(settings(path=str(base))), batch)).abs().max() > 0.1
    found = logits(load_model(ModelConfig(path=str(folder))), batch)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


def test_an_adapter_is_merged_without_words_of_other_libraries(base: Path) -> None:
    folder, _ = made_by_peft(base)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load_model(ModelConfig(path=str(folder)))
    assert [str(one.message) for one in said if one.category is FutureWarning] == []


def test_an_adapter_that_is_not_finite_is_refused(base: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder, _ = made_by_peft(base)
    weights = load_file(folder / "adapter_model.safetensors")
    next(iter(weights.values())).fill_(float("nan"))
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    for config in (ModelConfig(path=str(folder)), settings(path=str(folder))):
        with pytest.raises(ConfigError, match=r"the adapter .*lora_A.* are not finite"):
            load_trained(config)


def test_a_map_whose_last_name_is_a_layers_too_is_adapted_by_its_whole_name() -> None:
    model = with_adapter(family("ctrl"))  # layers "h.0", and a network whose maps are "0" and "2"
    maps = ("multi_head_attention.Wq", "multi_head_attention.Wk", "multi_head_attention.Wv",
            "multi_head_attention.dense", "ffn.0", "ffn.2")  # fmt: skip
    assert set(adapted(model)) == {f"transformer.h.{i}.{name}" for i in (0, 1) for name in maps}
    batch = ragged_batch()
    merged = merge_into(family("ctrl"), model)
    torch.testing.assert_close(logits(merged, batch), logits(model, batch), rtol=0, atol=1e-4)
    chosen = with_adapter(family("ctrl"), targets=["2"])
    assert set(adapted(chosen)) == {"transformer.h.0.ffn.2", "transformer.h.1.ffn.2"}


@pytest.mark.parametrize("kind", ["mamba", "deepseek_v3", "shared layers"])
@pytest.mark.filterwarnings("ignore")
def test_a_map_that_takes_no_adapter_is_refused_by_name(kind: str) -> None:
    model: Any
    if kind == "shared layers":
        model, name = llama(), r"layers\.0\.self_attn\.q_proj"
        first, second = model.model.layers
        second.self_attn.q_proj.weight = first.self_attn.q_proj.weight
    else:
        model, name = family(kind), {"mamba": "'out_proj'", "deepseek_v3": "mlp.experts"}[kind]
    with pytest.raises(ConfigError, match=rf"{name}[\s\S]*model\.lora\.targets="):
        with_adapter(model)


def test_an_adapter_of_a_pattern_of_names_goes_on(base: Path) -> None:
    from peft import LoraConfig as Described
    from peft import get_peft_model

    described = Described(
        r=RANK, lora_alpha=6, task_type="CAUSAL_LM", target_modules=r".*\.(q|v)_proj"
    )
    made: Any = get_peft_model(load_base(settings(path=str(base))), described)
    made.peft_config["default"].base_model_name_or_path = str(base)
    made.save_pretrained(str(base.parent / "adapter"))
    model, _ = load_trained(settings(path=str(base.parent / "adapter")))
    assert {name.rpartition(".")[2] for name in adapted(model)} == {"q_proj", "v_proj"}
    with pytest.raises(ConfigError, match=r"targets \['\.\*"):
        load_trained(settings(path=str(base.parent / "adapter"), targets=["q_proj"]))


def test_untrained_weights_take_no_adapter() -> None:
    config = ModelConfig(
        architecture={"model_type": "llama"}, tokenizer="arithmetic", lora=LoraConfig(rank=2)
    )
    with pytest.raises(ConfigError, match=r"model\.architecture makes untrained ones"):
        check_model_config(config)


def test_an_unknown_target_is_answered_with_the_nearest(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"'q_porj'.*Did you mean q_proj\?.*down_proj, gate_proj"):
        load_trained(settings(path=str(base), targets=["q_porj"]))
    with pytest.raises(ConfigError, match="'lm_head'"):
        load_trained(settings(path=str(base), targets=["lm_head"]))


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "peft" else found(n, *a)
    )
    with pytest.raises(ConfigError, match=r"needs the package peft.*pip install 'zoo-rl\[lora\]'"):
        check_model_config(settings(path="some/hub"))
    check_model_config(ModelConfig(path="some/hub"))


@pytest.mark.parametrize("key", ["path", "tokenizer"])
def test_an_adapter_without_a_tokenizer_has_that_of_its_base(base: Path, key: str) -> None:
    folder, _ = made_by_peft(base)
    for file in folder.glob("*token*"):
        file.unlink()
    places: dict[str, Any] = {"path": "some/hub", key: str(folder)}
    config = ModelConfig(**places)
    assert load_tokenizer(config).get_vocab() == arithmetic_tokenizer().get_vocab()


def test_an_adapter_without_its_base_is_told(base: Path) -> None:
    model, _ = trained_on(base)
    folder = base.parent / "adapter"
    save_policy(model, arithmetic_tokenizer(), folder)
    base.rename(base.parent / "moved")
    with pytest.raises(ConfigError, match=r"adapts .*base, which does not exist"):
        check_model_config(ModelConfig(path=str(folder)))
    facts = json.loads((folder / "adapter_config.json").read_text())
    facts.pop("base_model_name_or_path")
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match="does not say which model it adapts"):
        check_model_config(ModelConfig(path=str(folder)))
