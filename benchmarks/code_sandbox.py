"""How far the code reward can be trusted: hostile programs, reference solutions, mutants, speed.

    python -m benchmarks.code_sandbox [--shared PATH] [--every 1] [--out results/code/code.md]

Hostile programs: `data/code/hostile.jsonl` of the shared folder; verdict, time, files made and
processes left. Reference solutions of MBPP and HumanEval must score 1. Mutants of them must score 0
where the tests can tell: the oracle is the plain assertion, run beside the code, of a program that
does not cheat. Every mutant that scores 1, and every one on which the two disagree, is listed in
`survivors.csv` beside the page, with the first call of the tests whose value it changes: without
one it is no different to the tests, with one the assertion itself allows the other value.
"""

import argparse
import ast
import collections
import csv
import functools
import gzip
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zoo.rewards._plain import Malformed, decode, same
from zoo.rewards.code import (
    CodeVerdict,
    _assertions,
    _check_function,
    cores,
    run_asserts,
    run_check,
    run_many,
    run_tests,
)
from zoo.rewards.sandbox import isolation_report, run_program

REPOSITORY = Path(__file__).resolve().parents[1]
SWAPS: dict[type, Any] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


# ------------------------------------------------------------------ mutants


def without_value(code: str, name: str) -> str:
    """The function computes as before and returns None."""
    return f"{code}\n_right = {name}\ndef {name}(*a, **k):\n    _right(*a, **k)\n"


def other_operator(code: str, draw: random.Random) -> str | None:
    """One operator or comparison exchanged for its opposite."""
    tree = ast.parse(code)
    sites = [n for n in ast.walk(tree) if isinstance(n, ast.BinOp | ast.BoolOp | ast.Compare)]
    sites = [n for n in sites if type(n.ops[0] if isinstance(n, ast.Compare) else n.op) in SWAPS]
    if not sites:
        return None
    site = draw.choice(sites)
    if isinstance(site, ast.Compare):
        site.ops[0] = SWAPS[type(site.ops[0])]()
    else:
        site.op = SWAPS[type(site.op)]()
    return ast.unparse(tree)


