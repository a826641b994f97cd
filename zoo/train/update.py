"""One optimizer step: gradients of all micro-batches, clip, step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from zoo.algorithms.base import Algorithm, called
from zoo.batch import Batch
from zoo.config import ConfigError
from zoo.distributed import gathered, largest
from zoo.models.models import Models
from zoo.train.gradients import ALWAYS, Gradients, Trainable, global_scale
from zoo.train.metrics import Pool


@dataclass(frozen=True)
class Updated:
    """What an update did."""

    applied: bool  # False: refused because something was not finite
    reason: str  # of the refusal
    tokens: int  # trained tokens of all processes
    idle: bool = False  # every gradient was 0, so that no weight moved
    metrics: dict[str, float] = field(default_factory=dict)  # of this update, all processes
    broken: str = ""  # the only part whose gradient is not finite; none where there are several


def update(
    batch: Batch,
    algorithm: Algorithm,
    models: Models,
    trainables: dict[str, Trainable],
    *,
    max_completion_length: int,
    micro_batch_tokens: int,
    max_grad_norm: float | None,
    pool: Pool,
    step_on_zero_gradient: bool = False,
) -> Updated:
    """One optimizer step on a minibatch, the same on every process.

    The losses are divided by the sizes of the whole step, so the gradient does not depend on how
    it is cut into micro-batches or dealt to processes. A step whose loss or gradient is not finite
    is refused: weights and optimizer states stay as they were. So does, unless
    `step_on_zero_gradient`, a module whose gradient is exactly 0 (every group dead): Adam's
    momentum would move it though there was nothing to learn.

    Raises:
        ConfigError: what `losses` yields is no loss term, is none at all, or differs between
            processes.
    """
    scale = global_scale(batch, max_completion_length)
    coupled = algorithm.needs.rows_coupled
    gradients, models.gradients = models.gradients, None
    if gradients is None:
        gradients = Gradients(algorithm, trainables, max_completion_length, micro_batch_tokens)
    local = gradients.pool
    if algorithm.needs.silent_without_advantage:
        pieces = _with_advantage(batch.replace(scale=scale), micro_batch_tokens, coupled, local)
    else:
        parts = int(largest(batch.micro_batches_needed(micro_batch_tokens, coupled)))
        pieces = batch.replace(scale=scale).split(parts, coupled)
    gradients.add(pieces, lambda piece: algorithm.losses(piece, models))
    if not gradients.terms:
        raise ConfigError(
            f"{called(algorithm)}: losses yielded no LossTerm for a batch of {batch.n_rows} rows, "
            f"so nothing would be trained. {ALWAYS}"
        )
    norms = {
        name: grad_norm(trainable.module, max_grad_norm) for name, trainable in trainables.items()
    }
    broken = [name for name, norm in norms.items() if not math.isfinite(norm)]
    gradient = f"the gradient norm of the {broken[0]} is {norms[broken[0]]}" if broken else ""
    # One process's bad loss is every process's: all must refuse together. A loss tells more.
    reasons = zip(*gathered((gradients.bad, gradient)), strict=True)
    bad = next((reason for of_all in reasons for reason in of_all if reason), "")
    idle = {name: norms[name] == 0 and not step_on_zero_gradient for name in trainables}
    for name, trainable in trainables.items():
        if not bad:
            if not idle[name]:
                trainable.optimizer.step()
            pool.add(f"grad_norm/{name}", norms[name])
            pool.add(f"idle_updates/{name}", float(idle[name]))
        trainable.optimizer.zero_grad(set_to_none=True)
    seen = Pool()
    if not bad:
        for name, total in _sums(local):
            pool.add(name, *total)
            seen.add(name, *total)
    return Updated(
        applied=not bad,
        reason=bad,
        tokens=scale.tokens,
        idle=not bad and all(idle.values()),
        metrics=seen.means(),
        broken=broken[0] if len(broken) == 1 else "",
    )


def _with_advantage(batch: Batch, budget: int, coupled: bool, pool: Pool) -> list[Batch]:
    """Micro-batches of the groups that can move the policy; what was left out goes to `pool`.

    The scale keeps counting all groups, so the gradient is the same. Metrics of the loss (entropy,
    ratio) are those of the groups left. One group stays where all are silent, and as many as every
    process needs to make the same number of forward passes.
    """
    assert batch.advantages is not None
    silent = ((batch.advantages == 0) | ~batch.completion_mask).all(1)
    silent = silent.view(batch.n_groups, batch.group_size).all(1)  # [N]
    order = silent.to(torch.uint8).argsort(stable=True)
    heard = max(int((~silent).sum()), 1)
    parts = batch.select_groups(order[:heard]).trim().micro_batches_needed(budget, coupled)
    parts = int(largest(parts))
    enough = parts if coupled else math.ceil(parts / batch.group_size)
    chosen = order[: max(heard, enough)].sort().values
    kept = batch.select_groups(chosen)
    tokens = int(batch.completion_mask.sum())
    pool.add("skipped/groups", batch.n_groups - kept.n_groups, batch.n_groups)
    pool.add("skipped/tokens", tokens - int(kept.completion_mask.sum()), tokens)
    return kept.split(parts, coupled)


def _sums(local: Pool) -> Iterator[tuple[str, tuple[float, float]]]:
    """A step's pooled sums; a loss is a sum over micro-batches and counts once."""
    for name, (total, count) in local.over_processes()._totals.items():
        yield name, (total, 1.0 if name.startswith("loss/") else count)


def grad_norm(module: nn.Module, max_norm: float | None) -> float:
    """The 2-norm of a module's gradients; they are scaled down to `max_norm` where it is given."""
    parameters = [p for p in module.parameters() if p.grad is not None]
    if not parameters:
        return 0.0
    limit = math.inf if max_norm is None else max_norm
    return float(torch.nn.utils.clip_grad_norm_(parameters, limit))
