"""A data set of somebody else is refused before anything loads, with what is wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from zoo.build import check
from zoo.compose import compose
from zoo.config import ConfigError
from zoo.data.offered import check_golds, check_offers, overlap, rows_of, sets_of, verifier_of
from zoo.instantiate import structured
from zoo.rewards.verifiable import LastNumber, Verifier
from zoo.types import EvaluationSet, Example, Prompt, RewardOutput


def prompt(i: int, **changes: Any) -> Prompt:
    return Prompt(**{"id": f"p{i}", "text": f"say {i}", "columns": {"answer": str(i)}, **changes})


def judge(prompts: list[Prompt], completions: list[Any]) -> RewardOutput:
    return RewardOutput([1.0] * len(completions))


class Judge:
    """A reward that somebody forgot to make."""

    def __call__(self, prompts: list[Prompt], completions: list[Any]) -> RewardOutput:
        return judge(prompts, completions)


HELDOUT = EvaluationSet("heldout", "accuracy", (prompt(8), prompt(9)), judge)


class Mine:
    """Right in everything but what the arguments say."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.offers = given.get("offers", frozenset({"prompts"}))
        self.max_new_tokens = given.get("max_new_tokens", 8)

    def prompts(self) -> Any:
        return self.given.get("prompts", [prompt(0), prompt(1)])

    def examples(self) -> Any:
        return self.given.get("examples")

    def verifier(self) -> Any:
        return judge

    def evaluation_sets(self) -> Any:
        return self.given.get("sets", [HELDOUT])


def leaves(self: Any = None) -> None:
    raise SystemExit(0)


def test_what_is_right_passes() -> None:
    assert check_offers(Mine(offers=["prompts", "examples"])) == {"prompts", "examples"}
    assert rows_of(Mine(prompts=(prompt(i) for i in range(2))), "prompts") == [prompt(0), prompt(1)]
    turn = {"role": "user", "content": "hello"}
    (made,) = rows_of(Mine(prompts=[prompt(0, text=None, messages=(turn,))]), "prompts")
    assert made.messages == (turn,)
    repeated = [Example(prompt(0), "a"), Example(prompt(0), "b")]  # two answers to one question
    assert rows_of(Mine(examples=repeated), "examples") == repeated
    texts = EvaluationSet("guard", "perplexity", texts=("a b",))
    assert sets_of(Mine(sets=[HELDOUT, texts])) == [HELDOUT, texts]


