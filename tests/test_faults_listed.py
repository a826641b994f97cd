"""Every public fault of the shared list is a test that bears its id."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.conftest import REPOSITORY

ID = re.compile(r"(?<![A-Za-z0-9])[Bb](\d{2,3})(?![A-Za-z0-9])")


def ids(text: str) -> set[str]:
    """B01, B100, … as they stand between underscores or other marks; `test_b05_…` has B05."""
    return {f"B{number}" for number in ID.findall(text.replace("_", " "))}


def borne(tree: ast.Module) -> set[str]:
    """Ids in the names of a module's tests, and in those that they are parametrized with."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        found |= ids(node.name)
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and "parametrize" in ast.unparse(decorator.func):
                for each in ast.walk(decorator):
                    if isinstance(each, ast.keyword) and each.arg in ("id", "ids"):
                        found |= ids(ast.unparse(each.value))
    return found


def test_every_listed_fault_is_a_test(shared: Path) -> None:
    listed = re.findall(r"^\| (B\d+) \|", (shared / "FAULTS.md").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed)) == 60
    tested: set[str] = set()
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        tested |= borne(ast.parse(path.read_text(encoding="utf-8")))
    missing = [fault for fault in listed if fault not in tested]
    assert not missing, f"no test bears {', '.join(missing)}"


def test_only_names_and_ids_of_tests_count() -> None:
    module = ast.parse(
        "# B01\n"
        "def helper_B02(): 'B03'\n"
        "def test_b04_x(): assert 'B05'\n"
        "@pytest.mark.parametrize('a', ['B06'], ids=['B07 y'])\n"
        "def test_x_B100_B08(a): ...\n"
        "def test_AB09(): ...\n"
    )
    assert borne(module) == {"B04", "B07", "B08", "B100"}
