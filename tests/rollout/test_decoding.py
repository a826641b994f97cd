"""Fast decoding against the plain one: tokens, log-probs, fallbacks, and the sampler's levels."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BloomConfig,
    Gemma2Config,
    GPTNeoXConfig,
    Lfm2Config,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.models.tiny import MODELS, VOCABULARY, gpt2, llama, ragged_batch, tokens
from zoo.data.fitting import context_of
from zoo.models.policy import Policy
from zoo.models.twin import Casts, Twin
from zoo.rollout import lean, sampler
from zoo.rollout.decoding import (
    BlockCache,
    BlockDecoding,
    PlainDecoding,
    WholeDecoding,
    last_logits,
)
from zoo.rollout.engine import Sampling
from zoo.rollout.graphs import GraphDecoding
from zoo.rollout.lean import LeanDecoding
from zoo.rollout.sampler import sample, sample_in_blocks
from zoo.rollout.torch_engine import TorchEngine

PROMPTS = [tokens(torch.Generator().manual_seed(i), n) for i, n in enumerate([3, 40, 1, 5, 31])]
KEYS = [f"k{i}" for i in range(len(PROMPTS))]
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}


def made(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)


def qwen2() -> Any:
    model = made(Qwen2Config(**SIZES, num_key_value_heads=2, intermediate_size=48))
    seeded = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5, generator=seeded)
    return model


def scaled_llama() -> Any:
    rope = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32, "rope_theta": 10000.0}  # fmt: skip
    return llama(rope_parameters=rope, head_dim=16, max_position_embeddings=256)


def stretched_llama() -> Any:
    """Its angles depend on the furthest position of a step."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 99, "rope_theta": 10000.0,
            "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}  # fmt: skip
    return llama(rope_parameters=rope, head_dim=16, max_position_embeddings=128)


LEAN = {
    "tied": llama,
    "untied": MODELS["untied"],
    "one key head": lambda: llama(num_key_value_heads=1),
    "scaled positions": scaled_llama,
    "stretched positions": stretched_llama,
    "qwen2 with biases": qwen2,
    "mistral": lambda: made(MistralConfig(**SIZES, num_key_value_heads=2, intermediate_size=48,
                                          sliding_window=None)),
}  # fmt: skip
BLOCK = {
    "learned positions": gpt2,
    "qwen3": lambda: made(
        Qwen3Config(**SIZES, num_key_value_heads=2, intermediate_size=48, head_dim=8)
    ),
    "gpt_neox": lambda: made(GPTNeoXConfig(**SIZES, intermediate_size=64)),
    "llama with attention biases": lambda: llama(attention_bias=True),
    "opt": lambda: made(
        OPTConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            ffn_dim=64, word_embed_proj_dim=32, init_std=0.3, max_position_embeddings=128
        )
    ),
}  # fmt: skip
# A sliding window has a cache of its own; a position bias or a soft cap is not computed here.
PLAIN = {
    "sliding window": lambda: made(
        MistralConfig(**SIZES, num_key_value_heads=2, intermediate_size=48, sliding_window=8)
    ),
    "gemma2": lambda: made(
        Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, intermediate_size=48)
    ),
    "bloom": lambda: made(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)),
}
WAYS = {**{name: (m, LeanDecoding) for name, m in LEAN.items()},
        **{name: (m, BlockDecoding) for name, m in BLOCK.items()},
        **{name: (m, PlainDecoding) for name, m in PLAIN.items()}}  # fmt: skip


def engine(policy: Policy, **settings: Any) -> Any:
    built = TorchEngine(**settings).engine(lambda ids: "", pad_token_id=0)
    built.sync(policy)
    return built


def flat(groups: Any) -> list[Any]:
    return [c for group in groups for c in group]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.filterwarnings("ignore:.*cannot decode over blocks")
