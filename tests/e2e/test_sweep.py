"""Sweeps of real runs: killed as a whole, one job failing, and through hydra's own launchers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.e2e.small import SMALL
from zoo.cli import MAX_ERROR_LINES, check_job
from zoo.compose import compose
from zoo.config import ConfigError
from zoo.instantiate import run_dir, structured
from zoo.launch import expand
from zoo.train.run import run

QUICK = ["evaluate.first=false", "evaluate.last=false", "evaluate.every=0"]
RATES = "train.lr=1e-4,1e30,2e-4"  # the second breaks the weights, and with them its run


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))


def sweep_of(output: Path, *more: str) -> list[str]:
    steps = ["train.steps=10", "train.checkpoint_every=1", "train.max_bad_updates=1"]
    return [*SMALL, *QUICK, "algorithm=grpo", *steps, f"output={output}", *more]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "zoo", "-m", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def folders_of(arguments: list[str]) -> list[Path]:
    return [run_dir(structured(compose(job))) for job in expand(arguments)]


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def wait_for_steps(folder: Path, steps: int, process: subprocess.Popen[str]) -> None:
    file, deadline = folder / "metrics.jsonl", time.time() + 180
    while not file.exists() or file.read_bytes().count(b"\n") < steps:
        assert time.time() < deadline and process.poll() is None
        time.sleep(0.02)


@pytest.mark.slow
def test_a_sweep_killed_as_a_whole_is_finished_by_the_same_command(tmp_path: Path) -> None:
    """The kill comes while the third job trains; of the others one is finished and one failed."""
    arguments = sweep_of(tmp_path / "out", RATES)
    good, bad, killed = folders_of(arguments)
    process = start(arguments)
    wait_for_steps(killed, 2, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    steps = (killed / "metrics.jsonl").read_bytes().count(b"\n")
    assert steps < 10 and not (killed / "summary.json").exists()
    assert "lower train.lr" in (bad / "error.txt").read_text()
    finished = contents(good)
    time.sleep(1)  # the killed job is gone as well: nobody writes into its folder any more
    assert (killed / "metrics.jsonl").read_bytes().count(b"\n") <= steps + 1

    again = start(arguments)
    told, _ = again.communicate(timeout=180)
    assert again.returncode == 1, told
    assert "1 finished, 1 skipped, 1 failed" in told
    assert "train.lr=1e+30 failed" in told and "lower train.lr" in told
    assert contents(good) == finished
    assert not (good / "error.txt").exists() and not (killed / "error.txt").exists()
    assert set((tmp_path / "out").glob("*/*/seed_*")) == {good, bad, killed}
    (whole,) = folders_of(sweep_of(tmp_path / "whole", "train.lr=2e-4"))
    run(structured(compose(sweep_of(tmp_path / "whole", "train.lr=2e-4"))))
    weights = "policy/model.safetensors"
    assert (killed / weights).read_bytes() == (whole / weights).read_bytes()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux alone ends them")
def test_joblib_s_workers_die_with_their_sweep_and_the_same_command_finishes(
    tmp_path: Path,
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs the extra sweep")
    jobs = sweep_of(tmp_path / "out", "train.steps=12", "seed=0,1")
    arguments = [*LAUNCHERS["joblib"], *jobs]
    folders = folders_of(jobs)
    process = start(arguments)
    for folder in folders:
        wait_for_steps(folder, 1, process)
    workers = [pid for pid in descendants(process.pid) if "popen_loky" in command_of(pid)]
    assert len(workers) == 2
    process.kill()  # it alone, as the kernel does where memory runs out
    process.wait()
    deadline = time.time() + 60
    while any(map(lives, workers)) and time.time() < deadline:
        time.sleep(0.1)
    assert not any(map(lives, workers))
    for folder in folders:  # a worker that nobody ended would have come to its last step
        assert (folder / "metrics.jsonl").read_bytes().count(b"\n") < 12

    again = start(arguments)
    told, _ = again.communicate(timeout=180)
    assert again.returncode == 0, told
    for folder in folders:
        assert (folder / "metrics.jsonl").read_bytes().count(b"\n") == 12


def parent_of(pid: int) -> tuple[int, str]:
    """The parent's pid and the state of a process; (0, "") where there is none."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, ""
    return int(words[1]), words[0]


