"""What wants a GPU, in ten minutes: python -m benchmarks.gpu [--out results/gpu] [--limit 600].

Runs the tests that need one (recorded decoding, flex attention forward and backward, a small run
of each kind against the CPU's), then W2 at full size against transformers alone, and against TRL
where `python -m benchmarks.speed.peers` has been run. Needs SmolLM2-135M (`zoo fetch
smollm2_135m`) and the grade-school prompts, as benchmarks.speed does. Results go to OUT/<card>.
It has not been run yet: no GPU was at hand.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.speed.peers import default_folder, python_of

CONTESTS = ("checks", "grpo-W2-fixed", "grpo-W2-natural", "dpo-W2-natural", "ppo-W2-fixed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when the tests pass and the table was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    parser.add_argument("--limit", type=float, default=600.0, help="seconds in all")
    options = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device here: this is for a machine with one.", file=sys.stderr)
        return 2
    card = re.sub(r"[^A-Za-z0-9]+", "_", torch.cuda.get_device_name()).strip("_").lower()
    out = options.out / card
    out.mkdir(parents=True, exist_ok=True)
    (out / "speed.md").unlink(missing_ok=True)  # of an earlier try
    end = time.monotonic() + options.limit
    tests = _run(["-m", "pytest", "-n", "0", "-q", "-m", "gpu", "tests"], end, out / "tests.txt")
    command = ["-m", "benchmarks.speed", "--anyway", "--steps", "5", "--out", str(out)]
    command += [] if python_of(default_folder()).exists() else ["--no-peers"]
    _run([*command, "--only", *CONTESTS], end, out / "speed.txt")
    written = (out / "speed.md").exists()
    print((out / "speed.md").read_text() if written else f"no table was written: {out}/speed.txt")
    print(f"tests {'passed' if tests == 0 else 'FAILED'}: {out}/tests.txt")
    return 0 if tests == 0 and written else 1


def _run(command: list[str], end: float, log: Path) -> int:
    """The exit status of a Python command; what it says goes to a file, and it ends in time."""
    with open(log, "w", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                [sys.executable, *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=max(end - time.monotonic(), 1.0),
            )
        except subprocess.TimeoutExpired:
            print("stopped at the time limit", file=file)
            return 124
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
