"""The plain engine against transformers' own generate, the trainer's log-probs, and hand cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.models.tiny import MODELS, VOCABULARY, gpt2, llama, ragged_batch, tokens
from zoo.batch import collate
from zoo.models.policy import Policy
from zoo.rollout.decoding import BlockDecoding, PlainDecoding
from zoo.rollout.engine import Sampling
from zoo.rollout.torch_engine import TorchEngine, sample
from zoo.types import Completion

PROMPTS = [tokens(torch.Generator().manual_seed(i), n) for i, n in enumerate([3, 9, 1, 5, 5])]
KEYS = [f"k{i}" for i in range(len(PROMPTS))]


def engine(policy: Policy, **settings: Any) -> Any:
    made = TorchEngine(**settings).engine(lambda ids: " ".join(map(str, ids)), pad_token_id=0)
    made.sync(policy)
    return made


def ids_of(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[c.token_ids for c in group] for group in groups]


def trainer_logprobs(
    policy: Policy, prompts: list[list[int]], groups: list[list[Completion]]
) -> list[torch.Tensor]:
    """The trainer's log-probs of each sampled row."""
    n = len(groups[0])
    flat = [c for group in groups for c in group]
    batch = collate(
        [p for p in prompts for _ in range(n)],
        [c.token_ids for c in flat],
        group_size=n,
        prompt_ids=[str(i) for i in range(len(prompts))],
    )
    with torch.no_grad():
        out = policy(batch).logprobs
    return [out[i][batch.completion_mask[i]] for i in range(batch.n_rows)]


