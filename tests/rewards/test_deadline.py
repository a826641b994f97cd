"""A call that must come back in time, on the main thread and on others."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

from zoo.rewards.deadline import LateError, within

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs Unix timers")


def sleeps(seconds: float) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            time.sleep(0.05)
        except Exception:  # what swallows an ordinary exception
            continue
    return "back"


def in_thread(call: Any) -> Any:
    got: list[Any] = []

    def run() -> None:
        try:
            got.append(call())
        except BaseException as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return got[0]


def test_an_answer_in_time_comes_back() -> None:
    assert within(5, sleeps, {"seconds": 0}) == "back"
    assert within(None, sleeps, {"seconds": 0}) == "back"
    assert in_thread(lambda: within(5, sleeps, {"seconds": 0})) == "back"


def test_a_late_one_is_given_up_and_the_signal_handler_is_as_it_was() -> None:
    before = signal.getsignal(signal.SIGALRM)
    began = time.monotonic()
    with pytest.raises(LateError, match=r"no answer after 0\.2 s"):
        within(0.2, sleeps, {"seconds": 30})
    assert isinstance(in_thread(lambda: within(0.2, sleeps, {"seconds": 3})), LateError)
    assert time.monotonic() - began < 2
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    time.sleep(0.3)  # no alarm is left over


def test_what_a_function_raises_comes_through() -> None:
    def fails() -> None:
        raise KeyError("k")

    with pytest.raises(KeyError):
        within(5, fails, {})
    assert isinstance(in_thread(lambda: within(5, fails, {})), KeyError)


def test_arguments_may_have_any_name() -> None:
    assert (
        within(5, lambda seconds, function: seconds + function, {"seconds": 1, "function": 2}) == 3
    )
