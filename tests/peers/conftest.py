"""TRL, and a model of a few thousand weights on disk, from which its trainers load their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.peers.common import tokenizer
from zoo.testing import tiny_llama


@pytest.fixture(autouse=True, scope="session")
def trl() -> Any:
    """The library; imported here and not above: a run without peers does not wait for it."""
    return pytest.importorskip(
        "trl", reason="TRL is not installed: pip install -e '.[peers,test]', pytest -m peers"
    )


@pytest.fixture(autouse=True)
def one_seed() -> Iterator[None]:
    torch.manual_seed(0)
    with contextlib.suppress(RuntimeError):
        torch.set_num_threads(1)
    yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama and a tokenizer that knows 24 words."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(0).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
