"""Several data sets in one run: shares, repeats, sources, and a whole small run."""

import json
import math
import re
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from zoo.config import ConfigError
from zoo.data.arithmetic import Arithmetic
from zoo.data.digits import Digits
from zoo.data.ifeval import IFEval
from zoo.data.jsonl import JSONL
from zoo.data.left_out import LeftOut
from zoo.data.mixture import BySource, Mixture, Until, interleave, interleave_once
from zoo.data.offered import rows_of
from zoo.data.plain_texts import PLAIN_TEXTS
from zoo.data.rows import Kind, content_of
from zoo.data.source import DatasetSource, Group
from zoo.data.tokenize import encode_completions, tokenize_prompts
from zoo.data.tokenizer import arithmetic_tokenizer
from zoo.instantiate import build
from zoo.rewards.check import RewardError
from zoo.rewards.random_reward import Random
from zoo.rewards.score import score
from zoo.rollout.engine import Sampling
from zoo.rollout.source import RolloutSource
from zoo.types import Completion, EvaluationSet, Example, Prompt, RewardOutput


def ask(identity, text=None, **columns):
    turns = ({"role": "user", "content": text or identity},)
    return Prompt(identity, turns, columns=columns)


def completion(text):
    return Completion(text, (1, 2), (), False)


@dataclass(frozen=True)
class Says:
    """1 for the texts that hold `word`, None for those that hold a question mark."""

    word: str

    def __call__(self, prompts, completions):
        scores = [None if "?" in c.text else float(self.word in c.text) for c in completions]
        reasons = [f"{self.word} {p.columns['source']}" for p in prompts]
        return RewardOutput(scores, {"inner": list(scores)}, reasons)


@dataclass(frozen=True)
class Few:
    """`n` training and `m` held-out prompts."""

    n: int = 4
    m: int = 2
    word: str = "yes"
    prefix: str = "q"
    limit: int = 8
    kinds: tuple[str, ...] = ("prompts", "examples")
    heldout: tuple[str, ...] = field(default=())

    @property
    def offers(self):
        return frozenset(self.kinds)

    @property
    def max_new_tokens(self):
        return self.limit

    def prompts(self):
        return [ask(f"{self.prefix}{i}", answer=str(i)) for i in range(self.n)]

    def examples(self):
        return [Example(prompt, f"reply to {prompt.id}") for prompt in self.prompts()]

    def verifier(self):
        return Says(self.word)

    def evaluation_sets(self):
        texts = self.heldout or [f"{self.prefix} held out {i}" for i in range(self.m)]
        held = tuple(ask(text, text) for text in texts)
        return [
            EvaluationSet("heldout", "accuracy", held, self.verifier()),
            EvaluationSet("other", "accuracy", held[:1], self.verifier()),
            EvaluationSet("guard", "perplexity", texts=PLAIN_TEXTS),
        ]


def mixed(a=None, b=None, weights=(1, 1), **settings):
    a, b = a or Few(), b or Few(prefix="r", word="no", limit=20)
    parts = {
        "a": {"weight": weights[0], "data": a},
        "b": {"weight": weights[1], "data": b},
    }
    return Mixture(parts, **settings)


# interleaving ------------------------------------------------------------------------------------


def test_interleaving_by_hand():
    # (n + 1/2) / w with w = 3, 1:  a 1/6 < b 1/2: a;  a 1/2 = b 1/2: a, named first;  a 5/6: b;
    # a 5/6 < b 3/2: a;  and the next four are the same again.
    items = {"a": [f"a{i}" for i in range(9)], "b": ["b0", "b1"]}
    weights = {"a": 3, "b": 1}
    woven = interleave(items, weights, Until.shortest)
    assert woven[:4] == ["a0", "a1", "b0", "a2"]
    assert woven == ["a0", "a1", "b0", "a2", "a3", "a4", "b1", "a5", "a6", "a7"]  # b2 is due next
    # Of the longest, b begins again, and then comes a8, the last of the nine.
    assert interleave(items, weights, Until.longest) == [*woven, "b0", "a8"]
    assert interleave_once(items, weights) == [*woven, "a8"]


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.2), (1, 1, 1), (10, 1, 0.01)])
def test_every_beginning_has_the_shares(weights):
    items = {name: [name] * 5000 for name in "abc"}
    shares = dict(zip("abc", weights, strict=True))
    woven = interleave(items, shares, Until.shortest)
    total = sum(weights)
    counts = Counter()
    for t, name in enumerate(woven, 1):
        counts[name] += 1
        for one, weight in shares.items():
            assert abs(counts[one] - t * weight / total) <= 0.5 + 1.5 * weight / total + 1e-9
    # The part that was due is used up: nothing more could be given without bending the shares.
    assert max(counts.values()) == 5000


def test_empty_part_is_passed_over():
    for weave in (*(partial(interleave, until=until) for until in Until), interleave_once):
        assert weave({"a": [], "b": [1, 2]}, {"a": 1, "b": 1}) == [1, 2]


