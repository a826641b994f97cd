"""The reward model: a backbone with a scalar head, read where a row's last real token is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from zoo.batch import Batch
from zoo.config import ConfigError, ModelConfig
from zoo.models.loading import check_finite, from_hub
from zoo.models.lora import merge_into
from zoo.models.policy import disable_dropout
from zoo.models.trunk import Trunk, backbone_of
from zoo.seeds import torch_generator

# In the config.json of a saved reward model that was judged: mean and deviation of its scores.
MEAN, DEVIATION = "zoo_score_mean", "zoo_score_std"


class RewardModel(nn.Module):
    """How good a completion is, as one number for the whole row.

        score[b] = w · h[b, last(b)]

    `last(b)` is the row's last real token by its mask, never by the id of a filler, so a filler
    that is EOS, or one that occurs in the text, changes nothing. The score is in float32 whatever
    the weights are; dropout is off.

    It wraps a transformers sequence classifier with one label. Encoders, whose classifier reads
    the row in its own way (a pooled first token), are called as they are. `packed` and
    `compute_dtype` are those of `Policy`.

    Raises:
        ConfigError: more labels than one.
    """

    score_mean: Tensor
    score_std: Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        packed: bool = False,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if model.config.num_labels != 1:
            raise ConfigError(
                f"{type(model).__name__} has {model.config.num_labels} labels, and a reward is one "
                "number. Use a sequence classifier with num_labels=1."
            )
        disable_dropout(model)
        self.model = model
        self.head = getattr(model, "score", None)  # None: the model's own way
        self.trunk = None if self.head is None else Trunk(model, packed, compute_dtype)
        # Of its scores when it was judged, which `reward=learned` can take off again; a deviation
        # of 0 says that these weights never were.
        self.register_buffer("score_mean", torch.tensor(_number(model.config, MEAN)))
        self.register_buffer("score_std", torch.tensor(_number(model.config, DEVIATION)))

    def forward(self, batch: Batch) -> Tensor:
        """[B] float32 scores, with gradient."""
        if self.trunk is None:
            return self.scores(batch.input_ids, batch.attention_mask)
        every = torch.arange(batch.n_rows, device=batch.device)
        return self._read(self.trunk(batch).at(every, batch.lengths - 1))

    def scores(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B] float32 scores of rows padded on either side.

        Args:
            input_ids: [B, T] int64.
            attention_mask: [B, T] bool: real tokens, at least one a row.
        """
        mask = attention_mask.long()
        if self.head is None:
            return self.model(input_ids=input_ids, attention_mask=mask).logits[:, 0].float()
        hidden = backbone_of(self.model)(
            input_ids=input_ids, attention_mask=mask, use_cache=False
        ).last_hidden_state
        rows = torch.arange(len(hidden), device=hidden.device)
        return self._read(hidden[rows, last_real(attention_mask)])

    def _read(self, read: Tensor) -> Tensor:
        """The head on the states [B, H] of the last tokens."""
        assert self.head is not None
        wide = torch.promote_types(read.dtype, torch.float32)
        bias = None if self.head.bias is None else self.head.bias.to(wide)
        return nn.functional.linear(read.to(wide), self.head.weight.to(wide), bias).squeeze(-1)

    def remember(self, mean: float, std: float) -> None:
        """Keep mean and deviation of the scores beside the weights."""
        self.score_mean.fill_(mean)
        self.score_std.fill_(std)

    def forget(self) -> None:
        """Drop mean and deviation: they were those of other weights."""
        self.remember(0.0, 0.0)

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """An ordinary transformers folder, for `reward=learned` and for anything else."""
        config: Any = self.model.config
        for name, value in ((MEAN, self.score_mean), (DEVIATION, self.score_std)):
            if self.score_std:
                setattr(config, name, float(value))
            elif hasattr(config, name):
                delattr(config, name)
        config.pad_token_id = tokenizer.pad_token_id  # transformers' own forward asks for one
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _number(config: Any, name: str) -> float:
    value = getattr(config, name, 0.0)
    if not isinstance(value, int | float):
        raise ConfigError(
            f"{name} in the config.json of {config._name_or_path or 'the model'} must be a number, "
            f"got {value!r}. Correct it, or drop it and give reward.mean and reward.std."
        )
    return float(value)