# --- greedy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stops", [(), (7,), (7, 11, 30)])
@pytest.mark.parametrize("max_rows", [256, 2])
def test_greedy_is_that_of_generate_token_by_token(
    name: str, stops: tuple[int, ...], max_rows: int
) -> None:
    model: Any = MODELS[name]()
    if stops:  # a model that likes its stop tokens, so that some rows stop and some do not
        with torch.no_grad():
            model.get_input_embeddings().weight[list(stops)] *= 1.5
    made = engine(Policy(model), max_rows=max_rows).generate(
        PROMPTS, KEYS, 1, Sampling(0.0, 12, stops)
    )
    for prompt, (completion,) in zip(PROMPTS, made, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=list(stops) or None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert list(completion.token_ids) == theirs
        stopped = theirs[-1] in stops
        assert completion.truncated == (not stopped)
        assert completion.text == " ".join(map(str, theirs))


def test_greedy_reports_log_probs_at_temperature_one() -> None:
    policy = Policy(llama())
    made = engine(policy).generate(PROMPTS, KEYS, 1, Sampling(0.0, 6, ()))
    for row, wanted in zip(made, trainer_logprobs(policy, PROMPTS, made), strict=True):
        torch.testing.assert_close(torch.tensor(row[0].logprobs), wanted, rtol=0, atol=1e-5)


# --- sampling against the trainer -----------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_B51_sampling_log_probs_are_the_trainers(name: str, temperature: float) -> None:
    policy = Policy(MODELS[name](), temperature)
    made = engine(policy, max_rows=6).generate(
        PROMPTS, KEYS, 3, Sampling(temperature, 12, (7, 11), seed=(1, "x"))
    )
    flat = [c for group in made for c in group]
    assert {c.truncated for c in flat} == {True, False}, "want rows of both kinds"
    gaps = []
    for completion, wanted in zip(flat, trainer_logprobs(policy, PROMPTS, made), strict=True):
        gaps.append(float((torch.tensor(completion.logprobs) - wanted).abs().max()))
    assert max(gaps) < 1e-5


def test_completions_end_with_their_first_stop_token() -> None:
    made = engine(Policy(llama())).generate(PROMPTS, KEYS, 8, Sampling(1.5, 20, (7, 11)))
    ends = 0
    for completion in (c for group in made for c in group):
        assert not set(completion.token_ids[:-1]) & {7, 11}
        assert completion.truncated == (completion.token_ids[-1] not in (7, 11))
        assert len(completion.token_ids) == len(completion.logprobs) <= 20
        assert completion.truncated is False or len(completion.token_ids) == 20
        ends += not completion.truncated
    assert ends > 0


def test_a_stop_token_at_the_last_allowed_place_is_no_truncation() -> None:
    policy = Policy(llama())
    (first,) = engine(policy).generate([PROMPTS[0]], ["k"], 1, Sampling(1.5, 6, ()))
    ids = first[0].token_ids
    place = max(i for i in range(6) if ids[i] not in ids[:i])
    assert place > 0
    cut = Sampling(1.5, place + 1, ())
    (whole,) = engine(policy).generate([PROMPTS[0]], ["k"], 1, cut)
    assert whole[0].truncated
    cut = Sampling(1.5, place + 1, (ids[place],))
    (again,) = engine(policy).generate([PROMPTS[0]], ["k"], 1, cut)
    assert again[0].token_ids == whole[0].token_ids == ids[: place + 1]
    assert not again[0].truncated


# --- draws ----------------------------------------------------------------------------------------


def test_draws_do_not_depend_on_the_batch_around_a_row() -> None:
    policy = Policy(llama())
    sampling = Sampling(1.0, 10, (7,), seed=(3, "rollout", 1))
    whole = ids_of(engine(policy).generate(PROMPTS, KEYS, 4, sampling))
    for order in ([4, 3, 2, 1, 0], [2], [0, 4]):
        some = engine(policy, max_rows=4).generate(
            [PROMPTS[i] for i in order], [KEYS[i] for i in order], 4, sampling
        )
        assert ids_of(some) == [whole[i] for i in order]
    fewer = ids_of(engine(policy).generate(PROMPTS, KEYS, 2, sampling))
    assert fewer == [group[:2] for group in whole]


def test_draws_change_with_seed_key_and_sample_and_not_with_the_global_generator() -> None:
    policy = Policy(llama())

    def made(seed: tuple[int | str, ...], key: str) -> list[tuple[int, ...]]:
        return ids_of(engine(policy).generate([PROMPTS[1]], [key], 4, Sampling(1.5, 8, (), seed)))[
            0
        ]

    torch.manual_seed(0)
    state = torch.get_rng_state()
    base = made((1, "rollout", 1), "0")
    assert torch.equal(torch.get_rng_state(), state)
    assert made((1, "rollout", 1), "0") == base
    assert len(set(base)) == 4
    assert made((1, "rollout", 2), "0") != base
    assert made((1, "rollout", 1), "1") != base


def test_evaluating_between_two_steps_changes_no_sample() -> None:
    policy = Policy(llama())
    shared = engine(policy)
    sampling = Sampling(1.0, 8, (), seed=(0, "rollout", 2))
    alone = ids_of(shared.generate(PROMPTS, KEYS, 2, sampling))
    shared.generate(PROMPTS, KEYS, 3, Sampling(1.0, 5, (), seed=(0, "evaluate", "heldout")))
    assert ids_of(shared.generate(PROMPTS, KEYS, 2, sampling)) == alone


# --- the sampler by itself ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("u", "token"),
    [
        # p = (0.5, 0.25, 0.125, 0.125): cumulative 0.5, 0.75, 0.875, 1, all exact in binary
        (0.0, 0),
        (0.4999, 0),
        (0.5, 1),  # the first v whose cumulative sum is above u, not equal to it
        (0.7499, 1),
        (0.75, 2),
        (0.875, 3),
        (1 - 2**-24, 3),  # the largest float32 below 1
    ],
)
def test_inverse_of_the_cumulative_distribution_by_hand(u: float, token: int) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, 0.0]]) * math.log(2)
    # softmax of (ln 4, ln 2, 0, 0) is (4, 2, 1, 1)/8
    got, logprob = sample(logits, 1.0, torch.tensor([u]))
    assert int(got) == token
    assert float(logprob) == pytest.approx(math.log([0.5, 0.25, 0.125, 0.125][token]), rel=1e-6)


def test_sampling_temperature_by_hand() -> None:
    # logits (0, ln 3) at T = ½: (0, ln 9), p = (0.1, 0.9)
    logits = torch.tensor([[0.0, math.log(3.0)]])
    for u, token in ((0.0999, 0), (0.1001, 1)):
        got, logprob = sample(logits, 0.5, torch.tensor([u]))
        assert int(got) == token
        assert float(logprob) == pytest.approx(math.log([0.1, 0.9][token]), rel=1e-5)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for u, token in ((0.0, 1), (0.5, 3), (1 - 2**-24, 3)):
        assert int(sample(logits, 1.0, torch.tensor([u]))[0]) == token


