"""The rules a newcomer can rely on: where things lie, and how large they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.conftest import REPOSITORY

HOMES = {
    "algorithm": "zoo.algorithms.",
    "data": "zoo.data.",
    "reward": "zoo.rewards.",
    "rollout": "zoo.rollout.",
}
CLASS_YAMLS = [p for group in HOMES for p in sorted((REPOSITORY / "conf" / group).glob("*.yaml"))]


@pytest.mark.parametrize("path", CLASS_YAMLS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_class_lies_in_the_folder_of_its_group(path: Path) -> None:
    target = yaml.safe_load(path.read_text())["_target_"]
    assert target.startswith(HOMES[path.parent.name])


def test_model_and_experiment_yamls_are_values_only() -> None:
    for group in ("model", "experiment", "train", "evaluate", "measure"):
        for path in (REPOSITORY / "conf" / group).glob("*.yaml"):
            assert "_target_" not in path.read_text(), path


def test_tests_mirror_the_package() -> None:
    folders = {p.name for p in (REPOSITORY / "tests").iterdir() if p.is_dir()}
    for folder in (p for p in (REPOSITORY / "zoo").iterdir() if (p / "__init__.py").exists()):
        # An algorithm is tested through its contract and its path through the update.
        assert folder.name in folders or folder.name in {"algorithms"}, folder.name


def test_the_grpo_file_is_short() -> None:
    lines = (REPOSITORY / "zoo" / "algorithms" / "grpo.py").read_text().splitlines()
    assert len(lines) < 90


def test_no_algorithm_is_known_by_name_to_the_loop() -> None:
    names = [p.stem for p in (REPOSITORY / "conf" / "algorithm").glob("*.yaml")]
    for file in ("loop.py", "update.py", "session.py", "run.py"):
        text = (REPOSITORY / "zoo" / "train" / file).read_text().lower()
        assert not [name for name in names if f'"{name}"' in text or f"algorithms.{name}" in text]


def test_no_algorithm_subclasses_another() -> None:
    import importlib

    from zoo.algorithms.base import Algorithm

    for path in (REPOSITORY / "zoo" / "algorithms").glob("*.py"):
        importlib.import_module(f"zoo.algorithms.{path.stem}")
    for kind in Algorithm.__subclasses__():
        if kind.__module__.startswith("zoo."):
            # Tests do derive from them, to make one deliberate mistake each.
            heirs = [k for k in kind.__subclasses__() if k.__module__.startswith("zoo.")]
            assert not heirs, kind
