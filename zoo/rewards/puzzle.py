"""The scorer of a reasoning-gym task, asked about the extracted answer alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zoo.rewards.extract import extract
from zoo.types import Completion, Prompt, RewardOutput


@dataclass(frozen=True)
class Puzzle:
    """1.0 for an answer that the task's scorer calls fully right, else 0.0.

    The scorers of reasoning-gym give partial credit for a text that merely contains the answer
    (0.067 for "the answer is 3"). So the answer is extracted first, by the markers of the math
    verifier, and anything below 1 counts 0, unless `partial` asks for the scorer's own number.
    """

    partial: bool = False  # True: the task's own score of the extracted answer, in [0, 1]

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        scores: list[float | None] = []
        reasons = []
        for prompt, completion in zip(prompts, completions, strict=True):
            entry = prompt.columns.get("entry")
            if not isinstance(entry, dict):
                raise ValueError(
                    f"prompt {prompt.id!r} has no puzzle entry; reward=puzzle scores data=puzzles."
                )
            found = extract(completion.text, "gsm8k")
            if found is None or not found.text:
                scores.append(0.0)
                reasons.append("truncated" if completion.truncated else "no_answer")
                continue
            value = float(_scorer(prompt.columns["task"]).score_answer(found.text, entry))
            right = value >= 1.0
            scores.append(value if self.partial else float(right))
            reasons.append("matched" if right else "wrong")
        return RewardOutput(scores, {"puzzle": list(scores)}, reasons)


_scorers: dict[str, Any] = {}


def _scorer(task: str) -> Any:
    if task not in _scorers:
        from zoo.data.puzzles import reasoning_gym

        _scorers[task] = reasoning_gym().create_dataset(task, size=1, seed=0)
    return _scorers[task]