def test_sample_does_not_change_its_logits() -> None:
    logits = torch.randn(3, 7)
    before = logits.clone()
    sample(logits, 1.0, torch.rand(3))
    sample(logits, 0.0, None)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_empirical_distribution_is_the_softmax(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 20, generator=generator) * 2
    count = 100_000
    draws = torch.rand(count, generator=generator)
    token, _ = sample(logits.expand(count, -1), temperature, draws)
    share = torch.bincount(token, minlength=20) / count
    p = (logits[0].double() / temperature).softmax(0)
    # E TV ≈ Σ √(p(1−p)/2πn) < √(V/2πn) = 0.0056; four times the bound of one deviation
    assert float((share - p).abs().sum() / 2) < 0.012


def test_empirical_distribution_of_the_engine_is_the_models() -> None:
    policy = Policy(llama(vocab_size=8, pad_token_id=None))
    prompt = [3, 5, 4]
    made = engine(policy, max_rows=4096).generate([prompt], ["k"], 4000, Sampling(1.0, 1, ()))
    share = torch.bincount(torch.tensor([c.token_ids[0] for c in made[0]]), minlength=8) / 4000
    with torch.no_grad():
        p = policy.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    # √(V/2πn) = 0.018
    assert float((share - p).abs().sum() / 2) < 0.036


# --- limits ---------------------------------------------------------------------------------------


def test_B75_the_limit_counts_new_tokens_only() -> None:
    model = llama(max_position_embeddings=2048, num_hidden_layers=1)
    prompt = tokens(torch.Generator().manual_seed(0), 900)
    made = engine(Policy(model)).generate([prompt], ["k"], 1, Sampling(1.0, 1024, ()))
    assert len(made[0][0].token_ids) == 1024 and made[0][0].truncated


def test_a_prompt_longer_than_the_context_is_refused_with_the_way_out() -> None:
    made = engine(Policy(gpt2(n_positions=16)))
    made.generate([[5] * 10], ["k"], 1, Sampling(0.0, 6, ()))
    with pytest.raises(ValueError, match=r"prompt 1 has 11 tokens.*at most 5"):
        made.generate([[5], [5] * 11], ["a", "b"], 1, Sampling(0.0, 6, ()))


def test_an_empty_prompt_and_an_engine_without_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        engine(Policy(llama())).generate([[5], []], ["a", "b"], 1, Sampling(0.0, 2, ()))
    bare = TorchEngine().engine(lambda ids: "", 0)
    with pytest.raises(RuntimeError, match="sync"):
        bare.generate([[5]], ["a"], 1, Sampling())


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("group_size", 0),
        ("max_rows", 0),
        ("max_rounds", 0),
        ("max_new_tokens", 0),
        ("pair_completions", 0),
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("dtype", "int8"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"rollout\.{setting}"):
        TorchEngine(**{setting: value})


# --- work done ------------------------------------------------------------------------------------


class Calls:
    """Shapes of the ids that a model was called with."""

    def __init__(self, model: Any) -> None:
        self.shapes: list[tuple[int, int]] = []
        model.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, module: Any, args: Any, kwargs: Any) -> None:
        self.shapes.append(tuple(kwargs["input_ids"].shape))


def test_a_prompt_is_prefilled_once_for_all_its_samples() -> None:
    policy = Policy(llama())
    sampler = engine(policy, fast=False)
    sampler.generate([[5]], ["first"], 1, Sampling(1.0, 1, ()))  # the way is tried once
    calls = Calls(policy.model)
    sampler.generate(PROMPTS, KEYS, 6, Sampling(1.0, 3, ()))
    # one prefill of the 5 prompts, padded to 9; two more tokens for 30 rows
    assert calls.shapes == [(5, 9), (30, 1), (30, 1)]


def test_max_rows_bounds_the_sequences_decoded_at_a_time() -> None:
    policy = Policy(llama())
    sampler = engine(policy, max_rows=13, fast=False)
    sampler.generate([[5]], ["first"], 1, Sampling(1.0, 1, ()))  # the way is tried once
    calls = Calls(policy.model)
    sampler.generate(PROMPTS, KEYS, 6, Sampling(1.0, 2, ()))
    # two prompts of 6 samples fit; the shortest prompts go together
    assert calls.shapes == [(2, 3), (12, 1), (2, 5), (12, 1), (1, 9), (6, 1)]


