"""Ctrl-C and SIGTERM: a checkpoint of the last whole step, a word on how to go on, nothing lost."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.e2e.small import SMALL, folder_of, run_small
from tests.e2e.test_resume import RUNS, assert_same, lines
from zoo.__main__ import start
from zoo.cli import main
from zoo.train.interrupt import Interrupt

ENGINE = "zoo.rollout.torch_engine:_Decoder.generate"
# moment → the step that is saved; a checkpoint is due after steps 2, 4 and 6
MOMENTS = {
    # Calls of generate before step 3: two sets × two modes at step 0, then one a step.
    (ENGINE + ":7", signal.SIGINT): 2,
    ("zoo.rollout.source:rollout_batch:4", signal.SIGINT): 3,
    ("zoo.train.loop:_update:3", signal.SIGINT): 3,  # the step is finished
    ("zoo.train.update:grad_norm:5", signal.SIGTERM): 5,
    ("zoo.evaluate.evaluator:Evaluator._perplexity:2", signal.SIGINT): 3,
    ("zoo.train.checkpoint:sha256:3", signal.SIGTERM): 4,
    ("zoo.measure.recorder:Recorder.step:1", signal.SIGINT): 1,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole")
    run_small(output, *RUNS["grpo"])
    return folder_of(output)


def signal_at(
    monkeypatch: pytest.MonkeyPatch, moment: str, number: signal.Signals, times: int = 1
) -> None:
    """Send this process a signal when the moment's function is entered for the n-th time."""

    def send() -> None:
        for _ in range(times):
            signal.raise_signal(number)

    call_at(monkeypatch, moment, send)


def call_at(monkeypatch: pytest.MonkeyPatch, moment: str, action: Callable[[], None]) -> None:
    """Do something when the moment's function is entered for the n-th time."""
    module, path, count = moment.split(":")
    owner = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original, left = getattr(owner, name), int(count)

    @functools.wraps(original)
    def wrapped(*arguments, **keywords):
        nonlocal left
        left -= 1
        if left == 0:
            action()
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize(("moment", "number"), MOMENTS)
def test_interrupted_and_resumed_equals_uninterrupted(
    moment: str,
    number: signal.Signals,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = MOMENTS[moment, number]
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        signal_at(patch, moment, number)
        with pytest.raises(
            KeyboardInterrupt, match=rf"Step {saved} of 6 is saved in .*checkpoints"
        ):
            run_small(tmp_path / "stopped", *RUNS["grpo"])
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    folder = folder_of(tmp_path / "stopped")
    assert (folder / "checkpoints" / f"step_{saved:06d}").exists()
    assert not (folder / "summary.json").exists()
    run_small(tmp_path / "stopped", *RUNS["grpo"])
    assert_same(whole, folder)


def test_a_second_signal_ends_at_once_and_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, "zoo.train.loop:_update:3", signal.SIGINT, times=2)
        with pytest.raises(KeyboardInterrupt):
            run_small(tmp_path, *RUNS["grpo"])
    folder = folder_of(tmp_path)
    assert [p.name for p in (folder / "checkpoints").glob("step_*")] == ["step_000002"]
    assert lines(folder / "metrics.jsonl")[-1]["step"] == 2


def test_before_the_first_step_there_is_nothing_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, "zoo.evaluate.evaluator:Evaluator._perplexity:1", signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match="No step was done yet"):
            run_small(tmp_path, *RUNS["grpo"])
    assert not (folder_of(tmp_path) / "checkpoints").exists()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_how_to_go_on_is_true_with_every_setting_of_resume(
    resume: str,
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [*SMALL, f"output={tmp_path}", *RUNS["sft"], f"resume={resume}"]
    with monkeypatch.context() as patch:
        signal_at(patch, "zoo.train.loop:_update:3", signal.SIGINT, times)
        assert main(command) == 130
    said = capsys.readouterr().err
    assert ("It goes on with resume=auto." in said) == (resume == "never")
    assert ("The same command goes on" in said) == (resume == "auto")
    assert main(command) == (0 if resume == "auto" else 2)


def test_a_signal_after_the_end_neither_undoes_it_nor_promises_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, "zoo.measure.recorder:Recorder.close:1", signal.SIGINT)
        assert run_small(tmp_path, *RUNS["sft"])["status"] == "finished"
    said = capfd.readouterr().err
    assert "The run is finished. Again ends at once." in said and "Ending after" not in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_forked_by_a_reward_ends_by_a_signal_as_any_other(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with Interrupt() as interrupt:
        interrupt.begin()
        context = multiprocessing.get_context("fork")
        started = context.Event()  # Python drops the signals that come before, while it forks
        child = context.Process(target=lambda: (started.set(), time.sleep(60)))
        child.start()
        assert child.pid is not None and started.wait(20)
        os.kill(child.pid, number)
        child.join(20)
        exited = child.exitcode
        child.kill()
        child.join()
    assert exited == -number and not interrupt.asked
    assert capfd.readouterr().err == ""


def test_a_terminal_that_went_away_does_not_stop_the_answer_to_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = os.dup(2)
    try:
        with monkeypatch.context() as patch, Path("/dev/full").open("wb") as full:
            os.dup2(full.fileno(), 2)
            signal_at(patch, "zoo.train.loop:_update:3", signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt, match="Step 3 of 6 is saved"):
                run_small(tmp_path, *RUNS["sft"])
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def test_ctrl_c_while_python_loads_zoo_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(types.ModuleType):
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "zoo.cli", Interrupted("zoo.cli"))
    assert start() == 130
    assert capsys.readouterr().err == "\nInterrupted.\n"


def test_ctrl_c_on_the_command_line_says_how_to_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zoo", *SMALL, f"output={tmp_path}", "algorithm=grpo"]
    process = subprocess.Popen(
        [*command, "train.steps=100000", "train.checkpoint_every=0", "evaluate.first=false"],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    metrics: list[Path] = []
    while not (metrics and metrics[0].stat().st_size):
        assert process.poll() is None
        time.sleep(0.1)
        metrics = list(tmp_path.glob("*/*/seed_0/metrics.jsonl"))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    steps = len(metrics[0].read_text().splitlines())
    assert f"Interrupted. Step {steps} of 100000 is saved in" in errors
    assert "The same command goes on where this one ended." in errors
    assert "Traceback" not in errors
    assert (metrics[0].parent / "checkpoints" / f"step_{steps:06d}").exists()
