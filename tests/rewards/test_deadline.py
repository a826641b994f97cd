"""A call that must come back in time, on the main thread and on others."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

from zoo.rewards import deadline
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
    where = r"\(at test_deadline\.py:\d+ in sleeps\)"
    with pytest.raises(LateError, match=rf"no answer after 0\.2 s {where}"):
        within(0.2, sleeps, {"seconds": 30})
    assert isinstance(in_thread(lambda: within(0.2, sleeps, {"seconds": 3})), LateError)
    assert time.monotonic() - began < 2
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    time.sleep(0.3)  # no alarm is left over


@pytest.mark.parametrize("seconds", [1e10, sys.float_info.max])
def test_a_time_beyond_every_timer_is_as_good_as_for_ever(seconds: float) -> None:
    assert within(seconds, sleeps, {"seconds": 0}) == "back"
    assert in_thread(lambda: within(seconds, sleeps, {"seconds": 0})) == "back"


@pytest.mark.parametrize("around", [0.0, 100.0])
@pytest.mark.parametrize("seconds", [1e-9, 5.0])
def test_an_alarm_at_any_line_leaves_signals_as_they_were(seconds: float, around: float) -> None:
    """The alarm is raised at the first line of the deadline's own code, then at the second, ….

    With a nanosecond the timer's own alarm comes as soon as it is set, too.
    """
    code = deadline._by_signal.__code__
    early: list[int] = []

    def before(number: int, _frame: FrameType | None) -> None:
        early.append(number)

    def once(wanted: int) -> int:
        """The lines that were passed, the alarm raised at the one with this number."""
        lines = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal lines
            if frame.f_code is code and event == "line":
                lines += 1
                if lines == wanted:
                    signal.raise_signal(signal.SIGALRM)
            return trace

        signal.setitimer(signal.ITIMER_REAL, around)
        tracing = sys.gettrace()
        sys.settrace(trace)
        try:
            assert within(seconds, sleeps, {"seconds": 0}) == "back"
        except LateError as error:
            assert "no answer after" in str(error)
        finally:
            sys.settrace(tracing)
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        assert around - 1 < left <= around
        assert signal.getsignal(signal.SIGALRM) is before
        return lines

    handler = signal.signal(signal.SIGALRM, before)
    try:
        wanted = 1
        while once(wanted) >= wanted:
            wanted += 1
        assert wanted > 12 and early  # through all of it, and before it had a handler of its own
    finally:
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("takes", ["timer", "handler", "both"])
@pytest.mark.parametrize("swallows", [False, True])
def test_a_function_that_takes_the_alarm_for_itself_is_given_up(takes: str, swallows: bool) -> None:
    """Ways of a library with a time limit of its own, then a call that never ends."""

    def hangs() -> None:
        if takes != "timer":
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        if takes != "handler":
            signal.alarm(5)
            signal.alarm(0)
        if swallows:
            with contextlib.suppress(BaseException):
                time.sleep(60)
        time.sleep(60)

    before = [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGVTALRM)]
    began = time.monotonic()
    with pytest.raises(LateError, match=r"no answer after 0\.2 s \(at test_deadline"):
        within(0.2, hangs, {})
    assert time.monotonic() - began < 10
    assert [signal.getsignal(n) for n in (signal.SIGALRM, signal.SIGVTALRM)] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert not [thread for thread in threading.enumerate() if thread.name == "deadline"]


class TooSlowError(Exception):
    pass


def limits_itself(pauses: list[float]) -> list[float]:
    """As a reward does that gives each row a time of its own."""
    scores = []
    for pause in pauses:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            sleeps(pause) if pause < 0.1 else time.sleep(pause)
            scores.append(1.0)
        except TooSlowError:
            scores.append(0.0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return scores


def test_a_function_with_alarms_of_its_own_has_them_handled_as_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_slow(number: int, frame: FrameType | None) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGALRM, too_slow)
    try:
        assert within(60, limits_itself, {"pauses": [0, 30, 0, 30]}) == [1, 0, 1, 0]
        given = {"pauses": [30, 0]}
        nested = within(60, lambda: within(50, limits_itself, given), {})
        assert nested == [0, 1]
        assert signal.getsignal(signal.SIGALRM) is too_slow
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_alarm_that_is_to_be_ignored_is() -> None:
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        assert within(60, limits_itself, {"pauses": [0.3]}) == [1]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_alarm_of_its_own_that_nothing_handles_is_told_as_such() -> None:
    with pytest.raises(LateError, match=r"before a SIGALRM of its own \(0\.\d s\), which nothing"):
        within(60, limits_itself, {"pauses": [30]})


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


def test_a_deadline_inside_another_s_leaves_the_outer_one_in_force() -> None:
    def outer() -> str:
        for _ in range(100):
            within(5, sleeps, {"seconds": 0})  # each sets a timer of its own and takes it away
            sleeps(0.02)
        return "never stopped"

    began = time.monotonic()
    with pytest.raises(LateError, match=r"no answer after 0\.3 s"):
        within(0.3, outer, {})
    with pytest.raises(LateError, match=r"no answer after 0\.3 s"):  # not the inner one's 5 s
        within(0.3, lambda: within(5, sleeps, {"seconds": 30}), {})
    assert time.monotonic() - began < 1.5
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_inner_deadline_is_told_from_the_outer_one() -> None:
    def outer() -> str:
        try:
            return within(0.2, sleeps, {"seconds": 30})
        except LateError as error:
            return str(error)

    assert within(30, outer, {}).startswith("no answer after 0.2 s")


def test_a_call_that_no_signal_reaches_ends_the_process_with_its_traceback() -> None:
    program = """
