"""Measuring and predicting in processes of their own, one line of JSON a result.

Many fake tensors make torch 2.13 crash now and then, mostly in the garbage collector. So a process
predicts or measures, one that predicts collects nothing, and where it dies the next one goes on
with what is left.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Job:
    """One run to meter: names of shape and arm, with numbers or without, layers (0: all)."""

    shape: str
    arm: str
    fake: bool
    layers: int = 0


def results(jobs: Sequence[Job]) -> dict[Job, dict[str, dict[str, int]]]:
    """phase → label → bytes of each job.

    Raises:
        RuntimeError: a process ended without any result; what it said stands on the terminal.
    """
    found: dict[Job, dict[str, dict[str, int]]] = {}
    while left := [job for job in jobs if job not in found]:
        work = json.dumps([vars(job) for job in left if job.fake == left[0].fake])
        command = [sys.executable, "-m", "benchmarks.memory", "worker", work]
        done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if not answers:
            raise RuntimeError(f"{left[0]} ended with status {done.returncode} and no result")
        found |= {Job(**answer["job"]): answer["peaks"] for answer in answers}
    return found


def work(text: str) -> None:
    """Does the jobs of `results`."""
    import transformers

    from benchmarks.memory.fake import fake_run
    from benchmarks.memory.runs import ARMS, MEASURED, PREDICTED, peaks

    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    shapes = {shape.name: shape for shape in (*MEASURED, *PREDICTED)}
    arms = {arm.name: arm for arm in ARMS}
    for values in json.loads(text):
        job = Job(**values)
        arm, shape = arms[job.arm], shapes[job.shape]
        shape = shape.with_layers(job.layers or shape.layers)
        if job.fake:
            gc.disable()
            with fake_run():
                found = peaks(arm, shape)
        else:
            found = peaks(arm, shape)
            gc.collect()
        print(json.dumps({"job": values, "peaks": found}), flush=True)
    os._exit(0)
