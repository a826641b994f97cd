"""Peak memory by phase, and bytes by component: the instrument that every run carries."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

SECONDS_BETWEEN_SAMPLES = 0.02

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


# the process -------------------------------------------------------------------------------------


def rss() -> int:
    """Resident memory of this process now, in bytes."""
    return psutil.Process().memory_info().rss


class PhaseMemory:
    """The highest memory in each phase: of the process, and of the device on CUDA.

    Linux keeps the highest resident set of a process (VmHWM) and resets it on request, which is
    exact and free. Where that is not allowed, a thread reads the resident set every 20 ms, and
    peaks between two readings are missed. A phase inside another counts in both.

    The resident set holds the interpreter and libraries too, and pages that the allocator keeps
    after a free, so compare phases of one process with care; `TensorMeter` counts tensors alone.

    Args:
        device: on CUDA a phase's figure is `torch.cuda.max_memory_allocated`, not the process.
        sampling: read by a thread even where the kernel's mark is at hand.
    """

    def __init__(self, device: torch.device | str = "cpu", sampling: bool = False):
        self.device = torch.device(device)
        self.peaks: dict[str, int] = {}  # phase → bytes, highest of the run
        self.rss_peak = rss()
        self._kernel = not sampling and _kernel_mark_works()
        self._drained: dict[str, int] = {}
        self._open: list[_Open] = []
        self._lock = threading.Lock()

    @property
    def instrument(self) -> str:
        """How the figures were made, for memory.json."""
        process = (
            "VmHWM, reset at each phase"
            if self._kernel
            else f"resident set read every {SECONDS_BETWEEN_SAMPLES * 1000:.0f} ms"
        )
        if self.device.type == "cuda":
            return f"phases: torch.cuda.max_memory_allocated; rss: {process}"
        return f"phases and rss: {process}"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the peak of what runs inside under `name`."""
        self._observe()
        self._reset()
        opened = _Open()
        self._open.append(opened)
        sampler = None if self._kernel or len(self._open) > 1 else _Sampler(self._observe)
        try:
            yield
        finally:
            if sampler is not None:
                sampler.stop()
            self._observe()
            self._open.pop()
            peak = opened.device if self.device.type == "cuda" else opened.process
            self.peaks[name] = max(self.peaks.get(name, 0), peak)
            self._drained[name] = max(self._drained.get(name, 0), peak)

    def drain(self) -> dict[str, int]:
        """memory/<phase>_peak of the phases since the last drain, memory/rss_peak of the run."""
        self._observe()
        drained, self._drained = self._drained, {}
        figures = {f"memory/{name}_peak": peak for name, peak in drained.items()}
        return {**figures, "memory/rss_peak": self.rss_peak}

    def record(self) -> dict[str, object]:
        """The part of memory.json that this instrument knows."""
        self._observe()
        return {
            "phases": dict(self.peaks),
            "rss_peak": self.rss_peak,
            "device": str(self.device),
            "instrument": self.instrument,
        }

    def _observe(self) -> None:
        """Raise the peaks of all open phases to what was reached since the last reset."""
        process = _high_water_mark() if self._kernel else rss()
        device = 0
        if self.device.type == "cuda":
            device = torch.cuda.max_memory_allocated(self.device)
        with self._lock:
            self.rss_peak = max(self.rss_peak, process)
            for opened in self._open:
                opened.process = max(opened.process, process)
                opened.device = max(opened.device, device)

    def _reset(self) -> None:
        if self._kernel:
            _CLEAR.write_text("5")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)


class _Open:
    """Peaks of a phase that is running."""

    process = 0
    device = 0


class _Sampler:
    def __init__(self, observe):
        self._end = threading.Event()
        self._observe = observe
        self._thread = threading.Thread(target=self._work, daemon=True, name="memory-sampler")
        self._thread.start()

    def _work(self) -> None:
        while not self._end.wait(SECONDS_BETWEEN_SAMPLES):
            self._observe()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()


def _high_water_mark() -> int:
    for line in _STATUS.read_bytes().splitlines():
        if line.startswith(b"VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no VmHWM")


def _kernel_mark_works() -> bool:
    """Whether VmHWM can be read and reset: Linux, and not a sandbox that hides either file."""
    if sys.platform != "linux":
        return False
    try:
        _CLEAR.write_text("5")
        return _high_water_mark() > 0
    except (OSError, ValueError):
        return False


# the components ----------------------------------------------------------------------------------

KINDS: tuple[str, ...] = ("parameters", "gradients", "optimizer")
COPIES = "copies"  # of the weights in another dtype, that the arithmetic is done with


def component_bytes(
    models: Mapping[str, nn.Module | None], optimizers: Mapping[str, Optimizer | None] | None = None
) -> dict[str, dict[str, int]]:
    """Bytes of each component's parameters (buffers included), gradients and optimizer state.

    Working copies of the weights (`model.compute_dtype`) come beside them where there are any.
    Counted by storage: tied weights once, a storage that two components share for the first of
    them, and a view with the whole storage behind it.

    Args:
        models: component ("policy", "reference", "critic", …) → module; None is left out.
        optimizers: component → the optimizer of its module.
    Returns:
        {component: {"parameters": bytes, "gradients": bytes, "optimizer": bytes}}, now, with
        "copies" in components that have some.
    """
    names = [name for name, module in models.items() if module is not None]
    totals = {name: dict.fromkeys(KINDS, 0) for name in names}
    for component, kind, storage in component_storages(models, optimizers):
        of_component = totals.setdefault(component, dict.fromkeys(KINDS, 0))
        of_component[kind] = of_component.get(kind, 0) + storage.nbytes()
    return totals


def component_storages(
    models: Mapping[str, nn.Module | None], optimizers: Mapping[str, Optimizer | None] | None = None
) -> Iterator[tuple[str, str, torch.UntypedStorage]]:
    """(component, kind, storage) of every storage that the components hold, each once."""
    seen: set[int] = set()
    for component, kind, tensor in _component_tensors(models, optimizers or {}):
        storage = local(tensor).untyped_storage()
        if storage_key(storage) not in seen:
            seen.add(storage_key(storage))
            yield component, kind, storage


def storage_key(storage: torch.UntypedStorage) -> int:
    """Identity of a storage while it lives; unlike `data_ptr` also of fake and empty ones."""
    return storage._cdata


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that lies in this process."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def optimizer_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """The tensors of an optimizer's state."""
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, Mapping) else ():
            if isinstance(value, Tensor):
                yield value


def _component_tensors(
    models: Mapping[str, nn.Module | None], optimizers: Mapping[str, Optimizer | None]
) -> Iterator[tuple[str, str, Tensor]]:
    present = [(name, module) for name, module in models.items() if module is not None]
    for name, module in present:
        for tensor in (*module.parameters(), *module.buffers()):
            yield name, "parameters", tensor
    for name, module in present:
        for parameter in module.parameters():
            if parameter.grad is not None:
                yield name, "gradients", parameter.grad
    for name, optimizer in optimizers.items():
        for tensor in optimizer_tensors(optimizer) if optimizer is not None else ():
            yield name, "optimizer", tensor
    for name, module in present:
        for child in module.modules():
            casts = getattr(getattr(child, "trunk", None), "casts", None)
            for tensor in casts.copies() if casts is not None else ():
                yield name, COPIES, tensor
