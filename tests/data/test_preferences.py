"""Preferences in the shapes that they are published in: dialogues, labels, arrays, rankings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zoo.algorithms.base import DataKind
from zoo.algorithms.reward_model import ranks_of
from zoo.build import _pair_groups, _ranking_groups
from zoo.config import ConfigError
from zoo.data.jsonl import JSONL
from zoo.data.rows import Kind
from zoo.data.source import DatasetSource, Group
from zoo.data.tokenizer import arithmetic_tokenizer
from zoo.evaluate.preferences import held_out
from zoo.types import Prompt


def data(tmp_path: Path, rows: list[Any], name: str = "rows.jsonl", **settings: Any) -> JSONL:
    file = tmp_path / name
    if name.endswith(".json"):
        file.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return JSONL(path=str(file), **{"kind": Kind.pairs, **settings})


HEAD = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Who?"


def test_dialogues_are_split_before_their_last_reply(tmp_path: Path) -> None:
    rows = [{"chosen": f"{HEAD}\n\nAssistant: Me: one.", "rejected": f"{HEAD}\n\nAssistant:"}]
    (pair,) = data(tmp_path, rows).pairs()
    assert [turn["role"] for turn in pair.prompt.messages] == ["user", "assistant", "user"]
    assert [turn["content"] for turn in pair.prompt.messages] == ["Hi", "Hello.", "Who?"]
    assert (pair.chosen, pair.rejected) == ("Me: one.", "")


def test_dialogues_may_be_turns(tmp_path: Path) -> None:
    user = {"role": "user", "content": "Who?"}
    sides = [[user, {"role": "assistant", "content": text}] for text in ("me", "you")]
    (pair,) = data(tmp_path, [{"chosen": sides[0], "rejected": sides[1]}]).pairs()
    assert pair.prompt.messages == (user,) and (pair.chosen, pair.rejected) == ("me", "you")


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        (f"{HEAD}\n\nAssistant: a", f"x{HEAD} Y\n\nAssistant: b", "differ before their last turn"),
        (f"{HEAD}\n\nAssistant: a", f"{HEAD}\n\nAssistant: b\n\nHuman: c", "must end with a reply"),
        (f"{HEAD}\n\nAssistant: a", "b", "rejected is no dialogue"),
    ],
)
def test_dialogue_that_cannot_be_split_is_named(
    chosen: str, rejected: str, reason: str, tmp_path: Path
) -> None:
    good = {"chosen": f"{HEAD}\n\nAssistant: a", "rejected": f"{HEAD}\n\nAssistant: b"}
    with pytest.raises(ConfigError, match=rf"line 2: [^;]*{reason}"):
        data(tmp_path, [good, {"chosen": chosen, "rejected": rejected}]).pairs()


def test_missing_prompt_of_plain_pairs_is_still_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no column 'prompt'"):
        data(tmp_path, [{"question": "q", "chosen": "a", "rejected": "b"}]).pairs()


def test_label_says_which_of_two_is_preferred(tmp_path: Path) -> None:
    columns = {"prompt": "q", "chosen": "a", "rejected": "b", "preferred": "label"}
    rows = [{"q": "?", "a": "one", "b": "two", "label": which} for which in (1, 2)]
    pairs = data(tmp_path, rows, columns=columns).pairs()
    assert [(p.chosen, p.rejected) for p in pairs] == [("one", "two"), ("two", "one")]
    with pytest.raises(ConfigError, match="line 3: preferred must be 1 or 2, got 0"):
        data(tmp_path, [*rows, {**rows[0], "label": 0}], columns=columns).pairs()
    row = {"prompt": "?", "chosen": "one", "rejected": "two"}  # its own name needs no mapping
    (pair, plain) = data(tmp_path, [{**row, "preferred": 2}, row]).pairs()
    assert [(p.chosen, p.rejected) for p in (pair, plain)] == [("two", "one"), ("one", "two")]
    with pytest.raises(ConfigError, match="line 2: preferred must be 1 or 2, got None"):
        data(tmp_path, [row, {**row, "preferred": None}]).pairs()


TURNS = [{"role": "user", "content": "Who?"}]


@pytest.mark.parametrize("prompt", ["Who?", TURNS])
def test_replies_may_be_whole_dialogues_that_begin_with_the_prompt(
    prompt: Any, tmp_path: Path
) -> None:
    sides = {
        name: [*TURNS, {"role": "assistant", "content": text}]
        for name, text in (("chosen", "me"), ("rejected", ""))
    }
    row = {"prompt": prompt, **sides}
    (pair,) = data(tmp_path, [row], instruction="Be brief.").pairs()
    assert pair.prompt.messages == ({"role": "user", "content": "Who?\n\nBe brief."},)
    assert (pair.chosen, pair.rejected) == ("me", "")
    for change, reason in (
        ({"prompt": "What?"}, "chosen has turns before its last that are not the prompt"),
        ({"rejected": TURNS * 2}, "rejected must end with a reply of the assistant"),
        ({"chosen": ["a", "b"]}, r"an empty or unusable chosen, got \['a', 'b'\]"),
    ):
        with pytest.raises(ConfigError, match=f"line 2: {reason}"):
            data(tmp_path, [row, {**row, **change}]).pairs()


@pytest.mark.parametrize(
    ("scores", "order"),
    [
        ([100000001, 100000000], [1, 0]),
        ([1e16, 1e16 + 2], [0, 1]),
        ([0.1 + 0.2, 0.3, 0.3, -1e38], [2, 1, 1, 0]),
        ([1e-60, 0.0], [1, 0]),
        ([1e38, -1e38], [1, 0]),
    ],
)
def test_scores_that_differ_are_no_ties_in_training(
    scores: list[float], order: list[float], tmp_path: Path
) -> None:
    rows = [
        {"prompt": "q", "completions": list("abcd")[: len(scores)], "scores": scores},
        {"prompt": "r", "completions": list("abcde"), "scores": [5, 4, 3, 2, 1]},
    ]
    rankings = data(tmp_path, rows, kind=Kind.rankings, chat=False).rankings()
    groups = _ranking_groups(arithmetic_tokenizer(), rankings, (0,))
    batch = DatasetSource(groups, 2, 0, 0).collate(groups)
    ranks, present = ranks_of(batch)
    assert (-ranks[0][present[0]]).tolist() == order
    strength = batch.extra["strength"][: len(scores)]
    assert bool(strength.isfinite().all())
    assert float(strength[0] - strength[1]) == pytest.approx(scores[0] - scores[1], rel=1e-6)


def test_pair_without_a_margin_counts_its_order_and_none_asks_the_rejected_to_lead(
    tmp_path: Path,
) -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    rows = [{**row, "prompt": f"q{i}", "margin": m} for i, m in enumerate((2.5, 0, None))]
    pairs = data(tmp_path, rows, chat=False).pairs()
    groups = _pair_groups(arithmetic_tokenizer(), pairs, (0,), DataKind.rankings)
    assert [group.strengths for group in groups] == [(2.5, 0.0), (0.0, 0.0), (1.0, 0.0)]
    for margin, reason in (
        (-0.5, "must be at least 0, got -0.5"),
        (1e39, "must lie within ±1e\\+38"),
    ):
        with pytest.raises(ConfigError, match=f"line 1: margin {reason}"):
            data(tmp_path, [{**row, "margin": margin}]).pairs()


def test_json_file_may_be_one_array(tmp_path: Path) -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    (pair,) = data(tmp_path, [row], "rows.json").pairs()
    assert (pair.prompt.id, pair.chosen) == ("rows.json:1", "a")
    with pytest.raises(ConfigError, match="line 2: a JSON int, not an object"):
        data(tmp_path, [row, 3], "bad.json").pairs()
    (tmp_path / "half.json").write_text('[{"prompt": 1},')
    with pytest.raises(ConfigError, match="begins as a JSON array but is none"):
        JSONL(path=str(tmp_path / "half.json"), kind=Kind.pairs).pairs()


def two_each(prompts: int) -> list[Group]:
    """Two pairs of the same completions for each prompt."""
    return [
        Group(Prompt(str(i), text=f"question {i // 2}"), ((1,), (2,)), ("a", "b"))
        for i in range(2 * prompts)
    ]


def test_held_out_prompts_keep_their_side_whatever_the_order() -> None:
    rows = two_each(20)
    train, judged = held_out(rows, 0.1)
    assert len(judged) == 4 and len(train) == 36  # ⌈0.1 · 20⌉ prompts, both pairs of each
    assert not {r.prompt.text for r in train} & {r.prompt.text for r in judged}
    _, again = held_out(rows[::-1], 0.1)
    assert {r.prompt.id for r in again} == {r.prompt.id for r in judged}
    assert held_out(rows, 0.0) == (rows, [])
    with pytest.raises(ConfigError, match=r"evaluate\.heldout_pairs=0\.9 of 1 prompts"):
        held_out(rows[:2], 0.9)


def test_what_is_there_again_is_trained_on_again_and_judged_once() -> None:
    rows = two_each(20)
    train, judged = held_out(rows * 3, 0.2)
    assert (len(train), len(judged)) == (3 * 32, 8)  # ⌈0.2 · 20⌉ prompts, both pairs of each
    once = held_out(rows, 0.2)
    assert (train, judged) == (once[0] * 3, once[1])
