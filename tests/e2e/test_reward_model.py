"""From preferences to a policy: SFT, reward model, then PPO or GRPO against it."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import REPOSITORY
from tests.e2e.small import SMALL, folder_of, run_small
from tests.e2e.test_resume import equal, lines
from zoo.compose import compose
from zoo.config import ConfigError
from zoo.instantiate import structured
from zoo.train.run import run

# Any label will do for wiring, so coins make the pairs.
REWARD_MODEL = ["algorithm=reward_model", "evaluate.heldout_pairs=0.2"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def killed(moment: str, output: Path, overrides: list[str]) -> None:
    command = [sys.executable, "-m", "tests.e2e.killed", moment, *SMALL, f"output={output}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [*command, *overrides], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


def last_checkpoint(run: Path) -> Path:
    return sorted((run / "checkpoints").glob("step_*"))[-1]


def assert_same(first: Path, second: Path, made: str) -> None:
    one, other = last_checkpoint(first), last_checkpoint(second)
    assert one.name == other.name
    for path in one.glob("*.pt"):
        assert equal(torch.load(path), torch.load(other / path.name)), path.name
    for name in ("metrics.jsonl", "evals.jsonl"):
        assert lines(first / name) == lines(second / name), name
    weights = f"{made}/model.safetensors"
    assert (first / weights).read_bytes() == (second / weights).read_bytes()


def test_sft_then_reward_model_then_ppo_and_grpo(tmp_path: Path) -> None:
    quick = ["train.checkpoint_every=0", "evaluate.every=0", "train.steps=2"]
    run_small(tmp_path / "sft", "algorithm=sft", *quick)
    start = folder_of(tmp_path / "sft") / "policy"
    small = [item for item in SMALL if not item.startswith("model")]
    small += ["model=hub", f"model.path={start}", *quick]

    def go(name: str, *overrides: str) -> dict[str, Any]:
        return run(structured(compose([*small, f"output={tmp_path / name}", *overrides])))

    summary = go("rm", *REWARD_MODEL)
    scorer = folder_of(tmp_path / "rm") / "reward_model"
    assert summary["final"]["heldout_pairs"]["kind"] == "preferences"
    assert not (folder_of(tmp_path / "rm") / "policy").exists()
    assert set(json.loads((scorer.parent / "memory.json").read_text())["components"]) == {
        "reward_model"
    }
    before = (scorer / "model.safetensors").read_bytes()
    for name in ("ppo", "grpo"):
        go(name, f"algorithm={name}", "reward=learned", f"reward.path={scorer}")
        folder = folder_of(tmp_path / name)
        metrics = lines(folder / "metrics.jsonl")
        assert all(line["reward/learned"] == line["reward/total"] for line in metrics)
        assert all(line["grad_norm/policy"] > 0 and line["reward/std"] > 0 for line in metrics)
        assert json.loads((folder / "memory.json").read_text())["components"]["scorer"]
        # The run's own scores are the saved model's, asked once more from the written texts.
        assert_scores_again(scorer, folder / "rollouts.jsonl")
    assert (scorer / "model.safetensors").read_bytes() == before
    # Two operations a weight and token, at least for what was generated; the first steps are alike.
    go("coins", "algorithm=grpo", "reward=random")
    scored, coins = (lines(folder_of(tmp_path / n) / "metrics.jsonl")[0] for n in ("grpo", "coins"))
    assert scored["tokens/generated"] == coins["tokens/generated"]
    weights = load_file(scorer / "model.safetensors")
    size = sum(w.numel() for name, w in weights.items() if "embed" not in name)
    assert scored["flops"] - coins["flops"] > 2 * size * scored["tokens/generated"]


def assert_scores_again(scorer: Path, rollouts: Path) -> None:
    from zoo.rewards.learned import Learned
    from zoo.types import Completion, Prompt

    rows = [json.loads(line) for line in rollouts.read_text(encoding="utf-8").splitlines()]
    prompts = [
        Prompt(row["prompt_id"], messages=({"role": "user", "content": row["prompt"]},))
        for row in rows
    ]
    completions = [Completion(row["text"], (), (), row["truncated"]) for row in rows]
    again = Learned(path=str(scorer))(prompts, completions).total
    assert again == pytest.approx([row["reward"] for row in rows], abs=1e-5)


def test_learns_pairs_and_prefers_rightly_what_it_has_not_seen(tmp_path: Path) -> None:
    # The better reply says so: what separates the held-out pairs can be learnt from the others.
    file = tmp_path / "pairs.jsonl"
    words = ["red", "blue", "old", "new", "big", "small"]
    rows = [
        {"prompt": f"{a} {b}?", "chosen": f"yes {a}", "rejected": f"no {b}"}
        for a, b in itertools.permutations(words, 2)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    summary = run_prefs(tmp_path, file, "pairs", steps=30)
    first, final = (summary[k]["heldout_pairs"] for k in ("first", "final"))
    assert first["n_pairs"] == final["n_pairs"] == 3  # ⌈0.1 · 30⌉
    assert final["accuracy"] == 1.0 and final["margin"] > 1.0 > first["margin"]
    records = lines(folder_of(tmp_path / "out") / "evals.jsonl")
    assert records[-1]["outcomes"] == [[1], [1], [1]]
    config = json.loads((folder_of(tmp_path / "out") / "reward_model/config.json").read_text())
    assert config["zoo_score_mean"] == pytest.approx(final["score_mean"], abs=1e-6)
    assert config["zoo_score_std"] == pytest.approx(final["score_std"], abs=1e-6)


def test_a_spread_of_earlier_weights_is_not_saved_with_later_ones(tmp_path: Path) -> None:
    settings = [*REWARD_MODEL, "evaluate.every=3", "evaluate.last=false", "train.steps=4"]
    run_small(tmp_path, *settings)
    folder = folder_of(tmp_path)
    spread = {"zoo_score_mean", "zoo_score_std"}
    best, last = (
        json.loads((folder / name / "config.json").read_text()) for name in ("best", "reward_model")
    )
    assert spread <= best.keys() and not spread & last.keys()  # of step 0 or 3; of step 4


def test_rankings_of_unequal_length_show_the_rows_that_there_are(tmp_path: Path) -> None:
    file = tmp_path / "rankings.jsonl"
    rows = [
        {"prompt": f"{i}?", "completions": [f"{i} {word}" for word in "abcdefg"[: 2 + i % 6]]}
        for i in range(30)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run_prefs(tmp_path, file, "rankings")
    for step in (1, 2):
        shown = [
            row
            for row in lines(folder_of(tmp_path / "out") / "rollouts.jsonl")
            if row["step"] == step
        ]
        assert len({(row["prompt"], row["text"]) for row in shown}) == len(shown) > 1
        assert all(row["text"].startswith(row["prompt"].rstrip("?") + " ") for row in shown)


def run_prefs(
    tmp_path: Path, file: Path, kind: str, *columns: str, steps: int = 2
) -> dict[str, Any]:
    overrides = [
        *[item for item in SMALL if item.startswith(("model", "measure"))],
        "model.architecture.max_position_embeddings=4096",
        "algorithm=reward_model", "data=jsonl", f"data.path={file}", f"data.kind={kind}",
        "reward=null", "train.groups=4", f"train.steps={steps}", "train.checkpoint_every=0",
        f"output={tmp_path / 'out'}",
        *(f"+data.columns.{column}" for column in columns),
    ]  # fmt: skip
    return run(structured(compose(overrides)))


def some(source: Path, target: Path, count: int, longest: int = 3000) -> Path:
    """The first rows that are not too long for a test."""
    if source.name.endswith(".json"):
        rows = json.loads(source.read_text(encoding="utf-8"))
        kept = [row for row in rows if len(json.dumps(row)) < longest][:count]
        target = target.with_suffix(".json")
        target.write_text(json.dumps(kept), encoding="utf-8")
        return target
    opened: Any = gzip.open if source.suffix == ".gz" else open
    with opened(source, "rt", encoding="utf-8") as file:
        kept = list(itertools.islice((line for line in file if len(line) < longest), count))
    target.write_text("".join(kept), encoding="utf-8")
    return target


REAL = {
    "hh_harmless_base_test.jsonl.gz": ("pairs", []),
    "llmbar.jsonl": (
        "pairs",
        ["prompt=input", "chosen=output_1", "rejected=output_2", "preferred=label"],
    ),
    "llamafactory_dpo_en_demo.json": ("pairs", ["prompt=conversations"]),
    "alpaca_eval_ranked_k8.jsonl": (
        "rankings",
        ["prompt=instruction", "completions=responses", "scores=preference"],
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_real_preferences_train_a_reward_model(name: str, shared: Path, tmp_path: Path) -> None:
    kind, columns = REAL[name]
    longest = 6000 if kind == "rankings" else 3000
    file = some(shared / "data/preferences" / name, tmp_path / "some.jsonl", 12, longest)
    summary = run_prefs(tmp_path, file, kind, *columns)
    judged = summary["final"]["heldout_pairs"]
    assert judged["n_problems"] == 2 and 0 <= judged["accuracy"] <= 1  # ⌈0.1 · 12⌉
    assert (judged["n_pairs"] > 2) == (kind == "rankings")


def test_algorithm_that_reads_pairs_and_data_without_any_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "examples.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(ConfigError, match="algorithm=reward_model reads pairs, but data JSONL"):
        run_prefs(tmp_path, file, "examples")


def test_stop_at_an_answers_accuracy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="algorithm=reward_model trains none"):
        stop = ["train.stop_at.metric=heldout/greedy", "train.stop_at.value=0.5"]
        run_small(tmp_path, *REWARD_MODEL, *stop)


def test_B96_reward_model_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    run_small(tmp_path / "whole", *REWARD_MODEL)
    killed("zoo.train.loop:_update:5", tmp_path / "killed", REWARD_MODEL)
    folder = folder_of(tmp_path / "killed")
    assert not (folder / "summary.json").exists()
    run_small(tmp_path / "killed", *REWARD_MODEL)
    assert_same(folder_of(tmp_path / "whole"), folder, "reward_model")


STEERED = [
    "algorithm=ppo",
    "algorithm.kl_target=0.5",
    "algorithm.kl_horizon=2",
    "algorithm.epochs=2",
    "train.lr=1e-2",
]


def test_kill_among_steps_that_end_early_changes_nothing(tmp_path: Path) -> None:
    options = ["algorithm=ppo", "algorithm.epochs=3", "algorithm.kl_stop=3e-4", "train.lr=1e-3"]
    run_small(tmp_path / "whole", *options)
    early = [
        line.get("stopped_early") for line in lines(folder_of(tmp_path / "whole") / "metrics.jsonl")
    ]
    assert early[:2] == [1.0, 1.0] and None in early  # of 2, 2 and then 3 updates
    killed("zoo.train.loop:_update:8", tmp_path / "killed", options)
    run_small(tmp_path / "killed", *options)
    assert_same(folder_of(tmp_path / "whole"), folder_of(tmp_path / "killed"), "policy")


def test_B96_steered_price_is_restored_with_the_rest(tmp_path: Path) -> None:
    run_small(tmp_path / "whole", *STEERED)
    killed("zoo.train.loop:_update:9", tmp_path / "killed", STEERED)  # in step 5
    folder = folder_of(tmp_path / "killed")
    (saved,) = [
        json.loads((last_checkpoint(folder) / "manifest.json").read_text())["state"]["algorithm"]
    ]
    run_small(tmp_path / "killed", *STEERED)
    assert_same(folder_of(tmp_path / "whole"), folder, "policy")
    coefs = [line["state/kl_coef"] for line in lines(folder / "metrics.jsonl")]
    assert saved == {"kl_coef": coefs[3]} and len(set(coefs)) > 1
    # The controller by hand, from what the file says of each step.
    price = 0.05
    for line in lines(folder / "metrics.jsonl"):
        error = min(max((line["kl_ref_sequence"] - 0.5) / 0.5, -0.2), 0.2)
        price *= 1 + error / 2
        assert line["state/kl_coef"] == pytest.approx(price, rel=1e-9)


def test_step_ends_early_where_the_policy_drifted_from_the_sampler(tmp_path: Path) -> None:
    # The first update of a step sees no drift, the second does, and is the last of four.
    overrides = ["algorithm=ppo", "algorithm.epochs=4", "train.steps=3", "train.lr=1e-2"]
    summary = run_small(tmp_path / "stopped", *overrides, "algorithm.kl_stop=1e-9")
    assert summary["updates"] == 3 * 2
    metrics = lines(folder_of(tmp_path / "stopped") / "metrics.jsonl")
    assert [line["stopped_early"] for line in metrics] == [1.0] * 3
    noted = lines(folder_of(tmp_path / "stopped") / "warnings.jsonl")
    assert "kl_stop" in [line["kind"] for line in noted]  # of the schedule, which is linear
    rows = lines(folder_of(tmp_path / "stopped") / "rollouts.jsonl")
    assert {row["step"]: row["policy_version"] for row in rows} == {1: 0, 2: 2, 3: 4}
    summary = run_small(tmp_path / "whole", *overrides, "algorithm.kl_stop=1e9")
    assert summary["updates"] == 3 * 4
    assert "stopped_early" not in lines(folder_of(tmp_path / "whole") / "metrics.jsonl")[-1]


def test_another_reward_model_in_the_folder_of_the_first_is_refused_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.e2e.test_interrupt import signal_at
    from zoo.config import ConfigError
    from zoo.train.inputs import RECORD
    from zoo.train.session import TrainingError

    quick = ["evaluate.first=false", "evaluate.last=false", "evaluate.every=0", "train.steps=3"]
    for seed in (0, 1):
        run_small(tmp_path / f"rm{seed}", *REWARD_MODEL, f"seed={seed}", *quick)
    first, other = (folder_of(tmp_path / f"rm{seed}") / "reward_model" for seed in (0, 1))
    place = tmp_path / "scorer"
    shutil.copytree(first, place)
    part = f"{{weight: 2.0, _target_: zoo.rewards.learned.Learned, path: {place}}}"
    for name, reward in {
        "plain": ["reward=learned", f"reward.path={place}"],
        "weighted": ["reward=gsm8k_shaped", "~reward.components", f"+reward.components.a={part}"],
    }.items():
        options = ["algorithm=grpo", *reward, *quick]
        with monkeypatch.context() as patch:
            signal_at(patch, "zoo.measure.recorder:Recorder.step:1", signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                run_small(tmp_path / name, *options)
        shutil.rmtree(place)
        shutil.copytree(other, place)  # the same size, the same architecture
        with pytest.raises(ConfigError, match=r"path: model\.safetensors changed since it began"):
            run_small(tmp_path / name, *options)
        (folder_of(tmp_path / name) / RECORD).unlink()
        with pytest.raises(TrainingError, match=r"on another reward .* model at reward.path chang"):
            run_small(tmp_path / name, *options)
        shutil.rmtree(place)
        shutil.copytree(first, place)
        assert run_small(tmp_path / name, *options)["status"] == "finished"


def test_pairs_of_another_reward_model_are_not_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    quick = ["evaluate.first=false", "evaluate.last=false", "evaluate.every=0", "train.steps=2"]
    place = tmp_path / "scorer"
    for seed in (0, 1):
        run_small(tmp_path / f"rm{seed}", *REWARD_MODEL, f"seed={seed}", *quick)
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder_of(tmp_path / f"rm{seed}") / "reward_model", place)
        before = len(list((tmp_path / "cache/pairs").glob("*.jsonl")))
        options = ["algorithm=dpo", "reward=learned", f"reward.path={place}", *quick]
        run_small(tmp_path / f"dpo{seed}", *options)
        assert len(list((tmp_path / "cache/pairs").glob("*.jsonl"))) == before + 1
