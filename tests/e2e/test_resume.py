"""A run killed at any moment and started again equals one that was never stopped."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import REPOSITORY
from tests.e2e.small import SMALL, folder_of, run_small
from zoo.data.arithmetic import Arithmetic
from zoo.train.session import TrainingError

# What the clock and the allocator decide, not the seeds.
NOT_COMPARED = ("time", "seconds", "tokens_per_second", "memory")

PPO = ["algorithm=ppo", "algorithm.epochs=2", "algorithm.minibatches=2"]
RUNS = {
    "sft": ["algorithm=sft"],
    "ppo": PPO,
    "dpo": ["algorithm=dpo"],
    "grpo": ["algorithm=grpo", "algorithm.kl_coef=0.1", "train.schedule=cosine"],
}
# In the middle of a step, of writing a checkpoint, of an evaluation, and before anything is saved.
MOMENTS = {
    "sft": "zoo.train.update:grad_norm:4",
    "ppo": "zoo.train.checkpoint:sha256:9",
    "dpo": "zoo.train.loop:_update:5",
    "grpo": "zoo.evaluate.evaluator:Evaluator._perplexity:2",
}


def killed(moment: str, output: Path, overrides: list[str]) -> None:
    command = [sys.executable, "-m", "tests.e2e.killed", moment, *SMALL, f"output={output}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [*command, *overrides], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


def lines(path: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(NOT_COMPARED)}
        for line in path.read_text().splitlines()
    ]


def equal(a: Any, b: Any) -> bool:
    """Bitwise equality of nested state."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def assert_same(first: Path, second: Path) -> None:
    last = sorted((first / "checkpoints").glob("step_*"))[-1].name
    names = sorted(p.name for p in (first / "checkpoints" / last).glob("*.pt"))
    assert names
    for name in names:
        a, b = (torch.load(f / "checkpoints" / last / name) for f in (first, second))
        assert equal(a, b), name
    for name in ("metrics.jsonl", "evals.jsonl", "rollouts.jsonl", "eval_samples.jsonl"):
        assert lines(first / name) == lines(second / name), name
    assert lines(first / "metrics.jsonl")[-1]["step"] == 6
    made = "policy" if (first / "policy").exists() else "reward_model"
    weights = f"{made}/model.safetensors"
    assert (first / weights).read_bytes() == (second / weights).read_bytes()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("algorithm", RUNS)
def test_B96_killed_and_resumed_equals_uninterrupted(algorithm: str, tmp_path: Path) -> None:
    run_small(tmp_path / "whole", *RUNS[algorithm])
    killed(MOMENTS[algorithm], tmp_path / "killed", RUNS[algorithm])
    folder = folder_of(tmp_path / "killed")
    assert not (folder / "summary.json").exists()
    run_small(tmp_path / "killed", *RUNS[algorithm])
    assert_same(folder_of(tmp_path / "whole"), folder)


def test_B98_damaged_checkpoint_is_refused_by_name_and_the_one_before_used(tmp_path: Path) -> None:
    overrides = RUNS["grpo"]
    run_small(tmp_path / "whole", *overrides)
    killed("zoo.train.loop:_update:6", tmp_path / "hurt", overrides)
    folder = folder_of(tmp_path / "hurt")
    newest = sorted((folder / "checkpoints").glob("step_*"))[-1]
    file = newest / "policy.pt"
    file.write_bytes(file.read_bytes()[:-100])
    run_small(tmp_path / "hurt", *overrides)
    warnings = (folder / "warnings.jsonl").read_text()
    assert newest.name in warnings and "policy.pt" in warnings
    same = folder_of(tmp_path / "whole"), folder
    assert lines(same[0] / "metrics.jsonl")[-1]["reward/total"] == pytest.approx(
        lines(same[1] / "metrics.jsonl")[-1]["reward/total"]
    )
    weights = "policy/model.safetensors"
    assert (same[0] / weights).read_bytes() == (same[1] / weights).read_bytes()


def random_score(prompts: list[str], completions: list[str]) -> list[float]:
    return [random.SystemRandom().random() for _ in completions]  # as a judge is, or a timeout


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_a_run_does_not_go_on_with_other_pairs_than_it_began_with(
    algorithm: str, tmp_path: Path
) -> None:
    job = [f"algorithm={algorithm}", "reward=function", f"reward.fn={__name__}.random_score"]
    killed("zoo.train.loop:_update:4", tmp_path / "run", job)
    pairs, aside = tmp_path / "cache/pairs", tmp_path / "aside"
    pairs.rename(aside)
    with pytest.raises(TrainingError, match=r"step_000002 .*other rows .*cache/pairs .*resume="):
        run_small(tmp_path / "run", *job)
    shutil.rmtree(pairs)
    aside.rename(pairs)
    assert run_small(tmp_path / "run", *job)["status"] == "finished"