def other_constant(code: str, draw: random.Random) -> str | None:
    """One number raised by one, or one text made longer."""
    tree = ast.parse(code)
    sites = [n for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    sites = [n for n in sites if type(n.value) in (int, float)]
    if not sites:
        return None
    draw.choice(sites).value += 1
    return ast.unparse(tree)


def changed_line(code: str, mutant: str) -> str:
    """The first line that differs, before and after."""
    before, after = (ast.unparse(ast.parse(c)).splitlines() for c in (code, mutant))
    pairs = (p for p in zip(before, after, strict=False) if p[0] != p[1])
    return " → ".join(line.strip() for line in next(pairs, ("", after[-1])))


def changed_value(code: str, mutant: str, steps: list[tuple[str, str]]) -> str:
    """The first call of the tests that gives another value; "" where all give the same."""
    runs = [run_program(c, steps, timeout=10.0).messages for c in (code, mutant)]
    sources = [source for _, source in steps] + ["done"]
    for source, (_, one), (_, other) in zip(sources, *runs, strict=False):
        try:
            equal = same(decode(one), decode(other))
        except Malformed:
            equal = one == other
        if not equal:
            return f"{source}: {one[:60]} → {other[:60]}".replace("\n", " ")[:200]
    return "" if len(runs[0]) == len(runs[1]) else "ends otherwise"


# ------------------------------------------------------------------ data sets


def mbpp(shared: Path) -> list[dict[str, Any]]:
    """{id, code, name, score(code) → verdict, asserts, steps} for each problem."""
    problems = []
    for line in (shared / "data/code/mbpp.jsonl").read_text().splitlines():
        row = json.loads(line)
        left = ast.parse(row["test_list"][0]).body[0].test.left  # type: ignore[attr-defined]
        names = [c.func.id for c in ast.walk(left) if isinstance(c, ast.Call)]
        defined = {n.name for n in ast.parse(row["code"]).body if isinstance(n, ast.FunctionDef)}
        setup = row["test_setup_code"]
        problems.append(
            {
                "id": f"MBPP/{row['task_id']}",
                "code": row["code"],
                "name": next((n for n in names if n in defined), names[0]),
                "score": functools.partial(_mbpp_score, tests=row["test_list"], setup=setup),
                "asserts": "\n".join([setup, *row["test_list"]]),
                "steps": [("exec", setup)] * bool(setup)
                + [step for a in row["test_list"] for t in _assertions(a) for step in t.steps],
            }
        )
    return problems


def _mbpp_score(code: str, tests: list[str], setup: str, timeout: float) -> CodeVerdict:
    return run_asserts(code, tests, setup, timeout)


def human_eval(shared: Path) -> list[dict[str, Any]]:
    """The same for HumanEval."""
    problems = []
    with gzip.open(shared / "data/code/HumanEval.jsonl.gz", "rt") as file:
        for row in map(json.loads, file):
            name, test = row["entry_point"], row["test"]
            problems.append(
                {
                    "id": row["task_id"],
                    "code": row["prompt"] + row["canonical_solution"],
                    "name": name,
                    "score": functools.partial(_human_eval_score, test=test, name=name),
                    "asserts": f"{test}\ncheck({name})",
                    "steps": [step for t in _check_function(test, name) for step in t.steps],
                }
            )
    return problems


def _human_eval_score(code: str, test: str, name: str, timeout: float) -> CodeVerdict:
    return run_check(code, test, name, timeout)


def plain_assertions_hold(code: str, asserts: str, timeout: float) -> bool:
    """The oracle: code and assertions in one program."""
    outcome = run_program(code, [("exec", asserts)], timeout=timeout)
    return ("0", '{"v":null}') in outcome.messages


# ------------------------------------------------------------------ measurements


def measure_problems(problems: list[dict[str, Any]], every: int, seed: int = 0) -> dict[str, Any]:
    """Scores of all references, and of the mutants of every n-th beside the oracle's verdicts.

    `survivors` has a row for each mutant that scored 1 or on which the two disagree.
    """
    jobs = [functools.partial(p["score"], p["code"], timeout=60.0) for p in problems]
    started = time.perf_counter()
    references = run_many(jobs)
    seconds = time.perf_counter() - started
    figures: dict[str, Any] = {
        "references": len(problems),
        "passed": sum(v.score == 1.0 for v in references),
        "failed": [
            f"{p['name']}: {v.reason} {v.detail}"
            for p, v in zip(problems, references, strict=True)
            if v.score != 1.0
        ],
        "cheatable": sum(v.cheatable > 0 for v in references),
        "per second": len(problems) / seconds,
        "mutants": {},
        "survivors": [],
    }
    makers: dict[str, Callable[[dict[str, Any], random.Random], str | None]] = {
        "returns None": lambda p, draw: without_value(p["code"], p["name"]),
        "operator": lambda p, draw: other_operator(p["code"], draw),
        "constant": lambda p, draw: other_constant(p["code"], draw),
    }
    for kind, make in makers.items():
        draw = random.Random(seed)
        mutants = [(p, code) for p in problems[::every] if (code := make(p, draw)) is not None]
        jobs = [functools.partial(p["score"], code, timeout=2.0) for p, code in mutants]
        verdicts = run_many(jobs)
        oracle = [
            functools.partial(plain_assertions_hold, code, p["asserts"], 2.0) for p, code in mutants
        ]
        truth = run_many(oracle)  # type: ignore[arg-type]
        pairs = collections.Counter(zip(truth, (v.score for v in verdicts), strict=True))
        figures["mutants"][kind] = {
            "made": len(mutants),
            "seen by the tests": sum(not t for t in truth),
            "of these scored 0": pairs[False, 0.0],
            "not seen": sum(truth),
            "of these scored 1": pairs[True, 1.0],
        }
        kept = [
            (p, code, v, holds)
            for (p, code), v, holds in zip(mutants, verdicts, truth, strict=True)
            if v.score == 1.0 or holds
        ]
        jobs = [functools.partial(changed_value, p["code"], c, p["steps"]) for p, c, _, _ in kept]
        changes = run_many(jobs)  # type: ignore[arg-type]
        figures["survivors"] += [
            {
                "problem": p["id"],
                "mutation": kind,
                "line": changed_line(p["code"], code),
                "assertions hold": holds,
                "score": v.score,
                "reason": v.reason,
                "changed value": changed,
            }
            for (p, code, v, holds), changed in zip(kept, changes, strict=True)
        ]
    return figures


def measure_hostile(
    path: Path,
) -> tuple[collections.Counter, collections.Counter, list[str], float]:
    """(right, all) by kind, what went wrong, and the slowest verdict in seconds."""
    isolated = isolation_report()[0].active
    right, total, wrong, slowest = collections.Counter(), collections.Counter(), [], 0.0
    for case in map(json.loads, path.read_text().splitlines()):
        if case["dangerous"] and not isolated:
            wrong.append(f"{case['name']}: not run, no PID namespace here")
            continue
        started = time.perf_counter()
        verdict = run_tests(case["code"], case["tests"], timeout=5.0)
        seconds = time.perf_counter() - started
        slowest = max(slowest, seconds)
        faults = []
        if case["expected"] is not None and verdict.score != case["expected"]:
            faults.append(f"scored {verdict.score}, expected {case['expected']} ({verdict.reason})")
        if seconds > case["max_seconds"]:
            faults.append(f"took {seconds:.1f} s")
        for made in case["must_not_exist"]:
            if not made.startswith("@") and os.path.lexists(os.path.expanduser(made)):
                faults.append(f"made {made}")
        if case["marker"] and (left := _processes_with(case["marker"])):
            faults.append(f"left {left} processes")
        total[case["kind"]] += 1
        right[case["kind"]] += not faults
        wrong += [f"{case['name']}: {fault}" for fault in faults]
    return right, total, wrong, slowest


def _processes_with(marker: str) -> int:
    count = 0
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += marker.encode() in entry.read_bytes()
        except OSError:
            continue
    return count


def measure_speed(seconds: float = 5.0) -> list[tuple[int, float, float, float, float]]:
    """(workers, programs a second, median ms, 95th percentile ms, CPU ms a program)."""
    code, tests = "def add(a, b):\n    return a + b\n", [{"call": "add(1, 2)", "expected": "3"}]
    took: list[float] = []

    def timed() -> CodeVerdict:
        started = time.perf_counter()
        verdict = run_tests(code, tests)
        took.append(time.perf_counter() - started)
        return verdict

    rows = []
    for workers in sorted({1, cores(), 2 * cores()}):
        took.clear()
        count, started, before = 0, time.perf_counter(), _cpu_seconds()
        while time.perf_counter() - started < seconds:
            verdicts = run_many([timed] * (16 * workers), workers)
            assert all(v.score == 1.0 for v in verdicts)
            count += len(verdicts)
        wall, cpu = time.perf_counter() - started, _cpu_seconds() - before
        milliseconds = sorted(1000 * t for t in took)
        ninety_fifth = milliseconds[int(0.95 * len(milliseconds))]
        median = statistics.median(milliseconds)
        rows.append((workers, count / wall, median, ninety_fifth, 1000 * cpu / count))
    return rows


def _cpu_seconds() -> float:
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


# ------------------------------------------------------------------ the page


def commit() -> str:
    """Short hash of the checkout, with a mark where it has changes."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    run = subprocess.run(command, capture_output=True, text=True)
    return run.stdout.strip() or "none"


def page(shared: Path, every: int, command: str) -> tuple[str, list[dict[str, Any]]]:
    """Measure everything and return the page as markdown, and the surviving mutants."""
    lines = ["# Code reward: what it stops, what it lets through, what it costs", ""]
    lines += [f"Command: `{command}`  ", f"Commit: {commit()}  "]
    machine = f"{platform.machine()}, {cores()} cores, Linux {platform.release().split('-')[0]}"
    load = os.getloadavg()[0]
    lines += [f"Machine: {machine}, Python {platform.python_version()}, load {load:.1f}", ""]

    lines += ["## Layers of isolation on this machine", "", "| layer | active | detail |"]
    lines += ["|---|---|---|"]
    for layer in isolation_report():
        # The interpreter's name is enough: where it lies says nothing to others.
        detail = Path(layer.detail).name if layer.detail.startswith("/") else layer.detail
        lines.append(f"| {layer.name} | {'yes' if layer.active else 'no'} | {detail} |")

    right, total, wrong, slowest = measure_hostile(shared / "data/code/hostile.jsonl")
    lines += [
        "",
        "## Hostile and benign programs",
        "",
        "| kind | right | programs |",
        "|---|---|---|",
    ]
    lines += [f"| {kind} | {right[kind]} | {total[kind]} |" for kind in sorted(total)]
    lines += [f"| all | {right.total()} | {total.total()} |", ""]
    lines += [f"Slowest verdict {slowest:.1f} s, at a limit of 5 s.", ""]
    lines += [f"- {fault}" for fault in wrong]

    lines += ["## Reference solutions and mutants", ""]
    lines += ["| data | references | scored 1 | with a cheatable test |", "|---|---|---|---|"]
    table, failed, survivors = [], [], []
    for name, problems in (("MBPP", mbpp(shared)), ("HumanEval", human_eval(shared))):
        figures = measure_problems(problems, every)
        row = f"| {name} | {figures['references']} | {figures['passed']} | {figures['cheatable']} |"
        lines.append(row)
        failed += [f"- {name}, {fault}" for fault in figures["failed"]]
        survivors += figures["survivors"]
        for kind, f in figures["mutants"].items():
            table.append(f"| {name} | {kind} | " + " | ".join(str(v) for v in f.values()) + " |")
    unseen = [s for s in survivors if s["assertions hold"]]
    lines += ["", "| data | mutation | made | seen by the tests | of these scored 0 | not seen |"]
    lines[-1] += " of these scored 1 |"
    lines += ["|---|---|---|---|---|---|---|", *table, "", *failed]
    lines += [
        "Seen by the tests: the plain assertions, run beside the mutant, fail or take 2 s.",
        f"Of the {len(unseen)} that they do not see (`survivors.csv`), "
        f"{sum(not s['changed value'] for s in unseen)} return the reference's own value from "
        "every call of the tests; the others return one that the assertion allows.",
        "",
    ]

    lines += ["## Speed", "", "One call of one test, from `run_tests` to its verdict.", ""]
    lines += ["| workers | programs a second | median ms | 95 % ms | CPU ms a program |"]
    lines += ["|---|---|---|---|---|"]
    for workers, rate, median, high, cpu in measure_speed():
        lines.append(f"| {workers} | {rate:.0f} | {median:.0f} | {high:.0f} | {cpu:.0f} |")
    return "\n".join(lines) + "\n", survivors


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the code reward and write its page.")
    shared = os.environ.get("ZOO_SHARED", str(REPOSITORY.parent / "shared"))
    parser.add_argument("--shared", type=Path, default=Path(shared))
    parser.add_argument("--every", type=int, default=1, help="mutate every n-th problem")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "results/code/code.md")
    options = parser.parse_args()
    if not options.shared.is_dir():
        sys.exit(f"no shared data at {options.shared}: pass --shared or set ZOO_SHARED.")
    every = f" --every {options.every}" if options.every != 1 else ""
    command = f"python -m benchmarks.code_sandbox{every}"
    text, survivors = page(options.shared, options.every, command)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text)
    with open(options.out.with_name("survivors.csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, list(survivors[0]) if survivors else [])
        writer.writeheader()
        writer.writerows(survivors)
    print(text)


if __name__ == "__main__":
    main()