@pytest.mark.parametrize("sizes", [(3, 5), (5, 3), (2, 7, 4), (1, 1), (6, 1, 1)])
def test_longest_is_what_datasets_calls_all_exhausted(sizes):
    names = "abc"[: len(sizes)]
    items = {n: [f"{n}{i}" for i in range(s)] for n, s in zip(names, sizes, strict=True)}
    theirs = datasets.interleave_datasets(
        [datasets.Dataset.from_dict({"row": own}) for own in items.values()],
        stopping_strategy="all_exhausted",
    )["row"]
    woven = interleave(items, dict.fromkeys(names, 1), Until.longest)
    assert woven == theirs[: len(woven)]
    assert len(theirs) - len(woven) < len(sizes)  # they end with a whole round


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.2), (1, 1, 1), (1, 10, 100)])
@pytest.mark.parametrize("sizes", [(40, 900, 7), (3, 3, 3), (500, 20, 60)])
def test_longest_has_the_shares_and_ends_with_the_last_row_that_is_new(sizes, weights):
    items = {n: [f"{n}{i}" for i in range(s)] for n, s in zip("abc", sizes, strict=True)}
    woven = interleave(items, dict(zip("abc", weights, strict=True)), Until.longest)
    assert set(woven) == {row for own in items.values() for row in own}
    assert woven.count(woven[-1]) == 1
    for name, weight in zip("abc", weights, strict=True):
        own = [row for row in woven if row[0] == name]
        share = weight / sum(weights)
        assert abs(len(own) - len(woven) * share) <= 0.5 + 1.5 * share + 1e-9
        assert own == [items[name][i % len(items[name])] for i in range(len(own))]


# prompts -----------------------------------------------------------------------------------------


def test_prompts_carry_their_source_and_are_not_repeated():
    data = mixed(Few(n=30), Few(n=100, prefix="r"), weights=(3, 1))
    prompts = data.prompts()
    assert Counter(p.columns["source"] for p in prompts) == {"a": 30, "b": 10}
    assert len({p.id for p in prompts}) == len({content_of(p) for p in prompts}) == 40
    assert all(p.id.startswith(f"{p.columns['source']}/") for p in prompts)
    assert all("answer" in p.columns for p in prompts)


def test_prompts_of_a_sorted_part_are_drawn_from_all_of_it():
    drawn = mixed(Few(n=10), Few(n=1000, prefix="r")).prompts()
    numbers = [int(p.id.removeprefix("b/r")) for p in drawn if p.columns["source"] == "b"]
    assert len(numbers) == 10 and max(numbers) > 300  # the first ten would give 9
    again = mixed(Few(n=10), Few(n=1000, prefix="r")).prompts()
    assert again == drawn
    other = mixed(Few(n=10), Few(n=1000, prefix="r"), data_seed=1).prompts()
    assert [p.id for p in other] != [p.id for p in drawn]


class Silent:
    """An engine that says one word and keeps the prompts that it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.places: list[str] = []

    def generate(self, prompts, keys, n, sampling):
        self.asked += [ids[0] for ids in prompts]
        self.places += keys
        return [[Completion("yes", (1, 2), (-0.5, -0.5), False)] * n for _ in prompts]


def trained_on(data, epochs=1):
    """The ids that a run's source hands out, in whole epochs of steps of one prompt."""
    prompts = rows_of(data, "prompts")
    tokenized = [replace(p, token_ids=(i, 5)) for i, p in enumerate(prompts)]
    engine = Silent()
    source = RolloutSource(
        tokenized,
        engine,
        data.verifier(),
        groups=1,
        group_size=2,
        sampling=Sampling(1.0, 2, (2,)),
        seed=3,
        pad_token_id=2,
        keep=lambda batch: torch.ones(batch.n_groups, dtype=torch.bool),
        timer=lambda name: nullcontext(),
    )
    ids = [i for step in range(epochs * len(prompts)) for i in source.next(step).batch.prompt_ids]
    assert ids == [prompts[item].id for item in engine.asked]
    assert len(set(engine.places)) == len(ids)  # one that is read again has draws of its own
    return ids


def fitted_on(data, epochs=1):
    """The same of fixed rows, as those of SFT."""
    groups = [
        Group(replace(row.prompt, token_ids=(5,)), ((6, 2),), (row.completion,))
        for row in rows_of(data, "examples")
    ]
    source = DatasetSource(groups, 1, seed=3, pad_token_id=2)
    assert len(source.visited(len(groups))) == len(groups)
    return [i for step in range(epochs * len(groups)) for i in source.next(step).batch.prompt_ids]


