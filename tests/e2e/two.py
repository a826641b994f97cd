"""Several small runs in one group of processes, so that torchrun starts up once.

    torchrun --nproc_per_node 2 -m tests.e2e.two FILE

FILE holds a JSON list of {"output", "overrides", "stop_after": step or null}; "<rank>" in an
override is the process's own number. Where a run ends,
both processes must hold the same weights.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.e2e.small import run_small
from zoo.distributed import gathered
from zoo.models.loading import weights_hash
from zoo.train.session import Session


def check_equal(session: Session) -> None:
    mine = {name: weights_hash(t.module) for name, t in session.run.trainables.items()}
    everyone = gathered(mine)
    assert len(everyone) == 2 and everyone[0] == everyone[1], everyone


def run_all(file: Path) -> None:
    finish = Session.finish

    def checked(self: Session) -> dict[str, Any]:
        check_equal(self)
        return finish(self)

    Session.finish = checked
    for job in json.loads(file.read_text(encoding="utf-8")):
        stop, record = job.get("stop_after"), Session.record

        def interrupted(self, step, *arguments, stop=stop, record=record):
            record(self, step, *arguments)
            if step == stop and os.environ["RANK"] == "1":  # all must end, whoever was asked
                signal.raise_signal(signal.SIGINT)

        Session.record = interrupted
        try:
            overrides = [o.replace("<rank>", os.environ["RANK"]) for o in job["overrides"]]
            run_small(Path(job["output"]), *overrides)
            assert stop is None
        except KeyboardInterrupt as interrupt:
            assert f"Step {stop} of" in str(interrupt), interrupt
        finally:
            Session.record = record


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
