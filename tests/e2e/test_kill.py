"""SIGKILL at any moment: what is resumed equals what was never stopped, to the last bit.

The quick cases kill while a cache is being built. `pytest -m slow tests/e2e/test_kill.py` kills
every algorithm at random moments; ZOO_KILLS is how many for each (default 20).
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.small import folder_of, run_small
from tests.e2e.test_every_algorithm import NAMES
from tests.e2e.test_resume import RUNS, assert_same, killed

KILLS = int(os.environ.get("ZOO_KILLS", "20"))

# The first file of a DPO run that is put in its place is the pairs' cache, then the reference's.
BUILDING = {
    "pairs, half sampled": "zoo.rollout.pairs:pair_up:9",
    "pairs, written aside": "pathlib:Path.replace:1",
    "reference, half computed": "zoo.models.models:Models.reference_logprobs:1",
    "reference, written aside": "pathlib:Path.replace:2",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def whole_dpo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZOO_CACHE", str(base / "cache"))
        run_small(base / "whole", *RUNS["dpo"])
    return folder_of(base / "whole")


@pytest.mark.parametrize("building", BUILDING)
def test_killed_while_a_cache_is_built(building: str, whole_dpo: Path, tmp_path: Path) -> None:
    killed(BUILDING[building], tmp_path / "killed", RUNS["dpo"])
    found = [p for p in tmp_path.glob("cache/*/*") if p.suffix in (".jsonl", ".safetensors")]
    assert len(found) == (1 if building.startswith("reference") else 0)
    run_small(tmp_path / "killed", *RUNS["dpo"])
    assert_same(whole_dpo, folder_of(tmp_path / "killed"))


def _run_and_die(
    output: str, cache: str, overrides: list[str], delay: float | None, where: str
) -> None:
    """In a process of its own: a small run that is killed `delay` seconds after it began."""
    os.environ["ZOO_CACHE"] = cache
    began = time.perf_counter()

    def kill() -> None:
        assert delay is not None
        time.sleep(max(delay - (time.perf_counter() - began), 0))
        with Path(where).open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)  # for the message of a failure
        os.kill(os.getpid(), signal.SIGKILL)

    if delay is not None:
        threading.Thread(target=kill, daemon=True).start()
    run_small(Path(output), *overrides)


def start(context: Any, *arguments: Any) -> int:
    process = context.Process(target=_run_and_die, args=arguments)
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_B96_killed_at_random_moments(name: str, tmp_path: Path) -> None:
    overrides = RUNS.get(name, [f"algorithm={name}"])
    # A process that has everything imported and has computed nothing is forked for each run.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.e2e.preload"])
    where = tmp_path / "where.txt"
    began = time.perf_counter()
    base = [str(tmp_path / "whole"), str(tmp_path / "cache_whole"), overrides]
    assert start(context, *base, None, str(where)) == 0
    took = time.perf_counter() - began
    whole = folder_of(tmp_path / "whole")
    randomly = random.Random(f"{name}{os.environ.get('ZOO_KILL_SEED', '')}")
    hit = 0
    for index in range(KILLS):
        output, cache = tmp_path / f"killed_{index}", tmp_path / f"cache_{index}"
        delay = randomly.uniform(0.02 * took, took)
        status = start(context, str(output), str(cache), overrides, delay, str(where))
        assert status in (0, -signal.SIGKILL), status
        hit += status != 0
        assert start(context, str(output), str(cache), overrides, None, "") == 0
        try:
            assert_same(whole, folder_of(output))
        except AssertionError as error:
            raise AssertionError(f"killed after {delay:.2f} s at:\n{where.read_text()}") from error
        print(f"{name} {index}: {delay:.2f} s, {_moment(where) if status else 'finished'}")
    assert hit >= KILLS // 2


def _moment(where: Path) -> str:
    """The innermost function of the package in the main thread's stack."""
    main = where.read_text().rpartition("Thread ")[2]
    frames = [line for line in main.splitlines() if "/zoo/" in line]
    return frames[0].strip().rpartition("/")[2] if frames else "import"
