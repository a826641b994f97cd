import gc
import time

import psutil
import pytest
import torch
from torch import nn

from zoo.measure import memory
from zoo.measure.memory import PhaseMemory, component_bytes, rss

MIB = 2**20
# Sampling misses what is freed within 20 ms, as these tests do.
kernel_mark = pytest.mark.skipif(
    not memory._kernel_mark_works(), reason="needs Linux with a writable /proc/self/clear_refs"
)


def hold(mebibytes, seconds=0.0):
    """Touch and free memory; the highest resident set on the way.

    Above glibc's largest mmap threshold, so it goes back at once. The reading is part by part: a
    system short of memory takes back cold pages of files meanwhile, so that the end may be lower
    than the start.
    """
    highest = rss()
    block = torch.empty(mebibytes * MIB, dtype=torch.uint8)
    for part in block.split(4 * MIB):
        part.fill_(1)
        highest = max(highest, rss())
    time.sleep(seconds)
    return highest


def near(bytes_):
    """The resident set moves by a few MiB on its own."""
    return pytest.approx(bytes_, abs=16 * MIB)


@pytest.mark.parametrize("sampling", [False, True])
def test_a_phase_records_its_own_peak(sampling):
    gc.collect()
    hold(64)
    meter = PhaseMemory(sampling=sampling)
    with meter.phase("big"):
        big = hold(128, seconds=0.1)
    with meter.phase("small"):
        small = hold(64, seconds=0.1)
    assert meter.peaks["big"] == near(big)
    assert meter.peaks["small"] == near(small)
    assert meter.rss_peak == max(meter.peaks.values())


@kernel_mark
def test_an_inner_phase_counts_in_the_outer_one_and_not_the_reverse():
    meter = PhaseMemory()
    with meter.phase("outer"):
        outer = hold(96)
        with meter.phase("inner"):
            inner = hold(48)
    assert meter.peaks["outer"] == near(max(outer, inner))
    assert meter.peaks["inner"] == near(inner)
    with meter.phase("outer 2"), meter.phase("inner 2"):
        inner = hold(64)
    assert meter.peaks["outer 2"] == meter.peaks["inner 2"] == near(inner)


@kernel_mark
def test_the_run_keeps_the_highest_and_drain_the_newest():
    meter = PhaseMemory()
    with meter.phase("update"):
        high = hold(96)
    first = meter.drain()
    with meter.phase("update"):
        low = hold(48)
    second = meter.drain()
    assert first["memory/update_peak"] == near(high)
    assert second["memory/update_peak"] == near(low)
    highest = max(first["memory/update_peak"], second["memory/update_peak"])
    assert meter.record()["phases"] == {"update": highest}
    assert second["memory/rss_peak"] == max(first["memory/rss_peak"], highest)
    assert set(meter.drain()) == {"memory/rss_peak"}


def test_a_machine_without_the_kernels_mark_samples(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "missing" / "clear_refs")
    meter = PhaseMemory()
    with meter.phase("big"):
        high = hold(128, seconds=0.1)
    assert "every 20 ms" in meter.instrument
    assert meter.peaks["big"] == near(high)


@kernel_mark
def test_the_kernels_mark_agrees_with_psutil_at_the_highest_moment():
    meter = PhaseMemory()
    with meter.phase("x"):
        block = torch.ones(48 * MIB)
        held = psutil.Process().memory_info().rss
        del block
    assert meter.peaks["x"] == pytest.approx(held, rel=0.01)  # the kernel counts pages in batches


def tiny():
    """Embedding 10×4 tied to the head, a layer 4×4 with bias, a buffer of 3 float64."""
    module = nn.Module()
    module.embedding = nn.Embedding(10, 4)
    module.layer = nn.Linear(4, 4)
    module.head = nn.Linear(4, 10, bias=False)
    module.head.weight = module.embedding.weight
    module.register_buffer("positions", torch.zeros(3, dtype=torch.float64))
    return module


WEIGHTS = (10 * 4 + 4 * 4 + 4) * 4  # float32, the tied matrix once


def test_component_bytes_equal_arithmetic():
    policy, critic = tiny(), nn.Linear(4, 1)
    optimizer = torch.optim.Adam(policy.parameters())
    assert component_bytes({"policy": policy, "reference": None, "critic": critic}) == {
        "policy": {"parameters": WEIGHTS + 24, "gradients": 0, "optimizer": 0},
        "critic": {"parameters": 20, "gradients": 0, "optimizer": 0},
    }
    hidden = policy.layer(policy.embedding(torch.tensor([1, 2])))
    policy.head(hidden).sum().backward()
    optimizer.step()
    found = component_bytes({"policy": policy, "critic": critic}, {"policy": optimizer})
    assert found["policy"] == {
        "parameters": WEIGHTS + 24,
        "gradients": WEIGHTS,
        "optimizer": 2 * WEIGHTS + 3 * 4,  # two moments; a float32 step for each of three tensors
    }


def test_a_shared_trunk_belongs_to_the_first():
    trunk = nn.Linear(4, 4)
    policy = nn.Sequential(trunk, nn.Linear(4, 10))
    critic = nn.Sequential(trunk, nn.Linear(4, 1))
    found = component_bytes({"policy": policy, "critic": critic})
    assert found["policy"]["parameters"] == (20 + 50) * 4
    assert found["critic"]["parameters"] == 5 * 4


def test_a_view_counts_the_storage_behind_it():
    fused = torch.zeros(12, 4)
    module = nn.Module()
    module.q, module.k = nn.Parameter(fused[:4]), nn.Parameter(fused[4:8])
    assert component_bytes({"policy": module})["policy"]["parameters"] == 12 * 4 * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_phases_report_device_bytes():
    meter = PhaseMemory("cuda")
    base = torch.cuda.memory_allocated()
    with meter.phase("update"):
        torch.ones(8 * MIB, device="cuda")
    assert meter.peaks["update"] - base == 32 * MIB
    assert "max_memory_allocated" in meter.instrument
