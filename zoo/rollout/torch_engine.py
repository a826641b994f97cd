"""The default engine: transformers' own forward and cache, one prefill for each distinct prompt."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from zoo.models.twin import Casts, Twin
from zoo.rollout.decoding import BlockDecoding, PlainDecoding, cache_argument
from zoo.rollout.engine import Sampling
from zoo.rollout.lean import LeanDecoding
from zoo.rollout.sampler import sample, sample_in_blocks
from zoo.seeds import uniform_numbers
from zoo.types import Completion


class NumbersError(RuntimeError):
    """The policy computes NaN or infinity, so no token can be drawn from it."""


@dataclass(frozen=True)
class TorchEngine:
    """Settings of rollouts and of the plain engine.

    Raises:
        ValueError: a setting out of range.
    """

    group_size: int = 8  # G: completions of each prompt
    temperature: float = 1.0  # of sampling and of the trained log-probs alike
    max_new_tokens: int | None = None  # null: what the data says its answers need
    dtype: str | None = None  # decoding weights; null: the policy's own, shared and not copied
    max_rows: int = 256  # sequences decoded at a time
    fast: bool = True  # a block cache with attention by matrix products; false: transformers' own
    max_rounds: int = 1  # rounds of sampling until enough groups pass the algorithm's `keep`
    pair_completions: int | None = None  # budget for pairs; null: steps × groups × group_size

    def __post_init__(self) -> None:
        for name in ("group_size", "max_rows", "max_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"rollout.{name} must be at least 1, got {getattr(self, name)}. "
                    f"Leave it out for the default."
                )
        for name in ("max_new_tokens", "pair_completions"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(
                    f"rollout.{name} must be at least 1 or null, got {getattr(self, name)}."
                )
        if not self.temperature > 0:
            raise ValueError(
                f"rollout.temperature must be above 0, got {self.temperature}: argmax completions "
                "have no probability to train. Evaluation decodes greedily by itself."
            )
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(
                f"rollout.dtype must be float32, bfloat16, float16 or null, got {self.dtype!r}."
            )

    def engine(self, decode: Callable[..., str], pad_token_id: int) -> _Decoder:
        """The engine itself; `decode` turns token ids into the text that rewards read."""
        return _Decoder(self, decode, pad_token_id)


class _Decoder:
    def __init__(
        self, settings: TorchEngine, decode: Callable[..., str], pad_token_id: int
    ) -> None:
        self.settings = settings
        self.decode = decode
        self.pad_token_id = pad_token_id
        self._model: PreTrainedModel | None = None
        self._twin: Twin | None = None  # of another dtype than the policy's
        self._kinds: dict[int, type] = {}  # id of a model → the way of decoding that fits it

    def sync(self, policy: Any) -> None:
        """Share the policy's modules, or copy its weights into the decoding dtype.

        A copy that the policy itself computes with (`model.compute_dtype`) is shared.
        """
        before = self._model
        self._model = self._weights_of(policy)
        if self._model is not before:
            self._kinds = {}

    def _weights_of(self, policy: Any) -> PreTrainedModel:
        source: PreTrainedModel = policy.model
        trunk = getattr(policy, "trunk", None)
        own = source.dtype if trunk is None else trunk.dtype
        wanted = getattr(torch, self.settings.dtype) if self.settings.dtype else own
        if wanted == source.dtype:
            self._twin = None
            return source
        if self._twin is None or self._twin.source is not source:
            shared = trunk is not None and trunk.casts is not None and trunk.dtype == wanted
            casts = trunk.casts if trunk is not None and shared else Casts(source, wanted)
            self._twin = Twin(source, None, casts, trains=False)
        return self._twin()

    def release(self) -> None:
        """Forget the weights (a copy is freed)."""
        self._model = self._twin = None

    def generate(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[str], n: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """`n` completions of each prompt, in the order of the prompts.

        Each distinct prompt is prefilled once and its cache expanded to its n samples; rows that
        have stopped are dropped from the cache. Row i's draws come from (seed, key, i) alone, so
        neither the batch around a row nor the number of processes changes its tokens (beyond the
        rounding of matrix products).

        Raises:
            ValueError: an empty prompt, or one longer than the model's context less the limit.
        """
        if self._model is None:
            raise RuntimeError("the engine has no weights yet: call sync(policy) first")
        self._check(prompts, sampling)
        per_batch = max(1, self.settings.max_rows // n)
        # Prompts of similar length share a prefill, so little of it is padding.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        results: list[list[Completion]] = [[] for _ in prompts]
        training = self._model.training
        self._model.eval()
        with torch.no_grad():
            for start in range(0, len(order), per_batch):
                chosen = order[start : start + per_batch]
                made = self._decode_batch(
                    [prompts[i] for i in chosen], [keys[i] for i in chosen], n, sampling
                )
                for i, completions in zip(chosen, made, strict=True):
                    results[i] = completions
        self._model.train(training)
        return results

    def _check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        assert self._model is not None
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {index} is empty: there is nothing to continue")
            if limit is not None and len(prompt) + sampling.max_new_tokens > limit:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens, which with "
                    f"{sampling.max_new_tokens} new ones exceeds the model's context of {limit}. "
                    f"Set rollout.max_new_tokens to at most {limit - len(prompt)}, or drop it."
                )

    def _decode_batch(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[str],
        n: int,
        sampling: Sampling,
    ) -> list[list[Completion]]:
        model = self._model
        assert model is not None
        device = model.device
        logits, cache, mask = self._prefill(prompts)
        logits = logits.repeat_interleave(n, 0)
        decoding = self._way(cache)(model, cache, mask, n)
        draw_token = sample_in_blocks if self.settings.fast else sample
        limit = sampling.max_new_tokens
        rows = len(prompts) * n
        uniforms = None
        if sampling.temperature > 0:
            drawn = [uniform_numbers(n, limit, *sampling.seed, key) for key in keys]
            uniforms = torch.from_numpy(np.concatenate(drawn)).to(device)
        tokens = torch.zeros(rows, limit, dtype=torch.long)
        logprobs = torch.zeros(rows, limit)
        lengths = torch.zeros(rows, dtype=torch.long)
        stopped = torch.zeros(rows, dtype=torch.bool)
        stops = torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=device)
        alive = torch.arange(rows, device=device)  # rows still in the cache
        done = torch.zeros(rows, dtype=torch.bool, device=device)  # of those in the cache
        coarse = max(1, rows // 8)
        with decoding:
            for t in range(limit):
                if t > 0:
                    logits = decoding.step(tokens[alive.cpu(), t - 1].to(device))
                draw = uniforms[alive, t] if uniforms is not None else None
                token, logprob = draw_token(logits, sampling.temperature, draw)
                if not bool(logprob.isfinite().all()):
                    row = int(alive[~logprob.isfinite()][0]) // n
                    raise NumbersError(
                        f"the policy's logits are not finite after {len(prompts[row]) + t} tokens "
                        f"of the prompt with key {keys[row]} (ids {list(prompts[row])[:8]} …): its "
                        "weights or the arithmetic of rollout.dtype broke. Start a new run with a "
                        "lower train.lr, or with rollout.dtype=null."
                    )
                where = alive[~done].cpu()
                tokens[where, t] = token[~done].cpu()
                logprobs[where, t] = logprob[~done].cpu()
                lengths[where] += 1
                ended = torch.isin(token, stops) & ~done
                stopped[alive[ended].cpu()] = True
                done = done | ended
                if bool(done.all()) or t == limit - 1:
                    break
                # Multiples of an eighth: matrix shapes repeat, and oneDNN prepares each new one.
                left = min(-(-int((~done).sum()) // coarse) * coarse, done.numel())
                if left < done.numel():
                    # Unfinished rows first, finished ones to fill the multiple; in their old order
                    chosen = done.to(torch.uint8).argsort(stable=True)[:left].sort().values
                    decoding.keep(chosen)
                    alive, done = alive[chosen], done[chosen]
        return list(self._completions(tokens, logprobs, lengths, stopped, n))

    def _way(self, cache: DynamicCache) -> type[PlainDecoding | BlockDecoding]:
        """The fastest way of decoding that fits the model, compared with the plain one once."""
        model = self._model
        assert model is not None
        if not self.settings.fast or not BlockDecoding.takes(cache):
            return PlainDecoding
        if id(model) not in self._kinds:
            self._kinds = {id(model): self._try(model)}
        return self._kinds[id(model)]

    def _try(self, model: PreTrainedModel) -> type[PlainDecoding | BlockDecoding]:
        """The first way whose logits of two steps are the plain one's."""
        size = int(model.config.get_text_config().vocab_size)
        prompts = [[i * 7 % size for i in range(1, n)] for n in (4, 7)]

        def steps(kind: type[PlainDecoding | BlockDecoding]) -> Tensor:
            logits, cache, mask = self._prefill(prompts)
            with kind(model, cache, mask, 2) as decoding:
                token = logits.argmax(-1).repeat_interleave(2, 0)
                return torch.stack([decoding.step(token) for _ in range(2)]).float()

        wanted = steps(PlainDecoding)
        limit = 1e-4 if model.dtype in (torch.float32, torch.float64) else 0.05
        reason = ""
        for kind in (LeanDecoding, BlockDecoding) if LeanDecoding.fits(model) else (BlockDecoding,):
            try:
                gap = float((steps(kind) - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
                if gap < limit or not bool(wanted.isfinite().all()):
                    return kind
                reason = f"its logits differ by {gap:.2g} of the largest (limit {limit:.0e})"
            except Exception as error:  # whatever a model of unknown make does with the cache
                reason = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"{type(model).__name__} cannot decode over blocks ({reason}), so transformers' own "
            "cache is used: right, but slower. rollout.fast=false says the same without trying.",
            stacklevel=2,
        )
        return PlainDecoding

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Any, Tensor]:
        """Last logits [P, V], the cache, and the left-padded attention mask [P, width]."""
        model = self._model
        assert model is not None
        width = max(len(p) for p in prompts)
        ids = torch.full((len(prompts), width), self.pad_token_id, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for i, prompt in enumerate(prompts):  # left-padded, so that the last column is real
            ids[i, width - len(prompt) :] = torch.tensor(list(prompt))
            mask[i, width - len(prompt) :] = 1
        mask = mask.to(model.device)
        cache = DynamicCache(config=model.config)
        out = model(
            input_ids=ids.to(model.device),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp_min(0),
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument(model): cache},
        )
        return out.logits[:, -1], cache, mask

    def _completions(
        self, tokens: Tensor, logprobs: Tensor, lengths: Tensor, stopped: Tensor, n: int
    ) -> Iterator[list[Completion]]:
        for start in range(0, tokens.shape[0], n):
            group = []
            for row in range(start, start + n):
                ids = tokens[row, : lengths[row]].tolist()
                group.append(
                    Completion(
                        text=self.decode(ids),
                        token_ids=tuple(ids),
                        logprobs=tuple(logprobs[row, : lengths[row]].tolist()),
                        truncated=not bool(stopped[row]),
                    )
                )
            yield group
