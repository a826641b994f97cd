"""`zoo report` and `zoo runs`, and the page that they write."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.report.synthetic import evaluation, write_run
from zoo.cli import main as zoo_main
from zoo.report import main, runs_main
from zoo.report.runs import find_runs

FILES = {
    "table.md",
    "table.csv",
    "differences.csv",
    "figure.png",
    "training.png",
    "memory.png",
    "page.html",
    "record.json",
}
VOID = {"meta", "img", "br"}


class Checker(HTMLParser):
    """Collects tags, links and images, and sees that elements nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.images: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        values = dict(attrs)
        self.links += [str(values[key]) for key in ("href", "src") if values.get(key)]
        if tag == "img":
            self.images.append(str(values["src"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


def sample(step: int, text: str, score: int) -> dict[str, object]:
    return {
        "step": step,
        "set": "heldout",
        "prompt_id": "p0",
        "prompt": "2 < 3 & 1?",
        "answer": "5",
        "text": text,
        "score": score,
        "reason": "matched" if score else "wrong",
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("outputs")
    for seed in (0, 1):
        write_run(
            root, "grpo", seed, steps=4, rewards=[0.1, 0.2, 0.3, 0.4],
            evaluations=[
                evaluation(0, [[1], [0]], [1, 0]),
                evaluation(4, [[1], [1]], [1, 1]),
            ],
            samples=[
                sample(0, "<script>alert(1)</script> 4", 0),
                sample(4, "2 + 3 = 5. #### 5", 1),
            ],
        )  # fmt: skip
    write_run(root, "ppo", algorithm="ppo", steps=4, rewards=[0.1], finished=False)
    return root


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of the runs; tests read it."""
    out = tmp_path_factory.mktemp("report")
    assert main([str(runs), "--out", str(out)]) == 0
    return out


def test_report_writes_every_file_and_prints_the_comparison(runs: Path, tmp_path: Path, capsys):
    out = tmp_path / "out"
    assert main([str(runs), "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == FILES
    printed = capsys.readouterr().out
    assert "grpo" in printed and "100.0" in printed
    assert "ppo, seed 0: unfinished at step 1 of 4" in printed.replace("\n", " ")


def test_half_characters_in_records_are_spelled_out(tmp_path: Path):
    half = "\ud83d"  # as JSON can hold, and no file in UTF-8
    line = evaluation(2, [[1], [0]], [1, 0]) | {"reasons": {half: 0.5}}
    text = sample(2, f"text {half}", 1) | {"answer": f"answer {half}", "reason": f"reason {half}"}
    write_run(tmp_path, "grpo", evaluations=[line], samples=[sample(0, "text", 0), text])
    out = tmp_path / "out"
    assert main([str(tmp_path), "--out", str(out)]) == 0
    page = (out / "page.html").read_text(encoding="utf-8")
    assert "text \\ud83d" in page and "answer \\ud83d" in page


def test_report_goes_beside_the_runs_by_default_and_is_no_run_itself(runs: Path):
    assert main([str(runs)]) == 0
    assert (runs / "report" / "page.html").exists()
    assert len(find_runs(runs)) == 3  # the report's folder is not mistaken for a run


def test_the_page_is_sound_and_refers_to_nothing_outside_it(report: Path):
    text = (report / "page.html").read_text()
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.links == checker.images and len(checker.images) == 3
    for image in checker.images:
        head, data = image.split(",", 1)
        assert head == "data:image/png;base64" and base64.b64decode(data).startswith(b"\x89PNG")
    assert "script" not in checker.seen  # a completion is text, whatever it contains
    assert "&lt;script&gt;alert(1)&lt;/script&gt; 4" in text


def test_the_page_shows_a_problem_before_and_after(report: Path):
    text = (report / "page.html").read_text()
    assert "2 &lt; 3 &amp; 1?" in text and "(answer: 5)" in text
    before, after = text.index("before: wrong"), text.index("step 4: matched")
    assert before < text.index("alert(1)") < after < text.index("2 + 3 = 5. #### 5")


@pytest.mark.parametrize("damage", ['{"set": "heldout"}\n', "3\n", "{\n{}\n"])
def test_completions_that_cannot_be_read_leave_the_numbers(damage: str, tmp_path: Path):
    folder = write_run(tmp_path, "grpo", evaluations=[evaluation(2, [[1], [0]], [1, 0])])
    (folder / "eval_samples.jsonl").write_text(damage)
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "page.html").read_text()
    assert f"{folder}/eval_samples.jsonl is damaged" in text and "50.0" in text


def test_the_page_starts_with_the_reasons_to_doubt_and_ends_with_the_origin(report: Path):
    text = (report / "page.html").read_text()
    assert text.index("Read this first") < text.index("<h2>Results</h2>")
    assert "unfinished at step 1 of 4" in text
    origin = text[text.index("Where this comes from") :]
    assert "zoo algorithm=grpo seed=1" in origin and "0123456789abcdef" in origin
    # the one setting in which grpo and ppo differ
    table = text[text.index("Settings in which the arms differ") : text.index("<details>")]
    assert re.findall(r"<tr><td>([^<]+)", table) == ["algorithm._target_"]


def test_the_record_names_commit_seeds_and_machine(report: Path):
    record = json.loads((report / "record.json").read_text())
    assert record["commit"] == "0123456789abcdef" and record["dirty"] is False
    assert record["seeds"] == {"grpo": [0, 1], "ppo": [0]}
    assert record["machine"]["cpu"] == "a processor"
    assert record["status"]["ppo"] == ["unfinished at step 1 of 4"]
    assert record["run_seconds"] == 24.0  # two finished runs of 10 + 2 s


def test_a_folder_without_runs_is_a_message_and_exit_status_2(tmp_path: Path, capsys):
    for command, folder, words in (
        ("report", tmp_path, "no runs"),
        ("report", tmp_path / "nowhere", "no folder"),
        ("runs", tmp_path / "nowhere", "no folder"),
    ):
        assert zoo_main([command, str(folder)]) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert words in error and "Traceback" not in error


def test_runs_lists_each_run_with_its_state(runs: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert runs_main([str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5  # a heading, three runs, and where their folders are
    finished = next(row for row in lines if "grpo" in row)
    assert "finished" in finished and "100.0 %" in finished
    assert "unfinished at step 1 of 4" in next(row for row in lines if "ppo" in row)
