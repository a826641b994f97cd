"""Whole runs with adapters: every algorithm, what is kept, killed runs, and two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.small import folder_of, run_small
from tests.e2e.start import start_folder, started_from
from tests.e2e.test_resume import equal, killed, lines
from tests.e2e.test_two_processes import torchrun

pytest.importorskip("peft")

LORA = ["model.lora.rank=4", "train.lr=1e-2"]
HALF = "model.compute_dtype=bfloat16"
SHORT = ["train.steps=2", "evaluate.every=0", "train.checkpoint_every=0"]
QUIET = ["evaluate.first=false", "evaluate.last=false"]
ONE = ["train.steps=1", *QUIET, "train.checkpoint_every=0"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return start_folder(tmp_path_factory.mktemp("lora") / "start")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def components(output: Path) -> dict[str, dict[str, int]]:
    return json.loads((folder_of(output) / "memory.json").read_text())["components"]


# rank 4 × (in + out) of q, k, v, o (32 + 32) and gate, up, down (32 + 48), two layers, 4 bytes
ADAPTER = 4 * 4 * 2 * (4 * 64 + 3 * 80)


@pytest.mark.parametrize(
    ("name", "role"),
    [("grpo", "policy"), ("ppo", "policy"), ("ppo_shared", "policy"), ("dpo", "policy"),
     ("sft", "policy"), ("kto", "policy"), ("reward_model", "reward_model")],
)  # fmt: skip
@pytest.mark.parametrize("precision", [[], [HALF]], ids=["float32", "bfloat16"])
def test_only_adapters_and_heads_are_trained_and_kept(
    name: str, role: str, precision: list[str], start: list[str], tmp_path: Path
) -> None:
    more = ["algorithm.kl_coef=0.1"] if name == "grpo" else []
    run_small(tmp_path, *start, *LORA, *SHORT, *QUIET, *precision, f"algorithm={name}", *more)
    folder = folder_of(tmp_path)
    for line in lines(folder / "metrics.jsonl"):
        assert line[f"grad_norm/{role}"] > 0
    found = components(tmp_path)
    head = {"ppo_shared": 4 * 33, "reward_model": 4 * 32}.get(name, 0)
    assert found[role]["gradients"] == ADAPTER + head
    state = torch.load(folder / "checkpoints" / "step_000002" / f"{role}.pt")
    kept = [k for k in state if "inv_freq" not in k and "score_" not in k]
    assert len([k for k in kept if ".lora_" in k]) == 2 * 7 * 2
    assert all(".lora_" in k or "head" in k or k.endswith("score.weight") for k in kept)
    if name == "ppo":
        assert found["critic"]["gradients"] == ADAPTER + 4 * 33
        critic = torch.load(folder / "checkpoints" / "step_000002" / "critic.pt")
        assert {k for k in critic if ".lora_" not in k and "inv_freq" not in k} == {
            "head.weight",
            "head.bias",
        }
        # its base is the policy's: what is left are adapter, head, and rotary buffers
        assert found["critic"]["parameters"] < ADAPTER + 4 * 33 + 100
    if name in ("ppo", "grpo"):  # the reference holds nothing but rotary buffers
        assert found["reference"]["parameters"] < 100
    files = {p.name for p in (folder / role).iterdir()}
    if role == "policy":
        assert "adapter_model.safetensors" in files and "model.safetensors" not in files
        saved = load_file(folder / role / "adapter_model.safetensors")
        moved = [k for k, v in saved.items() if "lora_B" in k and float(v.abs().max()) > 0]
        assert len(moved) == 2 * 7
    else:  # always merged, for `reward=learned`
        assert "model.safetensors" in files and "adapter_config.json" not in files
        from zoo.config import ModelConfig
        from zoo.models.reward_model import load_reward_model

        load_reward_model(ModelConfig(path=str(folder / role)))


@pytest.mark.parametrize("name", ["grpo", "dpo", "ppo"])
def test_the_first_step_pays_nothing_for_drift(name: str, start: list[str], tmp_path: Path) -> None:
    """B is 0 and the reference is the base, so log-ratios are 0 and DPO's loss is ln 2."""
    more = ["algorithm.kl_coef=0.1"] if name != "dpo" else []
    run_small(tmp_path, *start, *LORA, *SHORT, *QUIET, f"algorithm={name}", *more)
    first, second = lines(folder_of(tmp_path) / "metrics.jsonl")
    if name == "dpo":
        assert first["loss/policy"] == pytest.approx(0.6931471805599453, abs=1e-6)
        assert second["loss/policy"] != pytest.approx(0.6931471805599453, abs=1e-6)
    else:
        # two packings of one batch: a rounding of a log-prob near 6
        assert abs(first["kl_ref"]) < 1e-6 and abs(second["kl_ref"]) > 1e-6
        assert first["mismatch/sampler"] < 1e-6 and second["mismatch/sampler"] < 1e-5


