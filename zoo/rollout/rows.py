"""What has been drawn for each row of a generation, wherever the row is in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.rollout.engine import Sampling
from zoo.seeds import uniform_numbers
from zoo.types import Completion

Draw = Callable[[Tensor, float, Tensor | None], tuple[Tensor, Tensor]]


class NumbersError(RuntimeError):
    """The policy computes NaN or infinity, so no token can be drawn from it."""


class Rows:
    """n rows of each prompt: their tokens so far, and which are done.

    Row i of a prompt draws from uniforms of (seed, the prompt's key, i) alone.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[str],
        n: int,
        sampling: Sampling,
        device: torch.device,
    ) -> None:
        self.prompts, self.keys, self.n, self.sampling = prompts, keys, n, sampling
        count, limit = len(prompts) * n, sampling.max_new_tokens
        self.uniforms: Tensor | None = None
        if sampling.temperature > 0:
            drawn = [uniform_numbers(n, limit, *sampling.seed, key) for key in keys]
            # One column more for all of them: where a row writes that has come to the limit
            self.uniforms = F.pad(torch.from_numpy(np.concatenate(drawn)), (0, 1)).to(device)
        self.tokens = torch.zeros(count, limit + 1, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(count, limit + 1, device=device)
        self.lengths = torch.zeros(count, dtype=torch.long, device=device)
        self.newest = torch.zeros(count, dtype=torch.long, device=device)
        self.stopped = torch.zeros(count, dtype=torch.bool, device=device)
        self.done = torch.zeros(count, dtype=torch.bool, device=device)
        self.stops = torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=device)

    def of(self, prompts: Sequence[int]) -> Tensor:
        """[len(prompts) · n] rows of these prompts, given by their index."""
        first = torch.tensor(prompts, device=self.done.device) * self.n
        return (first[:, None] + torch.arange(self.n, device=self.done.device)).flatten()

    def draw(self, rows: Tensor, logits: Tensor, draw: Draw) -> Tensor:
        """The next token of each row from its logits [R, V]; returns which rows are done [R].

        Raises:
            NumbersError: logits that are not finite; names the prompt.
        """
        place = self.lengths[rows]
        uniforms = self.uniforms[rows, place] if self.uniforms is not None else None
        token, logprob = draw(logits, self.sampling.temperature, uniforms)
        if not bool(logprob.isfinite().all()):
            self._refuse(int(rows[~logprob.isfinite()][0]))
        # A row that is done, there to fill up, writes behind its end and gets no longer
        going = ~self.done[rows]
        self.newest[rows] = token
        self.tokens[rows, place] = token
        self.logprobs[rows, place] = logprob
        place = place + going
        self.lengths[rows] = place
        ended = torch.isin(token, self.stops)
        self.stopped[rows] |= ended & going
        self.done[rows] |= ended | (place >= self.sampling.max_new_tokens)
        return self.done[rows]

    def _refuse(self, row: int) -> None:
        ids, key = self.prompts[row // self.n], self.keys[row // self.n]
        raise NumbersError(
            f"the policy's logits are not finite after {len(ids) + int(self.lengths[row])} tokens "
            f"of the prompt with key {key} (ids {list(ids)[:8]} …): its weights or the arithmetic "
            "of rollout.dtype broke. Start a new run with a lower train.lr, or with "
            "rollout.dtype=null."
        )

    def completions(self, decode: Callable[[list[int]], str]) -> Iterator[list[Completion]]:
        """Each prompt's n completions."""
        tokens, logprobs = self.tokens.cpu(), self.logprobs.cpu()
        lengths, stopped = self.lengths.tolist(), self.stopped.tolist()
        for start in range(0, len(lengths), self.n):
            group = []
            for row in range(start, start + self.n):
                ids = tokens[row, : lengths[row]].tolist()
                group.append(
                    Completion(
                        text=decode(ids),
                        token_ids=tuple(ids),
                        logprobs=tuple(logprobs[row, : lengths[row]].tolist()),
                        truncated=not stopped[row],
                    )
                )
            yield group
