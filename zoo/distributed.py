"""Sums over processes; with one process each function returns its argument."""

from __future__ import annotations

import atexit
import os
from functools import cache
from typing import Any

import psutil
import torch.distributed as dist
from torch import Tensor

from zoo.config import ConfigError


def check_launcher() -> None:
    """Refuse to be the only process where `accelerate launch` was asked for several.

    With --cpu and --num_processes 2 it starts one process and says nothing.

    Raises:
        ConfigError: names what was asked for and the command that does it.
    """
    if "ACCELERATE_MIXED_PRECISION" not in os.environ or "WORLD_SIZE" in os.environ:
        return
    asked = _asked_of_accelerate()
    if asked > 1:
        raise ConfigError(
            f"accelerate launch was asked for {asked} processes and started one. On a CPU, start "
            f"them with: ACCELERATE_USE_CPU=true torchrun --nproc_per_node {asked} -m zoo …"
        )


def _asked_of_accelerate() -> int:
    """--num_processes of the `accelerate launch` that started this process; 1 where none did."""
    try:
        words = psutil.Process().parent().cmdline()  # pyright: ignore
    except (psutil.Error, AttributeError):  # no parent, or not ours to look at
        return 1
    if "launch" not in words:
        return 1
    for i, word in enumerate(words):
        name, _, value = word.partition("=")
        if name.replace("-", "_") == "__num_processes":
            value = value or (words[i + 1] if i + 1 < len(words) else "")
            return int(value) if value.isdigit() else 1
    return 1


@cache
def leave_at_exit() -> None:
    """End the process group before the interpreter goes: left alone, its threads abort the process
    now and then, after all work is done.
    """
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def without_peer(error: BaseException) -> str:
    """What to say where an error means that another process is gone; "" for any other error."""
    words = ("gloo/transport", "by peer", "NCCL communicator was aborted")
    if not isinstance(error, RuntimeError) or not any(word in str(error) for word in words):
        return ""
    return (
        "another process ended first, by an error or killed. Read its error.txt or error.rankN.txt "
        "in the same folder; there is none where it was killed, as by a lack of memory."
    )


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
