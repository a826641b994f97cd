import io
import subprocess
import sys
import textwrap

import pytest

from zoo.measure import progress
from zoo.measure.progress import Lines, Live, clock, display


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def now(monkeypatch):
    class Clock:
        value = 0.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Clock.value)
    return Clock


def test_a_pipe_gets_plain_lines_with_the_figures(now):
    out = io.StringIO()
    shown = display(45, "grpo", stream=out)
    shown.accuracy(0.38)
    for step in range(1, 13):
        now.value += 1
        shown.step(step, {"reward/total": 0.4125, "tokens_per_second": 1234.4})
    # The first step prints, then every third second; 33 steps remain at one second each.
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["1/45", "4/45", "7/45", "10/45"]
    assert lines[1] == "step 1/45 reward 0.412 acc 0.380 1234 tok/s eta 0:44"
    assert lines[-1].endswith("eta 0:35")


def test_the_last_step_is_always_printed(now):
    out = io.StringIO()
    shown = display(3, "sft", stream=out)
    for step in (1, 2, 3):
        shown.step(step, {"loss/nll": 1.5})
    assert out.getvalue().splitlines() == [
        "sft",
        "step 1/3 loss 1.500 eta 0:00",
        "step 3/3 loss 1.500 eta 0:00",
    ]


def test_a_resumed_run_counts_the_time_of_its_own_steps(now):
    out = io.StringIO()
    shown = display(40, "ppo", first_step=30, stream=out)
    now.value += 2
    shown.step(31, {})
    assert out.getvalue().splitlines()[-1] == "step 31/40 eta 0:18"  # 9 steps of 2 s


def test_a_part_shows_how_far_it_is(now):
    out = io.StringIO()
    shown = display(5, "dpo", stream=out)
    with shown.task("sampling pairs", 512) as advance:
        for _ in range(4):
            now.value += 2
            advance(128)
    assert out.getvalue().splitlines()[1:] == [
        "sampling pairs 128/512",
        "sampling pairs 384/512",
    ]


def test_switched_off_only_messages_remain():
    out = io.StringIO()
    shown = display(5, "dpo", stream=out, enabled=False)
    shown.step(1, {"reward/total": 1.0})
    with shown.task("x", 2) as advance:
        advance(1)
    shown.message("warning (a): b")
    assert out.getvalue() == "warning (a): b\n"


ERRORS = [BrokenPipeError(), OSError(5, "Input/output error"), OSError(28, "full"), ValueError()]


@pytest.mark.parametrize("verb", ["write", "flush"])
@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("base", [io.StringIO, Terminal])
def test_an_output_that_cannot_be_written_does_not_stop_the_run(base, error, verb, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")

    def fail(*_):
        raise error

    stream = base()
    monkeypatch.setattr(stream, verb, fail)
    shown = display(2, "grpo", stream=stream)
    assert isinstance(shown, Live if base is Terminal else Lines)
    with shown.task("evaluating heldout", 2) as advance:
        advance(1)
    shown.step(1, {})
    shown.step(2, {})
    shown.message("finished")
    shown.close()


SHOWN = """
    import os, pty, sys
    from zoo.measure.progress import display
    where = sys.argv[1]
    if where == "a closed terminal":
        controller, terminal = pty.openpty()
        os.dup2(terminal, 1)
        os.close(terminal)
        os.environ["TERM"] = "xterm"
    elif where == "a pipe nobody reads":
        controller, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(writer)
    else:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    shown = display(2, "grpo")
    if where != "a full disk":
        os.close(controller)
    for step in (1, 2):
        shown.step(step, {})
        shown.message("warning")
    shown.close()
    # what can be written again is: only the lines of meanwhile are lost
    os.dup2(os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT), 1)
    shown.message("late")
"""


@pytest.mark.parametrize("where", ["a closed terminal", "a pipe nobody reads", "a full disk"])
def test_a_terminal_or_log_that_goes_away_costs_its_lines_and_no_more(where, tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(SHOWN), where, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "log").read_text() == "late\n"


@pytest.mark.parametrize("enabled", [True, False])
def test_without_any_output_nothing_is_shown(enabled, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    shown = display(4, "run", enabled=enabled)
    shown.step(1, {"seconds/step": 1.0})
    shown.message("finished")
    shown.close()


def test_closed_outputs_do_not_give_their_numbers_to_files(tmp_path):
    code = """
        import sys, os, types
        cli = sys.modules["zoo.cli"] = types.ModuleType("zoo.cli")
        cli.main = lambda: int(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY) < 3)
        from zoo.__main__ import start
        status = start()
        print("to nobody")
        sys.exit(status)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "file")]
    assert subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]).returncode == 0


def test_a_terminal_gets_a_bar_with_transient_parts(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    shown = display(4, "grpo [tiny]", stream=out)
    assert isinstance(shown, Live)
    with shown.task("evaluating heldout", 10) as advance:
        advance(3)
        assert [t.completed for t in shown._bars.tasks] == [0, 3]
    assert len(shown._bars.tasks) == 1
    shown.accuracy(0.5)
    shown.step(2, {"reward/total": 0.25})
    shown.message("warning [x]: y")
    shown.close()
    text = out.getvalue()
    assert "grpo [tiny]" in text and "warning [x]: y" in text
    assert "2/4 · reward 0.250 · acc 0.500" in text


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(display(4, "grpo", stream=Terminal()), Lines)


def test_clock():
    assert [clock(s) for s in (0, 59.6, 61, 3723)] == ["0:00", "1:00", "1:01", "1:02:03"]