import ctypes
from zoo.rewards import deadline
deadline.GRACE_SECONDS = 0.5

def holds_the_lock():
    mutex = (ctypes.c_char * 64)()
    for _ in range(2):  # the second waits for ever, with Python's lock held: no signal is looked at
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)

deadline.within(0.2, holds_the_lock, {})
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert time.monotonic() - began < 30
    assert done.returncode == 1
    assert "Timeout" in done.stderr and "in holds_the_lock" in done.stderr


SWALLOWS = """
import time
from zoo.rewards import deadline
from zoo.rewards.score import Patience, score
deadline.GRACE_SECONDS, deadline.WATCHDOG_SECONDS = 0.2, 2.0  # its last resort comes much later

def swallows():
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass

score(lambda prompts, completions: swallows(), [], [], Patience(0.1, of_run={of_run}), "mine")
"""


@pytest.mark.parametrize("of_run", [True, False])
def test_a_call_that_swallows_every_interrupt_ends_the_process_with_one_line(of_run: bool) -> None:
    program = SWALLOWS.format(of_run=of_run)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("zoo: reward mine did not give up (at <string>:")
    assert "Let it swallow no BaseException" in line
    # An audit has neither
    assert ("train.reward_timeout" in line) is of_run
    assert ("goes on with the same command" in line) is of_run


FORKS = """
import os, sys
from zoo.rewards.deadline import within

def forks():
    child = os.fork()
    if child == 0:
        {back}
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

print(within({seconds}, forks, {{}}, "reward mine"))
"""


@pytest.mark.parametrize("seconds", [None, 60])
@pytest.mark.parametrize("back", ["return 7", "raise KeyError", "sys.exit(0)"])
def test_a_process_that_a_function_forked_does_not_come_back(
    seconds: float | None, back: str
) -> None:
    """It would train on beside the run. The function itself gets its answer."""
    program = FORKS.format(seconds=seconds, back=back)
    quiet = "-Wignore::DeprecationWarning"  # of Python 3.12, where a process with threads forks
    done = subprocess.run(
        [sys.executable, quiet, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr == "zoo: a process that reward mine forked came back from it, and ends.\n"
