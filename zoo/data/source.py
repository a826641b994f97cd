"""Where batches come from when the data exist already: examples, pairs, labelled rows."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from zoo.batch import Batch, collate, row_key
from zoo.distributed import rank, world_size
from zoo.rollout.order import Order
from zoo.rollout.source import RowText, Sampled
from zoo.types import Completion, Prompt


@dataclass(frozen=True)
class Group:
    """One group of rows that share a prompt: a pair (chosen, rejected), a ranking, one example."""

    prompt: Prompt
    completions: tuple[tuple[int, ...], ...]  # G lists of token ids
    texts: tuple[str, ...]
    labels: tuple[float, ...] = ()  # labelled rows: 1 desirable, 0 not; ranked ones: their order
    strengths: tuple[float, ...] = ()  # how strongly ranked rows are preferred, where data say so
    present: tuple[bool, ...] = ()  # False: a place without an output; (): all are there

    def row_keys(self) -> list[int]:
        start = len(self.prompt.token_ids)
        return [row_key([*self.prompt.token_ids, *c], start) for c in self.completions]


def groups_hash(groups: Iterable[Group]) -> str:
    """Of token ids, labels and strengths, in order."""
    digest = hashlib.blake2b(digest_size=8)
    for group in groups:
        rows = (group.prompt.token_ids, *group.completions)
        told = ([len(row) for row in rows], group.labels, group.strengths, group.present)
        digest.update(repr(told).encode())
        for row in rows:
            digest.update(array("q", row))
    return digest.hexdigest()


@dataclass
class DatasetSource:
    """Each step: the next N groups in an order that is new each epoch."""

    groups: Sequence[Group]
    groups_per_step: int
    seed: int
    pad_token_id: int
    # completion log-probs of the reference by row key; filled once, then no reference is needed
    ref_logprobs: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = Order(len(self.groups), self.seed)

    @cached_property
    def content_hash(self) -> str:
        """Of all groups: a position means nothing in other ones."""
        return groups_hash(self.groups)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.order.position, "content_hash": self.content_hash}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order.position = state["position"]

    def sync(self, policy: Any) -> None:
        """Nothing to do: the data do not depend on the policy."""

    def next(self, step: int) -> Sampled:
        places = self.order.take(self.groups_per_step)
        pieces = torch.arange(len(places)).tensor_split(world_size())
        chosen = [self.groups[places[int(i)][1]] for i in pieces[rank()]]
        batch = self.collate(chosen)
        result = Sampled(batch=batch)
        for group in chosen:
            there = group.present or (True,) * len(group.texts)
            for key, ids, text, present in zip(
                group.row_keys(), group.completions, group.texts, there, strict=True
            ):
                if not present:
                    continue
                row = Completion(text, ids, (), truncated=False)
                result.texts[key] = RowText(group.prompt, row, None, {}, "")
                result.pool.add("length/mean", len(ids))
        return result

    def fullest(self, steps: int) -> Batch:
        """The longest of the groups that `steps` steps read, as one step's batch: for metering."""
        longest = sorted(self.visited(steps), key=_longest_row, reverse=True)
        chosen = [longest[i % len(longest)] for i in range(self.groups_per_step)]
        pieces = torch.arange(len(chosen)).tensor_split(world_size())
        return self.collate([chosen[int(i)] for i in pieces[rank()]])

    def visited(self, steps: int) -> list[Group]:
        """The groups that the first `steps` steps read, each once."""
        places = range(min(steps * self.groups_per_step, len(self.groups)))
        return [self.groups[self.order.at(place)] for place in places]

    def collate(self, chosen: Sequence[Group]) -> Batch:
        size = len(chosen[0].completions)
        batch = collate(
            [g.prompt.token_ids for g in chosen for _ in range(size)],
            [c for g in chosen for c in g.completions],
            group_size=size,
            prompt_ids=[g.prompt.id for g in chosen],
            pad_token_id=self.pad_token_id,
        )
        if chosen[0].labels:
            labels = torch.tensor([label for g in chosen for label in g.labels])
            there = [there for g in chosen for there in g.present or (True,) * size]
            batch = batch.replace(rewards=labels, scored=torch.tensor(there))
        if chosen[0].strengths:
            batch = batch.with_extra(
                strength=torch.tensor([value for g in chosen for value in g.strengths])
            )
        if not self.ref_logprobs:
            return batch
        known = torch.zeros_like(batch.input_ids, dtype=torch.float32)
        for i, key in enumerate(batch.row_keys.tolist()):
            values = self.ref_logprobs[key]
            start = int(batch.prompt_lengths[i])
            known[i, start : start + len(values)] = values
        return batch.replace(ref_logprobs=known)


def _longest_row(group: Group) -> int:
    return len(group.prompt.token_ids) + max(map(len, group.completions))
