"""`zoo audit` counts what a reward gets wrong."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from operator import add
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from zoo.cli import main
from zoo.config import ConfigError
from zoo.data.tokenizer import arithmetic_tokenizer
from zoo.rewards.audit import Labelled, judge, rates, read_labelled, scale, tokenized
from zoo.rewards.check import RewardError
from zoo.rewards.shaping import LengthPenalty, MissingEnd
from zoo.types import Completion, Prompt, RewardOutput


class Pays:
    """Pays 1 for a text with "yes", nothing for "no", and abstains otherwise."""

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        table = {"yes": 1.0, "no": 0.0}
        return RewardOutput(total=[table.get(c.text) for c in completions])


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rates_are_shares_of_the_right_denominators(tmp_path: Path) -> None:
    texts = [("yes", 1), ("yes", 1), ("no", 1), ("yes", 0), ("no", 0), ("no", 0), ("hm", 1)]
    rows = [{"completion": t, "gold": "g", "label": bool(label)} for t, label in texts]
    found = rates(judge(Pays(), list(read_labelled(write(tmp_path / "a.jsonl", rows), {}))))
    counts = {name: (f["count"], f["of"]) for name, f in found.items()}
    assert counts == {
        "agreement": (4, 6),
        "false positives (of wrong answers)": (1, 3),
        "false negatives (of right answers)": (1, 3),
        "abstained": (1, 7),
    }


def test_nested_answers_and_worked_golds_are_read(tmp_path: Path) -> None:
    row = {
        "question": "q",
        "ground_truth": "2 + 2 = 4\n#### 4",
        "first": {"solution": "so A: 4", "is_correct": True},
        "second": {"solution": "#### 5", "is_correct": False},
        "note": {"other": 1},
    }
    found = list(read_labelled(write(tmp_path / "a.jsonl", [row]), {"style": "gsm8k"}))
    assert [(r.name, r.completion, r.right) for r in found] == [
        ("1/first", "so A: 4", True),
        ("1/second", "#### 5", False),
    ]
    assert found[0].prompt.columns["answer"] == "4"


def test_rows_without_a_label_are_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"completion": "4", "gold": "4", "label": 1}
    bare = {"completion": "4", "gold": "4"}
    file = write(tmp_path / "a.jsonl", [good, bare, {**bare, "label": None}, *[good] * 2])
    assert main(["audit", str(file)]) == 0
    told = capsys.readouterr().out
    assert f"{file}: 2 of 5 rows have no label and are not audited (lines 2, 3)." in told
    assert main(["audit", str(file), "limit=1"]) == 0  # it stops before them
    assert "no label" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"label": 1, "gold": "4"}, "no field for completion"),
        ({"completion": "x", "label": "maybe", "gold": "4"}, "neither right"),
        ({"completion": None, "label": 1, "gold": "4"}, "completion must be a text, got None"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=f"row 1.*{message}"):
        list(read_labelled(write(tmp_path / "a.jsonl", [row]), {}))


def test_a_reward_that_fails_is_told_without_settings_that_an_audit_has_not(tmp_path: Path) -> None:
    def fails(prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        raise ValueError("no")

    row = {"completion": "4", "gold": "4", "label": 1}
    rows = list(read_labelled(write(tmp_path / "a.jsonl", [row]), {}))
    with pytest.raises(RewardError, match=r"raised ValueError: no .*None for what cannot") as told:
        judge(fails, rows)
    assert "train." not in str(told.value)


def test_odd_arguments_and_files_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.jsonl", [{"completion": "4", "gold": "4", "label": 1}])
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00bad")
    bare = write(tmp_path / "c.jsonl", [{"completion": "4", "gold": "4"}])
    for words, message in (
        ((str(file), "style=gsm"), "one of math, gsm8k"),
        ((str(file), "limit=x"), "above 0, got 'x'"),
        ((str(file), "limit=0"), "above 0, got '0'"),
        ((str(file), f"out={file}"), "cannot be made a folder"),
        ((str(file), "--limit", "3"), "takes one file"),
        ((str(tmp_path / "b.bin"),), "line 1: no JSON"),
        ((str(bare),), "no line has a label"),
    ):
        assert main(["audit", *words]) == 2
        assert message in " ".join(capsys.readouterr().err.split()), words


def test_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"completion": "#### 4", "gold": "4", "label": 1},
        {"completion": "#### 5 <b>", "gold": "4", "label": 1},
    ]
    file = write(tmp_path / "a.jsonl", rows)
    assert main(["audit", str(file), "style=gsm8k", f"out={tmp_path / 'out'}"]) == 0
    assert "1 of 2" in capsys.readouterr().out
    page = (tmp_path / "out" / "audit.html").read_text()
    assert "false negatives (1)" in page and "<b>Ja" not in page and "&lt;b&gt;" in page
    lines = (tmp_path / "out" / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["agrees", "false negative"]


def test_every_label_of_the_example_solutions_is_reproduced(shared: Path) -> None:
    from zoo.rewards.verifiable import Verifier

    file = shared / "data" / "gsm8k" / "example_model_solutions.jsonl"
    found = rates(judge(Verifier(), list(read_labelled(file, {"style": "gsm8k"}))))
    assert found["agreement"]["count"] == found["agreement"]["of"] == 5276


WORKED = [  # a worked gold marks its answer at the end, and the answers are 4 and no 5
    {"ground_truth": f"2 + 2 = <<2+2=4>>4\n{mark} 4", "output": text, "label": right}
    for mark in ("####", "A:")
    for text, right in (("#### 4", 1), ("2 + 2 = 4\nA: 4", 1), ("A: 5", 0))
]


def agreed(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split()).split("│ agreement")[1].split("│")[3].strip()


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ("style=gsm8k", 6),
        ("reward=verifier reward.style=gsm8k", 6),
        ("reward=verifier reward.style=gsm8k style=gsm8k", 6),
        ("reward=verifier reward.style=gsm8k against=verifier", 6),
        ("reward=gsm8k_shaped threshold=0.99", 6),
        ("reward=gsm8k_shaped threshold=0.99 reward.components.right.style=gsm8k", 6),
        # `A:` is no mark of this style: not of the answers, nor of the last three golds
        ("reward=verifier reward.style=math", 3),
        ("reward=gsm8k_shaped threshold=0.99 reward.components.right.style=math", 3),
    ],
)
def test_worked_golds_are_read_in_the_style_of_the_reward(
    words: str, right: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.jsonl", WORKED)
    assert main(["audit", str(file), *words.split()]) == 0
    assert agreed(capsys) == f"{right} of 6"


def test_a_row_keeps_its_own_style_where_the_name_of_a_reward_implies_another(
    tmp_path: Path,
) -> None:
    rows = [WORKED[3], {**WORKED[3], "style": "math"}]
    found = read_labelled(write(tmp_path / "a.jsonl", rows), {"reward": "gsm8k_shaped"})
    assert [row.prompt.columns["answer"] for row in found] == ["4", WORKED[3]["ground_truth"]]


@pytest.mark.parametrize(
    ("words", "differ"),
    [
        ("reward=verifier reward.style=gsm8k against=verifier", 1),
        ("reward=verifier reward.style=math against=verifier", 1),
        ("reward=gsm8k_shaped against=verifier", 0),
        ("reward=verifier against=verifier", 0),
    ],
)
def test_the_style_of_one_reward_is_not_that_of_the_rows_for_another(
    words: str, differ: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # By math nothing is said here, by gsm8k the answer: each row has its own way of reading.
    answered = {"completion": "work\nA: 1,000", "answer": "1000", "label": 1}
    rows = [{**answered, "style": "math"}, {**answered, "style": "gsm8k"}]
    words += " threshold=0.99"
    assert main(["audit", str(write(tmp_path / "a.jsonl", rows)), *words.split()]) == 0
    assert f"differ on {differ} rows" in " ".join(capsys.readouterr().out.split())


def test_a_style_that_is_not_the_rewards_own_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = ["audit", str(write(tmp_path / "a.jsonl", WORKED))]
    assert main([*audit, "style=math", "reward.style=gsm8k"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "style=math, but the reward's own style is gsm8k" in told
    option = tmp_path / "conf" / "reward" / "other.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("_target_: zoo.rewards.verifiable.Verifier\nstyle: math\n")
    audit += [f"--config-dir={tmp_path / 'conf'}", "reward.style=gsm8k", "against=other"]
    assert main(audit) == 2
    assert "in styles math and gsm8k. Say in which" in " ".join(capsys.readouterr().err.split())
    assert main([*audit, "style=gsm8k"]) == 0
    assert agreed(capsys) == "6 of 6"


GOLDLESS = """
def named(prompts, completions):
    return [float("yes" in text) for text in completions]

