"""The speed benchmark's bars from records, by hand, and the sides' settings."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speed.__main__ import _held_before, main
from benchmarks.speed.contests import CONTESTS, Contender, Place, _contenders, _spec
from benchmarks.speed.table import BARS, agreement, judge, table, write
from benchmarks.speed.workloads import W1, W2, Workload, prepare
from benchmarks.speed.zoo_side import overrides
from zoo.data.tokenizer import arithmetic_tokenizer

SIZES = ["zoo G=4", "zoo G=16", "zoo C=96", "zoo C=192"]
PLACE = Place(Path("work"), Path("peer/python"), Path("older"), 2)
ORIGIN: dict[str, Any] = {
    "commit": "abc", "dirty": False, "versions": ["torch 2"], "peers": "1", "machines": ["x"],
}  # fmt: skip


def steps(seconds: list[float], **more: Any) -> dict[str, Any]:
    return {"steps": [{"seconds": s, "peak": 100, **more} for s in seconds]}


def record(name: str) -> dict[str, Any]:
    ours = steps(
        [1, 2, 9], generate_seconds=1.0, train_seconds=2.0, tokens_generated=100, reward=0.4,
        reference_seconds=1.0, loss=0.7, grad_norm=1.0,
    )  # fmt: skip
    theirs = steps(
        [6, 5, 4], generate_seconds=4.0, train_seconds=3.0, tokens_generated=100, reward=0.41,
        generate_floor=0.5, train_floor=1.6, loss=0.7, grad_norm=1.3,
    )  # fmt: skip
    theirs["steps"][0]["peak"] = 200
    names = ("TRL", "TRL bf16", "TRL amp", "plain", "zoo G=16", "zoo G=4", "zoo C=192", "zoo C=96")
    found = {
        "contest": name,
        "load": 0.3,
        "judged": True,
        "command": "python -m benchmarks.speed",
        "commit": "abc",
        "dirty": False,
        "machine": "x",
        "versions": "torch 2",
        "search": [],
        "contenders": {"zoo": ours, **dict.fromkeys(names, theirs)},
        "parity": {w: {"absolute": 2e-5, "relative": 3e-6} for w in ("W1", "W2")},
        "vocabulary": {"extra_bytes": 10, "extra_bytes_of_twice_the_tokens": 10},
    }
    return found


def test_bars_by_hand() -> None:
    names = {bar.contest for bar in BARS}
    found = {(b.bar, b.workload): b for b in judge({name: record(name) for name in names})}
    assert len(found) == len(BARS)
    step = found["GRPO step against the best TRL", "W1 fixed"]  # medians 5 and 2
    assert step.ratio == 2.5 and step.met and step.samples == 3
    assert found["GRPO step against TRL pure bf16", "W2 fixed"].ratio == 2.5
    assert not found["GRPO step against TRL pure bf16", "W2 fixed"].met  # 2.7
    dpo = found["DPO step against TRL, both with the reference's pass", "W1 natural"]
    assert dpo.ratio == pytest.approx(5 / 3)  # the median of 2, 3, 10
    tokens = found["tokens a second against generate (bf16)", "W1 fixed"]
    assert tokens.ratio == 4.0 and tokens.met
    floor = found["generation over the floor of matrix products", "W2 fixed"]
    assert floor.ratio == 2.0 and floor.met and not floor.at_least
    assert found["training over the floor of matrix products", "W2 fixed"].ratio == 1.25
    assert found["peak RSS of GRPO against TRL amp", "W2 fixed"].ratio == 0.5
    rollout = found["step per rollout, 4 prompts with G = 16 against G = 4", "W2 fixed"]
    assert rollout.ratio == 0.25 and not rollout.at_least  # as long a step, four times the rollouts
    assert not found["log-probs against transformers in float32, nats", "W1"].met
    assert found["log-probs against transformers in float32, nats", "W2"].met


def test_a_bar_that_cannot_be_judged_says_why_and_is_not_met() -> None:
    alone = record("grpo-W2-fixed")
    for name in [n for n in alone["contenders"] if n.startswith("TRL")]:
        del alone["contenders"][name]
    bars = {bar.bar: bar for bar in judge({"grpo-W2-fixed": alone})}
    missing = bars["GRPO step against TRL amp"]
    assert missing.ratio is None and not missing.met and missing.open.startswith("not measured")
    assert bars["tokens a second against generate (bf16)"].met
    assert "| – | ≥ 3.30 | ≥ 5.00 | not measured: a side" in table([missing])
    busy = record("grpo-W1-fixed") | {"judged": False}
    (step, tokens) = judge({"grpo-W1-fixed": busy})
    assert step.ratio == 2.5 and tokens.ratio == 4.0
    assert not step.met and not tokens.met and step.open.startswith("not judged: other work")
    other = record("grpo-W1-fixed")
    for made in other["contenders"]["zoo"]["steps"]:
        made["reward"] = 0.9
    assert {bar.open for bar in judge({"grpo-W1-fixed": other})} == {"not judged: the sides differ"}


def test_a_record_that_lacks_a_side_or_was_disturbed_is_held_again() -> None:
    whole, alone = record("grpo-W1-fixed"), record("grpo-W1-fixed")
    del alone["contenders"]["TRL"]
    busy = whole | {"judged": False}
    options = argparse.Namespace(no_peers=False, anyway=False)
    lax = argparse.Namespace(no_peers=True, anyway=True)
    borrowed = whole | {"search_of": "grpo-W2-fixed"}  # another algorithm's
    for found, wanted in ((whole, True), (alone, False), (busy, False), (borrowed, False)):
        assert _held_before("grpo-W1-fixed", {"grpo-W1-fixed": found}, options) == wanted
        assert _held_before("grpo-W1-fixed", {"grpo-W1-fixed": found}, lax)
    assert not _held_before("grpo-W1-fixed", {}, lax)


def test_other_problems_or_another_model_make_the_second_workload_anew(tmp_path: Path) -> None:
    row = {"question": "one two three four five", "answer": "six seven"}
    small = Workload("W2", 1, (2, 60), 2, 8, 1, 2, 100)
    for name in ("a", "b"):
        arithmetic_tokenizer().save_pretrained(tmp_path / name)
    file = tmp_path / "rows.jsonl"

    def prepared(model: str, *rows: Any) -> str:
        file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
        place = prepare(small, tmp_path / "at", tmp_path / model, file)
        assert (place / "model").resolve().name == model
        return (place / "examples-natural.jsonl").read_text()

    other = {**row, "answer": "8"}
    first = prepared("a", row, row)
    assert prepared("b", row, row) == first
    assert prepared("b", other, other) != first
    with pytest.raises(ValueError, match=r"rows\.jsonl:2 is no JSON object .*JSONDecodeError"):
        prepared("a", row, "garbage")
    with pytest.raises(ValueError, match=r"rows\.jsonl:1 .*KeyError: 'question'"):
        prepared("a", {"q": 1})
    with pytest.raises(ValueError, match="has 1 problems of 2 to 60 tokens, and 2 are needed"):
        prepared("a", row)
    with pytest.raises(FileNotFoundError, match="zoo fetch smollm2_135m"):
        prepared("c", row)


def test_other_work_is_told_from_the_same_work() -> None:
    dpo = {what: ok for _, what, ok in agreement({"dpo-W1-natural": record("dpo-W1-natural")})}
    assert dpo["TRL: loss 0.7000 and 0.7000"]
    assert not dpo["TRL: grad_norm 1.0000 and 1.3000"]
    first = record("dpo-W2-natural")  # zoo's loss before its first update, whatever came after
    first["contenders"]["zoo"]["first"] = {"loss": 0.69, "grad_norm": 1.3}
    dpo = {what: ok for _, what, ok in agreement({"dpo-W2-natural": first})}
    assert dpo["TRL: loss 0.6900 and 0.7000"] and dpo["TRL: grad_norm 1.3000 and 1.3000"]
    other = record("grpo-W1-fixed")
    for step in other["contenders"]["zoo"]["steps"]:
        step["tokens_generated"] = 60
    grpo = [(what, ok) for _, what, ok in agreement({"grpo-W1-fixed": other})]
    assert ("TRL: 60 and 100 tokens a step", False) in grpo


def test_what_is_written_holds_every_bar_and_no_path(tmp_path: Path) -> None:
    names = {bar.contest for bar in BARS}
    records = {name: record(name) for name in names}
    records["checks"]["command"] = "python -m benchmarks.speed --steps=11"
    write(records, ORIGIN, tmp_path)
    document = json.loads((tmp_path / "speed.json").read_text())
    assert len(document["bars"]) == len(BARS)
    assert {"bar", "workload", "ratio", "must", "aim", "met", "samples", "load"} <= set(
        document["bars"][0]
    )
    page = (tmp_path / "speed.md").read_text()
    assert "GRPO step against TRL amp" in page and "missed" in page
    assert "relative gap 3.0e-06 at most" in page
    assert "`python -m benchmarks.speed`; `python -m benchmarks.speed --steps=11` (checks)" in page
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    assert len((tmp_path / "speed.csv").read_text().splitlines()) == 1 + len(records) * 9 * 3


@pytest.mark.parametrize("contest", CONTESTS, ids=lambda c: c.name)
def test_every_contest_is_a_run_that_zoo_accepts(contest: Any) -> None:
    from zoo.compose import compose

    contender = Contender("zoo", "zoo")
    spec = _spec(contest, contender, PLACE, "out")
    composed = compose(overrides(spec))
    workload = {"W1": W1, "W2": W2}[contest.workload]
    sizes = contest.extra in ("sizes", "rollouts")
    names = [one.name for one in _contenders(contest, [])] if sizes else []
    assert names == {"sizes": SIZES, "rollouts": ["zoo 8 × 4", "zoo 2 × 16"]}.get(contest.extra, [])
    groups = {"dpo": workload.pairs, "sft": workload.examples}
    assert composed.train.groups == groups.get(contest.algorithm, workload.prompts)
    assert composed.algorithm._target_.lower().endswith(contest.algorithm)
    assert composed.train.lr == 1e-6 and composed.model.compute_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("option", "said"),
    [("--steps=0", "'0' is no whole number"), ("--threads=-1", "'-1' is no whole number")],
)
def test_numbers_that_cannot_be_are_refused(option: str, said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([option])
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_a_contest_that_is_none_is_named_with_those_there_are(capsys: Any, tmp_path: Path) -> None:
    assert main(["--only", "grpo-w1-fixed", "--peers", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "no contest 'grpo-w1-fixed': there are checks, grpo-W1-fixed" in told


@pytest.mark.parametrize("text", ['{"contest": "checks", "par', "[]", '{"contest": "checks"}'])
def test_a_damaged_record_is_named_before_anything_starts(
    text: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "checks.json").write_text(text)
    assert main(["--no-peers", "--out", str(tmp_path)]) == 2
    assert "checks.json is no record" in capsys.readouterr().err
