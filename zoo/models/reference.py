"""The reference: the policy's start, frozen."""

from __future__ import annotations

from zoo.config import ModelConfig
from zoo.models.loading import load_model, reading
from zoo.models.policy import Policy


def load_reference(config: ModelConfig, seed: int, temperature: float, device: str) -> Policy:
    """The start again, frozen, with entropy off; from the start's path, never from the policy."""
    reference = Policy(load_model(config, seed), temperature, **reading(config))
    reference.with_entropy = False
    reference.requires_grad_(False)
    return reference.eval().to(device)