def asks(completions, answer):
    return named(None, completions)

def takes_all(completions, **columns):
    return named(None, completions)

class Own:
    def __call__(self, prompts, completions):
        from zoo.types import RewardOutput
        return RewardOutput(total=named(prompts, [c.text for c in completions]))
"""


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("reward=function reward.fn=mine_goldless.named", False),
        ("reward=format_only reward.rule=regex reward.pattern=yes", False),
        ("reward=format_only against=random", False),
        ("reward=function reward.fn=mine_goldless.named gold=answer", True),  # asked for
        ("reward=function reward.fn=mine_goldless.named against=last_number", True),
        ("reward=function reward.fn=mine_goldless.asks", True),
        ("reward=function reward.fn=mine_goldless.takes_all", True),  # it may read it
        ("reward=own", True),
        ("reward=verifier", True),
        ("reward=gsm8k_shaped", True),
        ("reward=last_number", True),
    ],
)
def test_a_gold_is_asked_for_where_the_reward_may_judge_by_it(
    words: str,
    needed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine_goldless.py").write_text(GOLDLESS)
    monkeypatch.syspath_prepend(tmp_path)
    option = tmp_path / "conf" / "reward" / "own.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("_target_: mine_goldless.Own\n")
    rows = [{"prompt": "q", "completion": text, "label": 1} for text in ("yes", "no")]
    file = str(write(tmp_path / "a.jsonl", rows))
    status = main(["audit", file, f"--config-dir={tmp_path / 'conf'}", *words.split()])
    said = capsys.readouterr()
    if needed:
        assert status == 2 and "row 1: no field for gold" in " ".join(said.err.split())
    else:
        assert status == 0 and "gold" not in said.out
        if "random" not in words:
            assert "row 2" in said.out and "1 of 2" in said.out


class Scores:
    """The number that a completion spells."""

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        return RewardOutput(total=[float(c.text) for c in completions])


@pytest.mark.parametrize(
    ("right", "wrong", "line"),
    [
        # Of the pairs right × wrong, 3 > 2, 3 > -1, 2 = 2, 2 > -1: (3 + ½) / 4.
        ((3, 2), (2, -1), "scores from -1 to 3; >= 2 counts as paid; AUC = 0.875"),
        ((-3.5,), (-1, -2), "scores from -3.5 to -1; >= 2 counts as paid; AUC = 0.000"),
        ((0.25, 0.25), (0.25,), "scores from 0.25 to 0.25; >= 2 counts as paid; AUC = 0.500"),
        ((0.5, 4), (), "scores from 0.5 to 4; >= 2 counts as paid"),
        ((1, 0), (0, 1), None),  # the rates say all
    ],
)
def test_scores_off_the_scale_come_with_their_range_and_auc(
    tmp_path: Path, right: tuple, wrong: tuple, line: str | None
) -> None:
    labelled = [(value, 1) for value in right] + [(value, 0) for value in wrong]
    rows = [{"completion": str(value), "gold": "", "label": label} for value, label in labelled]
    judged = judge(Scores(), list(read_labelled(write(tmp_path / "a.jsonl", rows), {})), 2.0)
    assert scale(judged) == line
    assert [j.paid for j in judged] == [value >= 2 for value, _ in labelled]


MINE = """
def asked(prompts, completions, **columns):
    return [2.0 * (prompt == "What is 4?") for prompt in prompts]
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of options with a reward that reads the prompt."""
    (tmp_path / "mine_audit.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    option = tmp_path / "conf" / "reward" / "mine.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("_target_: zoo.rewards.function.Function\nfn: mine_audit.asked\n")
    return tmp_path / "conf"


@pytest.mark.parametrize("at", ["before", "first", "last", "searchpath"])
def test_a_folder_of_options_is_taken_wherever_it_stands(
    at: str, tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"instruction": "What is 4?", "completion": "4", "gold": "4", "label": 1}
    audit = [str(write(tmp_path / "a.jsonl", [row])), "reward=mine", "threshold=1.5"]
    flag = ["--config-dir", str(mine)]
    command = {
        "before": [*flag, "audit", *audit],
        "first": ["audit", *flag, *audit],
        "last": ["audit", *audit, *flag],
        "searchpath": ["audit", *audit, f"hydra.searchpath=[{mine}]"],
    }[at]
    assert main(command) == 0
    assert "scores from 2 to 2; >= 1.5 counts as paid\n" in capsys.readouterr().out
    assert main(["audit", *audit]) == 2  # the folder was this command's alone


def test_an_empty_prompt_is_told_to_rewards_that_read_it(
    tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"task": "What is 4?", "completion": "4", "gold": "4", "label": 1}
    file = str(write(tmp_path / "a.jsonl", [row, {**row, "query": [{"content": "What is 4?"}]}]))
    asks = ["audit", file, f"--config-dir={mine}", "reward=mine"]
    assert main(asks) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 answers have no prompt" in told and "1 of 2" in told.split("agreement")[1]
    assert main([*asks, "prompt=task"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "no prompt" not in told and "2 of 2" in told.split("agreement")[1]
    assert main(["audit", file]) == 0  # a verifier reads columns
    assert "no prompt" not in capsys.readouterr().out
    assert main(["audit", file, "prompt=tusk"]) == 2
    assert "no field for prompt; it has 'task'" in " ".join(capsys.readouterr().err.split())


COUNTS = """
def short(completions, completion_ids):
    return [float(len(ids) < 20) for ids in completion_ids]

