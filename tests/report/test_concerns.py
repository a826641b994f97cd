"""What the report must say without being asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.report.synthetic import evaluation, guard, write_lines, write_run
from zoo.config import PEER_GONE
from zoo.report.concerns import concerns
from zoo.report.runs import arms_of, read_runs

WRONG, RIGHT = [[0]] * 20, [[1]] * 20


def found(*folders: Path) -> list[str]:
    return concerns(arms_of(read_runs(folders)))


def run(root: Path, name: str = "grpo", **options: Any) -> Path:
    """A run of twenty steps without a reason to doubt, but for what the options change."""
    options.setdefault("rewards", [0.5] * 20)
    return write_run(root, name, steps=20, **options)


def independent(before: list[list[int]], after: list[list[int]]) -> list[dict[str, Any]]:
    return [
        evaluation(0, before, [0] * len(before), name="independent"),
        evaluation(20, after, [0] * len(after), name="independent"),
    ]


def test_a_clean_run_raises_no_concern(tmp_path: Path):
    lines = [*independent(RIGHT, RIGHT), guard(0, 3.0), guard(20, 3.1)]
    assert found(run(tmp_path, evaluations=lines)) == []


def test_reward_up_and_independent_down_is_said_first_and_loudly(tmp_path: Path):
    rewards = [0.2, 0.21] * 5 + [0.8, 0.81] * 5  # the means differ by .6, the noise is ~ .005
    lines = [*independent(RIGHT, WRONG), guard(0, 3.0), guard(20, 4.0)]
    texts = found(run(tmp_path, rewards=rewards, evaluations=lines))
    assert "reward rose by 0.6" in texts[0] and "FELL by 100.0 points" in texts[0]
    assert any("perplexity rose from 3 to 4" in text for text in texts)


def test_reward_up_and_independent_down_within_its_interval_is_not_said(tmp_path: Path):
    # one of twenty problems is lost: the bootstrap interval of the change contains 0
    rewards = [0.2, 0.21] * 5 + [0.8, 0.81] * 5
    lines = independent(RIGHT, [*RIGHT[:-1], [0]])
    assert found(run(tmp_path, rewards=rewards, evaluations=lines)) == []


def test_independent_down_without_a_rise_of_the_reward_is_no_hacking(tmp_path: Path):
    assert found(run(tmp_path, evaluations=independent(RIGHT, WRONG))) == []


def test_different_starts_are_named(tmp_path: Path):
    texts = found(run(tmp_path, "a", start_hash="aaaa1"), run(tmp_path, "b", start_hash="bbbb2"))
    assert any("one start" in text and "aaaa1" in text and "bbbb2" in text for text in texts)


@pytest.mark.parametrize(
    ("a", "b", "named"),  # the start of each seed of two arms
    [
        ({0: "x", 1: "y"}, {}, None),  # drawn by the seed
        ({0: "x", 1: "y"}, {0: "x", 1: "y"}, None),
        ({0: "x", 1: "y"}, {1: "y"}, None),
        ({0: "x", 1: "y"}, {0: "y", 1: "x"}, "x: a; y: b"),  # the same two, but not for one seed
        ({0: "x", 1: "y"}, {1: "z"}, "y: a; z: b"),
        ({0: "x"}, {1: "x"}, None),
        ({0: "x"}, {1: "z"}, "x: a; z: b"),
    ],
)
def test_starts_are_compared_seed_by_seed(
    a: dict[int, str], b: dict[int, str], named: str | None, tmp_path: Path
):
    arms = {"a": a, "b": b}
    texts = found(
        *(
            run(tmp_path, name, seed=seed, start_hash=start)
            for name, starts in arms.items()
            for seed, start in starts.items()
        )
    )
    said = f"The arms did not begin from one start ({named}): differences may come from that."
    assert texts == ([said] if named else [])


def test_a_name_of_several_configurations_is_named_with_what_differs(tmp_path: Path):
    folders = [
        run(tmp_path, "q", seed=0, meta={"config_hash": "1a"}),
        run(tmp_path, "q", seed=2, meta={"config_hash": "1a"}),
        run(tmp_path, "q", seed=1, algorithm="ppo", meta={"config_hash": "2b"}),
        run(tmp_path, "r", seed=1, meta={"config_hash": "1a"}),
    ]
    assert found(*folders) == [
        "q is the name of runs of 2 configurations, each an arm of its own: q (1a), seeds 0 2; "
        "q (2b), seed 1. They differ in algorithm._target_ (zoo.algorithms.grpo.GRPO, "
        "zoo.algorithms.ppo.PPO)."
    ]
    assert found(folders[0], folders[1], folders[3]) == []


def test_a_copy_of_a_run_is_named_with_its_original(tmp_path: Path):
    first, second = run(tmp_path / "one"), run(tmp_path / "two")
    (text,) = found(first, second)
    assert text.startswith(f"grpo, seed 0: {second} is left out, as {first} is a run of the same")


def test_missing_runs_are_named_with_the_reason(tmp_path: Path):
    texts = found(
        run(tmp_path, "a"),
        run(tmp_path, "b", finished=False),
        run(tmp_path, "c", finished=False, error="Traceback\nRuntimeError: broke\n"),
    )
    assert any("b, seed 0: unfinished at step 20 of 20" in text for text in texts)
    assert any("c, seed 0: failed" in text and "RuntimeError: broke" in text for text in texts)


def test_of_several_processes_one_that_failed_by_itself_gives_the_reason(tmp_path: Path):
    folder = run(tmp_path, finished=False, error=f"RuntimeError: gloo\n{PEER_GONE}, …\n")
    assert PEER_GONE in found(folder)[0]
    (folder / "error.rank1.txt").write_text("Traceback\nRewardError: mine raised KeyError\n")
    assert "(RewardError: mine raised KeyError)" in found(folder)[0]
    (folder / "error.txt").write_text("ConfigError: a later attempt\n")  # process 1 did not begin
    assert "(ConfigError: a later attempt)" in found(folder)[0]


def test_records_that_were_cut_after_the_end_are_named(tmp_path: Path):
    lines = [guard(0, 3.0), guard(20, 3.1)]
    folder = run(tmp_path, evaluations=lines, summary={"final": {"guard": {"step": 20}}})
    assert found(folder) == []
    for name, said in {
        "metrics.jsonl": "grpo, seed 0: metrics.jsonl ends at step 19 of 20: the file was cut",
        "evals.jsonl": "grpo, seed 0: evals.jsonl lacks the evaluation of guard at step 20: the",
    }.items():
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-9])  # in the middle of the last line
        (text,) = found(folder)
        assert text.startswith(said)
        (folder / name).write_bytes(whole)


@pytest.mark.parametrize("there", [False, True])
def test_a_trained_run_without_metrics_is_named_and_an_untrained_one_is_not(
    there: bool, tmp_path: Path
):
    start = write_run(tmp_path, "none", steps=0, evaluations=[evaluation(0, RIGHT, [1] * 20)])
    folder = run(tmp_path)
    for path in (start / "metrics.jsonl", folder / "metrics.jsonl"):
        path.write_text("") if there else path.unlink()
    assert found(start) == []
    (text,) = found(folder)
    assert text.startswith("grpo, seed 0: metrics.jsonl is empty or gone") and str(folder) in text


# Four problems sampled twice, four right of eight; two right greedily. One of two samples is right
# with 1/2 (two problems) or 1 (one problem): pass@1 = 4/8, and pass@2 = 3/4.
TRUE: dict[str, Any] = {
    **evaluation(20, [[1, 0], [0, 1], [1, 1], [0, 0]], [1, 0, 1, 0]),
    "pass@k": {"1": 0.5, "2": 0.75},
}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"outcomes": [[1, 0], [0, 1], [1, 1], [0, 1]]}, "accuracy is 0.5, and its outcomes give"),
        ({"greedy_outcomes": [1, 1, 1, 0]}, "greedy is 0.5, and its outcomes give 0.75"),
        # as many right ones, on other problems
        ({"outcomes": [[1, 0], [0, 1], [1, 0], [0, 1]]}, "pass@2 is 0.75, and its outcomes give 1"),
        ({"accuracy": 0.625}, "accuracy is 0.625, and its outcomes give 0.5"),
        ({"accuracy": None}, "accuracy is None, and its outcomes give 0.5"),
        # older records: an abstention was null, and left out of the mean: 4 of 7
        ({"outcomes": [[1, 0], [0, 1], [1, 1], [None, 0]], "accuracy": 4 / 7}, ""),
        ({"outcomes": [[1, 0], [0, 1], [1, 1], [None, 1]]}, "accuracy is 0.5, and its outcomes"),
        # preferences: a mean over prompts of means over their pairs, (1/2 + 1)/2
        (
            {
                "outcomes": [[1, 0], [1]],
                "accuracy": 0.75,
                "problem_ids": ["p0", "p1"],
                "greedy_outcomes": None,
                "greedy": None,
                "pass@k": None,
            },
            "",
        ),
        ({"outcomes": [[], [], [], []], "accuracy": None, "pass@k": {}}, ""),  # none was scored
    ],
)
def test_an_evaluation_that_its_own_outcomes_do_not_give_is_named(
    changed: dict[str, Any], said: str, tmp_path: Path
):
    texts = found(run(tmp_path, evaluations=[TRUE | changed]))
    if not said:
        assert texts == []
    else:
        assert texts[0].startswith(f"grpo, seed 0: evals.jsonl, heldout at step 20: {said}")
        assert str(tmp_path / "exp" / "grpo" / "seed_0") in texts[0]


def test_evaluations_of_another_run_than_the_summary_are_named(tmp_path: Path):
    final = {key: TRUE[key] for key in ("step", "accuracy", "greedy", "n_problems", "samples")}
    folder = run(
        tmp_path,
        evaluations=[TRUE, guard(20, 3.0)],
        summary={"final": {"heldout": final, "guard": {"step": 20, "perplexity": 3.0}}},
    )
    assert found(folder) == []
    for line, what in (
        (evaluation(20, [[1, 0], [0, 1]], [1, 0]), "heldout .*n_problems 2, there 4"),
        ({**TRUE, "step": 40}, "heldout .*step 40, there 20"),
        (evaluation(20, [[1, 1]] * 4, [1, 0, 1, 0]), "heldout .*accuracy 1, there 0.5"),
        (guard(20, 3.5), "guard .*perplexity 3.5, there 3"),
    ):
        others = [one for one in (TRUE, guard(20, 3.0)) if one["set"] != line["set"]]
        write_lines(folder / "evals.jsonl", [*others, line])
        (text,) = found(folder)
        assert re.match(rf"grpo, seed 0: the last evaluation of {what}", text), text
        assert str(folder) in text


ENDS: dict[str, Any] = {
    "first": {"guard": {"step": 0, "perplexity": 3.5}},
    "final": {"guard": {"step": 20, "perplexity": 3.0}},
}
ONCE: dict[str, Any] = {"step": 20, "perplexity": 3.0}


@pytest.mark.parametrize(
    ("lines", "summary", "said"),
    [
        ([guard(0, 3.5), guard(10, 9.0), guard(20, 3.0)], ENDS, ""),
        ([guard(0, 3.25), guard(20, 3.0)], ENDS, "the first .*guard .*perplexity 3.25, there 3.5"),
        ([guard(-1, 3.5), guard(20, 3.0)], ENDS, "the first .*step -1, there 0"),
        ([guard(10, 9.0), guard(20, 3.0)], ENDS, "evals.jsonl lacks .*guard at step 0: the file"),
        ([guard(20, 3.0)], ENDS, "evals.jsonl lacks the evaluation of guard at step 0: the file"),
        # evaluated at the end alone (evaluate.first=false), and by an older version
        ([guard(20, 3.0)], {"first": {"guard": ONCE}, "final": {"guard": ONCE}}, ""),
        ([guard(20, 3.5)], {"first": {"guard": ONCE}, "final": {"guard": ONCE}}, "the last .*3.5"),
        (
            [guard(0, 3.5), guard(20, 3.0)],
            {"first": {"guard": ONCE}, "final": {"guard": ONCE}},
            "the first .*step 0, there 20",
        ),
        ([guard(0, 3.25), guard(20, 3.0)], {"final": {"guard": ONCE}}, ""),
    ],
)
def test_first_evaluations_of_another_run_than_the_summary_are_named(
    lines: list[dict[str, Any]], summary: dict[str, Any], said: str, tmp_path: Path
):
    texts = found(run(tmp_path, evaluations=lines, summary=summary))
    assert len(texts) == bool(said)
    assert not said or re.match(f"grpo, seed 0: {said}", texts[0]), texts


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (range(1, 21), ""),
        ([*range(1, 8), *range(10, 21)], "lacks step 8 and 1 more: the file was altered"),
        ([*range(1, 21), 20], "has more than once step 20: the file was altered"),
        ([*range(1, 21), 0], "has, of a run of 20 steps, step 0: the file was altered"),
        ([*range(1, 24)], "has, of a run of 20 steps, step 21 and 2 more: the file was"),
        ([*range(1, 20)], "ends at step 19 of 20: the file was cut"),
        ([*range(1, 20), 30], "ends at step 19 of 20: the file was cut"),
    ],
)
def test_steps_that_are_not_those_of_the_run_are_named(steps: list[int], said: str, tmp_path: Path):
    folder = run(tmp_path, summary={"reward": 0.5})
    write_lines(folder / "metrics.jsonl", [{"step": s, "reward/total": 0.5} for s in steps])
    texts = found(folder)
    assert bool(texts) == bool(said)
    assert not said or texts[0].startswith(f"grpo, seed 0: metrics.jsonl {said}")


# The last ten of twenty rewards, 11 … 20, have the mean 15.5.
RISING = [float(step) for step in range(1, 21)]


@pytest.mark.parametrize(
    ("rewards", "reward", "said"),
    [
        (RISING, 15.5, ""),
        (RISING, 15.25, "15.5, there 15.25"),
        (RISING, None, "15.5, there None"),
        ([*RISING[:-1], 10.0], 15.5, "14.5, there 15.5"),
        ([None] * 20, None, ""),  # an algorithm without rewards
        ([None] * 20, 15.5, "None, there 15.5"),
        ([5.0, *RISING[10:], *[None] * 9], 15.5, ""),  # steps that nothing was scored in
        ([0.1] * 20, sum([0.1] * 10) / 10, ""),  # not quite 0.1
    ],
)
def test_a_reward_that_the_metrics_do_not_give_is_named(
    rewards: list[Any], reward: float | None, said: str, tmp_path: Path
):
    texts = found(run(tmp_path, rewards=rewards, summary={"reward": reward}))
    assert len(texts) == bool(said)
    assert not said or texts[0].startswith(
        f"grpo, seed 0: the reward of the last steps in metrics.jsonl is not that of summary.json "
        f"({said}): one of"
    )


def test_unequal_budgets_are_named(tmp_path: Path):
    equal = found(
        run(tmp_path, "a", summary={"completions": 100}),
        run(tmp_path, "b", summary={"completions": 109}),  # within 10 %
    )
    assert equal == []
    unequal = found(
        run(tmp_path, "c", summary={"completions": 100}),
        run(tmp_path, "d", summary={"completions": 111}),
    )
    assert any("unequal numbers of completions: c 100, d 111" in text for text in unequal)


def test_commits_machines_and_uncommitted_changes_are_named(tmp_path: Path):
    texts = found(
        run(tmp_path, "a", meta={"commit": "a" * 40, "dirty": True}),
        run(tmp_path, "b", meta={"commit": "b" * 40, "machine": {"cpu": "another"}}),
    )
    assert any("2 commits: aaaaaaaaaa, bbbbbbbbbb" in text for text in texts)
    assert any("uncommitted changes" in text for text in texts)
    assert any("different machines" in text for text in texts)


def test_a_process_of_several_is_no_other_machine(tmp_path: Path):
    texts = found(
        run(tmp_path, "a", meta={"device": "cpu", "n_processes": 1}),
        run(tmp_path, "b", meta={"device": "cpu:0", "n_processes": 2}),
    )
    assert texts == ["The runs had 1 and 2 processes: their seconds and memory do not compare."]


@pytest.mark.parametrize(
    ("hashes", "sides"),  # of one file in the seeds of two arms
    [
        ({"a": ["1", "1"], "b": ["1", "1"]}, None),
        ({"a": ["1", "2"], "b": ["1", "1"]}, "a, seed 0; b | a, seed 1"),
        ({"a": ["1", "1"], "b": ["2", "2"]}, "a | b"),
        ({"a": ["1", "1"], "b": []}, None),  # the other arm reads no such file
        ({"a": ["1", "2", "2"]}, "a, seed 0 | a, seeds 1 2"),
    ],
)
@pytest.mark.parametrize("kind", ["files", "code"])
def test_what_changed_between_runs_is_named(
    kind: str, hashes: dict[str, list[str]], sides: str | None, tmp_path: Path
):
    folders = []
    for name, of_seeds in hashes.items():
        for seed, value in enumerate(of_seeds or ["", ""]):
            known = {"files": {}, "code": {}, kind: {"train.groups: x": value} if value else {}}
            folders.append(run(tmp_path, name, seed=seed, inputs=known))
    texts = found(*folders)
    named = {"files": "train.groups=16: x", "code": "train.groups: x"}[kind]
    assert texts == (
        [
            f"{named} changed between the runs ({sides}): differences, and the spread over seeds, "
            "may come from that."
        ]
        if sides
        else []
    )


def test_runs_that_were_judged_on_other_problems_are_named(tmp_path: Path):
    def judged(name: str, content: str, guard_content: str) -> Path:
        lines = [
            evaluation(20, [[1], [1]], [1, 1], problem_hashes=["0", content], prompts_hash=content),
            evaluation(20, [[1], [1]], [1, 1], name="independent", problem_hashes=["0", content]),
            {**guard(20, 3.0), "content_hash": guard_content},
        ]
        return run(tmp_path, name, evaluations=lines)

    a, b, c = judged("a", "1", "x"), judged("b", "2", "x"), judged("c", "1", "y")
    assert found(a) == []
    assert found(a, b, c) == [
        "The runs were not judged on the same heldout, independent (a; c | b): their rows do not "
        "compare; differences are over the problems that both had.",
        "The runs were not judged on the same guard (a; b | c): their rows do not compare; "
        "differences are over the problems that both had.",
    ]


@pytest.mark.parametrize("key", ["max_new_tokens", "prompts_hash"])
def test_runs_that_were_judged_in_another_way_are_named(key: str, tmp_path: Path):
    def judged(name: str, **changes: Any) -> Path:
        same = {"problem_hashes": ["0", "1"], "prompts_hash": "x", "max_new_tokens": 8}
        return run(
            tmp_path, name, evaluations=[evaluation(20, [[1], [1]], [1, 1], **same | changes)]
        )

    a, b, c = judged("a"), judged("b"), judged("c", **{key: 9})
    older = judged("d", prompts_hash=None, max_new_tokens=7)
    assert found(a, b, older) == []
    assert found(a, b, c) == [
        "heldout reached the runs in other tokens (a template or tokenizer) or under another "
        "rollout.max_new_tokens (a; b | c): that alone moves scores."
    ]


@pytest.mark.parametrize(
    ("idle", "refused", "told"),
    [(4, 0, True), (3, 0, True), (2, 0, False), (2, 1, True), (1, 3, True), (0, 4, True)],
)
def test_updates_that_moved_nothing_are_named_where_they_and_refused_ones_are_most(
    idle: int, refused: int, told: bool, tmp_path: Path
):
    line = evaluation(20, RIGHT, [1] * 20)
    counts = {"updates": 4, "idle_updates": idle, "skipped_updates": refused}
    texts = found(run(tmp_path, evaluations=[line], summary=counts))
    parts = f"({idle} as no group carried a signal, {refused} refused)"
    said = f"{idle + refused} of 4 updates moved no weight {parts}"
    assert any(said in text for text in texts) is told
    assert any(f"{refused} updates were refused" in text for text in texts) is bool(refused)


def test_truncation_and_refused_updates_are_named(tmp_path: Path):
    line = evaluation(20, RIGHT, [1] * 20, truncated=0.6)
    texts = found(run(tmp_path, evaluations=[line], summary={"skipped_updates": 2}))
    assert any("60 % of the held-out completions were cut off" in text for text in texts)
    assert any("2 updates were refused" in text for text in texts)
