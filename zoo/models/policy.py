"""The policy: any transformers causal LM as `Policy(Batch) → log-probs of completion tokens`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from zoo.batch import Batch, collate
from zoo.config import ConfigError
from zoo.models.head import chunked_logprobs
from zoo.models.trunk import States, Trunk, backbone_of


@dataclass(frozen=True)
class PolicyOutput:
    logprobs: Tensor  # [B, T] float32; 0 without gradient outside completion_mask
    entropy: Tensor  # [B, T] float32, detached
    # with a value head alone; as in CriticOutput
    values: Tensor | None = None  # [B, T] float32; values[b, t] is that of the prefix before t
    final: Tensor | None = None  # [B] float32: the value after the last token


def disable_dropout(module: nn.Module) -> None:
    """Set every dropout probability to 0: with it on, ratios and KL are noise."""
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        # Functional dropout: attention_dropout of Llama, hidden_dropout of Bloom, dropout of OPT
        for holder in (child, getattr(child, "config", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)


def recompute(module: nn.Module) -> None:
    """Put into training mode what recomputes activations there, and nothing else, in place.

    What lies within stays in evaluation mode: routers of experts draw at random in training.
    """
    for child in module.modules():
        child.training = bool(getattr(child, "gradient_checkpointing", False))


def trained_positions(batch: Batch) -> tuple[Tensor, Tensor]:
    """(row, column) [M] of each token under training; its predictor sits one column earlier."""
    rows, columns = batch.completion_mask.nonzero(as_tuple=True)
    return rows, columns


def over_mask(values: Tensor, batch: Batch) -> Tensor:
    """[M] values at the trained positions → [B, T], 0 elsewhere, with gradient."""
    full = values.new_zeros(batch.input_ids.shape)
    return full.masked_scatter(batch.completion_mask, values)


def values_of(states: States, head: nn.Linear, batch: Batch) -> tuple[Tensor, Tensor]:
    """values [B, T] of the prefix before each trained token, final [B] after the last token.

        values[b, t] = w · h[b, t−1] + b₀,   final[b] = w · h[b, length−1] + b₀

    In float32 (float64 stays), whatever the weights are.
    """
    rows, columns = trained_positions(batch)
    every = torch.arange(batch.n_rows, device=batch.device)
    # One call of the head for both, so that DDP sees one forward of each parameter.
    read = states.at(torch.cat([rows, every]), torch.cat([columns - 1, batch.lengths - 1]))
    wide = torch.promote_types(read.dtype, torch.float32)
    scores = nn.functional.linear(read.to(wide), head.weight.to(wide), head.bias.to(wide)).squeeze(
        -1
    )
    return over_mask(scores[: rows.numel()], batch), scores[rows.numel() :]


class Policy(nn.Module):
    """Log-probs and entropy of a causal LM at completion positions.

        logprobs[b, t] = log softmax(logits[b, t−1] / temperature)[input_ids[b, t]]

    Only hidden states at completion positions reach the head, in chunks: no [B, T, V] tensor is
    kept. Dropout is off, so old and new log-probs of one policy are equal.

    Args:
        model: holds the weights under training, in their dtype.
        temperature: of sampling.
        packed: read prompts once for all their completions, and no padding (see `Trunk`).
        compute_dtype: of the forward and backward pass; None: that of the weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float = 1.0,
        *,
        packed: bool = False,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        disable_dropout(model)
        self.model = model
        self.trunk = Trunk(model, packed, compute_dtype)
        self.temperature = temperature
        self.with_entropy = True
        self.value_head: nn.Linear | None = None
        config = model.config
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.logit_scale = float(getattr(config, "logit_scale", None) or 1.0)
        self.logit_scale /= float(getattr(config, "logits_scaling", None) or 1.0)

    def add_value_head(self) -> None:
        """Values from the policy's own backbone, by a linear head that starts at zero."""
        width = int(self.model.config.get_text_config().hidden_size)
        head = nn.Linear(width, 1, device=self.model.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.value_head = head

    @property
    def backbone(self) -> nn.Module:
        return backbone_of(self.model)

    def forward(self, batch: Batch) -> PolicyOutput:
        rows, columns = trained_positions(batch)
        states = self.trunk(batch)
        head: nn.Linear = states.body.get_output_embeddings()
        logprobs, entropy = chunked_logprobs(
            states.at(rows, columns - 1),
            head.weight,
            head.bias,
            batch.input_ids[rows, columns],
            scale=self.logit_scale / self.temperature,
            softcap=self.softcap,
            with_entropy=self.with_entropy,
        )
        output = PolicyOutput(over_mask(logprobs, batch), over_mask(entropy, batch))
        if self.value_head is None:
            return output
        values, final = values_of(states, self.value_head, batch)
        return replace(output, values=values, final=final)

    @torch.no_grad()
    def check_head(self) -> None:
        """Refuse a model whose head is not the linear map (and cap, scale) that we recompute.

        Raises:
            ConfigError: the chunked log-probs of two texts beside each other differ from the
                model's own logits of each alone, or these are not finite.
        """
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        texts = [[(i * 7 + 1) % vocabulary for i in range(n)] for n in (8, 5)]
        batch = collate(
            [text[:1] for text in texts], [text[1:] for text in texts], group_size=1,
            prompt_ids=["long", "short"],
        ).to(self.model.device)  # fmt: skip
        ours, theirs = self(batch).logprobs[batch.completion_mask], []
        for text in texts:
            ids = torch.tensor([text], device=self.model.device)
            made = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
            found = (made.logits[0, :-1].float() / self.temperature).log_softmax(-1)
            theirs.append(found.gather(1, ids[0, 1:, None]).squeeze(1))
        theirs = torch.cat(theirs)
        gap = float((ours - theirs).abs().max())
        if not bool(theirs.isfinite().all()):
            raise ConfigError(
                f"{type(self.model).__name__} gives log-probs that are not finite at temperature "
                f"{self.temperature:g}: its weights are too large, or rollout.temperature is too "
                "small."
            )
        tolerance = 1e-3 if self.trunk.dtype == torch.float32 else 0.25
        if not gap < tolerance:
            raise ConfigError(
                f"{type(self.model).__name__}: log-probs from its head differ by {gap:.3g} nats "
                "from its own logits, so its head is not linear in the last hidden state, or it "
                "reads texts otherwise beside longer ones. zoo supports linear heads with an "
                "optional soft cap and scale; use another model."
            )