def test_a_run_does_not_go_on_with_prompts_in_another_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed("zoo.train.loop:_update:4", tmp_path, RUNS["grpo"])
    prompts = Arithmetic.prompts
    with monkeypatch.context() as patch:
        patch.setattr(Arithmetic, "prompts", lambda self: [*reversed(prompts(self))])
        with pytest.raises(TrainingError, match=r"step_000002 .*other rows .*another order.*set"):
            run_small(tmp_path, *RUNS["grpo"])
    assert run_small(tmp_path, *RUNS["grpo"])["status"] == "finished"


@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_a_checkpoint_from_before_rows_had_a_hash_goes_on(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed("zoo.train.loop:_update:4", tmp_path, RUNS[algorithm])
    (manifest,) = folder_of(tmp_path).glob("checkpoints/*/manifest.json")
    source = json.loads(manifest.read_text())["state"]["source"]
    assert set(source) == {"position", "content_hash"}
    old = {"position": source["position"]}
    state = property(lambda checkpoint: {**checkpoint.manifest["state"], "source": old})
    monkeypatch.setattr("zoo.train.checkpoint.Checkpoint.state", state)
    assert run_small(tmp_path, *RUNS[algorithm])["status"] == "finished"


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_finished_run_whose_policy_is_gone_writes_it_again_or_says_so(
    checkpoints: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run_small(tmp_path, *RUNS["sft"])
    folder = folder_of(tmp_path)
    weights, metrics = folder / "policy/model.safetensors", folder / "metrics.jsonl"
    before, recorded = weights.read_bytes(), metrics.read_bytes()
    shutil.rmtree(folder / "policy")
    if not checkpoints:
        shutil.rmtree(folder / "checkpoints")
    capsys.readouterr()
    again = run_small(tmp_path, *RUNS["sft"])
    said = capsys.readouterr().out
    assert ("what it made is gone; delete the folder" in said) == (not checkpoints)
    assert again["policy_hash"] == first["policy_hash"] and metrics.read_bytes() == recorded
    assert weights.exists() == checkpoints
    assert not checkpoints or weights.read_bytes() == before


def test_finished_run_is_returned_and_its_folder_refuses_another_configuration(
    tmp_path: Path,
) -> None:
    from zoo.config import ConfigError

    first = run_small(tmp_path, "algorithm=grpo", "name=mine")
    metrics = (folder_of(tmp_path) / "metrics.jsonl").stat().st_mtime_ns
    assert run_small(tmp_path, "algorithm=grpo", "name=mine") == first
    assert (folder_of(tmp_path) / "metrics.jsonl").stat().st_mtime_ns == metrics
    with pytest.raises(ConfigError, match="another configuration"):
        run_small(tmp_path, "algorithm=grpo", "name=mine", "algorithm.clip_eps=0.1")


def test_a_run_refused_before_its_first_step_gives_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zoo.config import ConfigError
    from zoo.train.lock import FolderLock

    blank = "model.chat_template='{% for m in messages %}{{ m.contnt }}{% endfor %}'"
    rows = [{"prompt": f"What is {n}?", "answer": str(n)} for n in range(40)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = ["algorithm=grpo", "name=mine", "data=jsonl", f"data.path={file}"]
    small = [one for one in SMALL if not one.startswith("data.")]
    monkeypatch.setattr("tests.e2e.small.SMALL", [*small, "train.steps=1"])
    with pytest.raises(ConfigError, match=r"no tokens: .*\n?.*Set model\.chat_template to one"):
        run_small(tmp_path, *chat, blank)
    folder = folder_of(tmp_path)
    refused = json.loads((folder / "meta.json").read_text())["config_hash"]
    lock = FolderLock(folder)
    lock.acquire()  # alive, and before its first step
    with pytest.raises(ConfigError, match="another process is running"):
        run_small(tmp_path, *chat)
    lock.release()

    take = FolderLock.acquire

    def late(self: FolderLock) -> None:  # the other did a step, and ended, before the lock is ours
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
        take(self)

    (folder / "error.txt").unlink()
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="another configuration"):
        patch.setattr(FolderLock, "acquire", late)
        run_small(tmp_path, *chat)
    assert not (folder / "error.txt").exists()
    (folder / "metrics.jsonl").write_text("")
    assert run_small(tmp_path, *chat, "resume=never")["steps"] == 1
    assert json.loads((folder / "meta.json").read_text())["config_hash"] != refused
    assert "chat_template: null" in (folder / "config.yaml").read_text()


@pytest.mark.parametrize(
    "left",
    ["metrics.jsonl", "evals.jsonl", "summary.json", "checkpoints/step_1/x", "best/a.safetensors"],
)
def test_whatever_a_run_made_keeps_its_name(tmp_path: Path, left: str) -> None:
    from zoo.config import ConfigError, RunConfig
    from zoo.train.run import finished

    (tmp_path / "meta.json").write_text('{"config_hash": "other"}')
    assert finished(tmp_path, "mine", RunConfig()) is None
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).write_text("{}")
    with pytest.raises(ConfigError, match="another configuration"):
        finished(tmp_path, "mine", RunConfig())


def test_resume_must_refuses_to_start_anew(tmp_path: Path) -> None:
    from zoo.config import ConfigError

    with pytest.raises(ConfigError, match="no good checkpoint"):
        run_small(tmp_path, "algorithm=grpo", "resume=must")
