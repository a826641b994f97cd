"""What memory is saved by: recomputed activations, frozen weights without masters, offloading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.tiny import family, gpt2, llama, ragged_batch
from zoo.batch import collate
from zoo.config import ConfigError, ModelConfig
from zoo.data.tokenizer import arithmetic_tokenizer
from zoo.measure.memory import component_bytes
from zoo.measure.meter import TensorMeter
from zoo.models.critic import Critic
from zoo.models.loading import _recompute_activations, load_model, reading, save_policy
from zoo.models.models import Models, visiting
from zoo.models.policy import Policy, PolicyOutput, recompute
from zoo.models.reference import load_reference
from zoo.models.reward_model import from_policy
from zoo.models.twin import Casts, Twin, cast_frozen
from zoo.rollout.engine import Sampling
from zoo.rollout.lean import in_a_row
from zoo.rollout.torch_engine import TorchEngine
from zoo.train.optimizer import offload_states

HALF = torch.bfloat16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # narrower than usual, so that bfloat16 leaves the packed path within its limit
    model = llama(vocab_size=512, num_hidden_layers=6, initializer_range=0.1)
    save_policy(model, arithmetic_tokenizer(), tmp_path / "m")
    return tmp_path / "m"


# --- activation checkpointing ---------------------------------------------------------------------


def backward(config: ModelConfig, role: str) -> tuple[list[Any], int]:
    """Gradients, and the peak of activations of a forward and backward pass."""
    model, batch = load_model(config), ragged_batch(8, 4, completion_lengths=(30, 20, 25))
    module: Any
    if role == "policy":
        module = Policy(model, **reading(config))
    elif role == "critic":
        module = Critic(model.base_model, 32, **reading(config))
        nn.init.ones_(module.head.weight)
    else:
        module = from_policy(model, 0, **reading(config))
    recompute(module)  # as build does with what is trained
    out = module(batch)  # warm: the trunk tries the packed path
    meter = TensorMeter({role: module})
    with meter.phase("update"):
        out = module(batch)
        scores = out if role == "reward_model" else out.logprobs if role == "policy" else out.values
        del out
        scores.square().sum().backward()
    assert module.trunk.packed == config.packed
    return [p.grad for p in module.parameters()], meter.peaks["update"]["activations"]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("role", ["policy", "critic", "reward_model"])
def test_recomputed_activations_give_the_gradient_bit_for_bit_at_a_lower_peak(
    role: str, packed: bool, dtype: str | None, folder: Path
) -> None:
    found = []
    for wanted in (False, True):
        config = ModelConfig(
            path=str(folder), packed=packed, compute_dtype=dtype, activation_checkpointing=wanted
        )
        found.append(backward(config, role))
    (kept, high), (again, low) = found
    for one, two in zip(kept, again, strict=True):
        assert one is two is None or torch.equal(one, two)
    # six layers of which one is alive at a time, and the inputs of the six
    assert low < 0.5 * high


@contextmanager
def counted(body: nn.Module) -> Iterator[list[str]]:
    """A list that grows by a name with every call of a linear map."""
    calls: list[str] = []
    maps = [m for m in body.modules() if type(m).__name__ in ("Linear", "Conv1D")]
    hooks = [m.register_forward_hook(lambda m, *_: calls.append(str(m))) for m in maps]
    yield calls
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("dtype", [None, HALF])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neo", "phimoe", "mixtral"])
def test_recomputing_draws_nothing_at_random(kind: str, dtype: torch.dtype | None) -> None:
    """Routers of experts draw in training mode, where transformers recomputes."""
    batch, found = ragged_batch(), []
    for wanted in (False, True):
        model = gpt2().eval() if kind == "gpt2" else family(kind)
        policy = Policy(model, compute_dtype=dtype)
        if wanted:
            _recompute_activations(model)
            recompute(policy)
        state = torch.get_rng_state()
        kept = policy(batch).logprobs
        assert torch.equal(policy(batch).logprobs, kept)
        assert torch.equal(torch.get_rng_state(), state)
        with counted(policy.trunk._padded_body()) as calls:
            kept.square().sum().backward()
        found.append((kept.detach(), [p.grad for p in policy.parameters()], len(calls)))
    (plain, kept, none), (same, again, some) = found
    assert torch.equal(plain, same)
    for one, two in zip(kept, again, strict=True):
        assert one is two is None or torch.equal(one, two)
    assert none == 0 and some >= 2 * 3  # each layer's linear maps again, the last not always


def test_sampling_leaves_what_recomputes_in_its_mode(folder: Path) -> None:
    model = load_model(ModelConfig(path=str(folder), activation_checkpointing=True))
    policy = Policy(model, packed=True)
    recompute(policy)
    modes = {name: module.training for name, module in policy.named_modules()}
    layers = {name for name, on in modes.items() if on}
    assert {f"model.model.layers.{i}" for i in range(6)} <= layers
    assert not any("self_attn" in name or "mlp" in name for name in layers)
    engine = TorchEngine().engine(lambda ids: "", pad_token_id=0)
    engine.sync(policy)
    engine.generate([[3, 4]], ["a"], 2, Sampling(1.0, 3, ()))
    assert modes == {name: module.training for name, module in policy.named_modules()}


def test_a_model_that_cannot_recompute_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    with pytest.raises(ConfigError, match=r"model\.activation_checkpointing: LlamaForCausalLM"):
        load_model(ModelConfig(path=str(folder), activation_checkpointing=True))


# --- frozen weights -------------------------------------------------------------------------------


def test_a_reference_in_bfloat16_holds_no_masters_and_computes_the_same(folder: Path) -> None:
    config = ModelConfig(path=str(folder), compute_dtype="bfloat16")
    batch = ragged_batch()
    reference = load_reference(config, 0, 1.0, "cpu")
    start = Policy(load_model(config), **reading(config))
    with torch.no_grad():
        assert torch.equal(reference(batch).logprobs, start(batch).logprobs)  # step-0 KL is 0
    held = component_bytes({"reference": reference, "policy": start})
    weights = sum(p.numel() for p in start.parameters())
    buffers = sum(b.nbytes for b in start.buffers())
    assert held["reference"]["parameters"] == 2 * weights + buffers
    assert "copies" not in held["reference"]
    assert held["policy"]["parameters"] == 4 * weights + buffers
    assert held["policy"]["copies"] == 2 * weights


def test_frozen_weights_are_cast_in_rows_and_trained_ones_left() -> None:
    model: Any = llama()
    model.requires_grad_(False)
    wanted = {n: p.to(HALF) for n, p in model.named_parameters()}
    kept = model.model.norm.weight.requires_grad_(True)
    cast_frozen(model, HALF)
    for name, weight in model.named_parameters():
        assert weight is kept or torch.equal(weight, wanted[name]), name
    assert kept.dtype == torch.float32 and model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    attention, network = model.model.layers[0].self_attn, model.model.layers[0].mlp
    assert in_a_row([getattr(attention, f"{n}_proj").weight for n in "qkv"]) is not None
    assert in_a_row([network.gate_proj.weight, network.up_proj.weight]) is not None
    casts = Casts(model, HALF)
    body = Twin(model, None, casts)()
    assert [c.numel() for c in casts.copies()] == [kept.numel()]
    assert body.lm_head.weight is model.lm_head.weight  # the weight itself


# --- the reward model on the fast path ------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_packed_reward_model_scores_and_learns_like_a_padded_one(make: Any) -> None:
    batch, found = ragged_batch(), []
    weight = torch.randn(batch.n_rows, generator=torch.Generator().manual_seed(5))
    for packed in (False, True):
        model = from_policy(make(), 0, packed=packed)
        scores = model(batch)
        assert model.trunk.packed == packed  # pyright: ignore
        (scores * weight).sum().backward()
        found.append((scores, [p.grad for p in model.parameters()]))
    (padded, wanted), (scores, grads) = found
    torch.testing.assert_close(scores, padded, rtol=0, atol=2e-5)
    torch.testing.assert_close(padded, model.scores(batch.input_ids, batch.attention_mask),
                               rtol=0, atol=2e-5)  # fmt: skip
    for one, two in zip(grads, wanted, strict=True):
        assert (one - two).abs().max() <= 2e-5 * two.abs().max().clamp_min(1e-3)


def test_a_packed_reward_model_reads_rows_without_a_completion() -> None:
    """Rankings fill their spare places with empty completions."""
    batch = collate(
        [[5, 6, 7]] * 3 + [[8, 9]] * 3, [[3, 4], [9], [], [4], [], []], group_size=3,
        prompt_ids=["a", "b"],
    )  # fmt: skip
    model = from_policy(llama(), 0, packed=True)
    wanted = model.scores(batch.input_ids, batch.attention_mask)
    torch.testing.assert_close(model(batch), wanted, rtol=0, atol=2e-5)


def test_a_reward_model_in_bfloat16_has_float32_masters_and_scores() -> None:
    batch = ragged_batch()
    model = from_policy(llama(initializer_range=0.1), 0, packed=True, compute_dtype=HALF)
    found, wanted = model(batch), from_policy(llama(initializer_range=0.1), 0)(batch).detach()
    assert found.dtype == torch.float32 and not torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.05 * float(wanted.abs().max()))
    found.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())  # pyright: ignore


# --- offloading -----------------------------------------------------------------------------------


class Recorded(nn.Module):
    """Says when it is moved and when it is called."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def to(self, device: Any) -> Recorded:  # pyright: ignore
        self.said.append(f"to {device}")
        return self

    def forward(self, batch: Any) -> PolicyOutput:
        self.said.append("called")
        return PolicyOutput(torch.zeros(batch.input_ids.shape), torch.zeros(1))


