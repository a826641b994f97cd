"""Which checkpoint is the best, and what a run warns of."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zoo.compose import compose
from zoo.config import ConfigError, TrainConfig
from zoo.evaluate.best import better, check_best_metric, score_of
from zoo.evaluate.evaluator import Evaluated
from zoo.instantiate import structured
from zoo.train.progress import Progress
from zoo.train.session import Session, TrainingError
from zoo.types import EvaluationSet


class Warnings:
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def warning(self, kind: str, message: str) -> None:
        self.kinds.append(kind)


def session(folder: Path, metric: str) -> Any:
    """A session that has only what picking the best, and warning, look at."""
    made: Any = object.__new__(Session)
    made.run = SimpleNamespace(best_metric=metric, max_completion_length=8)
    made.progress, made.folder, made.recorder = Progress(), folder, Warnings()
    made.saved = []
    made._save = made.saved.append
    return made


def judged(
    folder: Path, metric: str, records: list[dict[str, Any]], name: str = "heldout"
) -> tuple[Any, Any]:
    made = session(folder, metric)
    for step, record in enumerate(records, 1):
        made.progress.step = step
        made._keep_best([Evaluated({"set": name, "kind": "accuracy", **record}, [])])
    return made.progress.best, made


def test_B93_best_is_by_the_held_out_metric_and_not_by_the_reward(tmp_path: Path) -> None:
    records = [
        {"reward/total": reward, "accuracy": accuracy}
        for reward, accuracy in zip((0.2, 0.5, 0.9), (0.3, 0.4, 0.2), strict=True)
    ]
    best, made = judged(tmp_path, "heldout/accuracy", records)
    assert best == {"step": 2, "metric": "heldout/accuracy", "value": 0.4}
    assert made.saved == ["best", "best"] and made.recorder.kinds == []
    assert '"step": 2' in (tmp_path / "best.json").read_text()


@pytest.mark.parametrize(
    ("metric", "key", "values", "step"),
    [
        ("heldout/perplexity", "perplexity", [3.0, 2.0, 4.0], 2),  # less is better
        ("heldout/nll", "nll", [3.0, 2.0, 1.0], 3),
        ("heldout/kl_to_start", "kl_to_start", [0.1, 0.2, 0.3], 1),
        ("heldout/greedy", "greedy", [0.4, 0.4, 0.4], 1),  # a tie keeps the earlier
        ("heldout/accuracy", "accuracy", [math.nan, 0.1, math.inf], 2),  # no numbers
        ("heldout/accuracy", "accuracy", [None, 0.0, None], 2),
        ("heldout/pass@4", "pass@k", [{"4": 0.1}, {"4": 0.5, "1": 0.9}, {"4": 0.2}], 2),
    ],
)
def test_B93_direction_and_gaps(
    metric: str, key: str, values: list[Any], step: int, tmp_path: Path
) -> None:
    best, _ = judged(tmp_path, metric, [{key: value} for value in values])
    assert best["step"] == step and best["metric"] == metric


def test_B93_metric_that_no_evaluation_has_is_warned_of(tmp_path: Path) -> None:
    best, made = judged(tmp_path, "heldout/accuracy", [{"accuracy": None}], "independent")
    assert best is None and made.saved == [] and made.recorder.kinds == ["best_metric"]


SETS = [
    EvaluationSet("heldout", "accuracy", (), None),
    EvaluationSet("mine/hard", "accuracy", (), None),
    EvaluationSet("guard", "perplexity"),
]


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        ("heldout/acuracy", "Did you mean evaluate.best_metric=heldout/accuracy"),
        ("held/accuracy", "The sets are heldout, mine/hard, guard"),
        ("guard/accuracy", "guard has perplexity, nll"),
        ("heldout/pass@8", "heldout/pass@4"),
        ("reward/total", "is of no evaluation"),
    ],
)
def test_B93_unknown_metric_is_refused(metric: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_best_metric(metric, SETS, [1, 4], trains_policy=True)


@pytest.mark.parametrize(
    "metric",
    ["heldout/greedy", "heldout/pass@4", "guard/nll", "mine/hard/greedy", "heldout/by_source/x"],
)
def test_metric_of_an_evaluation_is_taken(metric: str) -> None:
    check_best_metric(metric, SETS, [1, 4], trains_policy=True)
    check_best_metric("heldout/margin", [], [1], trains_policy=False)
    check_best_metric(metric, [], [1], trains_policy=True)  # nothing is evaluated


def test_B93_is_refused_before_any_weight_loads() -> None:
    from zoo.build import check

    with pytest.raises(ConfigError, match="heldout/acuracy"):
        check(structured(compose(["evaluate.best_metric=heldout/acuracy"])))


def test_score_is_of_its_own_set() -> None:
    record = {"set": "heldout", "accuracy": 0.5}
    assert score_of(record, "heldout/accuracy") == 0.5
    assert score_of(record, "independent/accuracy") is None
    assert better(0.6, 0.5, "heldout/accuracy") and not better(0.5, 0.5, "heldout/accuracy")
    assert better(0.4, 0.5, "guard/perplexity") and not better(0.6, 0.5, "heldout/length")


@pytest.mark.parametrize(
    ("metrics", "kinds"),
    [
        ({"truncated": 0.5}, []),
        ({"truncated": 0.51}, ["truncated"]),
        ({"reward/abstained": 0.5}, []),
        ({"reward/abstained": 1.0}, ["abstained"]),
        ({"empty_batch": 1.0}, ["empty_batch"]),
    ],
)
def test_B75_B16_warnings_of_a_step(metrics: dict[str, float], kinds: list[str]) -> None:
    made = session(Path(), "heldout/accuracy")
    made._warn(metrics)
    assert made.recorder.kinds == kinds


@pytest.mark.parametrize(
    ("name", "critic_lr", "way_out"),
    [
        ("policy", 0.5, "Lower train.lr (now 0.0002)"),
        ("critic", None, "Lower train.lr (now 0.0002)"),
        ("critic", 0.5, "Lower train.critic_lr (now 0.5)"),
    ],
)
def test_weights_that_broke_name_the_learning_rate_they_had(
    name: str, critic_lr: float | None, way_out: str
) -> None:
    made, broken = session(Path(), "heldout/accuracy"), torch.nn.Linear(1, 1)
    torch.nn.init.constant_(broken.bias, math.nan)
    made.run.trainables = {name: SimpleNamespace(module=broken)}
    made.run.config = SimpleNamespace(train=TrainConfig(critic_lr=critic_lr))
    with pytest.raises(TrainingError) as caught:
        made._check_weights()
    assert f"the {name}'s weights bias are not finite" in str(caught.value)
    assert way_out in str(caught.value)
