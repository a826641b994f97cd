"""Minimal policies, critics and optimizers whose numbers are known, for the update path."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.batch import Batch, collate
from zoo.models.critic import CriticOutput
from zoo.models.policy import PolicyOutput
from zoo.train.gradients import Trainable


class ScriptedPolicy(nn.Module):
    """Log-probs are what the batch says under the name «logprobs», times a weight of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, batch: Batch) -> PolicyOutput:
        said = torch.where(batch.completion_mask, batch.extra["logprobs"].double(), 0.0)
        return PolicyOutput(said * self.weight, torch.zeros_like(said))


class ScriptedCritic(nn.Module):
    """One value for every prefix."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def forward(self, batch: Batch) -> CriticOutput:
        zeros = torch.zeros(batch.input_ids.shape, dtype=torch.float64)
        values = torch.where(batch.completion_mask, zeros + self.value, 0.0)
        return CriticOutput(values, zeros[:, 0] + self.value)


class Capture:
    """An optimizer that only remembers the gradients it would have stepped on."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.grads: list[Tensor] | None = None

    def step(self) -> None:
        self.grads = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for p in self.module.parameters()
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none=set_to_none)


def captured(**modules: nn.Module) -> dict[str, Trainable]:
    return {name: Trainable(module, Capture(module), 1.0) for name, module in modules.items()}


def rows(lengths: list[int], per_row: dict[str, list[float]], group_size: int = 1) -> Batch:
    """One-token prompts with completions of these lengths; each row's value on its tokens.

    Every token's log-prob is −1 unless `logprobs` says otherwise.
    """
    count = len(lengths)
    batch = collate(
        [[5]] * count,
        [[6] * n for n in lengths],
        group_size=group_size,
        prompt_ids=[f"p{i}" for i in range(count // group_size)],
    )
    mask = batch.completion_mask

    def spread(values: list[float]) -> Tensor:
        wide = torch.tensor(values, dtype=torch.float64)[:, None].expand(mask.shape)
        return torch.where(mask, wide, 0.0)

    fields: dict[str, Any] = {name: spread(v) for name, v in per_row.items() if name != "logprobs"}
    said = spread(per_row.get("logprobs", [-1.0] * count))
    return batch.replace(**fields).with_extra(logprobs=said)
