"""The comparison in pictures: accuracy against each budget, training reward, memory."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zoo.report.runs import Arm, Evaluation, Run, start_evaluations

# Okabe and Ito's palette, told apart with any kind of colour vision; black is the start's.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#7F7F7F", "#A6761D")
FIXED = {"ppo": 0, "dpo": 1, "grpo": 2, "random-reward": 6}
INK = "#222222"
FAINT = "#8a8a8a"

Budget = Callable[[Run, Evaluation], float | None]
BUDGETS: tuple[tuple[str, float, Budget], ...] = (
    ("training steps", 1.0, lambda run, e: float(e.step)),
    ("tokens generated, thousands", 1e3, lambda run, e: _spent(run, e, "tokens/sampled_total")),
    ("training time, seconds", 1.0, lambda run, e: _spent(run, e, "seconds/total")),
)


def colours(arms: Sequence[Arm]) -> dict[str, str]:
    """A colour for each arm: an algorithm keeps its own wherever it appears."""
    free = [i for i in range(len(PALETTE)) if i not in FIXED.values()]
    free += [i for i in FIXED.values() if PALETTE[i] not in free]
    taken: dict[str, str] = {}
    for arm in arms:
        index = FIXED.get(arm.label.lower())
        if index is None:
            index = free[len([a for a in taken if a.lower() not in FIXED]) % len(free)]
        taken[arm.label] = PALETTE[index]
    return taken


def accuracy_figure(arms: Sequence[Arm], name: str = "heldout") -> Figure:
    """T = 1 accuracy of one set against steps, generated tokens and seconds.

    Thin lines are seeds, a thick one their mean, the dashed line is the start.
    """
    figure = _figure(13.0, 4.4)
    axes = figure.subplots(1, len(BUDGETS), sharey=True)
    palette = colours(arms)
    start = [e.number("accuracy") for e in start_evaluations(arms, name)]
    start = [100 * value for value in start if value is not None]
    for panel, (title, scale, budget) in enumerate(BUDGETS):
        ax: Axes = axes[panel]
        ends: list[tuple[float, float, str, str]] = []
        for arm in arms:
            if arm.untrained:
                continue
            curves = [_curve(run, name, budget, scale) for run in arm.finished]
            curves = [curve for curve in curves if curve]
            if not curves:
                continue
            colour = palette[arm.label]
            if len(curves) > 1:
                for curve in curves:
                    ax.plot(*_xy(curve), color=colour, linewidth=0.9, alpha=0.45)
            mean = _mean_curve(curves)
            ax.plot(*_xy(mean), color=colour, linewidth=2.6, marker="o", markersize=4)
            x, y = mean[max(mean)]
            ends.append((x, y, arm.label, colour))
        if start:
            ax.axhline(fmean(start), color=INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
            ends.append((ax.get_xlim()[1], fmean(start), "start", INK))
        _decorate(ax, title)
        ax.set_xlim(left=0)
        if panel == len(BUDGETS) - 1:
            _label_ends(ax, ends)
    axes[0].set_ylabel("right at T = 1, %")
    axes[0].set_ylim(bottom=0)
    _heading(
        figure,
        {"heldout": "Held-out problems", "independent": "Independent problems"}.get(name, name),
        "thick: mean over seeds · thin: each seed · dashed: the start, before any training",
    )
    return figure


def training_figure(arms: Sequence[Arm]) -> Figure:
    """Training reward, entropy, length and dead groups against steps."""
    panels = (
        ("reward/total", "training reward"),
        ("entropy/sampled", "entropy, nats a token"),
        ("length/mean", "completion length, tokens"),
        ("groups/dead", "dead groups, share"),
    )
    figure = _figure(13.0, 3.8)
    axes = figure.subplots(1, len(panels))
    palette = colours(arms)
    for panel, (metric, title) in enumerate(panels):
        ax: Axes = axes[panel]
        for arm in arms:
            key = metric
            if key == "entropy/sampled" and any(
                len(run.series(key)) < len(run.series("entropy")) for run in arm.finished
            ):
                key = "entropy"  # of what is trained: nothing is sampled, or a run is older
            curves = [dict(run.series(key)) for run in arm.finished]
            steps = sorted(set.intersection(*map(set, curves))) if curves else []
            if not steps:
                continue
            colour = palette[arm.label]
            for curve in curves:
                values = [curve[step] for step in steps]
                ax.plot(steps, values, color=colour, linewidth=0.6, alpha=0.3)
            mean = smooth([fmean(curve[step] for curve in curves) for step in steps])
            ax.plot(steps, mean, color=colour, linewidth=2.2, label=arm.label)
        _decorate(ax, "training steps")
        ax.set_title(title, loc="left", fontsize=10, color=INK)
        ax.set_xlim(left=0)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="upper right", ncols=max(1, len(labels)), frameon=False, fontsize=9
    )
    _heading(
        figure,
        "While training",
        f"thick: mean over seeds, running mean of {SMOOTHING} steps · thin: each seed",
    )
    return figure


SMOOTHING = 5


def smooth(values: Sequence[float], width: int = SMOOTHING) -> list[float]:
    """Centred running mean; at the ends over what there is."""
    half = width // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


KINDS = ("parameters", "gradients", "optimizer", "copies")
# Not the arms' colours: here a colour is a component.
COMPONENTS = {
    "policy": "#56B4E9",
    "critic": "#D55E00",
    "reference": "#CC79A7",
    "reward_model": "#A6761D",
    "scorer": "#A6761D",
    "sampler": "#999999",
}


def memory_figure(arms: Sequence[Arm]) -> Figure:
    """What each arm holds in memory (by component) and its peaks (by phase)."""
    figure = _figure(13.0, 4.2)
    left, right = figure.subplots(1, 2)
    shown = [arm for arm in arms if arm.finished and arm.finished[0].memory and not arm.untrained]
    labels = [arm.label for arm in shown]
    records = [arm.finished[0].memory for arm in shown]  # sizes do not depend on the seed
    components = list(dict.fromkeys(c for r in records for c in r.get("components") or {}))
    position = np.arange(len(labels))
    bottom = np.zeros(len(labels))
    for component in components:
        colour = COMPONENTS.get(component, FAINT)
        for shade, kind in zip((1.0, 0.7, 0.45, 0.25), KINDS, strict=True):
            sizes = (
                np.array(
                    [
                        ((r.get("components") or {}).get(component) or {}).get(kind, 0)
                        for r in records
                    ],
                    dtype=float,
                )
                / 1e6
            )
            if not sizes.any():
                continue
            left.bar(
                position, sizes, 0.62, bottom, color=_shade(colour, shade),
                edgecolor="white", linewidth=0.6, label=f"{component} {kind}",
            )  # fmt: skip
            bottom += sizes
    for x, total in zip(position, bottom, strict=True):
        left.annotate(
            f"{total:,.1f}", (x, total), (0, 3), textcoords="offset points", ha="center",
            fontsize=9, color=INK,
        )  # fmt: skip
    left.set_title("Weights, gradients, optimizer, MB", loc="left", fontsize=10, color=INK)
    _outside_legend(left, reverse=True)

    phases = list(dict.fromkeys(p for r in records for p in r.get("phases") or {}))
    width = 0.8 / max(1, len(phases))
    for index, phase in enumerate(phases):
        peaks = [float((r.get("phases") or {}).get(phase) or 0) / 1e6 for r in records]
        offset = (index - (len(phases) - 1) / 2) * width
        right.bar(
            position + offset,
            peaks,
            width * 0.92,
            color=_shade(INK, 0.95 - 0.75 * index / max(1, len(phases) - 1)),
            label=phase,
        )
    right.set_title("Peak of each phase, MB", loc="left", fontsize=10, color=INK)
    _outside_legend(right)
    for ax in (left, right):
        _decorate(ax, "")
        ax.set_xticks(position, labels)
        ax.tick_params(axis="x", length=0, labelsize=10)
        ax.set_ylim(top=ax.get_ylim()[1] * 1.08)
    instruments = sorted({str(r["instrument"]) for r in records if r.get("instrument")})
    _heading(figure, "Memory", "; ".join(instruments))
    return figure


def png(figure: Figure) -> bytes:
    """The figure as a PNG; its bytes depend on what is drawn alone."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=140, metadata={"Software": None})
    return buffer.getvalue()


