"""Live tensor bytes by component and kind: exact, and on CPU repeatable to the byte."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zoo.measure.memory import component_storages, local, optimizer_tensors, storage_key

ACTIVATIONS = "activations"  # made in the phase and not a component's: activations, caches, losses
INPUTS = "inputs"  # there before the phase and used in it: batches and what they carry
CACHE = "cache"  # keys and values of decoding

_metering: list[TensorMeter] = []  # the meters inside a phase


def mark(name: str, tensors: Callable[[], Iterable[Tensor]]) -> None:
    """Count tensors under `name` in every phase that is being metered.

    For code that knows what its tensors are and no meter; outside a phase nothing is even called.
    """
    for meter in _metering:
        meter.label(name, tensors())


class TensorMeter:
    """The peak of live tensor bytes in a phase, split by whose they are at that moment.

        peak = max over time of Σ nbytes(storage), over the storages alive

    A storage counts once, however many tensors view it, from the operator that made it until it is
    freed. Labels: `<component>/parameters`, `/gradients` and `/optimizer` for what belongs to a
    component, also when it becomes so only later in the phase (the buffer that ends as a
    gradient is a gradient from its birth), a caller's own labels, `inputs` and `activations`.

    What it does not see: memory inside a kernel (workspaces, packed weights of the sampler), the
    allocator's rounding, and tensors from before the phase that no operator of the phase touches.
    Every operator passes through Python, so a metered phase is several times slower: meter one
    probe step, never a timed one. The garbage collector is off inside a phase, since the moment
    at which it frees cycles is not repeatable.

    Args:
        models: component → module; None is left out.
        optimizers: component → its optimizer.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module | None],
        optimizers: Mapping[str, Optimizer | None] | None = None,
    ):
        self._models = {name: module for name, module in models.items() if module is not None}
        self._optimizers = {n: o for n, o in (optimizers or {}).items() if o is not None}
        self._ledger: _Ledger | None = None
        self.peaks: dict[str, dict[str, int]] = {}  # phase → label → bytes, and "total"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Meter what runs inside; a name used again keeps the higher peak.

        Raises:
            RuntimeError: inside another phase of this meter.
        """
        if self._ledger is not None:
            raise RuntimeError(f"TensorMeter.phase({name!r}) inside another phase: end that first")
        collecting = gc.isenabled()
        gc.disable()
        ledger = self._ledger = _Ledger()
        hooks: list[Any] = []
        try:
            for component, kind, storage in component_storages(self._models, self._optimizers):
                ledger.add(storage, f"{component}/{kind}")
            hooks = list(self._hooks(ledger))
            _metering.append(self)
            with _Watch(ledger):
                yield
            for component, kind, storage in component_storages(self._models, self._optimizers):
                ledger.relabel(storage, f"{component}/{kind}")  # made in the phase, to stay
        finally:
            if self in _metering:
                _metering.remove(self)
            for hook in hooks:
                hook.remove()
            self._ledger = None
            ledger.close()
            if collecting:
                gc.enable()
        found = ledger.split()
        if found["total"] > self.peaks.get(name, {}).get("total", -1):
            self.peaks[name] = found

    def label(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Count the storages of `tensors` under `name`, for example a key-value cache.

        Outside a phase it does nothing.
        """
        if self._ledger is not None:
            for tensor in tensors:
                self._ledger.relabel(local(tensor).untyped_storage(), name)

    def _hooks(self, ledger: _Ledger) -> Iterator[Any]:
        """Gradients and optimizer states are told apart from activations when they are kept."""
        for component, module in self._models.items():
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.is_leaf:

                    def kept(leaf: Tensor, label: str = f"{component}/gradients") -> None:
                        if leaf.grad is not None:
                            ledger.relabel(local(leaf.grad).untyped_storage(), label)

                    yield parameter.register_post_accumulate_grad_hook(kept)
        for component, optimizer in self._optimizers.items():

            def stepped(
                done: Optimizer, args: Any, kwargs: Any, label: str = f"{component}/optimizer"
            ) -> None:
                for tensor in optimizer_tensors(done):
                    ledger.relabel(local(tensor).untyped_storage(), label)

            # accelerate wraps optimizers; the hook belongs to the one inside.
            yield getattr(optimizer, "optimizer", optimizer).register_step_post_hook(stepped)


class _Entry:
    __slots__ = ("born", "label", "nbytes", "reference")

    def __init__(self, nbytes: int, label: str, born: int, reference: Any):
        self.nbytes = nbytes
        self.label = label
        self.born = born
        self.reference = reference


class _Ledger:
    """Live storages, their labels, and the split of the highest sum so far."""

    def __init__(self):
        self._entries: dict[int, _Entry] = {}
        self._live: dict[str, int] = {}
        self._total = 0
        self._peak: dict[str, int] = {}
        self._peak_total = 0
        self._time = 0  # events so far
        self._peak_time = 0

    def add(self, storage: torch.UntypedStorage, label: str, from_before: bool = False) -> None:
        """Count a storage from now on, or notice that a known one was resized.

        `from_before`: it was alive throughout the phase, so the peak of earlier held it as well.
        """
        key, nbytes = storage_key(storage), storage.nbytes()
        known = self._entries.get(key)
        if known is not None:
            if known.nbytes != nbytes:
                self._change(known.label, nbytes - known.nbytes)
                known.nbytes = nbytes
            return
        if from_before:
            self._peak[label] = self._peak.get(label, 0) + nbytes
            self._peak_total += nbytes
        self._change(label, nbytes)
        born = 0 if from_before else self._time
        reference = weakref.ref(storage, lambda _: self._freed(key))
        self._entries[key] = _Entry(nbytes, label, born, reference)

    def relabel(self, storage: torch.UntypedStorage, label: str) -> None:
        """Count a storage under `label`, at the peak too if it was alive then."""
        self.add(storage, label)
        entry = self._entries[storage_key(storage)]
        if entry.label == label:
            return
        self._live[entry.label] -= entry.nbytes
        self._live[label] = self._live.get(label, 0) + entry.nbytes
        if entry.born <= self._peak_time:
            self._peak[entry.label] -= entry.nbytes
            self._peak[label] = self._peak.get(label, 0) + entry.nbytes
        entry.label = label

    def split(self) -> dict[str, int]:
        parts = {label: n for label, n in sorted(self._peak.items()) if n}
        return {"total": self._peak_total, **parts}

    def close(self) -> None:
        self._entries.clear()  # drops the weak references, and with them their callbacks

    def _freed(self, key: int) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._change(entry.label, -entry.nbytes)

    def _change(self, label: str, nbytes: int) -> None:
        self._time += 1
        self._live[label] = self._live.get(label, 0) + nbytes
        self._total += nbytes
        if self._total > self._peak_total:
            self._peak_total, self._peak_time = self._total, self._time
            self._peak = dict(self._live)


class _Watch(TorchDispatchMode):
    """Shows the ledger the tensors that go into and come out of every operator."""

    def __init__(self, ledger: _Ledger):
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A tensor made from Python numbers is first seen on its way into this operator.
        made_here = func is torch.ops.aten.lift_fresh.default
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and not leaf.is_mkldnn:  # whose memory torch cannot see
                storage = local(leaf).untyped_storage()
                label = ACTIVATIONS if made_here else INPUTS
                self._ledger.add(storage, label, from_before=not made_here)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_mkldnn:
                self._ledger.add(local(leaf).untyped_storage(), ACTIVATIONS)
        return result
