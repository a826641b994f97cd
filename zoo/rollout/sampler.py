"""Drawing a token from logits: one uniform number a row, and the token's log-prob."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # tokens of the vocabulary whose weights are summed first
_LARGE = 4096  # from here two levels are faster than one


def sample(logits: Tensor, temperature: float, draw: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token a row by the inverse of the cumulative distribution, and its log-prob.

        token = min {v : Σ_{w ≤ v} p_w > u · Σ_w p_w},   p = softmax(logits / temperature)

    Exact, and 20 times faster than softmax and multinomial at 49,152 tokens on a CPU.

    Args:
        logits: [B, V] of any float dtype; the arithmetic is float32.
        temperature: 0 takes the argmax, whose log-prob is reported at temperature 1.
        draw: [B] uniforms in [0, 1), or None at temperature 0.
    Returns:
        tokens [B] int64, log-probs [B] float32.
    """
    logits = logits.float()
    if temperature == 0 or draw is None:
        token = logits.argmax(-1)
        return token, _chosen(logits, token) - logits.logsumexp(-1)
    logits = logits if temperature == 1 else logits / temperature
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp_()
    token = _invert(weights.cumsum(-1), draw[:, None])[0]
    return token, _chosen(logits, token) - top.squeeze(1) - weights.sum(-1).log()


def _chosen(logits: Tensor, token: Tensor) -> Tensor:
    return logits.gather(1, token[:, None]).squeeze(1)


def sample_in_blocks(
    logits: Tensor, temperature: float, draw: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`sample` with one exponential and no cumulative sum over the vocabulary.

    The block of 256 tokens is found from the blocks' sums, then the token from the weights inside
    it. The same token as `sample` unless u lies within rounding of a boundary, and the log-prob
    from the sum that is there already.
    """
    if temperature == 0 or draw is None or logits.shape[-1] < _LARGE:
        return sample(logits, temperature, draw)
    rows, size = logits.shape
    blocks = -(-size // BLOCK)
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    top = scaled.amax(-1, keepdim=True)
    weights = scaled.new_empty(rows, blocks * BLOCK)
    weights[:, size:] = 0
    torch.sub(scaled, top, out=weights[:, :size])
    weights[:, :size].exp_()
    weights = weights.view(rows, blocks, BLOCK)
    cumulative = weights.sum(-1).cumsum(-1)
    block, rest = _invert(cumulative, draw[:, None])
    inside = weights[torch.arange(rows, device=logits.device), block].cumsum(-1)
    total = cumulative[:, -1]
    token = block * BLOCK + _invert(inside, rest / inside[:, -1:])[0]
    token = token.clamp_max(size - 1)
    return token, _chosen(scaled, token) - top.squeeze(1) - total.log()


def _invert(cumulative: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """The first place [B] whose sum exceeds draw · total, and what is left there, [B, 1]."""
    total = cumulative[:, -1:]
    # Strictly below the total: float32 rounding must not step past the last possible token.
    threshold = torch.minimum(draw * total, torch.nextafter(total, total * 0))
    place = torch.searchsorted(cumulative, threshold, right=True)
    place = place.clamp_max(cumulative.shape[1] - 1)  # sums that are NaN have no place
    before = torch.where(place > 0, cumulative.gather(1, (place - 1).clamp_min(0)), 0.0)
    return place.squeeze(1), (threshold - before).clamp_min(0)
