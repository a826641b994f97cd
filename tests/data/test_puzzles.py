"""Puzzles are data and reward in one, and partial credit does not leak."""

from __future__ import annotations

import pytest

from zoo.config import ConfigError
from zoo.data.puzzles import Puzzles
from zoo.rewards.puzzle import Puzzle
from zoo.types import Completion

gym = pytest.importorskip("reasoning_gym", reason="needs the extra `puzzles`")


def completion(text: str) -> Completion:
    return Completion(text, (), (), truncated=False)


def test_prompts_are_reproducible_and_apart_from_the_held_out_ones() -> None:
    data = Puzzles(n_problems=30, n_heldout=20)
    assert data.prompts() == Puzzles(n_problems=30, n_heldout=20).prompts()
    heldout = data.evaluation_sets()[0].prompts
    assert len(heldout) > 10
    train = {p.columns["question"] for p in data.prompts()}
    assert not train & {p.columns["question"] for p in heldout}


def test_partial_credit_for_talk_does_not_leak() -> None:
    prompt = Puzzles(n_problems=1).prompts()[0]
    gold = prompt.columns["answer"]
    entry = prompt.columns["entry"]
    scorer = gym.create_dataset("chain_sum", size=1, seed=0)
    talk = f"the number {gold} comes to mind, and others"
    assert 0 < scorer.score_answer(talk, entry) < 1  # what the task itself would pay
    texts = [f"#### {gold}", f"so the answer is {gold}.", talk, "", "#### 123456789"]
    output = Puzzle()([prompt] * 5, [completion(t) for t in texts])
    assert output.total == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert output.reasons == ["matched", "matched", "no_answer", "no_answer", "wrong"]


def test_unknown_tasks_and_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"chain_sums.*[Dd]id you mean.*chain_sum"):
        Puzzles(task="chain_sums").prompts()
    with pytest.raises(ConfigError, match=r"do not fit data\.task=chain_sum"):
        Puzzles(options={"nonsense": 1}).prompts()
