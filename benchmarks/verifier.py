"""How good the math verifier is, beside math-verify as shipped: python -m benchmarks.verifier.

Reads the labelled cases from `$ZOO_SHARED/data/verifier` (or `../shared`), judges every row in a
process of its own that is killed when it hangs, and writes verifier.md and verifier.csv to
results/verifier (or `out=DIR`). `seconds=3` sets the hang limit, `verifiers=zoo` leaves out others.
TRL's accuracy reward takes part where TRL is: here, or in `python -m benchmarks.speed.peers`.
"""

from __future__ import annotations

import csv
import json
import os
import resource
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
OPTIONS = ("out", "seconds", "verifiers")
LIMIT_SECONDS = 1.0  # a hostile input's verdict must come within this
MEMORY_BYTES = 8 * 2**30  # of a worker: an explosion ends it instead of the machine

# ---------------------------------------------------------------- the verifiers


def judge_zoo() -> Callable[[str, str, str], float]:
    from zoo.rewards.math import verify

    return lambda completion, gold, style: verify(completion, gold, style).score


def judge_math_verify() -> Callable[[str, str, str], float]:
    """math-verify with its defaults: its README's two calls, its own timeouts (signals) on."""
    from math_verify import parse, verify

    return lambda completion, gold, style: float(verify(parse(f"${gold}$"), parse(completion)))


def judge_boxed_first() -> Callable[[str, str, str], float]:
    """math-verify told to read a box before anything else, timeouts on."""
    from math_verify import LatexExtractionConfig, parse, verify

    boxed = [LatexExtractionConfig(boxed_match_priority=0)]

    def judge(completion: str, gold: str, style: str) -> float:
        return float(verify(parse(f"${gold}$"), parse(completion, extraction_config=boxed)))

    return judge


def judge_trl() -> Callable[[str, str, str], float]:
    """TRL's accuracy reward; what it abstains from is not paid."""
    from trl.rewards import accuracy_reward

    def judge(completion: str, gold: str, style: str) -> float:
        return accuracy_reward([[{"role": "assistant", "content": completion}]], [f"${gold}$"])[0]

    return judge


VERIFIERS: dict[str, tuple[Callable[[], Callable[[str, str, str], Any]], str]] = {
    "zoo": (judge_zoo, "zoo.rewards.math"),
    "math-verify": (judge_math_verify, "math_verify"),
    "math-verify boxed-first": (judge_boxed_first, "math_verify"),
    "trl": (judge_trl, "trl"),
}


# ---------------------------------------------------------------- the rows


@dataclass
class Row:
    """One labelled input; `expected` is None where graders differ."""

    kind: str
    completion: str
    gold: str
    style: str
    expected: bool | None
    score: float | None = None
    seconds: float = float("nan")
    error: str = ""

    def right(self) -> bool:
        return self.score is not None and (self.score >= 0.5) == self.expected


def read_rows(path: Path) -> list[Row]:
    """Rows of cases.jsonl or hostile.jsonl; ambiguous ones have no expected verdict."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        expected = None if case.get("ambiguous") else case["expected"]
        rows.append(Row(case["kind"], _completion(case), case["gold"], case["style"], expected))
    return rows


def read_speed(path: Path) -> list[Row]:
    """Rows of speed.jsonl: each gold with a right and a wrong completion."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        for verdict in ("right", "wrong"):
            right = verdict == "right"
            rows.append(Row(case["style"], case[verdict], case["gold"], case["style"], right))
    return rows


def _completion(case: dict[str, Any]) -> str:
    if "pred_parts" in case:
        return "".join(_parts(case["pred_parts"]))
    if case["mode"] == "answer":
        return f"The answer is $\\boxed{{{case['pred']}}}$."
    return case["pred"]


def _parts(parts: list[list[Any]]) -> Iterator[str]:
    for part in parts:
        if part[0] == "@range":
            _, start, stop, form, separator = part
            yield separator.join(form % number for number in range(start, stop))
        else:
            yield part[0] * part[1]


# ---------------------------------------------------------------- judging


