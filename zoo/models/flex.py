"""Packed attention by flex_attention, for GPUs: no score matrix in memory, no padded blocks.

Written for CUDA, where flex_attention compiles to one kernel with a backward pass. On a CPU only
its forward pass exists, and that is what tests compare; the rest has not been run.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface

from zoo.models.packing import Layout, given_layout

ATTENTION = "zoo_packed_flex"


def block_mask(layout: Layout) -> BlockMask:
    """What a token of the packed row sees: its prompt up to itself, and its own completion.

        q sees k  ⇔  k ≤ q,  prompt(q) = prompt(k),  k is of the prompt or of q's completion

    The filler at the end sees fillers.
    """
    total = layout.input_ids.shape[1]
    device = layout.input_ids.device
    (n, p), (_, g, c) = layout.prompts.shape, layout.completions.shape
    prompt = torch.full((total,), -1, device=device)
    prompt[layout.prompts.flatten()] = torch.arange(n, device=device).repeat_interleave(p)
    prompt[layout.completions.flatten()] = torch.arange(n, device=device).repeat_interleave(g * c)
    owner = torch.full((total,), -1, device=device)  # the completion's row; −1: of a prompt
    owner[layout.completions.flatten()] = torch.arange(n * g, device=device).repeat_interleave(c)
    prompt[layout.tokens :] = -1
    owner[layout.tokens :] = -1

    def sees(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = (prompt[query] == prompt[key]) & (key <= query)
        return same & ((owner[key] == -1) | (owner[key] == owner[query]))

    return create_block_mask(sees, None, None, total, total, device=device)


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


@lru_cache(maxsize=8)
def differentiates(device: torch.device) -> bool:
    """Whether compiled flex_attention has a backward pass here: not on a CPU or without Triton."""
    if device.type != "cuda":
        return False
    try:
        x = torch.randn(1, 1, 128, 64, device=device, requires_grad=True)
        _compiled()(x, x, x).sum().backward()
        return bool(x.grad is not None and x.grad.isfinite().all())
    except Exception as error:  # compilers fail in many ways
        warnings.warn(
            f"flex_attention does not work on {device} ({type(error).__name__}: {error}); packed "
            "rows are attended to by matrix products.",
            stacklevel=2,
        )
        return False


def packed_flex_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_layout: Layout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface over a packed row, as `packing.packed_attention`.

    Raises:
        NotImplementedError: the model does not pass the layout on, or asks for what packing has
            not got (a cap, a bias, sinks).
    """
    layout = given_layout(module, attention_mask, packed_layout, others)
    attend = _compiled() if query.device.type == "cuda" else flex_attention
    out = attend(query, key, value, block_mask=layout.seen, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, packed_flex_attention)