def test_an_offloaded_reference_is_there_for_its_passes_alone() -> None:
    said: list[str] = []
    models = Models(policy=None, reference=Recorded(said), micro_batch_tokens=10)
    batch = ragged_batch()
    models.reference_logprobs(batch)
    calls = len(said)
    assert calls > 1 and set(said) == {"called"}  # no home: it never moves
    said.clear()
    models.reference_home = torch.device("meta")
    models.reference_logprobs(batch)
    assert said == ["to cpu", *["called"] * calls, "to meta"]
    said.clear()
    with pytest.raises(KeyError), visiting(models.reference, batch.device, models.reference_home):
        raise KeyError
    assert said == ["to cpu", "to meta"]


class Numbers(torch.Tensor):
    """A tensor that says that it lies elsewhere, and keeps its numbers there."""

    where: torch.device

    @property
    def device(self) -> torch.device:  # pyright: ignore
        return self.where

    def to(self, place: Any, *others: Any, **named: Any) -> Any:  # pyright: ignore
        MOVES.append((self.where, torch.device(place)))
        return lying(self.as_subclass(torch.Tensor), torch.device(place))


MOVES: list[tuple[torch.device, torch.device]] = []


def lying(tensor: torch.Tensor, where: torch.device) -> Any:
    made: Any = tensor.as_subclass(Numbers)
    made.where = where
    return made


