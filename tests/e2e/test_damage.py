"""Damaged, foreign or vanished files, full disks, shared folders: named, and nothing is lost."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from tests.e2e.small import folder_of, run_small
from tests.e2e.test_interrupt import call_at, signal_at
from tests.e2e.test_kill import launched
from tests.e2e.test_resume import RUNS, assert_same, lines
from tests.train.test_checkpoint import put_in_the_way
from zoo.claim import RUN_DIR_FILE, announced, claimed
from zoo.config import ConfigError
from zoo.measure.files import RecordError, remove
from zoo.models.saved import HASHES
from zoo.train.checkpoint import save_checkpoint
from zoo.train.inputs import RECORD

SFT = [*RUNS["sft"], "evaluate.every=0"]
BRIEF = ["train.steps=2", "evaluate.first=false", "evaluate.last=false"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole")
    run_small(output, *SFT)
    return folder_of(output)


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the same run, interrupted after step 5, with checkpoints 4 and 5."""
    import signal

    with monkeypatch.context() as patch:
        signal_at(patch, "zoo.measure.recorder:Recorder.step:5", signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match="Step 5 of 6"):
            run_small(tmp_path / "stopped", *SFT)
    return folder_of(tmp_path / "stopped")


def warnings(folder: Path) -> list[str]:
    lines = (folder / "warnings.jsonl").read_text().splitlines()
    return [w["message"] for w in map(json.loads, lines) if w["kind"] == "checkpoint_refused"]


# the run folder ----------------------------------------------------------------------------------


def shorten_metrics(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:4]))  # what checkpoint 4 needs


def break_manifest(folder: Path) -> None:
    path = folder / "checkpoints/step_000005/manifest.json"
    path.write_text(path.read_text()[:-20])


def alter_a_number(folder: Path) -> None:
    path = folder / "checkpoints/step_000005/policy.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def put_a_foreign_one_in_its_place(folder: Path) -> None:
    path = folder / "checkpoints/step_000005/manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "config_hash": "somebody_else"}))


def alter_the_progress(folder: Path) -> None:
    path = folder / "checkpoints/step_000005/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["state"]["progress"]["updates"] += 1
    path.write_text(json.dumps(manifest))


def flip_a_digit(folder: Path) -> None:
    path = folder / "checkpoints/step_000005/manifest.json"
    path.write_text(path.read_text().replace('"position": ', '"position": 1'))


def empty_the_folder(folder: Path) -> None:
    for path in (folder / "checkpoints/step_000005").iterdir():
        path.unlink()


def put_a_file_in_its_place(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints/step_000005")
    (folder / "checkpoints/step_000005").write_text("")


def cut_the_last_line(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])


def lose_a_file(folder: Path) -> None:
    (folder / "checkpoints/step_000005/optimizer_policy.pt").unlink()


