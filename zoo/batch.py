"""The one batch type: N groups of G rows, for rollouts, pairs, examples and rankings alike."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scale:
    """Sizes of the whole optimizer step, summed over micro-batches and ranks.

    Every loss is divided by one of these, never by the size of a micro-batch, so that 1×8 and 8×1
    micro-batches give the same gradient.
    """

    tokens: int  # tokens under training
    sequences: int  # rows with at least one token under training
    groups: int  # groups with at least one token under training
    max_completion_length: int  # a constant of the run (Dr. GRPO's denominator)


@dataclass(frozen=True)
class Batch:
    """N groups × G rows, right-padded; B = N·G rows, T tokens.

    GRPO: G samples of one prompt. Pairs: G = 2, chosen then rejected. Examples: G = 1.
    Per-token tensors are aligned with `input_ids`: `logprobs[:, t]` belongs to `input_ids[:, t]`
    given everything before it; column 0 is 0 and masked. `values[:, t]` is the value of the prefix
    *before* token t. Masked entries may hold anything: select with `torch.where`.
    """

    input_ids: Tensor  # [B, T] int64: prompt, then completion, then padding
    attention_mask: Tensor  # [B, T] bool: real tokens
    completion_mask: Tensor  # [B, T] bool: tokens under training, EOS included
    prompt_lengths: Tensor  # [B] int64
    group_size: int
    prompt_ids: tuple[str, ...]  # [N]
    row_keys: Tensor  # [B] int64: hash of the row's content
    truncated: Tensor  # [B] bool: stopped by the length limit, not by itself
    rewards: Tensor | None = None  # [B] float32
    scored: Tensor | None = None  # [B] bool; False: the reward abstained
    sampling_logprobs: Tensor | None = None  # [B, T] float32, from the sampler
    old_logprobs: Tensor | None = None  # [B, T] float32, of the policy before the first update
    ref_logprobs: Tensor | None = None  # [B, T] float32
    values: Tensor | None = None  # [B, T] float32
    advantages: Tensor | None = None  # [B, T] float32
    returns: Tensor | None = None  # [B, T] float32
    extra: dict[str, Tensor] = field(default_factory=dict)  # name → [B, …], for extensions
    scale: Scale | None = None

    def __post_init__(self) -> None:
        rows, length = self.input_ids.shape
        assert rows == len(self.prompt_ids) * self.group_size, (
            f"{rows} rows are not {len(self.prompt_ids)} groups of {self.group_size}"
        )
        for name, value in self._tensors():
            assert value.shape[0] == rows, f"{name} has {value.shape[0]} rows, not {rows}"
        if length:
            right_padded = self.attention_mask[:, :-1] | ~self.attention_mask[:, 1:]
            assert bool(right_padded.all()), "rows must be right-padded"
            assert not bool(self.completion_mask[:, 0].any()), "column 0 cannot be trained"
            assert not bool((self.completion_mask & ~self.attention_mask).any()), "padding trained"

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                yield item.name, value
        for name, value in self.extra.items():
            yield f"extra[{name!r}]", value

    # sizes -----------------------------------------------------------------------------------

    @property
    def n_rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def n_groups(self) -> int:
        return len(self.prompt_ids)

    @property
    def n_trained_groups(self) -> int:
        """Groups with at least one token under training."""
        rows = self.completion_mask.any(1).view(self.n_groups, self.group_size)
        return int(rows.any(1).sum())

    @property
    def device(self) -> torch.device:
        return self.input_ids.device

    @property
    def lengths(self) -> Tensor:
        """[B] number of real tokens, prompt included."""
        return self.attention_mask.sum(1)

    @property
    def completion_lengths(self) -> Tensor:
        """[B] number of tokens after the prompt."""
        return self.lengths - self.prompt_lengths

    def local_scale(self, max_completion_length: int) -> Scale:
        """The sizes of this batch alone; the loop sums them over ranks."""
        return Scale(
            tokens=int(self.completion_mask.sum()),
            sequences=int(self.completion_mask.any(1).sum()),
            groups=self.n_trained_groups,
            max_completion_length=max_completion_length,
        )

    # selection -------------------------------------------------------------------------------

    def replace(self, **changes: Any) -> Batch:
        return replace(self, **changes)

    def with_extra(self, **tensors: Tensor) -> Batch:
        return replace(self, extra={**self.extra, **tensors})

    def to(self, device: torch.device | str) -> Batch:
        moved = {n: v.to(device) for n, v in self._tensors() if not n.startswith("extra[")}
        return replace(self, **moved, extra={n: v.to(device) for n, v in self.extra.items()})

    def select_rows(self, index: Tensor, group_size: int) -> Batch:
        """The rows at `index` [M], regrouped: M is a multiple of `group_size`.

        Raises:
            ValueError: a new group would mix rows of different prompts.
        """
        groups = (index // self.group_size).view(-1, group_size)
        if bool((groups != groups[:, :1]).any()):
            raise ValueError(f"select_rows: a group of {group_size} would mix prompts")
        chosen = {n: v[index] for n, v in self._tensors() if not n.startswith("extra[")}
        prompts = tuple(self.prompt_ids[g] for g in groups[:, 0].tolist())
        extra = {n: v[index] for n, v in self.extra.items()}
        return replace(self, **chosen, extra=extra, group_size=group_size, prompt_ids=prompts)

    def select_groups(self, index: Tensor | Sequence[int]) -> Batch:
        """The groups at `index` (bool [N] or int), whole."""
        index = torch.as_tensor(index, device=self.device)
        if index.dtype == torch.bool:
            index = index.nonzero().squeeze(1)
        offsets = torch.arange(self.group_size, device=self.device)
        rows = (index[:, None].long() * self.group_size + offsets).reshape(-1)
        return self.select_rows(rows, self.group_size)

    def trim(self) -> Batch:
        """Without the columns that are padding in every row."""
        length = max(int(self.lengths.max()) if self.n_rows else 1, 1)
        width = self.input_ids.shape[1]
        if length == width:
            return self
        cut = {
            n: v[:, :length]
            for n, v in self._tensors()
            if v.dim() >= 2 and v.shape[1] == width and not n.startswith("extra[")
        }
        extra = {
            n: v[:, :length] if v.dim() >= 2 and v.shape[1] == width else v
            for n, v in self.extra.items()
        }
        return replace(self, **cut, extra=extra)

    def micro_batches_needed(self, token_budget: int, rows_coupled: bool) -> int:
        """How many micro-batches keep rows × length within `token_budget`, where units allow.

        Whole groups, so that a prompt is read once for all its rows; a group that exceeds the
        budget is cut into rows, unless they are coupled.
        """
        whole = rows_coupled or self.group_size * self.input_ids.shape[1] <= token_budget
        units = self.n_groups if whole else self.n_rows
        unit_tokens = self.input_ids.numel() // max(units, 1)
        units_each = max(1, token_budget // max(unit_tokens, 1))  # whole groups or rows only
        return max(1, math.ceil(units / units_each))

    def split(self, parts: int, rows_coupled: bool) -> list[Batch]:
        """`parts` contiguous micro-batches, trimmed; a group is cut only where there are fewer
        groups than parts, and never if its rows are coupled.
        """
        if parts == 1:
            return [self.trim()]
        whole = rows_coupled or parts <= self.n_groups
        units = self.n_groups if whole else self.n_rows
        pieces = torch.arange(units, device=self.device).tensor_split(parts)
        if whole:
            return [self.select_groups(piece).trim() for piece in pieces]
        return [self.select_rows(piece, 1).trim() for piece in pieces]

    def minibatches(self, parts: int, generator: torch.Generator) -> list[Batch]:
        """`parts` minibatches of whole groups in random order (one part: the batch itself).

        Fewer where `keep` left fewer groups: an empty minibatch has nothing to step on.
        """
        parts = min(parts, self.n_groups)
        if parts <= 1:
            return [self]
        order = torch.randperm(self.n_groups, generator=generator).to(self.device)
        return [self.select_groups(piece).trim() for piece in order.tensor_split(parts)]


def row_key(token_ids: Sequence[int], prompt_length: int) -> int:
    """63-bit hash of a row's tokens and of where its completion starts; stable across machines."""
    text = f"{prompt_length}:" + ",".join(map(str, token_ids))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def collate(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    group_size: int,
    prompt_ids: Sequence[str],
    pad_token_id: int = 0,
    truncated: Sequence[bool] | None = None,
    completion_logprobs: Sequence[Sequence[float]] | None = None,
    trained: Sequence[Sequence[bool]] | None = None,
) -> Batch:
    """Rows of token ids → a right-padded `Batch`; masks come from lengths, never from pad ids.

    Args:
        prompts: [B] lists of prompt token ids, at least one each.
        completions: [B] lists of completion token ids, the stop token included.
        group_size: G; rows of one group are contiguous.
        prompt_ids: [N] names of the prompts.
        pad_token_id: filler; may equal EOS.
        truncated: [B] stopped by the length limit.
        completion_logprobs: [B] log-probs of the completion tokens under the sampler.
        trained: [B] which completion tokens are under training (default: all).
    Raises:
        ValueError: an empty prompt.
    """
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"row {index} has an empty prompt: nothing predicts its first token")
    rows = len(prompts)
    lengths = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    width = max(lengths, default=1)
    input_ids = torch.full((rows, width), pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros(rows, width, dtype=torch.bool)
    completion_mask = torch.zeros(rows, width, dtype=torch.bool)
    logprobs = torch.zeros(rows, width) if completion_logprobs is not None else None
    keys = []
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = len(prompt), lengths[i]
        row = [*prompt, *completion]
        input_ids[i, :end] = torch.tensor(row, dtype=torch.long)
        attention_mask[i, :end] = True
        completion_mask[i, start:end] = True
        if trained is not None:
            completion_mask[i, start:end] = torch.tensor(list(trained[i]), dtype=torch.bool)
        if logprobs is not None and completion_logprobs is not None and end > start:
            logprobs[i, start:end] = torch.tensor(completion_logprobs[i], dtype=torch.float32)
        keys.append(row_key(row, start))
    return Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        completion_mask=completion_mask,
        prompt_lengths=torch.tensor([len(p) for p in prompts], dtype=torch.long),
        group_size=group_size,
        prompt_ids=tuple(prompt_ids),
        row_keys=torch.tensor(keys, dtype=torch.long),
        truncated=torch.tensor(truncated or [False] * rows, dtype=torch.bool),
        sampling_logprobs=logprobs,
    )
