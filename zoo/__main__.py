"""`python -m zoo` is `zoo`."""

import contextlib
import io
import os
import sys
import threading
import time

GRACE_SECONDS = 3.0  # for the threads of a reward that was given up, or after Ctrl-C
WORK_SECONDS = 60.0  # for those that may have work left, such as sending what was measured


def start() -> int:
    """Run `zoo`; Ctrl-C while Python still loads it leaves no traceback either."""
    status = 1
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed (`>&-`): a file of the run would take its number
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that has no · or ü gets a ?
        sys.stdout.reconfigure(errors="replace")
    try:
        from zoo.cli import main

        status = main()
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        status = 130
    finally:
        deadline = sys.modules.get("zoo.rewards.deadline")
        if _waited_for():
            at_once = status == 130 or (deadline and deadline.given_up)
            given = (status, GRACE_SECONDS if at_once else WORK_SECONDS)
            threading.Thread(target=_end_in_time, args=given, daemon=True).start()
    return status


def _waited_for() -> list[threading.Thread]:
    """The threads that Python waits for before it ends, such as those of a pool."""
    main = threading.main_thread()
    return [t for t in threading.enumerate() if t is not main and not t.daemon]


def _end_in_time(status: int, grace: float) -> None:
    """While Python ends: an idle pool is gone at once, one that hangs would keep it for ever."""
    time.sleep(grace)
    if left := _waited_for():
        with contextlib.suppress(OSError, ValueError):  # a terminal that went away
            sys.stderr.write(f"zoo ends without {left[0].name}, a thread that did not end.\n")
            sys.stderr.flush()
            sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(start())
