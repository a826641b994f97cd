"""The comparison in numbers: each arm with its intervals, and the paired differences between arms.

Two intervals answer two questions and are never mixed. «Over problems»: would these trained
policies score the same on other problems of this kind? (Wilson for one greedy run, else a bootstrap
that resamples problems with all their samples and seeds.) «Over seeds»: would the algorithm,
trained again with another seed, end there? (Student's t; none for a single seed.)
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zoo.functional.statistics import mcnemar_exact, mean_interval, paired_bootstrap, wilson
from zoo.report.runs import (
    START,
    Arm,
    Evaluation,
    Measure,
    Run,
    different_starts,
    first_evaluations,
    start_evaluations,
    start_of,
    that_count,
)

Bounds = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % intervals; None where there is nothing to say."""

    value: float | None
    problems: Bounds | None = None
    seeds: Bounds | None = None


@dataclass(frozen=True)
class Column:
    """One quantity of the comparison."""

    key: str  # heldout/accuracy, tokens/generated, …
    title: str
    block: str  # the printed table to which it belongs
    unit: str  # "share", "number", "count", "seconds", "bytes"

    def show(self, value: float) -> str:
        if self.unit == "share":
            return f"{100 * value:.1f}"
        if self.unit == "count":
            return f"{value:,.0f}"
        if self.unit == "seconds":
            return f"{value:.1f}"
        if self.unit == "bytes":
            return f"{value / 1e6:,.1f}"
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


@dataclass(frozen=True)
class Row:
    """One arm, or the start."""

    label: str
    seeds: tuple[int, ...]
    estimates: dict[str, Estimate]
    note: str = ""  # why numbers are missing
    judged: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # seeds by evaluation set


@dataclass(frozen=True)
class Difference:
    """First arm minus second, on the same problems."""

    first: str
    second: str
    set: str
    problems: int  # in common
    value: float  # of T = 1 accuracy
    over_problems: Bounds
    over_seeds: Bounds | None
    n_seeds: int
    mcnemar: tuple[float, ...]  # p-value of the greedy outcomes, seed by seed

    @property
    def verdict(self) -> str:
        """The difference in words: none unless the interval over problems leaves out 0."""
        if contains_zero(self.over_problems):
            return "no difference"
        word = "better" if self.value > 0 else "worse"
        if self.over_seeds is None:
            return f"{word} (one seed)" if self.n_seeds else f"{word} (no seed in common)"
        if contains_zero(self.over_seeds):
            return f"{word}, but not surely with other seeds"
        return word


