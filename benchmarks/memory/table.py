"""The study's numbers as csv, json, a picture and a page that says what follows from them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.memory.runs import LARGE, RANK, SMALL, Shape
from benchmarks.memory.vocabulary import Growth
from benchmarks.memory.workers import Job, results
from zoo.measure.memory_table import labels, words
from zoo.measure.provenance import meta

Peaks = dict[str, dict[str, int]]
LAYERS = (6, 8)  # predictions of large shapes are made with so few, and extended
CHECK = 10  # … and compared with this many, of which they know nothing
WHOLE = 24  # models of so many layers or fewer are predicted as they are
PHASES = ("rollout", "prepare", "update")
GB = 1e9
COLOURS = (
    "#56B4E9", "#0072B2", "#CC79A7", "#E69F00", "#D55E00", "#009E73", "#44AA99", "#999999",
)  # fmt: skip


@dataclass
class Study:
    """What was measured and predicted: shape → arm → phase → label → bytes."""

    arms: Sequence[str]
    measured: dict[str, dict[str, Peaks]] = field(default_factory=dict)
    same: dict[str, dict[str, Peaks]] = field(default_factory=dict)  # predictions of the measured
    predicted: dict[str, dict[str, Peaks]] = field(default_factory=dict)
    linear: dict[str, float] = field(default_factory=dict)  # shape → largest error at CHECK layers

    def measure(self, shape: Shape) -> None:
        for fake, into in ((False, self.measured), (True, self.same)):
            found = results([Job(shape.name, arm, fake) for arm in self.arms])
            into[shape.name] = {job.arm: peaks for job, peaks in found.items()}
        print(f"{shape.name}: measured and predicted", flush=True)

    def predict(self, shape: Shape) -> None:
        """Every layer adds the same, so two small models give a large one."""
        if shape.layers <= WHOLE:
            found = results([Job(shape.name, arm, True) for arm in self.arms])
            self.predicted[shape.name] = {job.arm: peaks for job, peaks in found.items()}
            print(f"{shape.name}: predicted", flush=True)
            return
        few = [Job(shape.name, arm, True, n) for n in LAYERS for arm in self.arms]
        check = Job(shape.name, self.arms[0], True, CHECK)
        found = results([*few, check])

        def line(arm: str, layers: int) -> Peaks:
            few, more = (found[Job(shape.name, arm, True, n)] for n in LAYERS)
            return extended(few, more, layers)

        self.predicted[shape.name] = {arm: line(arm, shape.layers) for arm in self.arms}
        guess = line(check.arm, CHECK)
        self.linear[shape.name] = max(
            abs(guess[phase]["total"] / peaks["total"] - 1) for phase, peaks in found[check].items()
        )
        print(f"{shape.name}: predicted", flush=True)

    def error(self, shape: str, arm: str, phase: str) -> float:
        """Of the prediction, relative to what was measured."""
        measured = self.measured[shape][arm][phase]["total"]
        return self.same[shape][arm][phase]["total"] / measured - 1

    def highest(self, shape: str, arm: str) -> int:
        """The peak over the phases of a predicted run."""
        return max(peaks["total"] for peaks in self.predicted[shape][arm].values())


def extended(few: Peaks, more: Peaks, layers: int) -> Peaks:
    """The line through two models, at `layers`: bytes = few + (more − few)/Δ · (layers − first)."""
    first, second = LAYERS
    return {
        phase: {
            label: round(
                few[phase].get(label, 0)
                + (more[phase].get(label, 0) - few[phase].get(label, 0))
                * (layers - first)
                / (second - first)
            )
            for label in {**few[phase], **more[phase]}
        }
        for phase in few
    }


def write(study: Study, growth: Sequence[Growth], out: Path, command: str) -> str:
    """All files; returns the page."""
    out.mkdir(parents=True, exist_ok=True)
    origin = meta()
    rows = [
        (kind, shape, arm, phase, label, value)
        for kind, table in (
            ("measured", study.measured), ("predicted, same run", study.same),
            ("predicted", study.predicted),
        )
        for shape, arms in table.items()
        for arm, phases in arms.items()
        for phase, split in phases.items()
        for label, value in split.items()
    ]  # fmt: skip
    with open(out / "memory.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["kind", "shape", "arm", "phase", "owner", "bytes"])
        writer.writerows(rows)
    machine = origin["machine"]
    record: dict[str, Any] = {
        "command": command,
        "commit": origin["commit"],
        "dirty": origin["dirty"],
        "machine": machine,
        "versions": origin["versions"],
        "largest_error": _largest_error(study),
        "linear": study.linear,
        "of_ppo": {
            shape: {arm: study.highest(shape, arm) / study.highest(shape, "PPO") for arm in arms}
            for shape, arms in study.predicted.items()
            if "PPO" in arms
        },
        "vocabulary": [asdict(one) for one in growth],
    }
    text = json.dumps(record, indent=1, ensure_ascii=False)
    (out / "memory.json").write_text(text + "\n", encoding="utf-8")
    page = "\n\n".join(part for part in _page(study, growth, record) if part) + "\n"
    (out / "memory.md").write_text(page, encoding="utf-8")
    if study.predicted:
        _picture(study, out / "memory.png")
    return page


def _page(study: Study, growth: Sequence[Growth], record: dict[str, Any]) -> list[str]:
    machine, commit = record["machine"], record["commit"] or "not a git checkout"
    dirty = " with uncommitted changes" if record["dirty"] else ""
    return [
        "# Memory of PPO, DPO and GRPO",
        "Live tensor bytes at the highest moment of each phase of a training step, by owner "
        "(`zoo.measure.meter`). Weights, gradients and Adam's moments are float32; "
        "arithmetic and decoding are in bfloat16 on a copy of the weights, and the reference is "
        "held in bfloat16 alone (tiny: float32 throughout). Rollouts end at the limit of new "
        "tokens, and every group is trained on.",
        _conclusion(record["of_ppo"]),
        _ratios(study, record["of_ppo"]),
        "![Predicted peaks](memory.png)" if study.predicted else "",
        _predicted(study),
        _measured(study),
        _vocabulary(growth),
        f"Command: `{record['command']}`. Commit: {commit}{dirty}. Machine: {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['system']}, Python {record['versions']['python']}, "
        f"torch {record['versions']['torch']}.",
    ]


def _conclusion(of_ppo: dict[str, dict[str, float]]) -> str:
    """When GRPO halves PPO's memory, from the numbers."""
    if not of_ppo or "GRPO, β = 0" not in next(iter(of_ppo.values())):
        return ""

    def over(arm: str, other: str = "PPO") -> str:
        shares = [arms[arm] / arms[other] for arms in of_ppo.values() if {arm, other} <= set(arms)]
        low, high = min(shares), max(shares)
        return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}–{high:.2f}"

    lines = [
        '"GRPO roughly halves PPO\'s memory" is a statement about the critic. Of the peak that PPO '
        f"needs, GRPO needs {over('GRPO, β = 0')} without a reference and "
        f"{over('GRPO, β > 0')} with one.",
    ]
    if all("PPO, shared trunk" in arms for arms in of_ppo.values()):
        lines.append(
            "Against a PPO whose values come from the policy's own trunk it needs "
            f"{over('GRPO, β = 0', 'PPO, shared trunk')} and "
            f"{over('GRPO, β > 0', 'PPO, shared trunk')}."
        )
    if all({"PPO + LoRA", "GRPO + LoRA"} <= set(arms) for arms in of_ppo.values()):
        lines.append(
            f"With adapters of rank {RANK} PPO itself needs {over('PPO + LoRA')} of full PPO, and "
            f"GRPO {over('GRPO + LoRA', 'PPO + LoRA')} of that: policy, critic and reference share "
            "the frozen weights."
        )
    lines.append(
        "By arithmetic, bytes a parameter: 18 for a trained model (weight 4, gradient 4, Adam 8, "
        "copy 2) and 2 for a reference, so PPO 38, GRPO 18 (0.47) or 20 with β > 0 (0.53), PPO on "
        "a shared trunk 20. In pure bfloat16 (8 a trained parameter, which zoo does not do: most "
        "of such updates round to nothing) it would be 18 against 8 (0.44). Activations and the "
        "loss's chunk are the same for all and move every share towards 1."
    )
    return "\n".join(["## When GRPO halves PPO's memory", "", *lines])


