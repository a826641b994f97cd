"""What a reader must know before believing a comparison: unequal conditions and reward hacking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

from zoo.functional.statistics import paired_bootstrap
from zoo.report.agreement import disagreements
from zoo.report.runs import (
    LAST_STEPS,
    Arm,
    Evaluation,
    Measure,
    Run,
    RunStatus,
    different_settings,
    different_starts,
)

BUDGET_TOLERANCE = 0.10  # relative difference of completions at which budgets are called unequal
TRUNCATED = 0.5  # share of truncated completions above which the limit of new tokens is too small
GUARD_RISE = 0.10  # relative rise of the guard's perplexity
SETTINGS = 4  # named of those in which the configurations of one name differ; the page has all


def concerns(arms: Sequence[Arm]) -> list[str]:
    """One sentence for each reason to doubt, the gravest first; empty if there is none."""
    return [
        *_disagreements(arms),
        *_reward_against_independent(arms),
        *mixtures(arms),
        *_unequal_starts(arms),
        *_unequal_problems(arms),
        *_unequal_inputs(arms),
        *_incomplete(arms),
        *_unequal_budgets(arms),
        *_unequal_conditions(arms),
        *_per_run(arms),
    ]


def _disagreements(arms: Sequence[Arm]) -> list[str]:
    return [
        f"{_name(arms, run)}: {told}. Do not trust its numbers ({run.folder})."
        for run in _finished(arms)
        for told in disagreements(run)
    ]


def mixtures(arms: Sequence[Arm]) -> list[str]:
    """What would be wrong to count as one: a name of several configurations, a run that is there
    twice."""
    found = []
    by_name: dict[tuple[str, str], list[Arm]] = {}
    for arm in arms:
        by_name.setdefault((arm.runs[0].experiment, arm.runs[0].name), []).append(arm)
    for (_, name), sharing in by_name.items():
        if len(sharing) < 2:
            continue
        different = different_settings(sharing)
        parts = [f"{key} ({', '.join(different[key])})" for key in [*different][:SETTINGS]]
        parts += ["…"] if len(different) > SETTINGS else []
        found.append(
            f"{name} is the name of runs of {len(sharing)} configurations, each an arm of its own: "
            + "; ".join(f"{arm.label}, {_seeds(arm)}" for arm in sharing)
            + (f". They differ in {', '.join(parts)}." if parts else ".")
        )
    for arm in arms:
        for run, counted in arm.repeats:
            found.append(
                f"{arm.label}, seed {run.seed}: {run.folder} is left out, as {counted.folder} is a "
                "run of the same configuration and seed. To compare the two, give them different "
                "names or experiments."
            )
    return found


def _seeds(arm: Arm) -> str:
    return f"seed{'s' * (len(arm.runs) > 1)} {' '.join(str(run.seed) for run in arm.runs)}"


def _reward_against_independent(arms: Sequence[Arm]) -> list[str]:
    found = []
    for run in _finished(arms):
        values = [value for _, value in run.series("reward/total")]
        first, last = run.evaluation("independent", first=True), run.evaluation("independent")
        if len(values) < 2 * LAST_STEPS or first is None or last is None:
            continue
        before, after = values[:LAST_STEPS], values[-LAST_STEPS:]
        # Two standard errors of the difference of the two means of ten steps.
        noise = 2 * ((stdev(before) ** 2 + stdev(after) ** 2) / LAST_STEPS) ** 0.5
        rise = fmean(after) - fmean(before)
        fall = _change(first, last)
        if rise > noise and fall is not None and fall[2] < 0:
            found.append(
                f"{_name(arms, run)}: the reward rose by {rise:.3g} while accuracy on the "
                f"independent set FELL by {-100 * fall[0]:.1f} points (95 % interval "
                f"{-100 * fall[2]:.1f} to {-100 * fall[1]:.1f}). Read its completions: the policy "
                "may satisfy the verifier instead of solving the problem."
            )
    return found


def _change(first: Evaluation, last: Evaluation) -> tuple[float, float, float] | None:
    before, after = first.per_problem(Measure.accuracy), last.per_problem(Measure.accuracy)
    common = [name for name in after if name in before]
    if not common:
        return None
    return paired_bootstrap([after[n] for n in common], [before[n] for n in common])


def _unequal_starts(arms: Sequence[Arm]) -> list[str]:
    hashes = different_starts(arms)
    if not hashes:
        return []
    parts = "; ".join(f"{value[:8]}: {', '.join(labels)}" for value, labels in hashes.items())
    return [f"The arms did not begin from one start ({parts}): differences may come from that."]


def _unequal_problems(arms: Sequence[Arm]) -> list[str]:
    """Sets of one name that hold different problems, or were judged in different ways."""
    others: dict[tuple[str, ...], list[str]] = {}  # who was judged alike → names of sets
    ways: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(name for run in _finished(arms) for name in run.sets):
        # What an older record was judged on is not known.
        last = {id(run): run.evaluation(name) for run in _finished(arms)}
        sides = _who_had(arms, lambda run, last=last: (e := last[id(run)]) and e.content)
        if len(sides) > 1:
            others.setdefault(tuple(sides), []).append(name)
            continue
        sides = _who_had(arms, lambda run, last=last: _way(last[id(run)]))
        if len(sides) > 1:
            ways.setdefault(tuple(sides), []).append(name)
    return [
        f"The runs were not judged on the same {', '.join(names)} ({' | '.join(sides)}): their "
        "rows do not compare; differences are over the problems that both had."
        for sides, names in others.items()
    ] + [
        f"{', '.join(names)} reached the runs in other tokens (a template or tokenizer) or under "
        f"another rollout.max_new_tokens ({' | '.join(sides)}): that alone moves scores."
        for sides, names in ways.items()
    ]


def _way(evaluation: Evaluation | None) -> tuple[Any, ...] | None:
    known = evaluation is not None and evaluation.record.get("prompts_hash")
    return evaluation.conditions[1:] if evaluation is not None and known else None


def _unequal_inputs(arms: Sequence[Arm]) -> list[str]:
    """Files and code of one name that differed from run to run."""
    changed: dict[tuple[str, ...], list[str]] = {}  # who had the same → files and code
    for what in dict.fromkeys(what for run in _finished(arms) for what in run.inputs):
        sides = _who_had(arms, lambda run, what=what: run.inputs.get(what))
        if len(sides) > 1:
            changed.setdefault(tuple(sides), []).append(what)
    return [
        f"{', '.join(whats[:SETTINGS])}{', …' * (len(whats) > SETTINGS)} changed between the runs "
        f"({' | '.join(sides)}): differences, and the spread over seeds, may come from that."
        for sides, whats in changed.items()
    ]


def _who_had(arms: Sequence[Arm], value_of: Callable[[Run], Any]) -> list[str]:
    """Who shares each value, as in "grpo; ppo, seed 0"; runs without one are left out."""
    found: dict[Any, list[str]] = {}
    for arm in arms:
        values = {run.seed: value for run in arm.finished if (value := value_of(run))}
        for value in dict.fromkeys(values.values()):
            seeds = [seed for seed, other in values.items() if other == value]
            some = f", seed{'s' * (len(seeds) > 1)} {' '.join(map(str, seeds))}"
            found.setdefault(value, []).append(arm.label + some * (len(seeds) < len(values)))
    return ["; ".join(parts) for parts in found.values()]


def _incomplete(arms: Sequence[Arm]) -> list[str]:
    found = []
    for arm in arms:
        for run in arm.runs:
            if run.status is not RunStatus.finished:
                last = run.error.strip().splitlines()[-1:]
                reason = f" ({last[0]})" if last and run.status is RunStatus.failed else ""
                found.append(
                    f"{arm.label}, seed {run.seed}: {run.progress()}{reason}; "
                    "its numbers are left out."
                )
    return found


def _unequal_budgets(arms: Sequence[Arm]) -> list[str]:
    spent = {}
    for arm in arms:
        values = [run.total("completions") for run in arm.finished]
        known = [value for value in values if value]
        if known and not arm.untrained:
            spent[arm.label] = fmean(known)
    if len(spent) < 2 or max(spent.values()) <= (1 + BUDGET_TOLERANCE) * min(spent.values()):
        return []
    parts = ", ".join(f"{label} {value:,.0f}" for label, value in spent.items())
    return [f"The arms sampled unequal numbers of completions: {parts}."]


def _unequal_conditions(arms: Sequence[Arm]) -> list[str]:
    runs = _finished(arms)
    found = []
    commits = {str(run.meta["commit"])[:10] for run in runs if run.meta.get("commit")}
    if len(commits) > 1:
        found.append(f"The runs come from {len(commits)} commits: {', '.join(sorted(commits))}.")
    if any(run.meta.get("dirty") for run in runs):
        found.append("Some runs come from a checkout with uncommitted changes.")
    machines = {
        (
            str(run.meta.get("device")).split(":")[0],
            str((run.meta.get("machine") or {}).get("cpu")),
        )
        for run in runs
    }
    if len(machines) > 1:
        found.append("The runs come from different machines: their seconds do not compare.")
    processes = sorted({int(run.meta.get("n_processes") or 1) for run in runs})
    if len(processes) > 1:
        listed = " and ".join(map(str, processes))
        found.append(f"The runs had {listed} processes: their seconds and memory do not compare.")
    return found


def _per_run(arms: Sequence[Arm]) -> list[str]:
    found = []
    for run in _finished(arms):
        name = _name(arms, run)
        last = run.evaluation("heldout")
        truncated = last.number("truncated") if last is not None else None
        if truncated is not None and truncated > TRUNCATED:
            found.append(
                f"{name}: {100 * truncated:.0f} % of the held-out completions were cut off by the "
                "limit of new tokens; raise rollout.max_new_tokens."
            )
        first, last = run.evaluation("guard", first=True), run.evaluation("guard")
        before = first.number("perplexity") if first is not None else None
        after = last.number("perplexity") if last is not None else None
        if before and after and after > (1 + GUARD_RISE) * before:
            found.append(
                f"{name}: the guard's perplexity rose from {before:.3g} to {after:.3g}: "
                "training cost general ability."
            )
        skipped = run.total("skipped_updates")
        if skipped:
            found.append(f"{name}: {skipped:.0f} updates were refused (not finite).")
        idle, updates = run.total("idle_updates") or 0.0, run.total("updates")
        unmoved = idle + (skipped or 0.0)
        if updates and unmoved > updates / 2:
            found.append(
                f"{name}: {unmoved:.0f} of {updates:.0f} updates moved no weight ({idle:.0f} as no "
                f"group carried a signal, {skipped or 0.0:.0f} refused)."
            )
    return found


def _finished(arms: Sequence[Arm]) -> list[Run]:
    return [run for arm in arms for run in arm.finished]


def _name(arms: Sequence[Arm], run: Run) -> str:
    label = next(arm.label for arm in arms if any(r is run for r in arm.runs))
    return f"{label}, seed {run.seed}"
