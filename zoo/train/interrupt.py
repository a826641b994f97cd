"""Ctrl-C and SIGTERM: the run ends where its state is whole, and is saved there."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from zoo.distributed import gathered, is_distributed, is_main

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A launcher passes on the Ctrl-C that the terminal has sent to its processes already.
SAME_SIGNAL_SECONDS = 2.0


class Interrupt:
    """While it is entered, the first signal asks the run to end and the second one ends it.

    The first is answered at once by KeyboardInterrupt where nothing would be left half done
    (`at_once`), else at the end of the step (`due`). With several processes it is always the end
    of the step, where all of them agree. Outside the main thread of a program signals stay as they
    were.
    """

    def __init__(self) -> None:
        self.asked = ""  # the signal, once there was one
        self.killed = False  # by a second one: nothing may be saved
        self.finished = False  # everything is saved; what is left to do takes a moment
        self._when = 0.0
        self._now = True  # nothing is worth saving before `begin`
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    def begin(self) -> None:
        """From here on there is something to save."""
        self._now = False

    def due(self) -> bool:
        """Whether any process was asked to end; all processes must ask together."""
        asked = [name for name in gathered(self.asked) if name]
        self.asked = self.asked or next(iter(asked), "")
        return bool(asked)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A region that may be left at any place, because it changes nothing that is saved."""
        if is_distributed():
            yield
            return
        self._now = True
        try:
            if self.asked:
                raise KeyboardInterrupt
            yield
        finally:
            self._now = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        if os.getpid() != self._process:  # forked by a reward, say: it ends as any process does
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        now = time.monotonic()
        if self.asked:
            if is_distributed() and now - self._when < SAME_SIGNAL_SECONDS:
                return
            self.killed = True
            raise KeyboardInterrupt
        self.asked, self._when = signal.Signals(number).name, now
        if self._now:
            raise KeyboardInterrupt
        if is_main():
            ending = "Ending after this step, with a checkpoint"
            what = "The run is finished" if self.finished else ending
            # Not through the display: its locks may be held by what was interrupted.
            with contextlib.suppress(OSError):  # a terminal that went away
                os.write(2, f"\n{what}. Again ends at once.\n".encode())
