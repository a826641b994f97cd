"""Where batches come from when the policy makes them: sample, score, keep what carries signal."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from zoo.algorithms.base import called
from zoo.batch import Batch, collate
from zoo.config import ConfigError
from zoo.distributed import gathered, rank, world_size
from zoo.functional import dead_groups
from zoo.rewards.check import reason_name
from zoo.rewards.score import FAILED, PATIENCE, Patience, module_of, score
from zoo.rollout.engine import Engine, Sampling
from zoo.rollout.order import Order
from zoo.train.inputs import prompts_hash
from zoo.train.metrics import Pool
from zoo.types import Completion, Prompt, Reward, RewardOutput

RIGHT = ("matched", "passed")  # reasons of rewards for a right answer


@dataclass(frozen=True)
class RowText:
    """What a person reads about a row; kept by row key, beside the tensors."""

    prompt: Prompt
    completion: Completion
    total: float | None
    components: dict[str, float | None]
    reason: str


@dataclass
class Sampled:
    """One step's rollouts."""

    batch: Batch | None  # None: no group passed
    texts: dict[int, RowText] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)  # of all rows that have one, kept or not
    pool: Pool = field(default_factory=Pool)  # reward/*, reason/*, length, truncated, groups/*
    tokens_prompt: int = 0  # of this process
    tokens_generated: int = 0
    tokens_wasted: int = 0  # generated in groups that taught nothing
    completions: int = 0


class RolloutSource:
    """Each step: N prompts × G completions of the current policy, scored.

    It samples until N groups pass `keep` or `max_rounds` are over, then goes on with fewer.
    Prompts are dealt to processes as whole groups. A process with fewer groups that pass is filled
    up with groups without a token under training, so that all make the same updates and no signal
    is lost.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        engine: Engine,
        reward: Reward,
        *,
        groups: int,
        group_size: int,
        sampling: Sampling,
        seed: int,
        pad_token_id: int,
        keep: Callable[[Batch], Tensor],
        group_is_baseline: bool = True,
        max_rounds: int = 1,
        patience: Patience = PATIENCE,
        timer: Callable[[str], AbstractContextManager[Any]],
    ) -> None:
        self.prompts = prompts
        self.engine = engine
        self.reward = reward
        self.groups = groups
        self.group_size = group_size
        self.sampling = sampling
        self.seed = seed
        self.pad_token_id = pad_token_id
        self.keep = keep
        self.group_is_baseline = group_is_baseline
        self.max_rounds = max_rounds
        self.patience = patience
        self.timer = timer
        self.order = Order(len(prompts), seed)

    @cached_property
    def content_hash(self) -> str:
        """Of all prompts, in order: a position means nothing in other ones."""
        return prompts_hash(self.prompts)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.order.position, "content_hash": self.content_hash}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order.position = state["position"]

    def sync(self, policy: Any) -> None:
        self.engine.sync(policy)

    def next(self, step: int) -> Sampled:
        """The batch of a step, already filtered, on the CPU."""
        result = Sampled(batch=None)
        kept: list[Batch] = []
        first: Batch | None = None
        missing = self.groups
        for _ in range(self.max_rounds):
            batch = self._round(step, self._share(self.order.take(missing)), result)
            first = first or batch
            passed = _checked(self.keep(batch), batch, self.keep)
            if bool(passed.any()):
                kept.append(batch.select_groups(passed))
            missing = self.groups - sum(gathered(sum(b.n_groups for b in kept)))
            if missing <= 0:
                break
        assert first is not None
        result.batch = _equalized(kept, first, self.pad_token_id)
        return result

    def fullest(self, steps: int) -> Batch:
        """The largest batch that a step could bring, for metering: the longest prompts, completions
        that end at the limit, and in every group rewards of 0 and 1.

        The reward is asked only where it is a model, whose memory counts; `steps` does not matter.
        """
        longest = sorted(self.prompts, key=lambda p: len(p.token_ids), reverse=True)
        places = [(i, i % len(longest)) for i in range(self.groups)]
        prompts = [longest[item] for _, item in self._share(places)]
        groups = self.engine.generate(
            [p.token_ids for p in prompts],
            [str(i) for i in range(len(prompts))],
            self.group_size,
            replace(self.sampling_at(0), stop_token_ids=()),
        )
        completions = [c for group in groups for c in group]
        rows = [p for p in prompts for _ in range(self.group_size)]
        if module_of(self.reward) is not None:
            self.reward(rows, completions)
        rewards: list[float | None] = [float(i % 2) for i in range(len(rows))]
        scores = RewardOutput(rewards)
        return rollout_batch(prompts, completions, scores, self.group_size, self.pad_token_id)

    def _share(self, places: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """This process's part: a contiguous run of whole groups."""
        pieces = torch.arange(len(places)).tensor_split(world_size())
        return [places[int(i)] for i in pieces[rank()]]

    def _round(self, step: int, places: list[tuple[int, int]], result: Sampled) -> Batch:
        prompts = [self.prompts[item] for _, item in places]
        with self.timer("generate"):
            groups = self.engine.generate(
                [p.token_ids for p in prompts],
                [str(place) for place, _ in places],
                self.group_size,
                self.sampling_at(step),
            )
        completions = [c for group in groups for c in group]
        rows = [p for p in prompts for _ in range(self.group_size)]
        with self.timer("reward"):
            scores = score(self.reward, rows, completions, self.patience)
        batch = rollout_batch(prompts, completions, scores, self.group_size, self.pad_token_id)
        _describe(batch, rows, completions, scores, result)
        if not self.group_is_baseline:  # a critic learns from groups of equal rewards too
            result.tokens_wasted = 0
        return batch

    def sampling_at(self, step: int) -> Sampling:
        return replace(self.sampling, seed=(self.seed, "rollout", step))


