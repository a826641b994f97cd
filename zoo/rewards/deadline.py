"""A call of somebody's function that must come back in time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class LateError(Exception):
    """A function that did not come back within its time."""


class _Alarm(BaseException):
    """Raised inside the function; no `except Exception` of its own swallows it."""


def within(seconds: float | None, function: Callable[..., T], arguments: dict[str, Any]) -> T:
    """`function(**arguments)`, given up after `seconds` (None: never).

    On the main thread of a Unix process a timer's signal interrupts the call, which also frees
    what it waited for, and lets the function use signals of its own. Elsewhere the call runs in a
    daemon thread that is left behind when it is late.

    Raises:
        LateError: the time is over.
    """
    if seconds is None:
        return function(**arguments)
    if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
        return _by_signal(seconds, function, arguments)
    return _in_thread(seconds, function, arguments)


def _by_signal(seconds: float, function: Callable[..., T], arguments: dict[str, Any]) -> T:
    def late(_number: int, _frame: object) -> NoReturn:
        raise _Alarm

    before = signal.signal(signal.SIGALRM, late)
    # Repeated, because a `finally` or a bare `except` of the function may swallow the first.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        try:
            return function(**arguments)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _Alarm:
        raise LateError(f"no answer after {seconds:g} s") from None
    finally:
        signal.signal(signal.SIGALRM, before)


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
        raise LateError(f"no answer after {seconds:g} s")
    if raised:
        raise raised[0]
    return returned[0]
