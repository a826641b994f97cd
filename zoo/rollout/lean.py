"""Decoding of Llama-shaped models by hand: few operations a layer, joined projections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from zoo.models.lora import low_rank
from zoo.rollout.decoding import BlockDecoding, attend

# Attention then a gated SiLU network, both behind an RMS norm, biases at most in q, k, v
SHAPES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")

STEADY = ("default", "linear", "llama3", "yarn")  # kinds of rotary angles, by position alone

PACK_AFTER = 4  # steps; to pack the weights takes as long as seven steps then save


class LeanDecoding(BlockDecoding):
    """`BlockDecoding` without the modules: the same weights, the same arithmetic, fewer calls.

    Where the projections of a layer lie one after the other in memory (as `Casts` makes them),
    one product serves them all; elsewhere each has its own. On a CPU in bfloat16 a long generation
    packs its weights once into oneDNN's own layout, which every product would else do for itself:
    a quarter less time for the same bits.
    """

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, mask: Tensor, n: int) -> None:
        super().__init__(model, cache, mask, n)
        body: Any = model.base_model
        self._body = body
        self._layers = [_Layer.of(layer) for layer in body.layers]
        self._head: Any = model.get_output_embeddings()
        self._packed_head: Tensor | None = None
        self._steps = 0
        # Others' angles depend on the furthest position of the step
        self._steady = getattr(body.rotary_emb, "rope_type", "") in STEADY
        self._table: Tensor | None = None  # [2, positions, size]

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether the model has the shape that `step` computes."""
        config: Any = model.config
        body: Any = model.base_model
        return (
            type(model).__name__ in SHAPES
            and getattr(config, "hidden_act", "silu") == "silu"
            and not getattr(config, "mlp_bias", False)
            and not getattr(config, "attention_bias", False)
            and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
            # Anything else in the place of a projection would be passed over
            and all(
                type(m) is nn.Linear or low_rank(m) is not None
                for layer in body.layers
                for m in _projections(layer)
            )
        )

    def __enter__(self) -> LeanDecoding:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def _forward(self, tokens: Tensor) -> Tensor:
        body, cache = self._body, self.cache
        self._steps += 1
        if self._steps == PACK_AFTER and packs(self._head.weight):
            self._pack(len(tokens))
        hidden = F.embedding(tokens, body.embed_tokens.weight)
        cos, sin = self._turns()
        half = sin.shape[-1] // 2
        mask = self.mask[:, None, None]
        blocks: list[Any] = list(cache.layers)
        for layer, block in zip(self._layers, blocks, strict=True):
            keys, values = block.keys, block.values
            rows, shared, _, size = keys.shape
            seen = F.rms_norm(hidden, hidden.shape[-1:], layer.norm, layer.eps)
            heads = layer.qkv(seen).view(rows, -1, size)
            turned = heads[:, :-shared]  # queries and keys
            turned = turned * cos + turned.roll(half, -1) * sin
            self._store(block, turned[:, -shared:], heads[:, -shared:])
            query = (turned[:, :-shared] * layer.scale).view(rows, shared, -1, size)
            mixed = attend(query, keys, values, mask).reshape(rows, -1)
            hidden = layer.out.added(hidden, mixed)
            seen = F.rms_norm(hidden, hidden.shape[-1:], layer.norm_2, layer.eps)
            gate, up = layer.gate_up(seen).chunk(2, -1)
            hidden = layer.down.added(hidden, F.silu(gate).mul_(up))
        hidden = F.rms_norm(hidden, hidden.shape[-1:], body.norm.weight, body.norm.variance_epsilon)
        return _linear(hidden, self._head.weight, self._packed_head, self._head.bias)

    def _turns(self) -> tuple[Tensor, Tensor]:
        """cos and sin [R, 1, size] of the rows' positions, the first half of the sines negated.

        rotate_half(x) · sin = roll(x, half) · (−sin₁, sin₂): one copy instead of three. A row is
        nowhere further than the cache is wide, so a table of that length serves until it grows.
        """
        if self._steady:
            if self._table is None or self._table.shape[1] < self.cache.width:
                places = torch.arange(self.cache.width, device=self.position.device)
                self._table = self._turned(places)
            cos, sin = self._table.index_select(1, self.position)[:, :, None]
        else:
            cos, sin = self._turned(self.position)[:, :, None]
        return cos, sin

    def _turned(self, positions: Tensor) -> Tensor:
        """[2, P, size]."""
        like = self._body.embed_tokens.weight[:1, None]
        cos, sin = self._body.rotary_emb(like, position_ids=positions[None])
        half = sin.shape[-1] // 2
        return torch.stack([cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)])[:, 0]

    def _pack(self, rows: int) -> None:
        for layer in self._layers:
            for maps in (layer.qkv, layer.out, layer.gate_up, layer.down):
                maps.pack(rows)
        self._packed_head = packed(self._head.weight, rows)

    def _store(self, block: Any, keys: Tensor, values: Tensor) -> None:
        """Write the newest column [R, heads, size] of a layer's block."""
        block.keys[:, :, self.cache.used] = keys
        block.values[:, :, self.cache.used] = values


