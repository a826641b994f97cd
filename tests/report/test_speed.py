"""The speed benchmark's bars from records, by hand, and the sides' settings."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.speed import contests
from benchmarks.speed.__main__ import _held_before, main
from benchmarks.speed.contests import CONTESTS, Contender, Place, _contenders, _spec, _tried
from benchmarks.speed.protocol import score
from benchmarks.speed.records import check
from benchmarks.speed.table import BARS, agreement, judge, table, write
from benchmarks.speed.trl_side import Rewards
from benchmarks.speed.workloads import W1, W2, Workload, prepare
from benchmarks.speed.zoo_side import overrides
from zoo.data.tokenize import decode_completion
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
        [1, 2, 9, 2, 2], generate_seconds=1.0, train_seconds=2.0, tokens_generated=100, reward=0.4,
        reference_seconds=1.0, loss=0.7, grad_norm=1.0,
    )  # fmt: skip
    theirs = steps(
        [6, 5, 4, 5, 5], generate_seconds=4.0, train_seconds=3.0, tokens_generated=100, reward=0.41,
        generate_floor=0.5, train_floor=1.6, loss=0.7, grad_norm=1.03,
    )  # fmt: skip
    theirs["steps"][0]["peak"] = 200
    peers: dict[str, Any] = {
        peer: {**theirs, "precision": peer[4:] or "bf16", "micro_batch": 8}
        for peer in ("TRL", "TRL bf16", "TRL amp")
    }
    names = ("plain", "zoo G=16", "zoo G=4", "zoo C=192", "zoo C=96")
    found = {
        "contest": name,
        "load": 0.3,
        "judged": True,
        "command": "python -m benchmarks.speed",
        "commit": "abc",
        "dirty": False,
        "machine": "x",
        "versions": "torch 2",
        "search": [
            {
                "name": f"TRL {precision} mb={size}",
                "precision": precision,
                "micro_batch": size,
                "seconds": seconds,
            }
            for precision, size, seconds in (
                ("bf16", 8, 1.0),
                ("bf16", 32, 3.0),
                ("amp", 8, 2.0),
                ("amp", 32, None),
            )
        ],
        "contenders": {"zoo": ours, **peers, **dict.fromkeys(names, theirs)},
        "parity": {w: {"absolute": 2e-5, "relative": 3e-6} for w in ("W1", "W2")},
        "vocabulary": {"extra_bytes": 10, "extra_bytes_of_twice_the_tokens": 10},
    }
    if name == "checks":
        del found["contenders"]
    return json.loads(json.dumps(found))  # sides of their own


def test_bars_by_hand() -> None:
    names = {bar.contest for bar in BARS}
    found = {(b.bar, b.workload): b for b in judge({name: record(name) for name in names})}
    assert len(found) == len(BARS)
    step = found["GRPO step against the best TRL", "W1 fixed"]  # medians 5 and 2
    assert step.ratio == 2.5 and step.met and step.samples == 5
    assert found["GRPO step against TRL pure bf16", "W2 fixed"].ratio == 2.5
    assert not found["GRPO step against TRL pure bf16", "W2 fixed"].met  # 2.7
    dpo = found["DPO step against TRL, both with the reference's pass", "W1 natural"]
    assert dpo.ratio == pytest.approx(5 / 3)  # the median of 2, 3, 10, 3, 3
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
    options = argparse.Namespace(no_peers=False, anyway=False, steps=5)
    lax = argparse.Namespace(no_peers=True, anyway=True, steps=5)
    borrowed = whole | {"search_of": "grpo-W2-fixed"}  # another algorithm's
    others = whole | {"others": 0.9}
    untold, slower = record("grpo-W1-fixed"), record("grpo-W1-fixed")
    del untold["contenders"]["TRL"]["steps"][2]["tokens_generated"]
    slower["contenders"]["TRL"]["precision"] = "amp"
    held = [(one, False) for one in (alone, busy, others, borrowed, untold, slower)]
    for found, wanted in ((whole, True), *held):
        assert _held_before("grpo-W1-fixed", {"grpo-W1-fixed": found}, options) == wanted
        assert _held_before("grpo-W1-fixed", {"grpo-W1-fixed": found}, lax)
    assert not _held_before("grpo-W1-fixed", {}, lax)
    more = argparse.Namespace(no_peers=False, anyway=False, steps=6)
    assert not _held_before("grpo-W1-fixed", {"grpo-W1-fixed": whole}, more)
    whole["contenders"]["zoo"]["steps"].append(whole["contenders"]["zoo"]["steps"][0])
    assert not _held_before("grpo-W1-fixed", {"grpo-W1-fixed": whole}, options)


def each(record: dict[str, Any], side: str, **values: Any) -> None:
    for step in record["contenders"][side]["steps"]:
        step.update(values)


OTHER_WORK = "not judged: other work"
HOW_IT_IS_OPEN: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "others": ("grpo-W1-fixed", lambda r: r.update(others=0.9), OTHER_WORK),
    "few": (
        "grpo-W1-fixed",
        lambda r: [side["steps"].pop() for side in r["contenders"].values()],
        "not judged: 4 steps",
    ),
    "uneven": (
        "grpo-W1-fixed",
        lambda r: r["contenders"]["TRL"]["steps"].pop(),
        "not judged: zoo 5 steps, TRL 4 steps",
    ),
    "slower setting": (
        "grpo-W1-fixed",
        lambda r: r["contenders"]["TRL"].update(micro_batch=32),
        "not judged: TRL ran at bf16 mb=32, the best tried is TRL bf16 mb=8",
    ),
    "no search": ("grpo-W1-fixed", lambda r: r.update(search=[]), "not judged: no search of"),
    "no tokens": (
        "ppo-W1-fixed",
        lambda r: r["contenders"]["TRL"]["steps"][1].pop("tokens_generated"),
        "the same work was not shown: no tokens_generated of zoo or TRL",
    ),
    "no reward": (
        "ppo-W1-fixed",
        lambda r: each(r, "zoo", reward=None),
        "the same work was not shown: no reward",
    ),
    "no loss": (
        "dpo-W1-natural",
        lambda r: each(r, "TRL", loss=None),
        "the same work was not shown: no loss",
    ),
    **{
        f"{side}: {key} {value}": (
            contest,
            lambda r, side=side, key=key, value=value: each(r, side, **{key: value}),
            "not measured: a side or a figure",
        )
        for contest, side, key, value in (
            ("grpo-W1-fixed", "zoo", "generate_seconds", 0),
            ("grpo-W1-fixed", "zoo", "generate_seconds", None),
            ("grpo-W1-fixed", "plain", "tokens_generated", None),
            ("grpo-W2-fixed", "plain", "train_floor", None),
            ("grpo-W2-fixed", "zoo", "train_seconds", None),
            ("dpo-W1-natural", "zoo", "reference_seconds", None),
        )
    },
}


@pytest.mark.parametrize("case", HOW_IT_IS_OPEN)
def test_what_is_not_comparable_is_not_met(case: str, tmp_path: Path) -> None:
    name, change, why = HOW_IT_IS_OPEN[case]
    found = record(name)
    assert not any(bar.open for bar in judge({name: found}))
    change(found)
    (bar,) = [bar for bar in judge({name: found}) if bar.open.startswith(why)][:1]
    assert not bar.met
    check(name, found)  # a record that may be read, and so is written out too
    assert bar in write({name: found}, ORIGIN, tmp_path)


@pytest.mark.parametrize(
    ("contest", "key", "near", "far"),
    [
        ("ppo-W1-fixed", "tokens_generated", 99.1, 98.9),  # 1 % of the larger, 100
        ("ppo-W1-natural", "tokens_generated", 85.1, 84.9),  # 15 %
        # 4 · 0.29 · √(2 / (5 · 128)) = 0.0648, with 32 rows 0.1297; TRL's mean is 0.41
        ("ppo-W1-fixed", "reward", 0.41 + 0.064, 0.41 + 0.066),
        ("ppo-W2-fixed", "reward", 0.41 - 0.129, 0.41 - 0.131),
        ("dpo-W2-natural", "loss", 0.7 * 0.981, 0.7 * 0.979),  # 2 % of TRL's, the larger
        ("dpo-W2-natural", "loss", 0.7 / 0.981, 0.7 / 0.979),  # of zoo's
        ("dpo-W2-natural-cached", "loss", 0.7 / 0.961, 0.7 / 0.959),  # 4 %
        ("sft-W2-natural", "grad_norm", 1.03 / 0.951, 1.03 / 0.949),  # 5 %
    ],
)
def test_how_far_the_same_work_may_differ(contest: str, key: str, near: float, far: float) -> None:
    for value, wanted in ((near, True), (far, False)):
        found = record(contest)
        each(found, "zoo", **{key: value})
        word = {"tokens_generated": "tokens a step", "reward": "mean reward"}.get(key, key)
        compared = [ok for _, what, ok in agreement({contest: found}) if word in what]
        assert compared and set(compared) == {wanted}


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
    assert dpo["TRL: grad_norm 1.0000 and 1.0300"]
    first = record("dpo-W2-natural")  # zoo's loss before its first update, whatever came after
    first["contenders"]["zoo"]["first"] = {"loss": 0.69, "grad_norm": 1.3}
    first["contenders"]["zoo"]["steps"][0] |= {"loss": 0.1, "grad_norm": 9.0}
    dpo = {what: ok for _, what, ok in agreement({"dpo-W2-natural": first})}
    assert dpo["TRL: loss 0.6900 and 0.7000"] and not dpo["TRL: grad_norm 1.3000 and 1.0300"]
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
    assert len((tmp_path / "speed.csv").read_text().splitlines()) == 1 + (len(records) - 1) * 9 * 5
    assert "different machines" not in page
    each(records["ppo-W1-fixed"], "TRL", tokens_decoded=128)
    for key, value in (("machine", "y"), ("command", "python -m benchmarks.speed --threads 1")):
        mixed = {**records, "checks": records["checks"] | {key: value}}
        write(mixed, ORIGIN, tmp_path)
        page = (tmp_path / "speed.md").read_text()
        assert "of different machines or numbers of threads" in page
    assert "ppo-W1-fixed, TRL: 100 and 100 tokens a step, TRL decoded 128\n" in page


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


def damage(place: str, value: Any) -> str:
    """A record of grpo-W1-fixed with another value at a place like contenders.zoo.steps.0.seconds;
    None removes it."""
    found = record("grpo-W1-fixed")
    *way, last = place.split(".")
    at: Any = found
    for key in way:
        at = at[int(key) if isinstance(at, list) else key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return json.dumps(found)


STEP = "contenders.TRL.steps.4"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"contest": "checks", "par', "Unterminated string"),
        ("[]", "the whole is [], not an object"),
        ("null", "the whole is None, not an object"),
        (None, "Is a directory"),
        (damage("contest", "grpo-W1-natural"), "contest is 'grpo-W1-natural', not 'grpo-W1-fixed'"),
        (damage("judged", "no"), "judged is 'no', not true or false"),
        (damage("commit", None), "commit is None, not a text"),
        (damage("contenders", None), "contenders is None, not an object"),
        (damage("contenders", []), "contenders is [], not an object"),
        (damage("contenders", {}), "contenders is empty"),
        (damage("contenders.TRL.steps", []), "contenders.TRL.steps is empty"),
        (damage("contenders.TRL.precision", None), "contenders.TRL.precision is None, not a text"),
        (damage(f"{STEP}.seconds", None), "contenders.TRL.steps[4].seconds is None, not a number"),
        (damage(f"{STEP}.seconds", "3"), "contenders.TRL.steps[4].seconds is '3', not a number"),
        (damage(f"{STEP}.seconds", True), "contenders.TRL.steps[4].seconds is True, not a number"),
        (damage(f"{STEP}.seconds", 0), "seconds is 0, not a finite number above 0"),
        (damage(f"{STEP}.seconds", float("nan")), "seconds is nan, not a finite number above 0"),
        (damage(f"{STEP}.peak", 0), "peak is 0, not a finite number above 0"),
        (damage(f"{STEP}.train_floor", -1), "train_floor is -1, not a finite number above 0"),
        (damage(f"{STEP}.tokens_generated", -1), "is -1, not a finite number of at least 0"),
        (damage(f"{STEP}.loss", "x"), "contenders.TRL.steps[4].loss is 'x', not a number"),
        (damage("search", None), "search is None, not a list"),
        (damage("search.0.seconds", None), "search[0].seconds is missing"),
        (damage("contenders.zoo.precision", "amp"), "zoo.micro_batch is None, not a number"),
        (damage("search.0.seconds", "x"), "search[0].seconds is 'x', not a number"),
        (damage("others", -0.1), "others is -0.1, not a finite number of at least 0"),
    ],
    ids=lambda value: "" if value is None or "{" in value else value[:60],
)
def test_a_damaged_record_is_named_before_anything_starts(
    text: str | None, said: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "records").mkdir()
    path = tmp_path / "records" / "grpo-W1-fixed.json"
    path.mkdir() if text is None else path.write_text(text)
    assert main(["--no-peers", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert f"{path} is no record (" in told and said in told
    assert "without --only or with --only grpo-W1-fixed, makes it again" in told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "Expecting value"),
        ("{}", "search is {}, not a list"),
        ("[1]", "search[0] is 1, not an object"),
        ('[{"name": "a", "precision": "amp", "micro_batch": "8"}]', "[0].micro_batch is '8'"),
        ('[{"name": "a", "precision": "amp", "micro_batch": 8}]', "[0].seconds is missing"),
    ],
)
def test_a_damaged_search_is_named_before_anything_starts(
    text: str, said: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "sft-W1-natural.search.json").write_text(text)
    assert main(["--no-peers", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "sft-W1-natural.search.json is no record (" in told and said in told


@pytest.mark.parametrize("pads_with_end", [False, True])
def test_trl_ppo_is_rewarded_for_the_texts_zoo_reads(pads_with_end: bool) -> None:
    tokenizer = arithmetic_tokenizer()
    if pads_with_end:
        tokenizer.pad_token = tokenizer.eos_token
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    assert isinstance(pad, int) and isinstance(end, int) and (pad == end) == pads_with_end
    words = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids][:9]
    completions = [
        [*words[:2], end, pad, pad, pad],  # cut at its end, as at natural lengths
        [*words[2:5], end, *words[:2]],  # sampled on past its end, as at fixed ones
        words[:6],
        [words[7], pad, words[8], *words[:3]],  # a padding token that was sampled
    ]
    prompts = [[pad, pad, words[0]], [words[1], words[2], words[3]], [pad, end, words[4]]]
    queries = torch.tensor([*prompts, prompts[1]])
    whole = torch.cat([queries, torch.tensor(completions)], 1)
    model = Rewards(tokenizer, 3)
    for _ in range(2):
        mask = whole != pad
        output = getattr(model, model.base_model_prefix)(
            input_ids=whole.masked_fill(~mask, 0), attention_mask=mask, position_ids=None
        )
        rewards = model.score(output.hidden_states[-1])
        assert rewards.shape == (4, 9, 1)
        texts = [decode_completion(tokenizer, ids, [end]) for ids in completions]
        assert len(set(score([], texts))) > 1
        for column in range(9):
            assert rewards[:, column, 0].tolist() == score([], texts)
        assert model.counted() == {"tokens_generated": 3 + 6 + 6 + 6, "tokens_decoded": 24}


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os.kill(os.getpid(), 9)", "ended by signal 9: RuntimeError: no room"),
        ("sys.exit(3)", "exit status 3: RuntimeError: no room"),
    ],
)
def test_a_setting_that_fails_says_how(
    end: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ["RuntimeError: no room", "by default", "===training policy==="]
    lines = ["import os, sys", f"print({chr(10).join(said)!r}, file=sys.stderr, flush=True)", end]
    (tmp_path / "side.py").write_text("\n".join(lines))
    monkeypatch.setattr(contests, "TRL_SIDE", tmp_path / "side.py")
    place = Place(tmp_path, Path(sys.executable), tmp_path, 1)
    contender = Contender("TRL amp mb=8", "trl", {"precision": "amp", "micro_batch": 8})
    tried = _tried(contender, CONTESTS[0], place)
    assert tried["seconds"] is None and tried["error"] == told
    assert contests.reason("exit status 3\n===training policy===") == "exit status 3"
