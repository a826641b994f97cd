"""One token more for every row: the cache, the mask and the forward pass of decoding."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from zoo.models.packing import not_offered

ATTENTION = "zoo_decode"
COLUMNS = 32  # by which the cache grows


class PlainDecoding:
    """transformers' own cache and forward: the reference for the others.

    Args:
        model: the decoder.
        cache: of the prompts, one row each.
        mask: [P, width] int64 left-padded attention mask of the prompts.
        n: samples of each prompt.
    """

    joins = False  # no other prompts while some decode

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, mask: Tensor, n: int) -> None:
        cache.batch_repeat_interleave(n)
        self.model = model
        self.cache: Any = cache
        self.mask = mask.repeat_interleave(n, 0)

    def __enter__(self) -> PlainDecoding:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def step(self, tokens: Tensor) -> Tensor:
        """[R] newest tokens → [R, V] logits of the next ones."""
        self.mask = F.pad(self.mask, (0, 1), value=1)
        return self.model(
            input_ids=tokens[:, None],
            attention_mask=self.mask,
            position_ids=self.mask.sum(1, keepdim=True) - 1,
            use_cache=True,
            **{cache_argument(self.model): self.cache},
        ).logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        self.cache.batch_select_indices(rows)
        self.mask = self.mask[rows]

    def aside(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def join(self, cache: DynamicCache, mask: Tensor, n: int) -> None:
        raise NotImplementedError("these rows start together")


class WholeDecoding(PlainDecoding):
    """No cache: every row's text is read again for each token, beside rows of its length alone.

    Slow and right for any causal model, states and positions of its own make included: nothing is
    padded and nothing kept. What else does not fit decodes this way.

    Args:
        model: the decoder.
        prompts: token ids, one list each.
        mask: of no use here.
        n: samples of each prompt.
    """

    def __init__(
        self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], mask: Any, n: int
    ) -> None:
        self.model = model
        self.cache = None
        self.rows = [list(prompt) for prompt in prompts for _ in range(n)]

    def step(self, tokens: Tensor) -> Tensor:
        """[R] newest tokens → [R, V] logits of the next ones."""
        for row, token in zip(self.rows, tokens.tolist(), strict=True):
            row.append(token)
        return last_logits(self.model, self.rows)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        self.rows = [self.rows[i] for i in rows.tolist()]


def last_logits(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """[R, V] logits after each row, rows of one length read together and without a cache."""
    found: dict[int, Tensor] = {}
    # Of every position they would be the largest tensor there is
    last = {"logits_to_keep": 1} if "logits_to_keep" in _arguments(model) else {}
    for length in sorted({len(row) for row in rows}):
        chosen = [i for i, row in enumerate(rows) if len(row) == length]
        ids = torch.tensor([list(rows[i]) for i in chosen], device=model.device)
        made = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **last)
        found |= dict(zip(chosen, made.logits[:, -1].clone(), strict=True))
    return torch.stack([found[i] for i in range(len(rows))])


class BlockDecoding:
    """The model's own forward over a contiguous cache, with attention by two matrix products.

    The cache of a layer is one block of columns, grown by 32 at a time, and attention runs over
    the whole block under an additive mask: a slice of a larger cache would be copied before every
    product. On a CPU that is ten times faster than SDPA with one query. A key carries its position,
    so a row may lie anywhere in the block: new rows end where the others' newest column is.
    """

    joins = True

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, mask: Tensor, n: int) -> None:
        self.model = model
        self.cache = BlockCache(cache, n)
        width = self.cache.width
        seen = mask.shape[1]
        real = F.pad(mask.repeat_interleave(n, 0), (0, width - seen)).bool()
        self.mask = torch.zeros(real.shape, dtype=self.cache.dtype, device=mask.device)
        self.mask.masked_fill_(~real, -torch.inf)
        self.position = mask.sum(1).repeat_interleave(n, 0)  # of the next token
        self._name = cache_argument(model)
        self._before: Any = None

    @staticmethod
    def takes(cache: DynamicCache) -> bool:
        """Whether all layers keep plain keys and values: no windows, no states."""
        return all(type(layer) is DynamicLayer for layer in cache.layers)

    def __enter__(self) -> BlockDecoding:
        self._before = self.model.config._attn_implementation
        self.model.set_attn_implementation(ATTENTION)
        return self

    def __exit__(self, *_: Any) -> None:
        self.model.set_attn_implementation(self._before)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The model's own attention inside, to read prompts with."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def step(self, tokens: Tensor) -> Tensor:
        """[R] newest tokens → [R, V] logits of the next ones."""
        self._open_column()
        logits = self._forward(tokens)
        self.position = self.position + 1
        self.cache.used += 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only; see `BlockCache.keep`."""
        self.cache.keep(rows)
        self.mask, self.position = self.mask[rows], self.position[rows]

    def join(self, cache: DynamicCache, mask: Tensor, n: int) -> None:
        """Add n rows of each prompt in `cache`, whose [P, width] mask is left-padded."""
        seen = mask.shape[1]
        self._shift(seen)
        self.cache.join(cache, n)
        more = self.mask.new_full((mask.shape[0] * n, self.cache.width), -torch.inf)
        real = mask.repeat_interleave(n, 0).bool()
        more[:, self.cache.used - seen : self.cache.used].masked_fill_(real, 0)
        self.mask = torch.cat([self.mask, more])
        self.position = torch.cat([self.position, mask.sum(1).repeat_interleave(n, 0)])

    def _shift(self, needed: int) -> None:
        """Drop columns that no row sees any more, or open some, so that `needed` lie behind."""
        first = int((self.mask == 0).any(0).to(torch.uint8).argmax())
        columns = -(min(first, self.cache.used - needed) // COLUMNS) * COLUMNS  # to open
        if columns:
            self.mask = F.pad(self.mask, (columns, 0), value=-torch.inf)
            self.cache.shift(columns)

    def _open_column(self) -> None:
        if self.cache.used == self.cache.width:
            self.cache.grow()
            self.mask = F.pad(self.mask, (0, COLUMNS), value=-torch.inf)
        self.mask[:, self.cache.used] = 0

    def _forward(self, tokens: Tensor) -> Tensor:
        return self.model(
            input_ids=tokens[:, None],
            attention_mask=self.mask[:, None, None],  # four axes: taken as it is
            position_ids=self.position[:, None],
            use_cache=True,
            **{self._name: self.cache},
        ).logits[:, -1]


class BlockCache(Cache):
    """Keys and values of all layers, [R, heads, width, size] each, contiguous.

    Made from the prompts' cache, every prompt's row repeated n times.
    """

    def __init__(self, prompts: DynamicCache, n: int) -> None:
        first: Any = prompts.layers[0]
        self.used = int(first.keys.shape[2])  # columns filled before this step
        self.width = -(-(self.used + 1) // COLUMNS) * COLUMNS
        self.dtype = first.keys.dtype
        super().__init__(layers=[_Block(self, layer, n) for layer in prompts.layers])

    def grow(self) -> None:
        self.width += COLUMNS
        for layer in self.layers:
            layer.keys = F.pad(layer.keys, (0, 0, 0, COLUMNS))  # pyright: ignore
            layer.values = F.pad(layer.values, (0, 0, 0, COLUMNS))  # pyright: ignore

    def shift(self, columns: int) -> None:
        """Open columns in front, or if negative, drop some."""
        self.width += columns
        self.used += columns
        for layer in self.layers:
            layer.keys = F.pad(layer.keys, (0, 0, columns, 0)).contiguous()  # pyright: ignore
            layer.values = F.pad(layer.values, (0, 0, columns, 0)).contiguous()  # pyright: ignore

    def join(self, prompts: DynamicCache, n: int) -> None:
        """n more rows of each prompt; the last column of the prompts is the newest one here."""
        for layer, more in zip(self.layers, prompts.layers, strict=True):
            for name in ("keys", "values"):
                new = getattr(more, name)
                start = self.used - new.shape[2]
                wide = _widened(new, n, self.width, start)
                setattr(layer, name, torch.cat([getattr(layer, name), wide]))

    def keep(self, rows: Tensor) -> None:
        """Row i becomes row rows[i], which is i or lies behind all that are kept."""
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero().squeeze(1)
        for layer in self.layers:
            for name in ("keys", "values"):
                held = getattr(layer, name)
                held[moved] = held[rows[moved]]  # a few rows; to copy all costs as much as a step
                setattr(layer, name, held[: len(rows)])


class _Block(CacheLayerMixin):
    is_sliding = False

    def __init__(self, cache: BlockCache, prompts: Any, n: int) -> None:
        super().__init__()
        self.cache: Any = weakref.proxy(cache)  # in a circle both would wait for the collector
        self.keys = _widened(prompts.keys, n, cache.width)
        self.values = _widened(prompts.values, n, cache.width)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the newest column; returns the whole block, the columns ahead included."""
        assert self.keys is not None and self.values is not None
        self.keys[:, :, self.cache.used] = key_states[:, :, 0]
        self.values[:, :, self.cache.used] = value_states[:, :, 0]
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.width, 0

    def get_seq_length(self) -> int:
        return self.cache.used

    def get_max_length(self) -> int:
        return -1


def _widened(prompts: Tensor, n: int, width: int, start: int = 0) -> Tensor:
    rows, heads, seen, size = prompts.shape
    block = prompts.new_zeros(rows, n, heads, width, size)
    block[:, :, :, start : start + seen] = prompts[:, None]
    return block.view(rows * n, heads, width, size)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of one query a row, without repeating keys for the queries that share them.

    Args:
        query: [R, Hkv, queries of a key head, D], scaled.
        keys, values: [R, Hkv, W, D] contiguous.
        mask: [R, 1, 1, W] additive.
    Returns:
        [R, Hkv, queries of a key head, D]; the softmax computes in float32 whatever goes in.
    """
    scores = torch.matmul(query, keys.mT).add_(mask)
    return torch.matmul(scores.softmax(-1), values)


def decode_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface for a single new token of each row.

    Raises:
        NotImplementedError: the model asks for a cap, a bias or sinks, or hands no mask on.
    """
    odd = not_offered(others)
    if odd or attention_mask is None or query.shape[2] != 1:
        raise NotImplementedError(
            f"block decoding for {type(module).__name__} with {', '.join(odd) or 'its own mask'}"
        )
    rows, heads, _, size = query.shape
    shared = key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    grouped = (query * scale).reshape(rows, shared, heads // shared, size)
    out = attend(grouped, key, value, attention_mask)
    return out.reshape(rows, 1, heads, -1), None


AttentionInterface.register(ATTENTION, decode_attention)


def cache_tensors(cache: Any) -> list[Tensor]:
    """What a cache of transformers' interface holds; anything else holds nothing."""
    layers = getattr(cache, "layers", ())
    held = (value for layer in layers for value in vars(layer).values())
    return [value for value in held if isinstance(value, Tensor)]


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's forward calls its cache: newer transformers renamed it."""
    return "cache" if "cache" in _arguments(model) else "past_key_values"


def _arguments(model: PreTrainedModel) -> Mapping[str, Any]:
    return inspect.signature(model.forward).parameters
