"""Rewards that go wrong, for reward.fn."""

from __future__ import annotations

import contextlib
import os
import sys
import time


def coins(completions, completion_ids):
    return [float(sum(ids) % 2) for ids in completion_ids]


def raises(completions):
    raise KeyError("no such column")


def leaves(completions):
    sys.exit(0)


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


def fails_on_process_one(completions):
    if os.environ.get("RANK") == "1":
        raise ZeroDivisionError("a fault of process 1 alone")
    return [1.0] * len(completions)


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