@pytest.mark.parametrize(
    ("offers", "found"),
    [
        (None, "got None"),
        ("prompts", "got 'prompts'"),
        ({"promtps"}, "got {'promtps'}"),
        (set(), "got set()"),
        (leaves, "got a method: make it a property"),
        ({"pairs"}, "offers pairs and has no method pairs()"),
    ],
)
def test_offers_are_known_kinds_with_their_methods(offers: Any, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_offers(Mine(offers=offers))
    assert "data Mine" in str(caught.value) and found in str(caught.value)


@pytest.mark.parametrize(
    ("prompts", "found"),
    [
        (None, "must return a list of Prompt, got None"),
        ("abc", "must return a list of Prompt, got 'abc'"),
        ([prompt(0), "b"], "got str at place 1: 'b'"),
        ([{"id": "a", "text": "b"}], "got dict at place 0"),
        ([prompt(0), prompt(1, id="p0")], "1 ids are of several prompts (p0)"),
        ([prompt(0, id=3)], "place 0: the prompt's id must be a text, got 3"),
        ([prompt(0, columns=None)], "the columns of prompt 'p0' must be a mapping, got None"),
        ([prompt(0, text=b"x")], "the text of prompt 'p0' must be a text, got b'x'"),
        (
            [prompt(0, columns={"answer": "4", "notes": [{"by": "x\ud83d"}]})],
            "the columns of prompt 'p0' must be whole characters, got 'half a character at",
        ),
        ([prompt(0, text="x\ud83d")], "the text of prompt 'p0' must be whole characters"),
        ([prompt(0, text="")], "must have either messages or a text, got 'neither'"),
        ([prompt(0, messages=({"role": "user", "content": "b"},))], "got 'both'"),
        ([prompt(0, text=None, messages="hello")], "must be a tuple of turns, got 'hello'"),
        ([prompt(0, text=None, messages=({"role": "user"},))], "must be {role: text, content"),
    ],
)
def test_prompts_are_prompts(prompts: Any, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rows_of(Mine(prompts=prompts), "prompts")
    assert "data Mine: prompts()" in str(caught.value) and found in str(caught.value)


def test_a_prompt_that_is_given_again_is_no_other_prompt_of_its_id() -> None:
    again = [prompt(0), prompt(1)] * 3
    assert rows_of(Mine(prompts=again), "prompts") == again
    with pytest.raises(ConfigError, match=r"1 ids are of several prompts \(p1\)"):
        rows_of(Mine(prompts=[*again, prompt(1)]), "prompts")


def test_a_row_holds_a_prompt() -> None:
    with pytest.raises(ConfigError, match=r"examples\(\), place 0: the prompt must be a Prompt"):
        rows_of(Mine(examples=[Example("say 0", "0")]), "examples")  # pyright: ignore


@pytest.mark.parametrize(
    ("sets", "found"),
    [
        (None, "must return a list of EvaluationSet, got None"),
        ([HELDOUT, HELDOUT], "'heldout' is there 2 times"),
        ([replace(HELDOUT, name="a/b")], "must have a word without / as its name"),
        ([replace(HELDOUT, kind="accurracy")], "kind accuracy or perplexity, got 'accurracy'"),
        ([replace(HELDOUT, verifier=None)], "has no verifier that could be called (None)"),
        ([replace(HELDOUT, prompts=("say 8",))], "must hold prompts, got 'say 8' at 0"),
        ([replace(HELDOUT, prompts=(prompt(8), prompt(8)))], "1 ids are of several prompts (p8)"),
    ],
)
def test_evaluation_sets_can_be_judged(sets: Any, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sets_of(Mine(sets=sets))
    assert "data Mine" in str(caught.value) and found in str(caught.value)


@pytest.mark.parametrize("verb", ["prompts", "evaluation_sets"])
def test_a_method_that_leaves_the_program_is_an_error(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mine, verb, leaves)
    with pytest.raises(ConfigError, match=rf"{verb}\(\) called exit\(0\)"):
        rows_of(Mine(), verb) if verb == "prompts" else sets_of(Mine())


def missing(self: Any = None) -> None:
    raise FileNotFoundError("no rows.jsonl")


@pytest.mark.parametrize("verb", ["prompts", "evaluation_sets", "verifier"])
def test_what_a_method_raises_is_told_with_its_place(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mine, verb, missing)
    said = rf"data Mine: {verb}\(\) raised FileNotFoundError: no rows.jsonl \(test_offered.py:\d+\)"
    asks = {"prompts": partial(rows_of, kind="prompts"), "verifier": verifier_of}
    with pytest.raises(RuntimeError, match=said) as told:
        asks.get(verb, sets_of)(Mine())
    assert isinstance(told.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize(
    ("verb", "made", "says"),
    [
        ("verifier", property(lambda self: judge), r"verifier\(self\), and is a property"),
        ("verifier", Judge(), r"verifier\(self\), and it takes \(prompts: .* 'prompts'"),
        ("prompts", lambda self, split: [], r"prompts\(self\), and it takes \(split\): .* 'split'"),
        ("evaluation_sets", [HELDOUT], r"evaluation_sets\(self\), got \[Eval"),
    ],
)
def test_what_could_not_be_called_as_a_method_is_told(
    verb: str, made: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mine, verb, made)
    with pytest.raises(ConfigError, match=f"data Mine: {verb} must be a method {says}"):
        check_offers(Mine())


def test_methods_that_pass_on_their_arguments_may_be_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Mine, "prompts", lambda self, *given, **named: [])
    monkeypatch.setattr(Mine, "verifier", staticmethod(partial(lambda made: made, judge)))
    assert check_offers(Mine()) == {"prompts"}


def test_offers_that_raise_are_told_with_their_place() -> None:
    class Broken:
        @property
        def offers(self) -> set[str]:
            raise KeyError("kind")

    with pytest.raises(
        RuntimeError, match=r"data Broken: offers raised KeyError: 'kind' \(test_of"
    ):
        check_offers(Broken())


@pytest.mark.parametrize(
    ("made", "says"), [(Judge, r"got the class Judge\. Return Judge\(\)\."), (3, "got 3")]
)
def test_a_verifier_is_a_reward_and_no_class(
    made: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mine, "verifier", lambda self: made)
    with pytest.raises(ConfigError, match=says):
        verifier_of(Mine())


def test_prompts_that_are_trained_on_and_judged_by_are_told() -> None:
    rows = [prompt(9, id="another"), Example(prompt(1), "1")]
    assert overlap(rows, [HELDOUT]).startswith("1 of the 2 prompts of the set heldout are trained")
    assert overlap([prompt(i) for i in range(8)], [HELDOUT]) == ""


def test_prompts_that_read_alike_are_told_as_well() -> None:
    judged = EvaluationSet("heldout", "accuracy", (Prompt("h", text="café  au lait"),), judge)
    rows = [Prompt("t", text="cafe\u0301 au\nlait ")]
    assert overlap(rows, [judged]).startswith("1 of the 1 prompts of the set heldout are trained")


@pytest.mark.parametrize(
    ("mine", "found"),
    [
        (Mine(offers=None), "offers must be a set"),
        (Mine(prompts=["say 0"]), "got str at place 0"),
        (Mine(sets=[HELDOUT, HELDOUT]), "is there 2 times"),
        (
            Mine(max_new_tokens=None),
            "max_new_tokens must be a whole number of at least 1, got None",
        ),
        (Mine(max_new_tokens=0), "max_new_tokens must be a whole number of at least 1, got 0"),
    ],
)
def test_a_run_is_refused_before_any_weight_loads(mine: Mine, found: str) -> None:
    config = replace(structured(compose(["algorithm=grpo"])), data=mine)
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert found in str(caught.value)


def test_golds_that_a_reward_of_ones_own_reads_are_its_affair() -> None:
    class AnyOf(Verifier):
        """Right where an answer is one of several."""

    prompts = [Prompt("p", text="Q", columns={"answer": ["1", "1.0"]})]
    check_golds(prompts, AnyOf())
    check_golds(prompts, lambda completions: [1.0])
    with pytest.raises(ConfigError, match=r"prompt 'p': its gold .*got \['1', '1\.0'\]"):
        check_golds(prompts, Verifier())
    with pytest.raises(ConfigError, match="prompt 'q' has no gold"):
        check_golds([Prompt("q", text="Q")], LastNumber())