class Worker:
    """A process that judges rows one by one and is replaced when it is late or dies."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self.seconds = seconds
        self.process: subprocess.Popen[bytes] | None = None

    def judge(self, row: Row) -> None:
        """Fill in a row's score and seconds, or its error."""
        process = self.process or self._start()
        request = json.dumps([row.completion, row.gold, row.style]).encode() + b"\n"
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except BrokenPipeError:
            row.error = "died"
            self.stop()
            return
        if not select.select([process.stdout], [], [], self.seconds)[0]:
            row.error, row.seconds = "hang", self.seconds
            self.stop()
            return
        reply = process.stdout.readline()
        if not reply:
            row.error = "died"
            self.stop()
            return
        answer = json.loads(reply)
        row.score, row.seconds, row.error = answer["score"], answer["seconds"], answer["error"]

    def _start(self) -> subprocess.Popen[bytes]:
        python = _python(self.name)
        command = [python, "-m", "benchmarks.verifier", "worker", self.name]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=REPOSITORY,
        )
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise RuntimeError(f"the worker of {self.name} did not start: {shlex.join(command)}")
        return self.process

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def serve(name: str) -> None:
    """The worker's side: one JSON request a line in, one JSON answer a line out."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    judge = VERIFIERS[name][0]()
    # Imports and first calls are not a verdict's time.
    for completion, gold in (("\\boxed{1}", "1"), ("\\boxed{\\sqrt{2}x+1}", "1+x\\sqrt2")):
        judge(completion, gold, "math")
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        completion, gold, style = json.loads(line)
        score, error = None, ""
        start = time.perf_counter()
        try:
            score = float(judge(completion, gold, style) or 0.0)
        except Exception as problem:
            error = type(problem).__name__
        seconds = time.perf_counter() - start
        print(json.dumps({"score": score, "seconds": seconds, "error": error}), file=replies)
        replies.flush()


def _python(name: str) -> str:
    """The interpreter that has a verifier: this one, or that of the peers' environment; or ""."""
    if find_spec(VERIFIERS[name][1]) is not None:
        return sys.executable
    from benchmarks.speed.peers import default_folder, python_of

    other = python_of(default_folder())
    return str(other) if name == "trl" and other.exists() else ""


# ---------------------------------------------------------------- the table


@dataclass
class Result:
    """One verifier's line."""

    verifier: str
    version: str
    columns: dict[str, str] = field(default_factory=dict)


def measure(name: str, data: Path, seconds: float) -> Result:
    """Judge every row with one verifier."""
    package = "zoo-rl" if name == "zoo" else name.partition(" ")[0]
    result = Result(name, _version(package))
    worker = Worker(name, seconds)
    try:
        cases = read_rows(data / "cases.jsonl")
        hostile = read_rows(data / "hostile.jsonl")
        speed = read_speed(data / "speed.jsonl")
        for row in (*cases, *hostile, *speed):
            worker.judge(row)
    finally:
        worker.stop()
    decided = [row for row in cases if row.expected is not None]
    attacks = [row for row in hostile if row.expected is not None]
    in_time = [row for row in attacks if row.right() and row.seconds <= LIMIT_SECONDS]
    columns = result.columns
    columns["cases right"] = f"{sum(row.right() for row in decided)} of {len(decided)}"
    columns["accuracy %"] = f"{100 * sum(row.right() for row in decided) / len(decided):.1f}"
    columns["false positives"] = str(_paid(decided))
    columns["false negatives"] = str(sum(bool(r.expected) and not r.right() for r in decided))
    columns["hostile right within 1 s"] = f"{len(in_time)} of {len(attacks)}"
    columns["hostile false positives"] = str(_paid(attacks))
    columns["exceptions"] = str(sum(row.error not in ("", "hang") for row in (*cases, *hostile)))
    columns[f"hangs past {seconds:g} s"] = str(sum(row.error == "hang" for row in hostile))
    for style, label in (("gsm8k", "GSM8K"), ("math", "MATH-500")):
        times = sorted(row.seconds for row in speed if row.kind == style and not row.error)
        columns[f"{label} mean µs"] = f"{1e6 * sum(times) / len(times):.1f}"
        columns[f"{label} median µs"] = f"{1e6 * times[len(times) // 2]:.1f}"
        columns[f"{label} p99 µs"] = f"{1e6 * times[int(0.99 * len(times))]:.0f}"
    columns["format rules right"] = _format(data / "format.jsonl") if name == "zoo" else "n/a"
    return result