@dataclass(frozen=True)
class Comparison:
    """All that the tables, the csv file and the page show in numbers."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]


def contains_zero(bounds: Bounds) -> bool:
    return bounds[0] <= 0 <= bounds[1]


# ------------------------------------------------------------------------------------- estimates


def compare(arms: Sequence[Arm]) -> Comparison:
    """The comparison of arms with each other and with their start.

    The arm without training is the start by definition: one row, from all samples of it. Where
    there is no one start, or it was judged in several ways, such arms have rows of their own.
    """
    columns = _columns(arms)
    names = dict.fromkeys(column.key.split("/")[0] for column in columns if "/" in column.key)
    mixed = [n for n in names if first_evaluations(arms, n) and not start_evaluations(arms, n)]
    untrained = [arm for arm in arms if arm.untrained and arm.finished and not mixed]
    label = f"{START} ({untrained[0].label})" if untrained else START
    rows = [] if different_starts(that_count(arms)) else [_start_row(arms, columns, label)]
    rows += [_arm_row(arm, columns) for arm in arms if arm not in untrained]
    sets = [c.key.split("/")[0] for c in columns if c.key.endswith(f"/{Measure.accuracy}")]
    differences = [d for name in sets for d in _differences(arms, name)]
    return Comparison(tuple(columns), tuple(rows), tuple(differences))


def _columns(arms: Sequence[Arm]) -> list[Column]:
    columns: list[Column] = []
    kinds: dict[str, str] = {}
    pass_k: dict[str, int] = {}
    for run in (run for arm in arms for run in arm.runs):
        for evaluation in run.evaluations:
            kinds.setdefault(evaluation.set, evaluation.kind)
            pass_k[evaluation.set] = max([pass_k.get(evaluation.set, 1), *evaluation.pass_at])
    for name, kind in kinds.items():
        if kind == "perplexity":
            columns.append(Column(f"{name}/perplexity", "perplexity", name, "number"))
            continue
        columns.append(Column(f"{name}/{Measure.accuracy}", "T = 1, %", name, "share"))
        columns.append(Column(f"{name}/{Measure.greedy}", "greedy, %", name, "share"))
        if pass_k[name] > 1:
            k = pass_k[name]
            columns.append(Column(f"{name}/pass@{k}", f"pass@{k}, %", name, "share"))
    columns += [
        Column("reward", "training reward", "training", "number"),
        Column("kl_to_start", "KL to start, nats a token", "training", "number"),
        Column("updates", "updates", "training", "count"),
        Column("completions", "completions", "training", "count"),
        Column("tokens/generated", "tokens generated", "cost", "count"),
        Column("tokens/trained", "tokens trained", "cost", "count"),
        Column("seconds", "training, s", "cost", "seconds"),
        Column("model_bytes", "weights, gradients, optimizer, MB", "cost", "bytes"),
        Column("tensor_bytes", "peak live tensors, MB", "cost", "bytes"),
        Column("peak_bytes", "peak process RSS, MB", "cost", "bytes"),
    ]
    if not any(run.probe for arm in arms for run in arm.runs):
        columns = [column for column in columns if column.key != "tensor_bytes"]
    return columns


_COSTS: dict[str, Callable[[Run], float | None]] = {
    "reward": Run.reward,
    "kl_to_start": lambda run: run.total("kl_to_start"),
    "updates": lambda run: run.total("updates"),
    "completions": lambda run: run.total("completions"),
    "tokens/generated": lambda run: run.total("tokens", "generated"),
    "tokens/trained": lambda run: run.total("tokens", "trained"),
    "seconds": lambda run: run.total("seconds", "total"),
    "model_bytes": Run.model_bytes,
    "tensor_bytes": Run.tensor_bytes,
    "peak_bytes": lambda run: (run.peak_bytes() or ("", None))[1],
}


def _arm_row(arm: Arm, columns: Sequence[Column]) -> Row:
    note = "" if arm.finished else "; ".join(run.progress() for run in arm.runs)
    estimates, judged = {}, {}
    for column in columns:
        if column.key in _COSTS:
            values = [_COSTS[column.key](run) for run in arm.finished]
            estimates[column.key] = _over_seeds([v for v in values if v is not None])
        else:
            name, measure = column.key.split("/", 1)
            last = arm.last(name)
            estimates[column.key] = estimate(last, measure)
            judged[name] = tuple(evaluation.seed for evaluation in last)
    return Row(arm.label, tuple(run.seed for run in arm.finished), estimates, note, judged)


def _start_row(arms: Sequence[Arm], columns: Sequence[Column], label: str) -> Row:
    estimates, judged = {}, {}
    for column in columns:
        if column.key in _COSTS:
            estimates[column.key] = Estimate(None)
            continue
        name, measure = column.key.split("/", 1)
        found = start_evaluations(arms, name)
        judged[name] = tuple(sorted({evaluation.seed for evaluation in found}))
        # There is one start: seeds differ in what was sampled from it, which is no training spread.
        estimates[column.key] = estimate(found, measure, between_seeds=False)
    seeds = tuple(sorted({seed for own in judged.values() for seed in own}))
    return Row(label, seeds, estimates, judged=judged)


def estimate(
    evaluations: Sequence[Evaluation], measure: str, *, between_seeds: bool = True
) -> Estimate:
    """A measure of one set over the seeds of an arm: the mean and both intervals.

    Args:
        evaluations: one a seed.
        measure: accuracy, greedy, pass@4, perplexity, …
    """
    if measure.startswith("pass@"):
        kind, k = Measure.pass_k, int(measure.removeprefix("pass@"))
    elif measure in (Measure.accuracy, Measure.greedy):
        kind, k = Measure(measure), None
    else:
        values = [e.number(measure) for e in evaluations]
        found = _over_seeds([v for v in values if v is not None])
        return found if between_seeds else Estimate(found.value)
    by_problem = _by_problem(evaluations, kind, k)
    pooled = _pool(by_problem)
    if not pooled:
        means = [e.mean(kind, k) for e in evaluations]
        found = _over_seeds([m for m in means if m is not None], low=0.0, high=1.0)
        return found if between_seeds else Estimate(found.value)
    rates = list(pooled.values())
    # Resampling problems that are all right, or all wrong, would leave no doubt at all.
    if (kind is Measure.greedy and len(by_problem) == 1) or set(rates) in ({0.0}, {1.0}):
        problems = wilson(round(sum(rates)), len(rates))
    else:
        bootstrap = paired_bootstrap(rates, [0.0] * len(rates))
        problems = (bootstrap.low, bootstrap.high)
    seeds = None
    if between_seeds:
        per_seed = [fmean(rates[name] for name in pooled) for rates in by_problem]
        seeds = _over_seeds(per_seed, low=0.0, high=1.0).seeds
    return Estimate(fmean(rates), problems, seeds)


def _by_problem(
    evaluations: Sequence[Evaluation],
    measure: Measure,
    k: int | None = None,
    beside: Sequence[Evaluation] = (),
) -> list[dict[str, float]]:
    """Each evaluation's measure by problem, without ids under which these, and those `beside`, hold
    different problems: rows of one number in two files, say."""
    hashes: dict[str, set[str]] = {}
    for evaluation in (*evaluations, *beside):
        for name, content in evaluation.problems.items():
            hashes.setdefault(name, set()).add(content)
    unlike = {name for name, found in hashes.items() if len(found) > 1}
    return [
        {n: v for n, v in e.per_problem(measure, k).items() if n not in unlike} for e in evaluations
    ]


def _both(
    first: Sequence[Evaluation], second: Sequence[Evaluation], measure: Measure
) -> tuple[dict[int, dict[str, float]], dict[int, dict[str, float]]]:
    """`_by_problem` of two arms, by seed."""
    sides = ((first, second), (second, first))
    one, other = (
        dict(zip((e.seed for e in own), _by_problem(own, measure, beside=beside), strict=True))
        for own, beside in sides
    )
    return one, other


def _pool(by_problem: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each problem's mean over the seeds, for the problems that every seed has scored."""
    if not by_problem:
        return {}
    common = [name for name in by_problem[0] if all(name in rates for rates in by_problem)]
    return {name: fmean(rates[name] for rates in by_problem) for name in common}


