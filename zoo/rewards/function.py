"""A plain function as a reward: `fn(prompts, completions, **columns) -> list of scores`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.config import ConfigError
from zoo.data.tokenize import plain_text
from zoo.rewards.check import RESERVED
from zoo.types import Completion, Prompt, RewardOutput


@dataclass(frozen=True)
class Function:
    """Calls a user's function with texts; `score` checks what comes back.

    The function gets `prompts` and `completions` (lists of B texts) and, by name, the columns of
    the prompts and `truncated`, `completion_ids`, `prompt_ids`: lists of B as well, None where a
    prompt lacks the column. It may leave out those that it does not name, or take `**columns`. It
    returns B numbers, None for what cannot be scored, or a RewardOutput.

    Raises:
        ValueError: no function, or (when called) a ConfigError for a column that it asks for and
            the data lacks.
    """

    fn: Any = None  # a function, or its dotted path such as mine.score

    def __post_init__(self) -> None:
        if self.fn is None:
            raise ValueError(
                "reward.fn is not set: name the function that scores. Try reward.fn=mine.score."
            )
        try:
            self._function()
        except ConfigError as error:  # as an error of a setting, which the builder gives its place
            raise ValueError(str(error)) from error

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
        function = self._function()
        name = getattr(getattr(function, "func", function), "__name__", None)  # of a partial: its
        if not isinstance(name, str):
            name = self.fn if isinstance(self.fn, str) else type(function).__name__
        return f"fn_{name}" if name in RESERVED else name

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        function = self._function()
        returned = function(**_arguments(function, prompts, completions, self.label))
        if isinstance(returned, RewardOutput):
            return returned
        return RewardOutput(total=returned, components={self.label: returned})


def _listed(ids: Sequence[int]) -> Sequence[int]:
    return list(ids) if type(ids) is tuple else ids  # a stand-in tells who reads it


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
    ours: dict[str, list[Any]] = {
        "truncated": [completion.truncated for completion in completions],
        "completion_ids": [_listed(completion.token_ids) for completion in completions],
        "prompt_ids": [prompt.id for prompt in prompts],
        "prompts": [plain_text(prompt) for prompt in prompts],
        "completions": [completion.text for completion in completions],
    }
    if hidden := sorted(columns & ours.keys()):
        warnings.warn(  # shown once: the text is always the same
            f"reward {label}: the data have columns {', '.join(hidden)}, and zoo's own arguments "
            "of these names hide them from the function. Rename them in the data where it is to "
            "read them.",
            stacklevel=2,
        )
    offered |= ours
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

            raise ConfigError(
                f"reward {label} asks for {parameter.name!r}, which the data does not have."
                f"{did_you_mean(parameter.name, offered)} It has: {', '.join(sorted(offered))}."
            )
    return taken
