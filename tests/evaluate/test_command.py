"""`zoo evaluate` says on which data it judges, and what it was given where that has no policy."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from tests.conftest import REPOSITORY
from tests.e2e.small import SMALL, folder_of, run_small
from tests.e2e.start import started_from
from zoo.cli import main
from zoo.compose import option_of
from zoo.evaluate.cli import print_scores

QUICK = ["evaluate.samples=1", "evaluate.pass_k=[1]", "rollout.max_new_tokens=4"]
FEW = ["data.n_heldout=4", "data.n_independent=4", "data.n_texts=4"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a file of the user's own."""
    folder = tmp_path_factory.mktemp("run")
    rows = [{"prompt": f"What is {n}?", "answer": str(n)} for n in range(40)]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = [one for one in SMALL if not one.startswith("data.")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.e2e.small.SMALL", small)
        run_small(folder, "data=jsonl", f"data.path={folder}/mine.jsonl", "data.style=gsm8k")
    return folder_of(folder)


def test_other_data_than_the_run_was_trained_on_is_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run.parents[2] / "mine.jsonl"
    option = tmp_path / "data" / "own.yaml"
    option.parent.mkdir()
    option.write_text(f"_target_: zoo.data.jsonl.JSONL\npath: {file}\nheldout: 0.2\n")
    own = ["data=own", *QUICK]
    for command, name, told in (
        (["evaluate", f"model={run}", *FEW, *QUICK], "arithmetic", True),
        (["evaluate", f"model={run}/policy", *FEW, *QUICK], "arithmetic", True),
        (["evaluate", f"model={run}", "data=arithmetic", *FEW, *QUICK], "arithmetic", False),
        (["evaluate", f"model={run}", *own, "--config-dir", str(tmp_path)], "own", False),
        (["--config-dir", str(tmp_path), "evaluate", f"model={run}", *own], "own", False),
    ):
        assert main(command) == 0
        out = capsys.readouterr().out
        assert f"on data={name}\n" in out, command
        line = f"trained on data=jsonl data.path={file} data.style=gsm8k; add that to judge on it"
        assert (line in out) is told, command


def test_settings_of_the_run_that_the_command_leaves_out_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_small(tmp_path, "train.steps=1", "train.checkpoint_every=1")
    same = [one for one in SMALL if one.startswith("data.")]
    for given, told in ((same, False), (same[:-1], True)):
        assert main(["evaluate", f"model={folder_of(tmp_path)}", *given, *QUICK]) == 0
        assert ("trained on data=arithmetic" in capsys.readouterr().out) is told


@pytest.mark.parametrize("place", ["policy", "best"])
@pytest.mark.parametrize("kind", ["altered", "gone", "config"])
def test_weights_that_are_not_those_that_were_saved_are_refused(
    kind: str, place: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, few = tmp_path / place, ["data=arithmetic", *FEW, *QUICK]
    shutil.copytree(run / place, folder)
    record = folder / {"policy": "sha256.json", "best": "best.json"}[place]
    known = json.loads(record.read_text())["sha256"]
    saved = (folder / "model.safetensors").read_bytes()
    assert known.keys() == {"model.safetensors", "config.json", "tokenizer.json"}
    assert known["model.safetensors"] == hashlib.sha256(saved).hexdigest()
    assert main(["evaluate", f"model={folder}", *few]) == 0
    if kind == "gone":
        save_file(load_file(folder / "model.safetensors"), folder / "other.safetensors")
        (folder / "model.safetensors").unlink()
    elif kind == "config":  # every answer is another one, and no shape
        facts = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(facts | {"rms_norm_eps": 0.1}))
    else:  # the lowest bit of one weight, which is as finite as it was
        spoilt = bytearray(saved)
        spoilt[-4] ^= 1
        (folder / "model.safetensors").write_bytes(spoilt)
    capsys.readouterr()
    for command in (["evaluate", f"model={folder}"], [*SMALL, *started_from(folder)]):
        words = few if command[0] == "evaluate" else [f"output={tmp_path / 'out'}", "train.steps=1"]
        assert main([*command, *words]) == 2
        told = " ".join(capsys.readouterr().err.split())
        what = "is gone" if kind == "gone" else "is not the file that was saved"
        file = "config.json" if kind == "config" else "model.safetensors"
        assert f"{file} {what}" in told and f"delete {record}" in told
    if kind != "gone":
        record.unlink()
        assert main(["evaluate", f"model={folder}", *few]) == 0


@pytest.mark.parametrize("setting", ["model.path", "model.tokenizer"])
def test_a_tokenizer_that_is_not_the_one_that_was_saved_is_refused(
    setting: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(run / "policy", folder)
    given = [*SMALL, f"output={tmp_path / 'out'}", "train.steps=0"]
    start = run / "policy" if setting == "model.tokenizer" else folder
    given += started_from(start)
    given += [f"model.tokenizer='{folder}'"] if setting == "model.tokenizer" else []
    # Its settings and templates are there to be edited.
    (folder / "tokenizer_config.json").write_text(
        json.dumps(json.loads((folder / "tokenizer_config.json").read_text()) | {"note": 1})
    )
    assert main(given) == 0
    file = folder / "tokenizer.json"
    facts = json.loads(file.read_text())
    vocabulary = facts["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    file.write_text(json.dumps(facts))
    capsys.readouterr()
    assert main([*given, "seed=1"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    what = f"{setting}={folder}: tokenizer.json is not the file that was saved"
    assert what in told and f"delete {folder / 'sha256.json'}" in told
    (folder / "sha256.json").unlink()
    assert main([*given, "seed=1"]) == 0


def test_a_run_that_trained_a_reward_model_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reward_model").mkdir()
    assert main(["evaluate", f"model={tmp_path}"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "trained a reward model" in told and f"reward.path={tmp_path}/reward_model" in told


def test_what_cannot_be_judged_is_told_whatever_algorithm_and_reward_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [one for one in SMALL if one.startswith("model")]
    for kind, row, more, told in (
        (
            "prompts",
            {"tests": "t"},
            [],
            "has no verifier of its own, so there is no right or wrong",
        ),
        ("prompts", {"answer": "1"}, ["data.heldout=0"], "holds out no prompts."),
        ("prompts", {"answer": "1"}, ["data.heldout=0.5", "evaluate.problems=1"], ""),
        ("pairs", {"chosen": "a", "rejected": "b"}, [], "offers pairs and no prompts whose"),
    ):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps({"prompt": f"{i}?", **row}) + "\n" for i in range(40)))
        words = [*small, "data=jsonl", f"data.path={file}", f"data.kind={kind}", *QUICK, *more]
        assert main(["evaluate", *words]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "guard" in out and ("no problem can be judged" in out) == bool(told)
        assert f"data JSONL {told}" in out if told else "heldout" in out
        assert "grpo" not in out and "reward" not in out
    with monkeypatch.context() as patch:  # nothing at all
        patch.setattr("zoo.data.jsonl.JSONL.evaluation_sets", lambda self: [])
        assert main(["evaluate", *words]) == 2
    assert "Nor has it texts to measure." in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("right", "low", "high"),
    # n = 4, z² = 3.8415: at 0 right the bounds are 0 and z²/(n + z²) = 0.490; at 4 the mirror image
    [(0, "0.0%", "49.0%"), (1, "51.0%", "100.0%")],
)
def test_all_or_none_right_at_T_1_leaves_doubt(
    right: int,
    low: str,
    high: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    outcomes = {"outcomes": [[right] * 2] * 4, "greedy_outcomes": [right] * 4}
    rest = {"pass@k": {}, "length": None, "truncated": None, "problem_ids": list("abcd")}
    scores = {"accuracy": float(right), "greedy": float(right), "n_problems": 4}
    print_scores([{"set": "heldout", "kind": "accuracy", **outcomes, **rest, **scores}])
    out = " ".join(capsys.readouterr().out.split())
    assert out.count(f"{right:.1%} [{low}, {high}]") == 2


def test_the_nearest_option_is_named() -> None:
    assert option_of("data", {"_target_": "mine.Data", "a": 1}) == (None, {})
    for name in ("gsm8k_shaped", "verifier_overlong"):  # of one class
        values = yaml.safe_load((REPOSITORY / "conf" / "reward" / f"{name}.yaml").read_text())
        assert option_of("reward", values) == (name, {})
    values["components"]["overlong"]["cache"] = 5
    assert option_of("reward", values) == (name, {"components.overlong.cache": 5})
