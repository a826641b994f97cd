"""The numbers of the comparison, against arithmetic done by hand."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.report.synthetic import evaluation, guard, write_run
from zoo.report.runs import Arm, Evaluation, arms_of, read_runs
from zoo.report.tables import (
    Column,
    Difference,
    compare,
    csv_text,
    difference,
    differences_csv,
    estimate,
    markdown,
    print_comparison,
)


def evaluations(*seeds: tuple[Sequence[Sequence[int]], Sequence[int]]) -> list[Evaluation]:
    """One evaluation for each (outcomes, greedy outcomes)."""
    return [
        Evaluation(1, "heldout", "accuracy", seed, evaluation(1, outcomes, greedy))
        for seed, (outcomes, greedy) in enumerate(seeds)
    ]


def two_arms(root: Path) -> list[Arm]:
    """A start at 1/4, ppo at 3/4 and grpo at 1/2 of four problems, two seeds each."""
    ends = {"ppo": [1, 1, 1, 0], "grpo": [1, 1, 0, 0]}
    folders = []
    for name, end in ends.items():
        for seed in (0, 1):
            lines = [
                evaluation(0, [[1], [0], [0], [0]], [1, 0, 0, 0]),
                guard(0, 3.0),
                evaluation(2, [[o] for o in end], end),
                guard(2, 3.0 + seed),
            ]
            folders.append(write_run(root, name, seed, algorithm=name, evaluations=lines,
                                     rewards=[0.25, 0.5]))  # fmt: skip
    return arms_of(read_runs(folders))


def test_a_table_of_a_set_counts_the_seeds_that_were_judged_on_it(tmp_path: Path):
    ends = [1, 1, 0, 0]
    folders = []
    for seed in (0, 1, 2):
        sets = ["heldout", "extra"] if seed == 0 else ["heldout"]
        lines = [
            evaluation(step, [[o] for o in ends], ends, name=name)
            for step in (0, 2)
            for name in sets
        ]
        folders.append(write_run(tmp_path, "grpo", seed, evaluations=lines))
    text = markdown(compare(arms_of(read_runs(folders))))
    heldout, extra = text.split("**extra")[0], text.split("**extra")[1].split("**training")[0]
    for label in ("start", "grpo"):
        assert f"| {label}, 3 seeds |" in heldout
        assert f"| {label}, 1 seed |" in extra


# ------------------------------------------------------------------------------------- intervals


def test_greedy_of_one_run_has_wilsons_interval():
    # 250 of 500: Wilson's 95 % interval is (.456341, .543659)
    greedy = [1] * 250 + [0] * 250
    found = estimate(evaluations(([[o] for o in greedy], greedy)), "greedy")
    assert found.value == 0.5 and found.seeds is None
    assert found.problems == pytest.approx((0.456341, 0.543659), abs=1e-6)


def test_interval_over_seeds_is_students_t():
    # seeds at 2/5, 3/5, 4/5: mean .6, s = .2, s/√3 = .1154701, t(2; .975) = 4.302653:
    # half .496827; the upper end, 1.0968, is cut at 1
    runs = evaluations(*(([[1]] * k + [[0]] * (5 - k), [1] * k + [0] * (5 - k)) for k in (2, 3, 4)))
    found = estimate(runs, "accuracy")
    assert found.value == pytest.approx(0.6)
    assert found.seeds == pytest.approx((0.103173, 1.0), abs=1e-6)


def test_one_seed_has_no_interval_over_seeds():
    assert estimate(evaluations(([[1], [0]], [1, 0])), "accuracy").seeds is None


def test_interval_over_problems_is_a_bootstrap_over_problems():
    # One of four problems is right. A resample's mean is k/4 with k ~ Binomial(4, 1/4):
    # P(0) = .316 > .025; P(≤ 2) = .949 < .975 < P(≤ 3) = .996: the interval is [0, 3/4].
    found = estimate(evaluations(([[1, 1], [0, 0], [0, 0], [0, 0]], [1, 0, 0, 0])), "accuracy")
    assert found.value == 0.25
    assert found.problems == pytest.approx((0.0, 0.75))


def test_more_samples_or_seeds_of_the_same_problems_do_not_narrow_it():
    # samples of one problem that agree say nothing new: 16 outcomes are still four problems
    one = estimate(evaluations(([[1], [0], [0], [0]], [1, 0, 0, 0])), "accuracy")
    four = estimate(evaluations(([[1] * 4, [0] * 4, [0] * 4, [0] * 4], [1, 0, 0, 0])), "accuracy")
    seeds = estimate(evaluations(*[([[1], [0], [0], [0]], [1, 0, 0, 0])] * 4), "accuracy")
    assert one.problems == four.problems == seeds.problems


def test_greedy_of_several_seeds_is_not_taken_for_independent_trials():
    # Two seeds that agree on four problems: no Wilson interval of eight trials
    found = estimate(evaluations(*[([[1], [0], [0], [0]], [1, 0, 0, 0])] * 2), "greedy")
    assert found.problems == pytest.approx((0.0, 0.75))  # as above, by Binomial(4, 1/4)


def test_all_wrong_is_not_certain():
    # Wilson, 0 of 4: z²/(n + z²) = 3.841459/7.841459 = .489891
    found = estimate(evaluations(([[0, 0]] * 4, [0] * 4)), "accuracy")
    assert found.value == 0
    assert found.problems == pytest.approx((0.0, 0.489891), abs=1e-6)


def test_pass_at_k_is_unbiased():
    # c = 1 and 2 of 4: pass@2 = 1 − 3/6 = 1/2 and 1 − 1/6 = 5/6, mean 2/3
    found = estimate(evaluations(([[1, 0, 0, 0], [1, 1, 0, 0]], [0, 0])), "pass@2")
    assert found.value == pytest.approx(2 / 3)


def test_a_record_without_outcomes_still_gives_its_mean():
    record = {"accuracy": 0.4, "greedy": 0.5, "pass@k": {"4": 0.6}}
    runs = [Evaluation(1, "heldout", "accuracy", 0, record)]
    found = estimate(runs, "accuracy")
    assert (found.value, found.problems, found.seeds) == (0.4, None, None)
    assert estimate(runs, "pass@4").value == 0.6
    assert estimate([], "accuracy").value is None


# ----------------------------------------------------------------------------------- differences


def test_equal_outcomes_are_no_difference():
    runs = evaluations(([[1], [0], [1]], [1, 0, 1]))
    found = difference(("a", runs), ("b", runs))
    assert found is not None
    assert found.value == 0 and found.verdict == "no difference"
    assert found.mcnemar == (1.0,)


def test_a_difference_inside_its_interval_is_no_difference():
    # of 4 problems, one is better: resampled means are k/4, k ~ Binomial(4, 1/4): [0, 3/4] has 0
    found = difference(
        ("a", evaluations(([[1], [0], [1], [0]], [1, 0, 1, 0]))),
        ("b", evaluations(([[0], [0], [1], [0]], [0, 0, 1, 0]))),
    )
    assert found is not None
    assert found.value == 0.25 and found.over_problems == pytest.approx((0.0, 0.75))
    assert found.verdict == "no difference"


def test_pairing_removes_the_difficulty_that_both_share():
    # Ten problems; the first arm solves all that the second solves, and all others by half:
    # d = 1/2 on each of ten problems, so that the interval is a point
    first = evaluations(([[1, 1]] * 5 + [[1, 0]] * 5, [1] * 10))
    second = evaluations(([[1, 0]] * 5 + [[0, 0]] * 5, [0] * 10))
    found = difference(("a", first), ("b", second))
    assert found is not None
    assert (found.value, *found.over_problems) == (0.5, 0.5, 0.5)
    assert found.verdict == "better (one seed)"
    # ten problems, all better: 2 · (1/2)^10 = .001953125
    assert found.mcnemar == (pytest.approx(0.001953125),)


def test_mcnemar_counts_problems_that_differ():
    # 10 for the first, 2 for the second, 8 equal: exact two-sided p = .0385742
    first = evaluations(([[0]] * 20, [1] * 10 + [0] * 2 + [1] * 8))
    second = evaluations(([[0]] * 20, [0] * 10 + [1] * 2 + [1] * 8))
    found = difference(("a", first), ("b", second))
    assert found is not None
    assert found.mcnemar == (pytest.approx(0.0385742, abs=1e-7),)


def test_interval_over_seeds_of_a_difference_pairs_equal_seeds():
    # differences by seed: 3/5 − 1/5 = .4 and 3/5 − 2/5 = .2: mean .3, s = .1414214, s/√2 = .1,
    # t(1; .975) = 12.706205: .3 ± 1.2706, cut to (−.970620, 1)
    def arm(*counts: int) -> list[Evaluation]:
        return evaluations(*(([[1]] * k + [[0]] * (5 - k), [0] * 5) for k in counts))

    found = difference(("a", arm(3, 3)), ("b", arm(1, 2)))
    assert found is not None and found.n_seeds == 2
    assert found.value == pytest.approx(0.3)
    assert found.over_seeds == pytest.approx((-0.970620, 1.0), abs=1e-6)


def test_seeds_that_only_one_arm_has_do_not_enter_the_interval_over_seeds():
    runs = evaluations(([[1], [1]], [1, 1]), ([[1], [1]], [1, 1]))
    found = difference(("a", runs), ("b", runs[:1]))
    assert found is not None
    assert found.n_seeds == 1 and found.over_seeds is None and len(found.mcnemar) == 1


def test_arms_without_a_seed_in_common_are_not_said_to_have_one():
    first = evaluations(([[1]] * 9, [1] * 9))
    second = evaluations(([[0]] * 9, [0] * 9), ([[0]] * 9, [0] * 9))[1:]  # seed 1
    found = difference(("a", first), ("b", second))
    assert found is not None and found.verdict == "better (no seed in common)"


def test_only_problems_in_common_are_compared():
    first = evaluations(([[1], [1], [1]], [1, 1, 1]))
    second = evaluations(([[0], [0], [0]], [0, 0, 0]))
    second[0].record["problem_ids"] = ["p1", "p2", "other"]
    found = difference(("a", first), ("b", second))
    assert found is not None and found.problems == 2
    second[0].record["problem_ids"] = ["x", "y", "z"]
    assert difference(("a", first), ("b", second)) is None


def test_rows_of_one_number_in_two_files_are_two_problems():
    first = evaluations(([[1], [1], [1]], [1, 1, 1]))
    second = evaluations(([[0], [0], [0]], [0, 0, 0]))
    first[0].record["problem_hashes"] = ["a", "b", "c"]
    second[0].record["problem_hashes"] = ["a", "b", "other"]
    found = difference(("a", first), ("b", second))
    assert found is not None and found.problems == 2
    second[0].record["problem_hashes"] = ["x", "y", "z"]
    assert difference(("a", first), ("b", second)) is None
    del second[0].record["problem_hashes"]  # an older record: by the ids alone
    found = difference(("a", first), ("b", second))
    assert found is not None and found.problems == 3


def test_seeds_of_an_arm_are_pooled_over_the_problems_that_they_share():
    runs = evaluations(([[1], [1], [0]], [1, 1, 0]), ([[1], [0], [0]], [1, 0, 0]))
    for run, hashes in zip(runs, (["a", "b", "c"], ["a", "b", "other"]), strict=True):
        run.record["problem_hashes"] = hashes
    assert estimate(runs, "accuracy").value == 3 / 4  # of the first two problems


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
@pytest.mark.parametrize("starts", [("one", "one"), ("one", "another")])
def test_each_arm_is_compared_with_its_start_on_its_own_problems(
    starts: Sequence[str], seeds: Sequence[int], tmp_path: Path
):
    """Two policies that did not move, on a set that is solved and on one that is not."""
    folders = []
    sets = (("easy", 1, "e"), ("hard", 0, "h"))
    for start_hash, seed, (name, right, content) in zip(starts, seeds, sets, strict=True):
        lines = [
            evaluation(step, [[right]] * 4, [right] * 4, problem_hashes=[content] * 4)
            for step in (0, 2)
        ]
        folders.append(write_run(tmp_path, name, seed, evaluations=lines, start_hash=start_hash))
    comparison = compare(arms_of(read_runs(folders)))
    assert [(d.first, d.second, d.value) for d in comparison.differences] == [
        ("easy", "start", 0.0),
        ("hard", "start", 0.0),
    ]
    start = [row.estimates["heldout/accuracy"].value for row in comparison.rows][:-2]
    assert start == ([None] if len({*starts}) == 1 else [])  # no one score, or no one start


@pytest.mark.parametrize("key", ["max_new_tokens", "prompts_hash"])
@pytest.mark.parametrize("order", [1, -1])
def test_an_arm_is_compared_with_its_start_as_it_was_judged_itself(
    order: int, key: str, tmp_path: Path
):
    """One start, judged within one token (all wrong) and within eight (all right)."""
    ends = {"one": (1, 0, 0), "long": (8, 1, 0)}
    folders = []
    for name, (limit, before, after) in [*ends.items()][::order]:
        lines = [
            evaluation(step, [[right]] * 4, [right] * 4, prompts_hash="x") | {key: limit}
            for step, right in ((0, before), (2, after))
        ]
        folders.append(write_run(tmp_path, name, evaluations=lines))
    comparison = compare(arms_of(read_runs(folders)))
    found = {(d.first, d.second): d.value for d in comparison.differences}
    assert found["one", "start"] == 0.0 and found["long", "start"] == -1.0
    rows = {row.label: row.estimates["heldout/accuracy"].value for row in comparison.rows}
    assert rows == {"start": None, "one": 0.0, "long": 0.0}


def test_where_there_are_two_starts_each_untrained_arm_has_its_row(tmp_path: Path):
    folders = []
    for start, right in (("a", 1), ("b", 0)):
        lines = [evaluation(0, [[right]] * 4, [right] * 4)]
        folders.append(
            write_run(tmp_path, f"none_{start}", steps=0, evaluations=lines, start_hash=start)
        )
        lines += [evaluation(2, [[1]] * 4, [1] * 4)]
        folders.append(write_run(tmp_path, f"grpo_{start}", evaluations=lines, start_hash=start))
    comparison = compare(arms_of(read_runs(folders)))
    rows = {row.label: row.estimates["heldout/accuracy"].value for row in comparison.rows}
    assert rows == {"none_a": 1.0, "grpo_a": 1.0, "none_b": 0.0, "grpo_b": 1.0}
    found = {(d.first, d.second): d.value for d in comparison.differences}
    assert found["grpo_a", "start"] == 0.0 and found["grpo_b", "start"] == 1.0


def arm_of(root: Path, name: str, seed: int, right: int, **changes: Any) -> Path:
    """A run whose start answers every problem so, and that has it all right in the end."""
    same = {"max_new_tokens": 8} | changes
    start = same.pop("start_hash", "abc123")
    finished = same.pop("finished", True)
    lines = [
        evaluation(step, [[value]] * 4, [value] * 4, **same) for step, value in ((0, right), (2, 1))
    ]
    return write_run(root, name, seed, evaluations=lines, start_hash=start, finished=finished)


def row_of_the_start(*folders: Path) -> list[float | None]:
    rows = compare(arms_of(read_runs(folders))).rows
    return [row.estimates["heldout/accuracy"].value for row in rows if row.label == "start"]


def test_what_an_older_record_does_not_tell_is_no_other_way_of_judging(tmp_path: Path):
    known = {"problem_hashes": ["a", "b", "c", "d"], "prompts_hash": "x"}
    older, newer = arm_of(tmp_path, "a", 0, 0), arm_of(tmp_path, "b", 0, 0, **known)
    assert row_of_the_start(older, newer) == [0.0]
    found = compare(arms_of(read_runs([older, newer]))).differences
    assert [(d.first, d.value) for d in found if d.second == "start"] == [("a", 1.0), ("b", 1.0)]


def test_problems_that_are_drawn_by_the_seed_have_one_start(tmp_path: Path):
    folders = [
        arm_of(tmp_path, name, seed, seed, problem_hashes=[str(seed)] * 4)
        for name in ("a", "b")
        for seed in (0, 1)
    ]
    assert row_of_the_start(*folders) == [0.5]
    assert row_of_the_start(folders[0], folders[3]) == [None]  # two sets, of one arm each


def test_an_unfinished_arm_of_another_start_leaves_the_row_of_the_others(tmp_path: Path):
    folders = [arm_of(tmp_path, "a", 0, 0), arm_of(tmp_path, "b", 0, 0)]
    other = arm_of(tmp_path, "c", 0, 1, start_hash="other", finished=False)
    assert row_of_the_start(*folders, other) == [0.0]
    assert row_of_the_start(other) == [1.0]  # nothing else is there


def test_an_arm_that_is_named_start_is_not_taken_for_it(tmp_path: Path):
    lines = [evaluation(0, [[0]] * 4, [0] * 4), evaluation(2, [[1]] * 4, [1] * 4)]
    comparison = compare(arms_of(read_runs([write_run(tmp_path, "start", evaluations=lines)])))
    assert [row.label for row in comparison.rows] == ["start", "start (trained)"]
    assert [(d.first, d.second) for d in comparison.differences] == [("start (trained)", "start")]


def test_arms_of_two_starts_are_compared_each_with_its_own(tmp_path: Path):
    ends = {"a": ([[1]] * 4, [[1]] * 4), "b": ([[0]] * 4, [[1]] * 4)}  # before and after
    folders = [
        write_run(
            tmp_path,
            name,
            start_hash=name,
            evaluations=[evaluation(0, before, [0] * 4), evaluation(2, after, [0] * 4)],
        )
        for name, (before, after) in ends.items()
    ]
    found = compare(arms_of(read_runs(folders))).differences
    assert [(d.first, d.second, d.value) for d in found] == [
        ("a", "start", 0.0),
        ("b", "start", 1.0),
        ("a", "b", 0.0),
    ]


@pytest.mark.parametrize(
    ("value", "problems", "seeds", "verdict"),
    [
        (0.1, (-0.1, 0.3), (0.05, 0.15), "no difference"),
        (0.1, (0.0, 0.3), None, "no difference"),  # the interval contains its end
        (0.1, (0.05, 0.15), None, "better (one seed)"),
        (-0.1, (-0.15, -0.05), (-0.2, -0.05), "worse"),
        (0.1, (0.05, 0.15), (0.01, 0.2), "better"),
        (0.1, (0.05, 0.15), (-0.5, 0.7), "better, but not surely with other seeds"),
    ],
)
def test_the_verdict_in_words(value, problems, seeds, verdict):
    assert Difference("a", "b", "heldout", 9, value, problems, seeds, 2, ()).verdict == verdict


# ----------------------------------------------------------------------------------------- rows


def test_the_comparison_of_two_arms_with_their_start(tmp_path: Path):
    comparison = compare(two_arms(tmp_path))
    rows = {row.label: row for row in comparison.rows}
    assert list(rows) == ["start", "ppo", "grpo"]
    assert rows["start"].estimates["heldout/accuracy"].value == 0.25
    assert rows["start"].estimates["heldout/accuracy"].seeds is None  # one policy, no spread
    assert rows["ppo"].estimates["heldout/accuracy"].value == 0.75
    assert rows["ppo"].estimates["guard/perplexity"].value == 3.5  # 3 and 4
    assert rows["ppo"].estimates["reward"].value == pytest.approx(0.375)  # (.25 + .5)/2
    assert rows["ppo"].estimates["peak_bytes"].value == 3_000_000
    pairs = [(d.first, d.second, d.value) for d in comparison.differences]
    assert pairs == [("ppo", "start", 0.5), ("grpo", "start", 0.25), ("ppo", "grpo", 0.25)]


def test_the_arm_without_training_is_the_start(tmp_path: Path):
    lines = [evaluation(0, [[1], [0], [0], [0]], [1, 0, 0, 0])]
    write = write_run(tmp_path, "no-training", steps=0, evaluations=lines)
    arms = [*arms_of(read_runs([write])), *two_arms(tmp_path / "more")]
    comparison = compare(arms)
    assert [row.label for row in comparison.rows] == ["start (no-training)", "ppo", "grpo"]
    assert not any("no-training" in (d.first, d.second) for d in comparison.differences)


def test_an_arm_without_a_finished_run_has_no_numbers_but_its_state(tmp_path: Path):
    arms = two_arms(tmp_path)
    folder = write_run(tmp_path, "dpo", steps=45, rewards=[0.1], finished=False,
                       evaluations=[evaluation(0, [[1]], [1])])  # fmt: skip
    row = compare([*arms, *arms_of(read_runs([folder]))]).rows[-1]
    assert row.label == "dpo" and row.note == "unfinished at step 1 of 45"
    assert all(e.value is None for e in row.estimates.values())


def test_csv_holds_the_numbers_of_the_table(tmp_path: Path):
    comparison = compare(two_arms(tmp_path))
    rows = {row["arm"]: row for row in csv.DictReader(io.StringIO(csv_text(comparison)))}
    assert float(rows["ppo"]["heldout/accuracy"]) == 0.75
    assert rows["ppo"]["seeds"] == "0 1"
    assert float(rows["ppo"]["tokens/generated"]) == 1000
    assert rows["start"]["tokens/generated"] == ""
    assert rows["start"]["heldout/accuracy/seeds_low"] == ""
    # start: one of four problems, [0, 3/4] as in the bootstrap above
    assert float(rows["start"]["heldout/accuracy/problems_high"]) == 0.75
    pairs = list(csv.DictReader(io.StringIO(differences_csv(comparison))))
    assert [row["verdict"] for row in pairs][1:] == ["no difference"] * 2


def test_markdown_and_terminal_say_the_same_numbers(tmp_path: Path):
    arms = two_arms(tmp_path)
    text = markdown(compare(arms))
    assert "| ppo, 2 seeds | 75.0 [25.0, 100.0]" in text
    assert "no difference" in text
    out = io.StringIO()
    print_comparison(arms, Console(file=out, width=120))
    for piece in ("75.0", "[25.0, 100.0]", "no difference", "start"):
        assert piece in out.getvalue()


def test_units():
    def show(unit: str, value: float) -> str:
        return Column("key", "title", "block", unit).show(value)

    assert show("share", 0.4567) == "45.7"
    assert show("count", 115200) == "115,200"
    assert show("bytes", 12_340_000) == "12.3"  # megabytes
    assert show("seconds", 59.04) == "59.0"
    assert show("number", 0.12345) == "0.123"
