"""A module that was edited and not reloaded runs as it was: whoever trains with it is told."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import linecache
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.e2e.small import folder_of, run_small
from zoo.config import ConfigError
from zoo.identity import edited_since_import, identity

SOURCE = """
import functools
import json

import stale_helper
from stale_helper import helped

SCALE = 1.0

WORDS = ["a"]

def of(completions):
    WORDS[:0]
    return [SCALE * len(helped(text)) for text in completions]

def uses(completions):
    return of(completions)

class Scorer:
    @staticmethod
    def of_length(text):
        return len(text)

    @property
    def bound(self):
        return [x for x in range(3)]

    def __call__(self, completions):
        return [0.0 for _ in completions]

    @functools.cached_property
    def mean(self):
        return 0.25

    @functools.lru_cache
    def known(self):
        return 0.125

    @bound.setter
    def bound(self, value):
        self.limit = 64

    class Inner:
        def depth(self):
            return 32

    again = __call__

Scorer.itself = Scorer

@functools.lru_cache
def kept(text):
    return 1

def uses_kept(completions):
    return [kept(text) for text in completions]
"""
HELPER = "def helped(text):\n    return text\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    write(tmp_path / "stale_mine.py", SOURCE)
    write(tmp_path / "stale_helper.py", HELPER)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield importlib.import_module("stale_mine")
    for name in ("stale_mine", "stale_helper"):
        sys.modules.pop(name, None)


def write(path: Path, text: str, at: float | None = None) -> None:
    path.write_text(text)
    at = time.time() + 10 if at is None else at  # no pyc of the same second is taken for it
    os.utime(path, (at, at))


def edit(module: types.ModuleType, old: str, new: str) -> None:
    assert module.__file__
    path = Path(module.__file__)
    assert old in path.read_text()
    write(path, path.read_text().replace(old, new), time.time() + 20)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SCALE * len", "SCALE + len"),
        ("return len(text)", "return -len(text)"),
        ("for x in range(3)", "for x in range(4)"),
        ("0.0 for _", "1.0 for _"),
        ("return 1", "return 2"),
    ],
)
def test_an_edit_of_a_function_is_told_until_it_is_reloaded(
    old: str, new: str, module: types.ModuleType
) -> None:
    assert edited_since_import(module.of) == []
    edit(module, old, new)
    for value in (module.of, module.Scorer):
        assert edited_since_import(value) == [module.__file__]
    edit(module, new, old)
    assert edited_since_import(module.of) == []
    edit(module, old, new)
    importlib.reload(module)
    assert edited_since_import(module.of) == []


@pytest.mark.parametrize("new", ["def renamed(", "def of)("])
def test_a_function_that_is_gone_or_no_python_is_told(new: str, module: types.ModuleType) -> None:
    edit(module, "def of(", new)
    assert edited_since_import(module.of) == [module.__file__]


def test_the_modules_that_it_names_count_too(module: types.ModuleType) -> None:
    helper = sys.modules["stale_helper"]
    edit(helper, "return text", "return text * 2")
    assert edited_since_import(module.of) == [helper.__file__]
    assert edited_since_import(json.dumps) == []


def test_code_that_was_put_in_place_is_no_older(module: types.ModuleType) -> None:
    """As autoreload does: the function is the same, and its code the file's."""
    edit(module, "SCALE * len", "SCALE + len")
    assert module.__file__
    fresh: dict[str, object] = {}
    exec(
        compile(Path(module.__file__).read_text(), module.__file__, "exec", dont_inherit=True),
        fresh,
    )
    module.of.__code__ = fresh["of"].__code__  # pyright: ignore
    assert edited_since_import(module.of) == []


