"""Data, models and code that change behind an unchanged configuration are told, not mixed."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.small import SMALL, folder_of, run_small
from tests.e2e.test_interrupt import signal_at
from zoo.cli import check_job, main
from zoo.compose import compose
from zoo.config import ConfigError, RunConfig
from zoo.instantiate import structured
from zoo.train.inputs import BLOCK, RECORD, WHOLE, _file_hash, altered, come_and_gone, record
from zoo.train.run import run as train


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(data: Path, output: Path) -> list[str]:
    """A small run on a file: without what only the default data has."""
    return [
        *(one for one in SMALL if not one.startswith("data.")),
        f"output={output}",
        "algorithm=grpo",
        "data=jsonl",
        f"data.path={data}",
        "data.chat=false",
        "train.steps=3",
        "evaluate.every=0",
    ]


def run(output: Path, data: Path) -> dict[str, Any]:
    return train(structured(compose(words(data, output))))


def change(data: Path) -> None:
    data.write_text(data.read_text().replace("11 + 1", "11 + 2"))


def test_a_finished_run_of_data_that_changed_is_not_passed_off(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = data.read_text()
    first = run(tmp_path / "out", data)
    os.utime(data, (1, 1))  # a copy of the same content is the same data
    assert run(tmp_path / "out", data) == first
    assert "finished already" in capsys.readouterr().out
    change(data)
    with pytest.raises(
        ConfigError, match=r"of what data\.path was before it changed \(hash \w{8} "
    ):
        run(tmp_path / "out", data)
    data.write_text(before)
    assert run(tmp_path / "out", data) == first


def test_a_stopped_run_of_data_that_changed_does_not_go_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole", data)
    with monkeypatch.context() as patch:
        signal_at(patch, "zoo.measure.recorder:Recorder.step:2", signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match="Step 2 of 3"):
            run(tmp_path / "out", data)
    before = data.read_text()
    change(data)
    with pytest.raises(ConfigError, match=r"stopped at step 2, and data\.path changed since"):
        run(tmp_path / "out", data)
    data.write_text(before)
    resumed = run(tmp_path / "out", data)
    assert resumed["policy_hash"] == whole["policy_hash"]


def folder_of_rows(data: Path) -> Path:
    """The rows in a folder, as a data set saved in shards."""
    folder = data.parent / "shards"
    folder.mkdir()
    half = data.read_text().splitlines(keepends=True)
    (folder / "one.jsonl").write_text("".join(half[:30]))
    (folder / "two.jsonl").write_text("".join(half[30:]))
    return folder


def test_files_added_to_the_folder_of_a_finished_run_or_taken_away_are_told(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of_rows(data)
    given = [one for one in words(data, tmp_path / "out") if not one.startswith("data")]
    given += ["data=hub", f"data.name={folder}", "data.chat=false"]
    assert main(given) == 0
    assert main(given) == 0
    assert "since this run began" not in capsys.readouterr().out
    (folder / "three.jsonl").write_text((folder / "one.jsonl").read_text())
    (folder / "notes.md").write_text("no rows")
    (folder / "two.jsonl").unlink()
    assert main(given) == 0
    told = " ".join(capsys.readouterr().out.split())
    changes = "data.name: three.jsonl was added; data.name: two.jsonl is gone"
    assert f"warning: since this run began, {changes}. Its results" in told
    assert told.index("since this run began") < told.index("finished already: ")


def in_folder(folder: Path, more: dict[str, Any] | None = None) -> RunConfig:
    """A configuration whose data are a folder's; nothing is built."""
    config = structured(compose(["algorithm=grpo", f"output={folder.parent / 'out'}"]))
    node = {"_target_": "zoo.data.hub.Hub", "name": str(folder)}
    return replace(config, data=more or node)


def recorded(run_dir: Path, config: RunConfig) -> None:
    run_dir.mkdir(exist_ok=True)
    (run_dir / RECORD).write_text(json.dumps(record(config)))


