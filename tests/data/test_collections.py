"""GSM8K, MATH, one-digit arithmetic and the hub."""

import json
import socket
import time

import pyarrow
import pytest

from zoo.config import ConfigError
from zoo.data.digits import Digits
from zoo.data.gsm8k import GSM8K
from zoo.data.hub import Hub, load_hub
from zoo.data.ifeval import IFEval
from zoo.data.jsonl import JSONL
from zoo.data.left_out import LeftOut
from zoo.data.math import MATH
from zoo.rewards.learned import Learned
from zoo.types import Completion


def completion(text, truncated=False):
    return Completion(text, tuple(range(5, 5 + len(text.split()))), (), truncated)


@pytest.fixture
def gsm8k(tmp_path):
    train = [
        {"question": "How much?", "answer": "It is 2*3=<<2*3=6>>6.\n#### 6"},
        {"question": "How many?", "answer": "A lot: $<<500+500=1000>>1,000\n#### 1,000"},
    ]
    for name, rows in (("train", train), ("test", [{"question": "Who?", "answer": "#### -3"}])):
        text = "\n".join(map(json.dumps, rows))
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def test_gsm8k_reads_golds_and_removes_the_calculator_marks(gsm8k):
    data = GSM8K(path=str(gsm8k), instruction="Think.")
    first, second = data.prompts()
    assert first.messages == ({"role": "user", "content": "How much?\n\nThink."},)
    assert (first.columns["answer"], first.columns["style"]) == ("6", "gsm8k")
    assert second.columns["answer"] == "1,000"
    assert [e.completion for e in data.examples()] == [
        "It is 2*3=6.\n#### 6",
        "A lot: $1,000\n#### 1,000",
    ]
    assert not data.chosen_is_gold
    assert GSM8K(path=str(gsm8k), pair_with_gold=True).chosen_is_gold
    scores = data.verifier()(data.prompts(), [completion("#### 6"), completion("#### 1000")])
    assert scores.total == [1.0, 1.0]


def test_gsm8k_limits_and_sets(gsm8k):
    (gsm8k / "svamp.jsonl").write_text(
        json.dumps({"Body": "Ann has 3.", "Question": "How many?", "Answer": 3.0})
    )
    data = GSM8K(path=str(gsm8k), n_problems=1, svamp=str(gsm8k / "svamp.jsonl"), instruction="")
    assert len(data.prompts()) == len(data.examples()) == 1
    heldout, independent, guard = data.evaluation_sets()
    assert [p.columns["answer"] for p in heldout.prompts] == ["-3"]
    assert independent.prompts[0].messages[0]["content"] == "Ann has 3. How many?"
    assert independent.prompts[0].columns["answer"] == "3"
    assert len(guard.texts) == 10
    assert [s.name for s in GSM8K(path=str(gsm8k)).evaluation_sets()] == ["heldout", "guard"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "Q"}, "row 1 needs the texts question and answer, and has question"),
        ({"question": "Q", "answer": "six"}, "row 1 has no ####"),
        ({"question": "Q", "answer": "#### ?"}, "1 of 1 gold answers cannot be verified"),
    ],
)
def test_gsm8k_rows_that_are_not_gsm8k(tmp_path, row, says):
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=says):
        GSM8K(path=str(tmp_path)).prompts()


def test_gsm8k_folder_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match=r"is no folder.*data\.path=null for the hub"):
        GSM8K(path=str(tmp_path / "x")).prompts()
    with pytest.raises(ConfigError, match=r"there is no file .*train\.jsonl"):
        GSM8K(path=str(tmp_path)).prompts()


@pytest.mark.parametrize("change", [{"n_problems": 0}, {"n_heldout": -1}, {"max_new_tokens": 0}])
def test_counts_below_one_are_refused(change):
    for kind in (GSM8K, MATH):
        with pytest.raises(ValueError, match=f"data.{next(iter(change))} must be at least 1"):
            kind(**change)


def test_the_real_gsm8k(shared):
    data = GSM8K(path=str(shared / "data/gsm8k"), svamp=str(shared / "data/ood/svamp.jsonl"))
    heldout, independent, _ = data.evaluation_sets()
    assert (len(data.prompts()), len(heldout.prompts), len(independent.prompts)) == (
        7473,
        1319,
        1000,
    )
    solutions = [e.completion for e in data.examples()[:500]]
    assert not any("<<" in text or ">>" in text for text in solutions)
    scores = data.verifier()(data.prompts()[:500], [completion(text) for text in solutions])
    assert scores.total == [1.0] * 500


