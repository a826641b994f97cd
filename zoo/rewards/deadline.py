"""A call of somebody's function that must come back in time."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

given_up: list[str] = []  # calls whose own threads may go on for ever

# Seconds beyond the deadline after which a call that no signal reaches ends the whole process.
GRACE_SECONDS = 60.0
WATCHDOG_SECONDS = 1.0  # beyond it, after which the timer was taken away, and between later tries
LONGEST_SECONDS = 1e8  # three years: what a timer of every system can be set to
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


class LateError(Exception):
    """A function that did not come back within its time."""


class Alarm(BaseException):
    """Raised inside the function; no `except Exception` of its own swallows it."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


def within(
    seconds: float | None,
    function: Callable[..., T],
    arguments: dict[str, Any],
    name: str = "a function",
    way_out: str = "Let it swallow no BaseException.",
) -> T:
    """`function(**arguments)`, given up after `seconds` (None: never).

    On the main thread of a Unix process a timer's signal interrupts the call, which also frees
    what it waited for, and lets the function use signals of its own: where it takes the timer or
    its handler for itself, another thread interrupts it a second later. A call inside another's
    deadline keeps to the earlier of the two. One that swallows every interrupt ends the process a
    minute later with a word on standard error, and one that holds Python's lock in foreign code,
    where no signal is looked at, with its traceback: a run that ends can be resumed, one that hangs
    cannot. Elsewhere the call runs in a daemon thread that is left behind when it is late.

    A process that the function forks, and that comes back from it too, ends at once: it would be a
    second run of the same name.

    Args:
        name: of the function in messages.
        way_out: what the word on standard error advises.
    Raises:
        LateError: the time is over; says where the function was.
    """
    here = os.getpid()

    def call(**given: Any) -> T:
        try:
            return function(**given)
        finally:
            if os.getpid() != here:
                _end(f"a process that {name} forked came back from it, and ends.")

    if seconds is None:
        return call(**arguments)
    seconds = min(seconds, LONGEST_SECONDS)
    if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
        return _by_signal(seconds, call, arguments, name, way_out)
    return _in_thread(seconds, call, arguments)


def _end(text: str) -> NoReturn:
    """End this process as it is, with one line; what others wait for in it may never come."""
    with contextlib.suppress(OSError):  # a terminal that went away
        os.write(2, f"zoo: {text}\n".encode(errors="replace"))
    os._exit(1)


def _by_signal(
    seconds: float, function: Callable[..., T], arguments: dict[str, Any], name: str, way_out: str
) -> T:
    outer, every = signal.getitimer(signal.ITIMER_REAL)
    if 0 < outer <= seconds:
        return function(**arguments)  # the deadline around it comes first
    alarms: list[Alarm] = []
    own: list[float] = []  # when an alarm came that the function had set
    over = False

    def late(number: int, frame: FrameType | None) -> None:
        if over:  # it came back in time, by less than the signal took
            return
        passed = time.monotonic() - began
        if not alarms and passed < 0.9 * seconds and number == signal.SIGALRM:  # its own alarm
            if callable(before):  # which it handles
                before(number, frame)
            if callable(before) or before is signal.SIG_IGN:
                return
            own.append(passed)
        if not alarms:
            alarms.append(Alarm(_place(frame)))
        raise alarms[0]

    before, began = signal.getsignal(signal.SIGALRM), time.monotonic()
    # Not inside another's deadline: that one's is there.
    unwatch = (lambda: None) if outer else _watched(seconds, late, name, way_out)
    try:  # the alarm may come as soon as its timer is set, and anywhere below
        try:
            signal.signal(signal.SIGALRM, late)
            if not outer:  # one last resort, the outermost call's, where nothing else could end it
                last = seconds + GRACE_SECONDS + 2 * WATCHDOG_SECONDS  # after the watching thread
                faulthandler.dump_traceback_later(last, exit=True, file=2)
            # Repeated, because a `finally` or a bare `except` of the function may swallow the first
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
            return function(**arguments)
        finally:
            over = True
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Alarm as alarm:
        if alarm not in alarms:
            raise
        told = f"no answer after {seconds:g} s"
        if own:
            told = f"no answer before a SIGALRM of its own ({own[0]:.1f} s), which nothing handles"
        raise _late(f"{told} ({alarm.where})") from None
    finally:
        over = True  # again: the alarm may have come as the first thing of the `finally` above
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not outer:
            faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
        unwatch()
        if outer > 0:  # the time that has passed counts for the deadline around it, too
            left = outer - (time.monotonic() - began)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), every)


def _watched(
    seconds: float, late: Callable[[int, FrameType | None], None], name: str, way_out: str
) -> Callable[[], None]:
    """Calls `late` on the main thread by a signal that nobody else uses; returns what ends this.

    After the grace it ends the process.
    """
    number = signal.SIGVTALRM
    main, done, before = threading.get_ident(), threading.Event(), signal.getsignal(number)

    def watch() -> None:
        left, ends = seconds + WATCHDOG_SECONDS, time.monotonic() + seconds + GRACE_SECONDS
        while not done.wait(left):
            if time.monotonic() >= ends:
                place = _place(sys._current_frames().get(main))
                _end(
                    f"{name} did not give up ({place}) {GRACE_SECONDS:g} s after its time of "
                    f"{seconds:g} s, so the process ends. {way_out}"
                )
            signal.pthread_kill(main, number)
            left = WATCHDOG_SECONDS

    def end() -> None:
        done.set()
        thread.join()  # before the handler goes, without which the signal would end the process
        signal.signal(number, before)

    thread = threading.Thread(target=watch, daemon=True, name="deadline")
    signal.signal(number, late)
    thread.start()
    return end


def _late(text: str) -> LateError:
    given_up.append(text)
    return LateError(text)


def _place(frame: FrameType | None) -> str:
    """Where the function is: the innermost line that belongs to no library."""
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "somewhere"
    code = frame.f_code
    return f"at {Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"


def _in_thread(seconds: float, function: Callable[..., T], arguments: dict[str, Any]) -> T:
    returned: list[T] = []
    raised: list[BaseException] = []

    def call() -> None:
        try:
            returned.append(function(**arguments))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call, daemon=True, name="reward")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise _late(f"no answer after {seconds:g} s")
    if raised:
        raise raised[0]
    return returned[0]