def _paid(rows: Sequence[Row]) -> int:
    return sum(row.expected is False and row.score is not None and row.score >= 0.5 for row in rows)


def _format(path: Path) -> str:
    """Rows of format.jsonl whose rule is one of zoo's format rewards, and how many were right."""
    from zoo.rewards.shaping import Rule, keeps_format

    rules = {
        "think_tags": Rule.think,
        "think_answer_tags": Rule.think_answer,
        "one_box": Rule.boxed,
        "one_hash_answer": Rule.hash,
    }
    right = count = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        if case["rule"] in rules and not case["ambiguous"]:
            count += 1
            right += keeps_format(case["completion"], rules[case["rule"]]) == case["expected"]
    return f"{right} of {count}"


def _version(package: str) -> str:
    if package == "trl" and find_spec("trl") is None:
        from benchmarks.speed.peers import TRL

        return TRL
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "source"


def write(results: Sequence[Result], out: Path, command: str) -> str:
    """verifier.csv and verifier.md; returns the table."""
    from zoo.measure.provenance import meta  # not at the top: a peer's worker has no zoo

    out.mkdir(parents=True, exist_ok=True)
    origin = meta()
    names = list(results[0].columns)
    with open(out / "verifier.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["verifier", "version", *names, "commit", "dirty", "cpu", "command"])
        for one in results:
            values = [one.columns[name] for name in names]
            place = [origin["commit"], origin["dirty"], origin["machine"]["cpu"], command]
            writer.writerow([one.verifier, one.version, *values, *place])
    head = ["", *(f"{one.verifier} {one.version}" for one in results)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in names:
        lines.append("| " + " | ".join([name, *(one.columns[name] for one in results)]) + " |")
    table = "\n".join(lines)
    machine, python = origin["machine"], origin["versions"]["python"]
    commit = origin["commit"] or "not a git checkout"
    dirty = " with uncommitted changes" if origin["dirty"] else ""
    (out / "verifier.md").write_text(
        f"# Math verifiers on labelled answers\n\n{table}\n\n"
        "Rows on which graders differ are left out. Times are of single verdicts, each input once, "
        "right and wrong ones together.\n\n"
        f"Command: `{command}`. Commit: {commit}{dirty}. "
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['system']}, "
        f"Python {python}.\n",
        encoding="utf-8",
    )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; the exit status is 2 when the data is missing or an option unknown."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(word in ("-h", "--help", "help") for word in arguments):
        print(__doc__)
        return 0
    if arguments[:1] == ["worker"]:
        serve(arguments[1])
        return 0
    options = dict(argument.partition("=")[::2] for argument in arguments)
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        print(f"no option {unknown[0]!r}: the options are {', '.join(OPTIONS)}", file=sys.stderr)
        return 2
    shared = Path(os.environ.get("ZOO_SHARED", REPOSITORY.parent / "shared"))
    data = shared / "data" / "verifier"
    if not data.is_dir():
        print(f"no labelled cases at {data}: set ZOO_SHARED to their folder", file=sys.stderr)
        return 2
    wanted = [name for name in options.get("verifiers", ",".join(VERIFIERS)).split(",") if name]
    unknown = [name for name in wanted if name not in VERIFIERS]
    if unknown:
        print(f"no verifier {unknown[0]!r}: there are {', '.join(VERIFIERS)}", file=sys.stderr)
        return 2
    names = [name for name in wanted if _python(name)]
    results = [measure(name, data, float(options.get("seconds", "3"))) for name in names]
    command = shlex.join(["python", "-m", "benchmarks.verifier", *arguments])
    print(write(results, Path(options.get("out", "results/verifier")), command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
