"""The metered step of each arm in the tables and on the page."""

from __future__ import annotations

from pathlib import Path

from tests.report.synthetic import evaluation, write_run
from zoo.report import main
from zoo.report.runs import read_run

ROLLOUT = {"total": 3_000_000, "policy/parameters": 1_000_000, "cache": 2_000_000}
UPDATE = {"total": 9_250_000, "policy/parameters": 1_000_000, "activations": 8_250_000}
PROBES = [{"rollout": {"total": 1}}, {"rollout": ROLLOUT, "update": UPDATE}]

EVALUATIONS = [evaluation(2, [[1, 0], [1, 1]], [1, 1])]


def written(folder: Path, memory: dict) -> Path:
    return write_run(folder, name="grpo", seed=0, evaluations=EVALUATIONS, memory=memory)


def test_the_last_step_counts_and_its_highest_phase(tmp_path: Path) -> None:
    run = read_run(written(tmp_path, {"probes": PROBES}))
    assert run.probe == PROBES[-1]
    assert run.tensor_bytes() == 9_250_000


def test_runs_of_before_have_no_column_and_no_table(tmp_path: Path) -> None:
    written(tmp_path, {})
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert "live tensors" not in (tmp_path / "out" / "table.md").read_text()
    assert "<h2>Memory</h2>" not in (tmp_path / "out" / "page.html").read_text()


def test_table_and_page_show_the_bytes(tmp_path: Path) -> None:
    written(tmp_path, {"probes": PROBES})
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    table = (tmp_path / "out" / "table.md").read_text()
    assert "peak live tensors, MB" in table and "9.2" in table
    page = (tmp_path / "out" / "page.html").read_text()
    row = "<small>update</small></td><td>1.0</td><td></td><td>8.2</td><td>9.2</td></tr>"
    head = "<th>policy parameters</th><th>cache</th><th>activations</th><th>total</th>"
    assert head in page and row in page
