"""The second opinion's processes: same verdicts from everywhere, killed when late, gone at exit."""

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest

from zoo.rewards import pool as pool_module
from zoo.rewards.math import Reason, verify

math_verify = pytest.importorskip("math_verify")

CASES = [
    ("\\boxed{\\frac12}", "0.5"),
    ("\\boxed{2, 3}", "2"),
    ("#### 18", "18"),
    ("\\boxed{\\sqrt{12}}", "2\\sqrt3"),
    ("no answer here, sorry to say", "7"),
    # Unreadable to zoo's own grammar (an integral with a differential): math-verify decides.
    ("\\boxed{\\frac{\\partial}{\\partial x} x^2}", "2x"),
    ("\\boxed{9^{9^{9^9}}}", "5"),
]
# A machine at work may be slow; the deadline has tests of its own.
PATIENT = 30.0
TOWER = "9^{9^{9^{9}}}"


def verdicts() -> list[tuple[float, str]]:
    return [
        (verdict.score, verdict.reason.value)
        for verdict in (verify(*case, deadline_seconds=PATIENT) for case in CASES)
    ]


@pytest.fixture(autouse=True, scope="module")
def workers_end_with_the_module():
    yield
    pool_module.close_pool()


@pytest.fixture(scope="module")
def here() -> list[tuple[float, str]]:
    return verdicts()


def test_the_cases_include_a_second_opinion(here):
    asked = [verify(*case, deadline_seconds=PATIENT).second_opinion for case in CASES]
    assert asked.count(True) == 1
    assert [score for score, _ in here] == [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0]


def test_same_verdict_from_worker_threads(here):
    with ThreadPoolExecutor(8) as threads:
        assert all(result == here for result in threads.map(lambda _: verdicts(), range(8)))


def test_same_verdict_from_a_forked_process(here):
    with multiprocessing.get_context("fork").Pool(2) as processes:
        assert processes.apply(verdicts) == here
    # The parent's worker is still in step.
    assert pool_module.second_opinion("x+1", "1+x", 30.0) is True


def test_same_verdict_from_a_spawned_process(here):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        assert processes.submit(verdicts).result() == here


def test_same_verdict_from_an_event_loop(here):
    async def judge() -> list[list[tuple[float, str]]]:
        return list(
            await asyncio.gather(*(asyncio.to_thread(verdicts) for _ in range(4)), _direct())
        )

    async def _direct() -> list[tuple[float, str]]:
        return verdicts()

    assert all(result == here for result in asyncio.run(judge()))


def test_no_signal_or_timer_is_touched(here):
    before = signal.getsignal(signal.SIGALRM)
    verdicts()
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_late_worker_is_killed_and_replaced():
    pool = pool_module.Pool()
    try:
        assert pool.ask("1", "1", 30.0) is True
        first = pool.all[0].process
        start = time.monotonic()
        assert pool.ask(TOWER, "5", 0.3) is None
        # The deadline, and the kill; the replacement starts in the background.
        assert time.monotonic() - start < 10.0
        assert first.poll() is not None
        assert pool.ask("x+1", "1+x", 30.0) is True
        assert pool.all[0].process.pid != first.pid
    finally:
        pool.close()
    assert not pool.all


def test_a_worker_that_died_is_replaced():
    pool = pool_module.Pool()
    try:
        assert pool.ask("1", "1", 30.0) is True
        pool.all[0].process.kill()
        assert pool.ask("2", "2", 30.0) is True
    finally:
        pool.close()


def test_timeouts_are_a_reason(monkeypatch):
    monkeypatch.setattr(pool_module, "second_opinion", lambda gold, answer, seconds: None)
    verdict = verify("\\boxed{\\frac{\\partial}{\\partial y} y^2}", "2y")
    assert verdict.reason is Reason.TIMEOUT and verdict.score == 0.0 and verdict.second_opinion


def test_without_math_verify_unreadable_answers_are_wrong(monkeypatch, caplog):
    monkeypatch.setattr(pool_module, "find_spec", lambda name: None)
    monkeypatch.setattr(pool_module, "_pool", pool_module.Pool())
    assert pool_module.second_opinion("x", "x") is False
    assert pool_module.second_opinion("x", "x") is False
    assert (
        len([record for record in caplog.records if "pip install math-verify" in record.message])
        == 1
    )


def test_the_second_opinion_is_strict():
    assert pool_module.second_opinion("\\frac{1}{3}", "0.333333", 30.0) is False
    assert pool_module.second_opinion("x>1", "1", 30.0) is False
    assert pool_module.second_opinion("(1,2)", "\\{1,2\\}", 30.0) is False


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _gone(pids: list[int], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


UNGUARDED = textwrap.dedent(
    """
    import json, os, sys
    from zoo.rewards.math import verify
    from zoo.rewards.pool import _pool
    answer = "\\\\boxed{\\\\frac{\\\\partial}{\\\\partial x} x^2}"
    verdict = verify(answer, "2x", deadline_seconds=30)
    pids = [worker.process.pid for worker in _pool.all]
    print(json.dumps([verdict.score, pids, "torch" in sys.modules]), flush=True)

    if sys.argv[1:] == ["die"]:
        os._exit(1)
    """
)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")
@pytest.mark.parametrize("end", ["return", "die"])
def test_an_unguarded_script_works_and_leaves_no_process(end, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, str(path), end],
        capture_output=True,
        text=True,
        timeout=60,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(pool_module.Path.cwd()), *sys.path))),
        },
    )
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    score, pids, torch_imported = json.loads(line)
    assert score == 1.0 and len(pids) == 1 and not torch_imported
    assert _gone(pids)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads limits from /proc")
def test_the_worker_limits_its_own_memory():
    pool = pool_module.Pool()
    try:
        assert pool.ask("1", "1", 30.0) is True
        with open(f"/proc/{pool.all[0].process.pid}/limits") as limits:
            (line,) = [line for line in limits if line.startswith("Max address space")]
        assert int(line.split()[3]) == pool_module.MAX_BYTES
    finally:
        pool.close()


def test_many_threads_share_two_workers():
    pool = pool_module.Pool()
    answers: list[bool | None] = []

    def ask(number: int) -> None:
        answers.append(pool.ask(f"x+{number}", f"{number}+x", 30.0))

    try:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [True] * 12
        assert len(pool.all) <= pool_module.WORKERS
    finally:
        pool.close()
