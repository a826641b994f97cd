"""The numbers of a run that a checkpoint holds beside the tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """Where a run stands, and what it has cost so far."""

    step: int = 0
    updates: int = 0
    decay_from: int | None = None  # update at which train.stop_at was reached
    stop_step: int | None = None
    bad_updates: int = 0  # refused in a row
    skipped_updates: int = 0
    idle_updates: int = 0  # whose gradients were all 0, so that no weight moved
    tokens_generated: int = 0
    tokens_trained: int = 0
    tokens_wasted: int = 0
    completions: int = 0
    flops: float = 0.0
    seconds: float = 0.0  # of training: no evaluation, no checkpoints
    phases: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    evaluated_at: int | None = None
    reasons: list[str] = field(default_factory=list)  # those that have metrics of their own
    owes_evaluation: bool = False  # interrupted before what `evaluate_if_due` does after the step
