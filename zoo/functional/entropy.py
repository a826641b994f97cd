"""Entropy of a policy's next-token distribution."""

import torch
from torch import Tensor

from zoo.functional import _checks


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """The entropy, in nats, of the distribution that is sampled from: softmax(logits / T).

        H = −Σ_v p_v log p_v,    p = softmax(z / T)

    Logits of −inf (forbidden tokens) have p = 0 and add 0, in value and gradient.
    Source: Shannon 1948; as a bonus, S in Schulman et al. 2017, arXiv:1707.06347, Eq. 9. Deviation:
    bfloat16 is widened first, and −inf allowed; TRL's `entropy_from_logits` does neither.

    Args:
        logits: [..., V] float.
        temperature: T > 0.
    Returns:
        [...] float32 (float64 if given it), between 0 and log V.
    Raises:
        ValueError: a wrong dtype, a tensor without dimensions, or T ≤ 0.
    """
    logits = _checks.floats("logits", logits)
    if logits.ndim == 0:
        raise ValueError("logits must have a last dimension of tokens, got a scalar.")
    _checks.within("temperature", temperature, 0.0, open_low=True)
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    finite = torch.where(logprobs.isfinite(), logprobs, 0.0)  # 0 · (−inf) would be NaN
    return -(logprobs.exp() * finite).sum(dim=-1)
