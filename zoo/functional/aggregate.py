"""The one place where losses are reduced: every denominator belongs to the whole optimizer step.

A mean taken over each micro-batch and then over micro-batches (or ranks) weighs a token by the
company it keeps. Here each micro-batch contributes its sum, divided by sizes that the caller
counted over the whole optimizer step and all ranks, so the micro-batches' results *add up* to the
loss of the step, however it was cut.
"""

from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from zoo.functional import _checks


class Average(StrEnum):
    """How a loss per token becomes one number.

    | name     | formula                | elsewhere                                         |
    |----------|------------------------|---------------------------------------------------|
    | token    | Σ_i Σ_t l_it / Σ_i n_i | DAPO; verl `token-mean`; TRL `dapo` (its default) |
    |          |                        | and `bnpo`, which divides by each micro-batch's   |
    | sequence | Σ_i (Σ_t l_it/n_i) / B | the GRPO paper; verl `seq-mean-token-mean`;       |
    |          |                        | TRL `grpo`, whose B has rows without tokens in it |
    | constant | Σ_i Σ_t l_it/(B·L_max) | Dr. GRPO; TRL `dr_grpo`; verl                     |
    |          |                        | `seq-mean-token-sum-norm`, which leaves B out     |

    n_i: trained tokens of row i; B: sequences of the optimizer step; L_max: a constant of the run.
    """

    token = "token"
    sequence = "sequence"
    constant = "constant"


class ScaleLike(Protocol):
    """Sizes of one whole optimizer step over all ranks (`zoo.batch.Scale` is one)."""

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        ...

    @property
    def sequences(self) -> int:
        """Rows."""
        ...

    @property
    def groups(self) -> int:
        """Groups of rows."""
        ...

    @property
    def max_completion_length(self) -> int:
        """The longest completion allowed; a constant of the run, not of the batch."""
        ...


def aggregate(values: Tensor, mask: Tensor, scale: ScaleLike, average: Average | str) -> Tensor:
    """Reduces a loss per token to this micro-batch's share of the optimizer step's loss.

        token:    Σ_i Σ_t l_it / scale.tokens
        sequence: Σ_i (Σ_t l_it / n_i) / scale.sequences
        constant: Σ_i Σ_t l_it / (scale.sequences · scale.max_completion_length)

    The shares of all micro-batches and ranks add up to the loss of the step. A row without trained
    tokens contributes 0. A denominator of zero (a step without trained tokens) gives 0 that still
    has a graph.
    Sources: token, Yu et al. 2025, arXiv:2503.14476, Eq. 8; sequence, Shao et al. 2024,
    arXiv:2402.03300, Eq. 3; constant, Liu et al. 2025, arXiv:2503.20783.

    Args:
        values: [B, T] float, a loss per token; anything (also NaN) where the mask is False.
        mask: [B, T] bool, the trained tokens.
        scale: sizes of the whole optimizer step over all ranks.
        average: `token`, `sequence` or `constant`.
    Returns:
        A scalar, float32 (float64 if given it).
    Raises:
        ValueError: a wrong shape or dtype, an unknown average, or `constant` with a length below 1.
    """
    average = _checks.member("average", average, Average)
    values = _checks.floats("values", values, ndim=2)
    mask = _checks.bools("mask", mask, values.shape)
    values = torch.where(mask, values, 0.0)
    if average is Average.token:
        return _divide(values.sum(), scale.tokens)
    if average is Average.sequence:
        trained = mask.sum(dim=1).clamp(min=1)  # [B]; the sum of an empty row is 0 already
        return _divide((values.sum(dim=1) / trained).sum(), scale.sequences)
    if scale.max_completion_length < 1:
        raise ValueError(
            f"scale.max_completion_length must be at least 1 for average=constant, "
            f"got {scale.max_completion_length}: it is the constant that the sum is divided by."
        )
    return _divide(values.sum(), scale.sequences * scale.max_completion_length)


def aggregate_rows(values: Tensor, count: int, rows: Tensor | None = None) -> Tensor:
    """Reduces a loss per row (or pair) to this micro-batch's share of the optimizer step's mean.

        Σ_i l_i / count

    Source: none needed; TRL takes the mean of each micro-batch's means instead.

    Args:
        values: [N] float, a loss per row; anything where `rows` is False.
        count: rows (or pairs) of the whole optimizer step over all ranks, e.g. `scale.groups`; 0
            gives 0.
        rows: [N] bool, which rows count; None: all.
    Returns:
        A scalar, float32 (float64 if given it).
    Raises:
        ValueError: a wrong shape or dtype.
    """
    values = _checks.floats("values", values, ndim=1)
    if rows is not None:
        values = torch.where(_checks.bools("rows", rows, values.shape), values, 0.0)
    return _divide(values.sum(), count)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """The sum of the entries under a mask; entries outside may hold anything.

        Σ_{m} x

    Source: none needed.

    Args:
        values: float, any shape. mask: bool, the same shape.
    Returns:
        A scalar, float32 (float64 if given it).
    Raises:
        ValueError: a wrong shape or dtype.
    """
    values = _checks.floats("values", values)
    return torch.where(_checks.bools("mask", mask, values.shape), values, 0.0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of the entries under a mask; 0 under an empty one.

        Σ_{m} x / Σ m

    For one tensor that is whole. A metric that is gathered from parts is `sum_and_count`; a loss is
    `aggregate`.
    Source: none needed.

    Args:
        values: float, any shape. mask: bool, the same shape.
    Returns:
        A scalar, float32 (float64 if given it).
    Raises:
        ValueError: a wrong shape or dtype.
    """
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def sum_and_count(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """What a metric contributes, to be added up over micro-batches and ranks.

        (Σ_{m} x, Σ m)

    Only the quotient of the totals is the mean: a mean of means weighs a part of 4 like a part of
    12.
    Source: none needed.

    Args:
        values: float or bool, any shape. mask: bool, the same shape.
    Returns:
        Two scalars of one float dtype.
    Raises:
        ValueError: a wrong shape or dtype.
    """
    if isinstance(values, Tensor) and values.dtype == torch.bool:
        values = values.float()
    total = masked_sum(values, mask).detach()
    return total, mask.sum().to(total.dtype)


def _divide(total: Tensor, count: int) -> Tensor:
    return total / count if count else total * 0.0
