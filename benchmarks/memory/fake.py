"""The product's own code over tensors that have shapes and no numbers: memory without hardware.

What follows from weights is a `FakeTensor`: it has a storage of the right size and nothing in it,
so `TensorMeter` counts it as any other. What follows from a batch's tokens, masks and rewards is
small and stays real, since code asks it questions (how long, which rows, how many).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zoo.build
import zoo.models.loading
import zoo.rollout.decoding
import zoo.rollout.lean
import zoo.rollout.torch_engine
from zoo.data.source import DatasetSource
from zoo.models.policy import Policy
from zoo.rollout.decoding import BlockDecoding
from zoo.rollout.engine import Sampling
from zoo.rollout.lean import LeanDecoding
from zoo.types import Completion

aten = torch.ops.aten
SMALL = 2**20  # numbers; a float tensor made from nothing stays real up to here
FLASH = 1  # what SDPA chooses on a CPU


class Fake(TorchDispatchMode):
    """Operators on weights, and on what comes from them, give tensors without numbers.

    A question about a number (is the loss finite?) is answered by 0 or True.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # it comes next, and takes everything
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(isinstance(x, FakeTensor) for x in given):
            if given or not _large(func, args, kwargs):
                return func(*args, **kwargs)
        elif func is aten._local_scalar_dense.default:
            return {torch.bool: True}.get(args[0].dtype, 0.0 if args[0].is_floating_point() else 1)
        elif func is aten._fused_sdp_choice.default:
            return FLASH
        elif func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
            args = (args[0], _places(args[1]), *args[2:])
        # As `with self.mode: func(…)`, without the cost of entering it for every operator
        result = self.mode.__torch_dispatch__(func, types, args, kwargs)
        in_place = func.__name__.split(".")[0].endswith("_") and isinstance(args[0], Tensor)
        return args[0] if in_place and not isinstance(args[0], FakeTensor) else result


def _large(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a factory makes weights, or something as large."""
    name = func.__name__.split(".")[0]
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    if name not in ("empty", "zeros", "ones", "full", "empty_strided") or not args:
        return False
    return dtype.is_floating_point and (name == "empty" or torch.Size(args[0]).numel() > SMALL)


def _places(indices: Any) -> list[Any]:
    """Masks with numbers as the places they name: without, their count would be unknown."""
    return [
        place
        for index in indices
        for place in (
            index.nonzero(as_tuple=True)
            if isinstance(index, Tensor) and index.dtype == torch.bool
            else (index,)
        )
    ]


@contextmanager
def fake_run() -> Iterator[None]:
    """Inside, `zoo.build.build` makes a run without numbers, and its steps can be metered."""
    fake = Fake()
    create = transformers.AutoModelForCausalLM.from_config

    def model(*args: Any, **kwargs: Any) -> Any:
        with fake.mode:
            return create(*args, **kwargs)

    engine, build = zoo.rollout.torch_engine, zoo.build
    decoding: Any = zoo.rollout.decoding
    decode, open_column = engine._Decoder.generate, BlockDecoding._open_column
    columns = decoding.COLUMNS

    def cached(source: DatasetSource, steps: int, *_: Any) -> dict[int, Tensor]:
        rows = [(k, ids) for g in source.visited(steps) for k, ids in _rows(g)]
        return {key: torch.zeros(len(ids)) for key, ids in rows}

    def drawn(sampler: Any) -> Any:
        def draw(logits: Tensor, temperature: float, uniforms: Any) -> tuple[Tensor, Tensor]:
            sampler(logits, temperature, uniforms)  # its memory counts, its token does not exist
            return torch.zeros(len(logits), dtype=torch.long), torch.zeros(len(logits))

        return draw

    def way(decoder: Any, model: Any) -> type:
        return LeanDecoding if LeanDecoding.fits(model) else BlockDecoding

    def generate(
        decoder: Any, prompts: Any, keys: Any, n: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """Two tokens at the cache's last width hold as much as all the tokens before them."""
        limit, step = sampling.max_new_tokens, decoding.COLUMNS
        longest = max(map(len, prompts))
        last = -(-(longest + limit - 1) // step) * step
        grows = last - step > longest  # once more, in the second token
        with (
            mock.patch.object(decoding, "COLUMNS", last - step if grows else last),
            mock.patch.object(BlockDecoding, "_open_column", widen if grows else open_column),
        ):
            decode(decoder, prompts, keys, n, replace(sampling, max_new_tokens=min(2, limit)))
        row = Completion("", (0,) * limit, (0.0,) * limit, truncated=True)
        return [[row] * n for _ in prompts]

    def widen(blocks: BlockDecoding) -> None:
        decoding.COLUMNS = columns
        blocks.cache.used = blocks.cache.width
        open_column(blocks)
        blocks.cache.used = blocks.cache.width - columns

    patches = [
        mock.patch.object(transformers.AutoModelForCausalLM, "from_config", model),
        mock.patch.object(zoo.models.loading, "weights_hash", lambda model: "fake"),
        mock.patch.object(build, "reference_logprobs", cached),
        mock.patch.object(engine._Decoder, "generate", generate),
        # What is found out by comparing numbers, where there are none
        mock.patch.object(engine._Decoder, "_try", way),
        mock.patch.object(Policy, "check_head", lambda policy: None),
        mock.patch.object(engine, "sample", drawn(engine.sample)),
        mock.patch.object(engine, "sample_in_blocks", drawn(engine.sample_in_blocks)),
        mock.patch.object(torch.nn.Module, "to", _to),
        mock.patch.object(zoo.rollout.lean, "in_a_row", _in_a_row),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(fake)
        yield


def _rows(group: Any) -> Iterator[tuple[int, tuple[int, ...]]]:
    yield from zip(group.row_keys(), group.completions, strict=True)


def _to(module: torch.nn.Module, *args: Any, dtype: Any = None, **_: Any) -> torch.nn.Module:
    """All is on one device, so only a dtype changes anything."""
    dtype = dtype or next((arg for arg in args if isinstance(arg, torch.dtype)), None)
    for weight in module.parameters() if dtype is not None else ():
        weight.data = weight.data.to(dtype)
    return module


def _address(tensor: Tensor) -> int:
    """A number of its own for each place in each storage."""
    return (tensor.untyped_storage()._cdata << 40) + tensor.storage_offset() * tensor.itemsize


def _in_a_row(parts: Any) -> Tensor | None:
    """`zoo.rollout.lean.in_a_row`, with the storages told apart by identity."""
    first = parts[0].detach()
    rows, end = sum(len(part) for part in parts), _address(first)
    for part in parts:
        if _address(part) != end:
            return None
        end += part.nbytes
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