def test_an_adapter_is_a_start_of_its_own(start: list[str], tmp_path: Path) -> None:
    run_small(tmp_path / "one", *start, *LORA, *SHORT, *QUIET, "algorithm=sft")
    adapter = started_from(folder_of(tmp_path / "one") / "policy")
    more = ["algorithm=ppo", *SHORT, "evaluate.first=false"]
    run_small(tmp_path / "two", *adapter, *LORA, *more)
    found = components(tmp_path / "two")
    assert ADAPTER <= found["reference"]["parameters"] < ADAPTER + 100  # a frozen copy
    first, _ = lines(folder_of(tmp_path / "two") / "metrics.jsonl")
    assert abs(first["kl_ref"]) < 1e-6
    summary = json.loads((folder_of(tmp_path / "two") / "summary.json").read_text())
    assert summary["kl_to_start"] is not None
    # merged into its base, when all weights are trained
    run_small(tmp_path / "three", *adapter, *SHORT, *QUIET, "algorithm=grpo")
    assert (folder_of(tmp_path / "three") / "policy" / "model.safetensors").exists()


def test_a_merged_policy_scores_as_its_adapter_does(start: list[str], tmp_path: Path) -> None:
    from zoo.evaluate.cli import evaluate, model_overrides

    policies = []
    for merge in ("false", "true"):
        output = tmp_path / merge
        merging = f"model.lora.merge_on_save={merge}"
        run_small(output, *start, *LORA, *SHORT, *QUIET, merging, "algorithm=sft")
        policies.append(folder_of(output) / "policy")
    assert not (policies[1] / "adapter_config.json").exists()
    assert (policies[1] / "model.safetensors").exists()
    from zoo.compose import compose
    from zoo.instantiate import structured

    tests = ["data.n_problems=8", "data.n_heldout=6", "data.n_texts=4", "data.n_independent=4",
             "data.n_examples=8", "evaluate.samples=0", "rollout.max_new_tokens=10",
             "evaluate.pass_k=[1]"]  # fmt: skip
    found = []
    for folder in policies:
        config = structured(compose([*model_overrides(str(folder.parent)), *tests]))
        found.append({r["set"]: r for r in evaluate(config, show=False)})
    texts = [name for name, record in found[0].items() if record["kind"] == "perplexity"]
    assert texts
    for name in texts:
        assert found[0][name]["nll"] == pytest.approx(found[1][name]["nll"], rel=1e-5)
    base = structured(compose([*model_overrides(str(start[2].split("'")[1])), *tests]))
    for record in evaluate(base, show=False):
        if record["set"] in texts:
            assert record["nll"] != pytest.approx(found[0][record["set"]]["nll"], rel=1e-3)


