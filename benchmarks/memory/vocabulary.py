"""How the peak of a training step grows with the vocabulary: weights, gradients, one chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zoo.batch import Batch, collate
from zoo.measure.meter import TensorMeter
from zoo.models.head import BLOCK
from zoo.models.policy import Policy

SMALL, LARGE = 8192, 49152  # tokens of the vocabulary
WIDTH = 64


@dataclass(frozen=True)
class Growth:
    """What the larger vocabulary adds to the peak of a forward and backward pass, in bytes."""

    tokens: int  # under training
    added: int  # chunked head
    plain: int  # all logits at once
    weights: int  # of the head and embedding (tied), the same again for gradients
    chunk: int  # float32 logits of the tokens that the head takes at a time


def peak(vocabulary: int, tokens: int, plain: bool = False) -> int:
    """The peak of live tensor bytes of a pass over `tokens` trained tokens, one tiny trunk."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
        )
    )  # fmt: skip
    policy = Policy(model)
    batch = _batch(tokens)
    meter = TensorMeter({"policy": policy})
    with meter.phase("update"):
        if plain:
            logits = model(batch.input_ids).logits[:, :-1]
            chosen = batch.input_ids[:, 1:, None]
            loss = logits.log_softmax(-1).gather(2, chosen).sum()
        else:
            loss = policy(batch).logprobs.sum()
        loss.backward()
    return meter.peaks["update"]["total"]


def growth(tokens: int) -> Growth:
    """The extra peak of 49,152 tokens of vocabulary against 8,192 on one trunk."""
    more = LARGE - SMALL
    return Growth(
        tokens=tokens,
        added=peak(LARGE, tokens) - peak(SMALL, tokens),
        plain=peak(LARGE, tokens, plain=True) - peak(SMALL, tokens, plain=True),
        weights=more * WIDTH * 4,
        chunk=more * BLOCK * 4,
    )


def measure() -> list[Growth]:
    """Twice the tokens must add nothing: no term is tokens × vocabulary."""
    return [growth(2 * BLOCK), growth(4 * BLOCK)]


def _batch(tokens: int) -> Batch:
    rows, length = tokens // 128, 128
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, SMALL, (rows, 1), generator=draw).tolist()
    completions = torch.randint(3, SMALL, (rows, length), generator=draw).tolist()
    names = [str(i) for i in range(rows)]
    return collate(prompts, completions, group_size=1, prompt_ids=names)
