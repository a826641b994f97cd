"""Looks for texts that crash or hold up the math verifier: python -m benchmarks.fuzz seconds=60

Inputs are mixtures of pieces of LaTeX, markers, digits and odd characters. With atheris installed
(`pip install atheris`, and engine=atheris, the default then) they are bred by code coverage, else
(engine=random) drawn at random with a seed. Prints every exception and every verdict past
`limit=0.5` seconds of its thread's time, as a Python literal that reproduces it; the exit status is
1 if there were any. math-verify is not asked: it is a process of its own, with a deadline.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from zoo.rewards import math as verifier

OPTIONS = ("seconds", "limit", "seed", "engine")
_COMMANDS = r"""\frac{ \frac12 \sqrt{ \sqrt[3] \boxed{ \fbox{ \{ \} \text{ \text{or} \text{cm}^2
\mathrm{ \left( \right] \pm \le \in \cup \cap \setminus \mathbb{R} \infty \pi ^\circ \% \$ \sin
\arctan \log_ \ln \binom{ \sum_{k=1}^{ \int_0^ \lim_{ \begin{pmatrix} \end{pmatrix} \begin{cases}
\end{cases} \\ \overline{ \lfloor \rfloor \ldots \approx \! \, \cdot \times 10^{ 10^{10^ 9^{9^
1,000 1/2 0.5 1e9 e^{ i n! _2 3:4 ## #### answer: <answer> </answer> <think> </think> A: **
because dollars million <|im_end|> <<1+1=2>> ½ √ ² ₂ π ∞ ≤ − € ° ﷺ ５ ١"""
PIECES = (
    *"{}()[]+-*/^_=<>,;:!%|&$.x0y179'\"`#\\?~ \n\t\u200b\u0301\ud800",
    *_COMMANDS.split(),
    *("answer is ", " or ", " and ", "\\text{ or }", "\\sin "),
)
_GOLDS = r"5 \frac{1}{2} x^2+1 (1,2] \{1,2\} y=2x \text{even} 11_2 \sqrt2"
GOLDS = tuple(_GOLDS.split(" "))


@dataclass
class Finding:
    """An input and what was wrong with it."""

    completion: str
    gold: str
    trouble: str


@dataclass
class Probe:
    """Judges inputs and keeps those that raise or are late."""

    limit: float
    count: int = 0
    findings: list[Finding] = field(default_factory=list)

    def judge(self, completion: str, gold: str) -> None:
        self.count += 1
        start = time.thread_time()
        try:
            verifier.verify(completion, gold, second_opinion=False)
        except Exception as error:
            self.findings.append(Finding(completion, gold, f"{type(error).__name__}: {error}"))
            return
        seconds = time.thread_time() - start
        if seconds > self.limit:
            self.findings.append(Finding(completion, gold, f"{seconds:.2f} s"))

    def mixture(self, numbers: Sequence[int]) -> None:
        """Numbers are pieces; the first two choose the gold, where the text goes, and repeats."""
        first, second, *rest = numbers
        text = "".join(PIECES[number % len(PIECES)] for number in rest)
        text *= (1, 1, 1, 1, 2, 9, 60, 400)[second % 8]
        gold = GOLDS[first % len(GOLDS)]
        place = first // len(GOLDS) % 5
        if place == 0:
            self.judge(text, gold)
        elif place == 1:
            self.judge("\\boxed{x}", text)
        else:
            self.judge(("\\boxed{%s}", "#### %s", "The answer is %s")[place - 2] % text, gold)


def at_random(probe: Probe, seconds: float, seed: int) -> None:
    """Mixtures drawn from one seed until the time is up."""
    draw = random.Random(seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        size = draw.choice((3, 6, 12, 30, 100))
        probe.mixture([draw.randrange(1 << 16) for _ in range(size)])


def by_coverage(probe: Probe, seconds: float, seed: int) -> None:
    """Mixtures bred by atheris, in a process of its own because libFuzzer ends the one it is in."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "benchmarks.fuzz", "child", str(report), str(probe.limit)]
        flags = [f"-max_total_time={max(1, int(seconds))}", f"-seed={seed + 1}", "-max_len=200"]
        done = subprocess.run(
            [*command, *flags],
            cwd=folder,
            env=_environment(),
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode or not report.exists():
            # A crash of the interpreter, too much memory, or no atheris: libFuzzer's last words.
            raise RuntimeError(f"the fuzzing process ended early: {done.stderr[-1000:]}")
        found = json.loads(report.read_text(encoding="utf-8"))
        probe.count += found["count"]
        probe.findings += [Finding(**one) for one in found["findings"]]


def _environment() -> dict[str, str]:
    entries = [str(Path(__file__).resolve().parents[1]), *filter(os.path.isdir, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}


def _child(report: Path, limit: float, flags: list[str]) -> None:
    import atheris  # pyright: ignore[reportMissingImports]

    for name in [name for name in sys.modules if name.startswith("zoo.rewards")]:
        del sys.modules[name]
    with atheris.instrument_imports(include=["zoo.rewards"]):  # pyright: ignore
        from zoo.rewards import math
    global verifier
    verifier = math
    probe = Probe(limit)

    def one(data: bytes) -> None:
        known = len(probe.findings)
        probe.mixture(data.ljust(3))
        # Written as it grows: libFuzzer leaves without a last word.
        if probe.count % 500 == 1 or len(probe.findings) > known:
            found = [vars(finding) for finding in probe.findings]
            report.write_text(json.dumps({"count": probe.count, "findings": found}))

    atheris.Setup([sys.argv[0], *flags], one)
    atheris.Fuzz()


ENGINES: dict[str, Callable[[Probe, float, int], None]] = {
    "atheris": by_coverage,
    "random": at_random,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzzes and prints; the exit status is 1 with findings, 2 for an unknown option."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(word in ("-h", "--help", "help") for word in arguments):
        print(__doc__)
        return 0
    if arguments[:1] == ["child"]:
        _child(Path(arguments[1]), float(arguments[2]), arguments[3:])
        return 0
    options = {key: value for key, _, value in (word.partition("=") for word in arguments)}
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        print(f"no option {unknown[0]!r}: the options are {', '.join(OPTIONS)}", file=sys.stderr)
        return 2
    engine = options.get("engine", "atheris" if find_spec("atheris") else "random")
    if engine not in ENGINES:
        print(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}", file=sys.stderr)
        return 2
    probe = Probe(float(options.get("limit", "0.5")))
    ENGINES[engine](probe, float(options.get("seconds", "60")), int(options.get("seed", "0")))
    for finding in probe.findings:
        print(f"{finding.trouble}: verify({finding.completion!r}, {finding.gold!r})")
    print(f"{engine}: {probe.count:,} inputs, {len(probe.findings)} findings")
    return 1 if probe.findings else 0


if __name__ == "__main__":
    sys.exit(main())
