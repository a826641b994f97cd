"""How much one must read to follow one GRPO step, from prompts to optimizer step.

    python -m benchmarks.reading [out=results/reading]

Runs one step of `algorithm=grpo` by the plain path on an untrained tiny model under a tracer, and
counts the lines of every zoo function that was entered between the prompts and the end of the
optimizer step: sampling, reward, advantages, loss, backward, step. Lines are counted with
docstrings and comments, and as code alone. Two subjects of their own are summed apart: the verifier
that the reward calls, and the instruments that the step passes through (timers, memory, counts,
signals).
"""

from __future__ import annotations

import ast
import csv
import inspect
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ZOO = Path(__file__).resolve().parents[1] / "zoo"
OVERRIDES = [
    "algorithm=grpo",
    "model=tiny_random",
    "data=arithmetic",
    "rollout.fast=false",  # the plain path, which the fast one is compared with
    "model.packed=false",
    "train.steps=1",
    "train.groups=4",
    "evaluate.first=false",
    "evaluate.last=false",
    "measure.wandb=disabled",
    "measure.progress=false",
]
# What decides whether an answer is right: text in, verdict out.
VERIFIER = {
    f"zoo/rewards/{name}.py"
    for name in (
        "math",
        "answer",
        "compare",
        "expression",
        "extract",
        "normalize",
        "pool",
        "evaluate",
    )
}
# What measures and guards a step and computes nothing of it.
INSTRUMENTS = {
    "zoo/measure/memory.py",
    "zoo/measure/timing.py",
    "zoo/train/session.py",
    "zoo/train/interrupt.py",
}


def trace_step() -> dict[CodeType, str]:
    """The code objects of zoo that one step of the loop enters."""
    from zoo.compose import compose
    from zoo.instantiate import structured
    from zoo.train import loop
    from zoo.train.run import run
    from zoo.train.session import Session

    entered: dict[CodeType, str] = {}

    def tracer(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ZOO)):
            entered[code] = code.co_filename

    original, record = loop.train, Session.record

    def traced(*arguments: Any) -> None:
        entered[original.__code__] = original.__code__.co_filename
        sys.setprofile(tracer)
        try:
            original(*arguments)
        finally:
            sys.setprofile(None)

    def recorded(*arguments: Any) -> None:
        sys.setprofile(None)  # the optimizer step is done; what follows is bookkeeping
        record(*arguments)

    with tempfile.TemporaryDirectory() as folder:
        loop.train, Session.record = traced, recorded  # pyright: ignore
        try:
            run(structured(compose([*OVERRIDES, f"output={folder}"])))
        finally:
            loop.train, Session.record = original, record
    return entered


def line_counts(entered: dict[CodeType, str]) -> dict[str, dict[str, tuple[int, int]]]:
    """file → function → (lines, lines of code alone); inner functions count with their outer."""
    spans: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    covered: dict[str, set[int]] = defaultdict(set)
    ordered = sorted(entered, key=lambda code: (code.co_filename, code.co_firstlineno))
    for code in ordered:
        if code.co_name.startswith("<"):  # comprehensions and lambdas are part of their function
            continue
        lines, first = inspect.getsourcelines(code)
        numbers = set(range(first, first + len(lines)))
        new = numbers - covered[code.co_filename]
        if not new:
            continue
        covered[code.co_filename] |= numbers
        relative = str(Path(code.co_filename).relative_to(ZOO.parent))
        spans[relative][code.co_qualname] = (len(new), min(len(new), code_lines(lines)))
    return spans


def code_lines(lines: Sequence[str]) -> int:
    """Lines that are neither blank, comment nor docstring."""
    tree = ast.parse(textwrap.dedent("".join(lines)))
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            text = node.body[0]
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                skipped |= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return sum(
        1
        for number, line in enumerate(lines, 1)
        if number not in skipped and line.strip() and not line.strip().startswith("#")
    )


def main(argv: Sequence[str]) -> int:
    out = Path(dict(word.split("=", 1) for word in argv).get("out", "results/reading"))
    counts = line_counts(trace_step())
    rows = []
    for file, functions in sorted(counts.items()):
        rows.append(
            (
                file,
                len(functions),
                sum(n for n, _ in functions.values()),
                sum(n for _, n in functions.values()),
            )
        )
    parts = {
        "**the step**": [row for row in rows if row[0] not in VERIFIER | INSTRUMENTS],
        "the instruments": [row for row in rows if row[0] in INSTRUMENTS],
        "the verifier": [row for row in rows if row[0] in VERIFIER],
    }
    sums = {
        name: tuple(sum(row[i] for row in part) for i in (1, 2, 3)) for name, part in parts.items()
    }
    out.mkdir(parents=True, exist_ok=True)
    with (out / "reading.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "functions", "lines", "code_lines"])
        writer.writerows(rows)
    lines = [
        "# What one reads to follow one GRPO step",
        "",
        "Made by `python -m benchmarks.reading`: the zoo functions entered from the prompts to the",
        "end of the optimizer step; lines with docstrings and comments, and lines of code alone.",
        "",
        "| file | functions | lines | code |",
        "|---|---:|---:|---:|",
        *(f"| {file} | {n} | {a} | {b} |" for part in parts.values() for file, n, a, b in part),
        *(f"| {name} | {n} | {a} | {b} |" for name, (n, a, b) in sums.items()),
    ]
    (out / "reading.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[5:]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