@dataclass(frozen=True)
class _Layer:
    norm: Tensor
    norm_2: Tensor
    eps: float
    scale: float
    qkv: _Joined
    gate_up: _Joined
    out: _Joined
    down: _Joined

    @staticmethod
    def of(layer: Any) -> _Layer:
        attention, network = layer.self_attn, layer.mlp
        return _Layer(
            norm=layer.input_layernorm.weight,
            norm_2=layer.post_attention_layernorm.weight,
            eps=layer.input_layernorm.variance_epsilon,
            scale=attention.scaling,
            qkv=_Joined([attention.q_proj, attention.k_proj, attention.v_proj]),
            gate_up=_Joined([network.gate_proj, network.up_proj]),
            out=_Joined([attention.o_proj]),
            down=_Joined([network.down_proj]),
        )


def _projections(layer: Any) -> list[Any]:
    attention, network = layer.self_attn, layer.mlp
    attending = [getattr(attention, f"{name}_proj") for name in "qkvo"]
    return [*attending, network.gate_proj, network.up_proj, network.down_proj]


class _Joined:
    """Linear maps of one input as one, if their weights lie in a row.

    Adapters are joined in any case: (x·Aᵀ)·Bᵀ with the A's below one another and the B's, scaled,
    on the diagonal of one matrix.
    """

    def __init__(self, maps: Sequence[Any]) -> None:
        adapters = [low_rank(m) for m in maps]
        self.maps: list[Any] = [
            m if a is None else a.base for m, a in zip(maps, adapters, strict=True)
        ]
        self.weight = in_a_row([m.weight for m in self.maps])
        biases = [m.bias for m in self.maps]
        self.bias = None if biases[0] is None else torch.cat(biases)
        self.packed: Tensor | None = None
        self.a: Tensor | None = None  # [in, Σ rank]
        self.b: Tensor | None = None  # [Σ rank, Σ out]
        if any(adapters):
            dtype = self.maps[0].weight.dtype
            self.a = torch.cat([a.down for a in adapters if a is not None]).to(dtype).t()
            blocks = [
                (a.up.to(dtype) * a.scale).t()
                if a is not None
                else m.weight.new_zeros(0, m.weight.shape[0])
                for a, m in zip(adapters, self.maps, strict=True)
            ]
            self.b = torch.block_diag(*blocks) if len(blocks) > 1 else blocks[0]

    def pack(self, rows: int) -> None:
        """Make products of `rows` rows faster, as long as the weights stay as they are."""
        if self.weight is not None:
            self.packed = packed(self.weight, rows)

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is not None:
            out = _linear(x, self.weight, self.packed, self.bias)
        else:
            out = torch.cat([F.linear(x, m.weight, m.bias) for m in self.maps], -1)
        return self._adapted(out, x)

    def added(self, hidden: Tensor, x: Tensor) -> Tensor:
        """`hidden` and the map of x; of a single map without a bias."""
        if self.packed is not None and self.weight is not None:
            out = _linear(x, self.weight, self.packed, None).add_(hidden)
        else:
            out = torch.addmm(hidden, x, self.maps[0].weight.t())
        return self._adapted(out, x)

    def _adapted(self, out: Tensor, x: Tensor) -> Tensor:
        if self.a is None or self.b is None:
            return out
        return out.addmm_(x @ self.a, self.b)


def packs(weight: Tensor) -> bool:
    """Whether products with this weight gain from oneDNN's own layout, and torch offers it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and type(weight) in (Tensor, nn.Parameter)
        and torch.backends.mkldnn.is_available()
        and all(
            hasattr(torch.ops.mkldnn, n) for n in ("_reorder_linear_weight", "_linear_pointwise")
        )
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def packed(weight: Tensor, rows: int) -> Tensor:
    """The weight [out, in] in the layout that oneDNN's product with [rows, in] wants; opaque."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)


def _linear(x: Tensor, weight: Tensor, packed: Tensor | None, bias: Tensor | None) -> Tensor:
    if packed is None:
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def in_a_row(parts: Sequence[Tensor]) -> Tensor | None:
    """The matrix whose rows the parts are, as a view; None if they do not lie in a row."""
    first = parts[0].detach()
    end = first.data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != end or part.shape[1:] != first.shape[1:]:
            return None
        end += part.nbytes
    held = first.untyped_storage()
    if any(part.untyped_storage().data_ptr() != held.data_ptr() for part in parts):
        return None
    rows = sum(part.shape[0] for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
