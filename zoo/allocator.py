"""What the C library does with freed memory, where tensors live in it."""

from __future__ import annotations

import ctypes
import os
import sys

# glibc's <malloc.h>
TRIM_THRESHOLD, MMAP_MAX = -1, -4
NEVER = 2**31 - 1

FREE = 2**29  # bytes that may lie free from one phase to the next; a small model's all fit

_kept = False  # whether freed memory stays with this process


def keep_freed_memory() -> bool:
    """Have glibc keep freed memory for the next step; whether it does.

    A step on a CPU frees hundreds of megabytes that the next one asks for again. Given back to the
    system in between, each page is mapped and zeroed anew. The peak stays what it was, but a
    process does not shrink after it. Whoever sets MALLOC_… or GLIBC_TUNABLES has decided already;
    ZOO_KEEP_MEMORY=0 is a plain no, for one who wants to see the process's memory fall.
    """
    decided = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    decided = decided or os.environ.get("ZOO_KEEP_MEMORY") == "0"
    if decided or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    global _kept
    _kept = bool(mallopt(MMAP_MAX, 0) and mallopt(TRIM_THRESHOLD, NEVER))
    return _kept


def return_freed_memory() -> None:
    """Give back what `keep_freed_memory` has kept, for a phase whose sizes are others.

    What sampling leaves free fits what training asks for badly, and would stand beside it. Up to
    half a gigabyte stays: to map that anew costs a small model more than it holds.
    """
    if _kept and _free() > FREE:
        ctypes.CDLL(None).malloc_trim(0)


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`; `fordblks` are the free bytes of all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _free() -> int:
    """Bytes that this process has freed and kept; a glibc before 2.33 cannot say: all too many."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return FREE + 1
    ask.restype = _Mallinfo
    return ask().fordblks
