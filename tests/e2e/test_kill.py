"""SIGKILL at any moment: what is resumed equals what was never stopped, to the last bit.

The quick cases kill while a cache is being built. `pytest -m slow tests/e2e/test_kill.py` kills
every algorithm at random moments; ZOO_KILLS is how many for each (default 20).
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.killed import arm
from tests.e2e.small import folder_of, run_small
from tests.e2e.test_every_algorithm import NAMES
from tests.e2e.test_resume import RUNS, assert_same
from zoo.train.session import Session

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
    output, cache = str(tmp_path / "killed"), str(tmp_path / "cache")
    assert start(output, cache, RUNS["dpo"], moment=BUILDING[building]) == -signal.SIGKILL
    found = [p for p in tmp_path.glob("cache/*/*") if p.suffix in (".jsonl", ".safetensors")]
    assert len(found) == (1 if building.startswith("reference") else 0)
    run_small(tmp_path / "killed", *RUNS["dpo"])
    assert_same(whole_dpo, folder_of(tmp_path / "killed"))


def start(
    output: str,
    cache: str,
    overrides: list[str],
    moment: str = "",
    delay: float = 0,
    where: str = "",
) -> int:
    """The exit status of a small run of its own process, killed at a moment or after a delay."""
    process = launched(output, cache, overrides, moment, delay, where)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def launched(output: str, cache: str, overrides: list[str], *how: Any) -> Any:
    """A small run under way: forked from a process that has imported all and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.e2e.preload"])
    process = context.Process(target=_run, args=(output, cache, overrides, *how))
    process.start()
    return process


def _run(
    output: str,
    cache: str,
    overrides: list[str],
    moment: str = "",
    delay: float = 0,
    where: str = "",
) -> None:
    os.environ["ZOO_CACHE"] = cache

    def kill() -> None:
        time.sleep(delay)
        with Path(where).open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)  # for the message of a failure
        os.kill(os.getpid(), signal.SIGKILL)

    if moment:
        arm(moment)
    if delay > 0:
        threading.Thread(target=kill, daemon=True).start()
    elif delay < 0:  # counted from where loading ends
        delay = -delay
        load = Session.__init__

        def loaded(self: Session, *arguments: Any) -> None:
            threading.Thread(target=kill, daemon=True).start()
            load(self, *arguments)

        Session.__init__ = loaded  # pyright: ignore
    run_small(Path(output), *overrides)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_B96_killed_at_random_moments(name: str, tmp_path: Path) -> None:
    overrides = RUNS.get(name, [f"algorithm={name}"])
    where = str(tmp_path / "where.txt")
    start(str(tmp_path / "first"), str(tmp_path / "cache_first"), overrides)  # starts the server
    began = time.perf_counter()
    assert start(str(tmp_path / "whole"), str(tmp_path / "cache_whole"), overrides) == 0
    took = time.perf_counter() - began
    whole = folder_of(tmp_path / "whole")
    trains = _trains(whole)
    randomly = random.Random(f"{name}{os.environ.get('ZOO_KILL_SEED', '')}")
    hit = 0
    for index in range(KILLS):
        output, cache = tmp_path / f"killed_{index}", tmp_path / f"cache_{index}"
        # Half of them anywhere, half while it trains, evaluates and saves.
        delay = randomly.uniform(0.02, 0.95) * took if index % 2 else -randomly.uniform(0, trains)
        began = time.perf_counter()
        status = start(str(output), str(cache), overrides, delay=delay, where=where)
        assert status in (0, -signal.SIGKILL), status
        hit += status != 0
        if status == 0:  # the machine has become faster: go by what a run takes now
            took, trains = time.perf_counter() - began, _trains(folder_of(output))
        assert start(str(output), str(cache), overrides) == 0
        try:
            assert_same(whole, folder_of(output))
        except AssertionError as error:
            raise AssertionError(
                f"killed after {delay:.2f} s at:\n{Path(where).read_text()}"
            ) from error
        print(f"{name} {index}: {delay:.2f} s, {_moment(Path(where)) if status else 'finished'}")
    assert hit >= KILLS // 2


def _trains(folder: Path) -> float:
    """Seconds in which a finished run trained, evaluated and saved."""
    seconds = json.loads((folder / "summary.json").read_text())["seconds"]
    return sum(seconds.get(phase, 0) for phase in ("total", "evaluate", "checkpoint"))


def _moment(where: Path) -> str:
    """The innermost function of the package in the main thread's stack."""
    main = where.read_text().rpartition("Thread ")[2]
    frames = [line for line in main.splitlines() if "/zoo/" in line]
    return frames[0].strip().rpartition("/")[2] if frames else "import"