def _ratios(study: Study, of_ppo: dict[str, dict[str, float]]) -> str:
    if not study.predicted:
        return ""
    shapes = list(study.predicted)
    rows = [[arm, *(_peak(study, of_ppo, shape, arm) for shape in shapes)] for arm in study.arms]
    linear = max(study.linear.values(), default=0.0)
    return (
        "## Predicted: Qwen2.5's shapes\n\n"
        + _table(["peak, GB (of PPO's)", *shapes], rows)
        + f"\n\nA step: {LARGE.words}; activation checkpointing on, but for the last column. "
        "Predictions, not measurements: the product's own step over tensors without numbers. "
        f"Of models of more than {WHOLE} layers {LAYERS[0]} and {LAYERS[1]} are run and extended, "
        f"since every layer adds the same (at {CHECK} the line is off by {100 * linear:.2g} %). A "
        "batch with more rows adds to the cache of the rollout alone, as micro-batches bound the "
        "rest."
    )


def _peak(study: Study, of_ppo: dict[str, dict[str, float]], shape: str, arm: str) -> str:
    share = of_ppo.get(shape, {}).get(arm)
    text = f"{study.highest(shape, arm) / GB:,.1f}"
    return text if share is None else f"{text} ({share:.2f})"


def _predicted(study: Study) -> str:
    """By owner, for one shape."""
    if not study.predicted:
        return ""
    shape = "7B" if "7B" in study.predicted else next(iter(study.predicted))
    return f"### By owner: {shape}\n\n" + _split(study.predicted[shape], GB, "GB")