def rollout_batch(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    scores: RewardOutput,
    group_size: int,
    pad_token_id: int,
) -> Batch:
    """Completions and their scores as a batch; an abstention is unscored, not 0."""
    batch = collate(
        [p.token_ids for p in prompts for _ in range(group_size)],
        [c.token_ids for c in completions],
        group_size=group_size,
        prompt_ids=[p.id for p in prompts],
        pad_token_id=pad_token_id,
        truncated=[c.truncated for c in completions],
        completion_logprobs=[c.logprobs for c in completions],
    )
    return batch.replace(
        rewards=torch.tensor([r or 0.0 for r in scores.total], dtype=torch.float32),
        scored=torch.tensor([r is not None for r in scores.total], dtype=torch.bool),
    )


def _describe(
    batch: Batch,
    rows: Sequence[Prompt],
    completions: Sequence[Completion],
    scores: RewardOutput,
    result: Sampled,
) -> None:
    """Adds a round's metrics and texts to the step's."""
    assert batch.rewards is not None
    pool = result.pool
    reasons = scores.reasons or [""] * len(rows)
    for i, (key, total) in enumerate(zip(batch.row_keys.tolist(), scores.total, strict=True)):
        parts = {name: values[i] for name, values in scores.components.items()}
        result.texts[key] = RowText(rows[i], completions[i], total, parts, reasons[i])
        pool.add("reward/abstained", float(total is None))
        pool.add("reward/failed", float(reasons[i] is FAILED))
        if total is not None:
            pool.add("reward/total", total)
            result.rewards.append(total)
        for name, value in parts.items():
            if value is not None:
                pool.add(f"reward/{name}", value)
    for reason in reasons:
        if name := reason_name(reason):
            pool.add(f"reason/{name}", 1, 0)
    pool.add("rows", len(rows), 0)
    lengths = [len(c.token_ids) for c in completions]
    for length, completion in zip(lengths, completions, strict=True):
        pool.add("entropy/sampled", -math.fsum(completion.logprobs), length)
        pool.add("length/mean", length)
        pool.add("truncated", float(completion.truncated))
    dead = dead_groups(batch.rewards, batch.group_size, scored=batch.scored)
    for name, count in _kinds_of_dead(dead.dead, reasons, scores.total, batch.group_size).items():
        pool.add(f"groups/{name}", float(count), batch.n_groups)
    pool.add("groups/dead", float(dead.dead.sum()), batch.n_groups)
    size = batch.group_size
    for index in dead.dead.nonzero().flatten().tolist():
        if len({*scores.total[index * size : (index + 1) * size]} - {None}) > 1:
            warnings.warn(
                "the rewards of a group differ by so little for their size (as 1e8 and 1e8 + 1 do) "
                "that they are equal in float32, in which training holds them: the group teaches "
                "nothing. Take from the reward what all completions get, or scale what differs.",
                stacklevel=2,
            )
    by_group = torch.tensor(lengths).view(-1, batch.group_size).sum(1)
    result.tokens_prompt += sum(len(p.token_ids) for p in rows[:: batch.group_size])
    result.tokens_generated += sum(lengths)
    result.tokens_wasted += int(by_group[dead.dead].sum())
    result.completions += len(completions)


