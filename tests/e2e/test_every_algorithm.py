"""Two steps of a whole run with every algorithm of conf/algorithm, later ones included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.small import folder_of, run_small
from zoo.compose import config_dir

NAMES = sorted(path.stem for path in config_dir().glob("algorithm/*.yaml"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.parametrize("name", NAMES)
def test_two_steps_change_the_weights(name: str, tmp_path: Path) -> None:
    summary = run_small(
        tmp_path,
        f"algorithm={name}",
        "train.steps=2",
        "train.checkpoint_every=0",
        "evaluate.first=false",
        "evaluate.last=false",
        "rollout.max_rounds=2",
    )
    assert summary["status"] == "finished" and summary["updates"] == 2
    lines = (folder_of(tmp_path) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for metrics in map(json.loads, lines):
        assert metrics["skipped_updates"] == 0
        norms = {key: value for key, value in metrics.items() if key.startswith("grad_norm/")}
        assert norms and all(value > 0 for value in norms.values()), norms
        assert metrics["tokens/trained"] > 0
