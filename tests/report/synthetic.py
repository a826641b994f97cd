"""Run folders written by the tests: every number in them is an argument."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


def evaluation(
    step: int,
    outcomes: Sequence[Sequence[int]],
    greedy: Sequence[int],
    *,
    name: str = "heldout",
    **more: Any,
) -> dict[str, Any]:
    """A line of evals.jsonl whose means follow from the outcomes."""
    samples = [o for row in outcomes for o in row]
    return {
        "step": step,
        "set": name,
        "kind": "accuracy",
        "accuracy": sum(samples) / len(samples),
        "greedy": sum(greedy) / len(greedy),
        "pass@k": {"1": sum(samples) / len(samples)},
        "n_problems": len(outcomes),
        "samples": len(outcomes[0]),
        "outcomes": [list(row) for row in outcomes],
        "greedy_outcomes": list(greedy),
        "problem_ids": [f"p{i}" for i in range(len(outcomes))],
        "truncated": 0.0,
        **more,
    }


def guard(step: int, perplexity: float) -> dict[str, Any]:
    return {"step": step, "set": "guard", "kind": "perplexity", "perplexity": perplexity}


def write_run(
    root: Path,
    name: str,
    seed: int = 0,
    *,
    algorithm: str = "grpo",
    experiment: str = "exp",
    steps: int = 2,
    evaluations: Sequence[dict[str, Any]] = (),
    rewards: Sequence[float] = (),
    finished: bool = True,
    error: str = "",
    start_hash: str = "abc123",
    samples: Sequence[dict[str, Any]] = (),
    summary: dict[str, Any] | None = None,
    meta: dict[str, Any] | None = None,
    memory: dict[str, Any] | None = None,
    inputs: dict[str, Any] | None = None,
) -> Path:
    """One run folder, root/experiment/name/seed_n."""
    folder = root / experiment / name / f"seed_{seed}"
    folder.mkdir(parents=True)
    config = {
        "algorithm": {"_target_": f"zoo.algorithms.{algorithm}.{algorithm.upper()}"},
        "train": {"steps": steps, "groups": 16},
        "seed": seed,
        "experiment": experiment,
        "name": None,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    record = {
        "commit": "0123456789abcdef",
        "dirty": False,
        "device": "cpu",
        "machine": {"cpu": "a processor", "cores": 2, "memory_bytes": 8_000_000_000, "gpu": None},
        "versions": {"zoo": "0.1.0"},
        "argv": ["zoo", f"algorithm={algorithm}", f"seed={seed}"],
        "started": f"2026-01-01T00:00:{seed:02}+00:00",
        "start_hash": start_hash,
        **(meta or {}),
    }
    (folder / "meta.json").write_text(json.dumps(record))
    metrics = [
        {
            "step": step,
            "updates": step,
            "reward/total": reward,
            "entropy": 0.5,
            "length/mean": 20.0,
            "groups/dead": 0.25,
            "tokens/sampled_total": 1000 * step,
            "seconds/total": 2.0 * step,
        }
        for step, reward in enumerate(rewards, 1)
    ]
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "evals.jsonl", evaluations)
    write_lines(folder / "eval_samples.jsonl", samples)
    if memory is not None:
        (folder / "memory.json").write_text(json.dumps(memory))
    if inputs is not None:
        (folder / "inputs.json").write_text(json.dumps(inputs))
    if error:
        (folder / "error.txt").write_text(error)
    if finished:
        whole = {
            "status": "finished",
            "algorithm": algorithm,
            "name": name,
            "seed": seed,
            "steps": steps,
            "updates": steps,
            "start_hash": start_hash,
            "kl_to_start": 0.5,
            "tokens": {"generated": 1000, "trained": 900, "wasted": 100},
            "completions": 256,
            "seconds": {"total": 10.0, "evaluate": 2.0},
            "peak_bytes": {
                "rss": 5_000_000,
                "generate": 1_000_000,
                "update": 3_000_000,
                "evaluate": 4_000_000,
            },
            "final": {
                line["set"]: {"accuracy": line.get("accuracy")}
                for line in evaluations
                if line["set"] == "heldout"
            },
            **(summary or {}),
        }
        (folder / "summary.json").write_text(json.dumps(whole))
    return folder


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
