"""Positions derived from masks."""

from torch import Tensor


def last_true(mask: Tensor) -> Tensor:
    """[B, T] bool: True at the last True of each row of a mask [B, T], nowhere in an empty row."""
    from_here_on = mask.long().flip(1).cumsum(1).flip(1)  # Trues at t or later
    return mask & (from_here_on == 1)
