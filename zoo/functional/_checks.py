"""Checks on entry that all functions here share: a wrong tensor raises, it never broadcasts."""

from collections.abc import Sequence
from enum import Enum
from typing import TypeVar

import torch
from torch import Tensor

E = TypeVar("E", bound=Enum)


def floats(name: str, tensor: Tensor, shape: Sequence[int] | None = None, ndim: int = 0) -> Tensor:
    """The tensor in float32 (float64 stays), after checks of its dtype and shape."""
    _shape(name, tensor, shape, ndim)
    if not tensor.is_floating_point():
        raise ValueError(
            f"{name} must be floating point, got {tensor.dtype} of shape {tuple(tensor.shape)}. "
            f"Convert it with .float()."
        )
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def bools(name: str, tensor: Tensor, shape: Sequence[int] | None = None, ndim: int = 0) -> Tensor:
    """The tensor, after checking that it is bool and its shape."""
    _shape(name, tensor, shape, ndim)
    if tensor.dtype != torch.bool:
        raise ValueError(
            f"{name} must be bool, got {tensor.dtype} of shape {tuple(tensor.shape)}. "
            f"Convert it with .bool()."
        )
    return tensor


def integers(
    name: str, tensor: Tensor, shape: Sequence[int] | None = None, ndim: int = 0
) -> Tensor:
    """The tensor, after checking that it holds integers and its shape."""
    _shape(name, tensor, shape, ndim)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(
            f"{name} must hold integers, got {tensor.dtype} of shape {tuple(tensor.shape)}. "
            f"Convert it with .long()."
        )
    return tensor


def member(name: str, value: object, kind: type[E]) -> E:
    """The member of an enumeration with this value; an error that lists the names otherwise."""
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(str(each.value) for each in kind)
        raise ValueError(f"{name} must be one of {names}; got {value!r}.") from None


def within(
    name: str,
    value: float,
    low: float,
    high: float = float("inf"),
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> float:
    """The value, after checking that it lies in the interval (NaN lies in none)."""
    above = value > low if open_low else value >= low
    below = value < high if open_high else value <= high
    if not (above and below):
        left, right = "(" if open_low else "[", ")" if open_high else "]"
        raise ValueError(f"{name} must lie in {left}{low:g}, {high:g}{right}, got {value}.")
    return value


def _shape(name: str, tensor: Tensor, shape: Sequence[int] | None, ndim: int) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}.")
    if shape is not None and tensor.shape != torch.Size(shape):
        raise ValueError(
            f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}: "
            f"nothing is broadcast here."
        )
    if ndim and tensor.ndim != ndim:
        raise ValueError(
            f"{name} must have {ndim} dimension(s), got {tensor.ndim}: shape {tuple(tensor.shape)}."
        )
