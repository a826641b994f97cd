"""Ask a reward, and trust nothing that it says."""

from __future__ import annotations

import copy
import inspect
import math
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from zoo.config import ConfigError, OnError, settle_choices
from zoo.rewards.check import RewardError, check_output
from zoo.rewards.deadline import Alarm, LateError, within
from zoo.types import Completion, Prompt, Reward, RewardOutput


class _Mark(str):
    """A text told from equal ones by identity: a reward's own reason may read `failed`, too."""

    __slots__ = ()


FAILED = _Mark("failed")  # reason of a row whose reward failed and was let off; compare with `is`


@dataclass(frozen=True)
class Patience:
    """How long a reward may take, and what becomes of rows on which it fails."""

    seconds: float | None = 1800.0  # for the completions of a round together; None: for ever
    on_error: OnError = OnError.stop
    of_run: bool = True  # the two are settings of a run, which a message may point at

    def __post_init__(self) -> None:
        settle_choices(self, "patience")


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

    After a failure each row is asked about alone, to find the guilty ones. With `on_error=abstain`
    those get None and the reason `failed`, and the others are asked about together once more,
    because a reward may compare them; where that fails, too, they are left unscored likewise.

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
    name = name or name_of(reward)
    rows = rows or range(len(completions))
    asked = _Asked(reward, list(prompts), list(completions), name, patience, rows)
    try:
        return asked.about(range(len(completions)))
    except BaseException as error:  # SystemExit, CancelledError, …: its failure, not the run's end
        if _goes_through(error):
            raise
        stops = patience.on_error is OnError.stop
        if stops and isinstance(error, RewardError):
            raise  # it names the row
        return asked.row_by_row(error, stops)


def failures(output: RewardOutput) -> int:
    """On how many rows the reward failed; a reason of its own that reads `failed` is none."""
    return sum(reason is FAILED for reason in output.reasons)


def name_of(reward: Any) -> str:
    """A reward's name in messages: its label or name where that is a text, or its class."""
    names = [getattr(reward, attribute, None) for attribute in ("label", "__name__")]
    found = [name for name in names if name and isinstance(name, str)]
    return found[0] if found else type(reward).__name__


def module_of(reward: Any) -> Any:
    """The loaded model of a learned reward, or None; anybody's `module` may be something else."""
    from torch import nn  # here, not at the top: rewards are chosen before it is needed

    module = getattr(reward, "module", None)
    return module if isinstance(module, nn.Module) else None


def load(reward: Any, device: Any) -> bool:
    """Call the reward's `load(device)`; whether it has one.

    Raises:
        ConfigError: it raised; names the reward.
    """
    own = getattr(reward, "load", None)
    if not callable(own):  # a setting that happens to have the name
        return False
    with _named(reward, "load(device)"):
        own(device)
    return True


def fingerprint(rewards: Iterable[Any]) -> str:
    """The `fingerprint()` of those that have one: of files and models that settings point at.

    Raises:
        ConfigError: one raised, or returned no text; names the reward.
    """
    texts = []
    for reward in rewards:
        own = getattr(reward, "fingerprint", None)
        if not callable(own):
            continue
        with _named(reward, "fingerprint()"):
            text = own()
        if not isinstance(text, str | None):
            raise ConfigError(
                f"reward {name_of(reward)}: fingerprint() returned {text!r:.80}, not a text. "
                "Return a short hash of the files that it reads, or leave the method out."
            )
        texts.append(text)
    return "+".join(text for text in texts if text)


@contextmanager
def _named(reward: Any, what: str) -> Iterator[None]:
    """Gives the reward's name to an error of its own; zoo's, and of memory, say enough."""
    import torch

    try:
        yield
    except (ConfigError, RewardError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            f"reward {name_of(reward)}: {what} raised {_brief(error)}. Correct it, or its settings."
        ) from error


