"""Would the tests notice a mistake in zoo.functional? Coverage, and mutants by mutmut.

    python -m benchmarks.mutation [--module kl --module losses | --page] [--out results/mutation]

mutmut's mutations, and those of `benchmarks.mutators`, are made one at a time in a copy of the
package, and tests/functional must fail for each. Writes summary.md, modules.csv and survivors.csv;
`--module` runs some modules and keeps the rows of the others; `--page` runs none, and looks up the
reasons anew. The status is 1 when fewer than 95 %
are killed, or a survivor has no reason in benchmarks/survivors.yaml. Needs `pip install mutmut`.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
REASONS = Path(__file__).with_name("survivors.yaml")
PACKAGE = Path("zoo/functional")
COPIED = ("zoo", "benchmarks", "tests/functional", "tests/__init__.py", "tests/conftest.py")
PYTEST = ("-q", "-p", "no:cacheprovider", "--hypothesis-seed=0")
KEY = ("function", "before", "after")  # of a survivor
NO_REASON = "**none given**"
REQUIRED = 0.95  # of the mutants, that the tests must kill

# ---------------------------------------------------------------- the run


def run(modules: Sequence[str], place: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Mutates modules in a copy at `place`: a record a mutant, and coverage's totals a file."""
    for name in COPIED:
        source, target = REPOSITORY / name, place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    options = {
        "source_paths": ["zoo"],
        "only_mutate": [str(PACKAGE / f"{module}.py") for module in modules],
        "pytest_add_cli_args": PYTEST,
        "pytest_add_cli_args_test_selection": ["tests/functional"],
    }
    lines = [f"{key} =\n" + "".join(f"    {v}\n" for v in vs) for key, vs in options.items()]
    # Minutes, so that a busy machine kills no mutant: only an endless loop is a timeout.
    lines += ["timeout_constant = 20\n", "use_git_change_detection = false\n"]
    (place / "setup.cfg").write_text("[mutmut]\n" + "".join(lines), encoding="utf-8")

    # One thread a process, since a process with threads does not survive a fork.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def python(*words: str) -> None:
        subprocess.run([sys.executable, "-m", *words], cwd=place, env=environment, check=True)

    source = f"--source={PACKAGE}"
    python("coverage", "run", "--branch", source, "-m", "pytest", *PYTEST, "tests/functional")
    python("coverage", "json", "-q", "-o", "coverage.json")
    covered = json.loads((place / "coverage.json").read_text())["files"]
    python("benchmarks.mutation", "--worker")
    mutants = json.loads((place / "mutants.json").read_text())
    return mutants, {Path(file).stem: each["summary"] for file, each in covered.items()}


def work() -> None:
    """The side that runs in the copy: mutmut with our mutations, then mutants.json."""
    from mutmut.__main__ import cli
    from mutmut.mutation.data import SourceFileMutationData
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.mutation.mutators import mutation_operators
    from mutmut.runners.harness import BadTestExecutionCommandsException, PytestRunner
    from mutmut.stats import status_by_exit_code
    from mutmut.utils.file_utils import walk_mutatable_files

    from benchmarks.mutators import OPERATORS

    run_tests = PytestRunner.run_tests

    def checked(self: PytestRunner, **options: Any) -> int:
        try:
            return run_tests(self, **options)
        except BadTestExecutionCommandsException:
            return 35  # "suspicious": else a test that pytest cannot find would count as a kill

    PytestRunner.run_tests = checked
    mutation_operators.extend(OPERATORS)  # pyright: ignore[reportAttributeAccessIssue]
    cli.main(["run", "--max-children", "1"], standalone_mode=False)
    mutants = []
    for path in walk_mutatable_files():
        file = SourceFileMutationData(path=path)
        file.load()
        for name, code in file.exit_code_by_key.items():
            one = {
                "module": path.stem,
                "function": name.rpartition(".")[2].removeprefix("x_").partition("__mutmut_")[0],
                "status": status_by_exit_code[code],
            }
            if one["status"] != "killed":
                one["before"], one["after"] = changed(get_diff_for_mutant(name, path=path))
            mutants.append(one)
    Path("mutants.json").write_text(json.dumps(mutants))


def changed(diff: str) -> tuple[str, str]:
    """The lines that a unified diff takes away and puts in, without indentation."""
    lines = diff.splitlines()[2:]
    before = " ".join(line[1:].strip() for line in lines if line.startswith("-"))
    after = " ".join(line[1:].strip() for line in lines if line.startswith("+"))
    return before, after


# ---------------------------------------------------------------- the page


def write(
    mutants: Iterable[dict[str, Any]],
    coverage: dict[str, Any],
    out: Path,
    origin: dict[str, Any],
    command: str,
) -> tuple[str, bool]:
    """modules.csv, survivors.csv and summary.md; the page, and whether all is as it must be."""
    reasons = read_reasons()
    new: dict[str, dict[str, Any]] = {}
    alive = []
    for one in mutants:
        row = new.setdefault(
            one["module"],
            {
                "module": one["module"],
                **dict.fromkeys(("mutants", "killed", "timeout", "survived"), 0),
                "lines": _share(coverage[one["module"]], "lines"),
                "branches": _share(coverage[one["module"]], "branches"),
                "commit": origin["commit"],
                "dirty": origin["dirty"],
                "cpu": origin["machine"]["cpu"],
                "mutmut": metadata.version("mutmut"),
                "command": command,
            },
        )
        row["mutants"] += 1
        if one["status"] in ("killed", "timeout"):
            row[one["status"]] += 1
            continue
        row["survived"] += 1
        key = (f"{one['module']}.{one['function']}", one["before"], one["after"])
        # "no tests" or "suspicious" is a fault of the run, for which there is no excuse.
        fault = NO_REASON if one["status"] == "survived" else f"**{one['status']}**"
        names = ("module", *KEY, "reason")
        alive.append(dict(zip(names, (one["module"], *key, fault), strict=True)))
    rows = _merge(out / "modules.csv", list(new.values()), set(new))
    survivors = _merge(out / "survivors.csv", alive, set(new))
    for row in survivors:
        key = (row["function"], row["before"], row["after"])
        if row["reason"] == NO_REASON or not row["reason"].startswith("**"):
            row["reason"] = reasons.get(key, NO_REASON)
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "modules.csv", rows)
    _write(out / "survivors.csv", survivors)
    text, good = page(rows, survivors, origin)
    (out / "summary.md").write_text(text, encoding="utf-8")
    return text, good