def last_real(attention_mask: Tensor) -> Tensor:
    """[B] column of the last real token of each row, padded on either side or on both."""
    columns = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return torch.where(attention_mask.bool(), columns, -1).amax(1)


def from_policy(
    model: PreTrainedModel,
    seed: int,
    *,
    packed: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> RewardModel:
    """A reward model on the backbone of a causal LM (shared, not copied), with a fresh head.

    The head's weights are drawn from N(0, 1/(d + 1)), so scores start near 0 with a spread near 1.
    They are in the dtype of the weights under training (those of an adapter, where there is one).

    Raises:
        ConfigError: transformers has no sequence classifier of this architecture, or one that does
            not read the last token.
    """
    described = type(model.config).from_dict(model.config.to_dict())
    described.num_labels = 1
    described._attn_implementation = model.config._attn_implementation
    refused = ConfigError(
        f"no reward model can be made of {type(model).__name__}: transformers has no sequence "
        "classifier of this architecture that reads the last token. Use another model."
    )
    try:
        with torch.device("meta"):
            shell: Any = AutoModelForSequenceClassification.from_config(described)
    except ValueError as error:
        raise refused from error
    head = getattr(shell, "score", None)
    if not isinstance(head, nn.Linear) or shell.base_model_prefix != model.base_model_prefix:
        raise refused
    setattr(shell, shell.base_model_prefix, backbone_of(model))
    width = head.in_features
    weight = torch.randn(1, width, generator=torch_generator(seed, "reward head"))
    # Without the default draws, which would move the global generator.
    own = next((p.dtype for p in model.parameters() if p.requires_grad), model.dtype)
    fresh: Any = nn.utils.skip_init(nn.Linear, width, 1, bias=False, dtype=own)
    with torch.no_grad():
        fresh.weight.copy_(weight / (width + 1) ** 0.5)
    shell.score = fresh
    return RewardModel(shell, packed=packed, compute_dtype=compute_dtype)


def merged_reward_model(trained: RewardModel, base: PreTrainedModel) -> RewardModel:
    """A reward model without its adapter, which is added to the weights of `base` (in place)."""
    made = from_policy(base, 0)
    merge_into(base, trained.model)
    with torch.no_grad():
        made.model.score.weight.copy_(trained.model.score.weight)  # pyright: ignore
    made.remember(float(trained.score_mean), float(trained.score_std))
    return made


def load_reward_model(config: ModelConfig) -> RewardModel:
    """A trained one: a folder that `save` wrote, or any sequence classifier with one label.

    Raises:
        ConfigError: nothing at the path, no hub within reach, weights that are missing or not
            finite, or several labels.
    """
    assert config.path is not None
    transformers.utils.logging.disable_progress_bar()  # the run has a display of its own
    model, facts = from_hub(
        AutoModelForSequenceClassification,
        config.path,
        config,
        "reward.path",
        dtype=getattr(torch, config.dtype),
        attn_implementation=config.attention,
        output_loading_info=True,
    )
    fresh = sorted(facts["missing_keys"])
    if fresh:
        body = any(name.startswith(f"{model.base_model_prefix}.") for name in fresh)
        where = f"reward.path={config.path} has no weights for {', '.join(fresh[:3])}, so its"
        if body:
            raise ConfigError(
                f"{where} scores would be random. Is the folder whole, and its config.json that of "
                "its weights?"
            )
        raise ConfigError(
            f"{where} scores would be random: it is a language model, not a reward model. Train "
            "one on it with algorithm=reward_model, and name the folder reward_model/ of that run."
        )
    check_finite(model, f"reward.path={config.path}")
    return RewardModel(model)
