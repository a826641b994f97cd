"""Which evaluation is the best so far, by the metric that `evaluate.best_metric` names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from zoo.config import ConfigError, EvaluateConfig
from zoo.instantiate import did_you_mean
from zoo.measure.recorder import flat_scores
from zoo.types import EvaluationSet

LOWER_IS_BETTER = (
    "perplexity",
    "nll",
    "kl_to_start",
    "kl_to_start_sequence",
    "length",
    "truncated",
    "unscored",
)
ANSWERS = ("accuracy", "greedy", "length", "truncated", "unscored")
DRIFT = ("kl_to_start", "kl_to_start_sequence")  # of the set heldout alone
PARTS = ("by_source/", "greedy_by_source/", "reason/")  # whose names only the data know
TEXTS = ("perplexity", "nll")
PREFERENCES = ("accuracy", "margin", "nll", "score_mean", "score_std")


def score_of(record: Mapping[str, Any], name: str) -> float | None:
    """The metric SET/MEASURE of one set's record; None where it is of another set, or no number."""
    value = flat_scores(record).get(name)
    return value if value is not None and math.isfinite(value) else None


def better(value: float, best: float, name: str) -> bool:
    """Whether a value of the metric SET/MEASURE beats the best one; a tie keeps the earlier."""
    lower = name.partition("/")[2] in LOWER_IS_BETTER
    return value < best if lower else value > best


def check_best_metric(
    name: str, sets: Sequence[EvaluationSet], pass_k: Sequence[int], trains_policy: bool
) -> None:
    """Refuse a metric that no evaluation of the run has: no best checkpoint would ever be kept.

    Raises:
        ConfigError: an unknown set or measure, with those that there are.
    """
    known: dict[str, tuple[str, ...]] = {"heldout": PREFERENCES, "heldout_pairs": PREFERENCES}
    if trains_policy:
        passes = tuple(f"pass@{k}" for k in pass_k)
        known = {s.name: TEXTS if s.kind == "perplexity" else (*ANSWERS, *passes) for s in sets}
        if "heldout" in known:
            known["heldout"] += DRIFT
    metrics = [f"{key}/{measure}" for key, measures in known.items() for measure in measures]
    # The default is no one's typing error: data without that set have no best checkpoint.
    if not metrics or name in (*metrics, EvaluateConfig.best_metric):
        return
    if any(name.startswith(f"{key}/{part}") for key in known for part in PARTS):
        return
    near = next((key for key in known if name.startswith(f"{key}/")), next(iter(known)))
    raise ConfigError(
        f"evaluate.best_metric={name} is of no evaluation of this run, so no best checkpoint would "
        f"be kept.{did_you_mean(name, metrics, 'evaluate.best_metric=')} The sets are "
        f"{', '.join(known)}; {near} has {', '.join(known[near])}."
    )
