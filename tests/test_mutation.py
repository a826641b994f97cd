"""The mutation run: what its own mutators make of a line, and when its page is content."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

cst = pytest.importorskip("libcst", reason="needs mutmut")
pytest.importorskip("mutmut")

from benchmarks.mutation import changed, read_reasons, write  # noqa: E402
from benchmarks.mutators import OPERATORS  # noqa: E402

ORIGIN = {
    "commit": "c0ffee",
    "dirty": False,
    "machine": {"cpu": "a CPU", "cores": 2, "system": "Linux"},
    "versions": {"python": "3.11", "torch": "2.13"},
}
COVERED = {
    "covered_lines": 9,
    "num_statements": 10,
    "covered_branches": 2,
    "num_branches": 2,
}


def mutants(code: str) -> dict[str, list[str]]:
    """By operator: the code after each of its mutations."""
    module = cst.parse_module(code)
    found: dict[str, list[str]] = {}

    class Visitor(cst.CSTVisitor):
        def on_visit(self, node: Any) -> bool:
            for kind, operator in OPERATORS:
                for other in operator(node) if isinstance(node, kind) else ():
                    after = module.deep_replace(node, other).code.strip()
                    found.setdefault(operator.__name__, []).append(after)
            return True

    module.visit(Visitor())
    return found


@pytest.mark.parametrize(
    ("operator", "code", "expected"),
    [
        ("dropped_call", "y = x.detach()", ["y = x"]),
        ("dropped_call", "y = torch.exp(x)", None),
        ("other_call", "y = torch.minimum(a, b)", ["y = torch.maximum(a, b)"]),
        ("other_call", "y = x.sum(dim=1)", ["y = x.mean(dim=1)"]),
        ("swapped_arguments", "y = where(c, a, b)", ["y = where(c, b, a)"]),
        ("swapped_arguments", "y = minimum(a, b)", None),
        ("swapped_operands", "y = a - b - c", ["y = (c) - (a - b)", "y = (b) - (a) - c"]),
        ("swapped_operands", "y = a + b", None),
        ("opposite_comparison", "y = a < b", ["y = a >= b"]),
        ("smaller_number", "y = x.amax(dim=1)", ["y = x.amax(dim=(0))"]),
        (
            "forced_branch",
            "if a:\n    b()",
            ["if (a) and False:\n    b()", "if (a) or True:\n    b()"],
        ),
        ("dropped_statement", "check(x)", ["pass"]),
        ("dropped_statement", "x = where(m, x, 0)", ["pass"]),
        ("dropped_statement", "x[:, t] = y", ["pass"]),
        ("dropped_statement", "x = where(m, y, 0)", None),
        ("negated_result", "def f():\n    return a - b", ["def f():\n    return -(a - b)"]),
    ],
)
def test_mutations_of_a_line(operator: str, code: str, expected: list[str] | None) -> None:
    assert mutants(code).get(operator) == expected


def test_the_lines_of_a_diff() -> None:
    diff = "--- a\n+++ a\n@@ -1,3 +1,2 @@\n def f():\n-    x = g(\n-        1)\n+    x = g(2)"
    assert changed(diff) == ("x = g( 1)", "x = g(2)")


def test_a_survivor_needs_a_reason_and_19_of_20_must_die(tmp_path: Path) -> None:
    ((function, before, after), reason) = next(iter(read_reasons().items()))
    module, _, name = function.partition(".")
    known = {"module": module, "function": name, "before": before, "after": after}
    dead = {"module": module, "function": name, "status": "killed"}
    alive = {**known, "status": "survived"}

    def good(*ones: dict[str, Any]) -> bool:
        return write(ones, {module: COVERED}, tmp_path, ORIGIN, "command")[1]

    assert good(*[dead] * 19, alive)
    rows = csv.DictReader((tmp_path / "survivors.csv").read_text().splitlines())
    assert [row["reason"] for row in rows] == [reason]
    page = (tmp_path / "summary.md").read_text()
    assert "19 of 20 mutants, 95.0 %" in page and "| 9 of 10 | 2 of 2 | 20 | 19 | 0 | 1 |" in page
    assert not good(*[dead] * 18, alive)
    assert not good(*[dead] * 39, {**alive, "after": "something else"})
    assert not good(*[dead] * 39, {**alive, "status": "no tests"})


def test_a_run_of_one_module_keeps_the_rows_of_the_others(tmp_path: Path) -> None:
    def run(module: str, killed: int) -> str:
        ones = [{"module": module, "function": "f", "status": "killed"}] * killed
        return write(ones, {module: COVERED}, tmp_path, ORIGIN, "command")[0]

    run("a", 3)
    run("b", 4)
    assert "kills 6 of 6 mutants" in run("a", 2)
