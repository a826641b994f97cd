"""Seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Timer:
    """Adds up wall-clock seconds by phase; a phase inside another is not counted in the outer one.

    So the phases add up to no more than the time that passed. On CUDA the device is synchronised
    at both ends of a phase: otherwise a phase is charged for the kernels of the one before.

        with timer("generate"): …
        timer.drain()  # {"generate": 1.9}
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self._device = torch.device(device)
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._turn()
        self._open.append(phase)
        self._seconds.setdefault(phase, 0.0)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def drain(self) -> dict[str, float]:
        """Seconds of each phase since the last drain; a phase that is still open goes on from 0."""
        self._turn()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _turn(self) -> None:
        """Charge the time since the last turn to the innermost open phase."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()  # monotonic: a clock that is set back changes nothing
        if self._open:
            phase = self._open[-1]
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now
