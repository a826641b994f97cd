"""Fixtures that every test may use: no network, few threads, and the optional shared data."""

import os
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    # Two processes with two threads each on two cores slow each other down three times and more.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("ZOO_KEEP_MEMORY", "0")  # tests of memory watch the process's own fall

import random

import numpy as np
import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers on every run, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data that may lie beside the checkout; tests skip without it."""
    path = Path(os.environ.get("ZOO_SHARED", REPOSITORY.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"no shared data at {path} (set ZOO_SHARED to its folder)")
    return path
