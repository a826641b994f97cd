"""Sums over processes; with one process each function returns its argument."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import psutil
import torch.distributed as dist
from torch import Tensor

from zoo.config import PEER_GONE, ConfigError

PATIENCE = timedelta(minutes=5)  # until all processes of a launcher are there
TOLD_AFTER_SECONDS = 5.0
_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # where processes meet
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def buffers_not_told() -> Iterator[None]:
    """Without torch's word that `broadcast_buffers` has another name, which older ones lack."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
        yield


def check_launcher() -> None:
    """Refuse to be the only process where `accelerate launch` was asked for several.

    Without a GPU, or with --cpu, it starts one process and says nothing.

    Raises:
        ConfigError: names what was asked for and the command that does it.
    """
    if "ACCELERATE_MIXED_PRECISION" not in os.environ or "WORLD_SIZE" in os.environ:
        return
    asked = _asked_of_accelerate()
    if asked > 1:
        raise ConfigError(
            f"accelerate launch was asked for {asked} processes and started one. Start them with: "
            f"torchrun --nproc_per_node {asked} -m zoo …, and train.device=cpu to leave GPUs alone."
        )


def _asked_of_accelerate() -> int:
    """How many processes the `accelerate launch` was to start that started this one; 1: none."""
    try:
        words = psutil.Process().parent().cmdline()  # pyright: ignore
    except (psutil.Error, AttributeError):  # no parent, or not ours to look at
        return 1
    start = next((i for i, word in enumerate(words) if _LAUNCH.search(word)), None)
    if start is None:
        return 1
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            asked: Any = launch_command_parser().parse_args(words[start + 1 :])
        count = asked.num_processes
        by_file = asked.config_file or (os.path.isfile(default_config_file) and not asked.cpu)
        if count is None and by_file:
            count = getattr(load_config_from_file(asked.config_file), "num_processes", None)
    except (SystemExit, OSError, ValueError):  # it would not have started us like this
        return 1
    return count or 1


# `accelerate launch`, `accelerate-launch`, `python -m accelerate.commands.launch`
_LAUNCH = re.compile(r"(^|[/\\])(launch|accelerate-launch|accelerate\.commands\.launch)(\.\w+)?$")


def expected_processes() -> int:
    """How many processes were started to train together, as a launcher and torch tell it."""
    told = os.environ.get("WORLD_SIZE", "")
    return max(int(told) if told.isdecimal() else 1, world_size())


def check_rank() -> None:
    """Refuse to be a process that is none of WORLD_SIZE.

    Raises:
        ConfigError: WORLD_SIZE is no number from 1, or RANK none below it.
    """
    told, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if size and not (size.isdecimal() and int(size)):
        raise ConfigError(
            f"WORLD_SIZE={size} is no number of processes. Start them with torchrun "
            "--nproc_per_node 2 -m zoo …, or unset it for a single process."
        )
    if told is None or not size:
        return
    if not told.isdecimal() or int(told) >= int(size):
        raise ConfigError(
            f"RANK={told} is none of WORLD_SIZE={size} processes, which count from 0. Start them "
            f"with torchrun --nproc_per_node {size} -m zoo …, or unset both for a single process."
        )


def meet() -> object:
    """Wait until all processes of a launcher are there; what they met in, to be held on to.

    The process group waits in the same place, but with the patience of its collectives.

    Raises:
        torch.distributed.DistError: they were not there within PATIENCE.
    """
    if not dist.is_available() or dist.is_initialized() or any(n not in os.environ for n in _PLACE):
        return None
    # Not at the top: a PyTorch built without distributed has none
    from torch.distributed.rendezvous import rendezvous

    return next(iter(rendezvous("env://", timeout=PATIENCE)))


@contextlib.contextmanager
def waiting_told() -> Iterator[None]:
    """While processes are waited for, a signal ends this one at once, and a line says what is up.

    Python's own handlers run in Python alone, and the waiting is not.
    """
    size, address, port = (os.environ.get(name, "?") for name in _PLACE[1:])
    line = (
        f"waiting until all processes are at {address}:{port} (WORLD_SIZE={size}, MASTER_ADDR and "
        "MASTER_PORT in the environment; unset them for a single process)\n"
    )
    timer = threading.Timer(TOLD_AFTER_SECONDS, lambda: sys.stderr.write(line))
    timer.daemon = True
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        # The others are not Python's: a signal that is ignored, as under nohup, stays so
        before = {number: handler for number, handler in before.items() if callable(handler)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


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
        f"{PEER_GONE}, by an error or killed. Read its error.txt or error.rankN.txt "
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


def done_by_main(work: Callable[[], Any]) -> Any:
    """What a call gives in the main process, which alone makes it, everywhere.

    Raises:
        ConfigError: that of the main process, everywhere.
    """
    value, refusal = None, None
    if is_main():
        try:
            value = work()
        except ConfigError as error:
            refusal = error
    value, reason = from_main((value, None if refusal is None else str(refusal)))
    if reason is not None:
        raise refusal or ConfigError(reason)
    return value


def largest(value: float) -> float:
    """The maximum over processes."""
    return max(gathered(value))