@pytest.mark.parametrize("visited_by", [trained_on, fitted_on])
@pytest.mark.parametrize(
    ("until", "counts", "different"),
    [
        (Until.shortest, {"a": 30, "b": 10}, 40),  # b has 50, of which 40 are not read
        # b's last has (49 + 1/2) / 1, so a is taken while (n + 1/2) / 3 is at most that: 0 … 148.
        (Until.longest, {"a": 149, "b": 50}, 80),
    ],
)
def test_an_epoch_of_training_has_the_weights_shares(until, counts, different, visited_by):
    data = mixed(Few(n=30), Few(n=50, prefix="r"), weights=(3, 1), until=until)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LeftOut)
        visited = visited_by(data, epochs=2)
    for epoch in (visited[: len(visited) // 2], visited[len(visited) // 2 :]):
        found = Counter(identity.split("/")[0] for identity in epoch)
        assert found == counts and len(set(epoch)) == different
    assert Counter(visited[: len(epoch)]) == Counter(epoch) and visited[: len(epoch)] != epoch


def test_rows_that_are_read_many_times_are_told_once():
    data = mixed(Few(n=3), Few(n=50, prefix="r"), weights=(1, 1), until=Until.longest)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prompts = data.prompts()
    # a has been read 50 times when b's last row is due: a, named first, is due before it.
    assert Counter(p.columns["source"] for p in prompts) == {"a": 50, "b": 50}
    (told,) = longest_of(caught)
    assert "an epoch of 100 rows reads data.parts.a 16.7 times (3 rows). " in told
    assert issubclass(caught[0].category, LeftOut) and "data.parts.b" not in told


@pytest.mark.parametrize("until", Until)
def test_a_few_readings_are_not_worth_a_word(until):
    data = mixed(Few(n=5), Few(n=20, prefix="r"), weights=(1, 1), until=until)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(data.prompts()) == {Until.shortest: 10, Until.longest: 40}[until]


def test_a_list_that_would_have_no_end_is_refused_by_the_weight_that_makes_it_so():
    data = mixed(Few(n=30), Few(n=50, prefix="r"), weights=(1, 1e-6), until=Until.longest)
    said = "data.parts.b (50 rows, 1e-06 of an epoch) is used up: an epoch would have 5e+07 rows, "
    said += "of which 80 are different ones. Raise data.parts.b.weight (now 1e-06), or"
    with pytest.raises(ConfigError, match=re.escape(said)):
        data.prompts()
    assert len(mixed(Few(n=30), Few(prefix="r"), weights=(1, 1e-6)).prompts()) == 30
    with pytest.raises(ConfigError, match=r"would have 5e\+201 rows"):
        mixed(Few(n=9), Few(n=50, prefix="r"), weights=(1e100, 1e-100), until="longest").prompts()


def test_rows_that_are_there_again_are_checked_and_tokenized_once(monkeypatch):
    tokenizer, read = arithmetic_tokenizer(), Counter()
    original = type(tokenizer).__call__

    def counting(self, texts, *rest, **options):
        read.update(len(texts) * ["text"])
        return original(self, texts, *rest, **options)

    a, b = ask("a"), ask("b")
    twice = [tokenize_prompts(tokenizer, [one])[0] for one in (a, b, a, a)]
    monkeypatch.setattr(type(tokenizer), "__call__", counting)
    tokenize_prompts(tokenizer, [a, b])
    different = read.pop("text")
    prompts = tokenize_prompts(tokenizer, [a, b, a, a])
    assert read.pop("text") == different and prompts == twice
    assert prompts[0] is prompts[2] is prompts[3]
    texts, stops = ["1", "1", "1", "2"], (tokenizer.eos_token_id,)
    alone = [
        encode_completions(tokenizer, [p], [t], stops)[0]
        for p, t in zip(prompts, texts, strict=True)
    ]
    read.clear()
    encode_completions(tokenizer, [prompts[i] for i in (0, 1, 3)], ["1", "1", "2"], stops)
    different = read.pop("text")
    assert encode_completions(tokenizer, prompts, texts, stops) == alone
    assert read.pop("text") == different

    asked = Counter()

    class Asked(Prompt):
        def __getattribute__(self, name):
            asked[name] += name == "messages"
            return super().__getattribute__(name)

    @dataclass
    class Own:
        rows: list

        def prompts(self):
            return self.rows

    one = Asked("one", text="1 + 1 =")
    rows_of(Own([one]), "prompts")
    once = asked["messages"]
    rows_of(Own([one] * 5), "prompts")
    assert once and asked["messages"] == 2 * once
    with pytest.raises(ConfigError, match="got int at place 2: 3"):
        rows_of(Own([one, one, 3, one, 4]), "prompts")


def sizes_of(data):
    """Different problems in all, by what is trained and judged on, and by texts that are there."""
    judged = data.evaluation_sets()[0].prompts
    rows = {content_of(p) for p in data.prompts()}, {content_of(p) for p in judged}
    assert not rows[0] & rows[1]
    return len(rows[0]) + len(rows[1]), len(rows[0] | rows[1])


def test_a_mixture_is_woven_anew_where_its_parts_data_changed_and_there_alone(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts").mkdir()  # a folder called as a kind of rows
    files = {name: tmp_path / f"{name}.jsonl" for name in "ab"}

    def write(name, count):
        rows = [{"prompt": f"{name} {i} + 1 =", "answer": str(i + 1)} for i in range(count)]
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))

    for name in files:
        write(name, 20)
    data = Mixture(
        parts={
            name: {"data": JSONL(path=str(file), heldout=0.25), "weight": 1.0}
            for name, file in files.items()
        },
        until=Until.longest,
    )
    first = data.prompts()
    (tmp_path / "prompts" / "new.txt").write_text("1")
    assert all(a is b for a, b in zip(first, data.prompts(), strict=True))
    assert sizes_of(data) == (40, 40)
    write("b", 80)
    assert sizes_of(data) == (100, 100)


def test_prompt_that_two_parts_have_counts_for_the_first():
    with pytest.warns(UserWarning, match=r"data\.parts\.b: left out 3 of 5 rows that an earlier"):
        prompts = mixed(Few(n=3), Few(n=5)).prompts()
    assert Counter(p.columns["source"] for p in prompts) == {"a": 3, "b": 2}


def longest_of(caught):
    return [str(one.message) for one in caught if "until=longest" in str(one.message)]


@pytest.mark.parametrize("until", Until)
def test_a_held_out_problem_is_there_once_whatever_ends_the_training_rows(until):
    data = mixed(Few(m=3), Few(m=40, prefix="r"), weights=(3, 1), until=until)
    heldout = data.evaluation_sets()[0].prompts
    assert Counter(p.columns["source"] for p in heldout) == {"a": 3, "b": 40}
    assert len({p.id for p in heldout}) == 43


def parts_of_rows(
    folder: Path, kind: str, rows: dict[str, list[dict[str, Any]]], **more: Any
) -> Any:
    """A mixture of files, named by their parts."""
    parts: dict[str, Any] = {}
    for name, own in rows.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in own))
        parts[name] = {"weight": 1, "_target_": "zoo.data.jsonl.JSONL", "path": str(file)}
        parts[name] |= {"kind": kind, **more}
    return Mixture(parts=parts, until=Until.longest)


