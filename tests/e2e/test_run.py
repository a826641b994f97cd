"""Whole small runs: what they leave, and that others can use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import REPOSITORY
from tests.e2e.small import SMALL, folder_of, run_small


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("algorithm", ["sft", "ppo", "dpo", "grpo"])
def test_a_run_leaves_its_record_and_a_policy_that_transformers_loads(
    algorithm: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    summary = run_small(tmp_path, f"algorithm={algorithm}", "train.steps=2")
    folder = folder_of(tmp_path)
    assert json.loads((folder / "summary.json").read_text()) == summary
    for name in ("config.yaml", "meta.json", "memory.json", "evals.jsonl", "best.json"):
        assert (folder / name).exists(), name
    model = AutoModelForCausalLM.from_pretrained(folder / "policy")
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    assert model.lm_head.weight is model.model.embed_tokens.weight  # B53: tied after training
    saved = torch.load(folder / "checkpoints" / "step_000002" / "policy.pt", weights_only=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[f"model.{name}"]), name
    assert tokenizer("1 + 2")["input_ids"]
    # what is loaded is what the algorithm needs
    components = json.loads((folder / "memory.json").read_text())["components"]
    assert ("critic" in components) == (algorithm == "ppo")
    assert ("reference" in components) == (algorithm == "ppo")
    weights = sum(p.numel() for p in model.parameters()) * 4
    buffers = sum(b.numel() for b in model.buffers()) * 4
    assert weights <= components["policy"]["parameters"] <= weights + buffers
    assert components["policy"]["gradients"] == weights
    # AdamW: two moments for each weight, and a step counter for each tensor
    tensors = len(list(model.parameters()))
    assert components["policy"]["optimizer"] == 2 * weights + 4 * tensors


def test_tokens_and_completions_are_counted(tmp_path: Path) -> None:
    summary = run_small(tmp_path, "algorithm=grpo", "train.steps=2")
    rows = [
        json.loads(line)
        for line in (folder_of(tmp_path) / "metrics.jsonl").read_text().splitlines()
    ]
    assert summary["completions"] == 2 * 4 * 4  # steps × groups × group size
    assert sum(r["tokens/generated"] for r in rows) == summary["tokens"]["generated"]
    assert rows[-1]["tokens/sampled_total"] == summary["tokens"]["generated"]
    # every completion has 1 … 10 tokens, and each of them is trained once
    assert 32 <= summary["tokens"]["generated"] <= 320
    assert summary["tokens"]["trained"] == summary["tokens"]["generated"]


def test_pair_sampling_counts_in_the_budget_of_dpo(tmp_path: Path) -> None:
    first = run_small(tmp_path / "a", "algorithm=dpo", "train.steps=2")
    # the second run reads the pairs from the cache; they cost what they cost
    second = run_small(tmp_path / "b", "algorithm=dpo", "train.steps=2", "train.lr=1e-4")
    for summary in (first, second):
        assert summary["completions"] == 2 * 4 * 4
        assert summary["tokens"]["generated"] > 0
        assert summary["seconds"]["pairs"] > 0
    assert first["tokens"]["generated"] == second["tokens"]["generated"]


def test_evaluating_more_often_changes_nothing(tmp_path: Path) -> None:
    run_small(tmp_path / "a", "algorithm=grpo", "train.steps=4", "evaluate.every=1")
    run_small(tmp_path / "b", "algorithm=grpo", "train.steps=4", "evaluate.every=0")
    weights = [
        (folder_of(tmp_path / x) / "policy/model.safetensors").read_bytes() for x in ("a", "b")
    ]
    assert weights[0] == weights[1]


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    overrides = ["algorithm=ppo", "train.steps=1", "evaluate.every=0"]
    run_small(tmp_path / "one", *overrides)
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "zoo", *SMALL, f"output={tmp_path / 'two'}", *overrides],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = (folder_of(tmp_path / x) for x in ("one", "two"))
    for name in ("policy", "critic"):
        a, b = (
            torch.load(f / "checkpoints/step_000001" / f"optimizer_{name}.pt", weights_only=True)
            for f in (one, two)
        )
        for index, state in a["state"].items():
            # Adam's first moment after one update is 0.1 of the gradient
            gradients = state["exp_avg"], b["state"][index]["exp_avg"]
            assert (gradients[0] - gradients[1]).abs().max() < 1e-6, (name, index)
    metrics = [json.loads((f / "metrics.jsonl").read_text()) for f in (one, two)]
    for key in ("reward/total", "completions", "tokens/generated", "groups/dead"):
        assert metrics[0][key] == metrics[1][key], key
    evals = [
        [json.loads(line) for line in (f / "evals.jsonl").read_text().splitlines()]
        for f in (one, two)
    ]
    for a, b in zip(*evals, strict=True):  # each problem once
        assert a.get("problem_ids") == b.get("problem_ids")


def test_every_metric_of_zoo_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.train import gradients

    given, check = set(), gradients._check_term

    def seen(algorithm: Any, term: Any) -> None:
        check(algorithm, term)
        given.update(term.metrics)

    monkeypatch.setattr(gradients, "_check_term", seen)
    run_small(tmp_path, "algorithm=ppo", "algorithm.kl_target=1", "train.steps=1")
    (line,) = (folder_of(tmp_path) / "metrics.jsonl").read_text().splitlines()
    own = json.loads(line).keys() - given - {"explained_variance"}  # made of the critic's
    assert len(own) > 30
    for name in own:
        assert name in gradients.RESERVED or name.startswith(gradients.RESERVED_BEGINNINGS), name
