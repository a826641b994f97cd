"""Rows that are left out are told to each run, once, and kept in its record."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from tests.e2e.small import SMALL, folder_of
from zoo.compose import compose
from zoo.data.jsonl import JSONL
from zoo.data.left_out import LeftOut, heard
from zoo.data.mixture import Mixture
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