def test_a_held_out_problem_that_two_parts_have_counts_once(tmp_path: Path):
    rows = {
        name: [{"prompt": f"{i} + 1", "answer": str(i + wrong)} for i in range(60)]
        for name, wrong in (("a", 1), ("b", 2))
    }
    rows["b"] += [{"prompt": f"{i} - 1", "answer": str(i - 1)} for i in range(60)]
    with pytest.warns(LeftOut) as caught:
        (heldout, *_) = parts_of_rows(tmp_path, "prompts", rows, heldout=0.3).evaluation_sets()
    asked = Counter(map(content_of, heldout.prompts))
    own = [
        {content_of(p) for p in JSONL(str(tmp_path / f"{n}.jsonl"), heldout=0.3)._split()[1]}
        for n in rows
    ]
    both = len(own[0] & own[1])
    assert max(asked.values()) == 1 and asked.keys() == own[0] | own[1] and both > 5
    (told,) = [str(one.message) for one in caught if "held-out" in str(one.message)]
    assert f"left out {both} of {len(own[1])} held-out problems that an earlier part" in told
    assert f", {both} of them with another answer (b/b.jsonl:" in told


@pytest.mark.parametrize(
    ("kind", "one", "other", "told"),
    [
        ("pairs", {"chosen": "x", "rejected": "y"}, {"chosen": "y", "rejected": "x"}, "both ways"),
        (
            "rankings",
            {"completions": ["x", "y"], "scores": [1, 0]},
            {"completions": ["x", "y"], "scores": [0, 1]},
            "both ways round",
        ),
        (
            "labelled",
            {"completion": "x", "label": True},
            {"completion": "x", "label": False},
            "true and",
        ),
    ],
)
def test_parts_that_contradict_each_other_are_told_of(
    kind: str, one: dict[str, Any], other: dict[str, Any], told: str, tmp_path: Path
):
    rows = {name: [{"prompt": f"{i}?", **row} for i in range(9)] for name, row in
            (("a", one), ("b", other))}  # fmt: skip
    with pytest.warns(LeftOut) as caught:
        getattr(parts_of_rows(tmp_path, kind, rows), kind)()
    (said,) = [str(w.message) for w in caught if told in str(w.message)]
    assert said.startswith("data=mixture: 9 ") and "(a/a.jsonl:1 and b/b.jsonl:1;" in said


def test_prompt_that_another_part_judges_on_is_not_trained_on():
    data = mixed(Few(n=4), Few(prefix="r", heldout=("q1", "other")))
    with pytest.warns(UserWarning, match=r"data\.parts\.a: 1 of 4 training prompts are also"):
        prompts = data.prompts()
    assert "a/q1" not in {p.id for p in prompts}
    assert len([p for p in prompts if p.columns["source"] == "a"]) == 3


def test_part_with_nothing_of_its_own_is_refused():
    with (
        pytest.warns(UserWarning, match="left out 3 of 3"),
        pytest.raises(ConfigError, match=r"data\.parts\.b has nothing of its own"),
    ):
        mixed(Few(n=3), Few(n=3)).prompts()


