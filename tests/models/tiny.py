"""Tiny models and batches for the tests of the core, all made from a description."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

from zoo.batch import Batch, collate

transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Two layers of width 32, tied unless told; initialised wide, so that its logits differ."""
    return _made(LlamaConfig(**{**SIZES, "tie_word_embeddings": True, **changes}), seed, dtype)


def gpt2(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Learned positions, dropout 0.1 in its description, biases everywhere but in the head."""
    values = {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return _made(GPT2Config(**{**values, **changes}), seed, dtype)


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
OTHERS: dict[str, dict[str, Any]] = {
    "phimoe": EXPERTS,  # routers that draw at random in training
    "mixtral": {**EXPERTS, "router_jitter_noise": 0.1},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4,
        "window_size": 64,
    },
    "llama4_text": {"num_local_experts": 2, "head_dim": 8, "intermediate_size_mlp": 48},
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": 128},
    "mamba": {"state_size": 8},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
    },
}  # fmt: skip


def family(kind: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of another architecture, in evaluation mode as one that is loaded."""
    described = AutoConfig.for_model(kind, **{**SIZES, **OTHERS.get(kind, {}), **changes})
    return _made(described, seed, torch.float32).eval()


def _made(config: Any, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).to(dtype)


MODELS = {
    "tied": llama,
    "untied": lambda **kw: llama(tie_word_embeddings=False, **kw),
    "learned positions": gpt2,
}


def tokens(generator: torch.Generator, count: int, low: int = 3) -> list[int]:
    return torch.randint(low, VOCABULARY, (count,), generator=generator).tolist()


def ragged_batch(
    n_groups: int = 4,
    group_size: int = 2,
    seed: int = 0,
    *,
    prompt_lengths: Sequence[int] = (3, 6, 1, 4),
    completion_lengths: Sequence[int] = (5, 2, 8, 1, 4, 7, 3, 6),
) -> Batch:
    """Groups of ragged rows with random tokens; lengths are cycled through."""
    generator = torch.Generator().manual_seed(seed)
    rows = n_groups * group_size
    heads = [tokens(generator, prompt_lengths[i % len(prompt_lengths)]) for i in range(n_groups)]
    completions = [
        tokens(generator, completion_lengths[i % len(completion_lengths)]) for i in range(rows)
    ]
    return collate(
        [heads[i // group_size] for i in range(rows)],
        completions,
        group_size=group_size,
        prompt_ids=[f"p{i}" for i in range(n_groups)],
    )


def full_logprobs(
    model: PreTrainedModel, row: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """[len(row)] log-probs of one row alone, by log_softmax of the whole logits; 0 in column 0."""
    ids = torch.tensor([list(row)])
    logits = model(input_ids=ids, use_cache=False).logits[0]
    wide = torch.promote_types(logits.dtype, torch.float32)
    logprobs = (logits.to(wide) / temperature).log_softmax(-1)
    picked = logprobs[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
    return torch.cat([picked.new_zeros(1), picked])
