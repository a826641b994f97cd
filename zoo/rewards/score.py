"""Ask a reward, and trust nothing that it says."""

from __future__ import annotations

import inspect
import math
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from zoo.config import ConfigError, OnError
from zoo.rewards.check import RewardError, check_output
from zoo.rewards.deadline import Alarm, LateError, within
from zoo.types import Completion, Prompt, Reward, RewardOutput

FAILED = "failed"  # reason of a row whose reward failed and was let off


@dataclass(frozen=True)
class Patience:
    """How long a reward may take, and what becomes of rows on which it fails."""

    seconds: float | None = 1800.0  # for the completions of a round together; None: for ever
    on_error: OnError = OnError.stop


PATIENCE = Patience()


def score(
    reward: Reward,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    patience: Patience = PATIENCE,
    name: str = "",
    rows: Sequence[int] = (),
) -> RewardOutput:
    """The checked output of `reward` for B completions of B prompts.

    After a failure each row is asked about alone: to name the guilty one, or, with
    `on_error=abstain`, to keep the others; those that fail get None and the reason `failed`.

    Args:
        reward: what scores.
        prompts: [B] one a completion.
        completions: [B].
        patience: its time, and what a failure means.
        name: of the reward in messages; default: its label, or its class.
        rows: [B] their numbers in messages; default: from 0.
    Raises:
        RewardError: the reward raised, did not come back in time, or its output is not one number
            or None for each completion; names the reward, the row and its text.
        ConfigError: the reward cannot be used with any row, whatever `patience` says.
    """
    name = name or getattr(reward, "label", "") or getattr(reward, "__name__", "")
    name = name or type(reward).__name__
    rows = rows or range(len(completions))
    asked = _Asked(reward, list(prompts), list(completions), name, patience, rows)
    try:
        return asked.about(0, len(completions))
    except BaseException as error:  # SystemExit, CancelledError, …: its failure, not the run's end
        if _goes_through(error):
            raise
        stops = patience.on_error is OnError.stop
        if stops and isinstance(error, RewardError):
            raise  # it names the row
        return asked.row_by_row(error, stops)


def fingerprint(rewards: Iterable[Any]) -> str:
    """The `fingerprint()` of those that have one: of files and models that settings point at."""
    found = [one.fingerprint() for one in rewards if hasattr(one, "fingerprint")]
    return "+".join(text for text in found if text)


@dataclass(frozen=True)
class _Asked:
    reward: Reward
    prompts: list[Prompt]
    completions: list[Completion]
    name: str
    patience: Patience
    rows: Sequence[int]

    def about(self, start: int, end: int) -> RewardOutput:
        # Copies: what it writes into a row's columns is not for the next step to read.
        prompts = [replace(p, columns=dict(p.columns)) for p in self.prompts[start:end]]
        completions = self.completions[start:end]
        with _settings_of_torch():
            output = within(self.patience.seconds, lambda: self.reward(prompts, completions), {})
        self._refuse_async(output)
        rows, asked = self.rows[start:end], self.prompts[start:end]
        return check_output(output, self.completions[start:end], self.name, rows, asked)

    def _refuse_async(self, output: Any) -> None:
        for one in (output, getattr(output, "total", None)):
            if inspect.isawaitable(one):
                getattr(one, "close", lambda: None)()  # or Python warns that nobody awaited it
                raise ConfigError(
                    f"reward {self.name} is async, and zoo calls rewards as plain functions. Make "
                    "it one that waits itself: def score(…): return asyncio.run(asks(…))."
                )

    def row_by_row(self, error: BaseException, stops: bool) -> RewardOutput:
        seconds = self.patience.seconds
        # Rows that hang cost a whole timeout each; two of them are paid for, not two hundred.
        ends = math.inf if seconds is None else time.monotonic() + 2 * seconds
        rows: list[RewardOutput] = []
        # A row alone still has the columns that others of its round have.
        columns = dict.fromkeys(name for prompt in self.prompts for name in prompt.columns)
        prompts = [replace(p, columns={**columns, **p.columns}) for p in self.prompts]
        alone = replace(self, prompts=prompts)
        for row in range(len(self.completions)):
            if time.monotonic() >= ends:
                break
            try:
                rows.append(alone.about(row, row + 1))
            except BaseException as failure:
                if _goes_through(failure):
                    raise
                if stops and isinstance(failure, RewardError):
                    raise
                if stops:
                    raise RewardError(self._told(failure, row)) from failure
                rows.append(RewardOutput([None], reasons=[FAILED]))
        if stops:  # no row fails by itself: the failure comes from the rows together
            raise RewardError(self._told(error, None)) from error
        rows += [RewardOutput([None], reasons=[FAILED])] * (len(self.completions) - len(rows))
        return _joined(rows)

    def _told(self, failure: BaseException, row: int | None) -> str:
        what = f"raised {_brief(failure)}"
        if isinstance(failure, LateError):
            what = f"gave {failure}"
        if row is None:
            first = self.completions[0].text if self.completions else ""
            rows = f"on {len(self.completions)} rows together, the first of which is {first[:80]!r}"
        else:
            rows = (
                f"at row {self.rows[row]} (prompt {self.prompts[row].id}), whose text is "
                f"{self.completions[row].text[:80]!r}"
            )
        return (
            f"reward {self.name} {what} {rows}. Correct it, return None for what cannot be scored, "
            "or set train.reward_on_error=abstain."
        ) + (" train.reward_timeout is its time." if isinstance(failure, LateError) else "")


@contextmanager
def _settings_of_torch() -> Iterator[None]:
    """Sets them back at the end: a reward may change them for itself, not for training."""
    import torch  # here, not at the top: rewards are chosen before it is needed

    def precision() -> str | None:
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:  # set by its newer, finer names
            return None

    def set_device(device: torch.device) -> None:
        torch.set_default_device(None if device.type == "cpu" else device)

    settings: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_default_device, set_device),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (precision, torch.set_float32_matmul_precision),
    ]
    before = [get() for get, _ in settings]
    try:
        yield
    finally:
        for (get, put), value in zip(settings, before, strict=True):
            if value is not None and get() != value:
                put(value)


def _goes_through(error: BaseException) -> bool:
    """Whether this is no failure of the reward: a deadline around it, a Ctrl-C, or the set-up.

    A KeyboardInterrupt is a Ctrl-C where the handler of a signal raised it. Python's own handler
    leaves no trace of that; a run has another one.
    """
    if not isinstance(error, KeyboardInterrupt):
        return isinstance(error, ConfigError | Alarm)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    if not hasattr(handlers[0], "__code__"):
        return True
    codes = [getattr(handler, "__code__", None) for handler in handlers]
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _brief(error: BaseException) -> str:
    """Its class and the beginning of its text, on one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # a class whose text cannot be had
        text = ""
    text = text if len(text) <= 200 else text[:199] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _joined(rows: Sequence[RewardOutput]) -> RewardOutput:
    names = dict.fromkeys(name for row in rows for name in row.components)
    return RewardOutput(
        total=[value for row in rows for value in row.total],
        components={name: [row.components.get(name, [None])[0] for row in rows] for name in names},
        reasons=[row.reasons[0] if row.reasons else "" for row in rows],
    )
