import io

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


def test_a_reader_that_left_does_not_stop_the_run():
    class Closed(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    shown = display(2, "grpo", stream=Closed())
    shown.step(1, {})
    shown.step(2, {})


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
