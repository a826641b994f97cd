"""Several runs, each a process of its own: expand a sweep, run, skip what is done, report.

A job is a list of hydra overrides. It runs as `python -m zoo <overrides>` and finds its own stable
folder, so the same command again goes on where the last one ended, however that one ended.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, TextIO

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep, ValueType
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zoo.claim import RUN_DIR_FILE, announced
from zoo.config import ConfigError
from zoo.measure.progress import Courtesy

TAIL_LINES = 60  # of a failed job's output that are kept
MAX_JOBS = 10_000  # of a sweep
STOPPED = (130, -signal.SIGINT, -signal.SIGTERM)  # exit statuses of a job that was asked to end


class Status(StrEnum):
    finished = "finished"
    skipped = "skipped"  # had been finished before
    failed = "failed"
    interrupted = "interrupted"  # stopped by Ctrl-C or SIGTERM; goes on with the same command
    waiting = "not started"


@dataclass(frozen=True)
class JobResult:
    """How one job ended."""

    overrides: tuple[str, ...]
    label: str
    status: Status
    exit_status: int | None = None  # negative: ended by that signal
    seconds: float = 0.0
    folder: Path | None = None  # None: the job did not get as far as a folder
    error: str = ""  # traceback or the last lines of output of a failed job


@dataclass(frozen=True)
class LaunchResult:
    """How all jobs ended, in the order in which they were given."""

    jobs: tuple[JobResult, ...]

    @property
    def folders(self) -> list[Path]:
        """Run folders of the jobs. A finished run in the folder of a failed job is not its own: it
        was refused because of that run."""
        return [
            job.folder
            for job in self.jobs
            if job.folder is not None
            and not (job.status is Status.failed and (job.folder / "summary.json").exists())
        ]

    @property
    def interrupted(self) -> bool:
        return any(job.status in (Status.interrupted, Status.waiting) for job in self.jobs)

    @property
    def exit_status(self) -> int:
        """130 where the same command goes on with a job, else 1 when one failed, else 0."""
        if self.interrupted:
            return 130
        return int(any(job.status is Status.failed for job in self.jobs))


# ---------------------------------------------------------------------------------------- expand


def expand(overrides: Iterable[str]) -> list[list[str]]:
    """The jobs of a sweep: the product of all values given by commas, choice() and range().

    `["algorithm=ppo,dpo", "seed=0,1"]` gives four jobs, the first override varying slowest, as
    hydra's own sweeper does. The grammar is hydra's: a comma inside quotes, brackets or braces
    does not split. Equal jobs are run once.

    Raises:
        ConfigError: not hydra's grammar, a sweep without a finite list of values, or one of more
            than 10,000 jobs.
    """
    parser = OverridesParser.create()
    choices: list[list[str]] = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            reason = str(error).split("\nSee ")[0].strip()
            raise ConfigError(
                f"{text!r} is not an override: {reason}\n"
                "Write key=value; quote values with special characters, as in \"name='a,b'\"."
            ) from None
        choices.append(_values(text, override))
    if (total := math.prod(map(len, choices))) > MAX_JOBS:
        raise ConfigError(_too_many("the sweep", f"{total:,}"))
    return [list(job) for job in dict.fromkeys(itertools.product(*choices))]


def _too_many(what: str, count: str) -> str:
    return f"{what} makes {count} jobs, more than {MAX_JOBS:,}. Give fewer values."


def _values(text: str, override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [text]
    if override.value_type in (ValueType.INTERVAL_SWEEP, ValueType.GLOB_CHOICE_SWEEP):
        raise ConfigError(
            f"{text!r} has no list of values to run through. "
            "Write them out (a,b,c), or use choice(a,b,c) or range(start,stop,step)."
        )
    span = override.value()
    if isinstance(span, RangeSweep) and span.start is not None and span.stop is not None:
        count = (span.stop - span.start) / span.step if span.step else math.inf
        if not count <= MAX_JOBS:  # counted first: it would take minutes to write them out
            raise ConfigError(_too_many(text, f"{count:,.0f}".replace("inf", "endlessly many")))
    key = override.get_key_element()
    try:
        values = [f"{key}={value}" for value in override.sweep_string_iterator()]
    except (HydraException, OmegaConfBaseException):  # choice(choice(0,1),2)
        raise ConfigError(
            f"{text!r} has a list of values inside another. Write all of them in one: a,b,c."
        ) from None
    if not values:
        raise ConfigError(f"{text!r} is an empty range: there is nothing to run.")
    return values


# ---------------------------------------------------------------------------------------- launch


def launch(
    jobs: Sequence[Sequence[str]],
    *,
    labels: Sequence[str] | None = None,
    command: Sequence[str] | None = None,
    jobs_at_once: int = 1,
    check: Callable[[list[str]], Path | None] | None = None,
    on_end: Callable[[JobResult], None] | None = None,
    again: str | None = None,
    console: Console | None = None,
) -> LaunchResult:
    """Run every job in a process of its own and print one table at the end, whatever happened.

    A failing job leaves the others alone. Ctrl-C (and SIGTERM) is passed on to the running jobs,
    which are waited for; a second one kills them. On Linux the jobs die with this process, so a
    killed launch leaves nothing behind that could write into a folder beside its successor.

    Args:
        jobs: hydra overrides of each job.
        labels: a short name for each job in messages; default: its overrides.
        command: what the overrides are appended to; default `python -m zoo`.
        jobs_at_once: more than one shares the cores among the jobs (OMP_NUM_THREADS, unless set).
        check: called with each job before any is started; it raises ConfigError to refuse, and
            returns the folder of a job that is finished already, which then is not started.
        on_end: called as each job ends.
        again: the command line that repeats this launch, for messages.
        console: where messages and the table go; default: standard output.
    Raises:
        ConfigError: no jobs, jobs_at_once < 1, or `check` refused.
    """
    if not jobs:
        raise ConfigError("There is nothing to run: the list of jobs is empty.")
    if jobs_at_once < 1:
        raise ConfigError(f"The number of jobs at once must be at least 1, got {jobs_at_once}.")
    done = [check(list(job)) if check is not None else None for job in jobs]
    return _Launch(
        jobs=[tuple(job) for job in jobs],
        labels=list(labels) if labels is not None else [" ".join(job) for job in jobs],
        command=list(command) if command is not None else [sys.executable, "-m", "zoo"],
        jobs_at_once=jobs_at_once,
        on_end=on_end,
        again=again or command_line(),
        console=console or Console(file=_output()),
        done=done,
    ).run()


def sweep(
    arguments: Sequence[str],
    check: Callable[[list[str]], Path | None] | None = None,
    command: Sequence[str] | None = None,
) -> int:
    """`zoo -m [--jobs N] overrides…`: expand, launch, print the comparison; the exit status.

    `check` and `command` are those of `launch`.
    """
    overrides, jobs_at_once = _take_jobs_option(list(arguments))
    console = Console(file=_output())
    jobs = expand(overrides)
    result = launch(
        jobs,
        labels=swept(jobs),
        command=command,
        jobs_at_once=jobs_at_once,
        check=check,
        console=console,
    )
    try:
        _compare(result.folders, console)
    except Exception as error:  # the jobs are done: a table of them does not decide how it ended
        text = f"The runs cannot be compared: {type(error).__name__}: {error}"
        console.print(Text(text, style="red"))
    return result.exit_status


def _output() -> TextIO | None:
    """Standard output, which the jobs outlive: its reader may leave, its disk be full."""
    stream: Any = sys.stdout
    return stream if stream is None or isinstance(stream, Courtesy) else Courtesy(stream)  # pyright: ignore


def _compare(folders: Sequence[Path], console: Console) -> None:
    # Imported late: a sweep that is refused should not wait for scipy.
    from zoo.report.concerns import mixtures
    from zoo.report.runs import arms_of, read_runs
    from zoo.report.tables import print_comparison

    damaged: dict[Path, str] = {}
    runs = read_runs(folders, damaged)
    for reason in damaged.values():
        console.print(Text(reason, style="red"))
    if any(run.evaluations for run in runs):
        arms = arms_of(runs)
        print_comparison(arms, console)
        for note in mixtures(arms):
            console.print(Text(f"Note: {note}", style="yellow"))


def swept(jobs: Sequence[Sequence[str]]) -> list[str]:
    """What tells each job from the others: the overrides that not all of them share.

    Of several of one key the last counts. A job like all others is called by all its overrides.
    """
    last = [{text.partition("=")[0].lstrip("+"): text for text in job} for job in jobs]
    shared = set.intersection(*(set(job.values()) for job in last)) if len(jobs) > 1 else set()
    return [
        " ".join(text for text in of_key.values() if text not in shared) or " ".join(job)
        for of_key, job in zip(last, jobs, strict=True)
    ]


def _take_jobs_option(arguments: list[str]) -> tuple[list[str], int]:
    rest, value = [], "1"
    items = iter(arguments)
    for item in items:
        if item == "--jobs":
            value = next(items, "")
        elif item.startswith("--jobs="):
            value = item.removeprefix("--jobs=")
        else:
            rest.append(item)
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"--jobs takes the number of runs at once, got {value!r}. Try --jobs 2.")
    return rest, int(value)


def command_line() -> str:
    """The command that started this process, as one would type it again."""
    program, arguments = Path(sys.argv[0]), sys.argv[1:]
    original = sys.orig_argv
    if "-m" in original[: len(original) - len(arguments)]:
        module = original[original.index("-m") + 1]
        return shlex.join(["python", "-m", module, *arguments])
    if program.suffix == ".py":
        return shlex.join(["python", str(program), *arguments])
    return shlex.join([program.name, *arguments])


@dataclass
class _Running:
    index: int
    process: subprocess.Popen[bytes]
    started: float  # by the clock of files
    since: float  # by one that never jumps
    run_dir_file: Path
    tail: deque[str]
    reader: threading.Thread | None


@dataclass
class _Launch:
    jobs: list[tuple[str, ...]]
    labels: list[str]
    command: list[str]
    jobs_at_once: int
    on_end: Callable[[JobResult], None] | None
    again: str
    console: Console
    done: list[Path | None]  # the folder of a job that is finished already
    results: dict[int, JobResult] = field(default_factory=dict)
    running: list[_Running] = field(default_factory=list)
    signals: int = 0  # interruptions received
    started: float = 0.0

    def run(self) -> LaunchResult:
        self.started = time.monotonic()
        handlers = self._handle_signals()
        waiting = deque(range(len(self.jobs)))
        try:
            with tempfile.TemporaryDirectory(prefix="zoo-launch-") as scratch:
                while self.running or (waiting and not self.signals):
                    while waiting and not self.signals and len(self.running) < self.jobs_at_once:
                        self._start(waiting.popleft(), Path(scratch))
                    for job in list(self.running):
                        if job.process.poll() is not None:
                            self.running.remove(job)
                            self._end(job)
                    if self.running:
                        time.sleep(0.05)
        finally:
            for job in self.running:  # an error of ours: leave no orphans
                self._kill(job)
            result = LaunchResult(tuple(self._result(index) for index in range(len(self.jobs))))
            print_jobs(result, self.console, seconds=time.monotonic() - self.started)
            if result.interrupted:
                self.console.print(Text(f"To go on, run the same command again: {self.again}"))
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return result

    def _result(self, index: int) -> JobResult:
        waiting = JobResult(self.jobs[index], self.labels[index], Status.waiting)
        return self.results.get(index, waiting)

    # Processes are started from the main thread only: the death signal below is tied to the
    # thread that started the process, not to the whole program.
    def _start(self, index: int, scratch: Path) -> None:
        run_dir_file = scratch / f"job_{index}"
        environment = {**os.environ, RUN_DIR_FILE: str(run_dir_file)}
        if self.jobs_at_once > 1:
            threads = max(1, (os.cpu_count() or 1) // self.jobs_at_once)
            environment.setdefault("OMP_NUM_THREADS", str(threads))
            environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve others
        # On a terminal the job has it to itself, so that its progress display works.
        shares_terminal = self.jobs_at_once == 1 and sys.stdout is not None and sys.stdout.isatty()
        if not shares_terminal:
            environment.setdefault("PYTHONUNBUFFERED", "1")
        if (folder := self.done[index]) is not None:
            job = JobResult(self.jobs[index], self.labels[index], Status.skipped, 0, folder=folder)
            self._record(index, job)
            return
        self._announce(index)
        try:
            process = subprocess.Popen(
                [*_die_with_parent(), *self.command, *self.jobs[index]],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=None if shares_terminal else subprocess.PIPE,
                stderr=None if shares_terminal else subprocess.STDOUT,
                # A group of its own: a terminal's Ctrl-C reaches the job once, through us.
                process_group=0,
            )
        except OSError as error:
            self._record(
                index,
                JobResult(
                    self.jobs[index],
                    self.labels[index],
                    Status.failed,
                    error=f"could not be started: {error}",
                ),
            )
            return
        now = (time.time(), time.monotonic())
        job = _Running(index, process, *now, run_dir_file, deque(maxlen=TAIL_LINES), None)
        if process.stdout is not None:
            prefix = f"[{index + 1}] " if self.jobs_at_once > 1 else ""
            job.reader = threading.Thread(
                target=_echo, args=(process.stdout, job.tail, prefix), daemon=True
            )
            job.reader.start()
        self.running.append(job)
        if self.signals and process.poll() is None:  # it arrived while the job was being started
            process.send_signal(signal.SIGINT)

    def _announce(self, index: int) -> None:
        done = [job.seconds for job in self.results.values() if job.status is Status.finished]
        parts = [f"[{index + 1}/{len(self.jobs)}] {self.labels[index]}"]
        if self.results:
            parts.append(f"{clock(time.monotonic() - self.started)} elapsed")
        if done:
            remaining = sum(done) / len(done) * (len(self.jobs) - len(self.results))
            parts.append(f"about {clock(remaining / self.jobs_at_once)} left")
        self.console.print(Text(" · ".join(parts), style="bold"))

    def _end(self, job: _Running) -> None:
        seconds = time.monotonic() - job.since
        if job.reader is not None:
            job.reader.join(timeout=5)  # a grandchild may hold the pipe open
        folder, begun = None, False
        if job.run_dir_file.exists():
            folder, begun = announced(job.run_dir_file)
        code = job.process.returncode
        status = self._status(code, folder, begun)
        error = ""
        if status is Status.failed:
            error = _failure(folder if begun else None, code, list(job.tail), job.started)
        self._record(
            job.index,
            JobResult(
                self.jobs[job.index], self.labels[job.index], status, code, seconds, folder, error
            ),
        )

    def _status(self, code: int, folder: Path | None, begun: bool) -> Status:
        summary = folder / "summary.json" if folder is not None else None
        complete = summary is None or summary.exists()
        if code == 0 and complete:
            return Status.finished if summary is None or begun else Status.skipped
        return Status.interrupted if self.signals or code in STOPPED else Status.failed

    def _record(self, index: int, result: JobResult) -> None:
        self.results[index] = result
        if result.status is Status.failed:
            self.console.print(
                Text(f"[{index + 1}/{len(self.jobs)}] {result.label} failed", style="bold red")
            )
        if self.on_end is not None:
            self.on_end(result)

    def _handle_signals(self) -> dict[signal.Signals, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}  # Python delivers signals to the main thread only
        return {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }

    def _on_signal(self, number: int, _frame: object) -> None:
        self.signals += 1
        for job in self.running:
            if self.signals > 1:
                self._kill(job)
            elif job.process.poll() is None:
                job.process.send_signal(number)
        message = (
            "Interrupted: waiting for the running jobs to save and end. Ctrl-C again kills them."
            if self.signals == 1
            else "Killed."
        )
        with suppress(OSError):  # a standard error that is closed, or full
            os.write(2, f"\n{message}\n".encode())  # rich's locks may be held by what we stopped

    @staticmethod
    def _kill(job: _Running) -> None:
        try:
            os.killpg(job.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            job.process.kill()


def _die_with_parent() -> list[str]:
    """A prefix that makes Linux kill the job when this process dies, even by SIGKILL."""
    if not sys.platform.startswith("linux"):
        return []
    code = (
        "import ctypes, os, sys\n"
        "ctypes.CDLL(None).prctl(1, 9)\n"  # PR_SET_PDEATHSIG, SIGKILL; survives exec
        "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"  # the parent died before the line above
        "os.execvp(sys.argv[2], sys.argv[2:])\n"
    )
    return [sys.executable, "-I", "-S", "-c", code, str(os.getpid())]


def _echo(stream: IO[bytes], tail: deque[str], prefix: str) -> None:
    """Read a job's output to its end, shown or not: the job would wait for who no longer reads."""
    out = _output()
    for raw in stream:
        line = raw.decode("utf-8", errors="replace")
        tail.append(line.rstrip("\n"))
        if out is not None:
            out.write(prefix + line)
            out.flush()


