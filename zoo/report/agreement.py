"""Whether the records of a finished run agree: with themselves, and with its summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isclose
from typing import Any

from zoo.functional.rewards import pass_at_k
from zoo.report.runs import LAST_STEPS, Evaluation, Run

ROUNDING = 1e-6  # of a mean, which one outcome of half a million moves by more
CUT = "the file was cut after the run's end"
FOREIGN = "one of the files was altered, or is of another run"


def disagreements(run: Run) -> list[str]:
    """What the records of a finished run say against each other, one phrase each."""
    steps = _steps(run)
    return [*steps, *_lost(run), *_foreign(run), *([] if steps else _reward(run)), *_altered(run)]


def _steps(run: Run) -> list[str]:
    """Where the steps of metrics.jsonl are not those of the summary, each once."""
    total = run.total("steps")
    if total is None:
        return []
    seen = Counter(int(line["step"]) for line in run.metrics)
    last = max((step for step in seen if 1 <= step <= total), default=0)
    lacking = [step for step in range(1, last) if step not in seen]
    doubled = [step for step, times in seen.items() if times > 1 and 1 <= step <= total]
    foreign = [step for step in seen if not 1 <= step <= total]
    told = []
    if last < total:
        there = f"ends at step {last} of {total:.0f}" if run.metrics else "is empty or gone"
        told.append(f"metrics.jsonl {there}: {CUT}")
    for what, steps in (
        ("lacks", lacking),
        ("has more than once", doubled),
        (f"has, of a run of {total:.0f} steps,", foreign),
    ):
        if steps:
            more = f" and {len(steps) - 1} more" if len(steps) > 1 else ""
            told.append(f"metrics.jsonl {what} step {min(steps)}{more}: the file was altered")
    return told


def _reward(run: Run) -> list[str]:
    """Where the reward of the summary is not that of the last steps."""
    if "reward" not in (run.summary or {}):  # an older record
        return []
    said, found = run.total("reward"), run.reward()
    if said is not None and found is not None:
        scale = max(abs(value) for _, value in run.series("reward/total")[-LAST_STEPS:])
        if isclose(said, found, rel_tol=0, abs_tol=ROUNDING * scale):
            return []
    elif said is found:
        return []
    return [
        f"the reward of the last steps in metrics.jsonl is not that of summary.json "
        f"({_short(found)}, there {_short(said)}): {FOREIGN}"
    ]


def _lost(run: Run) -> list[str]:
    """Evaluations that the summary knows of, and the records do not."""
    lost = []
    for which, name, scores, there in _ends(run):
        step = int(scores.get("step", -1))  # older records have none
        if which == "last":
            lacking = (there.step if there else -1) < step
        else:
            lacking = there is not None and there.step > step  # where none is, the last is told
        if lacking:
            lost.append(f"evals.jsonl lacks the evaluation of {name} at step {step}: {CUT}")
    return lost


def _foreign(run: Run) -> list[str]:
    """Where the first or the last evaluation of a set is not the one of the summary."""
    found: dict[str, str] = {}  # by set, the last before the first
    for which, name, scores, there in _ends(run):
        step = int(scores.get("step", 0))
        if there is None or (there.step < step if which == "last" else there.step > step):
            continue
        for key, value in scores.items():
            if key in there.record and there.record[key] != value:
                found.setdefault(
                    name,
                    f"the {which} evaluation of {name} in evals.jsonl is not that of summary.json "
                    f"({key} {_short(there.record[key])}, there {_short(value)}): {FOREIGN}",
                )
                break
    return [*found.values()]


def _ends(run: Run) -> Iterator[tuple[str, str, dict[str, Any], Evaluation | None]]:
    """("last" or "first", set, its scores in the summary, its evaluation in the records).

    What was evaluated once has a last one alone, and older records have no first.
    """
    summary = run.summary or {}
    final, first = summary.get("final") or {}, summary.get("first") or {}
    for name, scores in final.items():
        yield "last", name, scores, run.evaluation(name)
        begun = first.get(name) if isinstance(first, dict) else None
        of_set = sorted((e for e in run.evaluations if e.set == name), key=lambda e: e.step)
        twice = len(of_set) > 1 or begun != scores
        if twice and isinstance(begun, dict) and isinstance(begun.get("step"), int):
            yield "first", name, begun, of_set[0] if of_set else None


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


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value!r:.40}"