def swallows(completions, **columns):
    return [float("4" in text) for text in completions]
"""


def test_a_reward_that_counts_tokens_is_given_those_of_a_tokenizer_or_refused(
    tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "counts_audit.py").write_text(COUNTS)
    rows = [{"prompt": "Q", "completion": "4" + " 4" * n, "label": n < 20} for n in (0, 2, 40, 90)]
    for row in rows:
        row["gold"] = "4"
    audit = ["audit", str(write(tmp_path / "a.jsonl", rows)), "reward=function"]
    assert main([*audit, "reward.fn=counts_audit.short"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "reward function reads token ids (row 1 first)" in told and "tokenizer=FOLDER" in told
    assert main([*audit, "reward.fn=counts_audit.short", "tokenizer=arithmetic"]) == 0
    assert "4 of 4" in capsys.readouterr().out.split("agreement")[1].split("false")[0]
    assert main([*audit, "reward.fn=counts_audit.swallows"]) == 0  # is handed ids, and reads none
    assert main([*audit[:2], "reward=verifier_overlong"]) == 2
    assert main(audit[:2]) == 0  # a verifier reads texts


READS = {
    "in": lambda ids: 5 in ids,
    "==": lambda ids: ids == (),
    "<": lambda ids: ids < (5,),
    "!=": lambda ids: ids != [5],
    "not": lambda ids: not ids,
    "count": lambda ids: ids.count(5),
    "index": lambda ids: ids.index(5),
    "last": lambda ids: ids[-1] == 5,
    "slice": lambda ids: sum(ids[-2:]),
    "sum": sum,
    "list": lambda ids: len([*ids, 5]),
    "add": lambda ids: len(add(ids, (5,))),
    "add a list": lambda ids: len(add(ids, [5])),
    "add to a tuple": lambda ids: len(add((5,), ids)),
    "repeat": lambda ids: 2 * ids is None,
    "append": lambda ids: ids.append(5),
    "tensor": lambda ids: torch.tensor(ids).numel(),
    "deepcopy": lambda ids: len(copy.deepcopy(ids)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("token_ids", r"reward mine reads token ids \(row 2 first\).*tokenizer=FOLDER"),
        ("logprobs", r"reward mine reads log-probs \(row 2 first\).*with a tokenizer or without"),
        ("prompt", r"reward mine reads the token ids of a prompt \(row 2 first\)"),
    ],
)
def test_what_a_text_does_not_have_is_refused_however_it_is_read(
    what: str, told: str, read: Callable[[Any], Any]
) -> None:
    class Reads:
        def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
            (one,) = completions
            if one.text == "b":
                read(prompts[0].token_ids if what == "prompt" else getattr(one, what))
            return RewardOutput([1.0])

    rows = [Labelled(name, Prompt(name, text="Q"), text, True) for name, text in ("1a", "2b")]
    with pytest.raises(ConfigError, match=told):
        judge(Reads(), rows, name="mine")
    rows = tokenized(rows, "arithmetic")
    if what == "token_ids" and read is not READS["add a list"] and read is not READS["append"]:
        with suppress(RewardError):  # of index, where there is no 5
            assert [j.score for j in judge(Reads(), rows)] == [1.0, 1.0]
    elif what != "token_ids":
        with pytest.raises(ConfigError, match=told):
            judge(Reads(), rows, name="mine")


def test_a_reward_of_texts_may_print_hash_and_copy_what_it_is_given() -> None:
    class Copies:
        def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
            one = replace(copy.deepcopy(completions[0]), text="b")
            seen = {hash(one), repr(one), repr(prompts[0])}
            there = pickle.loads(pickle.dumps(one))
            return RewardOutput([float(there.text == "b" and len(seen) == 3)])

    class Elsewhere:
        def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
            (there,) = pickle.loads(pickle.dumps(completions))
            return RewardOutput([float(len(there.token_ids))])

    rows = [Labelled("1", Prompt("1", text="Q"), "a", True)]
    assert [j.score for j in judge(Copies(), rows)] == [1.0]
    with pytest.raises(RewardError, match="a labelled text has no log-probs, and ids only with"):
        judge(Elsewhere(), rows)


def test_a_text_has_its_tokens_and_a_stop_token_unless_the_row_says_it_was_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [("4", None), ("4 5", False), ("4 5", True), ("4 5<eos>", 0), ("4 5<eos>", 1)]
    rows = [
        {"prompt": "Q", "completion": text, "gold": "4", "label": 1, "truncated": cut}
        for text, cut in texts
    ]
    rows += [{key: row[key] for key in row if key != "prompt"} for row in rows]
    file = write(tmp_path / "a.jsonl", rows)
    found = tokenized(list(read_labelled(file, {})), "arithmetic")
    ids = [list(row.token_ids or ()) for row in found]
    assert [len(one) for one in ids] == [2, 4, 3, 4, 3] * 2  # "4", " ", "5" and the stop token
    assert [one[-1] == arithmetic_tokenizer().eos_token_id for one in ids] == [
        not row.truncated for row in found
    ]
    assert [row.truncated for row in found] == [bool(cut) for _, cut in texts] * 2
    lengths = judge(LengthPenalty(max_length=4, cache=2), found)
    assert [j.score for j in lengths] == [0, -1, -0.5, -1, -0.5] * 2  # ((4 − 2) − L)/2
    ends = judge(MissingEnd(), list(read_labelled(file, {})))  # asks for no tokenizer
    assert [j.score for j in ends] == [0, 0, -1, 0, -1] * 2
    (tmp_path / "cut_audit.py").write_text(CUT)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")  # the row's own field hides nothing from the function
        patch.syspath_prepend(tmp_path)
        assert main(["audit", str(file), "reward=function", "reward.fn=cut_audit.whole"]) == 0
    assert "6 of 10" in capsys.readouterr().out.split("agreement")[1].split("false")[0]


CUT = """
def whole(completions, truncated):
    return [float(not cut) for cut in truncated]