@pytest.mark.parametrize("name", ["of", "Scorer", "uses"])
def test_what_runs_is_told_from_what_the_file_holds_before_and_after(
    name: str, module: types.ModuleType
) -> None:
    """Else a run of the old code would be passed off as one of the new, or of the first."""
    old, new = {"Scorer": ("0.0 for _", "1.0 for _")}.get(name, ("SCALE * len", "SCALE + len"))
    first = identity(getattr(module, name))
    edit(module, old, new)
    older = identity(getattr(module, name))
    assert older == first
    importlib.reload(module)
    assert identity(getattr(module, name)) != first
    edit(module, new, old)
    importlib.reload(module)
    assert identity(getattr(module, name)) == first


def test_another_place_in_the_file_and_other_comments_are_no_other_code(
    module: types.ModuleType,
) -> None:
    first = identity(module.of), identity(module.Scorer)
    edit(module, "import functools", "# what it is\n\nimport functools")
    assert (identity(module.of), identity(module.Scorer)) == first


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SCALE = 1.0", "SCALE = 2.0"),
        ('WORDS = ["a"]', 'WORDS = ["a", "b"]'),
        ("def helped(text):", "def helped(word):"),
        ("return text", "return text * 2"),
    ],
)
def test_what_is_no_function_and_what_is_in_other_modules_runs_as_it_was_too(
    old: str, new: str, module: types.ModuleType
) -> None:
    first = identity(module.of)
    edited = module if "=" in old else sys.modules["stale_helper"]
    edit(edited, old, new)
    assert identity(module.of) == first
    assert edited_since_import(module.of) == [edited.__file__]
    for name in ("stale_helper", "stale_mine"):
        importlib.reload(sys.modules[name])
    assert identity(module.of) != first and edited_since_import(module.of) == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("of", "SCALE * len", "SCALE + len"),
        ("Scorer", "0.0 for _", "1.0 for _"),
        ("Scorer", "return len(text)", "return -len(text)"),
        ("Scorer", "return 0.25", "return 0.5"),
        ("Scorer", "return 0.125", "return 0.5"),
        ("Scorer", "self.limit = 64", "self.limit = 65"),
        ("Scorer", "return 32", "return 33"),
        ("uses_kept", "return 1", "return 2"),
    ],
)
def test_functions_that_were_edited_before_they_were_first_looked_at_are_no_new_ones(
    name: str, old: str, new: str, module: types.ModuleType
) -> None:
    edit(module, old, new)
    before = identity(getattr(module, name))
    assert edited_since_import(getattr(module, name)) == [module.__file__]
    importlib.reload(module)
    new_one = identity(getattr(module, name))
    edit(module, new, old)
    importlib.reload(module)
    assert len({before, new_one, identity(getattr(module, name))}) == 3


def test_an_edit_that_is_undone_is_none(module: types.ModuleType) -> None:
    edit(module, "SCALE * len", "SCALE + len")
    older = identity(module.of)
    edit(module, "SCALE + len", "SCALE * len")
    assert edited_since_import(module.of) == [] and identity(module.of) != older
    undone = identity(module.of)
    importlib.reload(module)
    assert identity(module.of) == undone


@pytest.mark.parametrize("way", [["-m", "stale_main"], ["stale_main.py"]])
def test_of_a_program_that_is_run_the_file_is_its_source(way: list[str], tmp_path: Path) -> None:
    told = set()
    for word in ("a", "b"):
        write(
            tmp_path / "stale_main.py",
            f"from zoo.identity import edited_since_import, identity\nWORDS = ['{word}']\n"
            "def of(completions):\n    return [float(text in WORDS) for text in completions]\n"
            "print(identity(of), edited_since_import(of))\n",
            time.time() - 3600,
        )
        environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
        run = [sys.executable, *way]
        done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.stdout.endswith(" []\n"), done.stderr
        told.add(done.stdout)
    assert len(told) == 2


@pytest.mark.parametrize(
    ("first", "second"), [("a, b", "a, *, b"), ("a, b", "a, *b"), ("a, b", "a, c")]
)
def test_older_functions_with_other_arguments_are_others(
    first: str, second: str, module: types.ModuleType
) -> None:
    told = []
    for arguments in (first, second):
        last = arguments.split(", ")[-1].lstrip("*")
        text = f"def pair({arguments}):\n    return a, {last}\n"
        assert module.__file__
        write(Path(module.__file__), text, time.time() + 30)
        importlib.reload(module)
        held = module.pair
        write(Path(module.__file__), "def pair():\n    return 0\n", time.time() + 40)
        importlib.reload(module)
        told.append(identity(held))
    assert told[0] != told[1]


