"""Labelled rows from own samples: which are desirable, what they cost, and the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from zoo.rollout.engine import Sampling
from zoo.rollout.pairs import PairSet, cached_pairs, label, sample_pairs
from zoo.types import Completion, LabelledCompletion, Prompt, RewardOutput

PROMPT = Prompt(id="p", token_ids=(1, 2))


@pytest.mark.parametrize(
    ("scores", "desirable"),
    [
        ([1, 0, 0, 1], [True, False, False, True]),
        # right answers are desirable and wrong ones are not, also where all are alike
        ([1, 1, 1], [True, True, True]),
        ([0, 0], [False, False]),
        # finer scores: above the mean of 0.4, not at it
        ([0.1, 0.4, 0.7], [False, False, True]),
        ([0.3, 0.3], [False, False]),
        # in floats the mean of ten times 0.7 may come out below 0.7
        ([0.7] * 10, [False] * 10),
        # abstentions and empty completions are no rows
        ([None, 1, None, 0], [True, False]),
        ([None, None], []),
    ],
)
def test_label_by_hand(scores: list[float | None], desirable: list[bool]) -> None:
    completions = [Completion(f"c{i}", (10 + i,), (-1.0,), False) for i in range(len(scores))]
    made = list(label(PROMPT, completions, scores))
    assert [row.desirable for row in made] == desirable
    kept = [i for i, score in enumerate(scores) if score is not None]
    assert [row.completion_ids for row in made] == [(10 + i,) for i in kept]
    assert all(row.prompt is PROMPT for row in made)


def test_an_empty_completion_is_no_row_and_in_no_mean() -> None:
    completions = [Completion(str(i), ids, (), False) for i, ids in enumerate([(), (3,), (4,)])]
    made = list(label(PROMPT, completions, [0.9, 0.2, 0.4]))
    assert [(row.completion, row.desirable) for row in made] == [("1", False), ("2", True)]


class Engine:
    def generate(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[str], n: int, sampling: Sampling
    ) -> list[list[Completion]]:
        return [
            [Completion(f"{key}/{j}", (5, j), (-1.0, -1.0), False) for j in range(n)]
            for key in keys
        ]

    def sync(self, policy: object) -> None: ...


def first_is_right(prompts: list[Prompt], rows: list[Completion]) -> RewardOutput:
    return RewardOutput([float(row.text.endswith("/0")) for row in rows])


def test_every_sample_of_the_budget_becomes_a_row() -> None:
    prompts = [Prompt(id=f"p{i}", token_ids=(i, 9)) for i in range(5)]
    made = sample_pairs(
        prompts,
        Engine(),
        first_is_right,
        completions=14,  # 14 // 4 = 3 prompts
        groups=2,
        group_size=4,
        sampling=Sampling(1.0, 5, (2,)),
        seed=0,
        labels=True,
    )
    assert not made.pairs and made.completions == len(made.labelled) == 12
    assert sum(row.desirable for row in made.labelled) == 3
    assert made.tokens_generated == 24


def test_rows_come_back_from_the_cache(tmp_path: Path) -> None:
    prompts = [Prompt(id=f"p{i}", token_ids=(i, 9)) for i in range(2)]
    rows = [
        LabelledCompletion(prompts[0], "ja\u2028", True, (1, 2)),
        LabelledCompletion(prompts[1], "", False, (3,)),
    ]
    value = PairSet([], 2, 4, 3, 0.5, labelled=rows)
    times = 0

    def make() -> PairSet:
        nonlocal times
        times += 1
        return value

    for _ in range(2):
        assert cached_pairs(tmp_path, {"labels": True}, prompts, make) == value
    assert times == 1
    assert replace(value, labelled=[]) != value
