"""A folder with the small model of `SMALL`, for runs that need trained weights to adapt."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def start_folder(folder: Path) -> list[str]:
    """Saves the model, and returns the overrides that start a small run from it."""
    from zoo.config import ModelConfig
    from zoo.models.loading import load_model, load_tokenizer, save_policy

    shape: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    }
    config = ModelConfig(architecture=shape, tokenizer="arithmetic")
    save_policy(load_model(config), load_tokenizer(config), folder)
    return started_from(folder)


def started_from(folder: Path) -> list[str]:
    """The overrides that start a small run from a folder."""
    return ["model.architecture=null", "model.tokenizer=null", f"model.path='{folder}'"]