def test_a_function_taken_before_its_module_was_reloaded_is_the_older_one(
    module: types.ModuleType,
) -> None:
    helper, first = sys.modules["stale_helper"], identity(module.of)
    edit(helper, "return text", "return text * 2")
    importlib.reload(helper)
    assert module.of(["ab"]) == [2.0] and edited_since_import(module.of) == [helper.__file__]
    held = identity(module.of)
    importlib.reload(module)
    assert module.of(["ab"]) == [4.0] and edited_since_import(module.of) == []
    assert len({first, held, identity(module.of)}) == 3


def test_what_a_reload_leaves_of_older_names_is_no_sign(module: types.ModuleType) -> None:
    edited_since_import(module.of)
    edit(module, "def uses(", "def renamed(")
    importlib.reload(module)
    assert edited_since_import(module.of) == []


def test_a_notebooks_functions_are_told_apart_by_their_cells() -> None:
    """Their arguments choose the columns, and no bytecode tells their names."""
    told = []
    for place, argument in enumerate(("answer", "distractor")):
        source = f"def reward(completions, {argument}):\n    return [float(len({argument}))]\n"
        name, space = f"<ipython-input-{place}>", {"__name__": "__main__"}
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), space)
        told.append(identity(space["reward"]))
    assert told[0] != told[1]


def test_strange_globals_of_a_module_hurt_nobody(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lazy:
        @property
        def __class__(self):
            raise RuntimeError("not configured")

    monkeypatch.setattr(module, "settings", Lazy(), raising=False)
    monkeypatch.setitem(sys.modules, "stale_slots", object())  # pyright: ignore
    first = identity(module.of)
    edit(module, "SCALE * len", "SCALE + len")
    assert identity(module.of) == first
    assert edited_since_import(module.of) == [module.__file__]


def test_what_is_decorated_is_compared_within(module: types.ModuleType) -> None:
    setattr(module, "of", functools.wraps(module.of)(lambda completions: None))  # noqa: B010
    assert edited_since_import(module.Scorer) == []
    edit(module, "SCALE * len", "SCALE + len")
    assert edited_since_import(module.Scorer) == [module.__file__]


def test_a_file_from_before_the_process_and_code_rewritten_on_import_tell_nothing(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rewriting(SourceFileLoader):
        pass

    edit(module, "SCALE * len", "SCALE + len")
    assert edited_since_import(module.of) == [module.__file__]
    with monkeypatch.context() as patch:
        assert module.__file__
        patch.setattr(module, "__loader__", Rewriting("stale_mine", module.__file__))
        assert edited_since_import(module.of) == []
    os.utime(module.__file__, (1e9, 1e9))
    assert edited_since_import(module.of) == []


def test_a_run_with_a_reward_that_was_edited_and_not_reloaded_says_so(
    module: types.ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["algorithm=grpo", "reward=function", "reward.fn=stale_mine.of", "train.steps=1"]
    words += ["evaluate.first=false", "evaluate.last=false"]
    for name, told in (("before", False), ("after", True)):
        if told:
            edit(module, "SCALE * len", "SCALE + len")
        run_small(tmp_path / name, *words)
        lines = (folder_of(tmp_path / name) / "warnings.jsonl").read_text().splitlines()
        stale = [x["message"] for x in map(json.loads, lines) if x["kind"] == "stale_code"]
        assert [f"{module.__file__} was edited after" in message for message in stale] == [
            True
        ] * told
    importlib.reload(module)  # as a new process would import it
    with pytest.raises(ConfigError, match=r"holds a finished run.*reward\.fn=stale_mine\.of"):
        run_small(tmp_path / "after", *words)
