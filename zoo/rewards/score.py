"""Ask a reward, and trust nothing that it says."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.config import ConfigError, OnError
from zoo.rewards.check import RewardError, check_output
from zoo.rewards.deadline import LateError, within
from zoo.types import Completion, Prompt, Reward, RewardOutput

FAILED = "failed"  # reason of a row whose reward failed and was let off


@dataclass(frozen=True)
class Patience:
    """How long a reward may take, and what becomes of rows on which it fails."""

    seconds: float | None = 1800.0  # for the completions of a round together; None: for ever
    on_error: OnError = OnError.stop


PATIENCE = Patience()


def score(
    reward: Reward,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    patience: Patience = PATIENCE,
    name: str = "",
) -> RewardOutput:
    """The checked output of `reward` for B completions of B prompts.

    After a failure each row is asked about alone: to name the guilty one, or, with
    `on_error=abstain`, to keep the others; those that fail get None and the reason `failed`.

    Args:
        reward: what scores.
        prompts: [B] one a completion.
        completions: [B].
        patience: its time, and what a failure means.
        name: of the reward in messages; default: its class.
    Raises:
        RewardError: the reward raised, did not come back in time, or its output is not one number
            or None for each completion; names the reward, the row and its text.
    """
    name = name or getattr(reward, "__name__", type(reward).__name__)
    asked = _Asked(reward, list(prompts), list(completions), name, patience)
    try:
        return asked.about(0, len(completions))
    except ConfigError:
        raise
    # SystemExit too: a reward that calls exit() would otherwise end the run as if all were well.
    except (Exception, SystemExit) as error:
        stops = patience.on_error is OnError.stop
        if stops and isinstance(error, RewardError):
            raise  # it names the row
        return asked.row_by_row(error, stops)


def fingerprint(rewards: Iterable[Any]) -> str:
    """The `fingerprint()` of those that have one: of files and models that settings point at."""
    found = [one.fingerprint() for one in rewards if hasattr(one, "fingerprint")]
    return "+".join(text for text in found if text)


@dataclass(frozen=True)
class _Asked:
    reward: Reward
    prompts: list[Prompt]
    completions: list[Completion]
    name: str
    patience: Patience

    def about(self, start: int, end: int) -> RewardOutput:
        prompts, completions = self.prompts[start:end], self.completions[start:end]
        output = within(self.patience.seconds, lambda: self.reward(prompts, completions), {})
        return check_output(output, self.completions[start:end], self.name, first_row=start)

    def row_by_row(self, error: BaseException, stops: bool) -> RewardOutput:
        seconds = self.patience.seconds
        # Rows that hang cost a whole timeout each; two of them are paid for, not two hundred.
        ends = math.inf if seconds is None else time.monotonic() + 2 * seconds
        rows: list[RewardOutput] = []
        for row in range(len(self.completions)):
            if time.monotonic() >= ends:
                break
            try:
                rows.append(self.about(row, row + 1))
            except ConfigError:
                raise
            except (Exception, SystemExit) as failure:
                if stops and isinstance(failure, RewardError):
                    raise
                if stops:
                    raise RewardError(self._told(failure, row)) from failure
                rows.append(RewardOutput([None], reasons=[FAILED]))
        if stops:  # no row fails by itself: the failure comes from the rows together
            raise RewardError(self._told(error, None)) from error
        rows += [RewardOutput([None], reasons=[FAILED])] * (len(self.completions) - len(rows))
        return _joined(rows)

    def _told(self, failure: BaseException, row: int | None) -> str:
        what = f"raised {type(failure).__name__}: {failure}"
        if isinstance(failure, LateError):
            what = f"gave {failure}"
        if row is None:
            first = self.completions[0].text if self.completions else ""
            rows = f"on {len(self.completions)} rows together, the first of which is {first[:80]!r}"
        else:
            rows = (
                f"at row {row} (prompt {self.prompts[row].id}), whose text is "
                f"{self.completions[row].text[:80]!r}"
            )
        return (
            f"reward {self.name} {what} {rows}. Correct it, return None for what cannot be scored, "
            "or set train.reward_on_error=abstain."
        ) + (" train.reward_timeout is its time." if isinstance(failure, LateError) else "")


def _joined(rows: Sequence[RewardOutput]) -> RewardOutput:
    names = dict.fromkeys(name for row in rows for name in row.components)
    return RewardOutput(
        total=[value for row in rows for value in row.total],
        components={name: [row.components.get(name, [None])[0] for row in rows] for name in names},
        reasons=[row.reasons[0] if row.reasons else "" for row in rows],
    )
