"""What README shows works as written, and its numbers are those of the committed results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def test_example_from_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example as written, but for its size: an untrained model and one step."""
    monkeypatch.chdir(tmp_path)
    (source,) = [b for b in blocks("python") if "zoo.run(config)" in b]
    architecture = (
        'architecture=dict(model_type="llama", hidden_size=32, intermediate_size=48, '
        "num_hidden_layers=1, num_attention_heads=2, vocab_size=512, "
        'max_position_embeddings=256), tokenizer="arithmetic"'
    )
    smaller = {
        'recipe="tiny_sft"': architecture,
        "steps=45, groups=16": "steps=1, groups=2",
        "data=Arithmetic()": "data=Arithmetic(n_heldout=4, n_independent=4, n_texts=4)",
    }
    for old, new in smaller.items():
        assert old in source
        source = source.replace(old, new)
    measure = "    measure=zoo.MeasureConfig(wandb='disabled'),\n    seed=1,"
    values: dict[str, object] = {}
    exec(source.replace("    seed=1,", measure), values)
    assert values["summary"]["status"] == "finished"  # pyright: ignore
    assert values["summary"]["seed"] == 1  # pyright: ignore


def test_added_algorithm_runs_without_an_edit(tmp_path: Path) -> None:
    """README's module, yaml and command, in an empty folder."""
    from tests.e2e.small import SMALL

    (module,) = [b for b in blocks("python") if "class Mine" in b]
    (yaml,) = blocks("yaml")
    (command,) = [b for b in blocks("bash") if "algorithm=mine" in b]
    (tmp_path / "mine.py").write_text(module)
    file = tmp_path / re.findall(r"# (conf/\S+)", yaml)[0]
    file.parent.mkdir(parents=True)
    file.write_text(yaml)
    words = command.split()
    assert words[0] == "zoo"
    options = [w for w in words[1:] if not w.startswith(("model=", "data="))]
    small = [*SMALL, "train.steps=2", "evaluate.every=0", "output=out"]
    done = subprocess.run(
        [sys.executable, "-m", "zoo", *options, *small],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "out").glob("*/mine-*/seed_0/summary.json"))


def test_test_command_is_the_one_that_continuous_integration_runs() -> None:
    pattern = r"^python3 -m venv .* pytest$"
    assert len(re.findall(pattern, README, flags=re.M)) == 1
    assert pattern.strip("^$") in (REPOSITORY / ".ci" / "run").read_text().replace("'^", "")


def test_commands_are_single_lines() -> None:
    for block in blocks("bash")[:3]:
        assert block.strip().count("\n") == 0