def test_examples_are_mixed_alike():
    examples = mixed(weights=(1, 3)).examples()
    assert {e.prompt.columns["source"]: e.completion.split()[-1][0] for e in examples} == {
        "a": "q",
        "b": "r",
    }
    assert all(e.completion.endswith(e.prompt.id.split("/")[1]) for e in examples)


def test_offers_are_what_all_parts_offer():
    data = mixed(Few(), Few(prefix="r", kinds=("prompts",)))
    assert data.offers == {"prompts"}
    with pytest.raises(ConfigError, match=r"asked for examples.*in common: prompts"):
        data.examples()
    with pytest.raises(ValueError, match=r"no kind of rows in common.*a: examples; b: prompts"):
        mixed(Few(kinds=("examples",)), Few(kinds=("prompts",)))


def test_limit_is_the_largest():
    assert mixed().max_new_tokens == 20


# verifier ----------------------------------------------------------------------------------------


def test_each_prompt_is_judged_by_its_own_part():
    data = mixed()
    a, b = (next(p for p in data.prompts() if p.columns["source"] == name) for name in "ab")
    texts = [completion(text) for text in ("yes", "yes", "no", "no", "what?")]
    output = data.verifier()([a, b, a, b, b], texts)
    assert output.total == [1.0, 0.0, 0.0, 1.0, None]
    assert output.components == {
        "a": [1.0, None, 0.0, None, None],
        "b": [None, 0.0, None, 1.0, None],
    }
    assert output.reasons == ["yes a", "no b", "yes a", "no b", "no b"]


def test_source_without_rows_has_no_component():
    data = mixed()
    a = next(p for p in data.prompts() if p.columns["source"] == "a")
    assert set(data.verifier()([a], [completion("yes")]).components) == {"a"}


def test_reward_of_a_part_replaces_its_verifier_in_training_only():
    parts = {
        "a": {
            "weight": 1,
            "data": Few(),
            "reward": {"_target_": "zoo.rewards.random_reward.Random"},
        },
        "b": {"weight": 1, "data": Few(prefix="r")},
    }
    data = Mixture(parts)
    verifier = data.verifier()
    assert verifier is data.verifier()  # what a reward has loaded stays loaded
    assert isinstance(verifier, BySource) and verifier.rewards["a"] == Random()
    assert data.evaluation_sets()[0].verifier.rewards["a"] == Says("yes")


def test_rewards_of_parts_are_loaded():
    loaded = []

    class Loads(Says):
        def load(self, device):
            loaded.append((self.word, device))

    BySource({"a": Loads("x"), "b": Says("y")}).load("cpu")
    assert loaded == [("x", "cpu")]


def test_prompt_of_no_part_is_named():
    with pytest.raises(
        ValueError, match="prompt 'x' has the source None, and there are rewards for a"
    ):
        BySource({"a": Says("x")})([ask("x")], [completion("x")])


def test_wrong_output_of_a_part_is_named():
    def one_score(prompts, completions):
        return RewardOutput([1.0])

    prompts = [ask(str(i), source="a") for i in range(2)]
    with pytest.raises(ValueError, match="reward a returned 1 scores for 2 completions"):
        BySource({"a": one_score})(prompts, [completion("x")] * 2)


@pytest.mark.parametrize("answer", [math.nan, "raise"])
def test_a_failure_names_the_row_of_the_round_and_its_prompt(answer):
    def fails(prompts, completions):
        if answer == "raise" and any(c.text == "bad" for c in completions):
            raise KeyError("x")
        return RewardOutput([answer if c.text == "bad" else 1.0 for c in completions])

    prompts = [ask(str(i), source="ab"[i % 2]) for i in range(6)]
    rows = [completion("bad" if i == 5 else "x") for i in range(6)]
    with pytest.raises(RewardError, match="row 5") as caught:
        score(BySource({"a": Says("x"), "b": fails}), prompts, rows)
    assert "prompt 5" in str(caught.value)


@dataclass(frozen=True)
class Unjudged(Few):
    def verifier(self):
        return None

    def evaluation_sets(self):
        return [EvaluationSet("guard", "perplexity", texts=PLAIN_TEXTS)]


def test_part_that_nothing_judges_is_refused_unless_none_is_judged():
    with pytest.raises(ConfigError, match=r"data\.parts\.b has no verifier.*parts\.b\.reward="):
        mixed(Few(), Unjudged(prefix="r")).verifier()
    assert mixed(Unjudged(), Unjudged(prefix="r")).verifier() is None
    sets = mixed(Few(), Unjudged(prefix="r")).evaluation_sets()
    assert {p.columns["source"] for p in sets[0].prompts} == {"a"}


