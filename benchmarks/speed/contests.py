"""Which contenders meet on which work, and the alternation of their steps."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.speed.workloads import WORKLOADS, Workload, variant
from zoo.measure.files import write_text

REPOSITORY = Path(__file__).resolve().parents[2]
TRL_SIDE = Path(__file__).with_name("trl_side.py")
STEP_SECONDS = 900  # beyond, a worker counts as dead
ENDING_SECONDS = 10  # that a worker which closed its channel has to end by itself
BUSY = 0.15  # share of the machine that others may use
ERROR = re.compile(r"(?i)error\b|exception|out of memory|killed|terminate called|aborted|\bfault")


class Died(RuntimeError):
    """A worker ended or did not answer; tells how in its first line, then what it said last."""


@dataclass(frozen=True)
class Contender:
    """One side: zoo, TRL at one setting, or transformers alone."""

    name: str
    side: str  # zoo, trl, plain
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Contest:
    """Who makes the same step in turns."""

    workload: str
    algorithm: str
    lengths: str = "fixed"  # natural: texts end where they end
    extra: str = ""  # cached, sizes, rollouts
    plain: bool = False  # transformers alone and the floors beside
    peers: tuple[str, ...] = ("best",)  # best, or one for each precision
    searched: str = ""  # the search of the same algorithm at other lengths serves here as well

    @property
    def sides(self) -> list[str]:
        """Who takes part, as `hold` names them."""
        peers = ["TRL" if wanted == "best" else f"TRL {wanted}" for wanted in self.peers]
        return ["zoo", *peers, *(["plain"] if self.plain else [])]

    @property
    def name(self) -> str:
        parts = (self.algorithm, self.workload, self.lengths, self.extra)
        return "-".join(part for part in parts if part)


# A search on W2 takes minutes; one serves all contests of an algorithm there
CONTESTS = (
    Contest("W1", "grpo", plain=True),
    Contest("W1", "grpo", "natural", plain=True),
    Contest("W2", "grpo", plain=True, peers=("bf16", "amp")),
    Contest("W1", "ppo"),
    Contest("W2", "ppo"),
    Contest("W1", "dpo", "natural"),
    Contest("W2", "dpo", "natural"),
    Contest("W1", "dpo", "natural", "cached", searched="dpo-W1-natural"),
    Contest("W2", "dpo", "natural", "cached", searched="dpo-W2-natural"),
    Contest("W2", "grpo", extra="sizes", peers=()),
    Contest("W2", "grpo", extra="rollouts", peers=()),
    Contest("W1", "ppo", "natural", searched="ppo-W1-fixed"),
    Contest("W1", "dpo", "fixed", searched="dpo-W1-natural"),
    Contest("W2", "dpo", "fixed", searched="dpo-W2-natural"),
    Contest("W1", "sft", "natural"),
    Contest("W1", "sft", "fixed", searched="sft-W1-natural"),
    Contest("W2", "grpo", "natural", searched="grpo-W2-fixed"),
    Contest("W2", "ppo", "natural", searched="ppo-W2-fixed"),
    Contest("W2", "sft", "natural"),
    Contest("W2", "sft", "fixed", searched="sft-W2-natural"),
)


@dataclass(frozen=True)
class Place:
    """Where things are on this machine; none of it enters a record."""

    folder: Path  # workloads
    peers: Path  # python of TRL's environment
    older: Path  # folder of TRL 1.12, for PPO
    threads: int


class Worker:
    """A contender's process."""

    def __init__(self, contender: Contender, spec: dict[str, Any], place: Place) -> None:
        self.contender = contender
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        if contender.side == "trl":
            command = [str(place.peers), str(TRL_SIDE)]
        else:
            command = [sys.executable, "-m", f"benchmarks.speed.{contender.side}_side"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
        environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(place.threads)}
        self.process = subprocess.Popen(
            [*command, json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            cwd=REPOSITORY,
            env=environment,
        )
        try:
            self.facts = self._answer()
        except Died:
            self.stop()
            raise

    def step(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Died(self._said()) from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        stdout = self.process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], STEP_SECONDS)[0]:
            raise Died(f"no answer in {STEP_SECONDS} s\n{self._said()}")
        line = stdout.readline()
        if not line:
            raise Died(self._said())
        return json.loads(line)

    def _said(self) -> str:
        """How it ended, where it did by itself, and what it said."""
        try:
            status = self.process.wait(ENDING_SECONDS)
            how = f"ended by signal {-status}" if status < 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            how = "still running"
        self.process.kill()
        self.process.wait()
        self.errors.seek(0)
        return f"{how}\n{self.errors.read()[-2000:].decode(errors='replace')}"

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def others_share(seconds: float = 1.0) -> float:
    """Share of the machine in use while our workers wait."""
    return psutil.cpu_percent(interval=seconds) / 100