def test_a_sweep_tells_once_of_files_that_came_to_its_finished_jobs(
    data: Path, tmp_path: Path
) -> None:
    folder = folder_of_rows(data)
    given = [one for one in words(data, tmp_path / "out") if not one.startswith("data")]
    given += ["data=hub", f"data.name={folder}", "data.chat=false", "train.steps=1"]
    train(structured(compose(given)))
    (folder / "three.jsonl").write_text("")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):  # as for the seeds of one arm
            assert check_job(given) == folder_of(tmp_path / "out").resolve()
    told = [str(one.message) for one in caught if "three.jsonl was added. Its" in str(one.message)]
    assert len(told) == 1


def test_what_a_run_never_reads_comes_and_goes_unnoticed(tmp_path: Path) -> None:
    folder, run_dir = tmp_path / "rows", tmp_path / "run"
    (folder / "inner").mkdir(parents=True)
    for name in ("one.jsonl", "inner/two.jsonl", "README.md"):
        (folder / name).write_text(name)
    config = in_folder(folder)
    recorded(run_dir, config)
    for name in ("meta.json", "config.yaml", "metrics.jsonl"):  # a run, a report, notes
        (folder / "grpo").mkdir(exist_ok=True)
        (folder / "grpo" / name).write_text("{}")
    for name in ("record.json", "table.csv", "page.json"):
        (folder / "report").mkdir(exist_ok=True)
        (folder / "report" / name).write_text("{}")
    (folder / "README.md").unlink()
    for name in ("train.log", "look.ipynb", ".DS_Store"):
        (folder / name).write_text("")
    assert come_and_gone(run_dir, config) == ""
    (folder / "inner" / "two.jsonl").unlink()
    assert come_and_gone(run_dir, config) == "data.name: inner/two.jsonl is gone"


def test_an_older_record_of_the_files_in_the_folder_itself_tells_of_those_alone(
    tmp_path: Path,
) -> None:
    folder, run_dir = tmp_path / "rows", tmp_path / "run"
    (folder / "inner").mkdir(parents=True)
    for name in ("one.jsonl", "inner/two.jsonl"):
        (folder / name).write_text(name)
    config = in_folder(folder)
    run_dir.mkdir()
    assert come_and_gone(run_dir, config) == ""  # a run from before there were records
    known = {what: hashed for what, hashed in record(config)["files"].items() if "/" not in what}
    (run_dir / RECORD).write_text(json.dumps({"files": known, "code": {}}))
    assert come_and_gone(run_dir, config) == ""
    (folder / "three.jsonl").write_text("")
    assert come_and_gone(run_dir, config) == "data.name: three.jsonl was added"


def test_of_a_folder_that_is_too_large_to_be_recorded_whole_nothing_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.train.inputs.MOST_FILES", 3)
    folder, run_dir = tmp_path / "rows", tmp_path / "run"
    folder.mkdir()
    for name in "abcd":
        (folder / name).write_text(name)
    config = in_folder(folder)
    recorded(run_dir, config)
    (folder / "a").unlink()  # so that d is among the first three
    assert come_and_gone(run_dir, config) == "data.name: a is gone"


def test_files_of_an_adapters_base_come_and_go_too(tmp_path: Path) -> None:
    base, adapter, run_dir = (tmp_path / name for name in ("base", "adapter", "run"))
    for folder in (base, adapter):
        folder.mkdir()
    (base / "n.bin").write_text("n")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    config = in_folder(tmp_path / "rows")
    config = replace(config, model=replace(config.model, path=str(adapter)))
    recorded(run_dir, config)
    (base / "n.bin").unlink()
    (base / "o.bin").write_text("o")
    named = f"model.path → its base {base}"
    assert come_and_gone(run_dir, config) == f"{named}: o.bin was added; {named}: n.bin is gone"


def test_of_the_working_directory_files_of_another_kind_are_not_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run_dir = tmp_path / "rows", tmp_path / "run"
    (folder / "inner").mkdir(parents=True)
    for name in ("one.jsonl", "inner/two.jsonl"):  # of the working directory the first alone counts
        (folder / name).write_text("")
    config = in_folder(folder)
    recorded(run_dir, config)
    (folder / "slurm-7.out").write_text("")
    (folder / "two.jsonl").write_text("")
    came = "data.name: slurm-7.out was added; data.name: two.jsonl was added"
    assert come_and_gone(run_dir, config) == came
    monkeypatch.chdir(folder)
    assert come_and_gone(run_dir, config) == "data.name: two.jsonl was added"


