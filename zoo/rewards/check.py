"""What a reward returns, checked before training sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from zoo.config import ConfigError
from zoo.types import Completion, Prompt, RewardOutput

Scores = list[float | None]
# Rewards become float32, and a group's deviation squares them: 1e19² is already infinite there.
LARGEST = 1e18
# Metrics reward/NAME of the whole reward, which no component may be called.
RESERVED = ("total", "std", "abstained", "failed")

REASONS = 32  # distinct reasons that get a metric reason/NAME each; the others are reason/other


class RewardError(ValueError):
    """A reward that cannot be used: its name, the row, the text, and what to do."""


def reason_name(reason: str) -> str:
    """The reason as a metric's name: its beginning, on one line."""
    return " ".join(reason.split())[:80]


def wrong_name(name: Any) -> str:
    """What is wrong with the name of a component and what to do; "" where nothing is."""
    if name in RESERVED:
        return (
            f"{_short(name)}, whose curve would be that of the whole reward "
            f"({', '.join(f'reward/{one}' for one in RESERVED)}). Try {name}_1."
        )
    odd = not isinstance(name, str) or not name.isprintable() or "/" in name
    if odd or not name or name != name.strip():
        return (
            f"{_short(name)}, which cannot name the curve reward/NAME. Use a word without slashes, "
            "line breaks and blanks around it."
        )
    return ""


def check_scores(
    values: Any,
    completions: Sequence[Completion],
    name: str,
    rows: Sequence[int] = (),
    prompts: Sequence[Prompt] = (),
) -> Scores:
    """One finite number or None for each completion, as plain floats.

    Nothing is broadcast: a list of one score for four completions is an error, because it would
    pay all of them alike.

    Args:
        values: [B] what the reward returned: a list, tuple, array or tensor.
        completions: [B] what it was asked about.
        name: of the reward or component, for the message.
        rows: [B] their numbers, for the message; default: from 0.
        prompts: [B] theirs, for the message.
    Raises:
        RewardError: another length, or a value that is neither None nor a finite number of
            float32 (at most 1e18, so that its square is finite too).
    """
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise RewardError(
            f"reward {name} returned {_short(values)} ({type(values).__name__}) for "
            f"{len(completions)} completions. Return a list with one number or None for each."
        )
    if len(values) != len(completions):
        raise RewardError(
            f"reward {name} returned {len(values)} scores for {len(completions)} completions. "
            "Return exactly one for each, None where a completion cannot be scored."
        )
    numbers = rows or range(len(completions))
    asked = [f" to prompt {prompt.id}" for prompt in prompts] or [""] * len(completions)
    return [
        _number(value, row, completion.text, prompt, name)
        for row, value, completion, prompt in zip(numbers, values, completions, asked, strict=True)
    ]


def check_output(
    output: Any,
    completions: Sequence[Completion],
    name: str,
    rows: Sequence[int] = (),
    prompts: Sequence[Prompt] = (),
) -> RewardOutput:
    """A reward's whole output: totals, components and reasons, one for each completion.

    Args:
        output: what it returned.
        completions: [B] what it was asked about.
        name: of the reward, for the message.
        rows: [B] the completions' numbers, for the message; default: from 0.
        prompts: [B] theirs, for the message.
    Raises:
        RewardError: not a RewardOutput, or any list of it is wrong (see `check_scores`).
        ConfigError: a component has a reserved name.
    """
    if not isinstance(output, RewardOutput):
        raise RewardError(
            f"reward {name} returned {_short(output)} ({type(output).__name__}), not a "
            "RewardOutput. Wrap a plain function in zoo.rewards.function.Function."
        )
    if not isinstance(output.components, Mapping):
        raise RewardError(
            f"reward {name} gave components {_short(output.components)}, not a mapping of name to "
            "scores. Leave them out, or give one list of scores for each name."
        )
    for key in output.components:
        if wrong := wrong_name(key):
            raise ConfigError(f"reward {name} gave a component {wrong}")
    reasons = output.reasons
    if not isinstance(reasons, list | tuple):
        raise RewardError(
            f"reward {name} gave reasons {_short(reasons)}, not a list. Give one text for each "
            'completion ("" for none), or none at all.'
        )
    if len(reasons) not in (0, len(completions)) or not all(isinstance(r, str) for r in reasons):
        raise RewardError(
            f"reward {name} gave {len(reasons)} reasons for {len(completions)} completions. "
            'Give one text for each ("" for none), or none at all.'
        )
    return RewardOutput(
        total=check_scores(output.total, completions, name, rows, prompts),
        components={
            str(key): check_scores(values, completions, f"{name}/{key}", rows, prompts)
            for key, values in output.components.items()
        },
        reasons=[_writable(reason) for reason in reasons],
    )


def _number(value: Any, row: int, text: str, prompt: str, name: str) -> float | None:
    if value is None:
        return None
    if hasattr(value, "item") and getattr(value, "size", 1) != 0:  # a scalar of numpy or torch
        with contextlib.suppress(ValueError, RuntimeError):  # an array of several: refused below
            value = value.item()
    if isinstance(value, Real):
        with contextlib.suppress(OverflowError):  # an integer beyond every float
            number = float(value)
            if abs(number) <= LARGEST:  # NaN is not
                return number
    raise RewardError(
        f"reward {name} gave {_short(value)} ({type(value).__name__}) to row {row}, whose text is "
        f"{_short(text)}{prompt}. Return a finite number (at most {LARGEST:g}), or None where it "
        "cannot be scored."
    )


def _writable(reason: str) -> str:
    """The reason with half characters spelled out, which no file could hold; else itself."""
    try:
        reason.encode()
    except UnicodeEncodeError:
        return reason.encode(errors="backslashreplace").decode()
    return reason


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # whatever a class of the user's raises
        text = f"<a {type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= 80 else text[:77] + "…"
