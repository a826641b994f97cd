"""Files of rows: every bad row is named by its line, and many are refused."""

import contextlib
import gzip
import hashlib
import json
import math
import os
import random
import re
import warnings
from datetime import date
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest

from zoo.build import check
from zoo.compose import compose
from zoo.config import ConfigError
from zoo.data.jsonl import JSONL
from zoo.data.left_out import LeftOut
from zoo.data.rows import Kind, _BadRowError, _finite, without_duplicates
from zoo.instantiate import structured
from zoo.types import Completion, Prompt

CUT_OFF = gzip.compress(b'{"prompt": "q"}\n' * 99, mtime=0)[:40]  # no time of day in a test's id


def write(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def questions(count, start=0):
    return [{"prompt": f"What is {i} + 1?", "answer": i + 1} for i in range(start, start + count)]


def test_prompts_become_turns_with_golds_and_columns(tmp_path):
    path = write(
        tmp_path / "a.jsonl", [{"prompt": "Q?", "answer": 145.0, "topic": "sums"}, *questions(3)]
    )
    data = JSONL(path=path, heldout=0.0, style="gsm8k", instruction="Be brief.")
    first = data.prompts()[0]
    assert first.id == "a.jsonl:1"
    assert first.messages == ({"role": "user", "content": "Q?\n\nBe brief."},)
    assert first.columns == {"answer": "145", "style": "gsm8k", "topic": "sums"}
    assert data.offers == {"prompts"}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"answer": "4\ud83d"}, "'answer' has half a character at position 1"),
        ({"topic": "\ud83d"}, "'topic' has half a character at position 0"),
        ({"notes": [{"by": "me"}, {"b\ud83d": 1}]}, "'notes' has half a character at position 1"),
        ({"t\ud83d": 1}, "has half a character at position 1"),
        ({"topic": "\U0001f600"}, ""),  # whole: both halves
    ],
)
def test_half_a_character_is_refused_in_every_column(changed, told, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(
            json.dumps(row) + "\n"
            for row in [*questions(9), questions(1)[0] | changed | {"prompt": "?"}]
        )
    )
    data = JSONL(path=str(path), heldout=0.0, max_malformed=0.2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(data.prompts()) == (9 if told else 10)
    assert [told in str(one.message) and "line 10" in str(one.message) for one in caught] == (
        [True] if told else []
    )


def test_raw_text_prompts_and_mapped_columns(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"q": f"Q{i}", "gold": str(i)} for i in range(9)])
    data = JSONL(path=path, columns={"prompt": "q", "answer": "gold"}, chat=False, heldout=0.0)
    assert data.prompts()[4].text == "Q4" and data.prompts()[4].messages == ()
    assert data.prompts()[4].columns["answer"] == "4"


def test_bom_crlf_unicode_blank_and_long_lines(tmp_path):
    long = "é" * 300_000
    rows = [{"prompt": "Grüße — 你好 \u2028 🙂", "answer": "1"}, {"prompt": long, "answer": "2"}]
    body = "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + body.encode())
    prompts = JSONL(path=str(tmp_path / "a.jsonl"), heldout=0.0).prompts()
    assert [p.messages[0]["content"] for p in prompts] == [rows[0]["prompt"], long]
    assert [p.id for p in prompts] == ["a.jsonl:1", "a.jsonl:3"]


def test_gzip(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": "Q", "answer": "1"}))
    assert len(JSONL(path=str(tmp_path / "a.jsonl.gz"), heldout=0.0).prompts()) == 1


BAD = {
    "{": "not JSON",
    "[1]": "a JSON list, not an object",
    '{"prompt": "Q", "answer": "1", "answer": "2"}': "the key 'answer' twice",
    '{"prompt": "Q", "answer": "1", "meta": [{"a": 1, "a": 1}]}': "the key 'a' twice",
    '{"prompt": "Q", "answer": NaN}': "NaN is not a number of JSON",
    '{"answer": "1"}': "no prompt",
    '{"prompt": "  ", "answer": "1"}': "prompt must be a text or turns",
    '{"prompt": 7, "answer": "1"}': "prompt must be a text or turns, got 7",
    '{"prompt": [], "answer": "1"}': "the prompt has no turns",
    '{"prompt": ["x"], "answer": "1"}': "a turn must be an object",
    '{"prompt": [{"role": "tool", "content": "x"}], "answer": "1"}': "a turn needs role",
    '{"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}': "end with a user's turn",
    '{"prompt": "Q", "answer": ["1"]}': "answer must be a text or a number",
    '{"prompt": "Q \\ud800", "answer": "1"}': "half a character at position 2",
    '{"prompt": "Q", "answer": "1", "style": "gsm"}': "style must be one of math, gsm8k",
    '{"prompt": "Q", "answer": " "}': "answer must be a text or a number",
}


@pytest.mark.parametrize("bad", BAD)
def test_malformed_row_is_named_by_its_line_and_reason(tmp_path, bad):
    path = write(tmp_path / "a.jsonl", [*questions(150), bad, *questions(60, start=200)])
    with pytest.warns(UserWarning, match="line 151: ") as caught:
        prompts = JSONL(path=path, heldout=0.0).prompts()
    assert BAD[bad] in str(caught[0].message)
    assert len(prompts) == 210


def test_not_utf8_is_named(tmp_path):
    rows = [json.dumps(row).encode() for row in questions(150)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*rows, b'{"prompt": "\xff"}']))
    with pytest.warns(UserWarning, match="line 151: not UTF-8"):
        JSONL(path=str(tmp_path / "a.jsonl"), heldout=0.0).prompts()