def _failure(folder: Path | None, code: int, tail: list[str], started: float) -> str:
    """The reason a job failed; where the job left none in its folder, it is written there.

    The folder is None where the job had not begun in it: another run may be there.
    """
    ended = f"ended by {_signal_name(-code)}" if code < 0 else f"exit status {code}"
    path = folder / "error.txt" if folder is not None else None
    if path is not None and path.is_file() and path.stat().st_mtime >= started - 1:
        return path.read_text(encoding="utf-8", errors="replace").rstrip()
    if code == 0:
        ended += ", but without a summary"
    text = "\n".join([*tail, f"({ended})"])
    if path is not None and path.parent.is_dir():
        from zoo.train.lock import FolderLock

        lock = FolderLock(path.parent)
        with suppress(ConfigError, OSError):  # another run began there meanwhile; a full disk
            lock.acquire()
            path.write_text(text + "\n", encoding="utf-8")
        lock.release()
    return text


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---------------------------------------------------------------------------------------- output


def print_jobs(result: LaunchResult, console: Console, seconds: float) -> None:
    """The table of jobs and, below it, why the failed ones failed."""
    counts = {s: sum(job.status is s for job in result.jobs) for s in Status}
    title = ", ".join(f"{n} {status}" for status, n in counts.items() if n)
    table = Table(
        title=f"{len(result.jobs)} jobs in {clock(seconds)}: {title}", title_justify="left"
    )
    for column in ("job", "status", "time", "held-out T = 1", "folder"):
        right = column in ("time", "held-out T = 1")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    colours = {Status.finished: "green", Status.failed: "red", Status.interrupted: "yellow"}
    for job in result.jobs:
        accuracy = _accuracy(job.folder)
        table.add_row(
            Text(job.label),
            Text(job.status, style=colours.get(job.status, "")),
            clock(job.seconds) if job.exit_status is not None else "",
            "" if accuracy is None else f"{100 * accuracy:.1f} %",
            Text(_short(job.folder)),
        )
    console.print(table)
    shown: dict[str, str] = {}
    for job in result.jobs:
        if job.status is not Status.failed:
            continue
        console.print(Text(f"{job.label} failed:", style="bold red"))
        text = "\n".join(job.error.splitlines()[-15:])
        # A typo fails every job of a sweep in the same way: say it once.
        first = shown.setdefault(text, job.label)
        console.print(Text(text if first == job.label else f"as {first}"), soft_wrap=True)


def _accuracy(folder: Path | None) -> float | None:
    try:
        summary = json.loads((folder / "summary.json").read_text()) if folder is not None else {}
        return summary["final"]["heldout"]["accuracy"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a column of the overview, not a result: the comparison says what is missing


def _short(folder: Path | None) -> str:
    if folder is None:
        return ""
    try:
        return str(folder.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(folder)


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
