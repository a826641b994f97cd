import pytest

from zoo.measure import timing
from zoo.measure.timing import Timer


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(timing.time, "perf_counter", lambda: Clock.now)
    return Clock


def test_phases_add_up(clock):
    timer = Timer()
    for seconds in (1.0, 2.5):
        with timer("generate"):
            clock.now += seconds
        clock.now += 10  # between phases: nobody's
    with timer("update"):
        clock.now += 4
    assert timer.drain() == {"generate": 3.5, "update": 4.0}
    assert timer.drain() == {}


def test_an_inner_phase_is_not_counted_twice(clock):
    timer = Timer()
    with timer("update"):
        clock.now += 1
        with timer("checkpoint"):
            clock.now += 5
        clock.now += 2
    assert timer.drain() == {"update": 3.0, "checkpoint": 5.0}


def test_a_drain_inside_a_phase_splits_it(clock):
    timer = Timer()
    with timer("evaluate"):
        clock.now += 1
        assert timer.drain() == {"evaluate": 1.0}
        clock.now += 2
    assert timer.drain() == {"evaluate": 2.0}


def test_a_failing_phase_is_counted_and_closed(clock):
    timer = Timer()
    with pytest.raises(RuntimeError), timer("reward"):
        clock.now += 1
        raise RuntimeError
    clock.now += 7
    assert timer.drain() == {"reward": 1.0}


def test_cuda_is_synchronised_at_both_ends_of_a_phase(clock, monkeypatch):
    waited = []
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda device: waited.append(clock.now))
    timer = Timer("cuda")
    with timer("update"):
        clock.now += 1
    assert waited == [100.0, 101.0]