def test_more_than_the_limit_is_refused_with_count_and_lines(tmp_path):
    path = write(tmp_path / "a.jsonl", [*questions(8), "{", "[]"])
    with pytest.raises(ConfigError, match=r"2 of 10 rows .*line 9: not JSON.*line 10: a JSON list"):
        JSONL(path=path, heldout=0.0).prompts()
    with pytest.warns(UserWarning, match="left out 2 of 10"):
        assert len(JSONL(path=path, heldout=0.0, max_malformed=0.2).prompts()) == 8


def test_a_first_row_that_was_cut_is_one_malformed_row(tmp_path):
    path = write(tmp_path / "a.jsonl", ["{", *questions(9)])
    with pytest.warns(UserWarning, match="left out 1 of 10"):
        assert len(JSONL(path=path, heldout=0.0, max_malformed=0.1).prompts()) == 9


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", '[\n {"prompt": "Q", "answer": "1"}\n]', "a file named .json"),
        ("a.jsonl", '\n{\n "prompt": "Q",\n "answer": "1"\n}', "one object a line"),
        ("a.json", '{\n "rows": []\n}', "an array of objects"),
        ("a.CSV", "prompt,answer\nQ,1\n", r"\.csv is none of \.jsonl .* \.json .* \.parquet"),
        ("a.tsv", "prompt\tanswer\nQ\t1\n", r"\.tsv is none of .*read_csv"),
    ],
)
def test_a_file_of_another_layout_is_told_whole(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        JSONL(path=str(tmp_path / name)).prompts()


TURNS = [("system", "Add."), ("user", "1 + 1"), ("assistant", "2")]
DIALOGUES = {
    "messages": [{"role": role, "content": text} for role, text in TURNS],
    "conversations": [
        {"from": {"user": "human", "assistant": "gpt"}.get(role, role), "value": text}
        for role, text in TURNS
    ],
}


@pytest.mark.parametrize("column", DIALOGUES)
@pytest.mark.parametrize(
    ("kind", "last"),
    [("prompts", "answer"), ("examples", "completion"), ("pairs", "chosen")],
)
def test_whole_dialogues_are_to_be_split(tmp_path, column, kind, last):
    turns = DIALOGUES[column]
    path = write(tmp_path / "a.jsonl", [{column: turns, "n": 1}])
    with pytest.raises(ConfigError) as caught:
        getattr(JSONL(path=path, kind=Kind(kind)), kind)()
    assert f"{column!r} holds whole dialogues" in str(caught.value)
    assert f"the text of the last as {last}." in str(caught.value)
    assert "Set data.columns" not in str(caught.value)
    row = {"prompt": turns[:-1], last: TURNS[-1][1], "rejected": "3"}
    split = write(tmp_path / "b.jsonl", [row])
    (made,) = getattr(JSONL(path=split, kind=Kind(kind), heldout=0.0), kind)()
    prompt = made if kind == "prompts" else made.prompt
    assert prompt.messages == tuple(DIALOGUES["messages"][:-1])


@pytest.mark.parametrize("value", [DIALOGUES["messages"][:-1], [{"a": 1}, {"b": 2}], ["x", "y"]])
def test_other_lists_may_be_the_prompt(tmp_path, value):
    path = write(tmp_path / "a.jsonl", [{"question": value, "answer": "1"}])
    with pytest.raises(ConfigError, match=r"Set data\.columns\.prompt to one of them"):
        JSONL(path=path).prompts()


def test_missing_column_says_did_you_mean(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"promt": "Q", "answer": "1"}] * 2)
    with pytest.raises(
        ConfigError, match=r"no column 'prompt'.*Did you mean promt\?.*columns.prompt"
    ):
        JSONL(path=path).prompts()


def test_unknown_column_name_says_did_you_mean(tmp_path):
    path = write(tmp_path / "a.jsonl", questions(3))
    with pytest.raises(ConfigError, match=r"data.columns.anwser is unknown.*Did you mean answer"):
        JSONL(path=path, columns={"anwser": "answer"}).prompts()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        *(("b.jsonl", r"no file .*Did you mean .*ab.jsonl"), ("", "is a folder")),
        *(("x/y", "folder"), ("pipe", "pipe is no regular file")),
    ],
)
def test_missing_file(tmp_path, name, says):
    write(tmp_path / "ab.jsonl", questions(3))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=says):
        JSONL(path=f"{tmp_path}/{name}").prompts()


def test_empty_file_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match="has no rows"):
        JSONL(path=str(tmp_path / "a.jsonl")).prompts()


def test_gold_that_no_answer_could_match_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [*questions(3), {"prompt": "Q", "answer": "?"}])
    with pytest.raises(ConfigError, match=r"1 of 4 gold answers cannot be verified.*a\.jsonl:4"):
        JSONL(path=path, heldout=0.0).prompts()


def test_a_refusal_is_short_however_long_a_gold_is_and_says_each_reason_once(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "Q", "answer": "\\frac{" + "1" * 4000}])
    with pytest.raises(ConfigError, match="1 of 1 gold answers") as caught:
        JSONL(path=path, heldout=0.0).prompts()
    assert len(str(caught.value)) < 500
    rows = [*questions(2), *[{"prompt": "Q", "answer": []}] * 7, {"prompt": 1}, "{"]
    with pytest.raises(ConfigError) as caught:
        JSONL(path=write(tmp_path / "b.jsonl", rows)).prompts()
    told = str(caught.value)
    assert "9 of 11 rows" in told and told.count("answer must be a text") == 1
    assert "(lines 3, 4, 5, 6, 7 and 2 more: answer must be a text or a number, got []; " in told
    assert "; line 10: prompt must be" in told and "; line 11: not JSON" in told