def _split(arms: dict[str, Peaks], unit: float, name: str) -> str:
    """A row for each arm and phase, a column for each owner."""
    columns = labels(list(arms.values()))
    rows = [
        [f"{arm}, {phase}", *(_cell(split.get(label), unit) for label in columns)]
        for arm, phases in arms.items()
        for phase, split in phases.items()
    ]
    return _table([name, *(words(label) for label in columns)], rows)


def _cell(value: int | None, unit: float) -> str:
    return "" if not value else f"{value / unit:,.2f}"


def _measured(study: Study) -> str:
    parts = []
    for shape, arms in study.measured.items():
        rows = [
            [
                arm,
                *(
                    f"{phases[p]['total'] / 1e6:,.1f} ({100 * study.error(shape, arm, p):+.1f} %)"
                    for p in PHASES
                ),
            ]
            for arm, phases in arms.items()
        ]
        head = _table(["peak, MB (prediction)", *PHASES], rows)
        parts.append(f"### {shape}\n\n{head}\n\n{_split(arms, 1e6, 'MB')}")
    if not parts:
        return ""
    return "\n\n".join(
        [
            "## Measured, and the prediction of the same run",
            f"A step: {SMALL.words}. In brackets by how much the prediction is off; "
            f"{100 * _largest_error(study):.1f} % at most.",
            *parts,
        ]
    )


def _largest_error(study: Study) -> float:
    return max(
        (
            abs(study.error(shape, arm, phase))
            for shape, arms in study.measured.items()
            for arm, phases in arms.items()
            for phase in phases
        ),
        default=0.0,
    )


def _vocabulary(growth: Sequence[Growth]) -> str:
    rows = [
        [
            f"{one.tokens:,}",
            *(f"{n / 1e6:,.1f}" for n in (one.added, one.plain, one.weights, one.chunk)),
        ]
        for one in growth
    ]
    head = ["tokens trained", "added", "added with all logits", "weights", "logits of a chunk"]
    return (
        "## The loss and the vocabulary\n\nWhat 49,152 instead of 8,192 tokens of vocabulary add "
        "to the peak of a forward and backward pass on one trunk, MB, float32, measured. The head "
        "is read in chunks, so twice the tokens add nothing: weights, their gradient and the "
        "temporaries of one chunk remain.\n\n" + _table(head, rows)
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _picture(study: Study, file: Path) -> None:
    """Predicted peaks of all arms, a group of bars for each shape, as a share of PPO's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    shapes = list(study.predicted)
    width = 0.86 / len(study.arms)
    for index, arm in enumerate(study.arms):
        base = [study.highest(s, study.arms[0]) for s in shapes]
        bars = [study.highest(s, arm) / b for s, b in zip(shapes, base, strict=True)]
        colour = COLOURS[index % len(COLOURS)]
        places = [i + (index - (len(study.arms) - 1) / 2) * width for i in range(len(shapes))]
        ax.bar(places, bars, width * 0.92, label=arm, color=colour)
    names = [f"{s}\n{study.highest(s, study.arms[0]) / GB:,.0f} GB" for s in shapes]
    ax.set_xticks(range(len(shapes)), names)
    ax.axhline(0.5, color="#777777", linewidth=0.8, linestyle=":")
    ax.set_ylabel(f"peak, as a share of {study.arms[0]}'s")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(file, dpi=140, metadata={"Software": None})