@dataclass(frozen=True)
class _Asked:
    reward: Reward
    prompts: list[Prompt]
    completions: list[Completion]
    name: str
    patience: Patience
    rows: Sequence[int]

    def about(self, places: Sequence[int]) -> RewardOutput:
        asked = [self.prompts[place] for place in places]
        completions = [self.completions[place] for place in places]
        # Copies: what it writes into a row is not for another row, or the next step, to read.
        prompts = [replace(p, messages=_copy(p.messages), columns=_copy(p.columns)) for p in asked]
        given = list(completions)
        name, way_out = f"reward {self.name}", "Let it swallow no BaseException"
        if self.patience.of_run:
            way_out += (
                ", or give it more time (train.reward_timeout); a run goes on with the same command"
            )

        def call() -> Any:
            return self.reward(prompts, given)

        with _settings_of_the_process():
            output = within(self.patience.seconds, call, {}, name, f"{way_out}.")
        self._refuse_async(output)
        rows = [self.rows[place] for place in places]
        return check_output(output, completions, self.name, rows, asked)

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
        good: list[int] = []
        # A row alone still has the columns that others of its round have.
        columns = dict.fromkeys(name for prompt in self.prompts for name in prompt.columns)
        prompts = [replace(p, columns={**columns, **p.columns}) for p in self.prompts]
        alone = replace(self, prompts=prompts)
        for row in range(len(self.completions)):
            if time.monotonic() >= ends:
                break
            try:
                alone.about([row])
                good.append(row)
            except BaseException as failure:
                if _goes_through(failure):
                    raise
                if stops and isinstance(failure, RewardError):
                    raise
                if stops:
                    raise RewardError(self._told(failure, row)) from failure
        if stops:  # no row fails by itself: the failure comes from the rows together
            raise RewardError(self._told(error, None)) from error
        return alone.without_the_others(good, error)

    def without_the_others(self, good: Sequence[int], failure: BaseException) -> RewardOutput:
        """The scores of the rows that do not fail, and None for the others.

        What a row got alone is no score: it may have been compared with nothing but itself.

        Args:
            failure: of all rows together; where none fails alone they are not asked again.
        """
        output, fails = RewardOutput([]), len(good) == len(self.completions)
        try:
            output = self.about(good) if good and not fails else output
        except BaseException as another:
            if _goes_through(another):
                raise
            failure, fails = another, True
        if fails:
            warnings.warn(
                f"reward {self.name} fails on rows together that do not fail alone "
                f"({_brief(failure)}). What it gave them alone may be other scores, so all "
                f"{len(self.completions)} of the round are left unscored. Return None for a row "
                "that cannot be scored instead of raising.",
                stacklevel=2,
            )
            good = []
        return _spread(output, good, len(self.completions))

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
        # A sentence that ends does not go on with the place.
        placed = f"{rows}, {what}" if what.endswith(".") else f"{what} {rows}."
        told = f"reward {self.name} {placed} Correct it, "
        if not self.patience.of_run:
            return f"{told}or return None for what cannot be scored."
        told += "return None for what cannot be scored, or set train.reward_on_error=abstain."
        late = isinstance(failure, LateError)
        return f"{told} train.reward_timeout is its time." if late else told


@contextmanager
def _settings_of_the_process() -> Iterator[None]:
    """Sets them back at the end: a reward may change them for itself, not for training."""
    import torch  # here, not at the top: rewards are chosen before it is needed

    def folder() -> str | None:
        try:
            return os.getcwd()
        except OSError:  # removed
            return None

    def go_back(path: str) -> None:  # paths in settings are relative to it
        try:
            os.chdir(path)
        except OSError as error:
            raise ConfigError(
                f"a reward left the working directory {path}, which is gone ({error.strerror}). "
                "Relative paths of the settings begin there: let the reward keep it."
            ) from error

    def precision() -> str | None:
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:  # set by its newer, finer names
            return None

    def set_device(device: torch.device) -> None:
        torch.set_default_device(None if device.type == "cpu" else device)

    def autocast_depth() -> int:  # while it is not 0, casted weights are kept from step to step
        torch.autocast_increment_nesting()
        return torch.autocast_decrement_nesting()

    def set_autocast_depth(depth: int) -> None:
        for _ in range(autocast_depth() - depth):
            torch.autocast_decrement_nesting()
        if depth == 0:
            torch.clear_autocast_cache()

    settings: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_default_device, set_device),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (precision, torch.set_float32_matmul_precision),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        (autocast_depth, set_autocast_depth),
    ]
    for kind in ("cpu", "cuda"):
        settings += [
            (partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)),
            (partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)),
        ]
    cuda = torch.backends.cuda  # which attention a model may use, on every device
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        settings.append((getattr(cuda, f"{kind}_sdp_enabled"), getattr(cuda, f"enable_{kind}_sdp")))
    settings.append((folder, go_back))  # last: it may fail
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


def _copy(value: Any) -> Any:
    """A deep copy as far as there is one: not of an open file, a lock, ….

    Plain containers are copied here, so that what cannot be copied costs no sibling its copy.
    """
    if value is None or isinstance(value, str | int | float | bool | bytes):
        return value
    if type(value) is dict:
        return {key: _copy(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(one) for one in value)
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def _spread(output: RewardOutput, rows: Sequence[int], count: int) -> RewardOutput:
    """The output of `rows` as that of all `count`; the others failed."""

    def put(values: Sequence[Any], empty: Any) -> list[Any]:
        found = dict(zip(rows, values, strict=True))
        return [found.get(row, empty) for row in range(count)]

    return RewardOutput(
        total=put(output.total, None),
        components={name: put(values, None) for name, values in output.components.items()},
        reasons=put(output.reasons or [""] * len(rows), FAILED),
    )