def _over_seeds(
    values: Sequence[float], low: float = -math.inf, high: float = math.inf
) -> Estimate:
    if not values:
        return Estimate(None)
    if len(values) == 1:
        return Estimate(values[0])
    interval = mean_interval(values)
    return Estimate(interval.estimate, seeds=(max(low, interval.low), min(high, interval.high)))


# ----------------------------------------------------------------------------------- differences


def _differences(arms: Sequence[Arm], name: str) -> list[Difference]:
    judged = [arm for arm in arms if not arm.untrained and arm.last(name)]
    trained = [(arm.label, arm.last(name)) for arm in judged]
    starts = [(START, start_of(arm, arms, name)) for arm in judged]
    pairs = [(first, start, False) for first, start in zip(trained, starts, strict=True)]
    pairs += [(a, b, True) for a, b in itertools.combinations(trained, 2)]
    found = [difference(first, second, one_policy=not by_seed) for first, second, by_seed in pairs]
    return [d for d in found if d is not None]


def difference(
    first: tuple[str, Sequence[Evaluation]],
    second: tuple[str, Sequence[Evaluation]],
    *,
    one_policy: bool = False,
) -> Difference | None:
    """T = 1 accuracy of the first arm minus the second's, problem by problem.

    The interval over problems pools the seeds; the one over seeds is of the differences between
    runs of equal seed. McNemar's test needs independent problems, so it is done seed by seed.

    Args:
        first, second: label and evaluations of one set, one a seed.
        one_policy: the second is a single policy (the start): its samples are pooled, and every
            seed of the first is compared with it.
    Returns:
        None where no problem was evaluated in both.
    """
    (label_1, evaluations_1), (label_2, evaluations_2) = first, second
    rates_1, rates_2 = _both(evaluations_1, evaluations_2, Measure.accuracy)
    pooled_1, pooled_2 = (
        _pool(_by_problem(own, Measure.accuracy, beside=other))
        for own, other in ((evaluations_1, evaluations_2), (evaluations_2, evaluations_1))
    )
    common = [name for name in pooled_1 if name in pooled_2]
    if not common:
        return None
    bootstrap = paired_bootstrap([pooled_1[n] for n in common], [pooled_2[n] for n in common])
    if one_policy:
        rates_2 = dict.fromkeys(rates_1, pooled_2)
    seeds = [seed for seed in rates_1 if seed in rates_2]
    by_seed = [fmean(rates_1[s][n] - rates_2[s][n] for n in common) for s in seeds]
    greedy_1, greedy_2 = _both(evaluations_1, evaluations_2, Measure.greedy)
    if one_policy and greedy_2:  # greedy is the same whatever the seed
        greedy_2 = dict.fromkeys(greedy_1, next(iter(greedy_2.values())))
    return Difference(
        first=label_1,
        second=label_2,
        set=evaluations_1[0].set,
        problems=len(common),
        value=bootstrap.estimate,
        over_problems=(bootstrap.low, bootstrap.high),
        over_seeds=_over_seeds(by_seed, -1.0, 1.0).seeds,
        n_seeds=len(seeds),
        mcnemar=tuple(
            _mcnemar(greedy_1[seed], greedy_2[seed])
            for seed in greedy_1
            if greedy_2.get(seed) and greedy_1[seed]
        ),
    )


