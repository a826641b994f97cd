"""Hidden states of a causal model at chosen places of a batch: packed or padded, in any dtype."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.batch import Batch, collate
from zoo.models import flex, packing
from zoo.models.lora import TrainingDropout
from zoo.models.twin import Casts, Twin

# Of states and gradients, packed against padded, relative; norms are of float32 in any case
_TOLERANCE = {torch.float64: (1e-8, 1e-4), torch.float32: (1e-4, 1e-3)}


@dataclass(frozen=True)
class States:
    """The last hidden states of a batch, wherever they lie."""

    body: Any  # the module that made them, with the weights it used
    hidden: Tensor  # [B, T, H] padded, or [M, H] packed
    layout: packing.Layout | None = None  # of the packed ones

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """[K, H] states of the tokens at (row, column) [K]."""
        if self.layout is None:
            return self.hidden[rows, columns]
        return packing.read(self.hidden, self.layout.place[rows, columns])


class Trunk:
    """Reads the hidden states of a model without copying its weights.

    `packed` computes a prompt once for all rows that share it and skips padding; models that do
    not take it (a short window, a soft cap in the attention, attention of their own) are found by
    comparing both ways on a few tokens, and read padded, which is said once. `compute_dtype` does
    the arithmetic on casts of the weights, which stay as they are and receive the gradients.
    """

    def __init__(
        self, model: nn.Module, packed: bool = False, compute_dtype: torch.dtype | None = None
    ) -> None:
        self.model = model
        self.packed: bool | None = None if packed else False  # None: not tried yet
        own = {p.dtype for p in model.parameters() if p.is_floating_point()}
        self.casts = None
        if compute_dtype is not None and own != {compute_dtype}:
            self.casts = Casts(model, compute_dtype)
        self._padded = Twin(model, None, self.casts) if self.casts is not None else None
        self._packed: Twin | None = None
        self._longest = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic."""
        if self.casts is not None:
            return self.casts.dtype
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    def __call__(self, batch: Batch) -> States:
        """The states of all tokens of a batch."""
        if self.packed is None:
            self.packed = self._try()
        if self.packed and batch.input_ids.shape[1] <= self._longest:
            body = self._packed_body()
            layout = packing.Layout.of(batch, self.dtype)
            return States(body, layout.hidden(backbone_of(body)), layout)
        body = self._padded_body()
        hidden = backbone_of(body)(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask.long(),
            use_cache=False,
        ).last_hidden_state
        return States(body, hidden)

    def _probe(self, batch: Batch, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """The states at (rows, columns), and the gradient of a weighted sum of them, flat.

        Of the weights that train the small ones only (norms, biases, adapters): what leads to them
        passes through everything, and the large ones would take a second set of gradients.
        """
        weights = [p for p in self.model.parameters() if p.requires_grad and p.numel() <= 2**16]
        with torch.set_grad_enabled(bool(weights)), _no_dropout():
            states = self(batch).at(rows, columns)
            if not weights:
                return states, states.new_zeros(0)
            # A square would not do: a norm gives all rows the same
            draw = torch.Generator().manual_seed(1)
            by = torch.randn(states.shape, generator=draw).to(states)
            found = torch.autograd.grad((states * by).sum(), weights, materialize_grads=True)
        return states.detach(), torch.cat([g.flatten() for g in found])

    def _padded_body(self) -> Any:
        return self.model if self._padded is None else self._padded()

    def _packed_body(self) -> Any:
        assert self._packed is not None
        return self._packed()

    def _try(self) -> bool:
        """Whether packed states of a few ragged rows are the padded ones, and their gradients."""
        vocabulary = int(getattr(self.model, "config").get_text_config().vocab_size)  # noqa: B009
        draw = torch.Generator().manual_seed(0)

        def ids(n: int) -> list[int]:
            return torch.randint(vocabulary, (n,), generator=draw).tolist()

        prompts = [ids(3), ids(5)]
        batch = collate(
            [prompts[0], prompts[0], prompts[1], prompts[1]],
            [ids(n) for n in (4, 2, 1, 3)],
            group_size=2,
            prompt_ids=["a", "b"],
        ).to(next(self.model.parameters()).device)
        rows, columns = batch.attention_mask.nonzero(as_tuple=True)
        self.packed = False
        padded = self._probe(batch, rows, columns)
        limits = _TOLERANCE.get(padded[0].dtype, (0.05, 0.25))
        reason = ""
        for attention in _ways(batch.device):
            self.packed, self._packed = True, Twin(self.model, attention, self.casts)
            self._longest = _window(self.model)
            if attention == packing.ATTENTION:
                self._longest = min(self._longest, packing.LONGEST)
            try:
                gaps = list(map(_gap, self._probe(batch, rows, columns), padded))
                wrong = [i for i in (0, 1) if not gaps[i] < limits[i]]
                if not wrong:
                    return True
                reason = (
                    f"its {('states', 'gradients')[wrong[0]]} differ by {gaps[wrong[0]]:.2g} of "
                    f"the largest (limit {limits[wrong[0]]:.0e})"
                )
            except Exception as error:  # whatever a model of unknown make does with the packed row
                reason = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"{type(self.model).__name__} cannot read packed rows ({reason}), so padded ones "
            "are used: right, but slower. model.packed=false says the same without trying.",
            stacklevel=2,
        )
        return False


@contextmanager
def _no_dropout() -> Iterator[None]:
    TrainingDropout.paused = True
    try:
        yield
    finally:
        TrainingDropout.paused = False


def _gap(found: Tensor, wanted: Tensor) -> float:
    if not wanted.numel():
        return 0.0
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))


def _ways(device: torch.device) -> list[str]:
    """Attention over packed rows, the better one for the device first."""
    if device.type == "cuda" and flex.differentiates(device):
        return [flex.ATTENTION, packing.ATTENTION]
    return [packing.ATTENTION]


def backbone_of(model: Any) -> Any:
    """The part of a model below its head, which makes the hidden states; itself if it has none."""
    base = getattr(model, "base_model", model)
    if base is not model or getattr(model, "lm_head", None) is None:
        return base
    # Its base_model_prefix is that of a larger model (Llama 4): what holds the embeddings
    embeddings = model.get_input_embeddings()
    holds = (c for c in model.children() if c is not embeddings and embeddings in c.modules())
    return next(holds, base)


def _window(model: nn.Module) -> int:
    """The shortest span that a layer of the model attends to, as its configuration says."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return 2**31
    config = config.get_text_config()
    spans = [getattr(config, n, None) for n in ("sliding_window", "attention_chunk_size")]
    return min([int(s) for s in spans if s], default=2**31)