class Momentum(torch.optim.Optimizer):
    """x ← x − lr·m, m ← m/2 + g, its state on a device of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # pyright: ignore
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            if not state:
                state["m"] = lying(torch.zeros(weight.shape), DEVICE)
            assert state["m"].device == DEVICE, "the state is not where the step needs it"
            m = state["m"].as_subclass(torch.Tensor)
            state["m"] = lying(m / 2 + weight.grad, DEVICE)
            with torch.no_grad():
                weight -= 0.1 * state["m"].as_subclass(torch.Tensor)


DEVICE, HOME = torch.device("cuda", 0), torch.device("cpu")


def test_offloaded_states_come_for_the_step_and_leave_after_it() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Momentum([weight])
    offload_states(optimizer, HOME)
    MOVES.clear()
    for _ in range(3):
        weight.grad = torch.ones(2)
        optimizer.step()
        assert optimizer.state[weight]["m"].device == HOME
    leave, fetch = (DEVICE, HOME), (HOME, DEVICE)
    assert [leave, fetch, leave, fetch, leave] == MOVES
    # m: 1, 1.5, 1.75; x = −0.1·(1 + 1.5 + 1.75)
    torch.testing.assert_close(weight.detach(), torch.full((2,), -0.425))


def test_on_a_cpu_offloaded_states_change_nothing() -> None:
    found = []
    for wanted in (False, True):
        weight = nn.Parameter(torch.arange(4.0))
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
        if wanted:
            offload_states(optimizer, HOME)
        for step in range(3):
            weight.grad = torch.arange(4.0) - step
            optimizer.step()
        found.append((weight.detach(), optimizer.state[weight]["exp_avg_sq"]))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
