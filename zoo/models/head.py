"""Log-probs and entropy from hidden states, chunk by chunk: no [M, V] tensor outlives its chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 256  # rows of the head at a time; 256 × 49,152 float32 logits are 48 MiB


def _wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for the arithmetic; float64 stays."""
    return torch.promote_types(dtype, torch.float32)


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Wide logits of a chunk, and the derivative of the soft cap (None without one)."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(_wide(logits.dtype))
    if softcap is None:
        return logits.mul_(scale), None
    squashed = torch.tanh(logits / softcap)
    return squashed * (softcap * scale), 1 - squashed.square()


class _ChunkedLogprobs(torch.autograd.Function):
    """log softmax(head(h))[target], the head recomputed in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [M, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        targets: Tensor,  # [M]
        scale: float,
        softcap: float | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(hidden.shape[0], dtype=_wide(hidden.dtype))
        entropy = torch.zeros_like(logprobs)
        normalizers = torch.empty_like(logprobs)
        for start in range(0, hidden.shape[0], CHUNK):
            piece = slice(start, start + CHUNK)
            logits, _ = _logits(hidden[piece], weight, bias, scale, softcap)
            normalizer = logits.logsumexp(-1)
            chosen = logits.gather(1, targets[piece, None]).squeeze(1)
            logprobs[piece] = chosen - normalizer
            normalizers[piece] = normalizer
            if with_entropy:
                # H = −Σ p·log p; log Z − Σ p·logit cancels to below 0 where logits are large.
                shifted = logits.sub_(normalizer[:, None])
                entropy[piece] = -shifted.exp().mul_(shifted).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers)
        ctx.scale, ctx.softcap = scale, softcap
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        hidden, weight, bias, targets, normalizers = ctx.saved_tensors
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        wide = _wide(hidden.dtype)
        grad_weight = torch.zeros_like(weight, dtype=wide) if want_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if want_bias else None
        for start in range(0, hidden.shape[0], CHUNK):
            piece = slice(start, start + CHUNK)
            logits, slope = _logits(hidden[piece], weight, bias, ctx.scale, ctx.softcap)
            # d logp / d logits = onehot − softmax
            delta = logits.sub_(normalizers[piece, None]).exp_().neg_()
            delta.scatter_add_(1, targets[piece, None], torch.ones_like(delta[:, :1]))
            delta.mul_((grad[piece] * ctx.scale)[:, None])
            if slope is not None:
                delta.mul_(slope)
            delta = delta.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[piece] = delta @ weight
            if grad_weight is not None:
                # The product in the weights' dtype is four times faster on a CPU in bfloat16; the
                # sum over chunks stays wide.
                if weight.dtype == wide:
                    grad_weight.addmm_(delta.t(), hidden[piece])
                else:
                    grad_weight += delta.t() @ hidden[piece]
            if grad_bias is not None:
                grad_bias += delta.to(wide).sum(0)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            None,
            None,
            None,
            None,
        )


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target under softmax(scale · softcap·tanh((W h + b)/softcap)), and entropy.

        logp_i = z_i[target_i] − log Σ_v exp z_i[v],   H_i = −Σ_v p_v log p_v   (nats)

    The logits exist for one chunk of rows at a time, forward and backward (the backward recomputes
    them), so memory grows with chunk · V, never with B · T · V. float32 whatever the weights are
    (float64 if they are).

    Args:
        hidden: [M, H] hidden states that predict the targets.
        weight: [V, H] of the head; may be the tied embedding.
        bias: [V] or None.
        targets: [M] int64.
        scale: multiplies the logits; 1/temperature times the model's own logit scale.
        softcap: the model's final soft cap, before the scale, or None.
        with_entropy: False returns zeros instead.
    Returns:
        logprobs [M] float32 (float64 if given it) with gradient; entropy [M] alike, without.
    """
    return _ChunkedLogprobs.apply(hidden, weight, bias, targets, scale, softcap, with_entropy)  # pyright: ignore
