"""Every algorithm keeps the contract; every deliberate mistake is found, and named."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import yaml

from tests.contract.broken import BROKEN
from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.algorithms.dapo import DAPO
from zoo.algorithms.dpo import DPO, PairLoss
from zoo.algorithms.grpo import GRPO
from zoo.algorithms.ppo import PPO, Truncation
from zoo.algorithms.sft import SFT
from zoo.batch import Batch
from zoo.compose import config_dir
from zoo.contract import CLAUSES, TWO_PROCESSES, Clause, Report, check_algorithms
from zoo.functional import Average, KLEstimator, adaptive_kl_coef
from zoo.instantiate import build
from zoo.models.models import Models
from zoo.testing import bandit_run, check_algorithm

NAMES = sorted(path.stem for path in config_dir().glob("algorithm/*.yaml"))
# Choices that change what is loaded or how it is reduced, beyond the defaults.
VARIANTS = {
    "GRPO with a price of drift": GRPO(kl_coef=0.1, kl_on_dead=False),
    "GRPO, the ratio-corrected estimator": GRPO(kl_coef=0.1, kl_estimator=KLEstimator.k1_ratio),
    "GRPO in minibatches": GRPO(epochs=2, minibatches=2, average=Average.constant),
    "GRPO that masks what was cut": GRPO(mask_truncated=True, kl_coef=0.1),
    "DAPO that masks what was cut": DAPO(mask_truncated=True),
    "DPO robust": DPO(loss=PairLoss.robust, label_smoothing=0.1),
    "DPO hinge with likelihood": DPO(loss=PairLoss.hinge, nll_coef=0.1),
    "PPO without reference": PPO(kl_coef=0.0, whiten_advantages=False),
    "PPO bootstrapped": PPO(truncation=Truncation.bootstrap, epochs=2, value_clip=None),
}


def configured(name: str) -> Algorithm:
    text = (config_dir() / "algorithm" / f"{name}.yaml").read_text(encoding="utf-8")
    return build(yaml.safe_load(text), "algorithm")


@pytest.mark.parametrize("name", NAMES)
def test_algorithm_keeps_the_contract(name: str) -> None:
    report = check_algorithm(configured(name))
    assert report.passed, str(report)
    assert {clause.name for clause in report.clauses} == set(CLAUSES)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_keeps_the_contract(name: str) -> None:
    report = check_algorithm(VARIANTS[name])
    assert report.passed, str(report)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")  # one mistake is just that
@pytest.mark.parametrize("kind", [k for k, c in BROKEN.items() if c != TWO_PROCESSES])
def test_mistake_breaks_the_clause_that_names_it(
    kind: type[Algorithm], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the clause in question: twenty whole reports would be slow.
    clause = BROKEN[kind]
    monkeypatch.setattr("zoo.contract.CLAUSES", {clause: CLAUSES[clause]})
    report = check_algorithm(kind())
    assert report.broken == (clause,), str(report)


@pytest.mark.parametrize("kind", [k for k, c in BROKEN.items() if c != TWO_PROCESSES])
def test_clause_holds_for_the_algorithm_without_the_mistake(
    kind: type[Algorithm], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = next(base for base in kind.__mro__ if base.__module__.startswith("zoo."))
    values = {f.name: getattr(kind(), f.name) for f in dataclasses.fields(whole) if f.init}
    clause = BROKEN[kind]
    monkeypatch.setattr("zoo.contract.CLAUSES", {clause: CLAUSES[clause]})
    report = check_algorithm(whole(**values))
    assert report.passed, str(report)


@pytest.mark.slow
def test_two_processes_agree_with_one_and_a_local_statistic_is_found() -> None:
    (wrong,) = [kind for kind, clause in BROKEN.items() if clause == TWO_PROCESSES]
    algorithms = [*map(configured, NAMES), wrong()]
    *reports, broken = check_algorithms(algorithms, full=True)
    for report in reports:
        assert report.passed, str(report)
        assert report.clauses[-1] == Clause(TWO_PROCESSES, True)
    assert broken.broken == (TWO_PROCESSES,), str(broken)


def test_report_says_what_is_broken_and_where() -> None:
    report = Report("mine", (Clause("a", True), Clause("b", False, "loss is nan")), 1.0)
    assert not report.passed and report.broken == ("b",)
    assert "BREAKS" in str(report) and "BROKEN   b: loss is nan" in str(report)


@dataclass(frozen=True)
class RightOnesOnly(SFT):
    """Imitates what reached a threshold: the level of a reward counts, and that is no mistake."""

    threshold: float = 0.5

    @property
    def needs(self) -> Needs:
        return Needs(DataKind.prompts, min_group_size=2)

    def prepare(self, batch: Batch, models: Models) -> Batch:
        assert batch.rewards is not None and batch.scored is not None
        right = (batch.rewards >= self.threshold) & batch.scored
        return batch.replace(completion_mask=batch.completion_mask & right[:, None])


@dataclass(frozen=True)
class EveryOtherToken(SFT):
    """Trains a part of each completion, which leaves the last token out of some of them."""

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        count = batch.completion_mask.long().cumsum(1)
        chosen = batch.completion_mask & (count % 2 == 1)
        assert batch.scale is not None
        loss = torch.where(chosen, -models.policy(batch).logprobs, 0.0)
        yield LossTerm("policy", loss.sum() / batch.scale.tokens)


@dataclass(frozen=True)
class AdaptivePrice(GRPO):
    """A coefficient that is state across steps."""

    kl_coef: float = 0.1

    def initial_state(self) -> dict[str, float]:
        return {"coef": self.kl_coef}

    def next_state(self, state: dict[str, float], metrics: dict[str, Any]) -> dict[str, float]:
        return {"coef": adaptive_kl_coef(state["coef"], metrics.get("kl_ref", 0.0), 0.1, 1, 100)}

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        now = dataclasses.replace(self, kl_coef=models.state["coef"])
        yield from GRPO.losses(now, batch, models)


@pytest.mark.parametrize("kind", [RightOnesOnly, EveryOtherToken, AdaptivePrice])
def test_unusual_algorithm_is_no_mistake(kind: type[Algorithm]) -> None:
    report = check_algorithm(kind())
    assert report.passed, str(report)


@dataclass(frozen=True)
class Crashes(GRPO):
    def losses(self, batch: Any, models: Any) -> Any:
        raise RuntimeError("no such tensor")


def test_exception_of_an_algorithm_is_a_finding_with_its_line() -> None:
    report = check_algorithm(Crashes())
    (detail,) = [clause.detail for clause in report.clauses if not clause.passed]  # once
    assert "RuntimeError: no such tensor (test_contract.py:" in detail


# FAULTS, cross-check 6: SGD with learning rate 0.5, groups of 8, β 0.5, at most 20 steps.
@pytest.mark.parametrize("algorithm", [PPO(), GRPO(), DPO(beta=0.5)], ids=lambda a: a.name)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_bandit_with_plain_gradient_descent(algorithm: Algorithm, sign: float) -> None:
    policy = bandit_run(algorithm, sign=sign, groups=1, lr=0.5, optimizer="SGD")
    assert policy.probability > 0.6 if sign > 0 else policy.probability < 0.4
