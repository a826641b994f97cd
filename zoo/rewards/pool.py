"""A few long-lived processes that run math-verify for us, killed and replaced when one is late.

Processes are started on first use with `subprocess`, never by forking this one, so threads, CUDA
and event loops of the caller do not matter, nor whether its main script is guarded. Nothing
outlives the interpreter: workers are killed at exit, and end by themselves when their input closes
(a crash, `os._exit`, SIGKILL).
"""

import atexit
import logging
import os
import select
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zoo.rewards.math_worker import HEADER, MAX_MESSAGE

logger = logging.getLogger(__name__)

WORKERS = 2
MAX_BYTES = 1_000_000_000
START_SECONDS = 120.0


class Late(Exception):
    """The worker did not answer in time."""


class Died(Exception):
    """The worker's process ended."""


class Worker:
    """One math-verify process; `ask` it one pair at a time."""

    def __init__(self) -> None:
        import json

        self._json = json
        script = Path(__file__).with_name("math_worker.py")
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": os.pathsep.join(
                entry for entry in sys.path if entry and os.path.isdir(entry)
            ),
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-B", str(script), str(MAX_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=environment,
            # Ctrl-C goes to the trainer, which then stops us.
            start_new_session=True,
        )
        self.available: bool | None = None

    def wait_ready(self, seconds: float) -> bool:
        """Whether math-verify can be imported there; waits for the process to say so."""
        if self.available is None:
            # Ready is None without math-verify; False would be an opinion that changed, not an
            # absence.
            self.available = self._receive(time.monotonic() + seconds)["ready"] is not None
        return self.available

    def ask(self, gold: str, answer: str, seconds: float) -> bool:
        """math-verify's opinion. Raises Late or Died; the worker is then to be closed."""
        deadline = time.monotonic() + seconds
        data = self._json.dumps([gold, answer]).encode()
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(HEADER.pack(len(data)) + data)
        except (BrokenPipeError, OSError) as error:
            raise Died from error
        return bool(self._receive(deadline)["same"])

    def close(self) -> None:
        """Kill the process and reap it."""
        self.process.kill()
        self.forget()
        self.process.wait()

    def forget(self) -> None:
        """Close our ends of the pipes, without touching the process (after a fork it is the
        parent's).
        """
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except OSError:
                    logger.debug("a pipe of a math-verify worker was already broken")

    def _receive(self, deadline: float) -> Any:
        (size,) = HEADER.unpack(self._read(HEADER.size, deadline))
        if size > MAX_MESSAGE:
            raise Died(f"a message of {size} bytes")
        return self._json.loads(self._read(size, deadline))

    def _read(self, size: int, deadline: float) -> bytes:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        # poll, not select: a trainer may have more than 1024 open files.
        poller = select.poll()
        poller.register(descriptor, select.POLLIN | select.POLLHUP)
        data = b""
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                raise Late
            chunk = os.read(descriptor, size - len(data))
            if not chunk:
                raise Died
            data += chunk
        return data


class Pool:
    """Up to `WORKERS` workers, shared by all threads of one process."""

    def __init__(self) -> None:
        self.free = threading.Condition()
        self.idle: list[Worker] = []
        self.all: list[Worker] = []
        self.missing = False

    def ask(self, gold: str, answer: str, seconds: float) -> bool | None:
        """math-verify's opinion, or None past the deadline; the start of a process does not count
        against it.
        """
        for _ in range(2):
            worker = self._take()
            if worker is None:
                return False
            try:
                if not worker.wait_ready(START_SECONDS):
                    self._not_installed()
                    self._drop(worker)
                    return False
                same = worker.ask(gold, answer, seconds)
            except Late:
                self._drop(worker)
                self._replace()
                return None
            except Died:
                # Out of memory, or killed from outside: once more with a fresh one, then give up.
                self._drop(worker)
                continue
            except BaseException:
                # An interrupt in the middle of a message leaves the worker out of step.
                self._drop(worker)
                raise
            with self.free:
                self.idle.append(worker)
                self.free.notify()
            return same
        return False

    def _take(self) -> Worker | None:
        with self.free:
            while not self.missing:
                if self.idle:
                    return self.idle.pop()
                if len(self.all) < WORKERS:
                    worker = Worker()
                    self.all.append(worker)
                    return worker
                self.free.wait()
        return None

    def _replace(self) -> None:
        """Start a process for the one that was killed, so that the next question need not wait for
        it.
        """
        with self.free:
            if len(self.all) < WORKERS and not self.idle:
                worker = Worker()
                self.all.append(worker)
                self.idle.append(worker)
                self.free.notify()

    def _drop(self, worker: Worker) -> None:
        worker.close()
        with self.free:
            if worker in self.all:
                self.all.remove(worker)
            self.free.notify()

    def _not_installed(self) -> None:
        if not self.missing:
            logger.warning(
                "math-verify cannot be imported: answers that zoo's own reader does not "
                "understand are scored wrong. Install it with `pip install math-verify`."
            )
        with self.free:
            self.missing = True
            self.free.notify_all()

    def close(self) -> None:
        """Kill every worker."""
        with self.free:
            workers, self.all, self.idle = self.all, [], []
        for worker in workers:
            worker.close()

    def forget(self) -> None:
        """In a forked child: leave the parent's workers alone."""
        for worker in self.all:
            worker.forget()


_pool = Pool()


def second_opinion(gold: str, answer: str, seconds: float = 0.6) -> bool | None:
    """Whether math-verify thinks two formulas equal; None if it took longer than `seconds`.

    False when math-verify is not installed (a warning says so once).
    """
    if not _pool.missing and not _pool.all and find_spec("math_verify") is None:
        _pool._not_installed()
    return _pool.ask(gold, answer, seconds)


def close_pool() -> None:
    """End the worker processes now instead of at exit; the next question starts new ones."""
    _pool.close()


def _after_fork() -> None:
    # The lock may be held by a thread that does not exist here, and the pipes are the parent's.
    global _pool
    parents, _pool = _pool, Pool()
    parents.forget()


atexit.register(close_pool)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
