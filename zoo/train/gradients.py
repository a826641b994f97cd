"""The gradients of one optimizer step: loss terms backpropagated micro-batch by micro-batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor, nn

from zoo.algorithms.base import AS_IN, Algorithm, LossTerm, called
from zoo.batch import Batch, Scale
from zoo.config import ConfigError
from zoo.distributed import gathered, largest, world_size
from zoo.models.models import joined
from zoo.train.metrics import Pool

# The names that a step's line in metrics.jsonl has of zoo's own.
RESERVED = {
    "step", "updates", "time", "nonfinite", "rows", "truncated", "completions",
    "completions_total", "skipped_updates", "empty_batch", "stopped_early", "flops",
    "tokens_per_second", "entropy/sampled",
}  # fmt: skip
RESERVED_BEGINNINGS = (
    "lr/", "loss/", "grad_norm/", "idle_updates/", "skipped/", "reward/", "reason/", "length/",
    "groups/", "tokens/", "seconds/", "state/", "memory/", "warnings/",
)  # fmt: skip
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


def global_scale(batch: Batch, max_completion_length: int) -> Scale:
    """The sizes of the optimizer step, summed over processes."""
    mine = batch.local_scale(max_completion_length)
    parts = gathered((mine.tokens, mine.sequences, mine.groups))
    tokens, sequences, groups = (sum(column) for column in zip(*parts, strict=True))
    return Scale(tokens, sequences, groups, max_completion_length)


@dataclass
class Gradients:
    """What is backpropagated for one optimizer step, in as many passes as it takes.

    The losses are divided by the sizes of the whole step, so the gradient does not depend on how
    it is cut into micro-batches or dealt to processes.
    """

    algorithm: Algorithm
    trainables: Mapping[str, Trainable]
    max_completion_length: int
    micro_batch_tokens: int
    bad: str = ""  # the first loss that was not finite
    terms: int = 0
    pool: Pool = field(default_factory=Pool)  # metrics of the terms

    def add(self, pieces: Sequence[Batch], losses: Callable[[Batch], Iterator[LossTerm]]) -> None:
        """Backpropagate what `losses` yields for each micro-batch, one term after the other.

        Raises:
            ConfigError: what it yields is no loss term, or differs between processes.
        """
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            with contextlib.ExitStack() as stack:
                if not last:
                    for trainable in self.trainables.values():
                        if hasattr(trainable.module, "no_sync"):
                            stack.enter_context(trainable.module.no_sync())  # pyright: ignore
                for term in _terms(self.algorithm, losses(piece), together=last):
                    self.terms += 1
                    value = float(term.loss.detach())
                    if not math.isfinite(value):
                        self.bad = self.bad or f"loss/{term.name} is {value}"
                    # DDP averages over processes; we divided by global sizes: undo the average.
                    (term.loss * world_size()).backward()
                    self.pool.add(f"loss/{term.name}", value, 0)
                    self.pool.add_all(term.metrics)

    def learn(
        self, batch: Batch, forward: Callable[[Batch], tuple[LossTerm, tuple[Tensor, ...]]]
    ) -> tuple[Tensor, ...]:
        """`Models.learn`: a term of each micro-batch backpropagated, its outputs joined."""
        outputs: list[tuple[Tensor, ...]] = []

        def losses(piece: Batch) -> Iterator[LossTerm]:
            term, found = forward(piece)
            outputs.append(tuple(value.detach() for value in found))
            yield term

        parts = int(largest(batch.micro_batches_needed(self.micro_batch_tokens, False)))
        scale = global_scale(batch, self.max_completion_length)
        self.add(batch.replace(scale=scale).split(parts, False), losses)
        return joined(outputs, batch.input_ids.shape[1])


def _terms(algorithm: Algorithm, yielded: Any, *, together: bool) -> Iterator[LossTerm]:
    """What `losses` yields, checked.

    `together`: the gradient of this micro-batch is shared. A process that had a term less would
    never come to that, and the others would wait for it, so the names are compared before.
    """
    if not isinstance(yielded, Iterable) or isinstance(yielded, Tensor):
        raise ConfigError(
            f"{called(algorithm)}: losses must yield LossTerms, and returned "
            f"{type(yielded).__name__}. {AS_IN}"
        )
    terms, seen = iter(yielded), set[str]()
    while True:
        term = next(terms, None)
        if term is not None:
            _check_term(algorithm, term)
            if term.name in seen:
                raise ConfigError(
                    f"{called(algorithm)}: losses yielded two terms called {term.name!r}, whose "
                    "values would be logged as one. Give each a name of its own."
                )
            seen.add(term.name)
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
    if not isinstance(term.name, str) or not term.name:
        refuse("the name of a term must be a text", repr(term.name))
    where = f"the loss of the term {term.name!r}"
    if isinstance(term.loss, Tensor) and term.loss.is_complex():
        refuse(f"{where} must be a real number", term.loss.dtype)
    if not isinstance(term.loss, Tensor) or term.loss.dim():
        refuse(f"{where} must be a scalar tensor", getattr(term.loss, "shape", term.loss))
    if not term.loss.requires_grad:
        refuse(f"{where} must depend on a module under training", "a constant")
    if not isinstance(term.metrics, Mapping):
        refuse("metrics must be a mapping {name: (sum, count)}", term.metrics)
    for name, parts in term.metrics.items():
        if not isinstance(name, str):
            refuse("the name of a metric must be a text", repr(name))
        if name in RESERVED or name.startswith(RESERVED_BEGINNINGS):
            raise ConfigError(
                f"{called(algorithm)}: the metric {name!r} is the name of one of zoo's own, which "
                f"would be overwritten. Choose another, such as {algorithm.name or 'mine'}/{name}."
            )
        pair = isinstance(parts, tuple | list) and len(parts) == 2
        if not pair or not all(_is_number(part) for part in parts):
            refuse(f"the metric {name!r} must be (sum, count), two numbers", parts)


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float)
