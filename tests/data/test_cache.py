"""Cache files: whole or absent, whoever is killed or runs out of space."""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo.config import ConfigError
from zoo.data.cache import locked, written_aside


def test_a_file_appears_whole_and_leftovers_go(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "a.jsonl"
    with locked(file):
        (file.parent / "a.tmp99999").write_text("of a process that was killed")
        (file.parent / "b.tmp99999").write_text("another file's, perhaps being written")
        with written_aside(file) as temporary:
            temporary.write_text("whole")
            assert not file.exists()
    assert file.read_text() == "whole"
    assert sorted(p.name for p in file.parent.glob("*tmp*")) == ["b.tmp99999"]


def test_no_space_is_named_and_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("old")
    with (
        pytest.raises(ConfigError, match=r"a\.jsonl cannot be written: .*full.*ZOO_CACHE"),
        written_aside(file) as temporary,
    ):
        temporary.write_text("half")
        raise OSError("full")
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"] and file.read_text() == "old"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.lock", "a.tmp1"])
def test_a_folder_in_the_place_of_a_file_is_to_be_deleted(name: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    (tmp_path / name).mkdir()
    with (
        pytest.raises(ConfigError, match=rf"directory: .*{name}.* folder is in the .*: delete it"),
        locked(file),
        written_aside(file) as temporary,
    ):
        temporary.write_text("whole")


def test_an_error_of_ones_own_is_not_blamed_on_the_disk(tmp_path: Path) -> None:
    with pytest.raises(KeyError), locked(tmp_path / "a"):
        raise KeyError
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="ZOO_CACHE"), locked(tmp_path / "file" / "a"):
        pass
