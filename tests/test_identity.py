"""Code and objects are the same where their source and state are, and nowhere else."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zoo.compose import compose
from zoo.config import RunConfig
from zoo.identity import identity
from zoo.instantiate import config_hash, resolved, structured
from zoo.rewards.function import Function


def enclosing(scale: float) -> Callable[..., list[float]]:
    def score(completions: list[str]) -> list[float]:
        return [scale * len(text) for text in completions]

    return score


def by_default(scale: float) -> Callable[..., list[float]]:
    return lambda completions, s=scale: [s * len(text) for text in completions]


def scaled(scale: float, completions: list[str]) -> list[float]:
    return [scale * len(text) for text in completions]


class Keeper:
    """Keeps its argument under another name, beside what cannot be looked into."""

    def __init__(self, scale: Any):
        self._scale = scale
        self._lock = threading.Lock()

    def __call__(self, prompts: Any, completions: Any) -> Any:
        return scaled(self._scale, completions)

    @functools.cached_property
    def loaded(self) -> object:
        return object()


class Slotted:
    __slots__ = ("_scale",)

    def __init__(self, scale: float):
        self._scale = scale

    def __call__(self, prompts: Any, completions: Any) -> Any:
        return scaled(self._scale, completions)


class Inner(Keeper):
    """Keeps what it is given inside another object."""

    def __init__(self, scale: float):
        super().__init__([Keeper({"scale": scale})])


MADE = {
    "closure": lambda scale: Function(enclosing(scale)),
    "default": lambda scale: Function(by_default(scale)),
    "partial": lambda scale: Function(functools.partial(scaled, scale)),
    "partial keyword": lambda scale: Function(functools.partial(scaled, scale=scale)),
    "bound method": lambda scale: Function(Keeper(scale).__call__),
    "callable object": lambda scale: Function(Keeper(scale)),
    "private attribute": Keeper,
    "slots": Slotted,
    "inside": Inner,
    "tensor": lambda scale: Keeper(torch.tensor([[scale], [0.0]], dtype=torch.bfloat16)),
    "array": lambda scale: Keeper(np.array([scale])),
    "module": lambda scale: Keeper(torch.nn.ParameterList([torch.full((2,), scale)])),
    "local class": lambda scale: type("Local", (Keeper,), {"__doc__": "mine"})(scale),
}


def run_of(reward: Any) -> RunConfig:
    return replace(structured(compose([])), reward=reward)


@pytest.mark.parametrize("kind", MADE)
def test_rewards_made_in_python_are_one_run_only_where_their_state_is_equal(kind: str) -> None:
    make = MADE[kind]
    assert config_hash(run_of(make(1.0))) == config_hash(run_of(make(1.0)))
    assert config_hash(run_of(make(1.0))) != config_hash(run_of(make(-1.0)))
    assert "#" not in str(resolved(run_of(make(1.0)))["reward"])  # which is written to config.yaml


def test_two_lambdas_of_one_line_are_two() -> None:
    first, second = lambda c: [1.0 for _ in c], lambda c: [2.0 for _ in c]
    assert identity(first) != identity(second)


def test_what_is_found_by_its_path_is_the_run_of_its_path() -> None:
    path = f"{__name__}.by_default"
    assert config_hash(run_of(Function(by_default))) == config_hash(run_of(Function(path)))


def test_a_computed_attribute_a_lock_and_a_ring_are_no_difference() -> None:
    one, other = Keeper(1.0), Keeper(1.0)
    assert one.loaded is one.loaded
    assert identity(one) == identity(other)
    one._scale, other._scale = [one], [other]
    assert identity(one) == identity(other)


CODE = """
import mine_too
LIMIT = {limit}
calls = 0
def inner(text): return mine_too.deep(text) + {inner}
class Reward:
    def __call__(self, prompts, completions):
        global calls
        calls += 1
        return [inner(c.text) + LIMIT for c in completions]
"""


def test_code_is_what_it_names_too_but_not_what_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)

    def told(limit: int = 1, inner: int = 1, deep: int = 1, calls: int = 0) -> str:
        for name in ("mine_here", "mine_too"):
            sys.modules.pop(name, None)
        (tmp_path / "mine_here.py").write_text(CODE.format(limit=limit, inner=inner))
        (tmp_path / "mine_too.py").write_text(f"def deep(text): return {deep}")
        importlib.invalidate_caches()
        module = importlib.import_module("mine_here")
        module.calls = calls
        return identity(module.Reward)

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    first = told()
    assert first == told() == told(calls=7)
    assert len({first, told(limit=2), told(inner=2), told(deep=2)}) == 4


def test_another_process_tells_the_same() -> None:
    code = (
        "from tests.test_identity import *\n"
        "words = {'a', 'b', 'c', 'd', frozenset({'x', 'y', 'z'})}\n"
        "print(identity([enclosing(1.0), Inner(1.0), words, np.arange(3), Path('x')]))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PATH": "", "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1 and told != {""}