def _mcnemar(first: dict[str, float], second: dict[str, float]) -> float:
    common = [name for name in first if name in second]
    return mcnemar_exact(
        sum(first[n] > second[n] for n in common), sum(first[n] < second[n] for n in common)
    )


# ---------------------------------------------------------------------------------------- output

CAPTION = (
    "In brackets: 95 % interval over problems (bootstrap over problems, seeds pooled; Wilson for "
    "one greedy run, and where all or none are right). In parentheses: 95 % interval over seeds "
    "(Student's t), where there are several."
)
DIFFERENCES_CAPTION = (
    "Difference of T = 1 accuracy in points, on the same problems (paired bootstrap over problems, "
    "seeds pooled); in parentheses over seeds. «No difference»: the interval over problems "
    "contains 0. Of twenty comparisons without a difference, one is expected to show one. McNemar: "
    "exact two-sided p of the greedy outcomes, seed by seed."
)


def print_comparison(arms: Sequence[Arm], console: Console) -> None:
    """Prints the comparison of arms as tables."""
    comparison = compare(arms)
    for block in blocks(comparison):
        columns = [column for column in comparison.columns if column.block == block]
        table = Table(title=block_title(block), title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("", no_wrap=True)
        for column in columns:
            table.add_column(column.title, justify="right", overflow="fold")
        for row in comparison.rows:
            cells = [_cell(column, row.estimates[column.key], "\n") for column in columns]
            label = Text(row.label, style="bold")
            label.append(f"\n{seeds_text(row, block)}", style="not bold dim")
            table.add_row(label, *map(Text, cells))
        console.print(table)
    console.print(Text(CAPTION, style="dim"))
    if not comparison.differences:
        return
    table = Table(title="Differences", title_justify="left", box=box.SIMPLE_HEAD)
    for title in ("", "set", "points", "verdict", "McNemar p"):
        table.add_column(title, justify="right" if title in ("points", "McNemar p") else "left")
    for d in comparison.differences:
        style = "dim" if d.verdict == "no difference" else ""
        table.add_row(
            f"{d.first} − {d.second}",
            d.set,
            points(d),
            Text(d.verdict, style=style),
            p_values(d),
        )
    console.print(table)
    console.print(Text(DIFFERENCES_CAPTION, style="dim"))


def markdown(comparison: Comparison) -> str:
    """The comparison as Markdown tables with their captions."""
    parts = []
    for block in blocks(comparison):
        columns = [column for column in comparison.columns if column.block == block]
        lines = [
            f"**{block_title(block)}**",
            "",
            "| | " + " | ".join(column.title for column in columns) + " |",
            "|---|" + "---:|" * len(columns),
        ]
        for row in comparison.rows:
            cells = [_cell(column, row.estimates[column.key], " ") for column in columns]
            lines.append(f"| {row.label}, {seeds_text(row, block)} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    parts.append(CAPTION)
    if comparison.differences:
        lines = [
            "**Differences**",
            "",
            "| | set | points | verdict | McNemar p |",
            "|---|---|---:|---|---:|",
        ]
        lines += [
            f"| {d.first} − {d.second} | {d.set} | {points(d)} | {d.verdict} | {p_values(d)} |"
            for d in comparison.differences
        ]
        parts += ["\n".join(lines), DIFFERENCES_CAPTION]
    return "\n\n".join(parts) + "\n"


def csv_text(comparison: Comparison) -> str:
    """One line an arm: value, interval over problems and interval over seeds of each quantity, in
    shares, counts, seconds and bytes."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    ends = ("", "/problems_low", "/problems_high", "/seeds_low", "/seeds_high")
    keys = [column.key for column in comparison.columns]
    writer.writerow(["arm", "seeds", "note", *(key + end for key in keys for end in ends)])
    for row in comparison.rows:
        line: list[str] = [row.label, " ".join(map(str, row.seeds)), row.note]
        for key in keys:
            e = row.estimates[key]
            numbers = [e.value, *(e.problems or (None, None)), *(e.seeds or (None, None))]
            line += ["" if number is None else f"{number:.6g}" for number in numbers]
        writer.writerow(line)
    return out.getvalue()


def differences_csv(comparison: Comparison) -> str:
    """One line a pair of arms and set, in shares."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["first", "second", "set", "problems", "seeds", "difference", "problems_low",
         "problems_high", "seeds_low", "seeds_high", "verdict", "mcnemar_p"]
    )  # fmt: skip
    for d in comparison.differences:
        numbers = [d.value, *d.over_problems, *(d.over_seeds or (None, None))]
        writer.writerow(
            [d.first, d.second, d.set, d.problems, d.n_seeds]
            + ["" if number is None else f"{number:.6g}" for number in numbers]
            + [d.verdict, " ".join(f"{p:.4g}" for p in d.mcnemar)]
        )
    return out.getvalue()


