import errno
import hashlib
import json
import math
import os

import numpy as np
import pytest
import torch

from zoo.measure import files
from zoo.measure.files import (
    JsonLines,
    RecordError,
    check_length,
    dumps,
    read_lines,
    remove,
    strict,
    way_out,
    write_json,
)


def test_nonfinite_numbers_become_null_and_are_counted():
    value = {"a": math.nan, "b": [1.5, math.inf, {"c": -math.inf}], "d": 2}
    assert strict(value) == ({"a": None, "b": [1.5, None, {"c": None}], "d": 2}, 3)


def test_tensors_and_numpy_scalars_become_numbers():
    plain, bad = strict({"t": torch.tensor(2.5), "i": np.int64(3), "v": torch.tensor([1, 2])})
    assert plain == {"t": 2.5, "i": 3, "v": [1, 2]} and bad == 0
    assert strict(torch.tensor(math.nan)) == (None, 1)


@pytest.mark.parametrize("text", ["\u2028 \x85 \n", "\ud83d", "é 😀 \x00"])
def test_no_text_can_break_a_line(text, tmp_path):
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append([{"text": text}])
    lines.close()
    raw = (tmp_path / "a.jsonl").read_text(encoding="ascii")
    assert len(raw.splitlines()) == 1
    assert json.loads(raw)["text"] == text


def test_dumps_refuses_what_strict_json_lacks():
    assert json.loads(dumps({"x": math.inf, 3: ("a",)})) == {"x": None, "3": ["a"]}


def test_a_resumed_file_is_cut_to_its_offset(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = JsonLines(path)
    lines.append([{"n": 1}])
    offset = lines.sync()
    lines.append([{"n": 2}])
    lines.close()
    with path.open("ab") as file:
        file.write(b'{"n": 3')  # torn by a kill
    resumed = JsonLines(path, offset)
    resumed.append([{"n": 4}])
    resumed.close()
    assert read_lines(path) == [{"n": 1}, {"n": 4}]


def test_a_new_file_in_place_of_an_old_one_starts_empty(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n')
    JsonLines(path).close()
    assert path.read_bytes() == b""


def test_a_shortened_file_is_refused_by_name_and_left_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"n": 1}\n')
    with pytest.raises(RecordError, match=r"metrics\.jsonl has 9 bytes.*written at 90"):
        JsonLines(path, 90)
    assert path.read_text() == '{"n": 1}\n'


def test_an_altered_file_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"n": 123}\n')
    with pytest.raises(RecordError, match="altered"):
        JsonLines(path, 9)


def test_the_hash_is_that_of_the_file_through_resumes_and_refused_lines(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    monkeypatch.setattr(files, "BLOCK", 7)  # several reads
    lines = JsonLines(path)
    lines.append([{"n": 1}, {"n": "x" * 30}])
    keep = lines.sync()
    lines.append([{"n": 2}])
    lines.close()
    resumed = JsonLines(path, keep)
    assert resumed.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()
    resumed.append([{"n": 3}])
    with monkeypatch.context() as patch, pytest.raises(RecordError):
        patch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        resumed.append([{"n": 4}])
    resumed.append([{"n": 5}])
    assert resumed.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [line["n"] for line in read_lines(path)[2:]] == [3, 5]


@pytest.mark.parametrize("byte", [0, 4, 9, 19])
def test_a_changed_byte_is_refused_by_name_and_none_behind_the_offset(byte, tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.append([{"n": 11}, {"n": 22}])  # 10 bytes each
    keep, digest = lines.sync(), lines.sha256()
    lines.append([{"n": 33}])
    check_length(path, keep, digest)
    data = bytearray(path.read_bytes())
    data[byte] ^= 0x80
    path.write_bytes(data)
    with pytest.raises(RecordError, match=r"metrics\.jsonl .*altered"):
        check_length(path, keep, digest)


@pytest.mark.parametrize("line", [b'{"n": \xb1}', b'{"n": 1', b"7", b"[]"])
def test_a_damaged_line_is_named_with_its_file(line, tmp_path):
    path = tmp_path / "evals.jsonl"
    path.write_bytes(b'{"n": 1}\n' + line + b"\n")
    with pytest.raises(RecordError, match=r"evals\.jsonl is damaged in line 2 .* or delete"):
        read_lines(path)


def test_a_folder_in_the_place_of_a_file_is_named_with_what_to_do(tmp_path):
    for name in ("metrics.jsonl", "summary.json"):
        (tmp_path / name).mkdir()
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(RecordError, match=r"metrics\.jsonl is damaged .*directory"):
        read_lines(path)
    with pytest.raises(RecordError, match=r"metrics\.jsonl cannot be read: Is a directory"):
        check_length(path, 1)
    with pytest.raises(RecordError, match=r"metrics\.jsonl: .* Delete what is in its place"):
        JsonLines(path)
    with pytest.raises(RecordError, match=r"summary\.json: .* Delete what is in its place"):
        write_json(tmp_path / "summary.json", {})


def test_removing_takes_a_link_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("kept")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    (tmp_path / "to").symlink_to("folder")
    (tmp_path / "nowhere").symlink_to("absent")
    (tmp_path / "one").write_text("")
    for name in ("full", "to", "nowhere", "one", "never"):
        remove(tmp_path / name)
    assert [p.name for p in tmp_path.rglob("*")] == ["folder", "file"]


def test_a_full_disk_leaves_whole_lines_and_a_named_error(tmp_path, monkeypatch):
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append([{"n": 1}])
    true_write = os.write

    def full(handle, data):
        if len(data) > 5:
            return true_write(handle, data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RecordError, match=r"a\.jsonl: No space left on device"):
        lines.append([{"n": 2}])
    monkeypatch.undo()
    lines.append([{"n": 3}])
    lines.close()
    assert read_lines(tmp_path / "a.jsonl") == [{"n": 1}, {"n": 3}]


def test_write_json_replaces_whole_and_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(RecordError, match=r"summary\.json: No space left"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_what_helps_is_told_by_what_is_in_the_way():
    assert "ulimit -f" in way_out(OSError(errno.EFBIG, "File too large"))
    assert "Delete what is in its place" in way_out(OSError(errno.EISDIR, "Is a directory"))
    assert "Free space" in way_out(OSError(errno.ENOSPC, "No space left on device"))
    assert "Free space" in way_out(RuntimeError("torch's own word"))
