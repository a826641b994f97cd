"""Pairs from own samples: who is preferred to whom, the budget, and the cache."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo.config import OnError
from zoo.rewards.score import Patience
from zoo.rollout.engine import Sampling
from zoo.rollout.order import Order
from zoo.rollout.pairs import PairSet, cached_pairs, gold_pair, pair_up, sample_pairs
from zoo.types import Completion, PreferencePair, Prompt, RewardOutput

PROMPT = Prompt(id="p", token_ids=(1, 2))


def completions(count: int, empty: Sequence[int] = ()) -> list[Completion]:
    return [
        Completion(f"c{i}", () if i in empty else (10 + i,), (-1.0,), False) for i in range(count)
    ]


def names(pairs: Any) -> list[tuple[str, str, float | None]]:
    return [(p.chosen, p.rejected, p.margin) for p in pairs]


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        # right and wrong: min(right, wrong) pairs
        ([1, 0, 0, 0], [("c0", "c3", 1)]),
        ([0, 1, 1, 0], [("c1", "c3", 1), ("c2", "c0", 1)]),
        ([1, 1, 1, 0], [("c0", "c3", 1)]),
        # all alike: none
        ([1, 1, 1], []),
        ([0, 0], []),
        ([0.7], []),
        # finer scores: best with worst, inwards; the middle one is left over
        ([0.1, 0.9, 0.5, 0.3, 0.7], [("c1", "c0", 0.8), ("c4", "c3", 0.4)]),
        # an abstention belongs to no pair
        ([1, None, None, 0], [("c0", "c3", 1)]),
        ([None, None], []),
        ([None, 1], []),
    ],
)
def test_pair_up_by_hand(scores: list[float | None], wanted: list[tuple[str, str, float]]) -> None:
    made = names(pair_up(PROMPT, completions(len(scores)), scores))
    assert [m[:2] for m in made] == [w[:2] for w in wanted]
    assert [m[2] for m in made] == pytest.approx([w[2] for w in wanted])


def test_pairs_carry_the_sampled_token_ids() -> None:
    (pair,) = pair_up(PROMPT, completions(2), [0, 1])
    assert (pair.chosen_ids, pair.rejected_ids) == ((11,), (10,)) and pair.prompt is PROMPT


def test_B56_an_empty_completion_is_in_no_pair() -> None:
    assert names(pair_up(PROMPT, completions(3, empty=[2]), [1, 0.5, 0])) == [("c0", "c1", 0.5)]
    assert not list(gold_pair(PROMPT, (9,), "gold", completions(1, empty=[0]), [0]))


def test_gold_is_preferred_to_the_worst_sample_that_is_not_right() -> None:
    def made(scores: list[float | None]) -> list[tuple[str, str, float | None]]:
        return names(gold_pair(PROMPT, (9, 2), "gold", completions(len(scores)), scores))

    assert made([1, 0.2, 0.1, None]) == [("gold", "c2", None)]
    assert made([0, 0]) == [("gold", "c0", None)]
    assert made([1, 1, None]) == []
    (pair,) = gold_pair(PROMPT, (9, 2), "gold", completions(1), [0])
    assert pair.chosen_ids == (9, 2) and pair.rejected_ids == (10,)


# --- sampling under a budget ----------------------------------------------------------------------


class Engine:
    """Answers with tokens that name the prompt and the sample."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[str], int, tuple[int | str, ...]]] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[str], n: int, sampling: Sampling
    ) -> list[list[Completion]]:
        self.calls.append(([p[0] for p in prompts], list(keys), n, sampling.seed))
        return [
            [Completion(f"{p[0]}/{i}", (p[0], 90 + i, 2), (-1.0,) * 3, False) for i in range(n)]
            for p in prompts
        ]

    def sync(self, policy: Any) -> None: ...


def first_is_right(prompts: list[Prompt], rows: list[Completion]) -> RewardOutput:
    return RewardOutput([float(c.text.endswith("/0")) for c in rows])


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=f"p{i}", token_ids=(i, 60, 61)[: 1 + i % 3]) for i in range(count)]


def sampled(budget: int, engine: Engine | None = None, **changes: Any) -> PairSet:
    settings: dict[str, Any] = {
        "completions": budget,
        "groups": 3,
        "group_size": 4,
        "sampling": Sampling(1.0, 5, (2,)),
        "seed": 7,
    }
    return sample_pairs(prompts(10), engine or Engine(), first_is_right, **{**settings, **changes})


def test_the_budget_is_spent_to_the_last_whole_group_and_counted() -> None:
    engine = Engine()
    made = sampled(30, engine)  # 30 // 4 = 7 prompts: 3 + 3 + 1
    assert [len(call[0]) for call in engine.calls] == [3, 3, 1]
    assert made.completions == 28 and len(made.pairs) == 7
    assert made.tokens_generated == 28 * 3
    asked = [p for call in engine.calls for p in call[0]]
    assert made.tokens_prompt == sum(1 + p % 3 for p in asked)
    assert made.seconds > 0
    assert [p.chosen for p in made.pairs] == [f"{p}/0" for p in asked]


def test_prompts_and_draws_are_those_of_an_on_policy_run_with_the_same_seed() -> None:
    engine = Engine()
    sampled(8 * 4, engine)
    order = Order(10, 7)
    for step, (asked, keys, n, seed) in enumerate(engine.calls, start=1):
        places = order.take(len(asked))
        assert asked == [item for _, item in places]
        assert keys == [str(place) for place, _ in places]
        assert n == 4 and seed == (7, "rollout", step)


def test_progress_is_reported_in_prompts() -> None:
    seen: list[tuple[int, int]] = []
    sampled(28, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 7), (6, 7), (7, 7)]