"""


def test_a_field_truncated_that_says_neither_is_refused(tmp_path: Path) -> None:
    row = {"completion": "4", "gold": "4", "label": 1, "truncated": "at 80", "cut": True}
    file = write(tmp_path / "a.jsonl", [row])
    with pytest.raises(ConfigError, match=r"row 1: truncated must be true or false.*'at 80'"):
        list(read_labelled(file, {}))
    (found,) = read_labelled(file, {"truncated": "cut"})
    assert found.truncated and found.prompt.columns["truncated"] == "at 80"
    with pytest.raises(ConfigError, match="no field for truncated"):
        list(read_labelled(file, {"truncated": "shut"}))


def test_a_text_that_goes_on_after_its_stop_token_is_refused(tmp_path: Path) -> None:
    inner = Tokenizer(models.WordLevel({"<unk>": 0, ".": 1, "a": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token=".")
    tokenizer.save_pretrained(tmp_path)
    rows = [Labelled(text, Prompt("p", text="a"), text, True) for text in (" a", " a . a")]
    assert tokenized(rows[:1], str(tmp_path))[0].token_ids == (2, 1)
    with pytest.raises(ConfigError, match=r"row  a \. a: the text goes on after a token that ends"):
        tokenized(rows, str(tmp_path))


def test_the_reward_that_lacks_tokens_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "Q", "completion": "4", "gold": "4", "label": 1}
    audit = ["audit", str(write(tmp_path / "a.jsonl", [row])), "style=gsm8k"]
    for last in (["reward=verifier_overlong"], ["against=verifier_overlong"]):
        assert main([*audit, *last]) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert "reward verifier_overlong reads token ids (row 1 first)" in told


@pytest.mark.parametrize("gold", [["4"], {"a": "4"}, True])
def test_a_gold_that_is_no_text_or_number_is_refused_not_scored(
    gold: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "Q", "completion": "4", "gold": gold, "label": 1}
    assert main(["audit", str(write(tmp_path / "a.jsonl", [row])), "reward.style=gsm8k"]) != 0
    assert "must be a text or a number, got " in " ".join(capsys.readouterr().err.split())


def test_answers_in_a_list_are_each_a_row(tmp_path: Path) -> None:
    answers = [{"completion": str(n), "label": n == 4} for n in (4, 5)]
    row = {"prompt": "Q", "gold": "4", "completions": [*answers, "no object"], "other": [1]}
    row["tests"] = [{"input": "1", "expected": "1"}]  # of a program: no verdict on an answer
    found = list(read_labelled(write(tmp_path / "a.jsonl", [row]), {}))
    assert [(r.name, r.completion, r.right) for r in found] == [
        ("1/completions/0", "4", True),
        ("1/completions/1", "5", False),
    ]
