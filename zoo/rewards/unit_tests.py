"""A program that passes its tests: the reward for code, run in a sandbox."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from zoo.rewards.check import RewardError
from zoo.types import Completion, Prompt, RewardOutput


@dataclass(frozen=True)
class UnitTests:
    """1.0 when a program passes all its tests, else 0.0, with the reason.

    The tests are columns of the prompt (see `zoo.rewards.code.CodeReward`): `test_list` as in
    MBPP, `test` with `entry_point` as in HumanEval, or `tests` with `call` and `expected` or with
    `stdin` and `stdout`. A prompt that begins the program, as in HumanEval, is run with it. A
    program that could not be run at all is an abstention.

    Raises:
        ValueError: a setting out of range.
        RewardError: a prompt without tests, or with ones that are no tests; names it.
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
        from zoo.rewards.code import CodeReward, CodeVerdict, run_many

        runner = CodeReward(self.timeout, self.workers, self.strict)

        def verdict(prompt: Prompt, completion: Completion) -> CodeVerdict:
            row = dict(prompt.columns)
            if not isinstance(row.get("prompt"), str):  # data=jsonl keeps it out of the columns
                row["prompt"] = _text(prompt)
            try:
                return runner.verdict(completion.text, row)
            except (ValueError, TypeError, AttributeError, LookupError) as error:
                own = isinstance(error, ValueError)  # the others: 5 where a list is due
                told = str(error) if own else f"{type(error).__name__}: {error}."
                raise RewardError(
                    f"reward unit_tests cannot use the tests of prompt {prompt.id}: "
                    f"{told} Correct that row of the data, or leave it out."
                ) from error

        pairs = zip(prompts, completions, strict=True)
        verdicts = run_many([partial(verdict, *pair) for pair in pairs], self.workers)
        scores = [v.score if v.score is None or not self.partial else v.fraction for v in verdicts]
        return RewardOutput(scores, {"tests": list(scores)}, [v.reason for v in verdicts])


def _text(prompt: Prompt) -> str:
    """What was asked, without the turns and the template around it."""
    if prompt.text is not None:
        return prompt.text
    return prompt.messages[-1]["content"] if prompt.messages else ""
