"""What the C library does with freed memory, where tensors live in it."""

from __future__ import annotations

import ctypes
import os
import sys

# glibc's <malloc.h>
TRIM_THRESHOLD, MMAP_MAX = -1, -4
NEVER = 2**31 - 1


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
    return bool(mallopt(MMAP_MAX, 0) and mallopt(TRIM_THRESHOLD, NEVER))
