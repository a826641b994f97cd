"""A run that is killed with SIGKILL at a chosen moment.

    python -m tests.e2e.killed MODULE:FUNCTION:N key=value …

runs zoo with the overrides and kills its own process when FUNCTION is entered for the N-th time.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys


def arm(moment: str) -> None:
    module_name, path, count = moment.split(":")
    owner = importlib.import_module(module_name)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original, left = getattr(owner, name), int(count)

    @functools.wraps(original)
    def wrapped(*arguments, **keywords):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **keywords)

    setattr(owner, name, wrapped)


if __name__ == "__main__":
    from zoo.cli import main

    arm(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
