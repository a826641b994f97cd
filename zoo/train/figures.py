"""The numbers of a step: rewards, values, operations, bytes, and rows to read."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zoo.build import Run
from zoo.evaluate.evaluator import prompt_text
from zoo.measure.cost import ModelCost
from zoo.measure.memory import COPIES, component_bytes, storage_key
from zoo.rewards.check import REASONS
from zoo.rewards.score import module_of
from zoo.rollout.source import RowText, Sampled
from zoo.train.metrics import Pool

OTHER, TIMEOUT = "reason/other", "reason/timeout"
SAMPLER = f"sampler/{COPIES}"  # the label of what the engine decodes with, where it is its own


def reward_metrics(seen: Pool, rewards: Sequence[float], reasons: list[str]) -> dict[str, float]:
    """Means, the rewards' deviation, and each reason's share of the rows.

    The first `REASONS` reasons of a run have a metric each, the others `reason/other` together: a
    reward whose reasons quote completions has as many as rows.

    Args:
        rewards: of all rows of the step that have one.
        reasons: those with a metric so far, to which new ones are added.
    """
    means = seen.means()
    rows = max(seen.sum("rows"), 1)
    if rewards:
        # Exact: E[r²] − E[r]² of equal rewards is what rounding makes of it.
        means["reward/std"] = statistics.pstdev(rewards)
    found = [name for name in seen._totals if name.startswith("reason/")]
    for name in sorted(found, key=lambda name: (-seen.sum(name), name)):
        if name not in reasons and name != TIMEOUT:  # of which the run warns
            if len(reasons) < REASONS:
                reasons.append(name)
            else:
                means[OTHER] = means.get(OTHER, 0.0) + seen.sum(name) / rows
                continue
        means[name] = means.get(name, 0.0) + seen.sum(name) / rows
    for name in ("reward/abstained", "reward/failed"):
        if not means.get(name, 1.0):
            means.pop(name)
    return means


def value_metrics(means: dict[str, float]) -> dict[str, float]:
    """An update's means, with the critic's explained variance 1 − E(V − R̂)²/Var(R̂).

    A reward model's scores get their standard deviation.
    """
    if "score_squared" in means:
        means["score_std"] = math.sqrt(_variance(means.pop("score_squared"), means["score"]))
    if "return_squared" in means:
        variance = _variance(means.pop("return_squared"), means["return"])
        if variance > 0:
            means["explained_variance"] = 1 - means["value_error"] / variance
    return means


def _variance(squared: float, mean: float) -> float:
    """E[x²] − E[x]² of float32 sums, 0 where their rounding is all that there is."""
    variance = squared - mean**2
    return variance if variance > 1e-6 * squared else 0.0


def components(run: Run) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
    """The modules and the optimizers of a run by component.

    Besides the roles of `Models`: `scorer`, the model of a learned reward.
    """
    roles = ("policy", "critic", "reference", "reward_model")
    modules: dict[str, Any] = {role: getattr(run.models, role) for role in roles}
    modules["scorer"] = module_of(run.config.reward)
    optimizers = {
        # accelerate wraps optimizers; the states are the inner one's
        name: getattr(trainable.optimizer, "optimizer", trainable.optimizer)
        for name, trainable in run.trainables.items()
    }
    return {name: module for name, module in modules.items() if module is not None}, optimizers


def sampler_copies(run: Run) -> list[Tensor]:
    """The sampler's own copies of the policy's weights (`rollout.dtype`)."""
    held = getattr(run.engine, "copies", None)
    return [] if held is None else held()


def bytes_by_component(run: Run) -> dict[str, dict[str, int]]:
    """Bytes of parameters, gradients, optimizer states and copies of every loaded model.

    Gradients are freed after each update; while one lasts each trained weight has one.
    """
    modules, optimizers = components(run)
    found = component_bytes(modules, optimizers)
    for name, module in modules.items():
        if name in run.trainables:
            trained = [p for p in module.parameters() if p.requires_grad]
            found[name]["gradients"] = sum(p.numel() * p.element_size() for p in trained)
    held = [copy.untyped_storage() for copy in sampler_copies(run)]
    copies = {storage_key(storage): storage.nbytes() for storage in held}
    if copies:
        component, kind = SAMPLER.split("/")
        found[component] = {kind: sum(copies.values())}
    return found


def step_flops(run: Run, costs: Mapping[str, ModelCost], sampled: Sampled) -> float:
    """Estimated operations of this process's step: sampling, scoring passes, training."""
    batch = sampled.batch
    if batch is None:
        return 0.0
    lengths = batch.lengths.tolist()
    new = batch.completion_lengths.tolist()
    policy = costs["policy"]
    algorithm, models = run.algorithm, run.models
    passes = algorithm.epochs
    total = 0.0
    if "reward_model" in algorithm.needs.trains:
        scorer = costs["reward_model"]
        rows = len(lengths)
        total += passes * (scorer.forward(lengths, rows) + scorer.backward(lengths, rows))
        if "policy" not in algorithm.needs.trains:
            return total
    if sampled.tokens_generated:
        prompts = batch.prompt_lengths.tolist()[:: batch.group_size]
        total += policy.generate(prompts, new, batch.group_size)
    forward = policy.forward(lengths, sum(new))
    total += passes * (forward + policy.backward(lengths, sum(new)))
    total += forward * (batch.old_logprobs is not None)
    total += forward * (models.reference is not None)
    if "scorer" in costs and sampled.tokens_generated:  # by the policy's count of tokens
        total += costs["scorer"].forward(lengths, len(lengths))
    if "critic" in costs:
        critic = costs["critic"]
        total += (passes + 1) * critic.forward(lengths) + passes * critic.backward(lengths)
    return total


def rollout_rows(run: Run, sampled: Sampled, count: int, version: int) -> Iterator[dict[str, Any]]:
    """`count` rows of a step for rollouts.jsonl, spread over its groups."""
    batch = sampled.batch
    assert batch is not None and batch.rewards is not None
    # A ranking shorter than the longest is filled up with rows that hold nothing.
    rows = [i for i, key in enumerate(batch.row_keys.tolist()) if key in sampled.texts]
    spread = torch.linspace(0, len(rows) - 1, min(count, len(rows))).long().tolist()
    for i in (rows[place] for place in spread):
        text: RowText = sampled.texts[int(batch.row_keys[i])]
        mask = batch.completion_mask[i]
        advantage = None
        if batch.advantages is not None and bool(mask.any()):
            advantage = float(batch.advantages[i][mask].mean())
        yield {
            "prompt_id": text.prompt.id,
            "prompt": prompt_text(text.prompt),
            "answer": text.prompt.columns.get("answer"),
            "text": text.completion.text,
            "token_ids": list(text.completion.token_ids),
            "reward": text.total,
            "rewards": text.components,
            "reason": text.reason,
            "advantage": advantage,
            "logprob": sum(text.completion.logprobs),
            "length": len(text.completion.token_ids),
            "truncated": text.completion.truncated,
            "seed": run.config.seed,
            "policy_version": version,
        }
