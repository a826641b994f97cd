"""Rewards that go wrong, for reward.fn, and an algorithm that does."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import time
from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar

import pytest
import torch

from zoo.algorithms.base import Algorithm, DataKind, Needs
from zoo.algorithms.grpo import GRPO
from zoo.data.arithmetic import Arithmetic


def coins(completions, completion_ids):
    return [float(sum(ids) % 2) for ids in completion_ids]


def raises(completions):
    raise KeyError("no such column")


def leaves(completions):
    sys.exit(0)


def ends_the_process(completions):
    os._exit(0)


def interrupts_itself(completions):
    raise KeyboardInterrupt("of its own")


def is_cancelled(completions):
    raise asyncio.CancelledError


def fails_a_test(completions):
    pytest.fail("as a test would")


def has_a_page_to_say(completions):
    raise OSError("502 Bad Gateway\n" + "<p>line</p>\n" * 400 + "x" * 15_000)


def has_no_text_for_a_file(completions):
    raise ValueError("bad \ud800 text")


class Wordless(Exception):
    def __str__(self):
        raise KeyError("not even this")


def has_no_words(completions):
    raise Wordless


def hangs(completions):
    while True:
        with contextlib.suppress(Exception):  # would swallow an alarm of an ordinary exception
            time.sleep(60)


def hangs_on_an_even_first_token(completions, completion_ids):
    while any(ids[0] % 2 == 0 for ids in completion_ids):
        time.sleep(0.01)
    return coins(completions, completion_ids)


def one_too_few(completions):
    return [1.0] * (len(completions) - 1)


def strings(completions):
    return ["1"] * len(completions)


def not_a_number(completions):
    return [float("nan")] * len(completions)


def beyond_float32(completions):
    return [1e39] * len(completions)


def nothing(completions):
    return None


def abstains(completions):
    return [None] * len(completions)


def wants_more(completions, teacher):
    return [1.0] * len(completions)


def alike(completions):
    return [0.7] * len(completions)


_ROUNDS = count()


def alike_at_first(completions, completion_ids):
    return alike(completions) if next(_ROUNDS) == 0 else coins(completions, completion_ids)


def half_alike(completions):
    return [0.7 if i % 2 else None for i in range(len(completions))]


def fails_on_process_one(completions):
    if os.environ.get("RANK") == "1":
        raise ZeroDivisionError("a fault of process 1 alone")
    return [1.0] * len(completions)


# Of the first six prompts of a small run with seed 0, the first process of two has the first, the
# second and the fifth.
OF_THE_FIRST = {
    "A/unpack/5-7-18/Paul/Tina/pens",
    "A/more/10-5/Gina/Mia/coins",
    "A/boxes/7-2-12/Leo/Finn/marbles",
}


def signal_for_the_first_process(completions, prompt_ids):
    return [float(prompt in OF_THE_FIRST and i % 2) for i, prompt in enumerate(prompt_ids)]


class Stranger:
    """A reward of somebody else, as a class: `what` says how it goes wrong."""

    def __init__(self, what: str = "coins"):
        self.what = what

    def __call__(self, prompts, completions):
        from zoo.types import RewardOutput

        scores = coins([c.text for c in completions], [c.token_ids for c in completions])
        if self.what == "nothing":
            return None
        if self.what == "a list":
            return scores
        if self.what == "raises on even" and any(c.token_ids[0] % 2 == 0 for c in completions):
            raise KeyError("no such column")
        if self.what == "hangs on even":
            hangs_on_an_even_first_token(None, [c.token_ids for c in completions])
        if self.what == "hangs":
            hangs(completions)
        if self.what == "leaves":
            sys.exit(0)
        changed = {"strings": "1", "not a number": float("nan"), "infinite": float("inf")}
        if self.what in changed:
            scores[-1] = changed[self.what]
        if self.what == "one too few":
            scores.pop()
        reasons = [1] if self.what == "reasons" else []
        components = {"mine": scores[1:]} if self.what == "components" else {}
        return RewardOutput(scores, components, reasons)


@dataclass(frozen=True)
class SilentOnProcessOne(GRPO):
    """An algorithm of somebody else that has nothing to say about some batches."""

    name: ClassVar[str] = "silent_on_one"

    def losses(self, batch, models):
        if os.environ.get("RANK") != "1":
            yield from super().losses(batch, models)


@dataclass(frozen=True)
class InfiniteOnProcessOne(GRPO):
    """A loss that is infinite on one process, with a gradient that is finite on all."""

    name: ClassVar[str] = "infinite_on_one"

    def losses(self, batch, models):
        for term in super().losses(batch, models):
            more = math.inf if os.environ.get("RANK") == "1" else 0.0
            yield replace(term, loss=term.loss + more)


@dataclass(frozen=True)
class NaNOnProcessOne(GRPO):
    """An advantage that is no number in each group of one process, and so the gradient on all."""

    name: ClassVar[str] = "nan_on_one"

    def prepare(self, batch, models):
        batch = super().prepare(batch, models)
        if os.environ.get("RANK") == "1":
            advantages = batch.advantages.clone()
            advantages[1 :: batch.group_size] = math.nan
            batch = batch.replace(advantages=advantages)
        return batch


@dataclass(frozen=True)
class EnoughOnProcessOne(GRPO):
    """One pass for a process by itself and for the second of two, three for the first."""

    epochs: int = 3
    name: ClassVar[str] = "enough_on_one"

    def enough(self, metrics):
        return os.environ.get("RANK") != "0"


@dataclass(frozen=True)
class InAnotherOrderOnProcessOne(Arithmetic):
    """As what is taken from a set comes in an order of each process's own."""

    def prompts(self):
        found = super().prompts()
        return found[::-1] if os.environ.get("RANK") == "1" else found