def test_part_whose_answers_have_another_name_is_told_which(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Q{i}", "anwser": i}) + "\n" for i in range(9)))
    with pytest.raises(ConfigError, match=r"set data\.parts\.b\.columns\.answer=anwser\."):
        mixed(Few(), JSONL(path=str(file), heldout=0.0)).verifier()


# evaluation --------------------------------------------------------------------------------------


def test_sets_are_one_heldout_and_the_parts_own():
    data = mixed(Few(m=6), Few(prefix="r", m=4, word="no"), weights=(2, 1))
    sets = {item.name: item for item in data.evaluation_sets()}
    assert list(sets) == ["heldout", "a_other", "b_other", "guard"]
    heldout = sets["heldout"].prompts
    assert len(heldout) == 10  # all of them, in the shares for as long as both last
    assert Counter(p.columns["source"] for p in heldout[:6]) == {"a": 4, "b": 2}
    assert [p.columns["source"] for p in sets["b_other"].prompts] == ["b"]
    scores = sets["heldout"].verifier(list(heldout), [completion("no")] * 10).total
    assert [s == 1 for s in scores] == [p.columns["source"] == "b" for p in heldout]
    assert sets["guard"].texts == PLAIN_TEXTS


def test_guards_that_differ_keep_their_parts_names():
    small = Arithmetic(n_problems=10, n_examples=20, n_heldout=5, n_independent=5, n_texts=5)
    data = Mixture({"sums": small, "digits": Digits()})
    names = [item.name for item in data.evaluation_sets()]
    assert names == [
        "heldout",
        "sums_independent",
        "digits_independent",
        "sums_guard",
        "digits_guard",
    ]


# settings ----------------------------------------------------------------------------------------

DIGITS = {"_target_": "zoo.data.digits.Digits", "weight": 1}


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({}, r"data\.parts is empty"),
        (
            {"a": {**DIGITS, "larges": 4}},
            r"data\.parts\.a\.larges .*Did you mean data\.parts\.a\.largest",
        ),
        (
            {"a": {**DIGITS, "weight": 0}},
            r"data\.parts\.a\.weight must be above 0 .*got 0\. .*~data\.parts\.a",
        ),
        *(
            ({"a": {**DIGITS, "weight": w}}, r"data\.parts\.a\.weight must be above 0 \(1e-100 to")
            for w in (10**400, 1e-310, math.inf, math.nan, -1.0)  # 1 / 1e-310 is infinite
        ),
        ({"a": {**DIGITS, "weight": "x"}}, r"data\.parts\.a\.weight must be a number, got 'x'"),
        ({"a": {"_target_": "zoo.data.digits.Digits"}}, r"a\.weight must be a number, got None"),
        (
            {"a": {**DIGITS, "heldout": 2}},
            r"^data\.parts\.a\.heldout must lie .*Try data\.parts\.a\.heldout=0\.4",
        ),
        ({"a": {"weight": 1}}, r"data\.parts\.a has no class: the mapping lacks _target_"),
        (
            {"a": {"weight": 1, "data": Digits(), "largest": 3}},
            r"data\.parts\.a has data and largest",
        ),
        (
            {"a": {"weight": 1, "data": Random()}},
            r"data\.parts\.a is a Random, and no data set.*no offers",
        ),
        (
            {"a": {**DIGITS, "reward": {"_target_": "zoo.rewards.verifiable.Verifer"}}},
            "Did you mean .*Verifier",
        ),
        (
            {"a": {**DIGITS, "_target_": "zoo.data.digits.Digit"}},
            r"Did you mean zoo\.data\.digits\.Digits",
        ),
        ({"total": DIGITS}, "must be a plain word that names no other curve.*Try total_1"),
        ({"a/b": DIGITS}, r"a part's name must be a plain word .*got 'a/b'\. Try a_b\."),
        ({"dig-its": DIGITS}, r"got 'dig-its'\. Try dig_its\."),
        ({1: DIGITS}, r"got 1\. Try part_1\."),
        ({True: DIGITS}, r"got True\. Try part_True\."),
        ({"…": DIGITS}, r"got '…'\. Try part\."),
        ({"a": Mixture({"b": DIGITS})}, r"data\.parts\.a is a mixture itself"),
        (
            {"a": {"_target_": "zoo.data.gsm8k.GSM8K", "weight": 1, "pair_with_gold": True}},
            r"data\.parts\.a\.pair_with_gold is for the set alone",
        ),
    ],
)
def test_part_that_cannot_be_used_is_named(parts, says):
    with pytest.raises(ConfigError, match=says):
        build({"_target_": "zoo.data.mixture.Mixture", "parts": parts}, "data")


def test_a_part_may_give_its_rows_one_by_one():
    class Generates(Few):
        def prompts(self):
            yield from super().prompts()

    prompts = mixed(Few(n=6), Generates(n=6, prefix="r")).prompts()
    assert Counter(p.columns["source"] for p in prompts) == {"a": 6, "b": 6}


@pytest.mark.parametrize(
    ("verb", "made", "says"),
    [
        (
            "prompts",
            [("Q", "4")],
            r"prompts\(\) must return a list of Prompt, got tuple at pl",
        ),
        (
            "evaluation_sets",
            None,
            r"evaluation_sets\(\) must return a list of EvaluationSet,",
        ),
    ],
)
def test_what_a_part_gives_is_checked_as_if_it_were_alone(verb, made, says):
    own = type("Own", (Few,), {verb: lambda self: made})
    with pytest.raises(ConfigError, match=rf"data\.parts\.b: data Own: {says}"):
        mixed(Few(), own(prefix="r")).prompts()


