"""Run a suite and report it: python -m benchmarks.run suite=quickstart [out=DIR] [overrides …].

Every arm and seed is a process of its own; finished ones are skipped, so the same command goes on
after an interruption. Tables, figures and page go to results/<suite>, or to `out`.
Further overrides change every arm (train.steps=5); their results go beside the runs unless `out`
says otherwise, so that they never replace the suite's own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.text import Text

from benchmarks.suite import Suite, check_extra, read_suite, suite_names
from zoo.cli import check_job, print_error
from zoo.config import ConfigError, RunConfig
from zoo.instantiate import did_you_mean
from zoo.launch import JobResult, LaunchResult, Status, command_line, launch

OPTIONS = ("suite", "out", "jobs")
RESULTS = Path("results")
SECONDS = "seconds.json"  # beside the runs: what each process has taken over all invocations


def main(
    arguments: Sequence[str] | None = None,
    *,
    command: Sequence[str] | None = None,
    check: Callable[[list[str]], None] | None = check_job,
) -> int:
    """Runs a suite; the exit status is 0 when every arm finished.

    Args:
        arguments: as on the command line.
        command: what runs a job instead of `python -m zoo`.
        check: refuses a job before any is started.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(word in ("-h", "--help", "help") for word in arguments):
        print(f"{__doc__}\nSuites: {', '.join(suite_names())}. jobs=N runs N at once.")
        return 0
    try:
        options, extra = _split(arguments)
        suite = read_suite(options.get("suite", "quickstart"))
        check_extra(extra)
        jobs_at_once = _count(options.get("jobs", "1"))
        return _run(suite, options.get("out"), extra, jobs_at_once, command, check)
    except ConfigError as error:
        print_error(str(error))
        return 2


def _run(
    suite: Suite,
    out: str | None,
    extra: list[str],
    jobs_at_once: int,
    command: Sequence[str] | None,
    check: Callable[[list[str]], None] | None,
) -> int:
    console = Console()
    labels, jobs = suite.jobs(extra)
    if check is not None:
        for job in jobs[: len(suite.arms)]:  # every arm once: seeds change nothing here
            check(job)
    console.print(Text(suite.title, style="bold"))
    console.print(
        Text(
            f"{suite.description} {len(jobs)} runs; about {suite.minutes:.0f} minutes on two cores "
            "if none is finished yet."
        )
    )
    result = launch(
        jobs,
        labels=labels,
        command=command,
        jobs_at_once=jobs_at_once,
        on_end=_add_seconds,
        console=console,
    )
    _report(suite, result, out, extra, console)
    return result.exit_status


def _report(
    suite: Suite, result: LaunchResult, out: str | None, extra: list[str], console: Console
) -> None:
    # Imported late: a mistake in the command should not wait for scipy and matplotlib.
    from zoo.report import write_report
    from zoo.report.runs import arms_of, read_runs
    from zoo.report.tables import print_comparison

    damaged: dict[Path, str] = {}
    runs = read_runs(result.folders, damaged)
    for reason in damaged.values():
        console.print(Text(reason, style="red"))
    order = [arm.label for arm in suite.arms]
    arms = sorted(arms_of(runs), key=lambda arm: order.index(arm.runs[0].name))
    if not any(arm.finished for arm in arms):
        console.print(Text("No run is finished: there is nothing to compare yet."))
        return
    print_comparison(arms, console)
    beside = arms[0].runs[0].folder.parents[1]
    complete = not damaged and all(
        job.status in (Status.finished, Status.skipped) for job in result.jobs
    )
    if out is not None:
        folder = Path(out)
    elif extra or not complete:  # what is published under the suite's name is whole and its own
        folder = beside / "report"
    else:
        folder = RESULTS / suite.name
    seconds = _read_seconds(beside)
    write_report(
        arms,
        folder,
        title=suite.title,
        command=command_line(),
        extra={
            "suite": suite.name,
            "description": suite.description,
            "minutes": round(sum(seconds.values()) / 60, 1),
        },
        console=console,
    )


def _add_seconds(job: JobResult) -> None:
    """Adds what a job took to the record beside its runs, which outlives this process."""
    if job.folder is None or not job.folder.is_dir() or job.status is Status.skipped:
        return
    beside = job.folder.parents[1]
    seconds = _read_seconds(beside)
    key = f"{job.folder.parent.name}/{job.folder.name}"
    seconds[key] = round(seconds.get(key, 0.0) + job.seconds, 2)
    (beside / SECONDS).write_text(json.dumps(seconds, indent=1), encoding="utf-8")


def _read_seconds(beside: Path) -> dict[str, float]:
    path = beside / SECONDS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Options of this script, and overrides for the runs."""
    options: dict[str, str] = {}
    extra = []
    settings = [field.name for field in fields(RunConfig)]
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals and not text.startswith("~"):
            raise ConfigError(
                f"{text!r} is not key=value.{did_you_mean(text, suite_names(), 'suite=')} "
                f"Try python -m benchmarks.run suite=quickstart."
            )
        if key in OPTIONS:
            options[key] = value
        elif key not in settings and (near := did_you_mean(key, OPTIONS)):
            raise ConfigError(f"There is no option {key!r} ({text}).{near}")
        else:
            extra.append(text)
    return options, extra


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"jobs is the number of runs at once, got {text!r}. Try jobs=2.")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
