"""What a finished run says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.build import Run
from zoo.instantiate import run_name
from zoo.measure.files import read_lines
from zoo.measure.recorder import EVALS, METRICS
from zoo.models.loading import weights_hash
from zoo.train.progress import Progress

REWARD_STEPS = 10  # steps whose mean reward the summary gives


def summarize(
    run: Run, progress: Progress, folder: Path, config_hash: str, memory: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of summary.json, from the run's own files and counts.

    Args:
        memory: the content of memory.json.
    """
    lines = read_lines(folder / METRICS)
    evals = read_lines(folder / EVALS)
    rewards = [line["reward/total"] for line in lines if line.get("reward/total") is not None]
    last = {record["set"]: _scores(record) for record in evals}
    first = {record["set"]: _scores(record) for record in reversed(evals)}
    groups = [line for line in lines if "groups/dead" in line]
    phases = {**progress.phases, **run.timer.drain()}
    return {
        "status": "finished",
        "algorithm": run.algorithm.name,
        # Not the folders' names: any of them may be a link to elsewhere.
        "name": run_name(run.config, config_hash),
        "experiment": run.config.experiment,
        "seed": run.config.seed,
        "steps": progress.step,
        "updates": progress.updates,
        "skipped_updates": progress.skipped_updates,
        "idle_updates": progress.idle_updates,  # without a signal: no weight moved
        "config_hash": config_hash,
        "start_hash": run.start_hash,
        "policy_hash": _hash(run),
        "first": first,
        "final": last,
        "best": progress.best,
        "reward": _mean(rewards[-REWARD_STEPS:]),
        "kl_to_start": last.get("heldout", {}).get("kl_to_start"),
        "tokens": {
            "generated": progress.tokens_generated,
            "trained": progress.tokens_trained,
            "wasted": progress.tokens_wasted,
        },
        "completions": progress.completions,
        "seconds": {"total": progress.seconds, **phases},
        "peak_bytes": {"rss": memory["rss_peak"], **memory["phases"]},
        "flops": progress.flops,
        "dead_groups": {
            name: _mean([line[f"groups/{name}"] for line in groups])
            for name in ("dead", "all_right", "all_wrong", "tied")
        }
        if groups
        else {},
    }


def _hash(run: Run) -> str | None:
    """Of the saved policy's weights; of an adapter none, since what is saved has other tensors."""
    if run.policy is None or run.start_model.adapter is not None:
        return None
    return weights_hash(run.policy.model)


def _scores(record: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of an evaluation, without the outcomes of single problems."""
    left_out = {"outcomes", "greedy_outcomes", "problem_ids", "problem_hashes", "content_hash"}
    left_out |= {"prompts_hash", "set", "seconds"}
    return {name: value for name, value in record.items() if name not in left_out}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
