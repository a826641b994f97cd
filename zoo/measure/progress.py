"""Progress of a run: a live bar on a terminal, plain lines elsewhere, one interface."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

SECONDS_BETWEEN_LINES = 3.0
STEPS_FOR_PACE = 20  # the remaining time follows the pace of so many last steps

Advance = Callable[[int], None]


class Display(Protocol):
    """What a run shows while it works."""

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show that `step` (1-based) is done."""
        ...

    def accuracy(self, value: float) -> None:
        """Show the last held-out accuracy from now on."""
        ...

    def task(self, name: str, total: int | None = None) -> Any:
        """A context in which a part runs ("evaluating heldout"); yields `advance(n)`."""
        ...

    def message(self, text: str) -> None:
        """A line that stays."""
        ...

    def close(self) -> None: ...


def display(
    total_steps: int,
    title: str,
    *,
    first_step: int = 0,
    enabled: bool = True,
    stream: TextIO | None = None,
) -> Display:
    """The display that fits `stream`: a live bar on a terminal, otherwise plain lines.

    A process whose output is a pipe or a file (a job of a sweep) prints plain lines.

    Args:
        total_steps: steps of the whole run.
        title: the run's name.
        first_step: steps done before this process started (a resumed run).
        enabled: False shows messages only.
        stream: where to write; standard output.
    """
    stream = sys.stdout if stream is None else stream
    if stream is None:  # Python has none where there is no console
        return Silent()
    target = cast(TextIO, Courtesy(stream))
    status = Status(total_steps, first_step)
    if not enabled:
        return Lines(status, title, target, steps=False)
    console = Console(file=target, highlight=False)
    if target.isatty() and not console.is_dumb_terminal:
        return Live(status, title, console)
    return Lines(status, title, target)


class Courtesy:
    """A stream that drops what it cannot write: what is shown is no part of a run.

    The reader may leave (`zoo … | head`), the terminal be closed, the disk under a log be full.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.failed: OSError | ValueError | None = None  # the last failure

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError) as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self, error: OSError | ValueError) -> None:
        """Empty the stream's buffer into nothing: left there, it would fail again at the exit."""
        self.failed = error
        with suppress(OSError, ValueError):  # streams of no file have no buffer
            number, nothing = self._stream.fileno(), os.open(os.devnull, os.O_WRONLY)
            before = os.dup(number)
            try:
                os.dup2(nothing, number)
                self._stream.flush()
            finally:
                os.dup2(before, number)
                os.close(before)
                os.close(nothing)


class Status:
    """What there is to say about a run: figures of the last step, and the time that remains."""

    def __init__(self, total_steps: int, first_step: int = 0):
        self.total_steps = total_steps
        self.current = first_step
        self.held_out: float | None = None
        self.figures: dict[str, str] = {}
        self._times: deque[tuple[int, float]] = deque(
            [(first_step, time.monotonic())], maxlen=STEPS_FOR_PACE + 1
        )
        self._stepped = False

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.current = step
        took = metrics.get("seconds/step")
        if not self._stepped and isinstance(took, int | float):
            # Loading and the first evaluation are no part of the pace.
            self._times[0] = (step - 1, time.monotonic() - took)
        self._stepped = True
        self._times.append((step, time.monotonic()))
        self.figures = {}
        losses = [name for name in metrics if name.startswith("loss/")]
        if isinstance(reward := metrics.get("reward/total"), int | float):
            self.figures["reward"] = f"{reward:.3f}"
        elif losses and isinstance(loss := metrics[losses[0]], int | float):
            self.figures["loss"] = f"{loss:.3f}"
        if isinstance(pace := metrics.get("tokens_per_second"), int | float):
            self.figures["speed"] = f"{pace:.0f} tok/s"

    def remaining(self) -> float | None:
        """Seconds to the last step at the pace of the last steps; None before the first step."""
        (step, then), (last, now) = self._times[0], self._times[-1]
        if last <= step:
            return None
        return (now - then) / (last - step) * (self.total_steps - self.current)

    def parts(self) -> list[str]:
        words = []
        for name in ("reward", "loss"):
            if name in self.figures:
                words.append(f"{name} {self.figures[name]}")
        if self.held_out is not None:
            words.append(f"acc {self.held_out:.3f}")
        if "speed" in self.figures:
            words.append(self.figures["speed"])
        seconds = self.remaining()
        if seconds is not None:
            words.append(f"eta {clock(seconds)}")
        return words


class Lines:
    """Plain lines: at most one every few seconds, and always the last step's."""

    def __init__(self, status: Status, title: str, stream: TextIO, steps: bool = True):
        self._status = status
        self._stream = stream
        self._steps = steps
        self._printed = float("-inf")
        if steps:
            self.message(title)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._status.step(step, metrics)
        total = self._status.total_steps
        if self._steps and (self._due() or step >= total):
            self._print(" ".join([f"step {step}/{total}", *self._status.parts()]))

    def accuracy(self, value: float) -> None:
        self._status.held_out = value

    @contextmanager
    def task(self, name: str, total: int | None = None) -> Iterator[Advance]:
        done = 0

        def advance(n: int = 1) -> None:
            nonlocal done
            done += n
            if self._steps and self._due():
                self._print(f"{name} {done}" + (f"/{total}" if total else ""))

        yield advance

    def message(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass

    def _due(self) -> bool:
        return time.monotonic() - self._printed >= SECONDS_BETWEEN_LINES

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        self.message(text)


class Silent:
    """Shows nothing: the display of all processes but the main one, and without any output."""

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        pass

    def accuracy(self, value: float) -> None:
        pass

    @contextmanager
    def task(self, name: str, total: int | None = None) -> Iterator[Advance]:
        yield lambda n: None

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class Live:
    """One bar for the run, and transient ones for its parts."""

    def __init__(self, status: Status, title: str, console: Console):
        self._status = status
        # Two refreshes a second: the drawing thread shares the interpreter with the training loop.
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[text]}"),
            console=console,
            refresh_per_second=2,
        )
        self._run: TaskID = self._bars.add_task(
            _short(title), total=status.total_steps, completed=status.current, text=self._text()
        )
        self._bars.start()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._status.step(step, metrics)
        self._bars.update(self._run, completed=step, text=self._text())

    def accuracy(self, value: float) -> None:
        self._status.held_out = value
        self._bars.update(self._run, text=self._text())

    @contextmanager
    def task(self, name: str, total: int | None = None) -> Iterator[Advance]:
        started = time.monotonic()
        done = 0
        bar = self._bars.add_task(f"  {_plain(name)}", total=total, text=f"0/{total or '?'}")

        def advance(n: int = 1) -> None:
            nonlocal done
            done += n
            text = f"{done}/{total or '?'}"
            if total and done:
                left = (time.monotonic() - started) / done * max(total - done, 0)
                text += f" eta {clock(left)}"
            self._bars.update(bar, completed=done, text=text)

        try:
            yield advance
        finally:
            self._bars.remove_task(bar)

    def message(self, text: str) -> None:
        self._bars.console.print(Text(text))

    def close(self) -> None:
        self._bars.stop()

    def _text(self) -> str:
        total = self._status.total_steps
        words = [f"{self._status.current}/{total}", *self._status.parts()]
        return _plain(" · ".join(words))


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _short(title: str) -> str:
    """`default/grpo-97a55af5/seed_0` as `grpo seed 0`: 80 columns have to hold the rest too."""
    *_, name, seed = ["", *title.split("/")]
    return _plain(f"{name.rsplit('-', 1)[0]} {seed.replace('_', ' ')}".strip())


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # rich reads [word] as a style
