"""How good a reward model is: whom it prefers, in pairs that it was not trained on."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zoo.batch import Batch
from zoo.config import ConfigError
from zoo.data.rows import side_digests
from zoo.data.source import Group
from zoo.distributed import gathered, rank, world_size
from zoo.evaluate.evaluator import Evaluated, Progress, prompt_text
from zoo.functional import bradley_terry_ranked, ranked_pairs
from zoo.models.reward_model import RewardModel
from zoo.train.inputs import problem_hash

SET = "heldout_pairs"


@dataclass
class PreferenceEvaluator:
    """Accuracy on held-out pairs, the margin between them, and the spread of the scores.

    Each group counts once, however many pairs of unequal rank it holds. Groups are dealt to
    processes and each is counted once; nothing is random.
    """

    groups: Sequence[Group]
    collate: Callable[[Sequence[Group]], Batch]
    micro_batch_tokens: int = 8192
    texts_written: int = 16
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sets: tuple[()] = ()  # of problems: there are none

    def evaluate(
        self, model: RewardModel, *, progress: Callable[[str, int], Progress] | None = None
    ) -> list[Evaluated]:
        """The set `heldout_pairs`; the model keeps mean and deviation of its scores."""
        started = time.perf_counter()
        if not self.groups:
            return []
        advance = progress(SET, len(self.groups)) if progress else lambda n: None
        mine = sorted(
            range(rank(), len(self.groups), world_size()), key=lambda i: self._width(self.groups[i])
        )
        rows: list[dict[str, Any]] = []
        for part in self._parts(mine):
            rows += self._judge(model, part)
            advance(len(part) * world_size())
        rows = sorted((row for part in gathered(rows) for row in part), key=lambda r: r["index"])
        record = _summary(rows)
        model.remember(record["score_mean"], record["score_std"] or 1.0)
        record = {"set": SET, "kind": "preferences", **record}
        record["seconds"] = time.perf_counter() - started
        return [Evaluated(record, [text for row in rows for text in row["texts"]])]

    def _width(self, group: Group) -> int:
        return len(group.prompt.token_ids) + max(map(len, group.completions))

    def _parts(self, indices: Sequence[int]) -> list[list[int]]:
        """Indices in order, in micro-batches."""
        parts: list[list[int]] = []
        for index in indices:
            group = self.groups[index]
            tokens = self._width(group) * len(group.completions)
            if not parts or tokens * (len(parts[-1]) + 1) > self.micro_batch_tokens:
                parts.append([])
            parts[-1].append(index)
        return parts

    @torch.no_grad()
    def _judge(self, model: RewardModel, indices: Sequence[int]) -> list[dict[str, Any]]:
        groups = [self.groups[i] for i in indices]
        batch = self.collate(groups).to(self.device)
        shape = (len(groups), batch.group_size)
        assert batch.rewards is not None and batch.scored is not None
        scores = model(batch).view(shape).cpu()
        order, present = batch.rewards.view(shape).cpu(), batch.scored.view(shape).cpu()
        wins = ranked_pairs(-order, present)
        lead = scores[:, :, None] - scores[:, None, :]
        loss = bradley_terry_ranked(scores, -order, present=present)
        return [
            {
                "index": index,
                "problem_id": groups[k].prompt.id,
                "problem_hash": problem_hash(groups[k].prompt, groups[k].texts, groups[k].labels),
                "leads": lead[k][wins[k]].tolist(),
                "nll": float(loss[k]),
                "scores": scores[k][present[k]].tolist(),
                "texts": self._texts(groups[k], scores[k], order[k], index),
            }
            for k, index in enumerate(indices)
        ]

    def _texts(
        self, group: Group, scores: Tensor, order: Tensor, index: int
    ) -> list[dict[str, Any]]:
        if index >= self.texts_written:
            return []
        there = group.present or (True,) * len(group.texts)
        return [
            {
                "set": SET,
                "prompt_id": group.prompt.id,
                "prompt": prompt_text(group.prompt),
                "answer": None,
                "temperature": None,
                "text": text,
                "score": float(scores[i]),
                "reason": f"preference {float(order[i]):g}",
            }
            for i, text in enumerate(group.texts)
            if there[i]
        ]


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    outcomes = [[int(lead > 0) for lead in row["leads"]] for row in rows]
    scores = [score for row in rows for score in row["scores"]]
    mean = math.fsum(scores) / len(scores)
    variance = math.fsum((s - mean) ** 2 for s in scores) / max(len(scores) - 1, 1)
    return {
        "accuracy": _mean([_mean(row) for row in outcomes]),
        "margin": _mean([_mean(row["leads"]) for row in rows]),
        "nll": _mean([row["nll"] for row in rows]),
        "score_mean": mean,
        "score_std": math.sqrt(variance),
        "n_problems": len(rows),
        "n_pairs": sum(map(len, outcomes)),
        "problem_ids": _unique([row["problem_id"] for row in rows]),
        "problem_hashes": [row["problem_hash"] for row in rows],
        "outcomes": outcomes,
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _unique(names: Sequence[str]) -> list[str]:
    """Several pairs of one prompt are told apart by a number."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result


def held_out(groups: Sequence[Group], share: float) -> tuple[list[Group], list[Group]]:
    """Groups to train on, and groups to judge by: ⌈share · prompts⌉ prompts with all they have.

    What is there several times, as of a mixture's small parts, is judged once. Which prompts
    depends on what they say alone, so neither the order of the rows nor the seed moves one to the
    other side.

    Raises:
        ConfigError: nothing would be left to train on.
    """
    digests = side_digests([group.prompt for group in groups])
    by_hash = sorted(set(digests))
    judged = set(by_hash[: math.ceil(share * len(by_hash))])
    if len(judged) == len(by_hash):
        raise ConfigError(
            f"evaluate.heldout_pairs={share} of {len(by_hash)} prompts leaves none to train on. "
            "Give data with more prompts, or evaluate.heldout_pairs=0 to judge by none."
        )
    train: list[Group] = []
    held: dict[Any, Group] = {}  # by all that they say
    for group, digest in zip(groups, digests, strict=True):
        if digest in judged:
            asked, rows = group.prompt, (group.completions, group.texts)
            told = (asked.id, asked.token_ids, rows, group.labels, group.strengths)
            held.setdefault(told, group)
        else:
            train.append(group)
    return train, list(held.values())