def test_completions_without_a_score_are_counted() -> None:
    def abstains_on_two_and_fails_on_three(
        prompts: list[Prompt], rows: list[Completion]
    ) -> RewardOutput:
        if any(c.text.endswith("/3") for c in rows):
            raise KeyError("no such column")
        return RewardOutput([None if c.text.endswith("/2") else 1.0 for c in rows])

    settings: dict[str, Any] = {"completions": 40, "groups": 3, "group_size": 4, "seed": 7}
    settings |= {"sampling": Sampling(1.0, 5, (2,)), "patience": Patience(None, OnError.abstain)}
    reward = abstains_on_two_and_fails_on_three
    made = sample_pairs(prompts(10), Engine(), reward, **settings)
    assert (made.completions, made.unscored, made.failed) == (40, 20, 10)


def test_prompts_with_gold_use_it() -> None:
    made = sampled(40, gold={f"p{i}": ((50 + i,), f"gold {i}") for i in range(5)})
    golden = {p.prompt.id: p for p in made.pairs if p.chosen.startswith("gold")}
    assert set(golden) == {f"p{i}" for i in range(5)}
    assert all(not p.rejected.endswith("/0") for p in golden.values())
    assert len(made.pairs) == 10


# --- cache ----------------------------------------------------------------------------------------


class Made:
    """Counts how often the pairs are made."""

    def __init__(self) -> None:
        self.times = 0
        prompt = prompts(3)
        self.value = PairSet(
            [
                PreferencePair(prompt[0], "ja\u2028wohl\n", "näh", (1, 2), (3,), 0.5),
                PreferencePair(prompt[2], "x", "", (4,), (5, 6), None),
            ],
            completions=12,
            tokens_prompt=7,
            tokens_generated=40,
            seconds=1.25,
            unscored=5,
            failed=3,
        )

    def __call__(self) -> PairSet:
        self.times += 1
        return self.value


KEY: dict[str, object] = {"start": "abc", "budget": 12, "seed": 0}


def test_the_second_ask_reads_the_same_pairs_and_costs(tmp_path: Path) -> None:
    made = Made()
    for _ in range(3):
        assert cached_pairs(tmp_path, KEY, prompts(3), made) == made.value
    assert made.times == 1


def test_no_pairs_at_all_are_not_kept(tmp_path: Path) -> None:
    """A reward that abstained on all may be mended."""
    made = Made()
    made.value = replace(made.value, pairs=[])
    assert cached_pairs(tmp_path, KEY, prompts(3), made).pairs == []
    assert not list(tmp_path.glob("*.jsonl"))
    made.value = replace(made.value, pairs=Made().value.pairs)
    assert cached_pairs(tmp_path, KEY, prompts(3), made) == made.value


@pytest.mark.parametrize("change", [{"start": "abd"}, {"budget": 13}, {"seed": 1}, {"more": 1}])
def test_B60_another_key_is_another_file(tmp_path: Path, change: dict[str, object]) -> None:
    made = Made()
    cached_pairs(tmp_path, KEY, prompts(3), made)
    cached_pairs(tmp_path, {**KEY, **change}, prompts(3), made)
    assert made.times == 2


def damage_truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def damage_one_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.write_bytes(bytes(data))


def damage_cost(file: Path) -> None:
    head, _, body = file.read_text().partition("\n")
    assert json.loads(head)["tokens_generated"] == 40
    file.write_text(head.replace('"tokens_generated": 40', '"tokens_generated": 4') + "\n" + body)


def damage_binary(file: Path) -> None:
    file.write_bytes(b"\xff\xfe" + file.read_bytes())


def damage_empty(file: Path) -> None:
    file.write_bytes(b"")


def damage_pipe(file: Path) -> None:  # whose reader would wait for ever
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    "damage",
    [damage_truncate, damage_one_byte, damage_cost, damage_binary, damage_empty, damage_pipe],
)
def test_B60_a_damaged_file_is_made_anew(tmp_path: Path, damage: Any) -> None:
    made = Made()
    cached_pairs(tmp_path, KEY, prompts(3), made)
    (file,) = tmp_path.glob("*.jsonl")
    damage(file)
    assert cached_pairs(tmp_path, KEY, prompts(3), made) == made.value
    assert made.times == 2
    assert cached_pairs(tmp_path, KEY, prompts(3), made) == made.value
    assert made.times == 2, "the file was not mended"


def test_a_file_of_another_key_is_made_anew(tmp_path: Path) -> None:
    mine, other = Made(), Made()
    other.value = replace(other.value, pairs=mine.value.pairs[:1])
    cached_pairs(tmp_path, KEY, prompts(3), mine)
    (file,) = tmp_path.glob("*.jsonl")
    cached_pairs(tmp_path, {**KEY, "seed": 1}, prompts(3), other)
    (foreign,) = set(tmp_path.glob("*.jsonl")) - {file}
    file.write_bytes(foreign.read_bytes())  # a copy by hand; whole, and of the same prompts
    for _ in range(2):
        assert cached_pairs(tmp_path, KEY, prompts(3), mine) == mine.value
    assert mine.times == 2


def test_a_prompt_that_is_gone_makes_the_pairs_anew(tmp_path: Path) -> None:
    made = Made()
    cached_pairs(tmp_path, KEY, prompts(3), made)
    cached_pairs(tmp_path, KEY, prompts(2), made)
    assert made.times == 2


def test_a_failure_while_making_leaves_no_file(tmp_path: Path) -> None:
    def broken() -> PairSet:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cached_pairs(tmp_path, KEY, prompts(3), broken)
    made = Made()
    assert cached_pairs(tmp_path, KEY, prompts(3), made) == made.value


def test_the_global_generator_is_not_touched() -> None:
    state = torch.get_rng_state()
    sampled(12)
    assert torch.equal(torch.get_rng_state(), state)