def test_a_prompt_that_a_part_has_twice_is_there_once():
    class Repeats(Few):
        def prompts(self):
            return [*super().prompts(), ask("again", f"{self.prefix}0", answer="0")]

    with pytest.warns(LeftOut, match=r"data\.parts\.b: left out 1 rows that repeat an earlier one"):
        prompts = mixed(Few(), Repeats(prefix="r")).prompts()
    assert len(prompts) == 8


def test_faults_of_a_parts_file_are_named_by_the_part(tmp_path):
    data = Mixture({"mine": JSONL(path=str(tmp_path / "no.jsonl")), "digits": Digits()})
    with pytest.raises(ConfigError, match=r"there is no file .*Check data\.parts\.mine\.path"):
        data.prompts()
    (tmp_path / "no.jsonl").write_text('{"promt": "a"}\n')
    with pytest.raises(ConfigError, match=r"Set data\.parts\.mine\.columns\.prompt"):
        Mixture({"mine": JSONL(path=str(tmp_path / "no.jsonl")), "digits": Digits()}).prompts()


def test_pairs_of_several_files_are_mixed(tmp_path):
    for name in "ab":
        rows = [{"prompt": f"{name}{i}", "chosen": "x", "rejected": "y"} for i in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parts = {name: JSONL(path=str(tmp_path / f"{name}.jsonl"), kind=Kind.pairs) for name in "ab"}
    data = Mixture(parts)
    assert data.offers == {"pairs"} and data.verifier() is None
    pairs = data.pairs()
    assert Counter(p.prompt.columns["source"] for p in pairs) == {"a": 3, "b": 3}
    assert {p.chosen for p in pairs} == {"x"}


@pytest.mark.parametrize(
    ("kind", "same", "other"),
    [
        ("examples", {"completion": "x"}, {"completion": "y"}),
        ("pairs", {"chosen": "x", "rejected": "y"}, {"chosen": "x", "rejected": "z"}),
        ("rankings", {"completions": ["x", "y"]}, {"completions": ["y", "x"]}),
        ("labelled", {"completion": "x", "label": True}, {"completion": "x", "label": False}),
    ],
)
def test_another_answer_to_a_prompt_of_an_earlier_part_is_no_repeat(kind, same, other, tmp_path):
    files = {"a": [same] * 3, "b": [same, other, other]}
    parts = {}
    for name, rows in files.items():
        lines = [json.dumps({"prompt": f"q{i}", **row}) for i, row in enumerate(rows)]
        (tmp_path / name).write_text("\n".join(lines))
        parts[name] = JSONL(path=str(tmp_path / name), kind=Kind(kind))
    with pytest.warns(LeftOut, match=r"data\.parts\.b: left out 1 of 3 rows that an earlier"):
        rows = getattr(Mixture(parts, until=Until.longest), kind)()
    found = {(content_of(row.prompt), row.prompt.columns["source"]) for row in rows}
    assert found == {("q0", "a"), ("q1", "a"), ("q2", "a"), ("q1", "b"), ("q2", "b")}


def test_a_prompt_that_is_judged_on_is_in_no_row_whatever_the_completion():
    class Other(Few):
        def examples(self):
            return [Example(ask("q1"), "another"), Example(ask("r"), "reply")]

    data = mixed(Few(heldout=("q1", "other")), Other(prefix="r"))
    with pytest.warns(LeftOut, match="are also"):
        examples = data.examples()
    assert {content_of(e.prompt) for e in examples} & {"q1", "r"} == {"r"}


def test_a_column_source_of_a_parts_own_gives_way_to_its_name_and_is_said(tmp_path):
    rows = [{"prompt": f"q{i}", "source": "textbook" if i else "a"} for i in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = Mixture({"a": JSONL(path=str(tmp_path / "a.jsonl"), heldout=0.0)})
    with pytest.warns(LeftOut, match=r"data\.parts\.a: 2 of 3 prompts have .* source .*'textbook'"):
        assert {prompt.columns["source"] for prompt in data.prompts()} == {"a"}


# IFEval ------------------------------------------------------------------------------------------


def written(folder, rows):
    text = "\n".join(json.dumps(row) for row in rows)
    (folder / "input_data.jsonl").write_text(text)
    return str(folder)


def instructed(key, **changes):
    return {
        "key": key,
        "prompt": f"Write {key} without commas.",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{"num_words": None}],
        **changes,
    }


def test_ifeval_splits_by_key_alone(tmp_path):
    rows = [instructed(key) for key in range(200)]
    first = IFEval(path=written(tmp_path, rows))
    train, heldout = first.prompts(), first.evaluation_sets()[0].prompts
    assert len(train) + len(heldout) == 200 and not {p.id for p in train} & {p.id for p in heldout}
    assert 30 < len(heldout) < 90  # 0.3 of 200, give or take five deviations
    (tmp_path / "fewer").mkdir()
    fewer = IFEval(path=written(tmp_path / "fewer", [{**r, "prompt": "Else."} for r in rows[::-2]]))
    assert {p.id for p in fewer.evaluation_sets()[0].prompts} <= {p.id for p in heldout}
    assert train[0].columns["kwargs"] == [{}]  # the nulls of a table are no arguments
    scores = first.verifier()(train[:2], [completion("a b"), completion("a, b")])
    assert scores.total == [1.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"instruction_id_list": ["punctuation:no_coma"]},
            r"line 2: .*Did you mean punctuation:no_comma",
        ),
        ({"kwargs": []}, "line 2: 1 instructions and 0 kwargs"),
        ({"kwargs": ["x"]}, "line 2: kwargs must hold one mapping"),
        ({"prompt": None}, "line 2: no prompt"),
        ({"instruction_id_list": [3]}, "line 2: instruction_id_list must hold texts"),
        (
            {"instruction_id_list": ["keywords:existence"]},
            "line 2: keywords:existence: keywords must be a list of texts",
        ),
        (
            {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "xx"}]},
            "line 2: language:response_language",
        ),
    ],
)
def test_ifeval_rows_that_cannot_be_checked_are_named(tmp_path, changes, says):
    path = written(tmp_path, [instructed(1), instructed(2, **changes)])
    with pytest.raises(ConfigError, match=says):
        IFEval(path=path).prompts()


