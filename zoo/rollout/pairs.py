"""Pairs and labelled rows from the start's own samples, under the budget of on-policy runs."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from zoo.data.cache import locked, written_aside
from zoo.rewards.score import PATIENCE, Patience, failures, score
from zoo.rollout.engine import Engine, Sampling
from zoo.rollout.order import Order
from zoo.types import Completion, LabelledCompletion, PreferencePair, Prompt, Reward

# Of a PairSet: its costs, and how many completions the reward left unscored.
COUNTS = ("completions", "tokens_prompt", "tokens_generated", "seconds", "unscored", "failed")


@dataclass(frozen=True)
class PairSet:
    """Pairs (or labelled rows) with their cost, which counts whether or not the cache had them."""

    pairs: list[PreferencePair]
    completions: int
    tokens_prompt: int
    tokens_generated: int
    seconds: float
    labelled: list[LabelledCompletion] = field(default_factory=list)
    unscored: int = 0  # completions without a score, those on which the reward failed included
    failed: int = 0


def pair_up(
    prompt: Prompt, completions: Sequence[Completion], scores: Sequence[float | None]
) -> Iterator[PreferencePair]:
    """Best with worst, second best with second worst, …, while their scores differ.

    Each completion is used at most once; with right and wrong answers this makes
    min(right, wrong) pairs of a prompt.
    """
    scored = [(s, i) for i, s in enumerate(scores) if s is not None and completions[i].token_ids]
    ranked = sorted(scored, key=lambda item: (-item[0], item[1]))
    for best, worst in zip(ranked, reversed(ranked), strict=True):
        if best[0] <= worst[0]:
            return
        chosen, rejected = completions[best[1]], completions[worst[1]]
        yield PreferencePair(
            prompt=prompt,
            chosen=chosen.text,
            rejected=rejected.text,
            chosen_ids=chosen.token_ids,
            rejected_ids=rejected.token_ids,
            margin=best[0] - worst[0],
        )


def label(
    prompt: Prompt, completions: Sequence[Completion], scores: Sequence[float | None]
) -> Iterator[LabelledCompletion]:
    """Every scored completion; desirable where its score is 1 or more, or above its group's mean.

    So a group of wrong answers is all undesirable and a group of right ones all desirable.
    """
    scored = [(s, i) for i, s in enumerate(scores) if s is not None and completions[i].token_ids]
    if not scored:
        return
    mean = sum(s for s, _ in scored) / len(scored)
    for score_, i in scored:
        yield LabelledCompletion(
            prompt=prompt,
            completion=completions[i].text,
            # The mean of equal scores rounds: eight of 0.7 are not above it.
            desirable=score_ >= 1 or score_ - mean > 1e-9 * max(1.0, abs(mean)),
            completion_ids=completions[i].token_ids,
        )


def gold_pair(
    prompt: Prompt,
    gold: Sequence[int],
    gold_text: str,
    completions: Sequence[Completion],
    scores: Sequence[float | None],
) -> Iterator[PreferencePair]:
    """The gold solution preferred to the worst own sample that is not right (score below 1)."""
    wrong = [(s, i) for i, s in enumerate(scores) if s is not None and s < 1]
    wrong = [(s, i) for s, i in wrong if completions[i].token_ids]
    if not wrong:
        return
    rejected = completions[min(wrong)[1]]
    yield PreferencePair(
        prompt=prompt,
        chosen=gold_text,
        rejected=rejected.text,
        chosen_ids=tuple(gold),
        rejected_ids=rejected.token_ids,
    )


def sample_pairs(
    prompts: Sequence[Prompt],
    engine: Engine,
    reward: Reward,
    *,
    completions: int,
    groups: int,
    group_size: int,
    sampling: Sampling,
    seed: int,
    gold: dict[str, tuple[tuple[int, ...], str]] | None = None,
    labels: bool = False,
    patience: Patience = PATIENCE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PairSet:
    """Sample `completions` completions, `groups` prompts at a time, and pair them by score.

    The prompts come in the order in which an on-policy run with the same seed meets them.

    Args:
        completions: the budget; a multiple of group_size is used.
        gold: prompt id → (token ids, text) of a gold solution to prefer to own samples.
        labels: label each completion by itself instead of pairing them.
        patience: how long the reward may take, and what its failure means.
    """
    order = Order(len(prompts), seed)
    budget = max(1, completions // group_size)  # prompts
    started = time.perf_counter()
    pairs: list[PreferencePair] = []
    labelled: list[LabelledCompletion] = []
    tokens_prompt = tokens_generated = unscored = failed = 0
    step = 0
    while order.position < budget:
        step += 1
        places = order.take(min(groups, budget - order.position))
        chosen = [prompts[item] for _, item in places]
        made = engine.generate(
            [p.token_ids for p in chosen],
            [str(place) for place, _ in places],
            group_size,
            replace(sampling, seed=(seed, "rollout", step)),
        )
        rows = [p for p in chosen for _ in range(group_size)]
        flat = [c for group in made for c in group]
        output = score(reward, rows, flat, patience)
        scores = output.total
        unscored += scores.count(None)
        failed += failures(output)
        for i, prompt in enumerate(chosen):
            own = slice(i * group_size, (i + 1) * group_size)
            if labels:
                labelled.extend(label(prompt, made[i], scores[own]))
            elif gold is not None and prompt.id in gold:
                ids, text = gold[prompt.id]
                pairs.extend(gold_pair(prompt, ids, text, made[i], scores[own]))
            else:
                pairs.extend(pair_up(prompt, made[i], scores[own]))
        tokens_prompt += sum(len(p.token_ids) for p in chosen)
        tokens_generated += sum(len(c.token_ids) for c in flat)
        progress(order.position, budget)
    return PairSet(
        pairs,
        order.position * group_size,
        tokens_prompt,
        tokens_generated,
        time.perf_counter() - started,
        labelled,
        unscored,
        failed,
    )


def cached_pairs(
    folder: Path, key: dict[str, object], prompts: Sequence[Prompt], make: Callable[[], PairSet]
) -> PairSet:
    """The pairs of `key` (start hash, prompts, reward, sampling, budget, seed), made once.

    Written under a lock and by rename, with a hash of the content: a damaged file is made anew, and
    so is one of another key.
    """
    text = _text(key)
    name = hashlib.blake2b(text.encode(), digest_size=10).hexdigest()
    file = folder / f"{name}.jsonl"
    with locked(file):
        found = _read(file, text, {p.id: p for p in prompts})
        if found is not None and (found.pairs or found.labelled):
            return found
        made = make()
        if made.pairs or made.labelled:  # of none the reward is at fault, and may be mended
            _write(file, made, key)
        return made


def _text(key: dict[str, object]) -> str:
    return json.dumps(key, sort_keys=True, default=str)


def _write(file: Path, made: PairSet, key: dict[str, object]) -> None:
    lines = [
        json.dumps(
            {
                "prompt_id": pair.prompt.id,
                "chosen": pair.chosen,
                "rejected": pair.rejected,
                "chosen_ids": pair.chosen_ids,
                "rejected_ids": pair.rejected_ids,
                "margin": pair.margin,
            }
        )
        for pair in made.pairs
    ]
    lines += [
        json.dumps(
            {
                "prompt_id": row.prompt.id,
                "completion": row.completion,
                "completion_ids": row.completion_ids,
                "desirable": row.desirable,
            }
        )
        for row in made.labelled
    ]
    body = "\n".join(lines)
    counts = {name: getattr(made, name) for name in COUNTS}
    head = {"key": key, **counts, "sha256": _digest(counts, body)}
    with written_aside(file) as temporary, temporary.open("w", encoding="utf-8") as out:
        out.write(json.dumps(head, default=str) + "\n" + body)
        out.flush()
        os.fsync(out.fileno())


def _read(file: Path, key: str, prompts: dict[str, Prompt]) -> PairSet | None:
    if not file.is_file():  # reading a pipe would wait for ever
        return None
    try:
        head_line, _, body = file.read_text(encoding="utf-8").partition("\n")
        head = json.loads(head_line)
        counts = {name: head[name] for name in COUNTS}
        if _digest(counts, body) != head["sha256"] or _text(head["key"]) != key:
            return None
        rows = [json.loads(line) for line in body.splitlines()]
        pairs = [
            PreferencePair(
                prompt=prompts[row["prompt_id"]],
                chosen=row["chosen"],
                rejected=row["rejected"],
                chosen_ids=tuple(row["chosen_ids"]),
                rejected_ids=tuple(row["rejected_ids"]),
                margin=row["margin"],
            )
            for row in rows
            if "chosen" in row
        ]
        labelled = [
            LabelledCompletion(
                prompt=prompts[row["prompt_id"]],
                completion=row["completion"],
                desirable=row["desirable"],
                completion_ids=tuple(row["completion_ids"]),
            )
            for row in rows
            if "desirable" in row
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return PairSet(pairs, **counts, labelled=labelled)


def _digest(counts: dict[str, float], body: str) -> str:
    return hashlib.sha256((json.dumps(counts) + body).encode()).hexdigest()
