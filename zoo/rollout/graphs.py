"""Decoding on a GPU by replaying a recorded step: one launch instead of some hundred kernels.

Written for CUDA, where at small batches the launches take longer than the arithmetic. Tests run
the same step unrecorded on a CPU; recording itself has not been run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from zoo.rollout.lean import LeanDecoding


class GraphDecoding(LeanDecoding):
    """`LeanDecoding` with inputs and cache at fixed addresses, so that a step can be recorded.

    A recording holds while no tensor moves: until the cache grows by a block, or rows leave or
    join. The logits of a step are overwritten by the next one.
    """

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, mask: Tensor, n: int) -> None:
        super().__init__(model, cache, mask, n)
        self._column = torch.zeros(1, dtype=torch.long, device=mask.device)
        self._tokens = torch.zeros_like(self.position)
        self._held: list[Tensor] = []  # what the recording reads and writes
        self._replay: Callable[[], Tensor] | None = None

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether the model has the shape that `step` computes, on a GPU that records."""
        return model.device.type == "cuda" and LeanDecoding.fits(model)

    def step(self, tokens: Tensor) -> Tensor:
        """[R] newest tokens → [R, V] logits of the next ones."""
        self._open_column()
        blocks: list[Any] = list(self.cache.layers)
        held = [self.mask, self.position, *(x for b in blocks for x in (b.keys, b.values))]
        moved = len(held) != len(self._held) or any(
            a is not b for a, b in zip(held, self._held, strict=False)
        )
        self._column.fill_(self.cache.used)
        if self._replay is None or moved:
            self._tokens = tokens.clone()
            self._held, self._replay = held, recorded(lambda: self._forward(self._tokens))
        else:
            self._tokens.copy_(tokens)
        logits = self._replay()
        self.position += 1
        self.cache.used += 1
        return logits

    def _store(self, block: Any, keys: Tensor, values: Tensor) -> None:
        block.keys.index_copy_(2, self._column, keys[:, :, None])
        block.values.index_copy_(2, self._column, values[:, :, None])


def recorded(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`run` as a CUDA graph over the memory it uses now; itself where there is no CUDA."""
    if not torch.cuda.is_available():
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries allocate on their first call
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