def descendants(pid: int) -> list[int]:
    everyone = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    own = [child for child in everyone if parent_of(child)[0] == pid]
    return own + [other for child in own for other in descendants(child)]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def lives(pid: int) -> bool:
    return parent_of(pid)[1] not in ("", "Z")


def test_a_finished_job_is_known_without_starting_it(tmp_path: Path) -> None:
    job = sweep_of(tmp_path, "train.steps=1")
    assert check_job(job) is None
    run(structured(compose(job)))
    (folder,) = folders_of(job)
    assert check_job(job) == folder.resolve()
    assert check_job([*job, "seed=1"]) is None
    (folder / "meta.json").write_text("{")  # the job's own affair: it says so and fails alone
    assert check_job(job) is None


def test_code_of_ones_own_that_fails_is_the_jobs_own_affair(tmp_path: Path) -> None:
    job = [*sweep_of(tmp_path), "data._target_=tests.e2e.faulty.Lost"]
    assert check_job(job) is None  # a refusal would keep the other jobs from running
    with pytest.raises(RuntimeError, match=r"\w+\(\) raised FileNotFoundError: .*no-such-file"):
        run(structured(compose(job)))


def test_a_run_within_the_folder_of_another_is_refused(tmp_path: Path) -> None:
    job = sweep_of(tmp_path / "out", "train.steps=1")
    run(structured(compose(job)))
    (folder,) = folders_of(job)
    before = contents(folder)
    inner = [*job, f"output={folder}/deeper"]
    with pytest.raises(ConfigError, match=rf"would lie in the folder of another run, {folder}\."):
        run(structured(compose(inner)))
    assert contents(folder) == before


LAUNCHERS = {
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit": ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"],
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_of_hydra_run_every_job_and_end_as_the_failed_one_did(
    launcher: str, tmp_path: Path
) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher}_launcher", reason="needs the extra sweep")
    arguments = sweep_of(tmp_path / "out", RATES, "train.steps=3")
    good, bad, other = folders_of(arguments)
    process = start([*LAUNCHERS[launcher], *arguments])
    told, _ = process.communicate(timeout=300)
    assert process.returncode == 1, told
    assert (good / "summary.json").exists() and (other / "summary.json").exists()
    assert not (bad / "summary.json").exists()
    assert "lower train.lr" in (bad / "error.txt").read_text()
    block = told[told.index("zoo: error") :].splitlines()
    assert len(block) <= MAX_ERROR_LINES and "Traceback" not in "\n".join(block)
    assert "lower train.lr" in " ".join(" ".join(block).split())
    finished = contents(good)
    again = start([*LAUNCHERS[launcher], *arguments])
    again.communicate(timeout=300)
    assert again.returncode == 1 and contents(good) == finished


@pytest.mark.slow
def test_a_process_that_a_launcher_lost_is_told_with_the_jobs_that_are_left(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs the extra sweep")
    ends = ["reward=function", "reward.fn=tests.e2e.faulty.ends_the_process"]
    sweep = sweep_of(tmp_path / "out", "seed=0,1", "train.steps=1", *ends)
    process = start([*LAUNCHERS["joblib"], *sweep])
    told, _ = process.communicate(timeout=300)
    assert process.returncode == 1, told
    block = " ".join(told[told.index("zoo: error") :].split())
    assert "hydra/launcher=joblib lost a process that ran a job" in block
    assert "Without a summary: 2 of 2 jobs (seed=0; seed=1). The same command goes on" in block
    assert "Traceback" not in told