def test_math_reads_the_gold_from_the_box(tmp_path):
    rows = [
        {"problem": "A", "solution": "so $\\boxed{\\frac{1}{2}}$.", "level": "Level 3"},
        {"problem": "B", "solution": "so $\\boxed 2$.", "level": "Level 5"},
        {"problem": "C", "solution": "\\fbox{7}", "level": "Level ?"},
        {"problem": "T", "solution": "\\boxed{1}", "level": "Level 1"},
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "math500.jsonl").write_text(
        json.dumps({"problem": "T", "solution": "it", "answer": "1", "level": 1})
    )
    data = MATH(path=str(tmp_path))
    with pytest.warns(LeftOut, match="1 of 4 training prompts are also held-out"):  # T
        assert [p.columns["answer"] for p in data.prompts()] == ["\\frac{1}{2}", "2", "7"]
    assert [p.columns["answer"] for p in MATH(path=str(tmp_path), levels=(3,)).prompts()] == [
        "\\frac{1}{2}"
    ]
    assert [e.completion for e in data.examples()][1] == "so $\\boxed 2$."
    assert data.prompts()[0].columns["style"] == "math"
    heldout = data.evaluation_sets()[0]
    assert heldout.verifier(list(heldout.prompts), [completion("\\boxed{1}")]).total == [1.0]


def written(folder, **files):
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


MATH_ROW = {"problem": "T", "solution": "\\boxed{3}", "level": "Level 2"}


@pytest.mark.parametrize(
    ("answer", "gold"),
    [(None, "3"), (" 4 ", "4"), (0, "0"), (145.0, "145")],
)
def test_math_gold_is_the_answer_or_else_the_box(answer, gold, tmp_path):
    path = written(tmp_path, math500=[{**MATH_ROW, "answer": answer}])
    assert MATH(path=path).evaluation_sets()[0].prompts[0].columns["answer"] == gold


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"answer": ["1"]}, r"answer must be a text or a number, got \['1'\]"),
        ({"answer": True}, "answer must be a text or a number, got True"),
        ({"answer": " "}, "no answer, and no complete box"),
        ({"solution": "none"}, "no answer, and no complete box"),
        ({"problem": "  "}, "prompt must be a text or turns, got '  '"),
        ({"problem": "half \ud800"}, "half a character at position 5"),
        ({"solution": "\ud800 \\boxed{1}"}, "half a character at position 0"),
    ],
)
def test_math_rows_that_cannot_be_used_are_named(change, says, tmp_path):
    path = written(tmp_path, train=[MATH_ROW, {**MATH_ROW, **change}])
    with pytest.raises(ConfigError, match=f"math/train: 1 of 2 rows .*line 2: {says}"):
        MATH(path=path).prompts()


GSM8K_ROW = {"question": "Q", "answer": "so #### 1"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"question": " "}, "prompt must be a text or turns, got ' '"),
        ({"question": "\udfff"}, "half a character at position 0"),
        ({"answer": "so \ud800 #### 1"}, "half a character at position 3"),
    ],
)
def test_gsm8k_rows_that_cannot_be_used_are_named(change, says, tmp_path):
    path = written(tmp_path, train=[GSM8K_ROW, {**GSM8K_ROW, **change}])
    with pytest.raises(ConfigError, match=f"gsm8k/train: 1 of 2 rows .*line 2: {says}"):
        GSM8K(path=path).prompts()


@pytest.mark.parametrize(
    ("data", "test", "row"),
    [
        (MATH, "math500", lambda i: {**MATH_ROW, "problem": f"T{i}"}),
        (GSM8K, "test", lambda i: {**GSM8K_ROW, "question": f"Q{i}"}),
    ],
)
def test_repeated_and_held_out_problems_are_reported_and_not_trained_on(data, test, row, tmp_path):
    rows = [row(i) for i in (0, 1, 2, 1)]
    made = data(path=written(tmp_path, train=rows, **{test: [row(2), row(9)]}))
    with pytest.warns(LeftOut) as caught:
        assert [p.id.rpartition(":")[2] for p in made.prompts()] == ["1", "2"]
    said = " ".join(str(one.message) for one in caught)
    assert "/train: left out 1 rows that repeat an earlier one" in said
    assert "/train: 1 of 3 training prompts are also held-out ones" in said
    (tmp_path / "other").mkdir()
    rows = [row(1)]
    made = data(path=written(tmp_path / "other", train=rows, **{test: rows}))
    with (
        pytest.warns(LeftOut),
        pytest.raises(ConfigError, match="/train: every training prompt is also a held-out one"),
    ):
        made.prompts()