def test_fast_decoding_draws_the_tokens_of_the_plain_one(name: str) -> None:
    build, way = WAYS[name]
    # In float32 two ways of adding up alone come to 1e-5 on logits this wide; PLAIN is one way
    policy = Policy(build() if way is PlainDecoding else build().double())
    # 45 new tokens: the block of 64 columns fills and grows; stops drop rows on the way
    sampling = Sampling(1.0, 45, (7, 9), seed=(1,))
    fast, plain = engine(policy), engine(policy, fast=False)
    found = flat(fast.generate(PROMPTS, KEYS, 6, sampling))
    wanted = flat(plain.generate(PROMPTS, KEYS, 6, sampling))
    assert list(fast._kinds.values()) == [way]
    assert list(plain._kinds.values()) == [PlainDecoding]
    assert max(len(c.token_ids) for c in found) > 33
    assert len({len(c.token_ids) for c in found}) > 3
    for one, two in zip(found, wanted, strict=True):
        assert one.token_ids == two.token_ids and one.truncated == two.truncated
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)


# Positions from the cache's length, which padding on the left shifts; states beside keys
WHOLE = {
    "bart": lambda: made(
        BartConfig(
            vocab_size=VOCABULARY, d_model=32, decoder_layers=2, decoder_attention_heads=4,
            decoder_ffn_dim=64, init_std=0.3, max_position_embeddings=128, is_decoder=True,
            is_encoder_decoder=False, forced_eos_token_id=None,
        )
    ),
    "lfm2": lambda: made(
        Lfm2Config(
            **SIZES, num_key_value_heads=2, intermediate_size=48,
            layer_types=["conv", "full_attention"],
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", WHOLE)
def test_what_no_cache_fits_reads_its_texts_whole(name: str, fast: bool) -> None:
    """Log-probs are those of each text alone, by transformers' own forward pass."""
    policy = Policy(WHOLE[name]())
    built = engine(policy, fast=fast)
    with pytest.warns(UserWarning, match="cannot decode with a cache over padded prompts") as told:
        found = built.generate(PROMPTS, KEYS, 3, Sampling(1.0, 12, (7, 9), seed=(1,)))
        again = built.generate(PROMPTS, KEYS, 3, Sampling(1.0, 12, (7, 9), seed=(1,)))
    assert len([w for w in told if "cannot decode" in str(w.message)]) == 1
    assert list(built._kinds.values()) == [WholeDecoding]
    assert [c.token_ids for c in flat(again)] == [c.token_ids for c in flat(found)]
    assert len({len(c.token_ids) for c in flat(found)}) > 2
    built = engine(policy, fast=fast, max_rows=6)  # two prompts at a time
    with pytest.warns(UserWarning, match="cannot decode"):
        few = built.generate(PROMPTS, KEYS, 3, Sampling(1.0, 12, (7, 9), seed=(1,)))
    assert [c.token_ids for c in flat(few)] == [c.token_ids for c in flat(found)]
    for prompt, group in zip(PROMPTS, found, strict=True):
        for one in group:
            ids = torch.tensor([[*prompt, *one.token_ids]])
            with torch.no_grad():
                logits = policy.model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            wanted = logits[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0]
            assert one.logprobs == pytest.approx(wanted.tolist(), abs=1e-4)


def test_rounded_products_are_no_reason_to_read_texts_whole() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        built = engine(Policy(llama()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            built.generate(PROMPTS, KEYS, 1, Sampling(1.0, 2, ()))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert list(built._kinds.values()) == [LeanDecoding]


def test_whole_texts_are_read_for_their_last_logits_alone() -> None:
    model, sizes = llama(), []
    head: Any = model.get_output_embeddings()
    head.register_forward_hook(lambda module, given, made: sizes.append(made.shape[1]))
    found = last_logits(model, [[1, 2, 3], [4], [5, 6, 7]])
    assert sizes == [1, 1]
    for row, ids in zip(found, ([1, 2, 3], [4], [5, 6, 7]), strict=True):
        wanted = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(row, wanted, rtol=0, atol=1e-5)


def test_where_positions_would_depend_on_other_rows_a_text_is_too_long() -> None:
    model = stretched_llama()
    assert context_of(model) == 99 and context_of(scaled_llama()) == 256
    built = engine(Policy(model))
    with pytest.raises(ValueError, match="exceeds the model's context of 99"):
        built.generate([[5] * 60], ["a"], 2, Sampling(1.0, 40, ()))
    # Within it a row is the same beside a long one
    alone = built.generate([[5] * 4], ["a"], 2, Sampling(1.0, 30, ()))
    beside = built.generate([[5] * 4, [6] * 69], ["a", "b"], 2, Sampling(1.0, 30, ()))
    assert [c.token_ids for c in alone[0]] == [c.token_ids for c in beside[0]]


@pytest.mark.parametrize("name", ["tied", "qwen2 with biases", "learned positions", "gpt_neox"])
def test_waiting_prompts_take_the_places_of_finished_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(WAYS[name][0]())
    lengths = [3, 40, 1, 5, 31, 2, 70, 9, 12, 4, 6, 33]  # the longest exceed the columns so far
    prompts = [tokens(torch.Generator().manual_seed(i), n) for i, n in enumerate(lengths)]
    keys = [f"k{i}" for i in range(len(prompts))]
    sampling = Sampling(1.0, 40, (7, 9, 11), seed=(1,))
    wanted = flat(engine(policy, fast=False).generate(prompts, keys, 2, sampling))
    steps: list[int] = []
    original = BlockDecoding.step

    def counted(self: Any, newest: torch.Tensor) -> torch.Tensor:
        steps.append(newest.shape[0])
        return original(self, newest)

    built = engine(policy, max_rows=8)
    built.generate(prompts[:1], keys[:1], 2, sampling)  # the way of decoding is tried before
    monkeypatch.setattr(BlockDecoding, "step", counted)
    found = flat(built.generate(prompts, keys, 2, sampling))
    for one, two in zip(found, wanted, strict=True):
        assert one.token_ids == two.token_ids and one.truncated == two.truncated
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)
    assert max(steps) <= 8
    # One batch after the other, each as long as its longest row, in the order of their lengths
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    sizes = [[len(wanted[2 * i + j].token_ids) for j in (0, 1)] for i in order]
    apart = sum(max(max(pair) for pair in sizes[i : i + 4]) - 1 for i in range(0, 12, 4))
    assert len(steps) < apart


@pytest.mark.parametrize("name", ["tied", "qwen2 with biases"])
def test_the_step_of_a_graph_is_that_of_the_lean_way(name: str) -> None:
    """Unrecorded, as on a CPU: fixed addresses, and the newest column as a tensor."""
    policy = Policy(WAYS[name][0]())
    sampling = Sampling(1.0, 45, (7, 9), seed=(1,))
    wanted = flat(engine(policy).generate(PROMPTS, KEYS, 6, sampling))
    built = engine(policy, max_rows=12)  # rows leave, and others join
    assert not GraphDecoding.fits(policy.model)
    built._kinds = {id(built._model): GraphDecoding}
    found = flat(built.generate(PROMPTS, KEYS, 6, sampling))
    for one, two in zip(found, wanted, strict=True):
        assert one.token_ids == two.token_ids and one.truncated == two.truncated
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)


@pytest.mark.parametrize("name", ["tied", "qwen2 with biases", "learned positions"])
def test_bfloat16_decoding_agrees_with_the_models_own_forward(name: str) -> None:
    policy = Policy(WAYS[name][0]())
    fast = engine(policy, dtype="bfloat16")
    found = flat(fast.generate(PROMPTS, KEYS, 2, Sampling(1.0, 12, (), seed=(2,))))
    assert list(fast._kinds.values()) == [WAYS[name][1]]
    gaps = []
    for row, completion in enumerate(found):
        ids = torch.tensor([[*PROMPTS[row // 2], *completion.token_ids]])
        with torch.no_grad():
            logits = fast._model(ids).logits[0].float()
        start = len(PROMPTS[row // 2])
        own = logits[start - 1 : -1].log_softmax(-1)
        own = own.gather(1, ids[0, start:, None]).squeeze(1)
        gaps.append((own - torch.tensor(completion.logprobs)).abs())
    # bfloat16 has 8 bits: logits of ±20 are read to ±0.06
    assert float(torch.cat(gaps).median()) < 0.1


def test_a_model_that_does_not_fit_is_said_once_and_decoded_plainly() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        decoder = engine(Policy(PLAIN["bloom"]()))
        for _ in range(2):
            decoder.generate(PROMPTS[:2], KEYS[:2], 2, Sampling(1.0, 3, ()))
    said = [str(w.message) for w in seen if "cannot decode over blocks" in str(w.message)]
    assert len(said) == 1 and "BloomForCausalLM" in said[0] and "rollout.fast=false" in said[0]


def test_an_adapter_in_the_place_of_a_projection_is_not_passed_over() -> None:
    class Adapted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    model: Any = llama()
    assert LeanDecoding.fits(model)
    layer = model.model.layers[1].mlp
    adapted = Adapted(48, 32, bias=False)
    adapted.weight = layer.down_proj.weight
    layer.down_proj = adapted
    assert not LeanDecoding.fits(model)
    policy = Policy(model)
    sampling = Sampling(1.0, 6, ())
    fast = flat(engine(policy).generate(PROMPTS, KEYS, 2, sampling))
    plain = flat(engine(policy, fast=False).generate(PROMPTS, KEYS, 2, sampling))
    assert [c.token_ids for c in fast] == [c.token_ids for c in plain]


def test_the_attention_of_the_policy_is_its_own_again_after_decoding() -> None:
    policy = Policy(gpt2())
    before = policy.model.config._attn_implementation
    decoder = engine(policy)
    decoder.generate(PROMPTS, KEYS, 2, Sampling(1.0, 3, ()))
    assert policy.model.config._attn_implementation == before
    with (
        pytest.raises(RuntimeError, match="broke"),
        BlockDecoding(policy.model, *decoder._prefill(PROMPTS)[1:], 2),
    ):
        raise RuntimeError("broke")
    assert policy.model.config._attn_implementation == before


def test_projections_of_a_cast_lie_in_a_row_and_follow_the_weights() -> None:
    model: Any = llama()
    casts = Casts(model, torch.bfloat16)
    body = Twin(model, None, casts, trains=False)()
    for layer, master in zip(body.model.layers, model.model.layers, strict=True):
        mine, theirs = layer.self_attn, master.self_attn
        joined = lean.in_a_row([mine.q_proj.weight, mine.k_proj.weight, mine.v_proj.weight])
        assert joined is not None
        wanted = torch.cat([theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight])
        assert torch.equal(joined, wanted.bfloat16())
        with torch.no_grad():
            theirs.k_proj.weight.add_(1)
        casts.refresh()
        assert torch.equal(joined[32:48], theirs.k_proj.weight.bfloat16())
        assert lean.in_a_row([theirs.q_proj.weight, theirs.k_proj.weight]) is None


# --- the sampler ----------------------------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "BLOCK", 4)
    monkeypatch.setattr(sampler, "_LARGE", 2)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampling_in_blocks_is_sampling(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, 23, generator=generator) * 3
    draw = torch.rand(20_000, generator=generator)
    found, wanted = (f(logits, temperature, draw) for f in (sample_in_blocks, sample))
    # float32 sums in another order: u may lie within 1e-7 of a boundary, 23 boundaries a row
    assert int((found[0] != wanted[0]).sum()) <= 2
    same = found[0] == wanted[0]
    torch.testing.assert_close(found[1][same], wanted[1][same], rtol=0, atol=2e-6)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("u", "token"),
    [
        # p = (4, 2, 1, 1 | 4, 0, 0, 4)/16: cumulative 0.25, .375, .4375, .5 | .75, .75, .75, 1
        (0.0, 0), (0.2499, 0), (0.25, 1), (0.375, 2), (0.4999, 3), (0.5, 4), (0.7499, 4),
        (0.75, 7), (1 - 2**-24, 7),
    ],
)  # fmt: skip
def test_sampling_in_blocks_by_hand(u: float, token: int) -> None:
    weights = torch.tensor([[4.0, 2, 1, 1, 4, 0, 0, 4, 0]])
    got, logprob = sample_in_blocks(weights.log(), 1.0, torch.tensor([u]))
    assert int(got) == token
    assert float(logprob) == pytest.approx(float((weights[0, token] / 16).log()), abs=1e-6)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_broken_logits_give_a_log_prob_that_says_so(broken: float) -> None:
    logits = torch.zeros(2, 5000)
    logits[1, 7] = broken
    token, logprob = sample_in_blocks(logits, 1.0, torch.tensor([0.5, 0.5]))
    assert logprob[0].isfinite() and not logprob[1].isfinite()
    assert bool((token < 5000).all())


def test_a_large_vocabulary_has_the_distribution_of_the_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 9001, generator=generator)
    logits[0, :3] = torch.tensor([9.0, 8.0, 9.5])  # half of the mass on three tokens
    draw = torch.rand(40_000, generator=generator)
    token, _ = sample_in_blocks(logits.expand(40_000, -1), 1.0, draw)
    p = logits[0].double().softmax(0)[:3]
    share = torch.bincount(token, minlength=9001)[:3] / 40_000
    # four standard deviations of a share of 40,000
    assert bool(((share - p).abs() < 4 * (p * (1 - p) / 40_000).sqrt()).all())


@pytest.mark.parametrize("name", ["tied", "gpt_neox"])
def test_the_cache_goes_with_the_last_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when the collector of circles comes by, in the middle of training."""
    made: list[Any] = []
    original = BlockCache.__init__

    def watched(self: Any, *given: Any) -> None:
        original(self, *given)
        made.append(weakref.ref(self))

    decoder = engine(Policy(WAYS[name][0]()))
    monkeypatch.setattr(BlockCache, "__init__", watched)
    gc.disable()
    try:
        decoder.generate(PROMPTS, KEYS, 2, Sampling(1.0, 20, (7,)))
        assert made and all(cache() is None for cache in made)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["tied", "learned positions"])
def test_the_head_reads_the_last_states_of_the_prompts_side_by_side(name: str) -> None:
    """Apart, as a slice of all states, torch copies the head's weights once for each prompt."""
    decoder = engine(Policy(WAYS[name][0]()))
    head = decoder._model.get_output_embeddings()
    seen: list[torch.Tensor] = []
    with head.register_forward_hook(lambda module, given, out: seen.append(given[0])):
        decoder._prefill(PROMPTS)
    assert [x.shape[:2] for x in seen] == [(len(PROMPTS), 1)]
    assert seen[0].is_contiguous()
    assert not head._forward_pre_hooks


@pytest.mark.parametrize("name", ["tied", "untied", "qwen2 with biases"])
def test_packed_weights_give_the_same_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not lean.packs(torch.zeros(2, 2, dtype=torch.bfloat16)):
        pytest.skip("oneDNN has no bfloat16 here")
    assert not lean.packs(torch.zeros(2, 2))  # float32 stays with the library that trains
    decoder = engine(Policy(WAYS[name][0]()), dtype="bfloat16")
    found = []
    for after in (10**9, 3):
        monkeypatch.setattr(lean, "PACK_AFTER", after)
        with torch.no_grad():
            _, cache, mask = decoder._prefill(PROMPTS)
            with LeanDecoding(decoder._model, cache, mask, 2) as decoding:
                newest = [torch.full((len(PROMPTS) * 2,), i + 3) for i in range(6)]
                found.append(torch.stack([decoding.step(token).float() for token in newest]))
                assert (decoding._packed_head is not None) == (after == 3)
                assert (decoding._layers[0].qkv.packed is not None) == (after == 3)
    assert torch.equal(found[0][:2], found[1][:2])
    # The residual is added after rounding, not before
    assert (found[0] - found[1]).abs().max() < 0.03 * found[0].abs().max()


# --- the policy's own casts -----------------------------------------------------------------------


def test_casts_that_the_policy_computes_with_are_shared_and_not_copied() -> None:
    policy = Policy(llama(), packed=True, compute_dtype=torch.bfloat16)
    decoder = engine(policy)  # rollout.dtype=null: the policy's own arithmetic
    policy.trunk(ragged_batch())  # packing is tried
    body = policy.trunk._packed_body()
    assert decoder._model.dtype == torch.bfloat16
    mine, theirs = decoder._model.parameters(), body.parameters()
    for one, two in zip(mine, theirs, strict=True):
        assert one.data_ptr() == two.data_ptr() and not one.requires_grad
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.05, fused=True)
    before = flat(decoder.generate(PROMPTS, KEYS, 2, Sampling(1.0, 8, ())))
    policy(ragged_batch()).logprobs.sum().neg().backward()
    optimizer.step()
    decoder.sync(policy)
    fresh = engine(Policy(policy.model), dtype="bfloat16")
    after = flat(decoder.generate(PROMPTS, KEYS, 2, Sampling(1.0, 8, ())))
    assert after == flat(fresh.generate(PROMPTS, KEYS, 2, Sampling(1.0, 8, ()))) != before
    assert list(decoder._kinds.values()) == [LeanDecoding]
