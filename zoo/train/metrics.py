"""Means as pooled sums and counts: over micro-batches, updates and processes alike."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zoo.distributed import gathered


class Pool:
    """Collects (sum, count) by name; the mean is taken once, at the end.

    A mean of means over ragged parts is wrong: 3/12 and 3/4 pool to 0.375, not 0.5.
    """

    def __init__(self) -> None:
        self._totals: dict[str, tuple[float, float]] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float = 1.0) -> None:
        before = self._totals.get(name, (0.0, 0.0))
        self._totals[name] = (before[0] + float(total), before[1] + float(count))

    def add_all(self, metrics: Mapping[str, tuple[Tensor | float, Tensor | float]]) -> None:
        for name, (total, count) in metrics.items():
            self.add(name, total, count)

    def over_processes(self) -> Pool:
        """The same pool with every process's sums and counts added."""
        merged = Pool()
        for part in gathered(self._totals):
            for name, (total, count) in part.items():
                merged.add(name, total, count)
        return merged

    def means(self) -> dict[str, float]:
        """name → sum / count, names without any count left out."""
        return {n: total / count for n, (total, count) in self._totals.items() if count > 0}

    def sum(self, name: str) -> float:
        return self._totals.get(name, (0.0, 0.0))[0]
