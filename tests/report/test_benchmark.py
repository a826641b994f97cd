"""`python -m benchmarks.run` with a job that writes a run folder instead of training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import run as benchmark
from benchmarks import suite as suites
from benchmarks.readme import fill, render
from benchmarks.run import main
from benchmarks.suite import read_suite, suite_names
from zoo.config import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]

# Keeps the contract of a run in few lines; a file named `break` makes seed 1 of grpo fail.
JOB = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(REPOSITORY)!r})
from tests.report.synthetic import evaluation, write_run
values = dict(text.split("=", 1) for text in sys.argv[1:])
root, name, seed = Path("outputs"), values["name"], int(values["seed"])
folder = root / values["experiment"] / name / f"seed_{{seed}}"
Path(os.environ["ZOO_RUN_DIR_FILE"]).write_text(str(folder.absolute()))
if (folder / "summary.json").exists():
    sys.exit(0)
Path(os.environ["ZOO_RUN_DIR_FILE"]).write_text(f"{{folder.absolute()}}\\nbegun\\n")
if Path("break").exists() and (name, seed) == ("grpo", 1):
    sys.exit("broken on purpose")
steps = int(values["train.steps"])
lines = [evaluation(0, [[1], [0]], [1, 0])]
if steps:
    lines.append(evaluation(steps, [[1], [1]], [1, 1]))
write_run(root, name, seed, experiment=values["experiment"], steps=steps, evaluations=lines,
          rewards=[0.5] * steps, meta={{"argv": sys.argv}})
"""

