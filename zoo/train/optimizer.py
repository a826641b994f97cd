"""AdamW for each trained module, and the learning rate as a function of the update."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from zoo.config import Schedule, TrainConfig


def make_optimizer(module: nn.Module, config: TrainConfig, lr: float) -> torch.optim.AdamW:
    """AdamW over what requires a gradient; float32 states beside float32 weights."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    return torch.optim.AdamW(
        parameters,
        lr=lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=fused,
    )


def offload_states(optimizer: torch.optim.Optimizer, home: torch.device) -> None:
    """Keep the optimizer's states at `home`, and bring them back for each of its steps.

    Two of the four numbers that a weight costs under Adam then take no memory of the device while
    activations do, at the price of copying them twice an update.
    Written for a GPU and not run on one: the movements are tested, what they save is not measured.
    """
    places: dict[tuple[int, str], torch.device] = {}  # (weight, name) → where a step wants it

    def fetch(done: torch.optim.Optimizer, *_: Any) -> None:
        for weight, state in done.state.items():
            for name, value in state.items():
                place = places.get((id(weight), name))
                if place is not None:
                    state[name] = value.to(place)

    def leave(done: torch.optim.Optimizer, *_: Any) -> None:
        for weight, state in done.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.device != home:
                    places[id(weight), name] = value.device
                    state[name] = value.to(home)

    optimizer.register_step_pre_hook(fetch)
    optimizer.register_step_post_hook(leave)


def lr_factor(
    update: int, total: int, config: TrainConfig, decay_from: int | None, decay_updates: int
) -> float:
    """Share of the learning rate at the `update`-th optimizer step (from 0) of `total`.

    Warm-up rises linearly from 1/(warmup + 1); then constant, or linear or cosine from 1 to
    `lr_end`. Once a target is reached at `decay_from`, the rate falls linearly from what it is
    then to 0 over `decay_updates` instead.
    """
    if decay_from is not None:
        left = max(1 - (update - decay_from) / max(decay_updates, 1), 0.0)
        return left * lr_factor(decay_from, total, config, None, decay_updates)
    if update < config.warmup_updates:
        return (update + 1) / (config.warmup_updates + 1)
    if config.schedule is Schedule.constant:
        return 1.0
    span = max(total - config.warmup_updates - 1, 1)
    progress = min((update - config.warmup_updates) / span, 1.0)
    if config.schedule is Schedule.cosine:
        progress = (1 - math.cos(math.pi * progress)) / 2
    return 1 - (1 - config.lr_end) * progress
