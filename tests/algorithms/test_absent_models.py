"""A model that an algorithm uses and does not ask for is named, however the code reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from zoo.algorithms.base import Algorithm, DataKind, Needs, absent_models_named
from zoo.config import ConfigError
from zoo.models.models import Models

BATCH = object()
PROMPTS, PAIRS = Needs(DataKind.prompts), Needs(DataKind.pairs, reference=True)
JUDGE = Needs(DataKind.pairs, trains=("reward_model",))


@dataclass(frozen=True)
class Mine(Algorithm):
    asked: Needs = PROMPTS

    @property
    def needs(self) -> Needs:
        return self.asked


def renamed(models: Any) -> None:
    reference = models.reference
    reference(BATCH)


def in_a_chain(models: Any) -> None:
    (models
        .reference(BATCH))  # fmt: skip


def within_a_pass(models: Any) -> None:
    (lambda piece: models.critic(piece).values)(BATCH)


def its_own(models: Any) -> None:
    if models.reference is None:
        models.state.get("scorer")(BATCH)


@pytest.mark.parametrize(
    ("use", "needs", "says"),
    [
        (lambda models: models.reference(BATCH), PROMPTS, r"models.reference .* reference=True\)"),
        (
            renamed,
            PROMPTS,
            r"models.reference \(`reference\(BATCH\)`: 'NoneType' o.* reference=True\)",
        ),
        (lambda models: models.reference.config, PROMPTS, r"Return Needs\(…, reference=True\)"),
        (
            lambda models: models.critic(
                "über mehrere Zeilen",
            ),
            PROMPTS,
            r"Return Needs\(…, critic=True\)",
        ),
        (in_a_chain, PROMPTS, r"Return Needs\(…, reference=True\)"),
        (within_a_pass, PROMPTS, r"models.critic .* Return Needs\(…, critic=True\)"),
        # The log-probs of the data's own rows are read before the first step, and it is let go
        (lambda models: models.reference(BATCH), PAIRS, r"reference_logprobs.* reference_live=Tr"),
        (lambda models: models.reward_model(BATCH), PROMPTS, r"\('policy', 'reward_model'\)"),
        (lambda models: models.policy(BATCH), JUDGE, r"trains=\('reward_model', 'policy'\)"),
    ],
)
def test_a_model_that_was_not_loaded_is_named_with_what_to_write(
    use: Callable[[Any], Any], needs: Needs, says: str
) -> None:
    with pytest.raises(ConfigError, match=says), absent_models_named(Mine(asked=needs)):
        use(Models(policy=None))


def its_own_beside_a_model(models: Any) -> None:
    reference = models.reference if models.reference is not None else BATCH
    options = None if reference is BATCH else {}
    options.get("x")  # pyright: ignore


class Own:
    critic = aux = None

    def part_of_its_own(self, models: Any) -> None:
        self.critic(BATCH)  # pyright: ignore

    def another_on_the_line(self, models: Any) -> None:
        self.aux.sum() + models.reference(BATCH)  # pyright: ignore

    def in_words(self, models: Any) -> None:
        self.aux.sum()  # pyright: ignore  # as models.critic(batch).sum() would


@pytest.mark.parametrize(
    ("use", "needs"),
    [
        (its_own, PROMPTS),
        (Own().part_of_its_own, PROMPTS),
        (Own().another_on_the_line, PROMPTS),
        (Own().in_words, PROMPTS),
        (its_own_beside_a_model, PROMPTS),
        (lambda models: models.nothing(BATCH), PROMPTS),
        # Asked for and not there would be no mistake of the algorithm
        (lambda models: models.critic(BATCH), Needs(DataKind.prompts, critic=True)),
    ],
)
def test_another_mistake_stays_what_it_is(use: Callable[[Any], Any], needs: Needs) -> None:
    with pytest.raises((TypeError, AttributeError)), absent_models_named(Mine(asked=needs)):
        use(Models(policy=None))