def hold(
    contest: Contest, place: Place, steps: int, searched: dict[str, Any], found: Path
) -> dict[str, Any]:
    """Run a contest; its record.

    Args:
        contest: who meets.
        place: of the machine.
        steps: timed ones of each, after one to warm up.
        searched: records of earlier contests by name.
        found: file of the search, written as soon as that is done and read by the next try.
    """
    record: dict[str, Any] = {"contest": contest.name, "load": round(os.getloadavg()[0], 2)}
    record["search"] = []
    if searched.get(contest.searched, {}).get("search"):
        record["search_of"] = contest.searched
        record["search"] = searched[contest.searched]["search"]
    elif contest.peers:
        if not found.exists():
            tried = [_tried(c, contest, place) for c in _candidates(contest)]
            write_text(found, json.dumps(tried, indent=1) + "\n")
        record["search"] = json.loads(found.read_text(encoding="utf-8"))
    contenders = _contenders(contest, record["search"])
    with tempfile.TemporaryDirectory() as outputs:
        workers = []
        try:
            for index, contender in enumerate(contenders):
                spec = _spec(contest, contender, place, f"{outputs}/{index}")
                workers.append(Worker(contender, spec, place))
            record |= _alternate(workers, steps)
        finally:
            for worker in workers:
                worker.stop()
    return record