@pytest.mark.parametrize("fast", [True, False])
def test_rows_that_have_stopped_are_dropped(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(llama())
    sampler = engine(policy, fast=fast)
    sampler.generate([[5]], ["first"], 1, Sampling(1.0, 2, ()))  # a fast way is tried once
    rows = []
    for kind in (PlainDecoding, BlockDecoding):
        step = kind.step

        def counted(self: Any, tokens: torch.Tensor, step: Any = step) -> torch.Tensor:
            rows.append(len(tokens))
            return step(self, tokens)

        monkeypatch.setattr(kind, "step", counted)
    made = sampler.generate(PROMPTS, KEYS, 8, Sampling(1.5, 30, tuple(range(20))))
    lengths = [len(c.token_ids) for group in made for c in group]
    assert len(rows) == max(lengths) - 1
    for t, decoded in enumerate(rows, start=1):
        # of 40 rows, the multiple of 2 (a sixteenth) that holds those that go on
        assert decoded == -(-sum(length > t for length in lengths) // 2) * 2
    assert len(set(rows)) > 3


def test_generate_leaves_the_policys_mode_and_gradients_alone() -> None:
    policy = Policy(llama()).train()
    policy(ragged_batch()).logprobs.sum().backward()
    before = [p.grad.clone() for p in policy.parameters()]  # pyright: ignore
    engine(policy).generate(PROMPTS, KEYS, 2, Sampling(1.0, 3, ()))
    assert policy.model.training
    assert all(
        torch.equal(p.grad, g)  # pyright: ignore
        for p, g in zip(policy.parameters(), before, strict=True)
    )


# --- weights --------------------------------------------------------------------------------------


def one_step(policy: Policy, prompt: list[int], completion: list[int], lr: float) -> None:
    batch = collate([prompt], [completion], group_size=1, prompt_ids=["p"])
    optimizer = torch.optim.SGD(policy.parameters(), lr=lr)
    policy(batch).logprobs.sum().neg().backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-4), ("bfloat16", 0.15)])
def test_B50_after_a_step_and_sync_the_sampler_is_the_trainer(
    dtype: str | None, tolerance: float, tied: bool
) -> None:
    policy = Policy(llama(tie_word_embeddings=tied, initializer_range=0.1))
    sampler = engine(policy, dtype=dtype)
    text = [9, 10, 11]
    moved = []
    for _ in range(3):  # the copy is made anew each time, not only the first
        before = engine_logprobs(sampler, [5, 6], text)
        one_step(policy, [5, 6], text, lr=1.0)
        if dtype is not None:  # a copy lags until it is synchronised
            assert torch.equal(engine_logprobs(sampler, [5, 6], text), before)
        sampler.sync(policy)
        after = engine_logprobs(sampler, [5, 6], text)
        batch = collate([[5, 6]], [text], group_size=1, prompt_ids=["p"])
        with torch.no_grad():
            trainer = policy(batch).logprobs[0, 2:]
        assert (after - trainer).abs().max() < tolerance
        moved.append(float((after - before).abs().max()))
    assert min(moved) > tolerance


def engine_logprobs(sampler: Any, prompt: list[int], text: list[int]) -> torch.Tensor:
    """Log-probs of a fixed text under the weights that the engine decodes with."""
    with torch.no_grad():
        logits = sampler._model(torch.tensor([[*prompt, *text]])).logits[0].float()
    picked = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return picked.gather(1, torch.tensor(text)[:, None]).squeeze(1)


def test_weights_of_the_same_dtype_are_shared_and_not_copied() -> None:
    policy = Policy(llama())
    for dtype in (None, "float32"):
        assert engine(policy, dtype=dtype)._model is policy.model
    copied = engine(policy, dtype="bfloat16")._model
    assert copied is not policy.model and copied.dtype == torch.bfloat16
    assert policy.model.dtype == torch.float32
    assert not any(p.requires_grad for p in copied.parameters())
    assert copied.lm_head.weight is copied.model.embed_tokens.weight


def test_vocabulary_ids_are_all_reachable() -> None:
    made = engine(Policy(llama(initializer_range=0.02)), max_rows=2000)
    drawn = made.generate([[5]], ["k"], 1500, Sampling(1.0, 1, ()))
    # nearly uniform over 64 tokens: one of them is missing with probability 64·(63/64)^1500 ≈ 4e-9
    assert {c.token_ids[0] for c in drawn[0]} == set(range(VOCABULARY))