def test_answers_for_some_prompts_only_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [*questions(3), {"prompt": "Q"}])
    with pytest.raises(ConfigError, match=r"1 of 4 prompts have no answer.*a\.jsonl:4"):
        JSONL(path=path, heldout=0.0).prompts()


def test_duplicates_are_reported_and_left_out(tmp_path):
    path = write(tmp_path / "a.jsonl", [*questions(5), *questions(2)])
    with pytest.warns(UserWarning, match="left out 2 rows that repeat"):
        assert len(JSONL(path=path, heldout=0.0).prompts()) == 5


def test_duplicates_that_contradict_are_counted_and_named(tmp_path):
    rows = [*questions(3), *questions(1), {**questions(2)[1], "answer": 77}]
    with pytest.warns(UserWarning) as caught:
        prompts = JSONL(path=write(tmp_path / "a.jsonl", rows), heldout=0.0).prompts()
    assert [prompt.columns["answer"] for prompt in prompts] == ["1", "2", "3"]
    assert str(caught[0].message) == (
        "a.jsonl: left out 2 rows that repeat an earlier one, 1 of them with another answer "
        "(a.jsonl:5 says '77' and a.jsonl:2 '2')."
    )


def test_prompts_that_differ_in_another_column_are_kept_and_said(tmp_path):
    same = [{"prompt": "Q", "target": "a"}, {"prompt": "Q", "target": "a", "note": None}]
    rows = [*same, {"prompt": "Q", "target": "b"}, {"prompt": "R", "target": "a"}]
    rows += [{"prompt": "Q", "target": "b"}]
    with pytest.warns(UserWarning) as caught:
        prompts = JSONL(path=write(tmp_path / "a.jsonl", rows), heldout=0.0).prompts()
    assert [(p.id, p.columns["target"]) for p in prompts] == [
        ("a.jsonl:1", "a"),
        ("a.jsonl:3", "b"),
        ("a.jsonl:4", "a"),
    ]
    repeated, differing = (str(one.message) for one in caught)
    assert repeated == "a.jsonl: left out 2 rows that repeat an earlier one."
    assert differing.startswith(
        "a.jsonl: 1 prompts repeat an earlier one and differ from it in another column (the first: "
        "a.jsonl:3 and a.jsonl:1 in 'target')"
    )


def test_columns_that_no_two_rows_share_keep_no_repeated_prompt(tmp_path):
    rows = [{"prompt": f"Q{i % 3}", "n": i, "level": i % 2} for i in range(12)]
    with pytest.warns(UserWarning, match="left out 6 rows") as caught:
        prompts = JSONL(path=write(tmp_path / "a.jsonl", rows), heldout=0.0).prompts()
    assert [p.columns["n"] for p in prompts] == [0, 1, 2, 3, 4, 5]  # each with either level
    assert "in 'level')" in str(caught[1].message)


def test_prompts_of_one_id_are_one_whatever_their_columns():
    rows = [Prompt("a", text="Q", columns={"n": n}) for n in (1, 2)]
    with pytest.warns(LeftOut, match="^rows: left out 1 rows that repeat an earlier one.$"):
        assert without_duplicates(rows, lambda prompt: prompt.id, "rows") == rows[:1]


def test_a_key_twice_in_a_row_of_an_array_is_refused(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"prompt": "Q", "answer": "1", "answer": "2"}]')
    with pytest.raises(ConfigError, match=r"a\.json has a row with the key 'answer' twice"):
        JSONL(path=str(path), heldout=0.0).prompts()


REPEATING = {
    "examples": [{"completion": "What is 1 + 1? 2"}, {"completion": "2"}],
    "labelled": [{"completion": " What is 1 + 1?\n2", "label": True}, {"completion": "2"}],
    "pairs": [
        {"chosen": "What is 1 + 1? 2", "rejected": "What is 1 + 1? 3"},
        {"chosen": "2", "rejected": "What is 1 + 1? 3"},
    ],
    "rankings": [
        {"completions": ["What is 1 + 1? 2", "What is 1 + 1? 3"]},
        {"completions": ["2", "What is 1 + 1? 3"]},
    ],
}


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("kind", REPEATING)
def test_completions_that_begin_with_the_prompt_are_counted_and_named(kind, chat, tmp_path):
    bad, good = ({"prompt": "What is 1 + 1?", "label": False, **row} for row in REPEATING[kind])
    settings = {"kind": Kind(kind), "chat": chat, "instruction": "Be brief."}

    def said(rows):
        rows = [rows[0], {**rows[1], "prompt": "What is 1 + 1? "}]  # no duplicate
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            path = write(tmp_path / "a.jsonl", rows)
            assert len(getattr(JSONL(path=path, **settings), kind)()) == 2
        return [str(one.message) for one in caught]

    (told,) = said([bad, bad])
    assert told.startswith(
        "a.jsonl: in 2 of 2 rows the completion begins with the prompt's own text (the first is "
        "a.jsonl:1)"
    )
    assert said([bad, good]) == [] == said([good, good])  # half of them may be chance


def test_heldout_share_is_split_by_content(tmp_path):
    one = JSONL(path=write(tmp_path / "a.jsonl", questions(200)), heldout=0.25)
    other = JSONL(path=write(tmp_path / "b.jsonl", questions(200)[::-1]), heldout=0.25)

    def contents(prompts):
        return {p.messages[0]["content"] for p in prompts}

    judged = contents(one.evaluation_sets()[0].prompts)
    assert not judged & contents(one.prompts()) and len(judged | contents(one.prompts())) == 200
    assert 30 < len(judged) < 70  # 50 expected; a standard deviation of 6
    assert contents(other.prompts()) == contents(one.prompts())  # the order of rows is no matter


