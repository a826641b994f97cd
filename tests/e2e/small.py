"""Overrides of a run that takes a second: a model of 30,000 weights from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SMALL = [
    "model=tiny_random",
    "model.architecture.hidden_size=32",
    "model.architecture.intermediate_size=48",
    "model.architecture.num_hidden_layers=2",
    "data.n_problems=40",
    "data.n_examples=60",
    "data.n_heldout=6",
    "data.n_independent=4",
    "data.n_texts=4",
    "rollout.max_new_tokens=10",
    "rollout.group_size=4",
    "train.groups=4",
    "train.steps=6",
    "train.checkpoint_every=2",
    "evaluate.every=3",
    "evaluate.samples=2",
    "evaluate.pass_k=[1,2]",
    "measure.wandb=disabled",
    "measure.progress=false",
    # an untrained model is never right; coins let groups differ
    "reward=random",
]


def run_small(output: Path, *overrides: str) -> dict[str, Any]:
    """A small run in this process; the summary."""
    from zoo.compose import compose
    from zoo.instantiate import structured
    from zoo.train.run import run

    return run(structured(compose([*SMALL, f"output={output}", *overrides])))


def folder_of(output: Path) -> Path:
    """The folder of the only run below `output`."""
    (found,) = output.glob("*/*/seed_*")
    return found
