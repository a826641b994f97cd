"""Layers of a twin that keep less for the backward pass: norms and gated networks.

The parts between matrix products are cheap to compute and dear to keep: transformers' RMS norm
holds three copies of its input, two of them wide, and a gated network four of its width. Here a
norm keeps its input and a scale a row, a network its two projections; the rest is computed again.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _RMSNorm(torch.autograd.Function):
    """y = w · n with n = x / √(mean x² + ε), computed in float32, n rounded to x's dtype.

    With d = w · ∂y:  ∂x = (d − n · mean(d · n)) / √(mean x² + ε),  ∂w = Σ_rows ∂y · n.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()  # as transformers does, also of float64
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        grad = grads[0]
        of_weight = None
        if ctx.needs_input_grad[1]:
            rows = (grad * normed).reshape(-1, x.shape[-1])  # a head's gradient may lie turned
            of_weight = rows.sum(0).to(weight.dtype)
        inner = (grad * weight).float()
        inner -= normed * (inner * normed).mean(-1, keepdim=True)
        return inner.mul_(scale).to(x.dtype), of_weight, None


class _GatedDown(torch.autograd.Function):
    """y = (silu(g) · u) Wᵀ, the product computed again in the backward pass.

    ∂silu(g)/∂g = σ(g) · (1 + g · (1 − σ(g))).
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.linear(F.silu(gate).mul_(up), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        grad = grads[0]
        active = F.silu(gate)
        of_weight = None
        if ctx.needs_input_grad[2]:
            inner = (active * up).reshape(-1, up.shape[-1])
            of_weight = grad.reshape(-1, grad.shape[-1]).t() @ inner
        of_inner = grad @ weight
        of_gate = torch.ops.aten.silu_backward(of_inner * up, gate)
        return of_gate, of_inner.mul_(active), of_weight


def keep_less(body: nn.Module) -> None:
    """Replace the forward passes of a body's norms and gated networks, where they are of the kind.

    Modules are recognized by what they hold; whether they compute what was thought is for the
    caller to compare.
    """
    for module in body.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = types.MethodType(_norm, module)  # pyright: ignore
        elif _is_gated(module):
            module.forward = types.MethodType(_gated, module)  # pyright: ignore


def _is_gated(module: Any) -> bool:
    """Three plain linear maps, the last without a bias, around a SiLU."""
    maps = [getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")]
    return (
        all(type(m) is nn.Linear for m in maps)
        and maps[-1].bias is None  # pyright: ignore
        and type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
        and not any(m._forward_hooks or m._forward_pre_hooks for m in (module, *maps))  # pyright: ignore
    )


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)  # pyright: ignore


def _gated(self: Any, x: Tensor) -> Tensor:
    return _GatedDown.apply(self.gate_proj(x), self.up_proj(x), self.down_proj.weight)  # pyright: ignore