SUITE = """
title: A small comparison
minutes: 1
overrides: [train.steps=2]
seeds: [0, 1]
arms:
  no-training: {overrides: [train.steps=0], seeds: [0]}
  grpo: {overrides: [algorithm=grpo]}
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    folder = tmp_path / "suites"
    folder.mkdir()
    (folder / "small.yaml").write_text(SUITE)
    script = tmp_path / "job.py"
    script.write_text(JOB)
    monkeypatch.setattr(suites, "SUITES", folder)
    monkeypatch.chdir(tmp_path)
    return [sys.executable, str(script)]


def start(job: list[str], *arguments: str) -> int:
    return main(["suite=small", *arguments], command=job, check=None)


def test_a_suite_runs_and_its_results_are_written(job, tmp_path: Path, capsys):
    assert start(job) == 0
    results = tmp_path / "results" / "small"
    names = {path.name for path in results.iterdir()}
    assert {"table.md", "table.csv", "figure.png", "memory.png", "page.html"} <= names
    record = json.loads((results / "record.json").read_text())
    assert record["suite"] == "small"
    assert record["seeds"] == {"no-training": [0], "grpo": [0, 1]}
    assert record["minutes"] >= 0 and record["commit"]
    assert "start (no-training)" in capsys.readouterr().out


def test_the_first_seed_of_every_arm_comes_first(job):
    labels, jobs = read_suite("small").jobs()
    assert labels == ["no-training, seed 0", "grpo, seed 0", "grpo, seed 1"]
    assert jobs[0][:2] == ["train.steps=2", "train.steps=0"]  # an arm's own wins by coming later


def test_a_failure_is_told_and_the_same_command_finishes(job, tmp_path: Path, capsys):
    (tmp_path / "break").touch()
    assert start(job) == 1
    assert "broken on purpose" in capsys.readouterr().out
    # what is published under the suite's name is whole: the partial report lies beside the runs
    assert not (tmp_path / "results").exists()
    assert len(list((tmp_path / "outputs").glob("small-*/report/page.html"))) == 1
    (tmp_path / "break").unlink()
    assert start(job) == 0
    out = capsys.readouterr().out
    assert "1 finished, 2 skipped" in out
    assert (tmp_path / "results" / "small" / "table.md").exists()


def test_further_overrides_never_replace_the_suites_results(job, tmp_path: Path):
    assert start(job, "train.steps=3") == 0
    assert not (tmp_path / "results").exists()
    assert start(job) == 0
    assert len(list((tmp_path / "outputs").glob("small-*"))) == 2  # runs of each lie apart


def test_out_redirects_the_results(job, tmp_path: Path):
    assert start(job, "out=elsewhere") == 0
    assert (tmp_path / "elsewhere" / "table.csv").exists()
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["suite=smal"], "Did you mean suite=small?"),
        (["small"], "Did you mean suite=small?"),
        (["suite=small", "sute=x"], "Did you mean suite?"),
        (["suite=small", "seed=3"], "a suite sets seed itself"),
        (["suite=small", "train.lr=1e-4,2e-4"], "takes no sweep"),
        (["suite=small", "jobs=0"], "got '0'"),
    ],
)
def test_a_mistake_is_one_short_block(job, capsys, arguments: list[str], expected: str):
    assert main(arguments, command=job, check=None) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert expected in error and len(error) < 400 and "Traceback" not in error


def test_a_mistake_in_a_suites_file_is_named(job, tmp_path: Path):
    (tmp_path / "suites" / "bad.yaml").write_text("arms: {a: {override: [x=1]}}")
    with pytest.raises(ConfigError, match=r"arms\.a\.override.*Did you mean arms\.a\.overrides"):
        read_suite("bad")


def test_an_override_of_the_run_is_not_mistaken_for_an_option(job):
    options, extra = benchmark._split(["suite=small", "output=elsewhere", "out=x", "~reward"])
    assert options == {"suite": "small", "out": "x"}
    assert extra == ["output=elsewhere", "~reward"]


@pytest.mark.parametrize("name", suite_names())
def test_the_suites_that_are_shipped_compare_what_they_promise(name: str):
    suite = read_suite(name)
    assert [arm.label for arm in suite.arms] == [
        "no-training",
        "ppo",
        "dpo",
        "grpo",
        "random-reward",
    ]
    _, jobs = suite.jobs()
    folders = [tuple(text for text in job if text.startswith(("name=", "seed="))) for job in jobs]
    assert len(set(folders)) == len(jobs)  # no two runs share a folder


def test_the_block_of_the_readme_is_replaced_and_nothing_else():
    text = "a\n<!-- results:x begin -->\nold\n<!-- results:x end -->\nb\n"
    new = fill(text, "x", "new")
    assert new == "a\n<!-- results:x begin -->\nnew\n<!-- results:x end -->\nb\n"
    assert fill(new, "x", "new") == new
    with pytest.raises(ValueError, match="once each"):
        fill("no marks", "x", "new")


def test_the_block_holds_the_tables_the_pictures_and_the_origin(job, tmp_path: Path):
    start(job)
    results = tmp_path / "results" / "small"
    block = render(results, "results/small")
    assert (results / "table.md").read_text().strip() in block
    assert "(results/small/figure.png)" in block and "(results/small/memory.png)" in block
    assert "commit 0123456789" in block and "grpo: 0, 1" in block


def test_the_readme_shows_the_committed_results(tmp_path: Path):
    """The block is that of the committed results, or of a later run that README was filled from."""
    results = REPOSITORY / "results" / "quickstart"
    if not (results / "record.json").exists():
        pytest.skip("no committed results of the quickstart")
    committed = tmp_path / "quickstart"
    committed.mkdir()
    for name in ("record.json", "table.md"):
        shown = subprocess.run(
            ["git", "show", f"HEAD:results/quickstart/{name}"], cwd=REPOSITORY, capture_output=True
        )
        # Outside a checkout the files that came along are the committed ones.
        found = shown.stdout if shown.returncode == 0 else (results / name).read_bytes()
        (committed / name).write_bytes(found)
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    filled = [
        fill(text, "quickstart", render(folder, "results/quickstart"))
        for folder in (committed, results)
    ]
    assert text in filled
