"""Run folders made into tables, figures and a page: `zoo report` and `zoo runs`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zoo.cli import Parser
from zoo.config import ConfigError

if TYPE_CHECKING:
    from zoo.report.runs import Arm, Run

# scipy and matplotlib take a second to import: only what needs them does so.


def main(argv: Sequence[str]) -> int:
    """`zoo report FOLDER… [--out DIR]`: compare the runs below the folders; the exit status.

    Prints the tables and writes tables, figures and page.html into DIR (default: FOLDER/report).
    """
    parser = Parser(
        prog="zoo report",
        description="Compare the runs found at or below a folder: tables, figures, one HTML page.",
    )
    parser.add_argument("folder", nargs="+", type=_path, help="a run, a sweep or all of outputs/")
    parser.add_argument("--out", type=_path, help="where the files go (default: FOLDER/report)")
    arguments = parser.parse_args(list(argv))
    console = Console()
    out = arguments.out or arguments.folder[0] / "report"
    try:
        from zoo.report.runs import arms_of
        from zoo.report.tables import print_comparison

        runs, damaged = _runs(arguments.folder)
        if not runs:
            raise ConfigError("\n".join(damaged.values()))
        arms = arms_of(runs)

        print_comparison(arms, console)
        from zoo.launch import command_line

        title = f"zoo: {', '.join(arm.label for arm in arms)}"
        write_report(arms, out, title=title, command=command_line(), console=console)
        for reason in damaged.values():
            console.print(Text(f"Note: {reason} It is left out.", style="yellow"))
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {out}: {error}. Set --out.") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return 0


def runs_main(argv: Sequence[str]) -> int:
    """`zoo runs [FOLDER…]`: list the runs below the folders (default: outputs); the exit status."""
    parser = Parser(prog="zoo runs", description="List runs and how far they are.")
    parser.add_argument("folder", nargs="*", type=_path, default=[Path("outputs")])
    arguments = parser.parse_args(list(argv))
    runs, damaged = _runs(arguments.folder)
    table = Table(box=None, pad_edge=False)
    for column in ("experiment", "name", "seed", "status", "T = 1", "greedy"):
        right = column in ("seed", "T = 1", "greedy")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for run in runs:
        last = run.evaluation("heldout")
        scores = [last.number(key) if last else None for key in ("accuracy", "greedy")]
        table.add_row(
            run.experiment,
            run.name,
            str(run.seed),
            Text(
                run.progress(), style={"failed": "red", "unfinished": "yellow"}.get(run.status, "")
            ),
            *("" if score is None else f"{100 * score:.1f} %" for score in scores),
        )
    for folder in damaged:
        *_, experiment, name, seed = ("", "", *folder.parts)
        table.add_row(experiment, name, seed.removeprefix("seed_"), Text("damaged", style="red"))
    console = Console()
    console.print(table)
    folders = [*(run.folder for run in runs), *damaged]
    roots = dict.fromkeys(str([folder, *folder.parents][:4][-1]) for folder in folders)
    console.print(Text(f"Folders: {', '.join(roots)}/<experiment>/<name>/seed_<seed>", style="dim"))
    for reason in damaged.values():
        console.print(Text(reason, style="red"))
    return 0


def write_report(
    arms: Sequence[Arm],
    out: Path,
    *,
    title: str,
    command: str,
    extra: dict[str, Any] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Writes table.md, table.csv, differences.csv, the figures, page.html and record.json into
    `out`, prints what a reader must know first, and returns the record.

    Args:
        extra: more entries of record.json, for example the minutes.
    """
    from zoo.report import figures
    from zoo.report.concerns import concerns
    from zoo.report.page import page
    from zoo.report.provenance import record_of
    from zoo.report.tables import compare, csv_text, differences_csv, markdown

    terminal = console or Console()
    out.mkdir(parents=True, exist_ok=True)
    comparison = compare(arms)
    doubts = concerns(arms)
    record = {**record_of(arms, command), **(extra or {}), "concerns": doubts}
    drawn = {"figure.png": figures.accuracy_figure(arms)}
    sets = {name for arm in arms for run in arm.finished for name in run.sets}
    if "independent" in sets:
        drawn["independent.png"] = figures.accuracy_figure(arms, "independent")
    drawn["training.png"] = figures.training_figure(arms)
    drawn["memory.png"] = figures.memory_figure(arms)
    pictures = {name: figures.png(figure) for name, figure in drawn.items()}
    for name, data in pictures.items():
        (out / name).write_bytes(data)
    _write(out / "table.md", markdown(comparison))
    _write(out / "table.csv", csv_text(comparison))
    _write(out / "differences.csv", differences_csv(comparison))
    titled = {drawn[name].texts[0].get_text(): data for name, data in pictures.items()}
    html = page(title, arms, comparison, doubts, titled, record)
    _write(out / "page.html", html)
    text = json.dumps(record, indent=2, ensure_ascii=False)
    _write(out / "record.json", text + "\n")
    for doubt in doubts:
        terminal.print(Text(f"Note: {doubt}", style="yellow"))
    terminal.print(Text(f"Tables, figures and page: {out}"))
    return record


def _write(path: Path, text: str) -> None:
    """Writes a text; half a character, which a record or a folder's name may hold, is spelled
    out."""
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("a folder must have a name, got ''")
    return Path(text)


def _runs(folders: Sequence[Path]) -> tuple[list[Run], dict[Path, str]]:
    """The runs below the folders, and what is wrong with those that cannot be read."""
    from zoo.report.runs import by_start_time, find_runs, read_runs

    damaged: dict[Path, str] = {}
    try:
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(
                    f"there is no folder {folder}. Runs lie below outputs/ by default."
                )
        found = (path for folder in folders for path in find_runs(folder))
        runs = read_runs(found, damaged)
    except OSError as error:
        raise ConfigError(f"the runs cannot be read: {error}. Name another folder.") from error
    if not runs and not damaged:
        where = ", ".join(map(str, folders))
        raise ConfigError(
            f"no runs (folders with a config.yaml) at or below {where}. Name a folder of runs."
        )
    return by_start_time(runs), damaged