def test_overlap_with_the_heldout_file_is_reported_and_not_trained_on(tmp_path):
    train = write(tmp_path / "a.jsonl", questions(10))
    test = write(tmp_path / "b.jsonl", questions(4, start=8))
    data = JSONL(path=train, heldout_path=test)
    with pytest.warns(UserWarning, match="2 of 10 training prompts are also held-out"):
        assert len(data.prompts()) == 8
        assert len(data.evaluation_sets()[0].prompts) == 4


@pytest.mark.parametrize("other", ["cafe\u0301 {i}?", "café  {i}?", " café {i}?\n", "café\t{i}?"])
def test_overlap_is_found_though_it_is_not_verbatim(other, tmp_path):
    rows = [{"prompt": f"café {i}?", "answer": "1"} for i in range(3)]
    judged = [{"prompt": other.format(i=i), "answer": "1"} for i in (1, 2, 7)]
    path, held = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", judged)
    with pytest.warns(UserWarning, match="2 of 3 training prompts are also held-out"):
        prompts = JSONL(path=path, heldout_path=held).prompts()
    assert [prompt.id for prompt in prompts] == ["a.jsonl:1"]


def test_the_split_by_content_parts_no_prompts_that_read_alike(tmp_path):
    rows = [{"prompt": f"{i}?{tail}", "answer": "1"} for i in range(60) for tail in ("", " ", "\n")]
    data = JSONL(path=write(tmp_path / "a.jsonl", rows), heldout=0.5)
    sides = data.prompts(), data.evaluation_sets()[0].prompts
    trained, judged = ({p.messages[0]["content"].strip() for p in side} for side in sides)
    assert len(trained) + len(judged) == 60 and not trained & judged
    assert sum(map(len, sides)) == 180


def test_the_side_of_a_prompt_is_that_of_the_hash_of_its_text(tmp_path):
    def held(text):
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64 < 0.5

    texts = [f"First line {i}.\n\nSecond  line." for i in range(40)]
    rows = [{"prompt": text, "answer": "1"} for text in texts]
    data = JSONL(path=write(tmp_path / "a.jsonl", rows), heldout=0.5)
    judged = {p.messages[0]["content"] for p in data.evaluation_sets()[0].prompts}
    assert judged == {text for text in texts if held(text)}


def test_a_heldout_file_without_the_answers_of_the_training_file_is_refused(tmp_path):
    train = write(tmp_path / "a.jsonl", questions(4))
    bare = write(tmp_path / "b.jsonl", [{"prompt": f"new {i}"} for i in range(3)])
    with pytest.raises(ConfigError, match=r"data\.heldout_path=.*b\.jsonl: its prompts have no"):
        JSONL(path=train, heldout_path=bare).prompts()
    turned = JSONL(path=bare, heldout_path=train)  # judged by golds, trained with another reward
    assert len(turned.prompts()) == 3 and turned.verifier() is None
    assert [item.name for item in turned.evaluation_sets()] == ["heldout", "guard"]


def test_labels_that_contradict_are_counted_and_named(tmp_path):
    rows = [{"prompt": "Q", "completion": text, "label": label} for text, label in LABELS]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.warns(UserWarning) as caught:
        assert len(JSONL(path=path, kind=Kind.labelled).labelled()) == 4
    (told,) = (str(one.message) for one in caught)
    assert told.startswith(
        "a.jsonl: 1 completions are labelled true and false alike (a.jsonl:1 and a.jsonl:3). Both"
    )


def test_pairs_that_contradict_are_counted_and_named(tmp_path):
    sides = [("a", "b"), ("b", "c"), ("b", "a"), ("c", "a")]  # a circle is no contradiction of two
    rows = [{"prompt": "Q", "chosen": one, "rejected": other} for one, other in sides]
    rows.append({"prompt": "another", "chosen": "b", "rejected": "a"})
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.warns(UserWarning) as caught:
        assert len(JSONL(path=path, kind=Kind.pairs).pairs()) == 5
    (told,) = (str(one.message) for one in caught)
    assert told.startswith("a.jsonl: 1 pairs are there both ways round (a.jsonl:1 and a.jsonl:3).")


def test_rankings_that_contradict_are_counted_and_named(tmp_path):
    scores = [(3, 2, 1), (1, 2, 2)]  # a > b > c; then b = c > a: of two pairs the other way round
    rows = [{"prompt": "Q", "completions": ["a", "b", "c"], "scores": s} for s in scores]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.warns(UserWarning) as caught:
        JSONL(path=path, kind=Kind.rankings).rankings()
    (told,) = (str(one.message) for one in caught)
    assert told.startswith("a.jsonl: 2 pairs are there both ways round (a.jsonl:1 and a.jsonl:2;")


LABELS = [("a", True), ("b", False), ("a", False), ("c", True)]


def test_changed_file_is_read_again(tmp_path):
    path = write(tmp_path / "a.jsonl", questions(3))
    data = JSONL(path=path, heldout=0.0)
    assert len(data.prompts()) == 3
    write(tmp_path / "a.jsonl", questions(30))
    assert len(data.prompts()) == 30


