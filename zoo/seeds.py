"""Random generators by purpose, so that doing one thing more often never changes another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """63-bit seed from (seed, purpose, step, …); stable across machines and Python versions."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def torch_generator(*parts: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(*parts))


@contextmanager
def drawing_from(*parts: int | str) -> Iterator[None]:
    """The global generators start from (seed, purpose, …) inside and go on as before afterwards.

    For draws that take no generator of ours, such as dropout.
    """
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(*parts))
        yield


def uniform_numbers(rows: int, columns: int, *parts: int | str) -> np.ndarray:
    """[rows, columns] float32 uniforms in [0, 1) from a counter-based generator."""
    generator = np.random.Generator(np.random.Philox(key=derive_seed(*parts)))
    return generator.random((rows, columns), dtype=np.float32)
