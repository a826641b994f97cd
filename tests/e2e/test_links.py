"""A run whose folder, or one above it, was moved to another disk and left as a link."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.small import SMALL, run_small
from zoo.compose import compose
from zoo.instantiate import structured
from zoo.measure.wandb_sink import WandbSink
from zoo.report.runs import read_run
from zoo.train.run import run

BRIEF = ["algorithm=sft", "train.steps=2", "evaluate.every=0", "experiment=mv", "name=arm"]
LEVELS = {"seed": "mv/arm/seed_0", "name": "mv/arm", "experiment": "mv", "output": ""}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("level", LEVELS)
def test_a_run_behind_a_link_keeps_its_name(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, moved = tmp_path / "outputs", tmp_path / "big" / "disk" / "seed_0"
    told: list[dict[str, Any]] = []

    class Sink(WandbSink):
        def __init__(self, *place: Any, **facts: Any) -> None:
            told.append(facts)
            super().__init__(*place, **facts)

    monkeypatch.setattr("zoo.measure.recorder.WandbSink", Sink)
    first = run_small(output, *BRIEF)
    folder = output / "mv" / "arm" / "seed_0"
    (folder / "summary.json").unlink()  # as where it was stopped before its end
    moved.parent.mkdir(parents=True)
    link = output / LEVELS[level]
    link.rename(moved)
    link.symlink_to(moved)
    for place in (folder, folder.resolve()):
        found = read_run(place)
        assert (found.name, found.experiment, found.seed) == ("arm", "mv", 0)
    again = run_small(output, *BRIEF)
    assert first["policy_hash"] == again["policy_hash"]
    for summary in (first, again, json.loads((folder / "summary.json").read_text())):
        assert (summary["name"], summary["experiment"]) == ("arm", "mv")
    assert [(one["title"], one["group"]) for one in told] == [("mv/arm/seed_0", "arm")] * 2
    assert read_run(folder.resolve()).name == "arm"


def test_seeds_beside_a_link_are_compared_with_it(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    words = [one for one in SMALL if not one.startswith("data.")]
    words += [*BRIEF, "data=jsonl", f"data.path={file}", "data.kind=examples"]

    def train(seed: int, rows: range) -> None:
        lines = (json.dumps({"prompt": f"{i}?", "completion": f"{i}"}) for i in rows)
        file.write_text("\n".join(lines))
        run(structured(compose([*words, f"output={tmp_path / 'out'}", f"seed={seed}"])))

    train(0, range(40))
    arm, elsewhere = tmp_path / "out" / "mv" / "arm", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (arm / "seed_1").symlink_to(elsewhere)
    train(1, range(1, 40))
    told = [json.loads(line) for line in (arm / "seed_1" / "warnings.jsonl").open()]
    (message,) = (line["message"] for line in told if line["kind"] == "other_inputs")
    assert "in seed_0" in message
