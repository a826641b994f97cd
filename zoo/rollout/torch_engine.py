"""The default engine: transformers' own forward and cache, one prefill for each distinct prompt."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from zoo.data.fitting import context_of
from zoo.measure.meter import CACHE, mark
from zoo.models.twin import Casts, Twin
from zoo.rollout.decoding import (
    BlockDecoding,
    PlainDecoding,
    WholeDecoding,
    cache_argument,
    cache_tensors,
    last_logits,
)
from zoo.rollout.engine import Sampling
from zoo.rollout.graphs import GraphDecoding
from zoo.rollout.lean import LeanDecoding
from zoo.rollout.rows import Rows
from zoo.rollout.sampler import sample, sample_in_blocks
from zoo.types import Completion


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
        if self.group_size > 2**16:
            raise ValueError(
                f"rollout.group_size must be at most {2**16}, got {self.group_size}: it is how "
                "often each prompt is answered in a step. Try rollout.group_size=8."
            )
        if not 1e-3 <= self.temperature <= 1e3:
            raise ValueError(
                f"rollout.temperature must be above 0 (0.001 to 1000), got {self.temperature}: "
                "argmax completions have no probability to train, and uniform ones none of the "
                "model's. Evaluation decodes greedily by itself."
            )
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(
                f"rollout.dtype must be float32, bfloat16, float16 or null, got {self.dtype!r}."
            )

    def engine(self, decode: Callable[..., str], pad_token_id: int) -> _Decoder:
        """The engine itself; `decode` turns token ids into the text that rewards read."""
        return _Decoder(self, decode, pad_token_id)


Way = type[PlainDecoding | BlockDecoding]


class _Decoder:
    def __init__(
        self, settings: TorchEngine, decode: Callable[..., str], pad_token_id: int
    ) -> None:
        self.settings = settings
        self.decode = decode
        self.pad_token_id = pad_token_id
        self._model: PreTrainedModel | None = None
        self._twin: Twin | None = None  # of another dtype than the policy's
        self._shared = False  # the policy computes with the same copies
        self._kinds: dict[int, Way] = {}  # id of a model → the way of decoding that fits it

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
        shared = trunk is not None and trunk.casts is not None and trunk.dtype == wanted
        if wanted == source.dtype and not shared:
            self._twin = None
            return source
        if self._twin is None or self._twin.source is not source:
            self._shared = shared
            casts = trunk.casts if trunk is not None and shared else Casts(source, wanted)
            self._twin = Twin(source, None, casts, trains=False)
        return self._twin()

    def copies(self) -> list[Tensor]:
        """Copies of the weights that are the engine's own, for those who count bytes."""
        casts = None if self._twin is None else self._twin.casts
        return [] if casts is None or self._shared else casts.copies()

    def release(self) -> None:
        """Forget the weights (a copy is freed)."""
        self._model = self._twin = None

    def generate(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[str], n: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """`n` completions of each prompt, in the order of the prompts.

        Each distinct prompt is prefilled once and its cache expanded to its n samples; rows that
        have stopped are dropped from the cache, or make room for prompts that wait. Row i's draws
        come from (seed, key, i) alone, so neither the batch around a row nor the number of
        processes changes its tokens (beyond the rounding of matrix products).

        Raises:
            ValueError: an empty prompt, or one longer than the model's context less the limit.
        """
        if self._model is None:
            raise RuntimeError("the engine has no weights yet: call sync(policy) first")
        self._check(prompts, sampling)
        # Prompts of similar length share a prefill, so little of it is padding.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        with torch.no_grad():
            made = self._decode([prompts[i] for i in order], [keys[i] for i in order], n, sampling)
        for module, training in modes:
            module.training = training
        results: list[list[Completion]] = [[] for _ in prompts]
        for i, completions in zip(order, made, strict=True):
            results[i] = completions
        return results

    def _check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        assert self._model is not None
        limit = context_of(self._model)
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {index} is empty: there is nothing to continue")
            if limit is not None and len(prompt) + sampling.max_new_tokens > limit:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens, which with "
                    f"{sampling.max_new_tokens} new ones exceeds the model's context of {limit}. "
                    f"Set rollout.max_new_tokens to at most {limit - len(prompt)}, or drop it."
                )

    def _decode(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[str],
        n: int,
        sampling: Sampling,
    ) -> list[list[Completion]]:
        """At most `max_rows` rows at a time; waiting prompts take the places of finished rows."""
        model = self._model
        assert model is not None
        rows = Rows(prompts, keys, n, sampling, model.device)
        draw = sample_in_blocks if self.settings.fast else sample
        at_once = max(1, self.settings.max_rows // n)  # prompts
        # Multiples of a sixteenth: matrix shapes repeat, and oneDNN prepares each new one.
        coarse = max(1, min(at_once, len(prompts)) * n // 16)
        waiting = list(range(len(prompts)))

        way = self._way(model)

        def started(count: int) -> tuple[Tensor, Tensor, Any, Any]:
            """The next prompts: their rows, the logits of their first tokens, cache and mask."""
            chosen = [waiting.pop(0) for _ in range(count)]
            logits, cache, mask = self._read(way, [prompts[i] for i in chosen])
            mark(CACHE, lambda: cache_tensors(cache))
            return rows.of(chosen), logits.repeat_interleave(n, 0), cache, mask

        while waiting:
            alive, logits, cache, mask = started(min(at_once, len(waiting)))
            with way(model, cache, mask, n) as decoding:
                del cache, mask  # a block cache is a copy: what it was made from goes
                while not bool((done := rows.draw(alive, logits, draw)).all()):
                    going = int((~done).sum())
                    joining = min((at_once * n - going) // n, len(waiting)) if decoding.joins else 0
                    if joining * n < 2 * coarse and joining < len(waiting):
                        joining = 0  # a prefill for few is dear
                    left = -(-going // coarse) * coarse
                    if joining:
                        left = max(min(at_once * n - joining * n, left), going)
                    if left < done.numel():
                        chosen = _closed_up(done, left)
                        decoding.keep(chosen)
                        alive = alive[chosen]
                    logits = decoding.step(rows.newest[alive])
                    if joining:
                        with decoding.aside():
                            new, first, cache, mask = started(joining)
                        decoding.join(cache, mask, n)
                        del cache, mask
                        alive, logits = torch.cat([alive, new]), torch.cat([logits, first])
                    mark(CACHE, lambda: cache_tensors(decoding.cache))
        return list(rows.completions(self.decode))

    def _way(self, model: PreTrainedModel) -> Way:
        """The fastest way of decoding that fits the model, found by comparing once."""
        if id(model) not in self._kinds:
            self._kinds = {id(model): self._try(model)}
        return self._kinds[id(model)]

    def _try(self, model: PreTrainedModel) -> Way:
        """The first way whose logits of two steps are those of transformers' own cache.

        And that cache is used where its logits are those of whole texts, each by itself.
        """
        size = int(model.config.get_text_config().vocab_size)
        prompts = [[i * 7 % size for i in range(1, n)] for n in (4, 7)]
        exact = model.dtype in (torch.float32, torch.float64)
        exact &= torch.get_float32_matmul_precision() == "highest"  # else products are rounded
        reasons: list[str] = []

        def steps(kind: Way) -> Tensor:
            first, cache, mask = self._read(kind, prompts)
            with kind(model, cache, mask, 2) as decoding:
                token = wanted_first.argmax(-1).repeat_interleave(2, 0)
                made = [first.repeat_interleave(2, 0), *(decoding.step(token) for _ in range(2))]
            return torch.stack(made).float()

        def fits(kind: Way, wanted: Tensor, limit: float) -> bool:
            try:
                gap = float((steps(kind) - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
            except Exception as error:  # whatever a model of unknown make does with a cache
                reasons.append(f"{type(error).__name__}: {error}")
                return False
            if gap < limit or not bool(wanted.isfinite().all()):
                return True
            reasons.append(f"its logits differ by {gap:.2g} of the largest (limit {limit:.0e})")
            return False

        wanted_first = last_logits(model, prompts)
        if not fits(PlainDecoding, steps(WholeDecoding), 1e-3 if exact else 0.25):
            self._tell(model, "with a cache over padded prompts", "texts are read whole for every "
                       "token: right, but slow", reasons[-1])  # fmt: skip
            return WholeDecoding
        if not self.settings.fast or not BlockDecoding.takes(self._prefill(prompts)[1]):
            return PlainDecoding
        plain = steps(PlainDecoding)
        fitting = [kind for kind in (GraphDecoding, LeanDecoding) if kind.fits(model)]
        for kind in (*fitting, BlockDecoding):
            if fits(kind, plain, 1e-4 if exact else 0.05):
                return kind
        self._tell(model, "over blocks", "transformers' own cache is used: right, but slower. "
                   "rollout.fast=false says the same without trying", reasons[-1])  # fmt: skip
        return PlainDecoding

    def _tell(self, model: PreTrainedModel, how: str, instead: str, reason: str) -> None:
        warnings.warn(
            f"{type(model).__name__} cannot decode {how} ({reason}), so {instead}.", stacklevel=2
        )

    def _read(self, kind: Way, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Any, Any]:
        """Last logits [P, V], and what decoding goes on from."""
        assert self._model is not None
        if kind is WholeDecoding:
            return last_logits(self._model, prompts), prompts, None
        return self._prefill(prompts)

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
        with _dense_input(model.get_output_embeddings()):
            out = model(
                input_ids=ids.to(model.device),
                attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1).clamp_min(0),
                use_cache=True,
                logits_to_keep=1,
                **{cache_argument(model): cache},
            )
        return out.logits[:, -1], cache, mask


def _closed_up(done: Tensor, left: int) -> Tensor:
    """[left] rows to keep: the first ones, and in the places of those done the last that go on."""
    chosen = torch.arange(left, device=done.device)
    last = (~done[left:]).nonzero().squeeze(1) + left
    free = done[:left].nonzero().squeeze(1)
    chosen[free[: len(last)]] = last
    return chosen


@contextmanager
def _dense_input(head: nn.Module | None) -> Iterator[None]:
    """The last states of P prompts lie apart, and torch would copy the head's weights P times."""
    if head is None:
        yield
        return
    hook = head.register_forward_pre_hook(lambda _, given: (given[0].contiguous(), *given[1:]))
    try:
        yield
    finally:
        hook.remove()
