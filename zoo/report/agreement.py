"""Whether the records of a finished run agree: with themselves, and with its summary."""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose
from typing import Any

from zoo.functional.rewards import pass_at_k
from zoo.report.runs import Evaluation, Run

ROUNDING = 1e-6  # of a mean, which one outcome of half a million moves by more


def disagreements(run: Run) -> list[str]:
    """What the records of a finished run say against each other, one phrase each."""
    return [*_lost(run), *_foreign(run), *_altered(run)]


def _lost(run: Run) -> list[str]:
    """What the summary knows of, and the records do not."""
    steps, lost = run.total("steps"), []
    cut = "the file was cut after the run's end"
    if steps and run.step < steps:
        there = f"ends at step {run.step} of {steps:.0f}" if run.metrics else "is empty or gone"
        lost.append(f"metrics.jsonl {there}: {cut}")
    for name, scores in _final(run).items():
        last, step = run.evaluation(name), int(scores.get("step", -1))  # older records have none
        if (last.step if last else -1) < step:
            lost.append(f"evals.jsonl lacks the evaluation of {name} at step {step}: {cut}")
    return lost


def _foreign(run: Run) -> list[str]:
    """Where the last evaluation of a set is not the one that the summary was made of."""
    found = []
    for name, scores in _final(run).items():
        last = run.evaluation(name)
        if last is None or last.step < int(scores.get("step", 0)):
            continue
        for key, value in scores.items():
            if key in last.record and last.record[key] != value:
                found.append(
                    f"the last evaluation of {name} in evals.jsonl is not that of summary.json "
                    f"({key} {_short(last.record[key])}, there {_short(value)}): one of the files "
                    "was altered, or is of another run"
                )
                break
    return found


def _altered(run: Run) -> list[str]:
    """Evaluations whose outcomes of single problems do not give their own means."""
    found = []
    for evaluation in run.evaluations:
        if wrong := contradiction(evaluation):
            found.append(
                f"evals.jsonl, {evaluation.set} at step {evaluation.step}: {wrong}, so the line "
                "was altered"
            )
    more = [f"evals.jsonl has {len(found) - 2} more altered lines"] if len(found) > 2 else []
    return found[:2] + more


def contradiction(evaluation: Evaluation) -> str:
    """Which mean of an evaluation its own outcomes do not give; "" where they give all."""
    record = evaluation.record
    rows = record.get("outcomes") or []
    decoded = [[outcome] for outcome in record.get("greedy_outcomes") or []]
    for key, outcomes in (("accuracy", rows), ("greedy", decoded)):
        means = _means(outcomes)
        said = evaluation.number(key)
        if means and not any(said is not None and _alike(said, mean) for mean in means):
            return f"{key} is {_short(said)}, and its outcomes give {_short(means[0])}"
    if not rows or any(outcome is None for row in rows for outcome in row):
        return ""
    for k, said in evaluation.pass_at.items():
        if all(len(row) >= k for row in rows):
            found = sum(float(pass_at_k(len(row), round(sum(row)), k)) for row in rows) / len(rows)
            if not _alike(said, found):
                return f"pass@{k} is {_short(said)}, and its outcomes give {_short(found)}"
    return ""


def _means(rows: Sequence[Sequence[float | None]]) -> list[float]:
    """The means that these rows of outcomes may have been written with; [] where there is none.

    An abstention counts as not right; older versions left it out, and kept it as null.
    """
    flat = [outcome for row in rows for outcome in row]
    scored = [outcome for outcome in flat if outcome is not None]
    if not scored:
        return []
    by_row = [sum(outcome or 0 for outcome in row) / len(row) for row in rows if row]
    return [sum(by_row) / len(by_row), sum(scored) / len(scored), sum(scored) / len(flat)]


def _alike(one: float, other: float) -> bool:
    return isclose(one, other, rel_tol=0, abs_tol=ROUNDING)


def _final(run: Run) -> dict[str, dict[str, Any]]:
    return (run.summary or {}).get("final") or {}


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value!r:.40}"