def test_examples_pairs_and_labelled(tmp_path):
    turn = [{"role": "assistant", "content": "good"}]
    row = {"prompt": "Q", "completion": "text", "chosen": turn, "rejected": "bad", "label": True}
    path = write(tmp_path / "a.jsonl", [row])
    example = JSONL(path=path, kind=Kind.examples).examples()[0]
    assert (example.prompt.messages[0]["content"], example.completion) == ("Q", "text")
    pair = JSONL(path=path, kind=Kind.pairs).pairs()[0]
    assert (pair.chosen, pair.rejected, pair.margin) == ("good", "bad", None)
    labelled = JSONL(path=path, kind=Kind.labelled).labelled()[0]
    assert (labelled.completion, labelled.desirable) == ("text", True)
    with pytest.raises(ConfigError, match=r"asked for pairs, but data.kind=examples"):
        JSONL(path=path, kind=Kind.examples).pairs()


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("pairs", {"rejected": "good"}, "chosen and rejected are the same"),
        ("pairs", {"chosen": ""}, "an empty or unusable chosen"),
        ("pairs", {"chosen": None}, "no chosen"),
        ("labelled", {"label": "yes"}, "label must be true or false, got 'yes'"),
        ("examples", {"completion": 5}, "unusable completion"),
        ("rankings", {"completions": ["a"]}, "a list of at least two"),
        ("rankings", {"scores": [1]}, "a list of 2 numbers"),
        ("rankings", {"scores": [1, True]}, "scores must be numbers"),
        ("rankings", {"scores": [2, 2.0]}, "all scores are equal"),
        ("rankings", {"scores": None, "ranks": [1, 1]}, "all ranks are equal"),
        ("rankings", {"scores": None, "ranks": [1]}, "ranks must be a list of 2 numbers"),
        ("rankings", {"ranks": [2, 1]}, "completion 1 has a higher score .* and a worse rank"),
        (
            "rankings",
            {"completions": ["a", "b", "c"], "scores": [1, 1, 0], "ranks": [2, 1, 3]},
            "completions 1 and 2 have equal scores and unequal ranks",
        ),
        ("rankings", {"completions": ["a", "a"]}, r"completions 1 and 2 are the same \('a'\)"),
        (
            "rankings",
            {"completions": ["b", "a", "c", "a"], "scores": [3, 1, 0, 2]},
            r"completions 4 and 2 are the same \('a'\) and yet one is better",
        ),
        ("rankings", {"scores": None}, "no scores or ranks, which other rows have"),
    ],
)
def test_malformed_rows_of_the_other_kinds(tmp_path, kind, change, says):
    good = {
        "prompt": "Q",
        "chosen": "good",
        "rejected": "bad",
        "completion": "c",
        "label": 0,
        "completions": ["a", "b"],
        "scores": [2, 1],
    }
    path = write(tmp_path / "a.jsonl", [good, {**good, "prompt": "R", **change}])
    with pytest.warns(UserWarning, match=f"line 2: .*{says}"):
        data = JSONL(path=path, kind=Kind(kind), max_malformed=0.5)
        assert len(getattr(data, kind)()) == 1


def test_rankings_give_all_pairs_of_unequal_score(tmp_path):
    row = {"prompt": "Q", "completions": ["a", "b", "c"], "scores": [1.0, 3, 1]}
    data = JSONL(path=write(tmp_path / "a.jsonl", [row]), kind=Kind.rankings)
    assert data.offers == {"rankings", "pairs"}
    assert {(p.chosen, p.rejected, p.margin) for p in data.pairs()} == {
        ("b", "a", 2.0),
        ("b", "c", 2.0),
    }
    best_first = {"prompt": "Q", "completions": ["a", "b", "c"]}
    pairs = JSONL(path=write(tmp_path / "b.jsonl", [best_first]), kind=Kind.rankings).pairs()
    assert {(p.chosen, p.rejected) for p in pairs} == {("a", "b"), ("a", "c"), ("b", "c")}


@pytest.mark.parametrize("name", ["ranks", "place"])
def test_ranks_say_what_is_better_whatever_the_order(name, tmp_path):
    row = {"prompt": "Q", "completions": ["a", "b", "c", "b"], name: [3, 1, 2, 1]}
    path = write(tmp_path / "a.jsonl", [row])
    pairs = JSONL(path=path, kind=Kind.rankings, columns={"ranks": name}).pairs()
    # b is first (twice: a tie), c second, a third.
    assert sorted((p.chosen, p.rejected, p.margin) for p in pairs) == [
        *[("b", "a", 2.0)] * 2,
        *[("b", "c", 1.0)] * 2,
        ("c", "a", 1.0),
    ]
    if name == "ranks":  # its own name needs no mapping
        assert JSONL(path=path, kind=Kind.rankings).pairs() == pairs


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"completions": ["a", "b", "c"], "score": [3, 1, 2]}, "score"),
        ({"completions": ["a", "b", "c"], "rating": [0.5, 0.1, float("inf")]}, "rating"),
        ({"completions": [{"text": "a", "mark": 1}, {"text": "b", "mark": 2}]}, "mark"),
        ({"completions": [{"text": "a"}, {"text": "b", "mark": 2}]}, "mark"),
        ({"completions": [{"text": "1", "mark": "1"}, {"text": "2", "mark": "5"}]}, "mark"),
        ({"completions": ["a", "b", "c"], "rating": [1, None, 5]}, "rating"),
        ({"completions": ["a", "b", "c"], "rating": ["1", "N/A", "5.5"]}, "rating"),
        ({"completions": ["a", "b"], "rating": [Decimal("1.5"), Decimal("2.5")]}, "rating"),
    ],
)
def test_numbers_of_completions_under_an_unknown_name_are_not_passed_over(row, name, tmp_path):
    file = tmp_path / "a.parquet"  # JSON has no infinity
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "Q", **row}]), file)
    with pytest.raises(ConfigError, match=f"line 1: no scores or ranks.*columns.scores={name}"):
        JSONL(path=str(file), kind=Kind.rankings).rankings()


