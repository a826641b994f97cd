"""One optimizer step: micro-batches, one backward for each loss term, clip, step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zoo.algorithms.base import Algorithm, LossTerm, called
from zoo.batch import Batch, Scale
from zoo.config import ConfigError
from zoo.distributed import gathered, largest, world_size
from zoo.models.models import Models
from zoo.train.metrics import Pool

# The names that a step's line in metrics.jsonl has of zoo's own.
RESERVED = {
    "step", "updates", "time", "nonfinite", "rows", "truncated", "completions",
    "completions_total", "skipped_updates", "empty_batch", "stopped_early", "flops",
    "tokens_per_second",
}  # fmt: skip
RESERVED_BEGINNINGS = (
    "lr/", "loss/", "grad_norm/", "idle_updates/", "skipped/", "reward/", "reason/", "length/",
    "groups/", "tokens/", "seconds/", "state/", "memory/", "warnings/",
)  # fmt: skip
AS_IN = 'Write `yield LossTerm("policy", loss, {"entropy": (sum, count)})`.'
ALWAYS = (
    "Yield the same terms for every batch; where there is nothing to learn, one of 0, such as "
    "(out.logprobs * 0).sum()."
)


@dataclass
class Trainable:
    """A module under training with its optimizer, both prepared by accelerate."""

    module: nn.Module
    optimizer: Any
    lr: float


@dataclass(frozen=True)
class Updated:
    """What an update did."""

    applied: bool  # False: refused because something was not finite
    reason: str  # of the refusal
    tokens: int  # trained tokens of all processes
    metrics: dict[str, float] = field(default_factory=dict)  # of this update, all processes


def global_scale(batch: Batch, max_completion_length: int) -> Scale:
    """The sizes of the optimizer step, summed over processes."""
    mine = batch.local_scale(max_completion_length)
    parts = gathered((mine.tokens, mine.sequences, mine.groups))
    tokens, sequences, groups = (sum(column) for column in zip(*parts, strict=True))
    return Scale(tokens, sequences, groups, max_completion_length)


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
    local = Pool()
    if algorithm.needs.silent_without_advantage:
        pieces = _with_advantage(batch.replace(scale=scale), micro_batch_tokens, coupled, local)
    else:
        parts = int(largest(batch.micro_batches_needed(micro_batch_tokens, coupled)))
        pieces = batch.replace(scale=scale).split(parts, coupled)
    bad, terms = "", 0
    for index, piece in enumerate(pieces):
        last = index == len(pieces) - 1
        with contextlib.ExitStack() as stack:
            if not last:
                for trainable in trainables.values():
                    if hasattr(trainable.module, "no_sync"):
                        stack.enter_context(trainable.module.no_sync())  # pyright: ignore
            for term in _terms(algorithm, piece, models, together=last):
                terms += 1
                value = float(term.loss.detach())
                if not math.isfinite(value):
                    bad = bad or f"loss/{term.name} is {value}"
                # DDP averages over processes; we divided by global sizes, so undo the average.
                (term.loss * world_size()).backward()
                local.add(f"loss/{term.name}", value, 0)
                local.add_all(term.metrics)
    if not terms:
        raise ConfigError(
            f"{called(algorithm)}: losses yielded no LossTerm for a batch of {batch.n_rows} rows, "
            f"so nothing would be trained. {ALWAYS}"
        )
    norms = {}
    for name, trainable in trainables.items():
        norms[name] = grad_norm(trainable.module, max_grad_norm)
        if not math.isfinite(norms[name]):
            bad = bad or f"the gradient norm of the {name} is {norms[name]}"
    # One process's bad loss is every process's: all must refuse together.
    bad = next((reason for reason in gathered(bad) if reason), "")
    for name, trainable in trainables.items():
        if not bad:
            idle = norms[name] == 0 and not step_on_zero_gradient
            if not idle:
                trainable.optimizer.step()
            pool.add(f"grad_norm/{name}", norms[name])
            pool.add(f"idle_updates/{name}", float(idle))
        trainable.optimizer.zero_grad(set_to_none=True)
    seen = Pool()
    if not bad:
        for name, total in _sums(local):
            pool.add(name, *total)
            seen.add(name, *total)
    return Updated(applied=not bad, reason=bad, tokens=scale.tokens, metrics=seen.means())


def _terms(
    algorithm: Algorithm, piece: Batch, models: Models, *, together: bool
) -> Iterator[LossTerm]:
    """What `losses` yields, checked.

    `together`: the gradient of this micro-batch is shared. A process that had a term less would
    never come to that, and the others would wait for it, so the names are compared before.
    """
    yielded = algorithm.losses(piece, models)
    if not isinstance(yielded, Iterable) or isinstance(yielded, Tensor):
        raise ConfigError(
            f"{called(algorithm)}: losses must yield LossTerms, and returned "
            f"{type(yielded).__name__}. {AS_IN}"
        )
    terms = iter(yielded)
    while True:
        term = next(terms, None)
        if term is not None:
            _check_term(algorithm, term)
        if together:
            names = gathered(term.name if term is not None else "")
            if len(set(names)) > 1:
                told = ", ".join(f"rank {i} {name or 'none'}" for i, name in enumerate(names))
                raise ConfigError(
                    f"{called(algorithm)}: the processes' losses yielded different terms ({told}), "
                    f"so their gradients cannot be shared. {ALWAYS}"
                )
        if term is None:
            return
        yield term


def _check_term(algorithm: Algorithm, term: Any) -> None:
    """Refuse what is no term, has no gradient, or carries metrics that cannot be kept."""

    def refuse(what: str, found: object) -> NoReturn:
        shown = " ".join(str(found).split())[:80]
        raise ConfigError(f"{called(algorithm)}: {what}, got {shown}. {AS_IN}")

    if not isinstance(term, LossTerm):
        refuse("losses must yield LossTerms", type(term).__name__)
    where = f"the loss of the term {term.name!r}"
    if not isinstance(term.loss, Tensor) or term.loss.dim():
        refuse(f"{where} must be a scalar tensor", getattr(term.loss, "shape", term.loss))
    if not term.loss.requires_grad:
        refuse(f"{where} must depend on a module under training", "a constant")
    if not isinstance(term.metrics, Mapping):
        refuse("metrics must be a mapping {name: (sum, count)}", term.metrics)
    for name, parts in term.metrics.items():
        if str(name) in RESERVED or str(name).startswith(RESERVED_BEGINNINGS):
            raise ConfigError(
                f"{called(algorithm)}: the metric {name!r} is the name of one of zoo's own, which "
                f"would be overwritten. Choose another, such as {algorithm.name or 'mine'}/{name}."
            )
        pair = isinstance(parts, tuple | list) and len(parts) == 2
        if not pair or not all(_is_number(part) for part in parts):
            refuse(f"the metric {name!r} must be (sum, count), two numbers", parts)


def _is_number(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


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