@pytest.mark.parametrize("more", [[], [HALF, "model.lora.dropout=0.3"]], ids=["plain", "both"])
def test_killed_and_resumed_equals_uninterrupted(
    more: list[str], start: list[str], tmp_path: Path
) -> None:
    overrides = [
        *start,
        *LORA,
        *more,
        "algorithm=ppo",
        "algorithm.epochs=1",
        "train.steps=4",
        "evaluate.every=0",
    ]
    run_small(tmp_path / "whole", *overrides)
    killed("zoo.train.loop:_update:4", tmp_path / "killed", overrides)  # after a checkpoint
    folders = [folder_of(tmp_path / name) for name in ("whole", "killed")]
    assert [p.name for p in (folders[1] / "checkpoints").glob("step_*")] == ["step_000002"]
    assert not (folders[1] / "summary.json").exists()
    run_small(tmp_path / "killed", *overrides)
    for name in ("policy", "critic", "optimizer_policy", "optimizer_critic"):
        a, b = (torch.load(f / "checkpoints" / "step_000004" / f"{name}.pt") for f in folders)
        assert equal(a, b), name
    for name in ("metrics.jsonl", "evals.jsonl", "rollouts.jsonl"):
        assert lines(folders[0] / name) == lines(folders[1] / name), name
    file = "policy/adapter_model.safetensors"
    assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes()


def test_dropout_moves_the_update_and_not_what_is_sampled(start: list[str], tmp_path: Path) -> None:
    found = []
    for rate in ("0.0", "0.5"):
        output = tmp_path / rate
        dropout = f"model.lora.dropout={rate}"
        run_small(output, *start, *LORA, *SHORT, *QUIET, dropout, "algorithm=grpo")
        found.append(folder_of(output))
    rows = [lines(f / "rollouts.jsonl") for f in found]
    firsts = [[r["token_ids"] for r in some[:4]] for some in rows]
    assert firsts[0] == firsts[1]
    norms = [lines(f / "metrics.jsonl")[0]["grad_norm/policy"] for f in found]
    assert norms[0] != pytest.approx(norms[1], rel=1e-3)