@pytest.mark.parametrize(
    "outputs",
    [
        [{"text": "a"}, {"text": "b", "rating": "5"}],  # not in the first one
        [{"text": "a", "rating": 1}, {"content": "b"}],
        [{"text": "1", "rating": 1}, {"content": "b", "rating": "n/a"}],
        ["a", {"text": "b", "rating": 5}],
        [[{"content": "a", "rating": 1}], [{"content": "b", "rating": 5}]],
    ],
)
def test_a_rating_within_any_completion_is_not_passed_over(outputs, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "Q", "completions": outputs}])
    with pytest.raises(ConfigError, match=r"line 1: no scores or ranks.*columns\.scores=rating"):
        JSONL(path=path, kind=Kind.rankings).rankings()


def test_a_rating_is_found_where_the_advice_says_also_within_a_list_of_one_turn(tmp_path):
    outputs = [[{"content": "a", "rating": 1}], [{"content": "b", "rating": 5}]]
    path = write(tmp_path / "a.jsonl", [{"prompt": "Q", "completions": outputs}])
    (pair,) = JSONL(path=path, kind=Kind.rankings, columns={"scores": "rating"}).pairs()
    assert (pair.chosen, pair.rejected, pair.margin) == ("b", "a", 4)


def test_the_texts_of_completions_are_no_ratings_whatever_their_key(tmp_path):
    row = {"prompt": "Q", "completions": [{"text": "12"}, {"content": "13"}]}
    data = JSONL(path=write(tmp_path / "a.jsonl", [row]), kind=Kind.rankings)
    assert [(p.chosen, p.rejected) for p in data.pairs()] == [("12", "13")]


def test_other_columns_of_a_ranking_are_nobodys_scores(tmp_path):
    row = {"prompt": "Q", "seed": 3, "turns": [1], "ok": [True, False], "from": ["gpt-4", "7"]}
    row |= {"completions": [{"text": "12"}, {"text": "13"}], "unrated": [None, ""]}
    data = JSONL(path=write(tmp_path / "a.jsonl", [row]), kind=Kind.rankings)
    assert [(p.chosen, p.rejected) for p in data.pairs()] == [("12", "13")]


@pytest.mark.parametrize(
    ("kind", "row", "margin"),
    [
        ("rankings", {"completions": ["a", "b"], "scores": ["1.5", "2.25"]}, 0.75),
        ("rankings", {"completions": ["a", "b"], "ranks": ["2.0", "1.0"]}, 1.0),
        ("pairs", {"chosen": "b", "rejected": "a", "margin": "0.75"}, 0.75),
    ],
)
def test_decimals_are_numbers(kind, row, margin, tmp_path):
    (*_, name) = row
    told = row[name]
    exact = [*map(Decimal, told)] if isinstance(told, list) else Decimal(told)
    file = tmp_path / "a.parquet"
    table = pyarrow.Table.from_pylist([{"prompt": "Q", **row, name: exact}])
    pyarrow.parquet.write_table(table, file)
    (pair,) = JSONL(path=str(file), kind=Kind(kind)).pairs()
    assert (pair.chosen, pair.rejected, pair.margin) == ("b", "a", margin)


