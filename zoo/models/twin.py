"""Second bodies for one set of weights: another attention, or another precision."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Casts:
    """The weights of a module in another dtype, as fresh as its last in-place change.

    The module keeps the masters. A copy follows them when they have been written to (an optimizer
    step, a loaded checkpoint), and a gradient that arrives at a copy goes to its master in the
    master's dtype: arithmetic in bfloat16, weights and accumulated gradients in float32.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module = module
        self.dtype = dtype
        self._copies: dict[int, Tensor] = {}
        self._seen: dict[int, tuple[Tensor, int, int]] = {}

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy what has changed since the last call."""
        for master in self.module.parameters():
            key = id(master)
            state = (master, master._version, master.data_ptr())
            if key in self._seen and self._seen[key][1:] == state[1:]:
                continue
            known = self._copies.get(key)
            if known is None or known.device != master.device or known.shape != master.shape:
                self._copies[key] = master.detach().to(self.dtype, copy=True)
            else:
                known.copy_(master)
            self._seen[key] = state

    def of(self, master: Tensor) -> Tensor:
        """The copy of a master; with a way back for the gradient where one is recorded."""
        if not master.is_floating_point():
            return master
        if torch.is_grad_enabled() and master.requires_grad:
            return _Cast.apply(master, self._copies[id(master)])  # pyright: ignore
        return self._copies[id(master)]


class _Cast(torch.autograd.Function):
    """The copy stands for its master: the gradient is the master's, in its dtype."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, copied: Tensor) -> Tensor:
        ctx.dtype = master.dtype
        return copied.view_as(copied)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


class Twin:
    """A module with the weights of `source`: the same tensors, or their casts.

    The twin has a configuration and buffers of its own, so its attention function can be another
    one without touching what else runs with the source. Buffers keep their dtype: rotary
    frequencies in bfloat16 are wrong positions.
    """

    def __init__(
        self, source: nn.Module, attention: str | None = None, casts: Casts | None = None
    ) -> None:
        self.source = source
        self.attention = attention
        self.casts = casts
        self._body: Any = None
        self._weights: list[tuple[nn.Module, str, nn.Module]] = []
        self._known: list[Tensor | None] = []

    def __call__(self) -> Any:
        """The body, with the weights as they are now.

        A graph through casts belongs to the latest call: use one forward and its backward before
        the next call where activations are recomputed.
        """
        if self._body is None or self._known != self._masters():
            self._build()
        if self._body.training != self.source.training:
            self._body.train(self.source.training)
        if self.casts is not None:
            self.casts.refresh()
            made: dict[int, Tensor] = {}  # one for each master: tied weights stay tied
            for (module, name, _), master in zip(self._weights, self._known, strict=True):
                if master is not None:
                    if id(master) not in made:
                        made[id(master)] = self.casts.of(master)
                    module._parameters[name] = made[id(master)]  # pyright: ignore
        return self._body

    def _masters(self) -> list[Tensor | None]:
        return _Same(origin._parameters[name] for _, name, origin in self._weights)

    def _build(self) -> None:
        memo = {id(p): p for p in self.source.parameters()}
        self._body = copy.deepcopy(self.source, memo)
        if self.attention is not None:
            self._body.set_attn_implementation(self.attention)
        self._weights = [
            (mine, name, theirs)
            for mine, theirs in zip(self._body.modules(), self.source.modules(), strict=True)
            for name in theirs._parameters
        ]
        self._known = self._masters()


class _Same(list):
    """A list that equals another one of the same objects."""

    __hash__ = None  # pyright: ignore

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, list)
            and len(self) == len(other)
            and all(a is b for a, b in zip(self, other, strict=True))
        )

    def __ne__(self, other: object) -> bool:
        return not self == other