# ---------------------------------------------------------------------------------------- helpers


def _figure(width: float, height: float) -> Figure:
    # Figure without pyplot: no global state, no display.
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(rect=(0, 0, 1, 0.88))  # type: ignore[union-attr]
    return figure


def _heading(figure: Figure, title: str, subtitle: str) -> None:
    figure.text(0.008, 0.985, title, va="top", fontsize=13, fontweight="bold", color=INK)
    figure.text(0.008, 0.915, subtitle, va="top", fontsize=9, color=FAINT)


def _decorate(ax: Axes, xlabel: str) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#bbbbbb")
    ax.grid(axis="y", color="#e8e8e8", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(colors="#555555", labelsize=9)
    ax.set_xlabel(xlabel, color="#555555")


def _outside_legend(ax: Axes, reverse: bool = False) -> None:
    if ax.get_legend_handles_labels()[0]:
        ax.legend(
            loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8,
            reverse=reverse, handlelength=1.2,
        )  # fmt: skip


def _shade(colour: str, amount: float) -> tuple[float, float, float]:
    """The colour mixed with white; 1 leaves it."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(1 - amount * (1 - part) for part in (red, green, blue))  # type: ignore[return-value]


def _spent(run: Run, evaluation: Evaluation, key: str) -> float | None:
    """What a run had spent when it was evaluated."""
    value = evaluation.number(key)
    if value is not None:
        return value
    before = [v for step, v in run.series(key) if step <= evaluation.step]
    return before[-1] if before else (0.0 if evaluation.step == 0 else None)


Curve = dict[int, tuple[float, float]]  # step → (spent, accuracy in %)


def _curve(run: Run, name: str, budget: Budget, scale: float) -> Curve:
    points: Curve = {}
    for evaluation in run.evaluations:
        accuracy = evaluation.number("accuracy")
        if evaluation.set != name or accuracy is None:
            continue
        spent = budget(run, evaluation)
        if spent is not None:
            points[evaluation.step] = (spent / scale, 100 * accuracy)
    return points


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    """Mean over seeds, of accuracy and of what was spent, at the steps that all seeds have."""
    steps = sorted(set.intersection(*map(set, curves)))
    return {
        step: (fmean(c[step][0] for c in curves), fmean(c[step][1] for c in curves))
        for step in steps
    }


def _xy(curve: Curve) -> tuple[list[float], list[float]]:
    points = [curve[step] for step in sorted(curve)]
    return [x for x, _ in points], [y for _, y in points]


def _label_ends(ax: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names each line at the right edge, moved apart where they would overlap."""
    low, high = ax.get_ylim()
    low = min(low, 0.0)
    gap = (high - low) * 0.065
    placed: list[tuple[float, Any]] = []
    for _, y, label, colour in sorted(ends, key=lambda end: end[1]):
        at = max(y, placed[-1][0] + gap) if placed else y
        text = ax.annotate(
            label, (1.0, at), (6, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", color=colour, fontsize=10,
            fontweight="bold", annotation_clip=False,
        )  # fmt: skip
        placed.append((at, text))