def test_a_decimal_without_a_value_is_named():
    with pytest.raises(_BadRowError, match="scores must be finite, got Decimal"):
        _finite(Decimal("sNaN"), "scores")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"path": ""}, "data.path is not set"),
        ({"heldout": 1.0}, "data.heldout must be a share"),
        ({"heldout_path": "b.jsonl", "kind": Kind.pairs}, "data.heldout_path=b.jsonl is read for"),
        ({"max_malformed": -0.1}, "data.max_malformed must be a share"),
        ({"max_new_tokens": 0}, "data.max_new_tokens"),
        ({"style": "gsm"}, "data.style must be one of math, gsm8k, got 'gsm'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        JSONL(**{"path": "a.jsonl", **settings})


def test_without_golds_there_is_no_verifier_and_no_heldout_set(tmp_path):
    data = JSONL(path=write(tmp_path / "a.jsonl", [{"prompt": f"Q{i}"} for i in range(50)]))
    assert data.verifier() is None
    assert [s.name for s in data.evaluation_sets()] == ["guard"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"anwser": "1", "topic": "sums"}, r"but anwser, topic\. .*data.columns.answer=anwser\."),
        ({"gold": 1}, r"but gold\. .*set data.columns.answer=NAME"),
        ({}, "no column answer, nor any other"),
        ({"chosen": "a", "rejected": "b"}, "prompt, chosen, rejected: set data.kind=pairs"),
        ({"completion": "a", "label": True}, "prompt, completion, label: set data.kind=labelled"),
        ({"completion": "a"}, "prompt, completion: set data.kind=examples"),
    ],
)
@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_without_golds_the_columns_that_may_hold_them_are_named(algorithm, row, says, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": f"Q{i}", **row} for i in range(50)])
    words = ["model=tiny_random", f"algorithm={algorithm}", "data=jsonl", f"data.path={path}"]
    with pytest.raises(ConfigError, match=f"Set reward=.*{says}"):
        check(structured(compose(words)))


def test_scores_inside_the_outputs(tmp_path):
    outputs = [{"text": "a", "preference": 1.0}, {"text": "", "preference": 2.0}]
    path = write(tmp_path / "a.jsonl", [{"prompt": "Q", "completions": outputs}])
    data = JSONL(path=path, kind=Kind.rankings, columns={"scores": "preference"})
    assert [(p.chosen, p.rejected) for p in data.pairs()] == [("", "a")]
    wrong = JSONL(path=path, kind=Kind.rankings, columns={"scores": "prefrence"})
    with pytest.raises(ConfigError, match="no 'prefrence'"):
        wrong.rankings()


def test_real_preference_files(shared):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranked = JSONL(
            path=str(shared / "data/preferences/alpaca_eval_ranked_k8.jsonl"),
            kind=Kind.rankings,
            columns={"prompt": "instruction", "completions": "responses", "scores": "preference"},
        ).rankings()
    assert len(ranked) == 174
    for ranking in ranked:
        # 8 outputs have 28 pairs; each tie takes one away.
        ties = sum(a == b for i, a in enumerate(ranking.scores) for b in ranking.scores[:i])
        assert len(ranking.completions) == 8 and len(ranking.pairs()) == 28 - ties


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.jsonl.gz", b'{"prompt": "q"}\n', "cannot be read: Not a gzipped file"),
        (
            "x.jsonl.gz",
            gzip.compress(b'{"prompt": "q"}\n' * 99, mtime=0)[:40],
            "cannot be read: .*ended",
        ),
        ("x.parquet", b'{"prompt": "q"}\n', "is no readable parquet file"),
        ("x.parquet", b"", "is no readable parquet file"),
        ("x.json", b'[{"prompt": "q"}, {"pro', "begins as a JSON array but is none"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name} {says}"):
        JSONL(path=str(tmp_path / name)).prompts()


@pytest.mark.parametrize(
    "name",
    [
        *("x.v1.json", "X.JSON", "x.v1.json.gz", "X.JSON.GZ", "x.json.v1.jsonl", "x.jsonl.GZ"),
        *("X.PARQUET", "x.v1.parquet", "x.parquet.gz"),
    ],
)
def test_the_last_suffix_says_what_a_file_is_in_any_case(name, tmp_path):
    body = json.dumps(questions(3), indent=1).encode()
    if "jsonl" in name:
        body = b"\n".join(json.dumps(row).encode() for row in questions(3))
    if "parquet" in name.lower():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(questions(3)), tmp_path / "plain")
        body = (tmp_path / "plain").read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(body) if name.lower().endswith(".gz") else body)
    assert len(JSONL(path=str(tmp_path / name), heldout=0.0).prompts()) == 3


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (float("nan"), "answer must be finite, got nan"),
        (float("-inf"), "answer must be finite, got -inf"),
        (b"12", "answer must be a text or a number, got b'12'"),
        (date(2020, 1, 1), "answer must be a text or a number, got datetime.date"),
        (True, "answer must be a text or a number, got True"),
    ],
)
@pytest.mark.parametrize("kind", [Kind.prompts, Kind.examples])
def test_golds_of_a_table_are_texts_or_finite_numbers(kind, answer, says, tmp_path):
    file = tmp_path / "x.parquet"
    row = {"prompt": "Q", "completion": "C", "answer": answer}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    with pytest.raises(ConfigError, match=f"line 1: {says}"):
        getattr(JSONL(path=str(file), kind=kind, heldout=0.0), kind)()


def test_a_table_that_has_a_column_twice_is_refused_in_a_sentence(tmp_path):
    file = tmp_path / "x.parquet"
    twice = pyarrow.Table.from_arrays([pyarrow.array(["Q"])] * 2, ["prompt", "prompt"])
    pyarrow.parquet.write_table(twice, file)
    with pytest.raises(ConfigError, match=r"^\S*x\.parquet has the column 'prompt' twice"):
        JSONL(path=str(file)).prompts()


