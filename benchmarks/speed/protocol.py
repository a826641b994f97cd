"""Taking turns: a coordinator starts workers and lets one of them at a time make a step.

A worker reads one word a line from its standard input ("go" or "end") and answers each step with
one JSON object a line. This file needs nothing but torch, since the peers' workers run in an
environment of their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch


class Turns:
    """The worker's side. What it prints goes to standard error; replies have their own channel."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def await_go(self) -> None:
        """Wait for a turn; leaves the process at the end of the contest."""
        if sys.stdin.readline().strip() != "go":
            leave()

    def reply(self, record: dict[str, Any]) -> None:
        """What came of a turn, or with `ready`, that the worker is loaded."""
        print(json.dumps(record), file=self._replies, flush=True)

    def serve(self, step: Callable[[], dict[str, Any]]) -> NoReturn:
        """Make a step at each turn, for workers without a loop of their own."""
        self.reply({"ready": True})
        while True:
            self.await_go()
            self.reply(step())


def leave() -> NoReturn:
    """End without destructors: a trainer in the middle of its loop would write and wait."""
    sys.stderr.flush()
    os._exit(0)


def on_gpu() -> bool:
    return torch.cuda.is_available()


def now() -> float:
    """Seconds; what the GPU was asked to do before is done."""
    if on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


def forget_peak() -> None:
    """Start the high-water mark of memory anew: the GPU's, else this process's resident memory."""
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_bytes() -> int:
    """The high-water mark since `forget_peak`."""
    if on_gpu():
        return torch.cuda.max_memory_allocated()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def score(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """The reward of both sides: a share that depends on the text alone and is cheap to compute."""
    return [sum(map(ord, text)) % 8 / 8 for text in completions]
