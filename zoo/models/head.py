"""Log-probs and entropy from hidden states, chunk by chunk: no [M, V] tensor outlives its chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 1024  # rows whose logits exist at a time; 1024 × 49,152 in bfloat16 are 96 MiB
CHUNK = 256  # of them in float32 at a time; 256 × 49,152 are 48 MiB
CACHED = 4 * 2**20  # bytes in float32 at a time on a CPU: what passes over them find in its cache


def _wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for the arithmetic; float64 stays."""
    return torch.promote_types(dtype, torch.float32)


def _scaled(raw: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Wide logits of a chunk, and the derivative of the soft cap (None without one).

    They are `raw` itself where there is nothing to do.
    """
    logits = raw.to(_wide(raw.dtype))
    if softcap is not None:
        squashed = torch.tanh(logits / softcap)
        return squashed * (softcap * scale), 1 - squashed.square()
    if scale == 1.0:
        return logits, None
    return (logits * scale if logits is raw else logits.mul_(scale)), None


def _pieces(count: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]


def _chunks(logits: Tensor) -> list[slice]:
    size = CHUNK
    if logits.device.type == "cpu":
        size = min(size, max(1, CACHED // (4 * logits.shape[1])))
    return _pieces(logits.shape[0], size)


class _ChunkedLogprobs(torch.autograd.Function):
    """log softmax(head(h))[target]; the logits of more than a block are made again for backward."""

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
        raw: Tensor | None = None
        blocks = _pieces(hidden.shape[0], BLOCK)
        for block in blocks:
            raw = logits = None  # one block at a time: the last goes before the next is made
            raw = torch.nn.functional.linear(hidden[block], weight, bias)
            for part in _chunks(raw):
                piece = slice(block.start + part.start, block.start + part.stop)
                logits, _ = _scaled(raw[part], scale, softcap)
                normalizer = logits.logsumexp(-1)
                chosen = logits.gather(1, targets[piece, None]).squeeze(1)
                logprobs[piece] = chosen - normalizer
                normalizers[piece] = normalizer
                if with_entropy:
                    # H = −Σ p·log p; log Z − Σ p·logit cancels to below 0 where logits are large.
                    shifted = logits - normalizer[:, None]
                    entropy[piece] = -shifted.exp().mul_(shifted).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers)
        ctx.scale, ctx.softcap = scale, softcap
        ctx.kept = raw if len(blocks) == 1 else None  # for one pass, which writes over it
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        hidden, weight, bias, targets, normalizers = ctx.saved_tensors
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=_wide(bias.dtype)) if want_bias else None
        for block in _pieces(hidden.shape[0], BLOCK):
            raw = wide = None
            delta, ctx.kept = ctx.kept, None
            if delta is None:
                delta = torch.nn.functional.linear(hidden[block], weight, bias)
            for part in _chunks(delta):
                piece = slice(block.start + part.start, block.start + part.stop)
                raw = delta[part]
                wide, slope = _scaled(raw, ctx.scale, ctx.softcap)
                # d logp / d logits = onehot − softmax
                wide = wide.sub_(normalizers[piece, None]).exp_().neg_()
                wide.scatter_add_(1, targets[piece, None], torch.ones_like(wide[:, :1]))
                wide.mul_((grad[piece] * ctx.scale)[:, None])
                if slope is not None:
                    wide.mul_(slope)
                if grad_bias is not None:
                    grad_bias += wide.sum(0)
                if wide is not raw:
                    raw.copy_(wide)
            # Products in the weights' dtype: four times faster on a CPU in bfloat16
            if grad_hidden is not None:
                torch.mm(delta, weight, out=grad_hidden[block])
            if want_weight:
                product = delta.t() @ hidden[block]
                if grad_weight is None:
                    grad_weight = product
                else:  # the sum over blocks is wide
                    grad_weight = grad_weight.to(_wide(weight.dtype)).add_(product)
                del product
        if want_weight and grad_weight is None:  # no rows
            grad_weight = torch.zeros_like(weight)
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

    The logits exist for one block of rows at a time, forward and backward; those of a single block
    are kept for the backward pass, those of several made again. So memory grows with block · V,
    never with B · T · V. float32 whatever the weights are (float64 if they are).

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
