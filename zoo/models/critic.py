"""The critic: a backbone of its own with a scalar head that starts at zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.batch import Batch
from zoo.models.policy import disable_dropout, values_of
from zoo.models.trunk import Trunk


@dataclass(frozen=True)
class CriticOutput:
    values: Tensor  # [B, T] float32; values[b, t] is the value of the prefix before token t
    final: Tensor  # [B] float32: value after the last token, to bootstrap truncated rows


class Critic(nn.Module):
    """Value of each prefix.

        values[b, t] = w · h[b, t−1] + b₀,   final[b] = w · h[b, length−1] + b₀

    The value of token t is read before it, so it cannot depend on the action it judges. The head
    starts at zero: at the start every advantage is the reward itself. `packed` and `compute_dtype`
    are those of `Policy`; the head computes in float32 in any case.
    """

    def __init__(
        self,
        backbone: nn.Module,
        hidden_size: int,
        *,
        packed: bool = False,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        disable_dropout(backbone)
        self.backbone = backbone
        self.trunk = Trunk(backbone, packed, compute_dtype)
        self.head = nn.Linear(hidden_size, 1)  # trained whatever of the backbone is
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: Batch) -> CriticOutput:
        values, final = values_of(self.trunk(batch), self.head, batch)
        return CriticOutput(values=values, final=final)
