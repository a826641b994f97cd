"""Two metered steps after the last one: exact, repeatable, and without a trace in the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zoo.train.probe
import zoo.train.session
from tests.conftest import REPOSITORY
from tests.e2e.small import folder_of, run_small
from zoo.measure.memory_table import text
from zoo.models.loading import weights_hash

QUICK = ["train.steps=1", "evaluate.first=false", "evaluate.last=false", "rollout.max_new_tokens=6"]
ALGORITHMS = ("sft", "ppo", "dpo", "grpo")

# Vocabulary 512, width 32, two layers, inner width 48: embedding (tied) 512·32 = 16,384; a layer
# q, k, v, o 4·32² = 4,096, MLP 3·32·48 = 4,608, two norms 64; the last norm 32.
WEIGHTS = 16_384 + 2 * (4_096 + 4_608 + 64) + 32
TENSORS = 1 + 2 * 9 + 1
HEAD = 32 + 1  # the critic's: a weight and a bias
ROTARY = 2 * 4 * 4  # bytes: frequencies of half the head size of 8, twice
POLICY = {"parameters": 4 * WEIGHTS + ROTARY, "optimizer": 2 * 4 * WEIGHTS + 4 * TENSORS}
CRITIC = {
    "parameters": 4 * (WEIGHTS + HEAD) + ROTARY,
    "optimizer": 2 * 4 * (WEIGHTS + HEAD) + 4 * (TENSORS + 2),
}
REFERENCE = {"parameters": 4 * WEIGHTS + ROTARY}
COMPONENTS = {
    "sft": {"policy": POLICY},
    "ppo": {"policy": POLICY, "critic": CRITIC, "reference": REFERENCE},
    "dpo": {"policy": POLICY},  # the reference's log-probs are cached and it is freed
    "grpo": {"policy": POLICY},
}


def run_all(output: Path) -> dict[str, dict[str, Any]]:
    """memory.json of one run of each algorithm."""
    found = {}
    for name in ALGORITHMS:
        run_small(output / name, f"algorithm={name}", *QUICK)
        found[name] = json.loads((folder_of(output / name) / "memory.json").read_text())
    return found


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZOO_CACHE", str(tmp_path_factory.mktemp("cache")))
        return run_all(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_components_equal_parameter_arithmetic_in_every_phase(name: str, memory: dict) -> None:
    first, second = memory[name]["probes"]
    assert list(second) == ["rollout", "prepare", "update"]
    for phase, split in second.items():
        owned = {
            label: n
            for label, n in split.items()
            if label.rpartition("/")[2] in ("parameters", "optimizer", "copies")
        }
        wanted = {
            f"{component}/{kind}": n
            for component, kinds in COMPONENTS[name].items()
            for kind, n in kinds.items()
        }
        assert owned == wanted, phase
        assert split["total"] == sum(n for label, n in split.items() if label != "total")
    assert not [label for label in first["rollout"] if label.endswith("optimizer")]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_sizes_of_the_components_equal_arithmetic(name: str, memory: dict) -> None:
    for component, kinds in COMPONENTS[name].items():
        trained = "optimizer" in kinds
        weights = WEIGHTS + (HEAD if component == "critic" else 0)
        assert memory[name]["components"][component] == {
            "gradients": 4 * weights if trained else 0,
            "optimizer": kinds.get("optimizer", 0),
            "parameters": kinds["parameters"],
        }


def test_a_first_batch_that_teaches_nothing_hides_no_optimizer(tmp_path: Path) -> None:
    run_small(
        tmp_path,
        "algorithm=grpo",
        *QUICK,
        "train.steps=2",
        "reward=function",
        "reward.fn=tests.e2e.faulty.alike_at_first",
    )
    lines = (folder_of(tmp_path) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["groups/dead"] == 1 for step in steps] == [True, False]
    found = json.loads((folder_of(tmp_path) / "memory.json").read_text())
    assert found["components"]["policy"]["optimizer"] == POLICY["optimizer"]


def test_another_process_meters_the_same_bytes(memory: dict, tmp_path: Path) -> None:
    code = (
        "import json, sys; from pathlib import Path; from tests.train.test_probe import run_all;"
        "Path(sys.argv[2]).write_text(json.dumps(run_all(Path(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "runs"), str(tmp_path / "found.json")]
    environment = {**os.environ, "ZOO_CACHE": str(tmp_path / "cache")}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, capture_output=True)
    again = json.loads((tmp_path / "found.json").read_text())
    for name in ALGORITHMS:
        assert again[name]["probes"] == memory[name]["probes"], name


def test_copies_in_bfloat16_are_half_the_weights(tmp_path: Path) -> None:
    run_small(tmp_path, "algorithm=ppo", "model.compute_dtype=bfloat16", *QUICK)
    found = json.loads((folder_of(tmp_path) / "memory.json").read_text())
    for split in found["probes"][1].values():
        assert split["policy/copies"] == split["critic/copies"] == 2 * WEIGHTS
        assert split["reference/parameters"] == 2 * WEIGHTS + ROTARY  # held in bfloat16 alone


def test_a_sampler_of_its_own_dtype_is_counted(tmp_path: Path) -> None:
    run_small(tmp_path, "algorithm=grpo", "rollout.dtype=bfloat16", *QUICK)
    found = json.loads((folder_of(tmp_path) / "memory.json").read_text())
    assert found["components"]["sampler"] == {"copies": 2 * WEIGHTS}
    assert {split["sampler/copies"] for split in found["probes"][1].values()} == {2 * WEIGHTS}


def test_the_probe_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []

    def watched(run: Any, **settings: Any) -> Any:
        before = weights_hash(run.policy.model)
        found = zoo.train.probe.probe(run, **settings)
        hashes.append((before, weights_hash(run.policy.model)))
        return found

    monkeypatch.setattr(zoo.train.session, "probe", watched)
    overrides = ["algorithm=ppo", "train.steps=3", "evaluate.every=0"]
    on = run_small(tmp_path / "on", *overrides)
    off = run_small(tmp_path / "off", *overrides, "measure.memory=false")
    ((before, after),) = hashes
    assert before == after == on["policy_hash"] == off["policy_hash"]
    assert "memory" not in off
    files = [folder_of(tmp_path / way) / "policy" / "model.safetensors" for way in ("on", "off")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("name", ["sft", "ppo", "kto", "reward_model"])
def test_a_run_resumed_after_its_last_step_has_the_same_probes(name: str, tmp_path: Path) -> None:
    words = [f"algorithm={name}", *QUICK]
    run_small(tmp_path, *words)
    memory, summary = (folder_of(tmp_path) / f"{what}.json" for what in ("memory", "summary"))
    before = json.loads(memory.read_text())["probes"]
    for file in (memory, summary):  # as where it was killed in the probe
        file.unlink()
    run_small(tmp_path, *words)
    assert json.loads(memory.read_text())["probes"] == before


def test_the_table_is_in_the_summary_and_its_time_is_not_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = run_small(tmp_path, "algorithm=grpo", *QUICK)
    found = json.loads((folder_of(tmp_path) / "memory.json").read_text())
    size = {"policy/parameters": POLICY["parameters"], "policy/gradients": 4 * WEIGHTS}
    size["policy/optimizer"] = POLICY["optimizer"]
    size["total"] = sum(size.values())
    assert summary["memory"] == {"size": size, **found["probes"][1]}
    assert text(summary["memory"]) in capsys.readouterr().out
    lines = (folder_of(tmp_path) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["seconds/step"] for line in lines]
    assert summary["seconds"]["total"] == pytest.approx(sum(steps))
    assert summary["seconds"]["probe"] > 0


def test_a_probe_can_be_interrupted_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = []

    def interrupted(run: Any, **_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        after.append(1)

    monkeypatch.setattr(zoo.train.session, "probe", interrupted)
    with pytest.raises(KeyboardInterrupt, match="Step 1 of 1 is saved"):
        run_small(tmp_path, "algorithm=grpo", *QUICK)
    assert not after and not (folder_of(tmp_path) / "summary.json").exists()
    monkeypatch.undo()
    assert run_small(tmp_path, "algorithm=grpo", *QUICK)["memory"]


def test_a_probe_that_fails_costs_the_table_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run: Any, **_: Any) -> None:
        raise RuntimeError("not enough memory: you tried to allocate 7 bytes")

    monkeypatch.setattr(zoo.train.session, "probe", broken)
    summary = run_small(tmp_path, "algorithm=sft", *QUICK)
    assert summary["status"] == "finished" and "memory" not in summary
    warnings = (folder_of(tmp_path) / "warnings.jsonl").read_text()
    assert "you tried to allocate 7 bytes" in warnings and "measure.memory=false" in warnings


def test_each_phase_is_that_of_the_process_that_holds_most(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"update": {"total": 7, "cache": 7}, "rollout": {"total": 1, "cache": 1}}
    mine = {"update": {"total": 5, "inputs": 5}, "rollout": {"total": 2, "inputs": 2}}
    monkeypatch.setattr(zoo.train.probe, "gathered", lambda value: [value, other])
    assert zoo.train.probe._largest(mine) == {"update": other["update"], "rollout": mine["rollout"]}
