"""Random generators by purpose, so that doing one thing more often never changes another."""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """63-bit seed from (seed, purpose, step, …); stable across machines and Python versions."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def torch_generator(*parts: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(*parts))


def uniform_numbers(rows: int, columns: int, *parts: int | str) -> np.ndarray:
    """[rows, columns] float32 uniforms in [0, 1) from a counter-based generator."""
    generator = np.random.Generator(np.random.Philox(key=derive_seed(*parts)))
    return generator.random((rows, columns), dtype=np.float32)
