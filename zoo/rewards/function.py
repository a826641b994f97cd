"""A plain function as a reward: `fn(prompts, completions, **columns) -> list of scores`."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.config import OnError
from zoo.data.tokenize import plain_text
from zoo.rewards.check import RewardError, Scores, check_output, check_scores
from zoo.rewards.deadline import within
from zoo.types import Completion, Prompt, RewardOutput


@dataclass(frozen=True)
class Function:
    """Calls a user's function with texts, and checks what comes back.

    The function gets `prompts` and `completions` (lists of B texts) and, by name, the columns of
    the prompts and `truncated`, `completion_ids`, `prompt_ids`: lists of B as well, None where a
    prompt lacks the column. It may leave out those that it does not name, or take `**columns`. It
    returns B numbers, None for what cannot be scored, or a RewardOutput.

    A failure is an exception, `timeout` seconds without an answer, or anything else returned.

    Raises:
        ValueError: no function, one that cannot be called this way, or (when called) a
            RewardError that names the function, the row and its text.
    """

    fn: Any = None  # a function, or its dotted path such as mine.score
    on_error: OnError = OnError.stop  # abstain: rows that fail are left unscored
    timeout: float | None = 300.0  # seconds for the rows of a round together; null: wait for ever

    def __post_init__(self) -> None:
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise ValueError(
                f"reward.timeout must be above 0 seconds or null, got {self.timeout}. Leave it out "
                "for the default."
            )
        if self.fn is None:
            raise ValueError(
                "reward.fn is not set: name the function that scores. Try reward.fn=mine.score."
            )
        self._function()

    def _function(self) -> Callable[..., Any]:
        if isinstance(self.fn, str):
            from zoo.instantiate import locate  # here, not at the top: it imports every group

            return locate(self.fn, "reward.fn")
        if not callable(self.fn):
            raise ValueError(
                f"reward.fn must be a function or its dotted path, got {self.fn!r}. "
                "Try reward.fn=mine.score."
            )
        return self.fn

    @property
    def label(self) -> str:
        return getattr(self._function(), "__name__", str(self.fn))

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        function = self._function()
        arguments = _arguments(function, prompts, completions, self.label)
        try:
            returned = within(self.timeout, function, arguments)
            if isinstance(returned, RewardOutput):
                return check_output(returned, completions, self.label)
            scores = check_scores(returned, completions, self.label)
        # SystemExit too: a function that calls exit() would end the run as if all were well.
        except (Exception, SystemExit) as error:
            if isinstance(error, RewardError) and self.on_error is OnError.stop:
                raise  # what it returned; the message names the row
            scores = self._row_by_row(function, arguments, completions, error)
        return RewardOutput(total=scores, components={self.label: list(scores)})

    def _row_by_row(
        self,
        function: Callable[..., Any],
        arguments: dict[str, list[Any]],
        completions: Sequence[Completion],
        error: BaseException,
    ) -> Scores:
        """After a failure: each row alone, to name the guilty one or to save the others."""
        scores: Scores = []
        # Rows that hang cost a whole timeout each; two of them are paid for, not two hundred.
        ends = math.inf if self.timeout is None else time.monotonic() + 2 * self.timeout
        for row, completion in enumerate(completions):
            single = {name: values[row : row + 1] for name, values in arguments.items()}
            if time.monotonic() >= ends:
                if self.on_error is OnError.stop:
                    break
                scores.append(None)
                continue
            try:
                returned = within(self.timeout, function, single)
                if isinstance(returned, RewardOutput):
                    returned = returned.total
                scores += check_scores(returned, [completion], self.label, first_row=row)
            except (Exception, SystemExit) as failure:
                if isinstance(failure, RewardError) and self.on_error is OnError.stop:
                    raise
                if self.on_error is OnError.stop:
                    raise RewardError(
                        f"reward {self.label} raised {type(failure).__name__}: {failure} at row "
                        f"{row}, whose text is {completion.text[:80]!r}. Correct it, return None "
                        "for what cannot be scored, or set reward.on_error=abstain."
                    ) from failure
                scores.append(None)
        if self.on_error is OnError.stop:
            # No row fails by itself: the failure comes from the rows together.
            raise RewardError(
                f"reward {self.label} raised {type(error).__name__}: {error} on {len(completions)} "
                f"rows together, the first of which is {completions[0].text[:80]!r}. Correct it, "
                "or set reward.on_error=abstain to score rows one by one."
            ) from error
        return scores


def _arguments(
    function: Callable[..., Any],
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    label: str,
) -> dict[str, list[Any]]:
    """What the function may be given, cut down to what it takes."""
    columns = {name for prompt in prompts for name in prompt.columns}
    offered: dict[str, list[Any]] = {
        name: [prompt.columns.get(name) for prompt in prompts] for name in sorted(columns)
    }
    offered |= {
        "truncated": [completion.truncated for completion in completions],
        "completion_ids": [list(completion.token_ids) for completion in completions],
        "prompt_ids": [prompt.id for prompt in prompts],
        "prompts": [plain_text(prompt) for prompt in prompts],
        "completions": [completion.text for completion in completions],
    }
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    taken = {}
    for parameter in parameters:
        if parameter.name in offered:
            taken[parameter.name] = offered[parameter.name]
        elif (
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        ):
            from zoo.instantiate import did_you_mean

            raise RewardError(
                f"reward {label} asks for {parameter.name!r}, which the data does not have."
                f"{did_you_mean(parameter.name, offered)} It has: {', '.join(sorted(offered))}."
            )
    return taken
