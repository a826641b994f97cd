"""Second bodies for one set of weights: another attention, or another precision."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from zoo.models.fused import keep_less

# Linear maps of one input; their copies lie one after the other
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


_optimizer_steps = 0  # of all optimizers: a fused step writes to weights and leaves no trace


def _count(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count)


class Casts:
    """The weights of a module in another dtype, as fresh as its last in-place change.

    The module keeps the masters. A copy follows them when they have been written to (an optimizer
    step, a loaded checkpoint), and a gradient that arrives at a copy goes to its master in the
    master's dtype: arithmetic in bfloat16, weights and accumulated gradients in float32. A weight
    that has the dtype already (see `cast_frozen`) is not copied.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module = module
        self.dtype = dtype
        self.rooms = 0  # raised when copies moved
        self._copies: dict[int, Tensor] = {}
        self._seen: dict[int, tuple[Tensor, int, int, int]] = {}
        self._joined: dict[int, list[Tensor]] = {}
        for weights in _in_rows(module):
            self._joined |= {id(w): weights for w in weights}

    def __deepcopy__(self, memo: dict[int, Any]) -> Casts:
        made = memo[id(self)] = Casts(copy.deepcopy(self.module, memo), self.dtype)
        return made

    def _room(self, master: Tensor) -> Tensor:
        """Space for a copy; projections of one input lie in a row, so that one product does."""
        self.rooms += 1
        parts = self._joined.get(id(master), [master])
        if any(p.device != master.device or p.shape[1:] != master.shape[1:] for p in parts):
            parts = [master]
        if len(parts) == 1:
            return torch.empty_like(master, dtype=self.dtype, memory_format=torch.contiguous_format)
        rows = [p.shape[0] for p in parts]
        room = torch.empty(sum(rows), *master.shape[1:], dtype=self.dtype, device=master.device)
        for part, piece in zip(parts, room.split(rows), strict=True):
            self._copies[id(part)] = piece
            self._seen.pop(id(part), None)
        return self._copies[id(master)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy what has changed since the last call."""
        for master in self.module.parameters():
            assert master.is_floating_point(), "weights of integers have no other precision"
            key = id(master)
            if master.dtype == self.dtype:
                self._copies[key] = master
                continue
            steps = _optimizer_steps if master.requires_grad else 0
            state = (master._version, master.data_ptr(), steps)
            seen = self._seen.get(key)
            if seen is not None and seen[0] is master and seen[1:] == state:
                continue
            known = self._copies.get(key)
            if known is None or known.device != master.device or known.shape != master.shape:
                self._copies[key] = known = self._room(master)
            known.copy_(master)
            self._seen[key] = (master, *state)

    def copies(self) -> list[Tensor]:
        """The copies there are now, for those who count bytes."""
        return [copy for copy in self._copies.values() if not isinstance(copy, nn.Parameter)]

    def of(self, master: Tensor, trains: bool) -> Tensor:
        """The copy of a master; with a way back for the gradient where one is wanted."""
        if trains and master.requires_grad:
            with torch.enable_grad():
                return _Cast.apply(master, self._copies[id(master)])  # pyright: ignore
        return self._copies[id(master)]


@torch.no_grad()
def cast_frozen(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Put the weights that are not trained into `dtype` (None: leave them), in place.

    What takes no step needs no master: its cast serves alone. Projections of one input come to lie
    in a row, as `Casts` lays them. Buffers keep their dtype.
    """
    if dtype is None:
        return
    done: set[int] = set()
    for weights in _in_rows(module):
        if any(w.requires_grad or w.dtype == dtype for w in weights):
            continue
        room = torch.cat([w.to(dtype) for w in weights])
        for weight, piece in zip(weights, room.split([len(w) for w in weights]), strict=True):
            weight.data = piece
            done.add(id(weight))
    for weight in module.parameters():
        if not weight.requires_grad and id(weight) not in done:
            weight.data = weight.data.to(dtype)


def _in_rows(module: nn.Module) -> Iterator[list[Tensor]]:
    """The weights that belong in a row: of linear maps that read the same input."""
    for child in module.modules():
        for names in JOINED:
            parts: list[Any] = [getattr(child, name, None) for name in names]
            parts = [getattr(part, "base_layer", part) for part in parts]  # below an adapter
            weights = [p.weight for p in parts if isinstance(p, nn.Linear)]
            if len(weights) == len(names) and len({w.shape[1:] for w in weights}) == 1:
                yield weights


class _Cast(torch.autograd.Function):
    """The copy stands for its master: the gradient is the master's, in its dtype."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, copied: Tensor) -> Tensor:
        ctx.dtype = master.dtype
        return copied.data  # the same memory, and not a view: it is written to between passes

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
        self,
        source: nn.Module,
        attention: str | None = None,
        casts: Casts | None = None,
        trains: bool = True,
    ) -> None:
        self.source = source
        self.attention = attention
        self.casts = casts
        self.trains = trains  # gradients at casts go to their masters
        self._body: Any = None
        self._modules: list[tuple[nn.Module, nn.Module]] = []
        self._weights: list[tuple[nn.Module, str, nn.Module]] = []
        self._known: list[Tensor | None] = []
        self._frozen: list[bool] = []
        self._rooms = 0
        self._device: torch.device | None = None

    def __call__(self) -> Any:
        """The body, with the weights as they are now."""
        device = next((p.device for p in self.source.parameters()), None)
        stale = self._body is None or device != self._device or self._known != self._masters()
        if stale:
            self._device = device
            self._build()
        body: Any = self._body
        for mine, theirs in self._modules:  # modes differ within a model: see `recompute`
            mine.training = theirs.training
        if self.casts is not None:
            self.casts.refresh()
            frozen = [m is None or not m.requires_grad for m in self._known]
            if stale or self._rooms != self.casts.rooms or frozen != self._frozen:
                self._frozen = frozen
                self._bind(self.casts)
        return body

    def __deepcopy__(self, memo: dict[int, Any]) -> Twin:
        """A twin of the copied source; bodies are not copied but made anew."""
        source, casts = (copy.deepcopy(x, memo) for x in (self.source, self.casts))
        return Twin(source, self.attention, casts, self.trains)  # pyright: ignore

    def _bind(self, casts: Casts) -> None:
        """Put the casts in the place of the weights; they are written to when they change."""
        made: dict[int, Tensor] = {}  # one for each master: tied weights stay tied
        for (module, name, _), master in zip(self._weights, self._known, strict=True):
            if master is not None:
                if id(master) not in made:
                    made[id(master)] = casts.of(master, self.trains)
                # Not a Parameter, so past the check of nn.Module
                module._parameters[name] = made[id(master)]  # pyright: ignore
        self._rooms = casts.rooms

    def _masters(self) -> list[Tensor | None]:
        return _Same(origin._parameters[name] for _, name, origin in self._weights)

    def _build(self) -> None:
        memo = {id(p): p for p in self.source.parameters()}
        self._body = copy.deepcopy(self.source, memo)
        if self.attention is not None:
            self._body.set_attn_implementation(self.attention)
            keep_less(self._body)
        self._modules = list(zip(self._body.modules(), self.source.modules(), strict=True))
        self._weights = [
            (mine, name, theirs) for mine, theirs in self._modules for name in theirs._parameters
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