def test_files_that_settings_name_themselves_are_told_where_they_are_gone(tmp_path: Path) -> None:
    run_dir, names = tmp_path / "run", [tmp_path / f"{name}.jsonl" for name in "abcde"]
    for path in names:
        path.write_text("")
    node = {"_target_": "zoo.data.jsonl.Jsonl", "path": str(names[0])}
    node["more_paths"] = [str(path) for path in names[1:]]
    config = in_folder(tmp_path, node)
    recorded(run_dir, config)
    assert come_and_gone(run_dir, config) == ""
    for path in names:
        path.unlink()
    told = [f"data.more_paths.{index} is gone" for index in range(3)]
    assert come_and_gone(run_dir, config) == f"{'; '.join(told)}; and 2 more"


def test_a_stopped_run_whose_folder_has_more_rows_is_told_one_way_out(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = folder_of_rows(data)
    given = [one for one in words(data, tmp_path / "out") if not one.startswith("data")]
    given += ["data=hub", f"data.name={folder}", "data.chat=false"]
    with monkeypatch.context() as patch:
        signal_at(patch, "zoo.measure.recorder:Recorder.step:2", signal.SIGINT)
        assert main(given) == 130
    more = data.read_text().replace("+ 1 =", "+ 0 =")  # some are held out
    (folder / "three.jsonl").write_text(more)
    capsys.readouterr()
    assert main(given) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "was trained on other rows" in told and "resume=never" in told
    assert "same command" not in told


def test_before_the_first_checkpoint_nothing_is_old(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("zoo.train.loop._update", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "out", data)
    change(data)
    run(tmp_path / "out", data)
    run(tmp_path / "out", data)  # finished, of what the file is now


REWARD = "def mine(completions):\n    return [float(len(text) % {}) for text in completions]\n"
STRANGER = ["algorithm=grpo", "reward=function", "reward.fn=reward_of_a_stranger.mine"]


def write_reward(folder: Path, sides: int) -> None:
    (folder / "reward_of_a_stranger.py").write_text(REWARD.format(sides))
    importlib.invalidate_caches()
    sys.modules.pop("reward_of_a_stranger", None)
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)


def warned(folder: Path, kind: str) -> list[str]:
    told = map(json.loads, (folder / "warnings.jsonl").read_text().splitlines())
    return [one["message"] for one in told if one["kind"] == kind]


def test_a_reward_mended_after_an_error_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    output = tmp_path / "out"
    what = "reward.fn=reward_of_a_stranger.mine"

    def stopped(signal_point: str) -> None:
        with monkeypatch.context() as patch:
            signal_at(patch, signal_point, signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                run_small(output, *STRANGER)

    write_reward(tmp_path, 2)
    stopped("zoo.measure.recorder:Recorder.step:3")
    folder = folder_of(output)
    first = json.loads((folder / RECORD).read_text())["code"][what]
    write_reward(tmp_path, 30)
    with monkeypatch.context() as patch:  # cut off before a step of the new code: nothing is lost
        patch.setattr("zoo.train.loop.train", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_small(output, *STRANGER)
    stopped("zoo.measure.recorder:Recorder.step:2")  # of the new code
    done = run_small(output, *STRANGER)
    (message,) = warned(folder, "code_changed")
    hashes = json.loads((folder / RECORD).read_text())["code"][what]
    assert f"{what} changed since this run began (hashes {hashes})" in message
    begin, latest = hashes.split(", ")
    assert begin == first != latest
    # The same command finds it finished; that of the old code, or of another, does not.
    assert run_small(output, *STRANGER) == done
    assert check_job([*SMALL, f"output={output}", *STRANGER]) == folder.resolve()
    for sides in (2, 7):
        write_reward(tmp_path, sides)
        with pytest.raises(ConfigError, match=rf"of what {what} was before .*hash {latest} → "):
            run_small(output, *STRANGER)


def test_a_new_seed_beside_one_of_other_data_or_code_says_so(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)

    def one(seed: int) -> list[str]:
        job = [*words(data, tmp_path / "out"), *STRANGER, f"seed={seed}", "train.steps=1"]
        train(structured(compose(job)))
        (folder,) = tmp_path.glob(f"out/*/*/seed_{seed}")
        return warned(folder, "other_inputs")

    write_reward(tmp_path, 2)
    assert one(0) == one(1) == []
    (known,) = tmp_path.glob(f"out/*/*/seed_1/{RECORD}")
    known.write_text("{")  # tells nothing, and stops nobody
    for seed, identity, made in ((8, "another", "checkpoints/step_1"), (9, None, "")):
        # of another configuration; failed before its first checkpoint, so that it would start anew
        other = known.parents[1] / f"seed_{seed}"
        (other / made).mkdir(parents=True)
        (other / RECORD).write_text(json.dumps({"files": {"data.path": "0"}, "code": {}}))
        facts = json.loads((known.parent / "meta.json").read_text())
        facts |= {"config_hash": identity or facts["config_hash"]}
        (other / "meta.json").write_text(json.dumps(facts))
    change(data)
    (message,) = one(2)
    assert "made of another data.path in seed_0 (hash " in message
    assert "seed_8" not in message and "seed_9" not in message
    write_reward(tmp_path, 3)
    (message,) = one(3)
    assert message.count(" here)") == 3 and "; and" not in message  # of seed_0 two, of seed_2 one
    write_reward(tmp_path, 4)
    (message,) = one(4)
    assert message.count(" here)") == 3 and "; and 1 more: they are no seeds of one arm" in message


PAIRED = """
from dataclasses import dataclass
from zoo.data.digits import Digits

SIGN = {sign}

def helper(text):
    return SIGN * float(len(text) % 5)

def mine(completions):
    return [helper(text) for text in completions]

@dataclass(frozen=True)
class Data(Digits):
    def verifier(self):
        from zoo.rewards.function import Function
        return Function("judge_of_a_stranger.mine")
"""
FN = "{_target_: zoo.rewards.function.Function, fn: judge_of_a_stranger.mine"
DIGITS = "zoo.data.digits.Digits"
JUDGES = {
    "function": ["data=digits", "reward=function", "reward.fn=judge_of_a_stranger.mine"],
    "weighted": [
        "data=digits",
        "reward=gsm8k_shaped",
        "~reward.components",
        f"+reward.components={{a: {FN}, weight: 1}}}}",
    ],
    "verifier": ["data=digits", "reward=null", "data._target_=judge_of_a_stranger.Data"],
    "mixture": [
        "reward=null",
        "data=mixture",
        "~data.parts",
        f"+data.parts={{a: {{weight: 1, _target_: {DIGITS}, reward: {FN}}}}}}}",
    ],
}


@pytest.mark.parametrize("judge", JUDGES)
def test_pairs_are_sampled_anew_when_the_code_that_judged_them_changes(
    judge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    base = [one for one in SMALL if not one.startswith(("data.", "reward="))]
    job = [*base, "algorithm=dpo", *JUDGES[judge], "train.steps=1"]
    job += ["evaluate.every=0", "evaluate.first=false", "evaluate.last=false"]
    for name, sign in (("a", 1), ("b", -1), ("c", -1)):
        (tmp_path / "judge_of_a_stranger.py").write_text(PAIRED.format(sign=sign))
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        importlib.invalidate_caches()
        sys.modules.pop("judge_of_a_stranger", None)
        before = set(tmp_path.glob("cache/pairs/*.jsonl"))
        train(structured(compose([*job, f"output={tmp_path / name}"])))
        made = set(tmp_path.glob("cache/pairs/*.jsonl")) - before
        assert len(made) == (name != "c")  # equal code, in another run: the same pairs
        for file in made:
            rows = [json.loads(line) for line in file.read_text().splitlines()[1:]]
            moves = (len(row["chosen"]) % 5 - len(row["rejected"]) % 5 for row in rows)
            assert rows and all(sign * move > 0 for move in moves)


def test_a_sweep_does_not_skip_a_run_of_data_that_changed(data: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", data)
    job = words(data, tmp_path / "out")
    assert check_job(job) == folder_of(tmp_path / "out").resolve()
    change(data)
    assert check_job(job) is None  # the job itself then says what is wrong


def test_a_damaged_record_is_refused_by_name(data: Path, tmp_path: Path) -> None:
    first = run(tmp_path / "out", data)
    known = folder_of(tmp_path / "out") / RECORD
    assert list(json.loads(known.read_text())["files"]) == ["data.path"]
    known.write_text(known.read_text()[:-9])
    with pytest.raises(ConfigError, match=r"inputs\.json is damaged \(JSONDecodeError: .* Delete"):
        run(tmp_path / "out", data)
    known.unlink()
    assert run(tmp_path / "out", data) == first


def test_a_folder_is_told_file_by_file(tmp_path: Path) -> None:
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    for name in ("train.jsonl", "test.jsonl", "README.md", ".hidden"):
        (folder / name).write_text(name)
    config = structured(compose(["algorithm=grpo", "data=gsm8k", f"data.path={folder}"]))
    known = record(config)
    assert list(known["files"]) == [f"data.path: {name}.jsonl" for name in ("test", "train")]
    (tmp_path / RECORD).write_text(json.dumps(known))
    (folder / "README.md").write_text("a note")
    (folder / "more.jsonl").write_text("added")
    (folder / "test.jsonl").unlink()
    assert altered(tmp_path, config) == {"files": {}, "code": {}}
    (folder / "train.jsonl").write_text("other")
    assert list(altered(tmp_path, config)["files"]) == ["data.path: train.jsonl"]


def test_a_folder_is_told_with_the_folders_in_it_but_for_runs_and_environments(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "corpus"
    kept = ["data/deep/test.jsonl", "data/meta.json", "data/train.jsonl"]
    left = ["runs/seed_0/rollouts.jsonl", "venv/lib/site.txt", ".cache/blob", "data/NOTES.md"]
    left += ["data/__pycache__/loader.pyc", "data/look.ipynb", "report/differences.csv"]
    marks = ["runs/seed_0/meta.json", "runs/seed_0/config.yaml", "venv/pyvenv.cfg"]
    marks += ["report/record.json", "report/table.csv"]
    for name in (*kept, *left, *marks):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "data/round").symlink_to(folder)
    node = ["algorithm=grpo", "data=hub", f"data.name={folder}", "reward=random"]
    config = structured(compose(node))
    known = record(config)
    assert list(known["files"]) == [f"data.name: {name}" for name in kept]
    (tmp_path / RECORD).write_text(json.dumps(known))
    (folder / kept[0]).write_text("other")
    assert list(altered(tmp_path, config)["files"]) == [f"data.name: {kept[0]}"]


@pytest.mark.parametrize("inside", ["", "below", "below/outputs"])
def test_of_a_folder_that_holds_all_the_work_only_its_own_files_are_told(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below/outputs").mkdir(parents=True)
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "below/notes.txt").write_text("written on the way")
    node = ["algorithm=grpo", "data=jsonl", f"data.path={tmp_path}", "data.chat=false"]
    if inside.endswith("outputs"):
        node.append(f"output={tmp_path / inside}")
    else:
        monkeypatch.chdir(tmp_path / inside)
    config = structured(compose(node))
    assert list(record(config)["files"]) == ["data.path: rows.jsonl"]


def test_a_folder_is_told_by_a_plain_word_where_a_setting_asks_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("gi", "ma", "extractive", "words"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test.jsonl").write_text(name)

    def told(*node: str) -> list[str]:
        return list(record(structured(compose(["algorithm=grpo", *node])))["files"])

    node = ["data=math", "data.gsm8k=gi", "data.path=ma", "data.instruction=extractive"]
    assert told(*node) == ["data.path: test.jsonl", "data.gsm8k: test.jsonl"]
    hub = ["data=hub", "data.name=ma", "data.split=gi", "reward=random"]
    assert told(*hub) == ["data.name: test.jsonl"]
    model = ["model=tiny_random", "model.tokenizer=words", "model.critic=ma"]
    assert told(*model) == ["model.tokenizer: test.jsonl", "model.critic: test.jsonl"]


def test_of_a_strangers_settings_count_those_that_name_a_place_and_are_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {
        "folder": "corpus",
        "lists": ["./corpus"],
        "dot": ".",
        "slash": "/",
        "kind": "corpus",
        "judge_cache": "./corpus",
    }
    (tmp_path / "data_of_a_stranger.py").write_text(
        "class Corpus:\n  def __init__(self, **settings): pass\n"
    )
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.jsonl").write_text("text")
    config = replace(
        structured(compose(["algorithm=grpo"])),
        data={"_target_": "data_of_a_stranger.Corpus", **settings},
    )
    found = list(record(config)["files"])
    assert found == ["data.folder: a.jsonl", "data.lists.0: a.jsonl"]


def change_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values())).mul_(-1)
    (folder / "model.safetensors").unlink()  # a run's policy may be read-only
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("key", ["path", "critic"])
def test_a_base_that_changes_below_its_adapter_is_told(
    key: str, stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    from tests.models.tiny import llama
    from zoo.config import LoraConfig, ModelConfig
    from zoo.data.tokenizer import arithmetic_tokenizer
    from zoo.models.loading import load_trained, save_policy

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_policy(llama(vocab_size=512), arithmetic_tokenizer(), base)
    start = ModelConfig(path=str(base), lora=LoraConfig(rank=2, alpha=4.0))
    save_policy(load_trained(start)[0], arithmetic_tokenizer(), adapter)
    small = [one for one in SMALL if not one.startswith("model")]
    lora = ["model=hub", "model.lora.rank=2", "model.lora.alpha=4"]
    shutil.copytree(base, tmp_path / "start")
    names = {"path": str(tmp_path / "start"), key: str(adapter)}
    job = [*small, *lora, *(f"model.{k}={v}" for k, v in names.items())]
    job += ["algorithm=ppo", "train.steps=3", "train.checkpoint_every=1", "evaluate.every=0"]
    config = structured(compose([*job, f"output={tmp_path / 'out'}"]))
    if stopped:
        with monkeypatch.context() as patch:
            signal_at(patch, "zoo.measure.recorder:Recorder.step:2", signal.SIGINT)
            with pytest.raises(KeyboardInterrupt, match="Step 2 of 3"):
                train(config)
    else:
        train(config)
    change_weights(base)
    named = f"model.{key} → its base {base}: model.safetensors"
    with pytest.raises(ConfigError, match=f"{named} (changed since|was before it changed)"):
        train(config)


def test_a_file_that_no_run_reads_keeps_none_from_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        rows = [{"question": f"{name}: {a} + 1?", "answer": f"#### {a + 1}"} for a in range(60)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prepare.py").write_text("1")
    small = [word for word in SMALL if not word.startswith("data.")]
    node = [*small, f"output={tmp_path}/out", "algorithm=grpo", "data=gsm8k", "evaluate.every=0"]
    config = structured(compose([*node, f"data.path={folder}"]))
    with monkeypatch.context() as patch:
        signal_at(patch, "zoo.measure.recorder:Recorder.step:2", signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    for way in ("stopped at step 2", "holds a finished run"):
        (folder / "prepare.py").write_text(way)
        with pytest.raises(ConfigError, match=rf"{way}.* Where the run does not read it, ") as told:
            train(config)
        Path(str(told.value).rpartition("delete ")[2].removesuffix(".")).unlink()
        train(config)


def test_a_large_file_is_told_by_its_length_and_by_blocks(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    with path.open("wb") as out:
        out.truncate(WHOLE + 5 * BLOCK)  # sparse: takes no space
    first = _file_hash(path)
    for place in (0, WHOLE + 5 * BLOCK - 1, (WHOLE + 4 * BLOCK) * 7 // 15 + 9):
        with path.open("r+b") as out:
            out.seek(place)
            out.write(b"x")
        assert _file_hash(path) != first
        with path.open("r+b") as out:
            out.seek(place)
            out.write(b"\0")
        assert _file_hash(path) == first
    with path.open("r+b") as out:
        out.truncate(WHOLE + 5 * BLOCK + 1)
    assert _file_hash(path) != first