def blocks(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(column.block for column in comparison.columns))


def block_title(block: str) -> str:
    return {
        "heldout": "Held-out problems (the verifier of the training reward)",
        "independent": "Independent problems (never touched by the reward)",
        "guard": "Guard (unrelated to the training; should stay)",
        "training": "Training (reward: mean of the last ten steps)",
        "cost": "What it took (without evaluation; all sampling included)",
    }.get(block, block)


def seeds_text(row: Row, block: str) -> str:
    """How many seeds stand behind a row's numbers in a table."""
    if row.note:
        return row.note
    seeds = row.judged.get(block, row.seeds)
    return f"{len(seeds)} seed" + ("" if len(seeds) == 1 else "s")


def _cell(column: Column, e: Estimate, between: str) -> str:
    if e.value is None:
        return "–"
    parts = [column.show(e.value)]
    if e.problems is not None:
        parts.append(f"[{column.show(e.problems[0])}, {column.show(e.problems[1])}]")
    if e.seeds is not None and e.seeds[0] != e.seeds[1]:
        parts.append(f"({column.show(e.seeds[0])}, {column.show(e.seeds[1])})")
    return between.join(parts)


def points(d: Difference) -> str:
    low, high = d.over_problems
    text = f"{100 * d.value:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
    if d.over_seeds is not None:
        text += f" ({100 * d.over_seeds[0]:+.1f}, {100 * d.over_seeds[1]:+.1f})"
    return text


def p_values(d: Difference) -> str:
    return ", ".join(f"{p:.3f}" if p >= 0.001 else "< 0.001" for p in d.mcnemar)
