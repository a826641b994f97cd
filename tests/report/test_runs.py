"""Reading run folders: whole, torn, unfinished, damaged."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.synthetic import evaluation, guard, write_lines, write_run
from zoo.cli import main
from zoo.report import runs_main
from zoo.report.runs import (
    Measure,
    RunStatus,
    arms_of,
    by_start_time,
    find_runs,
    read_jsonl,
    read_run,
    read_runs,
    start_evaluations,
)

OUTCOMES = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]


def test_a_torn_last_line_is_left_out(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "rew')
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_a_whole_last_line_without_a_newline_counts(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_a_cut_inside_a_character_is_a_torn_line(tmp_path: Path):
    path = tmp_path / "evals.jsonl"
    whole = '{"step": 1, "text": "é"}\n'.encode()
    path.write_bytes(whole + '{"step": 2, "text": "é'.encode()[:-1])
    assert read_jsonl(path) == [{"step": 1, "text": "é"}]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_jsonl(path)


def test_a_missing_file_has_no_lines(tmp_path: Path):
    assert read_jsonl(tmp_path / "none.jsonl") == []


def test_a_finished_run_tells_its_numbers(tmp_path: Path):
    # reward: twelve steps 1 … 12; the mean of the last ten, 3 … 12, is 7.5
    folder = write_run(tmp_path, "grpo", 3, rewards=list(range(1, 13)), steps=12, algorithm="grpo")
    run = read_run(folder)
    assert run.status is RunStatus.finished and run.progress() == "finished"
    assert (run.name, run.seed, run.experiment, run.algorithm) == ("grpo", 3, "exp", "grpo")
    assert run.reward() == pytest.approx(7.5)
    assert run.total("tokens", "generated") == 1000
    assert run.total("tokens", "unknown") is None
    assert run.peak_bytes() == ("update", 3_000_000)  # neither RSS nor evaluation


def test_an_unfinished_run_says_how_far_it_is(tmp_path: Path):
    folder = write_run(
        tmp_path, "ppo-1a2b3c4d", algorithm="ppo", steps=45, rewards=[0.1, 0.2], finished=False
    )
    run = read_run(folder)
    assert run.status is RunStatus.unfinished
    assert run.progress() == "unfinished at step 2 of 45"
    assert run.algorithm == "ppo"  # from the class, as there is no summary


def test_a_failed_run_is_failed_until_it_is_finished(tmp_path: Path):
    failed = write_run(tmp_path, "a", steps=5, rewards=[0.1], finished=False, error="Boom\n")
    mended = write_run(tmp_path, "b", steps=5, rewards=[0.1], error="Boom, last time")
    assert read_run(failed).progress() == "failed at step 1 of 5"
    assert read_run(mended).status is RunStatus.finished


def test_a_folder_without_a_configuration_is_no_run(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"config\.yaml"):
        read_run(tmp_path)
    assert read_runs([tmp_path]) == []


def test_a_damaged_summary_is_an_error_with_its_path(tmp_path: Path):
    folder = write_run(tmp_path, "grpo")
    (folder / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json"):
        read_run(folder)


@pytest.mark.parametrize(
    ("summary", "meta", "refused"),
    [
        ({"config_hash": "a1"}, {"config_hash": "a1", "seed": 0}, ""),
        ({"config_hash": "a1"}, {}, ""),  # an older record says nothing
        ({}, {"config_hash": "a1"}, ""),
        ({"config_hash": "b2"}, {"config_hash": "a1"}, r"config_hash is 'b2', .*began with 'a1'"),
        ({"seed": 3}, {}, "seed is 3, .* began with 0"),
    ],
)
def test_the_summary_of_another_run_is_refused(
    summary: dict[str, object],
    meta: dict[str, object],
    refused: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    folder = write_run(tmp_path, "grpo", summary=summary, meta=meta)
    damaged: dict[Path, str] = {}
    assert len(read_runs([folder], damaged)) == (not refused)
    assert runs_main([str(tmp_path)]) == 0
    status = "damaged" if refused else "finished"
    assert re.search(rf"grpo +0 +{status}", capsys.readouterr().out)
    if refused:
        assert re.search(refused, damaged[folder]) and str(folder) in damaged[folder]


def evals(**changed: object) -> bytes:
    """evals.jsonl with one evaluation of two problems, sampled twice."""
    line = evaluation(1, [[1, 0], [0, 0]], [1, 0]) | {"pass@k": {"2": 0.5}}
    return json.dumps(line | changed).encode()


DAMAGED = {
    "config.yaml": [b"a: [1", b"- 1", b"\xff\xfe", b"train: 3", b"seed: x", b"x: &a [*a]"],
    "metrics.jsonl": [b'{"a": 1}\n', b"3\n", b'{"a": 1}\n{"step": 2}\n', b'{"step": Infinity}\n'],
    "evals.jsonl": [
        b'{"step": 1}\n',
        b'"a"\n',
        evals(outcomes=[[1, 0]]),
        evals(problem_ids=["p0"]),
        evals(outcomes=3),
        evals(outcomes=[["x", 0], [0, 0]]),
        evals(outcomes=[[2, 2], [0, 0]]),  # four right ones of two
        evals(greedy_outcomes=[1]),
        evals(**{"pass@k": {"x": 1}}),
        evals(**{"pass@k": {"0": 1}}),
        evals(**{"pass@k": [1]}),
        evals(**{"pass@k": {"2": math.nan}}),
        evals(outcomes=[[math.nan, 0], [0, 0]], **{"pass@k": None}),
        evals(greedy_outcomes=[math.inf, 0]),
        evals(accuracy=math.nan),
        evals(greedy=-1.0),
    ],
    "memory.json": [b'{"components": [1, 2], "phases": 3}', b'{"phases": 3}', b'{"probes": [3]}'],
    "meta.json": [b"[1]", b"{", b'{"machine": 3}', b"\xff\xfe\x00", b"[" * 100_000],
    "summary.json": [
        b"3",
        b"\xff",
        b'{"final": [1]}',
        b'{"final": {"heldout": 3}}',
        b'{"seconds": {"total": "x"}}',
        b'{"peak_bytes": 3}',
    ],
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, each) for name, all_ in DAMAGED.items() for each in all_]
)
def test_a_damaged_run_is_listed_as_such_among_the_others(
    name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    whole = write_run(tmp_path, "grpo", 3)
    damaged = write_run(tmp_path, "ppo", 5)
    if name == "memory.json":  # a summary says the peaks, too
        (damaged / "summary.json").unlink()
    (damaged / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(damaged))} is damaged: .*{name}"):
        read_run(damaged)
    reasons: dict[Path, str] = {}
    assert [run.folder for run in read_runs([damaged, whole], reasons)] == [whole]
    assert list(reasons) == [damaged]
    assert main(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["exp", "ppo", "5", "damaged"] in lines
    assert ["exp", "grpo", "3", "finished"] in [line[:4] for line in lines]
    assert "is damaged" in " ".join(out.split())


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"files": null, "code": {}}', '{"files": {"a": [1]}, "code": 3}']
)
def test_a_damaged_record_of_inputs_leaves_the_numbers(content: str, tmp_path: Path):
    folder = write_run(tmp_path, "grpo")
    (folder / "inputs.json").write_text(content)
    assert read_run(folder).inputs == {}


def test_a_whole_record_is_no_damaged_one(tmp_path: Path):
    folder = write_run(tmp_path, "grpo", memory={"components": {"policy": {"weights": 8}}})
    (folder / "evals.jsonl").write_bytes(evals())
    run = read_run(folder)
    assert run.model_bytes() == 8 and run.evaluations[0].pass_at == {2: 0.5}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("evals.jsonl", evals(outcomes=[[1, 0]]), "heldout at step 1 has 1 outcomes for 2 problem"),
        ("evals.jsonl", evals(accuracy=math.nan), "heldout at step 1 has the share nan"),
        ("evals.jsonl", evals(**{"pass@k": {"x": 1}}), "invalid literal for int"),
        ("memory.json", b'{"components": [1]}', "AttributeError: 'list' object"),
    ],
)
def test_a_file_with_something_else_in_it_is_named(
    name: str, content: bytes, words: str, tmp_path: Path
):
    folder = write_run(tmp_path, "grpo")
    (folder / name).write_bytes(content)
    with pytest.raises(
        ValueError, match=f"damaged: {name} holds what zoo does not write: .*{words}"
    ):
        read_run(folder)


@pytest.mark.parametrize("name", ["config.yaml", "meta.json"])
def test_a_bad_seed_is_said_to_be_in_the_file_that_holds_it(name: str, tmp_path: Path):
    folder = write_run(tmp_path, "grpo")
    config = re.sub(r"(?m)^seed:.*$", "", (folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(config + "seed: x\n" * (name == "config.yaml"))
    (folder / "meta.json").write_text('{"seed": "x"}')
    with pytest.raises(ValueError, match=f"damaged: {name} holds .*invalid literal for int"):
        read_run(folder)


def test_a_report_leaves_out_a_damaged_run_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_run(tmp_path, "grpo", rewards=[0.5], evaluations=[evaluation(2, [[1], [0]], [1, 0])])
    damaged = write_run(tmp_path, "ppo")
    (damaged / "config.yaml").write_text("a: [1")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    out = "".join(capsys.readouterr().out.split())
    assert f"Note:therun{damaged}isdamaged" in out and "Itisleftout." in out
    assert main(["report", str(damaged)]) == 2
    assert "is not yaml" in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_cannot_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = write_run(tmp_path, "grpo")
    closed = tmp_path / "closed"
    closed.mkdir()
    whole = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        if folder == closed:
            raise PermissionError(13, "Permission denied", str(folder))
        return whole(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert find_runs(tmp_path) == [run]
    assert main(["runs", str(closed)]) == 2  # the one that was asked for
    assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["runs", "report"])
def test_a_folder_without_a_name_is_refused(word: str, capsys: pytest.CaptureFixture[str]):
    assert main([word, ""]) == 2
    assert "a folder must have a name, got ''" in " ".join(capsys.readouterr().err.split())


def test_runs_are_found_at_any_depth_but_not_inside_runs(tmp_path: Path):
    first = write_run(tmp_path, "grpo", 0)
    second = write_run(tmp_path, "grpo", 1)
    inside = first / "checkpoints" / "step_000001"
    inside.mkdir(parents=True)
    (inside / "config.yaml").write_text("seed: 0")
    assert find_runs(tmp_path) == [first, second]
    assert find_runs(first) == [first]


def test_a_file_of_somebody_elses_and_links_hide_no_run(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("lr: 3")  # of the project around
    run = write_run(tmp_path / "scratch", "grpo")
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    (outputs / "there").symlink_to(tmp_path / "scratch")
    (outputs / "again").symlink_to(outputs)
    assert find_runs(outputs) == [outputs / "there" / run.relative_to(tmp_path / "scratch")]
    assert find_runs(tmp_path) == [run]  # once, by its own path


def test_a_link_that_cannot_be_read_hides_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = write_run(tmp_path / "outputs", "grpo")
    closed = tmp_path / "closed"
    closed.mkdir()
    (tmp_path / "outputs" / "link").symlink_to(closed)
    whole = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        if folder.resolve() == closed:
            raise PermissionError(13, "Permission denied", str(folder))
        return whole(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert find_runs(tmp_path / "outputs") == [run]


def test_of_a_repeated_evaluation_the_later_counts(tmp_path: Path):
    lines = [evaluation(2, [[1], [0]], [1, 0]), evaluation(2, [[1], [1]], [1, 1])]
    run = read_run(write_run(tmp_path, "grpo", evaluations=lines))
    last = run.evaluation("heldout")
    assert last is not None and last.number("accuracy") == 1.0
    assert len(run.evaluations) == 1


def test_the_measures_of_each_problem(tmp_path: Path):
    line = evaluation(0, OUTCOMES, [1, 0, 0, 1])
    run = read_run(write_run(tmp_path, "grpo", evaluations=[line]))
    found = run.evaluations[0]
    assert found.per_problem(Measure.accuracy) == {"p0": 0.25, "p1": 0.5, "p2": 0.0, "p3": 1.0}
    assert found.per_problem(Measure.greedy) == {"p0": 1.0, "p1": 0.0, "p2": 0.0, "p3": 1.0}
    # pass@2 with c right of 4: 1 − C(4 − c, 2)/6. c = 1: 1 − 3/6; c = 2: 1 − 1/6; c = 4: 1.
    assert found.per_problem(Measure.pass_k, 2) == pytest.approx(
        {"p0": 0.5, "p1": 5 / 6, "p2": 0.0, "p3": 1.0}
    )


def test_an_unscored_sample_is_left_out_not_counted_as_wrong(tmp_path: Path):
    line = evaluation(0, [[1, 0], [1, 1]], [1, 1])
    line["outcomes"] = [[1, None], [None, None]]
    run = read_run(write_run(tmp_path, "grpo", evaluations=[line]))
    assert run.evaluations[0].per_problem(Measure.accuracy) == {"p0": 1.0}


def test_what_is_not_finite_is_no_number(tmp_path: Path):
    lines = [{**guard(2, float("inf")), "length": float("nan"), "truncated": 0.5}]
    run = read_run(write_run(tmp_path, "grpo", evaluations=lines, summary={"kl_to_start": 1e999}))
    found = run.evaluations[0]
    assert [found.number(key) for key in ("perplexity", "length", "truncated")] == [None, None, 0.5]
    assert run.total("kl_to_start") is None


def test_seeds_of_one_name_are_one_arm_in_order(tmp_path: Path):
    folders = [write_run(tmp_path, name, seed) for name in ("ppo", "grpo") for seed in (1, 0)]
    arms = arms_of(read_runs(folders))
    assert [arm.label for arm in arms] == ["ppo", "grpo"]
    assert [[run.seed for run in arm.runs] for arm in arms] == [[0, 1], [0, 1]]


def test_a_label_loses_its_hash_only_where_that_is_unambiguous(tmp_path: Path):
    folders = [
        write_run(tmp_path, name)
        for name in ("grpo-1a2b3c4d", "ppo-1a2b3c4d", "ppo-5e6f7a8b", "random-reward")
    ]
    labels = [arm.label for arm in arms_of(read_runs(folders))]
    assert labels == ["grpo", "ppo-1a2b3c4d", "ppo-5e6f7a8b", "random-reward"]


def test_experiments_that_are_compared_are_named(tmp_path: Path):
    folders = [write_run(tmp_path, "grpo", experiment=name) for name in ("one", "two")]
    assert [arm.label for arm in arms_of(read_runs(folders))] == ["one/grpo", "two/grpo"]


def hashed(root: Path, name: str, seed: int, config_hash: str = "", **options: Any) -> Path:
    """A run with the hash of its configuration in meta.json, where there is one."""
    meta = {"config_hash": config_hash} if config_hash else {}
    return write_run(root, name, seed, meta=meta, **options)


@pytest.mark.parametrize(
    ("hashes", "arms"),  # of the seeds 0, 1, 2
    [
        (["1a", "1a", "1a"], {"q": [0, 1, 2]}),
        (["1a", "2b", "1a"], {"q (1a)": [0, 2], "q (2b)": [1]}),
        (["", "", ""], {"q": [0, 1, 2]}),  # older records
        (["", "1a", "1a"], {"q": [0, 1, 2]}),
        (["", "1a", "2b"], {"q (unknown)": [0], "q (1a)": [1], "q (2b)": [2]}),
    ],
)
def test_an_arm_has_runs_of_one_configuration(
    hashes: list[str], arms: dict[str, list[int]], tmp_path: Path
):
    folders = [hashed(tmp_path, "q", seed, value) for seed, value in enumerate(hashes)]
    found = arms_of(read_runs(folders))
    assert {arm.label: [run.seed for run in arm.runs] for arm in found} == arms


def test_a_configuration_is_known_by_the_summary_too(tmp_path: Path):
    folders = [
        write_run(tmp_path, "q", seed, summary={"config_hash": value})
        for seed, value in enumerate(("1a", "2b"))
    ]
    assert [arm.label for arm in arms_of(read_runs(folders))] == ["q (1a)", "q (2b)"]


def test_a_run_counts_once_whatever_path_leads_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = write_run(tmp_path / "outputs", "grpo")
    link = tmp_path / "link"
    link.symlink_to(run)
    monkeypatch.chdir(tmp_path)
    relative = run.relative_to(tmp_path)
    assert [found.folder for found in read_runs([relative, run, link])] == [relative]
    assert main(["runs", "outputs", str(tmp_path / "outputs"), str(link)]) == 0
    assert capsys.readouterr().out.count("grpo") == 1


@pytest.mark.parametrize("finished", [True, False])
def test_a_copy_of_a_run_is_left_out(finished: bool, tmp_path: Path):
    first = hashed(tmp_path / "one", "q", 0, "1a", finished=finished)
    second = hashed(tmp_path / "two", "q", 0, "1a")
    other = hashed(tmp_path / "two", "q", 1, "1a")
    (arm,) = arms_of(read_runs([first, second, other]))
    kept, left_out = (first, second) if finished else (second, first)  # a finished one counts
    assert [run.folder for run in arm.runs] == [kept, other]
    assert [(run.folder, counted.folder) for run, counted in arm.repeats] == [(left_out, kept)]


def test_the_start_is_counted_once_a_seed(tmp_path: Path):
    line = evaluation(0, [[1], [0]], [1, 0])
    folders = [
        write_run(tmp_path, name, seed, evaluations=[line])
        for name in ("ppo", "grpo")
        for seed in (0, 1)
    ]
    found = start_evaluations(arms_of(read_runs(folders)), "heldout")
    assert [e.seed for e in found] == [0, 1]


def test_runs_are_ordered_by_when_they_started(tmp_path: Path):
    late = write_run(tmp_path, "a", meta={"started": "2026-01-02T00:00:00+00:00"})
    early = write_run(tmp_path, "b", meta={"started": "2026-01-01T00:00:00+00:00"})
    assert [run.folder for run in by_start_time(read_runs([late, early]))] == [early, late]


def test_series_leaves_out_what_is_not_finite(tmp_path: Path):
    folder = write_run(tmp_path, "grpo")
    write_lines(
        folder / "metrics.jsonl",
        [{"step": 1, "kl_ref": 0.5}, {"step": 2, "kl_ref": None}, {"step": 3}],
    )
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "kl_ref": float("nan")}) + "\n")
    assert read_run(folder).series("kl_ref") == [(1, 0.5)]
