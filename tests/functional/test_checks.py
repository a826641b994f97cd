"""The checks on entry themselves; what each function makes of them is in its own tests."""

import torch

from zoo.functional import _checks


def test_without_a_shape_any_shape_passes_unchanged():
    for shape in ((), (3,), (2, 3), (2, 3, 4)):
        for check, tensor in (
            (_checks.floats, torch.zeros(shape)),
            (_checks.bools, torch.zeros(shape, dtype=torch.bool)),
            (_checks.integers, torch.zeros(shape, dtype=torch.int64)),
        ):
            assert check("x", tensor) is tensor
