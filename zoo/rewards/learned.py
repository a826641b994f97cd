"""A trained reward model as the reward: frozen, and fed with texts, never with another's ids."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from zoo.config import ConfigError, ModelConfig
from zoo.data.fitting import context_of
from zoo.data.rows import expanded
from zoo.data.tokenize import encode_completions, stop_token_ids, tokenize_prompts
from zoo.types import Completion, Prompt, RewardOutput


@dataclass(frozen=True)
class Learned:
    """The score of a reward model for each completion.

        r = score                          normalise=false
        r = (score − mean) / std           normalise=true

    The texts of prompt and completion go through the reward model's own chat template and
    tokenizer, so the policy may have another: ids are never handed over. A completion that the
    length limit cut is scored without the stop token, as the unfinished text it is. A row longer
    than `max_length` is left unscored: without its end or its beginning it would be another text.
    Special tokens that a completion spells are text to it; where its tokenizer cannot have that,
    the row is left unscored too: nothing after a stop token would be seen.

    Raises:
        ConfigError: no path, a folder that is no reward model, (when loaded) no hub within reach,
            weights without a head, or more labels than one.
    """

    path: str = ""  # folder reward_model/ of a run, or any sequence classifier with one label
    revision: str | None = None  # commit, branch or tag of the hub
    dtype: str = "float32"  # of its weights
    attention: str = "sdpa"  # transformers' attn_implementation
    trust_remote_code: bool = False
    batch_tokens: int = 8192  # rows × padded length of one forward
    max_length: int | None = None  # tokens of a row; null: the model's own limit
    normalise: bool = False  # scores in deviations from their mean, as on held-out pairs
    mean: float | None = None  # null: what the folder says
    std: float | None = None  # null: what the folder says

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(
                "reward.path is not set: name a reward model. Train one with "
                "algorithm=reward_model and give the folder reward_model/ of its run."
            )
        if self.batch_tokens < 1:
            raise ConfigError(
                f"reward.batch_tokens must be at least 1, got {self.batch_tokens}. Try 8192."
            )
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(
                f"reward.max_length must be at least 2 tokens or null, got {self.max_length}."
            )
        if self.std is not None and not 0 < self.std < math.inf:
            raise ConfigError(f"reward.std must be above 0 and finite, or null, got {self.std}.")
        if self.mean is not None and not math.isfinite(self.mean):
            raise ConfigError(f"reward.mean must be finite or null, got {self.mean}.")
        self._check_folder()

    def _check_folder(self) -> None:
        from zoo.models.loading import looks_local

        folder = expanded(self.path, "reward.path")
        if not folder.exists():
            if looks_local(self.path):
                raise ConfigError(
                    f"reward.path={self.path} does not exist. Give the folder reward_model/ of a "
                    "run with algorithm=reward_model, or a hub name."
                )
            return
        inside = folder / "reward_model"
        if not (folder / "config.json").exists():
            hint = f" Try reward.path={inside}." if (inside / "config.json").exists() else ""
            raise ConfigError(
                f"reward.path={self.path} is no folder with a config.json, so no model.{hint}"
            )
        try:
            kinds = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            kinds = kinds.get("architectures") or []
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{folder / 'config.json'} cannot be read: {error}.") from error
        if kinds and not any("SequenceClassification" in kind for kind in kinds):
            raise ConfigError(
                f"reward.path={self.path} holds a {kinds[0]}, which gives no score. Train a reward "
                f"model on it: algorithm=reward_model model=hub model.path={self.path}."
            )

    @cached_property
    def _parts(self) -> tuple[Any, Any, tuple[int, ...]]:
        """Model, tokenizer, stop tokens; loaded once."""
        from zoo.models.loading import load_tokenizer
        from zoo.models.reward_model import load_reward_model

        source = ModelConfig(
            path=self.path,
            revision=self.revision,
            dtype=self.dtype,
            attention=self.attention,
            trust_remote_code=self.trust_remote_code,
        )
        model = load_reward_model(source).requires_grad_(False).eval()
        tokenizer: Any = load_tokenizer(source, "reward.path")
        size = model.model.get_input_embeddings().weight.shape[0]  # pyright: ignore
        if len(tokenizer) > size:
            raise ConfigError(
                f"the tokenizer in {self.path} has {len(tokenizer)} tokens and its model only "
                f"{size} embeddings: they do not belong together."
            )
        mean, std = self._spread(model)
        if self.normalise and None in (self.mean, self.std) and float(model.score_std) == 0:
            raise ConfigError(
                f"reward.normalise=true, but {self.path} has no mean and deviation of its scores: "
                "it was not judged when it was saved. Train it with evaluate.last=true and "
                "evaluate.heldout_pairs above 0, or give reward.mean and reward.std."
            )
        if self.normalise and not (math.isfinite(mean) and 0 < std < math.inf):
            raise ConfigError(
                f"reward.normalise=true with the mean {mean} and deviation {std} that "
                f"{self.path} has of its scores. Give reward.mean and reward.std."
            )
        return model, tokenizer, stop_token_ids(tokenizer, None)

    def _spread(self, model: Any) -> tuple[float, float]:
        mean = float(model.score_mean) if self.mean is None else self.mean
        return mean, float(model.score_std) if self.std is None else self.std

    @property
    def module(self) -> Any:
        """The reward model, or None while it is not loaded."""
        return self.__dict__.get("_parts", (None,))[0]

    def fingerprint(self) -> str:
        """Short hash of weights and tokenizer, by which another model in this folder is noticed."""
        from zoo.models.loading import weights_hash

        model, tokenizer, _ = self._parts
        words = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template])
        return weights_hash(model) + hashlib.blake2b(words.encode(), digest_size=4).hexdigest()

    def load(self, device: torch.device | str) -> None:
        """Load the model now, onto a device, so that what is wrong shows before the first step."""
        self._parts[0].to(device)

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        rows = self.rows(prompts, completions)
        limit = self._limit()
        fits = [i for i, row in enumerate(rows) if row and (limit is None or len(row) <= limit)]
        scores: list[float | None] = [None] * len(rows)
        for index, score in zip(fits, self._scores([rows[i] for i in fits]), strict=True):
            scores[index] = score
        reasons = ["too_long" if score is None else "" for score in scores]
        reasons = [why if row else "special_token" for why, row in zip(reasons, rows, strict=True)]
        return RewardOutput(total=scores, components={"learned": list(scores)}, reasons=reasons)

    def rows(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> list[tuple[int, ...]]:
        """[B] rows of the reward model's own ids: prompt, completion, stop token; () for none."""
        _, tokenizer, stops = self._parts
        # Prompts repeat, a group each; the ids that they carry are the policy's.
        keys = [prompt.text or json.dumps(prompt.messages) for prompt in prompts]
        once = dict(zip(keys, prompts, strict=True))
        ours = dict(zip(once, tokenize_prompts(tokenizer, once.values()), strict=True))
        own = [ours[key] for key in keys]
        encoded = encode_completions(tokenizer, own, [c.text for c in completions], stops)
        return [
            (*prompt.token_ids, *(ids[:-1] if completion.truncated else ids)) if ids else ()
            for prompt, completion, ids in zip(own, completions, encoded, strict=True)
        ]

    def _limit(self) -> int | None:
        model, tokenizer, _ = self._parts
        own = context_of(model.model)
        limits = [n for n in (self.max_length, own, tokenizer.model_max_length) if n]
        return int(min(limits)) if limits else None

    @torch.no_grad()
    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Scores in the order of the rows; those of similar length share a forward."""
        model = self._parts[0]
        device = next(model.parameters()).device
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        scores = torch.zeros(len(rows))
        for part in _batches([len(rows[i]) for i in order], self.batch_tokens):
            indices = [order[i] for i in part]
            ids, mask = _padded([rows[i] for i in indices])
            found = model.scores(ids.to(device), mask.to(device)).float().cpu()
            scores[torch.tensor(indices)] = found
        if self.normalise:
            mean, std = self._spread(model)
            scores = (scores - mean) / std
        return scores.tolist()


def _batches(lengths: Sequence[int], tokens: int) -> list[range]:
    """Runs of ascending lengths with rows × longest length within `tokens`, or of one row."""
    parts, start = [], 0
    for end, length in enumerate(lengths):
        if end > start and length * (end + 1 - start) > tokens:
            parts.append(range(start, end))
            start = end
    return [*parts, range(start, len(lengths))] if lengths else []


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
    return ids, mask
