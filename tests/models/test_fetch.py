"""A fetched model that was altered is noticed, at its next use or by the doctor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zoo.config import ConfigError, ModelConfig
from zoo.doctor import Mark, _fetched
from zoo.models import fetch
from zoo.models.loading import cache_folder, with_fetched

NAME = "smollm2_135m"
CONFIG = ModelConfig(path="owner/name", fetch=NAME)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    folder = fetch.fetched_folder(NAME)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    fetch._record(folder)
    return folder


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_value_the_cache_is_in_the_home_folder(
    value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ZOO_CACHE", raising=False)
    if value is not None:
        monkeypatch.setenv("ZOO_CACHE", value)
    assert cache_folder() == tmp_path / ".cache/zoo"


def test_an_untouched_one_is_used_wherever_it_was_copied_to(folder: Path) -> None:
    assert with_fetched(CONFIG).path == str(folder)
    os.utime(folder / "model.safetensors", (1, 1))
    assert with_fetched(CONFIG).path == str(folder)
    assert fetch.fetch(NAME) == folder


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.safetensors", b"weight", "model.safetensors has 6 bytes, not 7"),
        ("model.safetensors", b"veights", "model.safetensors has another hash"),
        ("config.json", b"[]", "config.json has another hash"),
        ("model.safetensors", None, "model.safetensors is missing"),
        (fetch.RECORD, b"{", "fetched.json cannot be read"),
        (fetch.RECORD, b"[]", "fetched.json cannot be read"),
        (fetch.RECORD, b'{"a": 1}', "fetched.json cannot be read"),
    ],
)
def test_an_altered_one_is_refused_with_the_file_and_the_way_out(
    name: str, content: bytes | None, says: str, folder: Path
) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    way_out = f"Delete that folder and run `zoo fetch {NAME}"
    with pytest.raises(ConfigError, match=f"{says}.* {way_out}"):
        with_fetched(CONFIG)


def test_a_bit_that_flipped_on_the_disk_is_found_by_the_doctor_and_by_fetch(folder: Path) -> None:
    file = folder / "model.safetensors"
    before = file.stat()
    file.write_bytes(b"weighTs")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # a disk tells nobody
    (found,) = _fetched()
    assert found.mark is Mark.bad and "another hash" in found.detail
    with pytest.raises(ConfigError, match="another hash"):
        fetch.fetch(NAME)


def test_one_of_a_time_without_records_is_let_through(folder: Path) -> None:
    (folder / fetch.RECORD).unlink()
    (folder / "model.safetensors").write_bytes(b"veights")
    assert with_fetched(CONFIG).path == str(folder)