def _alternate(workers: Sequence[Worker], steps: int) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {
        w.contender.name: {**w.contender.settings, **_facts(w), "steps": []} for w in workers
    }
    shares = [others_share()]
    for turn in range(steps + 1):
        for worker in workers:
            made = worker.step()
            if turn:
                found[worker.contender.name]["steps"].append(made)
            else:
                found[worker.contender.name]["first"] = made
        shares.append(others_share(0.3))
        print(f"    {turn}/{steps}", *(_shown(n, f) for n, f in found.items()), flush=True)
    return {"contenders": found, "others": round(sorted(shares)[len(shares) // 2], 3)}


def _shown(name: str, found: dict[str, Any]) -> str:
    return f"{name} {found['steps'][-1]['seconds']:.2f} s;" if found["steps"] else ""


def _facts(worker: Worker) -> dict[str, Any]:
    return {key: value for key, value in worker.facts.items() if key != "ready"}


# who ---------------------------------------------------------------------------------------------


def _candidates(contest: Contest) -> Iterator[Contender]:
    """TRL's settings: precision × micro-batch."""
    workload = WORKLOADS[contest.workload]
    sizes = sorted({min(size, workload.rows) for size in (8, 32, workload.rows)})
    for precision in ("bf16", "amp"):
        for size in sizes:
            yield Contender(
                f"TRL {precision} mb={size}", "trl", {"precision": precision, "micro_batch": size}
            )


def _tried(contender: Contender, contest: Contest, place: Place) -> dict[str, Any]:
    """Two steps, of which the second counts; a setting that fails is recorded as such."""
    result: dict[str, Any] = {"name": contender.name, **contender.settings, "seconds": None}
    with tempfile.TemporaryDirectory() as output:
        worker = None
        try:
            worker = Worker(contender, _spec(contest, contender, place, output), place)
            worker.step()
            result["seconds"] = worker.step()["seconds"]
        except Died as problem:
            result["error"] = reason(str(problem))
        finally:
            if worker is not None:
                worker.stop()
    print(f"    searched {contender.name}: {result['seconds']}", flush=True)
    return result


def reason(problem: str) -> str:
    """How a worker ended, and the last line that looks like an error, if one does."""
    how, *said = problem.strip().splitlines()
    errors = [line.strip() for line in said if ERROR.search(line)]
    return ": ".join([how, *errors[-1:]])[:200]


def _contenders(contest: Contest, search: Sequence[dict[str, Any]]) -> list[Contender]:
    if contest.extra == "sizes":
        return [
            Contender("zoo G=4", "zoo", {"group_size": 4}),
            Contender("zoo G=16", "zoo", {"group_size": 16}),
            Contender("zoo C=96", "zoo", {}),
            Contender("zoo C=192", "zoo", {"new_tokens": 192}),
        ]
    if contest.extra == "rollouts":  # as many in each
        return [
            Contender("zoo 8 × 4", "zoo", {"prompts": 8, "group_size": 4}),
            Contender("zoo 2 × 16", "zoo", {"prompts": 2, "group_size": 16}),
        ]
    found = [Contender("zoo", "zoo")]
    tried = [one for one in search if one["seconds"] is not None]
    for wanted in contest.peers:
        fitting = [one for one in tried if wanted in ("best", one["precision"])]
        if not fitting:
            errors = "; ".join(one.get("error", "") for one in search)
            raise Died(f"no setting of TRL works for {contest.name}: {errors}")
        best = min(fitting, key=lambda one: one["seconds"])
        settings = {key: best[key] for key in ("precision", "micro_batch")}
        name = "TRL" if wanted == "best" else f"TRL {wanted}"
        found.append(Contender(name, "trl", settings))
    if contest.plain:
        found.append(Contender("plain", "plain"))
    return found


def _spec(contest: Contest, contender: Contender, place: Place, output: str) -> dict[str, Any]:
    workload: Workload = WORKLOADS[contest.workload]
    folder = place.folder / workload.name
    settings = dict(contender.settings)
    sizes = {k: settings.pop(k) for k in ("prompts", "group_size", "new_tokens") if k in settings}
    if sizes:
        folder = variant(workload, folder, **sizes)
        workload = replace(workload, **sizes)
    kind = {"dpo": "pairs", "sft": "examples"}.get(contest.algorithm, "")
    groups = {"dpo": workload.pairs, "sft": workload.examples}.get(
        contest.algorithm, workload.prompts
    )
    rows = f"{kind}-{contest.lengths}" if kind else "prompts"
    spec = {
        "algorithm": contest.algorithm,
        "model": str(folder / "model"),
        "rows": str(folder / f"{rows}.jsonl"),
        "groups": groups,
        "group_size": workload.group_size,
        "rows_a_step": 2 * groups if kind == "pairs" else groups if kind else workload.rows,
        "new_tokens": workload.new_tokens,
        "endless": contest.lengths == "fixed" and not kind,
        "micro_batch_tokens": workload.micro_batch_tokens * workload.new_tokens // 96
        if "new_tokens" in sizes
        else workload.micro_batch_tokens,
        "threads": place.threads,
        "output": output,
        **settings,
    }
    if contest.extra == "cached":
        spec["cached"] = True
    if contest.algorithm == "ppo":
        spec["before"] = [str(place.older)]
    if contender.settings.get("group_size") == 16:  # one group is one micro-batch
        spec["micro_batch_tokens"] *= 2
    return spec


def waited_until_quiet(seconds: float = 60.0) -> float:
    """The share that others use, after waiting a while for it to fall."""
    end = time.monotonic() + seconds
    share = others_share(2.0)
    while share > BUSY and time.monotonic() < end:
        time.sleep(3)
        share = others_share(2.0)
    return share
