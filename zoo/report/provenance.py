"""What stands beside a published result: command, commit, seeds, machine, versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zoo.report.runs import Arm


def record_of(arms: Sequence[Arm], command: str) -> dict[str, Any]:
    """The record of a comparison, gathered from its runs' meta.json.

    A commit, device, machine or version that differs between runs is given as the list of all.
    """
    runs = [run for arm in arms for run in arm.runs]
    return {
        "command": command,
        "commit": _common([run.meta.get("commit") for run in runs]),
        "dirty": any(run.meta.get("dirty") for run in runs),
        "started": min((str(run.meta["started"]) for run in runs if "started" in run.meta),
                       default=None),
        "seeds": {arm.label: [run.seed for run in arm.runs] for arm in arms},
        "status": {arm.label: [run.progress() for run in arm.runs] for arm in arms},
        "machine": _common([run.meta.get("machine") for run in runs]),
        "device": _common([run.meta.get("device") for run in runs]),
        "versions": _common([run.meta.get("versions") for run in runs]),
        "start_hash": _common([run.start_hash or None for run in runs]),
        "run_seconds": round(sum(_seconds(run.summary) for run in runs), 1),
    }  # fmt: skip


def _seconds(summary: dict[str, Any] | None) -> float:
    """Training and evaluation of one finished run."""
    seconds = (summary or {}).get("seconds") or {}
    return float(seconds.get("total") or 0) + float(seconds.get("evaluate") or 0)


def _common(values: Sequence[Any]) -> Any:
    different: list[Any] = []
    for value in values:
        if value is not None and value not in different:
            different.append(value)
    if not different:
        return None
    return different[0] if len(different) == 1 else different