def test_math_levels_that_no_problem_has_are_named(tmp_path):
    path = written(tmp_path, train=[MATH_ROW], math500=[{**MATH_ROW, "problem": "U"}])
    says = r"data\.levels=\[5\] leaves none of 1 training problems: they have the levels \[2\]"
    with pytest.raises(ConfigError, match=says):
        MATH(path=path, levels=(5,)).prompts()


LONG = "x" * 300


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda path, _: JSONL(path=path).prompts(), "data.path"),
        (lambda path, good: JSONL(path=good, heldout_path=path).prompts(), "data.heldout_path"),
        (lambda path, _: GSM8K(path=path).prompts(), "data.path"),
        (lambda path, good: GSM8K(path=good, svamp=path).evaluation_sets(), "data.svamp"),
        (lambda path, _: MATH(path=path).prompts(), "data.path"),
        (lambda path, good: MATH(path=good, gsm8k=path).evaluation_sets(), "data.gsm8k"),
        (lambda path, _: IFEval(path=path).prompts(), "data.path"),
        (lambda path, _: Learned(path=path), "reward.path"),
    ],
)
@pytest.mark.parametrize("path", [f"/{LONG}", "~nosuchuser/x", "a\0b"])
def test_path_that_the_system_cannot_take_is_named_by_its_setting(make, setting, path, tmp_path):
    row = {"prompt": "Q", "question": "Q", "problem": "Q", "solution": "so", "answer": "#### 1"}
    written(tmp_path, test=[row], math500=[{**row, "answer": "1"}])
    good = str(tmp_path)
    if setting == "data.heldout_path":
        good = f"{written(tmp_path, a=[{'prompt': 'Q'}])}/a.jsonl"
    with pytest.raises(ConfigError, match=rf"^{setting}='.*\({len(path)} characters\) is no path"):
        make(path, good)


def test_math_levels_are_checked():
    with pytest.raises(ValueError, match=r"data.levels must be some of 1 … 5, got \[6\]"):
        MATH(levels=(6,))


def test_the_real_math(shared):
    data = MATH(path=str(shared / "data/math"), gsm8k=str(shared / "data/gsm8k"), levels=(3, 4, 5))
    heldout, independent, _ = data.evaluation_sets()
    assert (len(heldout.prompts), len(independent.prompts)) == (500, 1319)
    # 1,592 + 1,690 + 2,304 = 5,586 of the levels 3 to 5, of which two (level 5) have an empty box.
    with pytest.warns(UserWarning, match="left out 2 of 7500 rows") as caught:
        assert len(data.prompts()) == 5584
    assert "lines 5530, 5532" in str(caught[0].message)


def test_digits_hold_out_unordered_pairs():
    data = Digits(operations="+*")

    def pairs(prompts):
        found = set()
        for prompt in prompts:
            _, _, left, sign, right = prompt.messages[0]["content"].rstrip("?").split()
            found.add((sign, *sorted((int(left), int(right)))))
        return found

    train, heldout = data.prompts(), data.evaluation_sets()[0].prompts
    assert not pairs(train) & pairs(heldout)
    # 45 unordered pairs of 1 … 9 for each operation, 18 (40 %) of them held out; 81 ordered ones.
    assert len(pairs(heldout)) == 36 and len(pairs(train)) == 54
    assert len(train) + len(heldout) == 162


def test_digits_golds_and_wordings():
    data = Digits(operations="+-*", system="Be brief.", suffix=" Answer briefly.")
    for prompt in data.prompts():
        system, user = prompt.messages
        assert system == {"role": "system", "content": "Be brief."}
        _, _, left, sign, right = user["content"].removesuffix("? Answer briefly.").split()
        left, right = int(left), int(right)
        expected = {"+": left + right, "-": left - right, "*": left * right}[sign]
        assert int(prompt.columns["answer"]) == expected >= 0
    _, independent, _ = data.evaluation_sets()
    signs = {p.messages[1]["content"].split()[3] for p in independent.prompts}
    assert signs == {"plus", "minus", "times"}
    assert len({p.id for p in data.prompts()}) == len(data.prompts())