@dataclass(frozen=True)
class Lost(Arithmetic):
    """Data whose own code fails."""

    def prompts(self):
        raise FileNotFoundError("no-such-file.txt")


@dataclass(frozen=True)
class GoldsInLists(Arithmetic):
    """Golds that no verifier reads, of the training problems or of those held out."""

    heldout: bool = False

    def prompts(self):
        return super().prompts() if self.heldout else [*map(in_a_list, super().prompts())]

    def evaluation_sets(self):
        one, *rest = super().evaluation_sets()
        made = tuple(map(in_a_list, one.prompts)) if self.heldout else one.prompts
        return [replace(one, prompts=made), *rest]


def in_a_list(prompt):
    return replace(prompt, columns={**prompt.columns, "answer": [prompt.columns["answer"]]})


@dataclass(frozen=True)
class OtherProblemsOnProcessOne(Arithmetic):
    def evaluation_sets(self):
        one, *rest = super().evaluation_sets()
        turned = one.prompts[::-1] if os.environ.get("RANK") == "1" else one.prompts
        return [replace(one, prompts=turned), *rest]


@dataclass(frozen=True)
class OneArgument(GRPO):
    """`losses` without the models."""

    def losses(self, batch):  # pyright: ignore
        return ()


@dataclass(frozen=True)
class AsAProperty(GRPO):
    """`losses` that cannot be called, and cannot be read either."""

    @property
    def losses(self):
        raise KeyError("batch")


@dataclass(frozen=True)
class OfAnyArguments(GRPO):
    """Verbs that pass on what they are given, as a decorator's do."""

    def losses(self, *given, **named):
        return super().losses(*given, **named)


@dataclass(frozen=True)
class Misspelt(Algorithm):
    """`loss` where `losses` is called."""

    @property
    def needs(self):
        return Needs(DataKind.prompts)

    def loss(self, batch, models):
        return ()


@dataclass(frozen=True)
class Strange(GRPO):
    """An algorithm of somebody else: `what` says how it goes wrong."""

    what: str = ""
    name: ClassVar[str] = "strange"

    @property
    def needs(self):
        if self.what == "no needs":
            return Algorithm.needs.__get__(self)
        if self.what == "needs that raise":
            return self.no_such_setting
        return super().needs

    def prepare(self, batch, models):
        batch = super().prepare(batch, models)
        changed = {
            "a row's": {"advantages": batch.rewards},
            "a list": {"values": [0.0]},
            "none": {"advantages": None},
            "integers": {"advantages": batch.advantages.long()},
        }
        return None if self.what == "nothing" else batch.replace(**changed.get(self.what, {}))

    def losses(self, batch, models):
        if self.what in ("reference", "critic"):
            if self.what == "critic":
                models.critic(batch)
            models.reference(batch)
        if self.what == "log-probs":
            models.reference_logprobs(batch)
        if self.what == "values":
            models.critic_values(batch)
        if self.what == "learns late":
            models.learn(batch, lambda piece: None)
        yield from super().losses(batch, models)

    def enough(self, metrics):
        if self.what == "enough that raises":
            return metrics["nowhere"]
        return self.what == "several answers" and torch.ones(2)