def page(
    rows: Sequence[dict[str, Any]],
    survivors: Sequence[dict[str, Any]],
    origin: dict[str, Any],
) -> tuple[str, bool]:
    """The summary, from what the two tables hold."""
    columns = ("mutants", "killed", "timeout", "survived")
    total = {name: sum(int(row[name]) for row in rows) for name in columns}
    dead = total["killed"] + total["timeout"]
    share = dead / max(1, total["mutants"])
    lines = [
        "# Mutants of zoo.functional",
        "",
        f"tests/functional kills {dead} of {total['mutants']} mutants, {100 * share:.1f} %.",
        "",
        "| module | lines covered | branches covered | mutants | killed | timed out | survived |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = " | ".join(str(row[name]) for name in columns)
        lines.append(f"| {row['module']} | {row['lines']} | {row['branches']} | {figures} |")
    figures = " | ".join(str(total[name]) for name in columns)
    lines += [f"| all | | | {figures} |", "", "## Survivors", ""]
    lines += ["| reason | mutants |", "|---|---|"]
    counts = collections.Counter(row["reason"] for row in survivors)
    lines += [f"| {reason} | {number} |" for reason, number in counts.most_common()]
    lines += [
        "",
        "Each is in survivors.csv with its line before and after. The reasons are from",
        "benchmarks/survivors.yaml.",
        "",
        "## How",
        "",
        "mutmut's mutations (numbers, operators, comparisons, arguments, defaults, strings and the",
        "wording of errors too), and those of benchmarks/mutators.py (a `detach`, `where`, `clamp`",
        "or check left out; arguments and operands swapped; another reduction; branches never or",
        "always taken). A mutant is killed when a test of tests/functional fails; equivalent ones",
        "count as survivors. Not mutated: constants, enumerations and tuples at module level, and",
        "defaults that are members of an enumeration.",
        "",
    ]
    machine, versions = origin["machine"], origin["versions"]
    made = sorted({(str(row["commit"]), str(row["dirty"]) == "True") for row in rows})
    commits = ", ".join(c + (" with uncommitted changes" if dirty else "") for c, dirty in made)
    commands = ", ".join(f"`{command}`" for command in sorted({row["command"] for row in rows}))
    lines += [
        f"Command: {commands}. Commit: {commits}. Seed of hypothesis: 0. "
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['system']}, "
        f"Python {versions['python']}, torch {versions['torch']}, "
        f"mutmut {', '.join(sorted({row['mutmut'] for row in rows}))}.",
        "",
    ]
    explained = not any(row["reason"].startswith("**") for row in survivors)
    return "\n".join(lines), explained and share >= REQUIRED


def read_reasons() -> dict[tuple[str, str, str], str]:
    """Why a mutant may live, by function, line before and line after."""
    entries = yaml.safe_load(REASONS.read_text(encoding="utf-8")) or []
    return {
        (function, one["before"], one["after"]): entry["reason"]
        for entry in entries
        for function, ones in entry["mutants"].items()
        for one in ones
    }


def _share(summary: dict[str, Any], kind: str) -> str:
    names = {"lines": ("covered_lines", "num_statements")}
    covered, number = names.get(kind, ("covered_branches", "num_branches"))
    return f"{summary[covered]} of {summary[number]}"


def _merge(path: Path, new: list[dict[str, Any]], modules: set[str]) -> list[dict[str, Any]]:
    """The new rows and the file's rows of other modules, by module."""
    kept: list[dict[str, Any]] = []
    if path.exists():
        with open(path, newline="", encoding="utf-8") as file:
            kept = [row for row in csv.DictReader(file) if row["module"] not in modules]
    return sorted([*kept, *new], key=lambda row: row["module"])


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["module"])
        writer.writeheader()
        writer.writerows(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, writes and prints; the status is 1 when too many mutants live, or one unexplained."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = sorted(p.stem for p in (REPOSITORY / PACKAGE).glob("*.py") if p.stem != "__init__")
    parser.add_argument("--module", action="append", choices=known, help="of zoo.functional")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page again")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "results/mutation")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work()
        return 0
    from zoo.measure.provenance import meta  # here: the worker must find the copy of zoo

    origin = meta()  # before the copy, since the checkout may change while mutants run
    modules = options.module or known
    words = [word for module in options.module or () for word in ("--module", module)]
    command = shlex.join(["python", "-m", "benchmarks.mutation", *words])
    mutants, coverage = [], {}
    if not options.page:
        with tempfile.TemporaryDirectory() as place:
            mutants, coverage = run(modules, Path(place))
    text, good = write(mutants, coverage, options.out, origin, command)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
