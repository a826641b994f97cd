"""Floating-point operations: an estimate from shapes, the same for every algorithm.

A matrix of P parameters costs 2·P operations a token in the forward pass (a multiplication and an
addition each), and twice as many in the backward pass (the gradients of its input and of itself).
Attention adds, for each layer, 2·d for the scores and 2·d for the weighted values, for each
position that a token attends to. So with N = matrix parameters of the body, V = those of the head,
L layers of attention width d (heads × head size), and C = positions attended to, summed over tokens

    forward  = 2·N·tokens + 2·V·head_tokens + 4·L·d·C
    backward = 2 · forward, less the weights' part, 2·N·tokens or 2·V·head_tokens, of frozen ones

Left out, as in the usual estimates: norms, activation functions, softmax, the embedding look-up,
the optimizer, and the recomputation of gradient checkpointing. A mixture of experts is overcounted:
all experts are taken as used. Compare Kaplan et al. 2020, arXiv:2001.08361, table 1, whose forward
pass costs 2·N + 2·L·n_ctx·d a token: the same with a mean context of n_ctx / 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from zoo.measure.memory import storage_key


def forward_flops(
    body: int,
    head: int,
    tokens: int,
    *,
    head_tokens: int | None = None,
    layers: int = 0,
    attention_width: int = 0,
    context: int = 0,
) -> int:
    """Operations of a forward pass: 2·N·tokens + 2·V·head_tokens + 4·L·d·C.

    Args:
        body: N, parameters in matrices other than embedding and head.
        head: V, parameters of the head.
        tokens: that pass through the body.
        head_tokens: that pass through the head; None: all of them.
        layers: L.
        attention_width: d, query heads × head size.
        context: C, positions attended to, summed over the tokens; see `causal_context`.
    """
    read = tokens if head_tokens is None else head_tokens
    return 2 * body * tokens + 2 * head * read + 4 * layers * attention_width * context


def backward_flops(forward: int) -> int:
    """Operations of the backward pass that follows a forward pass of `forward` operations."""
    return 2 * forward


def causal_context(lengths: Sequence[int], cached: Sequence[int] | None = None) -> int:
    """C of rows in which token t attends to itself and to all before it.

        C = Σ_rows Σ_{t=1..n} (m + t) = Σ_rows n·m + n(n+1)/2

    Args:
        lengths: n, new tokens of each row.
        cached: m, tokens of each row that lie in the cache already (default 0).
    """
    before = [0] * len(lengths) if cached is None else cached
    return sum(n * m + n * (n + 1) // 2 for n, m in zip(lengths, before, strict=True))


@dataclass(frozen=True)
class ModelCost:
    """The shape figures of one model that its operations follow from."""

    body: int  # parameters in matrices other than embedding and head
    head: int  # parameters of the head
    layers: int
    attention_width: int  # query heads × head size
    frozen_body: int = 0  # of the body's, those that take no gradient (below an adapter)
    frozen_head: int = 0

    @classmethod
    def of(cls, model: nn.Module) -> ModelCost:
        """Read off a module: a transformers model, or one that holds such a model.

        The head is the output embedding (tied or not), or, without one, every matrix outside the
        model that carries the transformers config (a critic's value head).
        """
        core = _transformers_part(model)
        head_layer = None if core is None else core.get_output_embeddings()
        head = getattr(head_layer, "weight", None)
        head_keys = set() if head is None else {storage_key(head.untyped_storage())}
        embeddings = {
            storage_key(module.weight.untyped_storage())
            for module in model.modules()
            if isinstance(module, nn.Embedding)
        }
        inside = set() if core is None else {id(p) for p in core.parameters()}
        body = outside = frozen = 0
        for parameter in model.parameters():
            if parameter.dim() < 2:
                continue
            if core is not None and id(parameter) not in inside:
                outside += parameter.numel()
            elif storage_key(parameter.untyped_storage()) not in embeddings | head_keys:
                body += parameter.numel()
                frozen += 0 if parameter.requires_grad else parameter.numel()
        config: Any = None if core is None else core.config.get_text_config()
        layers = int(getattr(config, "num_hidden_layers", 0) or 0)
        return cls(
            body=body,
            head=outside + (0 if head is None else head.numel()),
            layers=layers,
            attention_width=_attention_width(config),
            frozen_body=frozen,
            frozen_head=0 if head is None or head.requires_grad else head.numel(),
        )

    def forward(self, lengths: Sequence[int], head_tokens: int | None = None) -> int:
        """Operations of a forward pass over rows of these lengths."""
        return self._flops(sum(lengths), head_tokens, causal_context(lengths))

    def backward(self, lengths: Sequence[int], head_tokens: int | None = None) -> int:
        """Operations of the backward pass that follows."""
        read = sum(lengths) if head_tokens is None else head_tokens
        saved = 2 * self.frozen_body * sum(lengths) + 2 * self.frozen_head * read
        return backward_flops(self.forward(lengths, head_tokens)) - saved

    def generate(
        self, prompt_lengths: Sequence[int], completion_lengths: Sequence[int], group_size: int
    ) -> int:
        """Operations of sampling: each prompt once, then every new token over the cache.

        A row's last token is sampled but never read, so n new tokens cost n − 1 passes.

        Args:
            prompt_lengths: [N] one for each group.
            completion_lengths: [N·G] new tokens of each row, in group order.
            group_size: G.
        """
        prefill = self.forward(prompt_lengths, head_tokens=len(prompt_lengths))
        new = [max(n - 1, 0) for n in completion_lengths]
        cached = [n for n in prompt_lengths for _ in range(group_size)]
        return prefill + self._flops(sum(new), None, causal_context(new, cached))

    def _flops(self, tokens: int, head_tokens: int | None, context: int) -> int:
        return forward_flops(
            self.body,
            self.head,
            tokens,
            head_tokens=head_tokens,
            layers=self.layers,
            attention_width=self.attention_width,
            context=context,
        )


def n_parameters(model: nn.Module, trainable: bool = False) -> int:
    """Number of parameters, tied ones once; `trainable`: only those with gradients."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable)


def _transformers_part(model: nn.Module) -> Any:
    """The outermost module with a transformers config."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "get_text_config"):
            return module
    return None


def _attention_width(config: Any) -> int:
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    size = getattr(config, "head_dim", None)
    if size is None and heads:
        size = int(getattr(config, "hidden_size", 0)) // heads
    return heads * int(size or 0)
