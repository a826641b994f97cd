"""Several small runs in one group of processes, so that torchrun starts up once.

    torchrun --nproc_per_node 2 -m tests.e2e.two FILE

FILE holds a JSON list of {"output", "overrides", "stop_after": step or null}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from tests.e2e.small import run_small
from zoo.train.session import Session


def run_all(file: Path) -> None:
    for job in json.loads(file.read_text(encoding="utf-8")):
        stop, record = job.get("stop_after"), Session.record

        def interrupted(self, step, *arguments, stop=stop, record=record):
            record(self, step, *arguments)
            if step == stop and os.environ["RANK"] == "1":  # all must end, whoever was asked
                signal.raise_signal(signal.SIGINT)

        Session.record = interrupted
        try:
            run_small(Path(job["output"]), *job["overrides"])
            assert stop is None
        except KeyboardInterrupt as interrupt:
            assert f"Step {stop} of" in str(interrupt), interrupt
        finally:
            Session.record = record


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
