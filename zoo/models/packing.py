"""A batch without padding: each prompt once, then the completions that share it.

Rows in a row that begin with the same prompt (the samples of a group, the two sides of a pair)
share its forward pass: with causal attention the prompt's states do not depend on what follows.
The tokens of a batch become one row of M; linear layers see real tokens only, and attention sees
padded blocks, prompts [N, P] and completions [N, G, C], in one call a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from zoo.batch import Batch

ATTENTION = "zoo_packed"
LONGEST = 2048  # tokens of a row; beyond, the score matrices outgrow what packing saves

# Shapes that repeat are cheaper: oneDNN prepares each new one
_TOKENS, _LENGTHS = 64, 16


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a batch lie in the packed row and in the blocks of attention."""

    input_ids: Tensor  # [1, M]
    position_ids: Tensor  # [1, M]; a completion continues its prompt's
    tokens: int  # real ones; the rest of M is filler, at least one
    place: Tensor  # [B, T]: position in the packed row
    prompts: Tensor  # [N, P]: position in the packed row, M − 1 for padding
    completions: Tensor  # [N, G, C]: the same
    home: Tensor  # [M]: place in prompts and completions, flattened and joined
    bias: Tensor  # [N, 1, C, P + C] 0 or −inf: what a completion's token sees
    causal: Tensor  # [P, P] 0 or −inf

    @cached_property
    def seen(self) -> Any:
        """What a token sees, as flex_attention takes it; one for all layers."""
        from zoo.models.flex import block_mask

        return block_mask(self)

    @staticmethod
    def of(batch: Batch, dtype: torch.dtype) -> Layout:
        """The layout of a batch; `dtype` is that of the masks."""
        ids, device = batch.input_ids, batch.device
        prompt, length = batch.prompt_lengths, batch.lengths
        rows, width = ids.shape
        columns = torch.arange(width, device=device)
        inside = columns < prompt[:, None]
        same = ((ids[1:] == ids[:-1]) | ~inside[1:]).all(1) & (prompt[1:] == prompt[:-1])
        new = torch.cat([same.new_ones(1), ~same])
        run = new.cumsum(0) - 1  # [B]: which prompt
        first = new.nonzero().squeeze(1)  # [N]
        member = torch.arange(rows, device=device) - first[run]
        completion = length - prompt
        n, g = int(first.numel()), int(member.max()) + 1
        p = _up(int(prompt.max()), _LENGTHS)
        c = _up(max(int(completion.max()), 1), _LENGTHS)

        prompt_real = torch.arange(p, device=device) < prompt[first, None]  # [N, P]
        own = torch.arange(c, device=device)
        completion_real = own < completion[:, None]  # [B, C]
        of_prompts = int(prompt_real.sum())
        tokens = of_prompts + int(completion_real.sum())
        total = _up(tokens + 1, _TOKENS)
        filler = total - 1
        prompts = torch.where(prompt_real, prompt_real.flatten().cumsum(0).view(n, p) - 1, filler)
        counted = completion_real.flatten().cumsum(0).view(rows, c) - 1 + of_prompts
        by_row = torch.where(completion_real, counted, filler)
        completions = by_row.new_full((n, g, c), filler)
        completions[run, member] = by_row

        # What each place of a block holds: token and position
        token = ids.new_zeros(total)
        position = ids.new_zeros(total)
        wide = torch.nn.functional.pad(ids, (0, max(p - width, 0)))
        token[prompts[prompt_real]] = wide[first, :p][prompt_real]
        position[prompts[prompt_real]] = torch.arange(p, device=device).expand(n, p)[prompt_real]
        at = prompt[:, None] + own
        token[by_row[completion_real]] = ids.gather(1, at.clamp(max=width - 1))[completion_real]
        position[by_row[completion_real]] = at[completion_real]

        after = (columns - prompt[:, None]).clamp(0, c - 1)
        place = torch.where(
            inside, prompts[run][:, columns.clamp(max=p - 1)], by_row.gather(1, after)
        )
        place = torch.where(columns < length[:, None], place, filler)
        blocks = torch.cat([prompts.flatten(), completions.flatten()])
        home = ids.new_zeros(total)
        home[blocks] = torch.arange(blocks.numel(), device=device)

        closed = torch.full((), -torch.inf, dtype=dtype, device=device)
        bias = torch.zeros(n, 1, c, p + c, dtype=dtype, device=device)
        bias[..., :p].masked_fill_(~prompt_real[:, None, None], -torch.inf)
        bias[..., p:] = torch.triu(closed.expand(c, c), 1)
        causal = torch.triu(closed.expand(p, p), 1)
        return Layout(
            token[None], position[None], tokens, place, prompts, completions, home, bias, causal
        )

    def hidden(self, backbone: Any) -> Tensor:
        """[M, H] last hidden states of the packed row."""
        return backbone(
            input_ids=self.input_ids,
            attention_mask=None,
            position_ids=self.position_ids,
            use_cache=False,
            packed_layout=self,
        ).last_hidden_state[0]


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class _Read(torch.autograd.Function):
    """x[index] for an index with few repetitions; the backward is a copy, then the repetitions."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = source.shape[0]
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        grad = grads[0]
        out = grad.new_zeros(ctx.rows, *grad.shape[1:])
        here = torch.arange(index.numel(), device=index.device)
        # The first of each; `first[index] = here` would take any, and sums must repeat bit for bit
        first = index.new_full((ctx.rows,), index.numel())
        first.scatter_reduce_(0, index, here, "amin")
        once = first[index] == here
        out[index[once]] = grad[once]
        rest = ~once
        if bool(rest.any()):
            # A prompt's last token predicts the first one of each of its completions.
            wide = torch.promote_types(grad.dtype, torch.float32)
            places, group = index[rest].unique(return_inverse=True)
            more = torch.zeros(places.numel(), *grad.shape[1:], dtype=wide, device=grad.device)
            more.index_add_(0, group, grad[rest].to(wide))
            out[places] = (out[places].to(wide) + more).to(out.dtype)
        return out, None


def read(hidden: Tensor, index: Tensor) -> Tensor:
    """[K, H] rows of `hidden` [M, H] at `index` [K]; repeated ones add up in the backward pass."""
    return _Read.apply(hidden, index)  # pyright: ignore


class _Attention(torch.autograd.Function):
    """Prompts attend causally to themselves, completions to their prompt and themselves.

    Plain matrix products: on a CPU in bfloat16 they are two to three times faster than SDPA. The
    probabilities are kept for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # [M, Hq·D], scaled
        key: Tensor,  # [M, Hkv·D]
        value: Tensor,  # [M, Hkv·D]
        layout: Layout,
        heads: tuple[int, int],  # Hkv, D
    ) -> Tensor:
        blocks = _Blocks(layout, query.shape[1] // (heads[0] * heads[1]), *heads)
        q_prompt, q_own = blocks.queries(query)
        k_prompt, k_all = blocks.keys(key)
        v_prompt, v_all = blocks.keys(value)
        p_prompt, p_own = blocks.weights(q_prompt @ k_prompt.mT, q_own @ k_all.mT)
        out = blocks.packed_queries(p_prompt @ v_prompt, p_own @ v_all)
        ctx.save_for_backward(q_prompt, q_own, k_prompt, k_all, v_prompt, v_all, p_prompt, p_own)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_prompt, q_own, k_prompt, k_all, v_prompt, v_all, p_prompt, p_own = ctx.saved_tensors
        blocks: _Blocks = ctx.blocks
        d_prompt, d_own = blocks.queries(grads[0].contiguous())
        s_prompt = _softmax_backward(d_prompt @ v_prompt.mT, p_prompt)
        s_own = _softmax_backward(d_own @ v_all.mT, p_own)
        return (
            blocks.packed_queries(s_prompt @ k_prompt, s_own @ k_all),
            blocks.packed_keys(s_prompt.mT @ q_prompt, s_own.mT @ q_own),
            blocks.packed_keys(p_prompt.mT @ d_prompt, p_own.mT @ d_own),
            None,
            None,
        )


def _softmax_backward(grad: Tensor, weights: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)


class _Blocks:
    """Between the packed row [M, heads·D] and the blocks that matrix products take.

    Every token has one place in the blocks, so both directions are gathers, and the gradient of
    either is the other one. (The backward of `x[index]` is a serial scatter.)
    """

    def __init__(self, layout: Layout, repeats: int, heads: int, size: int) -> None:
        self.layout = layout
        self.r, self.h, self.d = repeats, heads, size  # queries a key head, key heads, head size
        self.n, self.p = layout.prompts.shape
        self.g, self.c = layout.completions.shape[1:]
        self.index = torch.cat([layout.prompts.flatten(), layout.completions.flatten()])

    def queries(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """[M, Hkv·R·D] → prompts [N, Hkv, R·P, D], completions [N, Hkv, G, R·C, D]."""
        n, p, g, c, h, r, d = self.n, self.p, self.g, self.c, self.h, self.r, self.d
        taken = packed.index_select(0, self.index)
        prompt = taken[: n * p].view(n, p, h, r, d).permute(0, 2, 3, 1, 4)
        own = taken[n * p :].view(n, g, c, h, r, d).permute(0, 3, 1, 4, 2, 5)
        return prompt.reshape(n, h, r * p, d), own.reshape(n, h, g, r * c, d)

    def packed_queries(self, prompt: Tensor, own: Tensor) -> Tensor:
        """The way back of `queries`, fillers 0."""
        n, p, g, c, h, r, d = self.n, self.p, self.g, self.c, self.h, self.r, self.d
        blocks = prompt.new_empty(n * (p + g * c), h * r * d)
        blocks[: n * p].view(n, p, h, r, d).copy_(prompt.view(n, h, r, p, d).permute(0, 3, 1, 2, 4))
        own = own.view(n, h, g, r, c, d).permute(0, 2, 4, 1, 3, 5)
        blocks[n * p :].view(n, g, c, h, r, d).copy_(own)
        return self._packed(blocks)

    def keys(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """[M, Hkv·D] → prompts [N, Hkv, P, D]; with them completions [N, Hkv, G, P + C, D]."""
        n, p, g, c, h, d = self.n, self.p, self.g, self.c, self.h, self.d
        taken = packed.index_select(0, self.index)
        prompt = taken[: n * p].view(n, p, h, d).permute(0, 2, 1, 3).contiguous()
        both = taken.new_empty(n, h, g, p + c, d)
        both[..., :p, :] = prompt[:, :, None]
        both[..., p:, :] = taken[n * p :].view(n, g, c, h, d).permute(0, 3, 1, 2, 4)
        return prompt, both

    def packed_keys(self, prompt: Tensor, both: Tensor) -> Tensor:
        """The gradient of `keys`: a prompt's sums over its completions."""
        n, p, g, c, h, d = self.n, self.p, self.g, self.c, self.h, self.d
        total = prompt + both[..., :p, :].sum(2)
        blocks = prompt.new_empty(n * (p + g * c), h * d)
        blocks[: n * p].view(n, p, h, d).copy_(total.permute(0, 2, 1, 3))
        own = both[..., p:, :].permute(0, 2, 3, 1, 4)
        blocks[n * p :].view(n, g, c, h, d).copy_(own)
        return self._packed(blocks)

    def weights(self, prompt: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities from scores, which are overwritten."""
        n, p, g, c, h, r = self.n, self.p, self.g, self.c, self.h, self.r
        prompt.view(n, h, r, p, p).add_(self.layout.causal)
        own.view(n, h, g, r, c, p + c).add_(self.layout.bias[:, :, None, None])
        return prompt.softmax(-1), own.softmax(-1)

    def _packed(self, blocks: Tensor) -> Tensor:
        packed = blocks.index_select(0, self.layout.home)
        packed[self.layout.tokens :] = 0
        return packed


def not_offered(others: dict[str, Any]) -> list[str]:
    """What a model asks of its attention that plain products have not got: a cap, a bias, sinks."""
    return [name for name in ("softcap", "position_bias", "s_aux") if others.get(name) is not None]


def given_layout(
    module: Any, attention_mask: Tensor | None, layout: Layout | None, others: dict[str, Any]
) -> Layout:
    """The layout that a model handed on to its attention.

    Raises:
        NotImplementedError: it handed none on, or asks for what packing has not got.
    """
    odd = not_offered(others)
    if layout is None or attention_mask is not None or odd:
        raise NotImplementedError(
            f"packed attention for {type(module).__name__} with "
            f"{', '.join(odd) or 'a mask of its own'}"
        )
    return layout


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_layout: Layout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface over a packed row; the layout comes as `packed_layout`.

    Raises:
        NotImplementedError: the model does not pass the layout on, or asks for what packing has
            not got (a cap, a bias, sinks).
    """
    layout = given_layout(module, attention_mask, packed_layout, others)
    _, heads, tokens, size = query.shape
    scale = size**-0.5 if scaling is None else scaling
    out = _Attention.apply(
        (query.transpose(1, 2) * scale).reshape(tokens, heads * size),
        key.transpose(1, 2).reshape(tokens, -1),
        value.transpose(1, 2).reshape(tokens, -1),
        layout,
        (key.shape[1], size),
    )
    return out.view(1, tokens, heads, size), None  # pyright: ignore


AttentionInterface.register(ATTENTION, packed_attention)