def test_golds_of_a_table_may_be_decimals_and_json_has_no_infinite_one(tmp_path):
    file = tmp_path / "x.parquet"
    rows = [{"prompt": "Q", "answer": Decimal("1.50")}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    assert JSONL(path=str(file), heldout=0.0).prompts()[0].columns["answer"] == "1.50"
    path = write(tmp_path / "a.jsonl", ['{"prompt": "Q", "answer": 1e999}'])
    with pytest.raises(ConfigError, match="line 1: answer must be finite, got inf"):
        JSONL(path=path, heldout=0.0).prompts()


@pytest.mark.parametrize("short", [pyarrow.float16(), pyarrow.float32(), pyarrow.float64()])
def test_floats_of_any_width_are_the_decimals_that_were_written(short, tmp_path):
    # three digits fit in sixteen bits, and this whole number, whose shortest there is 65500
    numbers = [0.1, 3.1, -2.7, 145.0, 0.001, 12.25, 65504.0]
    listed = pyarrow.list_(short)
    inner = pyarrow.list_(pyarrow.struct({"b": short, "c": pyarrow.string()}))
    of = {  # a row's value → its type
        "answer": (lambda n: n, short),
        "one": (lambda n: n, short),
        "none": (lambda n: None, short),
        "infinite": (lambda n: math.inf, short),
        "many": (lambda n: [n, None], listed),
        "fixed": (lambda n: [n, n], pyarrow.list_(short, 2)),
        "nested": (
            lambda n: {"a": [{"b": n, "c": "x"}], "d": None},
            pyarrow.struct({"a": inner, "d": listed}),
        ),
        "mapped": (lambda n: [("k", n)], pyarrow.map_(pyarrow.string(), short)),
    }
    columns = {k: pyarrow.array([make(n) for n in numbers], kind) for k, (make, kind) in of.items()}
    table = pyarrow.table({"prompt": [f"Q{n}" for n in numbers], **columns})
    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(table, file)
    data = JSONL(path=str(file), heldout=0.0)
    for number, prompt in zip(numbers, data.prompts(), strict=True):
        want = {name: make(number) for name, (make, _) in of.items() if name != "answer"}
        gold = str(int(number) if number.is_integer() else number)
        assert prompt.columns == {**want, "answer": gold, "style": "math"}
    answers = [Completion(rf"\boxed{{{number}}}", (1,), (), False) for number in numbers]
    assert data.verifier()(data.prompts(), answers).total == [1.0] * len(numbers)


NOT_HELD = {  # values that are fine in a table, and in Python are not
    "timestamp[ms]": pyarrow.array([2**62], pyarrow.timestamp("ms")),
    "timestamp[us, tz=Mars/Olympus]": pyarrow.array([1], pyarrow.timestamp("us", "Mars/Olympus")),
    "date32[day]": pyarrow.array([2**30], pyarrow.date32()),
    "duration[s]": pyarrow.array([2**62], pyarrow.duration("s")),
    "string": pyarrow.array([b"\xff"]).view(pyarrow.string()),
    "list<element: date32[day]>": pyarrow.array([[2**30]], pyarrow.list_(pyarrow.date32())),
}


@pytest.mark.parametrize("kind", NOT_HELD)
def test_a_column_that_python_cannot_hold_is_left_out_unless_it_is_used(kind, tmp_path):
    file = tmp_path / "x.parquet"
    table = pyarrow.table({"prompt": ["Q"], "answer": ["1"], "when": NOT_HELD[kind]})
    pyarrow.parquet.write_table(table, file)
    named = rf"the column 'when' \({re.escape(kind)}\), which Python cannot hold \(\w+: "
    with pytest.warns(LeftOut, match=rf"x\.parquet: left out {named}"):
        (prompt,) = JSONL(path=str(file), heldout=0.0).prompts()
    assert prompt.columns == {"answer": "1", "style": "math"}
    with pytest.raises(ConfigError, match=rf"x\.parquet has {named}.*as texts"):
        JSONL(path=str(file), heldout=0.0, columns={"answer": "when"}).prompts()


def test_parquet_tables_are_read_and_their_bad_rows_named(tmp_path):
    table = {
        "question": ["1+1", "2+2", None, "4+4"],
        "outputs": [["a", "b"], ["a"], ["a", "b"], ["a", "b"]],
        "marks": [[1.0, 2.0], [1.0], [1.0, 2.0], [float("nan"), 1.0]],
    }
    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table(table), file)
    columns = {"prompt": "question", "completions": "outputs", "scores": "marks"}
    kept = JSONL(path=str(file), kind=Kind.rankings, columns=columns, max_malformed=0.8)
    with pytest.warns(UserWarning) as caught:
        (ranking,) = kept.rankings()
    assert ranking.completions == ("a", "b") and ranking.scores == (1.0, 2.0)
    assert "line 2: completions must be a list of at least two" in str(caught[0].message)
    assert "line 3: no prompt" in str(caught[0].message)
    assert "line 4: scores must be finite, got nan" in str(caught[0].message)
    with pytest.raises(ConfigError, match="3 of 4 rows cannot be used"):
        JSONL(path=str(file), kind=Kind.rankings, columns=columns).rankings()


GOOD = {
    "prompts": {"prompt": "1+1", "answer": "2"},
    "examples": {"prompt": "1+1", "completion": "2"},
    "pairs": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "rankings": {"prompt": "q", "completions": ["a", "b"], "scores": [2, 1]},
    "labelled": {"prompt": "q", "completion": "a", "label": True},
}
ODD = [
    *(None, "", 0, 1.5, float("nan"), float("inf"), 10**400, True, [], {}, [None], [[]], [{}]),
    *("x" * 50_000, "\x00", "\ud800", "\u2028", "\n\nHuman: a\n\nAssistant: b", "\n\nAssistant:"),
    *([{"role": "user", "content": "hi"}], [{"role": ["user"], "content": {"a": 1}}], {"text": 1}),
    *([3, 1], ["a", "a"], [{"text": "a", "score": 1}, {"text": "b", "score": 2}]),
    *([{"from": "human", "value": "x"}], {"content": {"content": "x"}}, "\\boxed{", "2" * 300),
]
KEYS = ("prompt", "answer", "style", "source", "margin", "preferred", "scores", "ranks", "extra")


@pytest.mark.filterwarnings("ignore")
def test_whatever_a_file_holds_nothing_but_a_named_refusal_comes_of_it(tmp_path):
    draw = random.Random(0)
    for number in range(400):
        kind = draw.choice(list(GOOD))
        rows = []
        for _ in range(draw.randint(0, 5)):
            row = dict(GOOD[kind])
            for _ in range(draw.randint(0, 2)):
                row[draw.choice([*row, *KEYS])] = draw.choice(ODD)
            rows.append(json.dumps(row, ensure_ascii=draw.random() < 0.5))
        data = draw.choice(["\n", "\r\n", "\r"]).join(rows).encode("utf-8", "surrogatepass")
        place = draw.randint(0, len(data))
        data = draw.choice(
            [
                *(data, b"\xef\xbb\xbf" + data, data[:place], b"\x00" * 9 + data, b"[" * 99_999),
                *(data[:place] + b"\xff" + data[place:], b"[" + data.replace(b"\n", b",") + b"]"),
                "\n".join(rows).encode("utf-16", "surrogatepass"),
            ]
        )
        name = draw.choice(["x.jsonl", "x.json", "x.jsonl.gz", "x.parquet"])
        file = tmp_path / f"{number}{name}"
        file.write_bytes(
            gzip.compress(data, mtime=0) if name.endswith("gz") and place % 2 else data
        )
        made = JSONL(path=str(file), kind=Kind(kind), max_malformed=draw.choice([0.0, 0.9]))
        with contextlib.suppress(ConfigError):
            assert getattr(made, kind)()
            made.evaluation_sets()