def test_digits_pay_the_last_number_of_a_reply_that_ended():
    data = Digits()
    prompt = next(p for p in data.prompts() if p.columns["answer"] == "12")
    texts = ["The sum is 12.", "12", "12 is 7 + 5", "It is twelve", "So 12"]
    output = data.verifier()(
        [prompt] * 5, [completion(t, truncated=i == 4) for i, t in enumerate(texts)]
    )
    assert output.total == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert output.reasons == ["matched", "matched", "wrong", "no_answer", "truncated"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"operations": "+/"}, r"data.operations must be some of \+ - \*"),
        ({"operations": ""}, "data.operations"),
        ({"smallest": 9}, "smallest < largest"),
        ({"heldout": 0.0}, "data.heldout must lie between 0 and 1"),
        ({"max_new_tokens": 0}, "data.max_new_tokens"),
    ],
)
def test_digits_settings_out_of_range(change, says):
    with pytest.raises(ValueError, match=says):
        Digits(**change)


def test_hub_offline_fails_in_seconds_and_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE is set.*use a local file"):
        Hub(name="openai/gsm8k", subset="main", columns={"prompt": "question"}).prompts()
    with pytest.raises(ConfigError, match="is not in the local cache"):
        GSM8K().prompts()
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("reachable", [False, True])
@pytest.mark.parametrize(
    ("text", "settings", "says"),
    [
        ('{"prompt": "1+1", "answer": "2"}', {"split": "tain"}, r"split tain\).*'train'.*split"),
        ('{"prompt": "1+1", "answer": "2"}', {"subset": "mian"}, r"subset mian.*'default'"),
        ('{"prompt": nonsense', {}, "JSON parse error"),
        (None, {}, "doesn't contain any data files"),
    ],
)
def test_a_folder_that_is_there_is_not_said_to_be_missing(
    text, settings, says, reachable, tmp_path, monkeypatch
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", not reachable)
    monkeypatch.setattr("zoo.data.hub.hub_answers", lambda endpoint: reachable)
    folder = tmp_path / "mine"
    folder.mkdir()
    if text is not None:
        (folder / "train.jsonl").write_text(text + "\n")
    with pytest.raises(ConfigError, match=rf"no usable data set '{folder}' .*{says}"):
        load_hub(str(folder), **settings)


def test_a_file_in_the_place_of_a_data_set_is_told_the_reader_of_files(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "1+1", "answer": "2"}\n')
    with pytest.raises(ConfigError, match=rf"data=jsonl data\.path={file} "):
        load_hub(str(file))


def test_hub_that_does_not_answer_fails_in_seconds(tmp_path, monkeypatch):
    # A server that accepts and never answers: what a broken proxy looks like.
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
        monkeypatch.setattr("zoo.data.hub._SECONDS", 0.3)
        start = time.monotonic()
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1.* did not answer within 0\.3 s"):
            load_hub("owner/name")
        assert time.monotonic() - start < 20


def test_hub_rows_are_read_like_those_of_a_file(monkeypatch):
    import datasets

    table = datasets.Dataset.from_list(
        [{"q": f"What is {i}?", "a": str(i), "extra": i} for i in range(40)]
    )
    asked = []

    def load(name, subset, split, revision):
        asked.append((name, subset, split, revision))
        return table

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = Hub(
        name="owner/made", revision="abc", columns={"prompt": "q", "answer": "a"}, heldout=0.25
    )
    heldout = data.evaluation_sets()[0].prompts
    assert len(data.prompts()) + len(heldout) == 40
    first = next(p for p in (*data.prompts(), *heldout) if p.id == "owner/made:1")
    assert first.messages[0]["content"] == "What is 0?"
    assert first.columns == {"answer": "0", "style": "math", "extra": 0}
    assert asked == [("owner/made", None, "train", "abc")]  # read once
    with pytest.raises(ConfigError, match=r"no column 'prompt'.*data\.columns\.prompt"):
        Hub(name="owner/made", columns={}).prompts()


def test_short_floats_and_odd_times_of_the_hub_are_those_of_a_file(monkeypatch):
    import datasets

    answers = pyarrow.array([3.1, 0.1], pyarrow.float32())
    odd = pyarrow.array([2**62] * 2, pyarrow.timestamp("ms"))
    columns = {"prompt": ["a", "b"], "answer": answers, "when": odd}
    table = datasets.Dataset(pyarrow.table(columns))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **settings: table)
    with pytest.warns(LeftOut, match=r"owner/made: left out the column 'when'"):
        prompts = Hub(name="owner/made", heldout=0.0).prompts()
    read = [p.columns for p in prompts]
    assert read == [{"answer": gold, "style": "math"} for gold in ("3.1", "0.1")]
    with pytest.raises(ConfigError, match=r"owner/made has the column 'when' \(timestamp\[ms\]\)"):
        Hub(name="owner/made", columns={"answer": "when"}, heldout=0.0).prompts()


def test_hub_settings_out_of_range():
    with pytest.raises(ValueError, match=r"data\.name is not set"):
        Hub()
