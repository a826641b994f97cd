"""Rows that are left out are told to each run, once, and kept in its record."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from tests.e2e.small import SMALL, folder_of
from zoo.compose import compose
from zoo.data.gsm8k import GSM8K
from zoo.data.jsonl import JSONL
from zoo.data.left_out import LeftOut, heard, remembered
from zoo.data.mixture import Mixture
from zoo.data.rows import content_of
from zoo.instantiate import structured
from zoo.train.run import run


def write(folder: Path, count: int, *lines: str) -> str:
    """`count` questions, the first two of them twice, and other lines."""
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in (*range(count), 0, 1)]
    path = folder / "a.jsonl"
    path.write_text("\n".join([*map(json.dumps, rows), *lines]), encoding="utf-8")
    return str(path)


def test_what_is_left_out_is_heard_once_or_said_after_all(tmp_path: Path) -> None:
    data = JSONL(path=write(tmp_path, 5), heldout=0.0)
    mixture = Mixture(parts={"a": {"data": data, "weight": 1.0}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for made in (data, data, mixture, mixture):  # the second time nothing is read
            with heard() as said:
                made.prompts()
                made.prompts()
            assert list(said) == ["a.jsonl: left out 2 rows that repeat an earlier one."]
    with pytest.warns(LeftOut, match="left out 2 rows"), pytest.raises(KeyError), heard():
        data.prompts()
        raise KeyError
    with pytest.warns(DeprecationWarning, match="another"), heard() as said:
        warnings.warn("another", DeprecationWarning, stacklevel=1)
    assert not said


@pytest.mark.filterwarnings("error::zoo.data.left_out.LeftOut")  # none is printed beside the note
def test_each_run_records_what_its_data_leaves_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path, 200, "{")
    words = [one for one in SMALL if not one.startswith("data.")]
    words += ["data=jsonl", f"data.path={path}", "data.chat=false", "train.steps=1"]
    words += ["evaluate.problems=4", "evaluate.every=0", "evaluate.first=false"]
    for algorithm in ("grpo", "dpo"):  # one process: the second run finds the file read
        output = tmp_path / algorithm
        run(structured(compose([*words, f"algorithm={algorithm}", f"output={output}"])))
        lines = (folder_of(output) / "warnings.jsonl").read_text().splitlines()
        (note,) = (line for line in map(json.loads, lines) if line["kind"] == "data")
        assert "left out 1 of 203 rows (line 203: not JSON" in note["message"]
        assert "left out 2 rows that repeat an earlier one" in note["message"]
        printed = "".join(capfd.readouterr())
        assert printed.count("left out 1 of 203") == printed.count("left out 2 rows") == 1


def test_what_lies_at_a_path_is_read_anew_once_it_has_changed(tmp_path: Path) -> None:
    """In one process, as in a notebook: of files, and of folders with folders in them."""
    read: list[object] = []

    @remembered
    def count(path: str, key: tuple[str, int]) -> int:
        read.append(path)
        return len(read)

    folder = tmp_path / "rows"
    (folder / "deep").mkdir(parents=True)
    inner = folder / "deep" / "a.jsonl"
    inner.write_text("one")
    for place in (str(inner), str(folder)):
        first = count(place, ("k", 1))
        assert count(place, ("k", 1)) == first
        inner.write_text(inner.read_text() + " more")
        assert count(place, ("k", 1)) == first + 1 == count(place, ("k", 1))
    (folder / "deep" / "b.jsonl").write_text("another")
    assert count(str(folder), ("k", 1)) == len(read) == 5
    assert count("no path", (str(folder), 1)) == count("no path", (str(folder), 1))
    assert count("x" * 5000, ("", 1)) == len(read)  # no path at all


def test_a_data_set_whose_folder_changed_is_another_one(tmp_path: Path) -> None:
    for name in ("train", "test"):
        row = {"question": f"{name}: what is 1 + 1?", "answer": "It is 2.\n#### 2"}
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n")
    data = GSM8K(path=str(tmp_path), svamp=None)
    (before,) = data.prompts()
    file = tmp_path / "train.jsonl"
    file.write_text(file.read_text().replace("1 + 1", "1 + 1 + 0"))
    (after,) = data.prompts()
    assert content_of(before) != content_of(after) and "1 + 1 + 0" in content_of(after)
