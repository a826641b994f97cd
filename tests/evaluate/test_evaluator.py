"""Evaluations: shares by hand, perplexity and drift against transformers' own logits."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.models.tiny import llama
from zoo.config import OnError
from zoo.evaluate.best import score_of
from zoo.evaluate.cli import print_scores
from zoo.evaluate.evaluator import Evaluator, TokenizedSet
from zoo.models.policy import Policy
from zoo.report.runs import Evaluation, Measure
from zoo.report.tables import estimate
from zoo.rewards.check import REASONS
from zoo.rewards.score import Patience
from zoo.rollout.engine import Sampling
from zoo.rollout.torch_engine import TorchEngine
from zoo.types import Completion, Prompt, RewardOutput


class Scripted:
    """An engine that writes what it is told, by (temperature, key)."""

    def __init__(self, sampled: list[list[str]], greedy: list[str]) -> None:
        self.sampled, self.greedy = sampled, greedy
        self.seeds: list[tuple] = []

    def sync(self, policy) -> None: ...

    def generate(
        self, prompts: Sequence, keys: Sequence[str], n: int, sampling: Sampling
    ) -> list[list[Completion]]:
        self.seeds.append(sampling.seed)
        made = []
        for key in keys:
            texts = [self.greedy[int(key)]] if sampling.temperature == 0 else self.sampled[int(key)]
            assert len(texts) == n
            made.append([Completion(t, (1,) * len(t), (0.0,), t == "cut") for t in texts])
        return made


class IsYes:
    def __call__(self, prompts, completions) -> RewardOutput:
        right = [float(c.text == "yes") for c in completions]
        return RewardOutput(list(right), reasons=["matched" if r else "wrong" for r in right])


def evaluator(engine, sets, **changes) -> Evaluator:
    settings = {
        "sets": sets,
        "engine": engine,
        "samples": 4,
        "pass_k": [1, 2, 4],
        "greedy": True,
        "max_new_tokens": 8,
        "stop_token_ids": (2,),
        "seed": 7,
        "pad_token_id": 0,
    }
    return Evaluator(**{**settings, **changes})


def problems(n: int) -> tuple[Prompt, ...]:
    return tuple(Prompt(id=f"p{i}", text="q", token_ids=(5, 6)) for i in range(n))


def test_shares_and_pass_at_k_by_hand() -> None:
    """3 problems × 4 samples with 0, 1 and 4 right ones."""
    sampled = [["no"] * 3 + ["cut"], ["yes", "no", "no", "no"], ["yes"] * 4]
    engine = Scripted(sampled, ["yes", "no", "yes"])
    found = TokenizedSet("heldout", "accuracy", problems(3), IsYes())
    (result,) = evaluator(engine, [found]).evaluate(policy=None)  # pyright: ignore
    record = result.record
    assert record["accuracy"] == pytest.approx(5 / 12)
    assert record["greedy"] == pytest.approx(2 / 3)
    assert record["truncated"] == pytest.approx(1 / 12)
    # pass@2 of 1 right in 4: 1 − C(3,2)/C(4,2) = 1/2
    assert record["pass@k"] == pytest.approx({"1": 5 / 12, "2": 0.5, "4": 2 / 3})
    assert record["outcomes"] == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert record["greedy_outcomes"] == [1, 0, 1]
    assert record["problem_ids"] == ["p0", "p1", "p2"]
    assert record["reasons"] == pytest.approx({"matched": 5 / 12, "wrong": 7 / 12})
    # (3·2 + 3) + (3 + 2·3) + 4·3 letters
    assert record["length"] == pytest.approx((9 + 9 + 12) / 12)
    assert all(seed == (7, "evaluate", "heldout") for seed in engine.seeds)


def test_a_problem_is_told_by_what_it_says_and_not_by_its_tokens() -> None:
    def hashes(**changes: Any) -> list[str]:
        first = replace(problems(1)[0], columns={"answer": "1", "order": [1, {"a": None}]})
        found = TokenizedSet("heldout", "accuracy", (replace(first, **changes),), IsYes())
        engine = Scripted([["yes"] * 4], ["yes"])
        (result,) = evaluator(engine, [found]).evaluate(policy=None)  # pyright: ignore
        return result.record["problem_hashes"]

    whole = hashes()
    assert hashes(token_ids=(5, 6, 7)) == hashes(id="other") == whole
    assert whole != hashes(text="other")
    assert whole != hashes(columns={"answer": "2", "order": [1, {"a": None}]})


def test_perplexity_is_that_of_the_models_own_logits() -> None:
    model = llama()
    texts = ((1, 7, 9, 11, 3), (1, 8), (1, 30, 31))
    nll, tokens = 0.0, 0
    for text in texts:
        ids = torch.tensor([text])
        logprobs = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        nll -= float(logprobs.gather(1, ids[0, 1:, None]).sum().detach())
        tokens += len(text) - 1
    found = TokenizedSet("guard", "perplexity", texts=texts)
    # The temperature of rollouts must not enter.
    (result,) = evaluator(None, [found]).evaluate(Policy(model, temperature=0.5))
    assert result.record["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    assert result.record["n_tokens"] == tokens == 7


def test_drift_from_the_start_is_zero_at_the_start_and_the_mean_log_ratio_later() -> None:
    start = Policy(llama())
    torch.manual_seed(0)
    moved = Policy(copy.deepcopy(start.model))
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    engine = TorchEngine().engine(lambda ids: "yes" if ids else "no", 0)
    found = TokenizedSet("heldout", "accuracy", problems(2), IsYes())
    for policy, is_start in ((start, True), (moved, False)):
        engine.sync(policy)
        judge = evaluator(engine, [found], load_start=lambda: start, greedy=False)
        (result,) = judge.evaluate(policy)
        drift = result.record["kl_to_start"]
        if is_start:
            assert drift == 0
            continue
        total, tokens = 0.0, 0
        for i, prompt in enumerate(found.prompts):
            sampling = Sampling(1.0, 8, (2,), (7, "evaluate", "heldout"))
            for made in engine.generate([prompt.token_ids], [str(i)], 4, sampling)[0]:
                ids = torch.tensor([[*prompt.token_ids, *made.token_ids]])
                chosen = []
                for model in (policy.model, start.model):
                    logprobs = model(input_ids=ids).logits[0, 1:-1].log_softmax(-1)
                    chosen.append(logprobs.gather(1, ids[0, 2:, None]).sum())
                total += float(chosen[0] - chosen[1])
                tokens += len(made.token_ids)
        assert drift == pytest.approx(total / tokens, rel=1e-3)


def test_a_quick_check_counts_the_first_problems_only() -> None:
    engine = Scripted([[]] * 3, ["yes", "no", "yes"])
    found = TokenizedSet("heldout", "accuracy", problems(3), IsYes())
    assert evaluator(engine, [found]).greedy_accuracy(found, 2) == (0.5, "")


def test_answers_without_a_score_are_not_right_and_are_told() -> None:
    """3 problems × (2 samples + 1 greedy) with 3 of 9 unscored, one of them by a failure."""

    class Judge:
        def __call__(self, prompts, completions) -> RewardOutput:
            if any(c.text == "fails" for c in completions):
                raise ValueError("fails")
            return RewardOutput([None if c.text == "?" else float(c.text) for c in completions])

    engine = Scripted([["1", "?"], ["1", "0"], ["fails", "1"]], ["1", "?", "0"])
    found = TokenizedSet("heldout", "accuracy", problems(3), Judge())
    patience = Patience(on_error=OnError.abstain)
    made = evaluator(engine, [found], samples=2, pass_k=[1, 2], patience=patience)
    (result,) = made.evaluate(policy=None)  # pyright: ignore
    record = result.record
    assert (record["accuracy"], record["greedy"]) == (pytest.approx(3 / 6), pytest.approx(1 / 3))
    assert record["unscored"] == pytest.approx(3 / 9)
    assert record["outcomes"] == [[1, 0], [1, 0], [0, 1]]
    assert record["greedy_outcomes"] == [1, 0, 0]
    assert record["pass@k"] == pytest.approx({"1": 1 / 2, "2": 1.0})
    for words in ("set heldout could not score 3 of 9", "count as not right", "failed on 1 of"):
        assert words in result.unscored
    value, told = made.greedy_accuracy(found, 2)
    assert value == 0.5 and "could not score 1 of 2 answers" in told


@pytest.mark.parametrize("texts", ["?", "fails"])
def test_a_set_of_which_nothing_is_scored_has_no_accuracy(texts: str) -> None:
    class Judge:
        def __call__(self, prompts, completions) -> RewardOutput:
            if completions[0].text == "fails":
                raise ValueError("fails")
            return RewardOutput([None] * len(prompts))

    engine = Scripted([[texts] * 2] * 3, [texts] * 3)
    asked = tuple(
        Prompt(id=f"p{i}", text="q", token_ids=(5,), columns={"source": "ab"[i % 2]})
        for i in range(3)
    )
    found = TokenizedSet("heldout", "accuracy", asked, Judge())
    patience = Patience(on_error=OnError.abstain)
    made = evaluator(engine, [found], samples=2, pass_k=[1, 2], patience=patience)
    (result,) = made.evaluate(policy=None)  # pyright: ignore
    record = result.record
    assert record["accuracy"] is None and record["greedy"] is None and record["unscored"] == 1
    assert record["pass@k"] == record["by_source"] == record["greedy_by_source"] == {}
    assert "could not score 9 of 9 answers, which leave the set without" in result.unscored
    assert ("failed on 9 of them" in result.unscored) == (texts == "fails")
    assert made.greedy_accuracy(found, 2)[0] is None
    # what reads it: the table, the best metric, the report
    print_scores([record])
    assert score_of(record, "heldout/accuracy") is None
    read = Evaluation(0, "heldout", "accuracy", 0, record)
    for measure in (Measure.accuracy, Measure.greedy):
        assert read.per_problem(measure) == {} and read.mean(measure) is None
        assert estimate([read], measure).value is None


def test_a_record_has_at_most_so_many_reasons() -> None:
    class Quotes:
        def __call__(self, prompts, completions) -> RewardOutput:
            return RewardOutput([0.0] * len(prompts), {}, [f"got\n{c.text}" for c in completions])

    count = REASONS + 8
    engine = Scripted([[f"{i}", "same"] for i in range(count)], ["no"] * count)
    found = TokenizedSet("heldout", "accuracy", problems(count), Quotes())
    (result,) = evaluator(engine, [found], samples=2, pass_k=[1]).evaluate(None)  # pyright: ignore
    reasons = result.record["reasons"]
    assert len(reasons) == REASONS + 1 and reasons["got same"] == 0.5
    assert reasons["other"] == pytest.approx((count - REASONS + 1) / (2 * count))
    assert sum(reasons.values()) == pytest.approx(1)


def test_a_reason_of_blanks_is_none() -> None:
    class Blank:
        def __call__(self, prompts, completions) -> RewardOutput:
            return RewardOutput([0.0] * len(prompts), {}, [" \n"] * len(prompts))

    found = TokenizedSet("heldout", "accuracy", problems(1), Blank())
    engine = Scripted([["a", "b"]], ["no"])
    (result,) = evaluator(engine, [found], samples=2, pass_k=[1]).evaluate(None)  # pyright: ignore
    assert result.record["reasons"] == {}


def test_without_samples_and_greedy_answers_texts_alone_are_judged() -> None:
    sets = [
        TokenizedSet("heldout", "accuracy", problems(2), IsYes()),
        TokenizedSet("guard", "perplexity", texts=((1, 7, 9),)),
    ]
    made = evaluator(None, sets, samples=0, greedy=False)  # nothing is generated
    heldout, guard = made.evaluate(Policy(llama()))
    assert heldout.record["accuracy"] is None and heldout.record["greedy"] is None
    assert heldout.record["n_problems"] == 2 and heldout.samples == []
    assert guard.record["perplexity"] > 1
    print_scores([heldout.record, guard.record])
