"""Whole runs on the fast paths against the plain ones, and in bfloat16 on float32 masters."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.small import folder_of, run_small

SHORT = ["train.steps=2", "evaluate.every=0", "evaluate.first=false", "train.checkpoint_every=0"]
PLAIN = ["rollout.fast=false", "model.packed=false"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_on_the_fast_paths_is_the_plain_run(tmp_path: Path, algorithm: str) -> None:
    found = []
    for name, overrides in (("fast", []), ("plain", PLAIN)):
        run_small(tmp_path / name, *SHORT, *overrides, f"algorithm={algorithm}")
        found.append(folder_of(tmp_path / name))
    fast, plain = (lines(folder, "rollouts.jsonl") for folder in found)
    assert len(fast) == len(plain) > 4
    for one, two in zip(fast, plain, strict=True):
        assert one["token_ids"] == two["token_ids"] and one["reward"] == two["reward"]
        assert one["logprob"] == pytest.approx(two["logprob"], abs=1e-4)
    for one, two in zip(*(lines(folder, "metrics.jsonl") for folder in found), strict=True):
        for name in ("loss/policy", "grad_norm/policy", "reward/total", "mismatch/sampler"):
            assert one[name] == pytest.approx(two[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "dpo"])
def test_bfloat16_arithmetic_trains_float32_weights(tmp_path: Path, algorithm: str) -> None:
    overrides = [*SHORT, f"algorithm={algorithm}", "model.compute_dtype=bfloat16", "train.lr=1e-5"]
    assert run_small(tmp_path, *overrides)["status"] == "finished"
    folder = folder_of(tmp_path)
    for line in lines(folder, "metrics.jsonl"):
        assert math.isfinite(line["loss/policy"]) and line["grad_norm/policy"] > 0
        if algorithm != "dpo":  # the sampler computes as the trainer does, to bfloat16's digits
            assert 0 < line["mismatch/sampler"] < 0.05
    weights = load_file(folder / "policy" / "model.safetensors")
    assert all(w.dtype == torch.float32 for w in weights.values())
    # bfloat16 holds 8 digits of a number: the low half of a float32 would be 0
    low = torch.cat([w.flatten().view(torch.int32) & 0xFFFF for w in weights.values()])
    assert float((low != 0).float().mean()) > 0.9
    assert json.loads((folder / "meta.json").read_text())["float32_matmul_precision"] == "highest"


def test_no_cache_is_shared_between_precisions(tmp_path: Path) -> None:
    for number, setting in enumerate(("highest", "medium", "highest"), 1):
        overrides = [*SHORT, "algorithm=dpo", f"model.matmul_precision={setting}"]
        run_small(tmp_path / f"{number}", *overrides, "evaluate.last=false")
        for files in ("pairs/*.jsonl", "reference/*.safetensors"):
            assert len(list((tmp_path / "cache").glob(files))) == min(number, 2), files


def test_a_precision_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    for setting in ("compute_dtype=int8", "matmul_precision=low"):
        with pytest.raises(ValueError, match=rf"model\.{setting.split('=')[0]}"):
            run_small(tmp_path, f"model.{setting}", "algorithm=grpo")