def test_real_sets_in_their_shares(shared):
    folder = shared / "data"
    data = build(
        {
            "_target_": "zoo.data.mixture.Mixture",
            "parts": {
                "gsm8k": {
                    "weight": 0.75,
                    "_target_": "zoo.data.gsm8k.GSM8K",
                    "path": str(folder / "gsm8k"),
                },
                "ifeval": {
                    "weight": 0.25,
                    "_target_": "zoo.data.ifeval.IFEval",
                    "path": str(folder / "ifeval"),
                },
            },
        },
        "data",
    )
    counts = Counter(p.columns["source"] for p in data.prompts())
    assert 300 < counts["ifeval"] < 450  # 0.7 of 540, all of them
    assert abs(counts["gsm8k"] - 3 * counts["ifeval"]) <= 2
    problems = Counter(p.columns["source"] for p in data.evaluation_sets()[0].prompts)
    assert problems["gsm8k"] == 1319 and problems["ifeval"] == 540 - counts["ifeval"]


# a whole run -------------------------------------------------------------------------------------


def test_small_run_has_a_curve_for_each_source(tmp_path):
    from tests.e2e.small import SMALL, folder_of
    from zoo.compose import compose
    from zoo.instantiate import structured
    from zoo.train.run import run

    plain = [text for text in SMALL if not text.startswith(("data.", "reward="))]
    coin = "{_target_: zoo.rewards.random_reward.Random}"
    sums = (
        "{weight: 0.5, _target_: zoo.data.arithmetic.Arithmetic, n_problems: 20, n_examples: 30, "
        f"n_heldout: 4, n_independent: 2, n_texts: 2, reward: {coin}}}"
    )
    digits = f"{{weight: 0.5, _target_: zoo.data.digits.Digits, largest: 4, reward: {coin}}}"
    overrides = [
        *plain,
        "data=mixture",
        *(f"~data.parts.{name}" for name in ("gsm8k", "math", "ifeval")),
        f"+data.parts.sums={sums}",
        f"+data.parts.digits={digits}",
        "reward=null",
        "train.steps=2",
        "train.groups=6",
        "evaluate.every=0",
        "evaluate.problems=6",
        f"output={tmp_path}",
    ]
    run(structured(compose(overrides)))
    folder = folder_of(tmp_path)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    means = [
        step[f"reward/{name}"]
        for step in steps
        for name in ("sums", "digits")
        if f"reward/{name}" in step
    ]
    assert len(means) >= 3 and all(0 <= mean <= 1 for mean in means)
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    for row in rows:
        source = row["prompt_id"].split("/")[0]
        other = {"sums": "digits", "digits": "sums"}[source]
        assert row["rewards"][source] == row["reward"]
        assert row["rewards"].get(other) is None
    assert {row["prompt_id"].split("/")[0] for row in rows} == {"sums", "digits"}
    evals = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    heldout = next(record for record in evals if record["set"] == "heldout")
    right = {"sums": [], "digits": []}
    for identity, outcomes in zip(heldout["problem_ids"], heldout["outcomes"], strict=True):
        right[identity.split("/")[0]] += outcomes
    assert set(heldout["by_source"]) == {"sums", "digits"}
    for name, outcomes in right.items():
        assert heldout["by_source"][name] == sum(outcomes) / len(outcomes)
    assert {record["set"] for record in evals} >= {"sums_independent", "digits_guard"}
    # Of one source there is nothing to tell apart.
    assert not [r for r in evals if r["set"] != "heldout" and "by_source" in r]