def _kinds_of_dead(
    dead: Tensor, reasons: Sequence[str], totals: Sequence[float | None], group_size: int
) -> dict[str, int]:
    """How many dead groups are all right, all wrong, tied in between, or without any score.

    Right is what the reward calls `matched` (or `passed`); without reasons, a score of 1 or more
    is right and one of 0 or less wrong. So a shaped reward that pays every wrong answer of a group
    alike leaves an all-wrong group, not a tied one.
    """
    counts = {"all_right": 0, "all_wrong": 0, "tied": 0, "unscored": 0}
    for index in dead.nonzero().flatten().tolist():
        own = range(index * group_size, (index + 1) * group_size)
        judged = [(reasons[i], total) for i in own if (total := totals[i]) is not None]
        if not judged:
            counts["unscored"] += 1
            continue
        right = [r in RIGHT if r else total >= 1 for r, total in judged]
        wrong = [r not in RIGHT if r else total <= 0 for r, total in judged]
        kind = "all_right" if all(right) else "all_wrong" if all(wrong) else "tied"
        counts[kind] += 1
    return counts


def _checked(passed: Any, batch: Batch, keep: Callable[[Batch], Tensor]) -> Tensor:
    """What `keep` returned, if it says of each group whether it stays.

    Raises:
        ConfigError: anything else; an index would silently be another choice of groups.
    """
    groups = batch.n_groups
    right = isinstance(passed, Tensor) and passed.dtype == torch.bool and passed.shape == (groups,)
    if not right:
        found = f"{passed.dtype} {list(passed.shape)}" if isinstance(passed, Tensor) else passed
        raise ConfigError(
            f"{called(getattr(keep, '__self__', keep))}: keep must return a bool tensor "
            f"[{groups}], one for each group, got {found!s:.80}. Compare rewards, as in "
            "rewards.view(batch.n_groups, -1).max(1).values > 0."
        )
    return passed


def _equalized(kept: list[Batch], drawn: Batch, pad_token_id: int) -> Batch | None:
    """The rounds joined, and filled up to the largest group count of any process.

    What fills up is taken from `drawn`, without a token under training and without a score: it
    counts in no denominator, moves nothing, and keeps the processes in step.
    """
    mine = sum(batch.n_groups for batch in kept)
    short = max(gathered(mine)) - mine
    if short:
        silent = drawn.select_groups([i % drawn.n_groups for i in range(short)])
        nothing = torch.zeros_like(silent.truncated)
        mask = torch.zeros_like(silent.completion_mask)
        kept = [*kept, silent.replace(completion_mask=mask, scored=nothing)]
    if not kept:
        return None
    return kept[0] if len(kept) == 1 else concatenate(kept, pad_token_id)


def concatenate(batches: Sequence[Batch], pad_token_id: int = 0) -> Batch:
    """Batches with the same fields, padded to one width and joined."""
    width = max(b.input_ids.shape[1] for b in batches)

    def joined(values: list[Tensor], name: str = "") -> Tensor:
        wide = all(
            v.dim() == 2 and v.shape[1] == b.input_ids.shape[1]
            for v, b in zip(values, batches, strict=True)
        )
        if not wide:
            return torch.cat(values)
        fill = pad_token_id if name == "input_ids" else 0
        return torch.cat(
            [torch.nn.functional.pad(v, (0, width - v.shape[1]), value=fill) for v in values]
        )

    names = [n for n, _ in batches[0]._tensors() if not n.startswith("extra[")]
    extra = {n: joined([b.extra[n] for b in batches]) for n in batches[0].extra}
    return batches[0].replace(
        **{name: joined([getattr(b, name) for b in batches], name) for name in names},
        extra=extra,
        prompt_ids=tuple(p for b in batches for p in b.prompt_ids),
    )
