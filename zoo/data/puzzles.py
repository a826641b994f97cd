"""Puzzles of reasoning-gym, generated to order, with their own scorers (extra `puzzles`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from zoo.config import ConfigError
from zoo.data.plain_texts import PLAIN_TEXTS
from zoo.rewards.puzzle import Puzzle
from zoo.types import EvaluationSet, Prompt, Reward

# Seeds far apart: reasoning-gym draws entry i of a set from seed + i.
HELDOUT_SEED = 1 << 30


@dataclass(frozen=True)
class Puzzles:
    """One task of reasoning-gym: prompts, and the task's own scorer as the verifier.

    Training and held-out entries come from seeds far apart, and a held-out question that also
    occurs in training is left out.

    Raises:
        ConfigError: the package is absent, or the task is unknown.
        ValueError: a setting out of range.
    """

    task: str = "chain_sum"  # name in reasoning_gym
    options: dict[str, Any] | None = None  # of the task, for example {min_terms: 2, max_terms: 3}
    n_problems: int = 2000  # training prompts
    n_heldout: int = 200  # evaluation problems
    instruction: str = "End with a line that has #### in front of the final answer."
    max_new_tokens: int = 256  # a limit of new tokens that fits the answers
    data_seed: int = 0  # of the puzzles; independent of the run's seed

    def __post_init__(self) -> None:
        for key in ("n_problems", "n_heldout", "max_new_tokens"):
            if getattr(self, key) < 1:
                raise ValueError(f"data.{key} must be at least 1, got {getattr(self, key)}.")
        if not 0 <= self.data_seed < HELDOUT_SEED // 2:
            raise ValueError(
                f"data.data_seed must lie in 0 … {HELDOUT_SEED // 2}, got {self.data_seed}."
            )

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({"prompts"})

    def prompts(self) -> list[Prompt]:
        return self._made(self.data_seed, self.n_problems)

    def verifier(self) -> Reward:
        return Puzzle()

    def evaluation_sets(self) -> list[EvaluationSet]:
        known = {p.columns["question"] for p in self.prompts()}
        made = self._made(self.data_seed + HELDOUT_SEED, self.n_heldout)
        heldout = tuple(p for p in made if p.columns["question"] not in known)
        return [
            EvaluationSet("heldout", "accuracy", heldout, self.verifier()),
            EvaluationSet("guard", "perplexity", texts=PLAIN_TEXTS),
        ]

    def _made(self, seed: int, count: int) -> list[Prompt]:
        entries = created(self.task, seed, count, tuple(sorted((self.options or {}).items())))
        suffix = f"\n{self.instruction}" if self.instruction else ""
        return [
            Prompt(
                id=f"{self.task}/{seed}/{index}",
                messages=({"role": "user", "content": entry["question"].rstrip() + suffix},),
                columns={
                    "question": entry["question"],
                    "answer": entry["answer"],
                    "task": self.task,
                    "entry": entry,
                },
            )
            for index, entry in enumerate(entries)
        ]


@functools.lru_cache(maxsize=8)
def created(task: str, seed: int, count: int, options: tuple[tuple[str, Any], ...]) -> Any:
    """`count` entries of a task.

    Raises:
        ConfigError: no package, no such task, or options that it refuses.
    """
    gym = reasoning_gym()
    from zoo.instantiate import did_you_mean

    names = gym.factory.DATASETS
    if task not in names:
        raise ConfigError(
            f"data.task={task} is no task of reasoning-gym.{did_you_mean(task, names)} It has "
            f"{len(names)}, such as {', '.join(list(names)[:5])}."
        )
    try:
        made = gym.create_dataset(task, size=count, seed=seed, **dict(options))
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"data.options do not fit data.task={task}: {error}") from error
    return [made[index] for index in range(count)]


def reasoning_gym() -> Any:
    """The package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import reasoning_gym as gym
        import reasoning_gym.factory
    except ImportError:
        raise ConfigError(
            "data=puzzles needs the package reasoning-gym. Install it: "
            "pip install 'zoo-rl[puzzles]'."
        ) from None
    return gym
