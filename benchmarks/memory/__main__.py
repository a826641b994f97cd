"""What PPO, DPO and GRPO hold in memory, measured and predicted: python -m benchmarks.memory.

Measured: the peak of live tensor bytes of each phase, by owner, of runs of two small shapes on this
machine, beside the prediction of the same runs with tensors that have no numbers. Predicted: the
same for Qwen2.5's shapes from 0.5B to 72B, and what of PPO's memory the others need. Loss: how the
peak of a step grows with the vocabulary.

Writes memory.csv, memory.md, memory.json and memory.png to results/memory (or `out=DIR`).
`shapes=tiny,7B` and `arms=PPO;GRPO, β = 0` take some of them.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

OPTIONS = ("out", "shapes", "arms")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, predicts and writes; the exit status is 2 for an unknown option or name."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(word in ("-h", "--help", "help") for word in arguments):
        print(__doc__)
        return 0
    if arguments[:1] == ["worker"]:
        from benchmarks.memory.workers import work

        work(arguments[1])
        return 0
    from benchmarks.memory.runs import ARMS, MEASURED, PREDICTED
    from benchmarks.memory.table import Study, write
    from benchmarks.memory.vocabulary import measure

    pairs = (argument.partition("=") for argument in arguments)
    options: dict[str, str] = {name: value for name, _, value in pairs}
    known = [shape.name for shape in (*MEASURED, *PREDICTED)]
    shapes = options.get("shapes", ",".join(known)).split(",")
    names = [arm.name for arm in ARMS]
    arms = options.get("arms", ";".join(names)).split(";")
    out = Path(options.get("out", "results/memory"))
    problems = [
        *(
            f"no option {name!r}: try {', '.join(OPTIONS)}"
            for name in options
            if name not in OPTIONS
        ),
        *(f"no shape {name!r}: try {', '.join(known)}" for name in shapes if name not in known),
        *(f"no arm {name!r}: try {'; '.join(names)}" for name in arms if name not in names),
        *([f"out={out} is a file; name a folder"] if out.is_file() else []),
    ]
    if problems:
        print(problems[0], file=sys.stderr)
        return 2
    chosen = [arm.name for arm in ARMS if arm.name in arms]
    study = Study(chosen)
    for shape in MEASURED:
        if shape.name in shapes:
            study.measure(shape)
    for shape in PREDICTED:
        if shape.name in shapes:
            study.predict(shape)
    command = shlex.join(["python", "-m", "benchmarks.memory", *arguments])
    print(write(study, measure(), out, command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
