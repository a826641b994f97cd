"""examples/extending works in the three ways that it describes, without an edit of zoo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.e2e.small import SMALL

EXAMPLE = REPOSITORY / "examples" / "extending"
WANTED = ["algorithm=best_of_group", "reward=brief", "data=echo"]
SETTINGS = [
    word
    for word in SMALL
    if not word.startswith(("data.", "reward=", "train.steps", "evaluate.every"))
] + ["train.steps=2", "evaluate.every=0"]


def run(words: list[str], folder: Path, path: str, output: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "zoo", *words, *WANTED, *SETTINGS, f"output={output}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(output.glob("*/best_of_group-*/seed_0/summary.json"))) == 1


def test_by_a_folder_of_options(tmp_path: Path) -> None:
    run(["--config-dir", "stranger/conf"], EXAMPLE, str(REPOSITORY), tmp_path)


def test_by_the_search_path(tmp_path: Path) -> None:
    words = ["hydra.searchpath=[pkg://stranger.conf]"]
    run(words, tmp_path, f"{REPOSITORY}{os.pathsep}{EXAMPLE}", tmp_path / "out")


def test_by_an_installed_entry_point(tmp_path: Path) -> None:
    """What pip writes for an installed package, written by hand: no network, no build."""
    info = tmp_path / "site" / "zoo_stranger-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo-stranger\nVersion: 0.1.0\n")
    section = re.findall(
        r'entry-points\."zoo\.conf"\]\n(\w+) = "([\w.]+)"', (EXAMPLE / "pyproject.toml").read_text()
    )
    (info / "entry_points.txt").write_text(
        "[zoo.conf]\n" + "".join(f"{name} = {value}\n" for name, value in section)
    )
    path = os.pathsep.join([str(REPOSITORY), str(EXAMPLE), str(info.parent)])
    run([], tmp_path, path, tmp_path / "out")


def test_the_advantage_is_the_distance_to_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import torch
    from stranger.algorithm import BestOfGroup

    from zoo.batch import collate
    from zoo.models.models import Models

    batch = collate([[1]] * 4, [[2]] * 4, group_size=2, prompt_ids=["a", "b"]).replace(
        rewards=torch.tensor([1.0, 0.25, 0.0, 9.0]),
        scored=torch.tensor([True, True, True, False]),
    )
    advantages = BestOfGroup().prepare(batch, Models(policy=None)).advantages
    assert advantages is not None
    # group 1: 1 − 1, 0.25 − 1; group 2: the second abstained, so the first is its best
    assert advantages[:, 1].tolist() == [0.0, -0.75, 0.0, 0.0]