def alter_a_late_byte_of_the_record(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    data = bytearray(path.read_bytes())
    data[-20] ^= 0x80
    path.write_bytes(data)


DAMAGES: dict[Callable[[Path], None], str] = {
    alter_a_late_byte_of_the_record: "metrics.jsonl was altered",
    shorten_metrics: "metrics.jsonl has",
    break_manifest: "manifest cannot be read",
    alter_a_number: "policy.pt was altered",
    put_a_foreign_one_in_its_place: "another configuration",
    alter_the_progress: "manifest was altered",
    flip_a_digit: "manifest was altered",
    empty_the_folder: "manifest cannot be read",
    put_a_file_in_its_place: "manifest cannot be read",
    cut_the_last_line: "metrics.jsonl has",
    lose_a_file: "optimizer_policy.pt is missing",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_used(
    damage: Callable[[Path], None], whole: Path, stopped: Path
) -> None:
    damage(stopped)
    run_small(stopped.parents[2], *SFT)
    (message,) = warnings(stopped)
    assert "step_000005" in message and DAMAGES[damage] in message
    for name in ("policy/model.safetensors",):
        assert (whole / name).read_bytes() == (stopped / name).read_bytes()
    steps = [json.loads(x)["step"] for x in (stopped / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def alter_an_early_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5] ^= 0x80
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"), [(alter_an_early_byte, "was altered"), (Path.unlink, "has 0 bytes")]
)
def test_where_no_checkpoint_is_good_nothing_is_overwritten(
    damage: Callable[[Path], None], said: str, whole: Path, stopped: Path
) -> None:
    damage(stopped / "evals.jsonl")
    before = {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match=rf"(?s)no good one(.*evals\.jsonl {said}){{2}}.*moving"):
        run_small(stopped.parents[2], *SFT)
    assert {path: path.read_bytes() for path in before} == before
    shutil.move(stopped / "checkpoints", stopped.parent)  # the way out that was told
    run_small(stopped.parents[2], *SFT)
    assert [line["step"] for line in lines(stopped / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    weights = "policy/model.safetensors"
    assert (whole / weights).read_bytes() == (stopped / weights).read_bytes()


def test_a_folder_copied_or_renamed_to_another_seed_is_refused(whole: Path, stopped: Path) -> None:
    for path in (whole, stopped):
        other = path.parent / "seed_1"
        shutil.copytree(path, other)
        with pytest.raises(ConfigError, match=r"seed_1 holds a run of seed 0, not of seed 1"):
            run_small(path.parents[2], *SFT, "seed=1")
        shutil.rmtree(other)


@pytest.mark.parametrize("change", [{"status": "running"}, {"config_hash": "x"}, {"seed": 1}, None])
def test_a_summary_of_another_run_is_none_of_this_one(
    change: dict[str, Any] | None, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole.parents[2], tmp_path, dirs_exist_ok=True)
    path = folder_of(tmp_path) / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps({**summary, **change} if change else {}))
    with pytest.raises(ConfigError, match=r"summary.json is not of this run: its .* Delete it"):
        run_small(tmp_path, *SFT)
    path.unlink()
    again = run_small(tmp_path, *SFT)
    assert again["policy_hash"] == summary["policy_hash"]


# Entries of a run's folder that are something else than they should be: what is said, if anything.
IN_THE_WAY = {
    ("checkpoints/step_000006", "link to a folder"): "",
    ("checkpoints/step_000006", "link to nowhere"): "",
    ("policy", "file"): "",
    ("policy", "link to nowhere"): "",
    ("error.txt", "folder"): "",
    ("metrics.jsonl", "folder"): r"(?s)no good one.* metrics.jsonl cannot be read: Is a directory",
    (".lock", "folder"): r"\.lock cannot be locked: .* Delete it",
    (".lock", "link to nowhere"): r"\.lock cannot be locked: .* Delete it",
    ("checkpoints", "file"): r"checkpoints is no folder, .* Delete what is in its place",
    ("checkpoints", "link to nowhere"): r"checkpoints is no folder, .* Delete what is in its place",
}


@pytest.mark.parametrize(("entry", "kind"), IN_THE_WAY)
def test_what_is_in_the_way_in_a_run_folder_is_replaced_or_named(
    entry: str, kind: str, whole: Path, stopped: Path, tmp_path: Path
) -> None:
    others = tmp_path / "others"
    others.mkdir()
    (others / "file").write_text("mine")
    path, said = stopped / entry, IN_THE_WAY[entry, kind]
    remove(path)
    put_in_the_way(path, kind, others)
    if said:
        with pytest.raises((RecordError, ConfigError), match=said):
            run_small(stopped.parents[2], *SFT)
        remove(path)
        if entry == "metrics.jsonl":  # it held what the checkpoints need
            remove(stopped / "checkpoints")
    run_small(stopped.parents[2], *SFT)
    weights = "policy/model.safetensors"
    assert (whole / weights).read_bytes() == (stopped / weights).read_bytes()
    assert (others / "file").read_text() == "mine"


OTHERWISE = {
    "half of it": lambda old: old[: len(old) // 2],
    "other values": lambda old: old[:-1] + bytes([old[-1] ^ 1]),
}


@pytest.mark.parametrize("kind", ["nothing", "file", "folder", "link to nowhere", *OTHERWISE])
def test_a_best_policy_that_is_gone_is_sought_anew(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    with monkeypatch.context() as patch:
        signal_at(patch, "zoo.measure.recorder:Recorder.step:4", signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            run_small(tmp_path, *RUNS["grpo"])
    folder = folder_of(tmp_path)
    assert json.loads((folder / "best.json").read_text())["step"] < 4
    saved = (folder / "best" / "model.safetensors").read_bytes()
    if kind in OTHERWISE:
        (folder / "best" / "model.safetensors").write_bytes(OTHERWISE[kind](saved))
    else:
        shutil.rmtree(folder / "best")
    if kind not in ("nothing", *OTHERWISE):
        put_in_the_way(folder / "best", kind, folder)
    summary = run_small(tmp_path, *RUNS["grpo"])
    assert summary["best"] == json.loads((folder / "best.json").read_text())
    assert summary["best"]["step"] == 6
    weights = "model.safetensors"
    assert (folder / "best" / weights).read_bytes() == (folder / "policy" / weights).read_bytes()
    kinds = [line["kind"] for line in lines(folder / "warnings.jsonl")]
    assert kinds.count("best_gone") == 1


class Ended(BaseException):
    """As a kill: nothing is saved or put away after it."""


# Where a run ends between its checkpoints of steps 3 and 6: after an error, or in the course of
# putting the best of step 4 into the place of step 2's.
ENDS = {
    "after the step": "zoo.measure.recorder:Recorder.step:5",
    "before the old best moves": "pathlib:Path.rename:3",
    "before the new best comes": "pathlib:Path.rename:4",
    "before best.json": "zoo.train.session:write_json:2",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_best_policy_is_of_the_steps_that_a_resumed_run_kept(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward was mended, say, so that step 4 is the best no more; step 2 is."""
    job = [*RUNS["sft"], "evaluate.every=2", "evaluate.first=false", "train.checkpoint_every=3"]

    def score(*values: float) -> None:
        left = iter(values)  # of the evaluations to come
        of_set = lambda r, _: next(left) if r["set"] == "heldout" else None  # noqa: E731
        monkeypatch.setattr("zoo.train.session.score_of", of_set)

    score(0.5, 0.1, 0.2)  # after steps 2, 4, 6
    run_small(tmp_path / "whole", *job)
    score(0.5, 0.9)
    with monkeypatch.context() as patch:
        call_at(patch, ENDS[end], ended)
        with pytest.raises(Ended):
            run_small(tmp_path / "ended", *job)
    score(0.1, 0.2)
    run_small(tmp_path / "ended", *job)
    whole, folder = folder_of(tmp_path / "whole"), folder_of(tmp_path / "ended")
    assert_same(whole, folder)  # no warning is counted
    assert json.loads((folder / "best.json").read_text())["step"] == 2
    for name in ("best.json", "best/best.json", "best/model.safetensors"):
        assert (whole / name).read_bytes() == (folder / name).read_bytes(), name
    assert not [p.name for p in folder.glob(".*best*")]


def ended() -> None:
    raise Ended


def test_a_best_policy_of_a_run_that_starts_anew_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        call_at(patch, "zoo.measure.recorder:Recorder.step:2", ended)
        with pytest.raises(Ended):
            run_small(tmp_path, *RUNS["sft"])
    folder = folder_of(tmp_path)
    assert json.loads((folder / "best.json").read_text())["step"] == 0
    monkeypatch.setattr("zoo.train.session.score_of", lambda record, name: None)
    assert run_small(tmp_path, *RUNS["sft"])["best"] is None
    assert not (folder / "best").exists() and not (folder / "best.json").exists()


def test_half_written_leftovers_do_not_matter(whole: Path, stopped: Path) -> None:
    for name in (".step_000006.tmp", ".step_000004.old"):
        (stopped / "checkpoints" / name).mkdir()
        (stopped / "checkpoints" / name / "policy.pt").write_bytes(b"half")
    (stopped / ".policy.tmp").mkdir()
    (stopped / "config.yaml").write_text("algorithm: {_targ")
    with (stopped / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "upda')
    run_small(stopped.parents[2], *SFT)
    assert_same(whole, stopped)
    assert warnings(stopped) == []


@pytest.mark.parametrize("name", ["meta.json", "summary.json"])
def test_a_damaged_record_is_refused_by_name(name: str, tmp_path: Path) -> None:
    run_small(tmp_path, *SFT, *BRIEF)
    path = folder_of(tmp_path) / name
    path.write_text(path.read_text()[:-10])
    with pytest.raises(ConfigError, match=rf"{name} is damaged .* Delete it: .* writes it anew"):
        run_small(tmp_path, *SFT, *BRIEF)
    path.unlink()
    assert run_small(tmp_path, *SFT, *BRIEF)["status"] == "finished" and path.exists()


@pytest.mark.parametrize("text", ["{", "[]", "", "\x00", None])
def test_the_same_command_mends_the_configuration_of_a_finished_run(
    text: str | None, whole: Path, tmp_path: Path
) -> None:
    output = tmp_path / "copy"
    shutil.copytree(whole.parents[2], output)
    path = output / whole.relative_to(whole.parents[2]) / "config.yaml"
    good = path.read_text()
    path.unlink() if text is None else path.write_text(text)
    run_small(output, *SFT)
    assert path.read_text() == good.replace(str(whole.parents[2]), str(output))
    path.write_text("seed: 0 # as it was\n")  # whole: left alone
    run_small(output, *SFT)
    assert path.read_text() == "seed: 0 # as it was\n"


def test_tracebacks_of_every_process_go_once_a_run_goes_on(stopped: Path) -> None:
    names = ("error.txt", "error.rank1.txt", "error.rank12.txt")
    for name in names:
        (stopped / name).write_text("Traceback")
    run_small(stopped.parents[2], *SFT)
    assert not list(stopped.glob("error*"))


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    run_small(tmp_path, *SFT, *BRIEF)
    folder = folder_of(tmp_path)
    before = (folder / "summary.json").read_bytes()
    (folder / "summary.json").unlink()
    with FileLock(str(folder / ".lock")), pytest.raises(ConfigError, match="another process is"):
        run_small(tmp_path, *SFT, *BRIEF)
    assert not (folder / "summary.json").exists() and not (folder / "error.txt").exists()
    again = run_small(tmp_path, *SFT, *BRIEF)
    assert again["policy_hash"] == json.loads(before)["policy_hash"]


def test_a_run_tells_its_launcher_whether_it_has_begun_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    monkeypatch.setenv(RUN_DIR_FILE, str(told))
    output = tmp_path / "out"
    run_small(output, *SFT, *BRIEF)
    folder = folder_of(output).resolve()
    assert announced(told) == (folder, True)
    run_small(output, *SFT, *BRIEF)  # finished before
    assert announced(told) == (folder, False)
    (folder / "summary.json").unlink()
    with FileLock(str(folder / ".lock")), pytest.raises(ConfigError, match="another process is"):
        run_small(output, *SFT, *BRIEF)
    assert announced(told) == (folder, False) and not claimed(folder)


def delete_the_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def move_the_folder(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")


def put_another_in_its_place(folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "copy")
    move_the_folder(folder)
    (folder.parent / "copy").rename(folder)


def replace_a_record(folder: Path) -> None:
    data = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").write_bytes(data)


def write_to_a_record(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3}\n')


def delete_the_lock(folder: Path) -> None:
    (folder / ".lock").unlink()


def replace_the_lock(folder: Path) -> None:
    held = (folder / ".lock").rename(folder / "held")
    (folder / ".lock").touch()
    assert held.exists()


TAKEN_AWAY = {
    delete_the_folder: r"(deleted, moved or replaced|lock was deleted) ",
    move_the_folder: r"(deleted, moved or replaced|lock was deleted) ",
    put_another_in_its_place: r"(deleted, moved or replaced|lock was deleted) ",
    replace_a_record: r"metrics\.jsonl was deleted, moved or replaced .* start anew",
    write_to_a_record: r"metrics\.jsonl was altered \(it has \d+ bytes, not \d+\)",
    delete_the_lock: r"\.lock was deleted or replaced while the run held it",
    replace_the_lock: r"\.lock was deleted or replaced while the run held it",
}


@pytest.mark.parametrize("last", [False, True], ids=["in the middle", "after the last step"])
@pytest.mark.parametrize("take", TAKEN_AWAY, ids=lambda f: f.__name__)
def test_a_run_whose_folder_is_taken_away_does_not_say_it_finished(
    take: Callable[[Path], None], last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zoo.measure.recorder import Recorder

    record = Recorder.step

    def step(self: Recorder, step: int, *rest: Any) -> None:
        record(self, step, *rest)
        if step == (6 if last else 3):
            take(self.run_dir)

    monkeypatch.setattr(Recorder, "step", step)
    with pytest.raises(RecordError, match=TAKEN_AWAY[take]):
        run_small(tmp_path, *SFT, "train.checkpoint_every=4")
    assert not list(tmp_path.rglob("summary.json"))
    (above,) = tmp_path.glob("*/sft-*")
    folder = above / "seed_0"
    saved = [int(path.name[5:]) for path in folder.glob("checkpoints/step_*")]
    assert all(step < (6 if last else 3) for step in saved)
    if take in (delete_the_folder, move_the_folder):
        assert not folder.exists()
    elif take in (delete_the_lock, replace_the_lock):  # nothing else is wrong: it goes on
        assert not (folder / "error.txt").exists()  # it may be another run's by now
        monkeypatch.setattr(Recorder, "step", record)
        assert run_small(tmp_path, *SFT, "train.checkpoint_every=4")["status"] == "finished"


def test_an_output_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run folder .* cannot be written"):
        run_small(tmp_path / "file", *SFT)


def test_a_clock_that_jumps_back_changes_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    with monkeypatch.context() as patch:
        signal_at(patch, "zoo.measure.recorder:Recorder.step:3", signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            run_small(tmp_path, *SFT)
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now - 1e6)
        run_small(tmp_path, *SFT)
    folder = folder_of(tmp_path)
    for path in folder.rglob("*"):  # neither do the files' own times
        os.utime(path, (0, 0))
    assert_same(whole, folder)
    assert json.loads((folder / "summary.json").read_text())["seconds"]["total"] > 0


# the disk ----------------------------------------------------------------------------------------


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_checkpoint_before(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    def save(value: Any, out: Any) -> None:
        nonlocal written
        written += 1
        if written == 4:  # the optimizer of the second checkpoint
            out.write(b"half of it")
            full()
        original(value, out)

    original = torch.save
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        with pytest.raises(RecordError, match=r"checkpoint of step 4 .*No space left.*Free space"):
            run_small(tmp_path, *SFT)
    folder = folder_of(tmp_path)
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step_000002"]
    run_small(tmp_path, *SFT)
    assert_same(whole, folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    state = {"step": 1}

    def save(step: int, numbers: int) -> None:
        tensors = {"policy": {"w": torch.zeros(numbers)}}
        none = {"offsets": {}, "hashes": {}, "before": [*range(1, step)]}
        save_checkpoint(small_disk, step, tensors, state, **none, config_hash="x", seed=0, keep=2)

    with pytest.raises(RecordError, match=r"checkpoint of step 1 (?!.* The ones before stay)"):
        save(1, 100_000)  # there are none

    save(1, 20_000)  # 80 kB
    with pytest.raises(RecordError, match=r"checkpoint of step 2 .* The ones before stay"):
        save(2, 100_000)
    assert [p.name for p in small_disk.iterdir()] == ["step_000001"]
    save(2, 20_000)


# starts and caches -------------------------------------------------------------------------------


def test_a_start_that_vanished_or_changed_is_named_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    from zoo.train.session import TrainingError

    run_small(tmp_path / "start", *SFT, *BRIEF)
    start_folder = tmp_path / "policy"
    shutil.copytree(folder_of(tmp_path / "start") / "policy", start_folder)
    model = ["model.architecture=null", "model.tokenizer=null", f"model.path={start_folder}"]
    options = ["algorithm=dpo", *model, "evaluate.first=false"]
    with monkeypatch.context() as patch:
        signal_at(patch, "zoo.measure.recorder:Recorder.step:3", signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match="Step 3 of 6"):
            run_small(tmp_path / "run", *options)
    shutil.move(start_folder, tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"model.path=.*policy does not exist"):
        run_small(tmp_path / "run", *options)
    run_small(tmp_path / "other", *SFT, *BRIEF, "seed=1")
    shutil.copytree(folder_of(tmp_path / "other") / "policy", start_folder)
    with pytest.raises(ConfigError, match=r"model.path: model.safetensors changed .* Restore it"):
        run_small(tmp_path / "run", *options)
    (folder_of(tmp_path / "run") / RECORD).unlink()
    with pytest.raises(TrainingError, match=r"started from other weights .* Restore it"):
        run_small(tmp_path / "run", *options)
    shutil.rmtree(start_folder)
    shutil.move(tmp_path / "elsewhere", start_folder)
    file = start_folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"model.safetensors is not the file that was saved"):
        run_small(tmp_path / "run", *options)
    (start_folder / HASHES).unlink()
    with pytest.raises(ConfigError, match=r"model .*policy' could not be loaded"):
        run_small(tmp_path / "run", *options)
    file.write_bytes(whole)
    assert run_small(tmp_path / "run", *options)["status"] == "finished"


def test_damaged_caches_are_made_anew(tmp_path: Path) -> None:
    overrides = [*RUNS["dpo"], *BRIEF]
    first = run_small(tmp_path / "a", *overrides)
    files = [p for p in tmp_path.glob("cache/*/*") if p.suffix in (".jsonl", ".safetensors")]
    assert len(files) == 2
    whole = [path.read_bytes() for path in files]
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
        (path.parent / f"{path.stem}.tmp{number}").write_bytes(b"of a process that was killed")
    again = run_small(tmp_path / "b", *overrides)
    assert again["policy_hash"] == first["policy_hash"]
    assert not list(tmp_path.glob("cache/*/*.tmp*"))
    for path, data in zip(files, whole, strict=True):
        if path.suffix == ".safetensors":
            assert path.read_bytes() == data


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="ZOO_CACHE"):
        run_small(tmp_path / "run", *RUNS["dpo"], *BRIEF)


def test_a_folder_in_the_place_of_cached_pairs_is_named(tmp_path: Path) -> None:
    run_small(tmp_path / "a", *RUNS["dpo"], *BRIEF)
    (file,) = tmp_path.glob("cache/pairs/*.jsonl")
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match=rf"cache .*{file.name} .*directory.*: delete it"):
        run_small(tmp_path / "b", *RUNS["dpo"], *BRIEF)


def test_a_full_disk_under_the_cache_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.data.reference_cache.save_file", full)
    with pytest.raises(ConfigError, match=r"cache .* No space left .* ZOO_CACHE"):
        run_small(tmp_path / "run", *RUNS["dpo"], *BRIEF)
    assert not list(tmp_path.glob("cache/reference/*.tmp*"))


RATES = ("1e-4", "2e-4")


def test_two_processes_build_one_cache(tmp_path: Path) -> None:
    """Both start at once with the same start, data and budget; the learning rates differ."""
    cache = str(tmp_path / "cache")
    runs = [
        launched(str(tmp_path / name), cache, [*RUNS["dpo"], *BRIEF, f"train.lr={name}"])
        for name in RATES
    ]
    for run in runs:
        run.join()
        assert run.exitcode == 0
    assert all((folder_of(tmp_path / n) / "summary.json").exists() for n in RATES)
    summaries = [json.loads((folder_of(tmp_path / n) / "summary.json").read_text()) for n in RATES]
    # one sampled them, the other waited and read what that had cost
    assert len({summary["seconds"]["pairs"] for summary in summaries}) == 1
    assert len(list((tmp_path / "cache/pairs").glob("*.jsonl"))) == 1
    assert len(list((tmp_path / "cache/reference").glob("*.safetensors"))) == 1
    assert not list(tmp_path.glob("cache/*/*.tmp*"))


def test_an_altered_recipe_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from zoo.config import ModelConfig
    from zoo.models.loading import load_model, weights_hash
    from zoo.models.recipe import check_untouched

    summary = run_small(tmp_path, *SFT, *BRIEF)
    policy = folder_of(tmp_path) / "policy"
    loaded = weights_hash(load_model(ModelConfig(path=str(policy))))
    assert loaded == summary["policy_hash"]
    check_untouched("mine", policy, loaded)
    weights = load_file(policy / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, policy / "model.safetensors", metadata={"format": "pt"})
    (policy / HASHES).unlink()
    altered = weights_hash(load_model(ModelConfig(path=str(policy))))
    with pytest.raises(ConfigError, match=r"model.recipe=mine .* were altered .* Delete"):
        check_untouched("mine", policy, altered)


# A file may have so many bytes, as on a disk with so many left: what fails first, and whether the
# checkpoint before it is there.
LIMITS = {100_000: "checkpoint of step 2", 200: "config.yaml"}


def _limited(limit: int, output: Path, said: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        run_small(output, *SFT, "evaluate.first=false", "evaluate.last=false")
    except RecordError as error:
        said.write_text(str(error)[:150])


@pytest.mark.parametrize("limit", LIMITS)
def test_a_file_that_may_not_grow_is_named_and_nothing_is_left_half_written(
    limit: int, tmp_path: Path
) -> None:
    output, said = tmp_path / "out", tmp_path / "said.txt"
    context = multiprocessing.get_context("forkserver")  # a fork of what has computed may hang
    context.set_forkserver_preload(["tests.e2e.preload"])
    process = context.Process(target=_limited, args=(limit, output, said))
    process.start()
    process.join()
    folder = folder_of(output)
    assert LIMITS[limit] in said.read_text() and process.exitcode == 0
    for path in folder.rglob("*"):  # no half files, no leftovers of the writing
        assert path.name in (".lock", "checkpoints") or not path.name.startswith((".", "step_"))
    assert not (folder / "config.yaml").exists() or "seed" in (folder / "config.yaml").read_text()
    summary = run_small(output, *SFT, "evaluate.first=false", "evaluate.last=false")
    assert summary["status"] == "finished"


def test_a_full_disk_under_the_policy_is_named_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("zoo.build.save_policy", full)
        with pytest.raises(
            RecordError, match=r"cannot be written: .*No space left.*same command again"
        ):
            run_small(tmp_path, *SFT, *BRIEF)
    folder = folder_of(tmp_path)
    assert not (folder / "policy").exists() and not list(folder.glob(".policy*"))
    assert run_small(tmp_path, *SFT, *BRIEF)["status"] == "finished"
    assert (folder / "policy" / "config.json").exists()