def test_offloading_on_a_cpu_says_that_it_does_nothing(start: list[str], tmp_path: Path) -> None:
    weights = []
    for wanted in ("false", "true"):
        output = tmp_path / wanted
        asked = [f"model.offload_reference={wanted}", f"train.offload_optimizer={wanted}"]
        run_small(output, *start, *SHORT, *QUIET, *asked, "algorithm=ppo")
        folder = folder_of(output)
        weights.append((folder / "policy" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    said = (folder / "warnings.jsonl").read_text()
    for name in ("model.offload_reference", "train.offload_optimizer"):
        assert f"{name}=true does nothing on a CPU" in said


def test_recomputed_activations_make_the_same_update_at_a_lower_peak(
    start: list[str], tmp_path: Path
) -> None:
    """transformers hands out models in evaluation mode, where nothing would be recomputed."""
    moments, peaks = [], []
    for wanted in ("false", "true"):
        output = tmp_path / wanted
        asked = [f"model.activation_checkpointing={wanted}", "algorithm=ppo"]
        run_small(output, *start, *LORA, *ONE, *asked)
        folder = folder_of(output)
        for role in ("policy", "critic"):
            file = folder / "checkpoints" / "step_000001" / f"optimizer_{role}.pt"
            moments.append([state["exp_avg"] for state in torch.load(file)["state"].values()])
        probes = json.loads((folder / "memory.json").read_text())["probes"]
        peaks.append(probes[-1]["update"]["activations"])
    for kept, again in zip(moments[:2], moments[2:], strict=True):
        for one, two in zip(kept, again, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-6)
    assert peaks[1] < 0.8 * peaks[0]


def test_recomputing_leaves_routers_that_draw_in_training_as_they_are(tmp_path: Path) -> None:
    weights = []
    experts = ["model.architecture.model_type=phimoe", "+model.architecture.num_local_experts=4",
               "+model.architecture.num_key_value_heads=2"]  # fmt: skip
    for wanted in ("false", "true"):
        output = tmp_path / wanted
        asked = f"model.activation_checkpointing={wanted}"
        run_small(output, *experts, *SHORT, *QUIET, asked, "algorithm=grpo")
        folder = folder_of(output)
        weights.append((folder / "policy" / "model.safetensors").read_bytes())
        assert lines(folder / "metrics.jsonl")[0]["mismatch/sampler"] < 1e-5
    assert weights[0] == weights[1]


# --- two processes --------------------------------------------------------------------------------

# Tokens drawn in float32: in bfloat16 another number of rows would round some to another token.
BFLOAT16 = [HALF, "rollout.dtype=float32"]
TOGETHER: dict[str, tuple[list[str], float]] = {
    "lora grpo": ([*LORA, "algorithm=grpo", "algorithm.kl_coef=0.1"], 1e-6),
    "lora ppo": ([*LORA, "algorithm=ppo"], 1e-6),
    "lora dpo": ([*LORA, "algorithm=dpo"], 1e-6),
    "lora reward_model": ([*LORA, "algorithm=reward_model"], 1e-6),
    "bfloat16 grpo": ([*BFLOAT16, "algorithm=grpo"], 2e-2),
    "bfloat16 ppo": ([*BFLOAT16, "algorithm=ppo"], 2e-2),
    "bfloat16 lora ppo": ([*LORA, *BFLOAT16, "algorithm=ppo"], 2e-2),
}


@pytest.fixture(scope="module")
def together(start: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each run once by one process and once by two, and a longer one by two."""
    base = tmp_path_factory.mktemp("together")
    jobs: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZOO_CACHE", str(base / "cache"))
        for name, (overrides, _) in TOGETHER.items():
            run_small(base / "one" / name, *start, *overrides, *ONE)
            jobs.append(
                {"output": str(base / "two" / name), "overrides": [*start, *overrides, *ONE]}
            )
    for name in ("lora ppo", "bfloat16 lora ppo", "bfloat16 grpo"):
        longer = ["train.steps=3", *QUIET]
        jobs.append({"output": str(base / "longer" / name),
                     "overrides": [*start, *TOGETHER[name][0], *longer]})  # fmt: skip
    (base / "jobs.json").write_text(json.dumps(jobs))
    # where a run ends, tests.e2e.two compares the weights of both processes
    done = torchrun("tests.e2e.two", str(base / "jobs.json"), cache=base / "cache_two")
    assert done.returncode == 0, done.stdout + done.stderr
    return base


@pytest.mark.parametrize("name", TOGETHER)
def test_the_first_update_of_two_processes_is_that_of_one(name: str, together: Path) -> None:
    one, two = (folder_of(together / n / name) / "checkpoints/step_000001" for n in ("one", "two"))
    files = sorted(path.name for path in one.glob("optimizer_*.pt"))
    assert files
    for file in files:
        a, b = (torch.load(folder / file)["state"] for folder in (one, two))
        # Adam's first moment after one update is 0.1 of the gradient
        a, b = (torch.cat([s["exp_avg"].flatten() for s in x.values()]) for x in (a, b))
        limit = TOGETHER[name][1]
        assert a.abs().max() > 1e-5
        if limit < 1e-3:
            assert (a - b).abs().max() < limit, file
        else:  # roundings of bfloat16, in other shapes: a share of the gradient's length
            assert (a - b).norm() < limit * a.norm(), file


def test_two_processes_hold_the_same_weights_after_several_updates(together: Path) -> None:
    for folder in (together / "longer").iterdir():
        found = lines(folder_of(folder) / "metrics.jsonl")
        assert len(found) == 3 and all(line["skipped_updates"] == 0 for line in found)
        assert all(line["grad_norm/policy"] > 0 for line in found)
        facts = json.loads((folder_of(folder) / "meta.json").read_text())
        assert facts["n_processes"] == 2
