"""A program that passes its tests: the reward for code, run in a sandbox."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.types import Completion, Prompt, RewardOutput


@dataclass(frozen=True)
class UnitTests:
    """1.0 when a program passes all its tests, else 0.0, with the reason.

    The tests are columns of the prompt (see `zoo.rewards.code.CodeReward`): `test_list` as in
    MBPP, `test` with `entry_point` as in HumanEval, or `tests` with `call` and `expected` or with
    `stdin` and `stdout`. A program that could not be run at all is an abstention.

    Raises:
        ValueError: a setting out of range, or a prompt without tests.
    """

    timeout: float = 5.0  # seconds of wall clock for one program
    workers: int = 0  # programs at once; 0: one for each core
    strict: bool = False  # True: refuse to run without isolation by namespaces
    partial: bool = False  # True: the share of passed tests instead of all or nothing

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ValueError(f"reward.timeout must be above 0 seconds, got {self.timeout}. Try 5.")
        if self.workers < 0:
            raise ValueError(f"reward.workers must be at least 0, got {self.workers}. Try 0.")

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        from zoo.rewards.code import CodeReward

        runner = CodeReward(self.timeout, self.workers, self.strict)
        verdicts = runner.verdicts([c.text for c in completions], [p.columns for p in prompts])
        scores = [v.score if v.score is None or not self.partial else v.fraction for v in verdicts]
        return RewardOutput(scores, {"tests": list(scores)}, [v.reason for v in verdicts])
