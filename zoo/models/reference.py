"""The reference: the policy's start, frozen."""

from __future__ import annotations

import torch

from zoo.config import ModelConfig
from zoo.models.loading import load_model, reading
from zoo.models.lora import branch
from zoo.models.policy import Policy
from zoo.models.twin import cast_frozen


def load_reference(config: ModelConfig, seed: int, temperature: float, device: str) -> Policy:
    """The start again, frozen, with entropy off; from the start's path, never from the policy.

    It takes no step, so it is held in `model.compute_dtype` alone: half the bytes in bfloat16.
    """
    model = load_model(config, seed).requires_grad_(False)
    dtype = None if config.compute_dtype is None else getattr(torch, config.compute_dtype)
    cast_frozen(model, dtype)
    return _frozen(Policy(model, temperature, **reading(config))).to(device)


def shared_reference(policy: Policy, config: ModelConfig, with_adapter: bool) -> Policy:
    """The start of a policy with an adapter, over the frozen weights that the policy holds.

    Args:
        with_adapter: the start had this adapter already, so a frozen copy of it belongs to the
            reference; otherwise the reference is the base with the adapter off.
    """
    body = branch(policy.model, with_adapter)
    return _frozen(Policy(body, policy.temperature, **reading(config)))


def _frozen(reference: Policy) -> Policy:
    reference.with_entropy = False
    reference.requires_grad_(False)
    return reference.eval()
