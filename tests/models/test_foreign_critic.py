"""A critic reads the policy's token ids, so it must know them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.test_tokenize import byte_tokenizer
from tests.e2e.small import run_small
from tests.models.tiny import llama
from zoo.config import ConfigError
from zoo.data.tokenizer import arithmetic_tokenizer

SMALL = ["algorithm=ppo", "train.steps=1", "measure.memory=false", "evaluate.first=false"]
SMALL += ["evaluate.last=false"]


def saved(folder: Path, vocabulary: int, tokenizer: Any = None) -> str:
    llama(vocab_size=vocabulary).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return f"model.critic={folder}"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))


def test_B41_critic_with_fewer_embeddings_is_refused_before_the_first_step(tmp_path: Path) -> None:
    critic = saved(tmp_path / "critic", 10)
    with pytest.raises(ConfigError, match=r"has 10 embeddings and the policy's tokenizer"):
        run_small(tmp_path, *SMALL, critic)


def test_B41_critic_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    critic = saved(tmp_path / "critic", 600, byte_tokenizer())
    with pytest.raises(ConfigError, match="has another tokenizer than the policy"):
        run_small(tmp_path, *SMALL, critic)


@pytest.mark.parametrize("tokenizer", [None, "own"])
def test_critic_that_reads_the_same_ids_trains(tokenizer: str | None, tmp_path: Path) -> None:
    made = arithmetic_tokenizer() if tokenizer else None
    critic = saved(tmp_path / "critic", len(arithmetic_tokenizer()), made)
    assert run_small(tmp_path, *SMALL, critic)["updates"] == 1
