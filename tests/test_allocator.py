"""Freed memory stays with the process, unless its owner has decided otherwise."""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys

import pytest

from zoo.allocator import keep_freed_memory
from zoo.compose import compose
from zoo.instantiate import structured

# Bytes of pages faulted in by ten steps that each hold 16 tensors of 8 MiB and let go of them
COUNTING = """
import resource, torch
from zoo.allocator import keep_freed_memory
print(keep_freed_memory())
for i in range(12):
    if i == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(2**21) for _ in range(16)]
    del held
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())
"""


def counted(program: str = COUNTING, **environment: str) -> tuple[str, int]:
    ours = ("MALLOC_", "GLIBC_", "ZOO_KEEP_MEMORY")
    plain = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**plain, **environment},
    )
    kept, size = done.stdout.split()
    return kept, int(size)


@pytest.fixture
def glibc() -> None:
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("this C library has no mallopt")


@pytest.mark.usefixtures("glibc")
def test_freed_memory_is_used_again_without_a_fault() -> None:
    kept, size = counted()
    assert kept == "True"
    assert size < 2**26  # of 1,280 MiB


@pytest.mark.usefixtures("glibc")
@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "131072"), ("ZOO_KEEP_MEMORY", "0")]
)
def test_settings_of_the_environment_stay(name: str, value: str) -> None:
    kept, size = counted(**{name: value})
    assert kept == "False"
    if name != "ZOO_KEEP_MEMORY":  # what glibc does unasked is its own affair
        assert size > 2**29


def test_elsewhere_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()


@pytest.mark.usefixtures("glibc")
def test_a_run_on_a_cpu_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    build = importlib.import_module("zoo.build")
    asked: list[bool] = []
    monkeypatch.setattr(build, "keep_freed_memory", lambda: asked.append(True))
    build.make_accelerator(structured(compose(["algorithm=grpo", "train.device=cpu"])))
    assert len(asked) == 1
