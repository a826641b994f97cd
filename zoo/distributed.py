"""Sums over processes; with one process each function returns its argument."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


def is_main() -> bool:
    return rank() == 0


def barrier() -> None:
    if is_distributed():
        dist.barrier()


def pooled(value: Tensor) -> Tensor:
    """The sum of a tensor over all processes."""
    if not is_distributed():
        return value
    total = value.clone()
    dist.all_reduce(total)
    return total


def pooled_numbers(values: dict[str, float]) -> dict[str, float]:
    """Sums over processes, name by name; a name that a process lacks counts 0."""
    if not is_distributed():
        return dict(values)
    total: dict[str, float] = {}
    for part in gathered(values):
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def gathered(value: Any) -> list[Any]:
    """Every process's object, in rank order."""
    if not is_distributed():
        return [value]
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, value)
    return parts


def from_main(value: Any) -> Any:
    """The main process's object, everywhere."""
    if not is_distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def largest(value: float) -> float:
    """The maximum over processes."""
    return max(gathered(value))
