"""Checkpoints: whole or not there, refused by name when something is wrong with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo.train import checkpoint as checkpoint_module
from zoo.train.checkpoint import last_good_checkpoint, save_checkpoint


def save(
    folder: Path, step: int, *, keep: int = 2, config_hash: str = "cfg", seed: int = 0
) -> Path:
    """As a run that goes on from the last good checkpoint."""
    last, _ = last_good_checkpoint(folder, config_hash, seed)
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "policy": {"weight": torch.randn(40, generator=generator)},
        "optimizer_policy": {"state": {0: {"step": torch.tensor(float(step))}}, "groups": [1]},
    }
    return save_checkpoint(
        folder,
        step,
        tensors,
        {"progress": {"step": step}, "source": {"position": 7 * step}},
        offsets={"metrics.jsonl": 100 * step},
        hashes={},
        config_hash=config_hash,
        seed=seed,
        before=last.steps if last is not None else [],
        keep=keep,
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    save(tmp_path, 15)
    found, refused = last_good_checkpoint(tmp_path, "cfg", 0)
    assert found is not None and refused == []
    assert found.step == 15 and found.manifest["offsets"] == {"metrics.jsonl": 1500}
    assert found.state == {"progress": {"step": 15}, "source": {"position": 105}}
    wanted = torch.randn(40, generator=torch.Generator().manual_seed(15))
    assert torch.equal(found.load("policy")["weight"], wanted)
    assert found.load("optimizer_policy")["state"][0]["step"] == 15


def test_B96_an_adam_state_comes_back_bitwise(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
        module = torch.nn.Linear(3, 2)
        return module, torch.optim.AdamW(module.parameters(), lr=0.1)

    def train(module: torch.nn.Linear, optimizer: torch.optim.AdamW, seed: int) -> None:
        optimizer.zero_grad()
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        module(x).square().sum().backward()
        optimizer.step()

    first, adam = made()
    for seed in range(2):
        train(first, adam, seed)
    tensors = {"critic": first.state_dict(), "optimizer_critic": adam.state_dict()}
    none = {"offsets": {}, "hashes": {}, "before": []}
    save_checkpoint(tmp_path, 2, tensors, {}, **none, config_hash="cfg", seed=0, keep=2)
    found, _ = last_good_checkpoint(tmp_path, "cfg", 0)
    assert found is not None
    second, other = made()
    second.load_state_dict(found.load("critic"))
    other.load_state_dict(found.load("optimizer_critic"))
    for seed in range(2, 4):
        train(first, adam, seed)
        train(second, other, seed)
    assert torch.equal(first.weight, second.weight) and torch.equal(first.bias, second.bias)


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        save(tmp_path, step)
    assert names(tmp_path) == ["step_000015", "step_000020"]


def test_steps_sort_as_numbers(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(tmp_path, step)
    assert names(tmp_path) == ["step_000010", "step_000100"]
    for step in (999_998, 999_999, 1_000_000):
        save(tmp_path, step)
        found, _ = last_good_checkpoint(tmp_path, "cfg", 0)
        assert found is not None and found.step == step
    assert names(tmp_path) == ["step_1000000", "step_999999"]


def test_without_any_there_is_none(tmp_path: Path) -> None:
    assert last_good_checkpoint(tmp_path, "cfg", 0) == (None, [])
    assert last_good_checkpoint(tmp_path / "absent", "cfg", 0) == (None, [])


def truncated(path: Path) -> str:
    file = path / "policy.pt"
    file.write_bytes(file.read_bytes()[:-1])
    return "policy.pt has"


def altered(path: Path) -> str:
    file = path / "policy.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    return "policy.pt was altered"


def missing(path: Path) -> str:
    (path / "optimizer_policy.pt").unlink()
    return "optimizer_policy.pt is missing"


def no_manifest(path: Path) -> str:
    (path / "manifest.json").unlink()
    return "manifest cannot be read"


def cut_manifest(path: Path) -> str:
    file = path / "manifest.json"
    file.write_text(file.read_text()[:-20])
    return "manifest cannot be read"


def manifest_of_another_shape(path: Path) -> str:
    (path / "manifest.json").write_text(json.dumps({"files": ["policy.pt"], "config_hash": "cfg"}))
    return "manifest cannot be read"


def manifest_without_hashes(path: Path) -> str:
    file = path / "manifest.json"
    value = json.loads(file.read_text())
    del value["files"]["policy.pt"]["sha256"]
    file.write_text(json.dumps(value))
    return "manifest cannot be read"


def manifest_without_state(path: Path) -> str:
    file = path / "manifest.json"
    value = json.loads(file.read_text())
    del value["state"]
    file.write_text(json.dumps(value))
    return "manifest lacks entries"


def foreign(path: Path) -> str:
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"cfg"', '"other"'))
    return "another configuration"


def of_another_seed(path: Path) -> str:
    save(path.parent / "other", 30, seed=1)
    shutil.rmtree(path)
    (path.parent / "other" / path.name).rename(path)
    return "another seed (1, not 0)"


def copy_of_another_step(path: Path) -> str:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step_000015"), path)
    return "it is of step 15"


def link_to_nowhere(path: Path) -> str:
    shutil.rmtree(path)
    path.symlink_to("nowhere")
    return "manifest cannot be read"


def link_to_a_damaged_one(path: Path) -> str:
    moved = path.rename(path.parent / "elsewhere")
    path.symlink_to(moved)
    return truncated(moved)


def file_of_its_name(path: Path) -> str:
    shutil.rmtree(path)
    path.write_text("")
    return "manifest cannot be read"


DAMAGES: list[Callable[[Path], str]] = [
    truncated,
    altered,
    missing,
    no_manifest,
    cut_manifest,
    manifest_of_another_shape,
    manifest_without_hashes,
    manifest_without_state,
    foreign,
    of_another_seed,
    copy_of_another_step,
    link_to_nowhere,
    link_to_a_damaged_one,
    file_of_its_name,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_B98_a_bad_checkpoint_is_refused_by_name_and_the_one_before_used(
    tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    save(tmp_path, 15)
    reason = damage(save(tmp_path, 30))
    found, refused = last_good_checkpoint(tmp_path, "cfg", 0)
    assert found is not None and found.step == 15
    assert len(refused) == 1
    assert "step_000030" in refused[0] and reason in refused[0]
    save(tmp_path, 20)
    save(tmp_path, 40)  # beyond the refused one, which does not count
    found, refused = last_good_checkpoint(tmp_path, "cfg", 0)
    assert found is not None and found.step == 40 and found.steps == [20, 40]
    assert (tmp_path / "step_000020/manifest.json").exists()
    truncated(tmp_path / "step_000040")
    found, _ = last_good_checkpoint(tmp_path, "cfg", 0)
    assert found is not None and found.step == 20


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_checkpoint_is_replaced_when_its_step_comes_again(
    tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    save(tmp_path, 15)
    damage(save(tmp_path, 30))
    save(tmp_path, 30)
    found, refused = last_good_checkpoint(tmp_path, "cfg", 0)
    assert found is not None and found.step == 30 and refused == []
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_a_checkpoint_of_an_older_version_says_neither_its_seed_nor_those_before(
    tmp_path: Path,
) -> None:
    file = save(tmp_path, 15) / "manifest.json"
    manifest = json.loads(file.read_text())
    for key in ("seed", "before", "hashes", "sha256"):
        del manifest[key]
    file.write_text(json.dumps(manifest))
    found, refused = last_good_checkpoint(tmp_path, "cfg", 3)
    assert found is not None and found.steps == [15] and refused == []


@pytest.mark.parametrize("name", [".step_000015.tmp", ".step_000015.old"])
@pytest.mark.parametrize("kind", ["file", "folder", "link to nowhere", "link to a folder"])
def test_whatever_is_in_the_way_of_a_checkpoint_is_removed_and_links_are_not_followed(
    name: str, kind: str, tmp_path: Path
) -> None:
    others = tmp_path / "others"
    others.mkdir()
    (others / "file").write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    put_in_the_way(run / name, kind, others)
    save(run, 15)
    assert names(run) == ["step_000015"] and names(others) == ["file"]


def put_in_the_way(path: Path, kind: str, others: Path) -> None:
    if kind == "file":
        path.write_text("")
    elif kind == "folder":
        (path / "below").mkdir(parents=True)
    else:
        path.symlink_to(others if kind == "link to a folder" else "nowhere")


def test_B98_when_all_are_bad_each_is_named(tmp_path: Path) -> None:
    for path in [save(tmp_path, step) for step in (15, 30)]:
        truncated(path)
    found, refused = last_good_checkpoint(tmp_path, "cfg", 0)
    assert found is None
    assert ["step_000030" in refused[0], "step_000015" in refused[1]] == [True, True]


class Killed(BaseException):
    """The process ended here."""


@pytest.mark.parametrize("moment", ["first file", "second file", "manifest", "rename"])
@pytest.mark.parametrize("again", [False, True])
def test_B98_killed_while_writing_the_previous_one_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, again: bool
) -> None:
    """Also when the step that is written anew exists already (`again`), until the rename."""
    save(tmp_path, 15)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    calls = {"save": 0}
    real_save, real_dump = torch.save, json.dump

    def torch_save(value: Any, out: Any) -> None:
        calls["save"] += 1
        if calls["save"] == {"first file": 1, "second file": 2}.get(moment):
            out.write(b"half")
            raise Killed
        real_save(value, out)

    def json_dump(value: Any, out: Any, **options: Any) -> None:
        if moment == "manifest":
            out.write('{"step"')
            raise Killed
        real_dump(value, out, **options)

    def rename(self: Path, target: Path) -> None:
        raise Killed

    monkeypatch.setattr(checkpoint_module.torch, "save", torch_save)
    monkeypatch.setattr(checkpoint_module.json, "dump", json_dump)
    if moment == "rename":
        monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(Killed):
        save(tmp_path, 15 if again else 30)
    monkeypatch.undo()
    assert all(path.read_bytes() == data for path, data in before.items())
    found, refused = last_good_checkpoint(tmp_path, "cfg", 0)
    assert found is not None and found.step == 15 and refused == []
    # and the leftover harms nobody: the next one is written over it
    save(tmp_path, 30)
    found, refused = last_good_checkpoint(tmp_path, "cfg", 0)
    assert found is not None and found.step == 30 and refused == []
    assert [n for n in names(tmp_path) if not n.startswith(".")] == ["step_000015", "step_000030"]


def test_a_step_written_anew_replaces_the_old_one_and_leaves_nothing_beside_it(
    tmp_path: Path,
) -> None:
    save(tmp_path, 15, config_hash="old")
    save(tmp_path, 15)
    assert names(tmp_path) == ["step_000015"]
    found, refused = last_good_checkpoint(tmp_path, "cfg", 0)
    assert found is not None and refused == []


def test_a_refused_later_step_does_not_push_out_the_one_just_written(tmp_path: Path) -> None:
    save(tmp_path, 15, keep=1)
    truncated(save(tmp_path, 45, keep=9))
    save(tmp_path, 20, keep=1)  # the run went on from 15
    found, _ = last_good_checkpoint(tmp_path, "cfg", 0)
    assert found is not None and found.step == 20
