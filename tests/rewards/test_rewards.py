"""Rewards: right and wrong, format, shaping, controls, sums, and strangers' functions."""

import contextlib
import functools
import gc
import math
import os
import threading
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from zoo.config import ConfigError, OnError
from zoo.rewards.check import RESERVED, RewardError, check_output, check_scores
from zoo.rewards.composite import Weighted
from zoo.rewards.constraints import Constraints
from zoo.rewards.function import Function
from zoo.rewards.random_reward import Random
from zoo.rewards.score import FAILED, Patience, failures, fingerprint, load, module_of, name_of
from zoo.rewards.score import score as ask
from zoo.rewards.shaping import Ended, Format, LengthPenalty, NumberInPlace, Rule
from zoo.rewards.verifiable import LastNumber, Verifier, last_number
from zoo.types import Completion, Prompt, RewardOutput

ODD = ("", "a/b", "ab\ncd", " a", "a ", "\u200b")  # names of components that no curve can have
NO_IDEA = "I do not know this at all."


def prompt(answer="42", style="gsm8k", name="p", **columns):
    return Prompt(
        name,
        ({"role": "user", "content": "Q?"},),
        columns={"answer": answer, "style": style, **columns},
    )


def completion(text, truncated=False, tokens=None):
    return Completion(text, tuple(tokens or range(9)), (), truncated)


def score(reward, text, truncated=False, **columns):
    return reward([prompt(**columns)], [completion(text, truncated)]).total[0]


# right and wrong -------------------------------------------------------------------------


def test_verifier_scores_and_reasons():
    texts = ["#### 42", "#### 41", NO_IDEA, "so far 40 + 2", "#### 42"]
    cut = [False, False, False, True, True]
    completions = [completion(t, truncated=c) for t, c in zip(texts, cut, strict=True)]
    output = Verifier()([prompt()] * 5, completions)
    assert output.total[:4] == [1.0, 0.0, 0.0, 0.0]
    assert output.reasons[:4] == ["matched", "wrong", "no_answer", "truncated"]
    assert output.reasons[4] in ("matched", "truncated")  # the verifier's own policy
    assert output.components == {"verifier": output.total}


def test_a_wrong_answer_of_a_truncated_completion_is_truncated():
    # In a box, so that the answer itself is whole: it is the rest of the text that is missing.
    for text in ("#### 41. And so", "\\boxed{41}. And so"):
        output = Verifier()([prompt()], [completion(text, truncated=True)])
        assert (output.total, output.reasons) == ([0.0], ["truncated"])


def test_require_end_pays_nothing_for_a_truncated_right_answer():
    text = "So \\boxed{42}. And then"
    assert score(Verifier(), text, truncated=True) == 1.0
    assert score(Verifier(require_end=True), text, truncated=True) == 0.0
    assert score(Verifier(require_end=True), text) == 1.0


def test_style_is_the_prompts_own_unless_set():
    # Under gsm8k the golds drop the percent sign; under math 42 % is 0.42.
    assert score(Verifier(), "\\boxed{42\\%}", style="gsm8k") == 1.0
    assert score(Verifier(), "\\boxed{42\\%}", style="math", answer="0.42") == 1.0
    assert score(Verifier(style="gsm8k"), "\\boxed{42\\%}", style="math") == 1.0
    with pytest.raises(ValueError, match=r"reward\.style must be null or one of math, gsm8k"):
        Verifier(style="gsm")


def test_a_gold_that_cannot_be_read_is_an_abstention():
    output = Verifier()([prompt(answer="?")], [completion("#### 5")])
    assert (output.total, output.reasons) == ([None], ["unparsed_gold"])


@pytest.mark.parametrize("gold", [None, "", "  "])
def test_b85_missing_gold_is_not_an_empty_answer(gold):
    for reward in (Verifier(), LastNumber()):
        with pytest.raises(ValueError, match="prompt 'p' has no gold"):
            score(reward, "####", answer=gold)


@pytest.mark.parametrize("gold", [["12"], {"value": "12"}, True, b"12", {"12"}])
def test_a_gold_that_is_no_text_or_number_is_refused_lest_every_answer_be_wrong(gold):
    for reward in (Verifier(style="gsm8k"), LastNumber()):
        with pytest.raises(ValueError, match="must be a text or a number, got "):
            score(reward, "#### 12", answer=gold)


@pytest.mark.parametrize("gold", [12, 12.0, Decimal(12), Fraction(12), np.int64(12), "12"])
def test_numbers_of_any_type_are_golds(gold):
    assert score(Verifier(style="gsm8k"), "#### 12", answer=gold) == 1.0


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("it is 42", True),
        ("42.", True),
        ("42.0", True),
        ("$42", True),
        ("**42**", True),
        ("7 * 6 = 42", True),
        ("50-42", True),
        ("042", True),
        ("-42", False),
        ("−42", False),
        ("421", False),
        ("4.2", False),
        ("42 of 50", False),
        ("1,042", False),
        ("forty-two", False),
        ("4" * 5000, False),
    ],
)
def test_last_number(text, right):
    assert score(LastNumber(), text) == float(right)


def test_last_number_normalises():
    assert last_number("1,234.50") == last_number("1234.5") == ("", "1234", "5")
    assert last_number("-0.0") == ("", "0", "")
    assert last_number("x = -3") == ("-", "3", "")
    assert last_number("none") is None


# format and shaping ----------------------------------------------------------------------

TAGGED = "<think>a</think> <answer>4</answer>"


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        (Rule.think_answer, TAGGED, 1),
        (Rule.think_answer, f"{TAGGED}<eos>", 1),  # FAULTS B85
        (Rule.think_answer, f"{TAGGED}\n<|im_end|>\n", 1),
        (Rule.think_answer, "<think>\na\n</think>\n<answer>\n4\n</answer>", 1),
        (Rule.think_answer, "<think>a</think>4", 0),  # B85: no answer tag
        (Rule.think_answer, "<think>a</think><answer></answer>", 0),
        (Rule.think_answer, "<think>a</think><answer>5", 0),
        (Rule.think_answer, f"{TAGGED}<answer>6</answer>", 0),
        (Rule.think_answer, "<think>a<answer>5</answer></think>", 0),
        (Rule.think_answer, "<answer>5</answer>", 0),
        (Rule.think, "<think>Reasoning.</think>Answer.", 1),
        (Rule.think, "<think></think>\nAnswer.", 1),
        (Rule.think, "<think>a</think>", 0),
        (Rule.think, "Text<think>reasoning.</think>Answer.", 0),
        (Rule.think, "<think>a</think>b</think>", 0),
        (Rule.think, "<THINK>a</THINK>b", 0),
        (Rule.think, "<think>" * 20000, 0),
        (Rule.hash, "so 5. #### 1,080", 1),
        (Rule.hash, "#### -3.5<eos>", 1),
        (Rule.hash, "#### ", 0),
        (Rule.hash, "### 5", 0),
        (Rule.hash, "#### 5\n#### 6", 0),
        (Rule.hash, "#### five", 0),
        (Rule.boxed, "So \\boxed{5}.", 1),
        (Rule.boxed, "\\boxed{5} \\boxed{6}", 0),
        (Rule.boxed, "\\boxed{5", 0),
        (Rule.boxed, "\\boxed{}", 0),
        (Rule.boxed, "So 5.", 0),
    ],
)
def test_format(rule, text, expected):
    assert score(Format(rule), text) == expected


def test_format_by_a_pattern_of_ones_own():
    assert score(Format(Rule.regex, r"a.*b"), "a\nb</s>") == 1.0
    assert score(Format(Rule.regex, r"a.*b"), "xa b") == 0.0
    with pytest.raises(ValueError, match=r"is no regular expression: .*"):
        Format(Rule.regex, "(")
    with pytest.raises(ValueError, match=r"pattern goes with rule=regex"):
        Format(Rule.hash, "a")
    with pytest.raises(ValueError, match=r"pattern goes with rule=regex"):
        Format(Rule.regex)


def test_format_agrees_with_the_labelled_rules(shared):
    import json

    rules = {
        "think_answer_tags": Rule.think_answer,
        "think_tags": Rule.think,
        "one_hash_answer": Rule.hash,
        "one_box": Rule.boxed,
    }
    lines = (shared / "data/verifier/format.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["rule"] in rules and not row["ambiguous"]]
    assert len(rows) > 20
    for row in rows:
        assert score(Format(rules[row["rule"]]), row["completion"]) == row["expected"], row


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 7", 1),
        ("#### $1,234.50", 1),
        ("The answer is 12 red apples.", 1),
        ("\\boxed{-3}", 1),
        ("#### 1/2", 1),
        ("5 + 2 = 7", 0),  # a number, but not in the answer's place
        ("I have 7 apples and want more.", 0),
        ("#### seven", 0),
        ("#### ", 0),
        ("", 0),
    ],
)
def test_number_in_place(text, expected):
    assert score(NumberInPlace(), text) == expected


def test_ended():
    assert (score(Ended(), "x"), score(Ended(), "x", truncated=True)) == (1.0, 0.0)


def test_b86_length_penalty_counts_tokens():
    # L_max 100, cache 20: 0 up to 80, −1/2 at 90, −1 at 100 and beyond, however long the text.
    reward = LengthPenalty(max_length=100, cache=20)
    completions = [completion("x" * 9999, tokens=range(n)) for n in (80, 90, 100, 101)]
    assert reward([prompt()] * 4, completions).total == [0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match=r"reward\.cache must lie in"):
        LengthPenalty(max_length=10, cache=11)


def test_random_is_a_function_of_prompt_and_tokens_alone():
    reward = Random(seed=3)
    prompts = [prompt(name=f"p{i % 50}") for i in range(2000)]
    completions = [completion("#### 42", tokens=(i, i + 1)) for i in range(2000)]
    first = reward(prompts, completions).total
    # Order and company are no matter, nor is what is right.
    assert reward(prompts[::-1], completions[::-1]).total == first[::-1]
    assert reward(prompts[7:8], completions[7:8]).total == first[7:8]
    golds = [prompt(name=p.id, answer="0") for p in prompts]
    assert reward(golds, completions).total == first
    # 2,000 draws at 1/2: a standard deviation of 0.011.
    assert abs(sum(first) / 2000 - 0.5) < 0.05
    # The same tokens after other prompts are other draws: all alike has a chance of 2 · 2⁻⁵⁰.
    assert set(reward(prompts[:50], [completion("x")] * 50).total) == {0.0, 1.0}
    assert Random(seed=4)(prompts, completions).total != first
    assert set(Random(p=0.0)(prompts, completions).total) == {0.0}
    assert set(Random(p=1.0)(prompts, completions).total) == {1.0}
    share = sum(Random(p=0.1)(prompts, completions).total) / 2000
    assert abs(share - 0.1) < 0.03
    with pytest.raises(ValueError, match=r"reward.p must lie in \[0, 1\], got 2"):
        Random(p=2)


# sums ------------------------------------------------------------------------------------


class Fixed:
    def __init__(self, *values, reasons=()):
        self.values, self.reasons = list(values), list(reasons)

    def __call__(self, prompts, completions):
        return RewardOutput(total=self.values, reasons=self.reasons)


def test_weighted_sum_of_named_components():
    reward = Weighted(
        {
            "right": Fixed(1.0, 0.0),
            "long": {"weight": -0.5, "reward": Fixed(0.5, 2.0, reasons=["a", "b"])},
            "odd": {"weight": 2, "reward": Fixed(3.0, 0.25)},
        }
    )
    output = reward([prompt()] * 2, [completion("x")] * 2)
    # 1 − 0.5·0.5 + 2·3 = 6.75 and 0 − 0.5·2 + 2·0.25 = −0.5
    assert output.total == [6.75, -0.5]
    assert output.components == {"right": [1.0, 0.0], "long": [0.5, 2.0], "odd": [3.0, 0.25]}
    assert output.reasons == ["a", "b"]


def test_an_abstention_is_not_a_zero():
    output = Weighted({"a": Fixed(1.0, None), "b": Fixed(1.0, 1.0)})(
        [prompt()] * 2, [completion("x")] * 2
    )
    assert output.total == [2.0, None]
    assert output.components["a"] == [1.0, None]


def test_components_are_built_from_their_classes():
    part = {"weight": 0.1, "_target_": "zoo.rewards.shaping.Format", "rule": "boxed"}
    reward = Weighted({"right": {"weight": 1.0, "reward": Verifier()}, "format": part})
    assert reward.parts["format"] == (0.1, Format(Rule.boxed))
    output = reward([prompt()], [completion("\\boxed{42}")])
    assert output.total == [1.1] and output.reasons == ["matched"]


def test_shaped_gsm8k_orders_its_four_outcomes():
    from zoo.instantiate import build

    node = {
        "_target_": "zoo.rewards.composite.Weighted",
        "components": {
            "right": {"weight": 1.0, "_target_": "zoo.rewards.verifiable.Verifier"},
            "number": {"weight": 0.1, "_target_": "zoo.rewards.shaping.NumberInPlace"},
            "ended": {"weight": 0.1, "_target_": "zoo.rewards.shaping.Ended"},
        },
    }
    reward = build(node, "reward")
    texts = [("#### 42", False), ("#### 41", False), (NO_IDEA, False), (NO_IDEA, True)]
    output = reward([prompt()] * 4, [completion(t, truncated=cut) for t, cut in texts])
    # right 1 + number 0.1 + ended 0.1; wrong: 0.2; no number: 0.1; nothing: 0
    assert output.total == pytest.approx([1.2, 0.2, 0.1, 0.0])
    assert output.reasons == ["matched", "wrong", "no_answer", "truncated"]


@pytest.mark.parametrize(
    ("components", "says"),
    [
        ({}, "reward.components is empty"),
        ({"a": {"_target_": "zoo.rewards.shaping.Ended"}}, "components.a.weight must be a number"),
        (
            {"a": {"weight": "1", "reward": Ended()}},
            "components.a.weight must be a number, got '1'",
        ),
        ({"a": {"weight": math.inf, "reward": Ended()}}, "components.a.weight must be finite"),
        ({"a": {"weight": 1.0}}, "components.a needs _target_"),
        ({"a": {"weight": 1.0, "reward": Ended(), "p": 1}}, "components.a needs _target_"),
        ({"a": {"weight": 1, "_target_": "zoo.rewards.shaping.Endet"}}, "Did you mean .*Ended"),
        ({"a": {"weight": 1, "_target_": "zoo.rewards.shaping.Format", "ruel": 1}}, "rule"),
        (
            {"a": {"weight": 1, "_target_": "zoo.rewards.function.Function", "fn": "math.squar"}},
            r"^reward\.components\.a: reward\.fn=math\.squar: math has no 'squar'",
        ),
        *[
            ({one: Ended()}, rf"a component is called '{one}', whose .*Try {one}_1")
            for one in RESERVED
        ],
        *[
            ({one: Ended()}, r"a component is called .*, which cannot name the curve reward/NAME")
            for one in ODD
        ],
        # FAULTS B78: a penalty of weight −1 would reward what it punishes.
        ({"a": {"weight": -1, "reward": LengthPenalty()}}, r"is a penalty .*Try 1"),
    ],
)
def test_weighted_settings_are_checked(components, says):
    with pytest.raises(ValueError, match=says):
        Weighted(components)


def test_b78_penalty_lowers_the_sum():
    reward = Weighted(
        {"right": Fixed(1.0), "length": {"weight": 1.0, "reward": LengthPenalty(4, 2)}}
    )
    assert reward([prompt()], [completion("x", tokens=range(4))]).total == [0.0]


# strangers' functions --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["truncated", "prompts", "completions", "prompt_ids"])
def test_a_column_that_zoos_own_argument_hides_is_said(name):
    seen = []

    def looks(prompts, completions, **columns):
        seen.append({"prompts": prompts, "completions": completions, **columns}[name])
        return [1.0] * len(completions)

    with pytest.warns(UserWarning, match=rf"reward looks: the data have columns {name}, and"):
        Function(looks)([prompt(**{name: "mine"})], [completion("x")])
    assert len(seen) == 1 and "mine" not in seen[0]


class Unspeakable:
    def __repr__(self):
        return str(1 / 0)


def by_length(prompts, completions):
    return [len(text) for text in completions]


def call(fn, texts=("a", "bb", "ccc", "dddd"), on_error=OnError.stop):
    prompts = [prompt(name=f"p{i}", level=i) for i in range(len(texts))]
    patience = Patience(on_error=on_error)
    return ask(Function(fn), prompts, [completion(text) for text in texts], patience)


def test_function_gets_texts_and_columns():
    seen = {}

    def fn(prompts, completions, answer, level, truncated, **columns):
        seen.update(columns, prompts=prompts, answer=answer, level=level, truncated=truncated)
        return [0.5] * len(prompts)

    output = call(fn)
    assert output.total == [0.5] * 4 and output.components == {"fn": [0.5] * 4}
    assert seen["prompts"] == ["Q?"] * 4 and seen["answer"] == ["42"] * 4
    assert seen["level"] == [0, 1, 2, 3] and seen["truncated"] == [False] * 4
    assert seen["style"] == ["gsm8k"] * 4 and seen["prompt_ids"] == ["p0", "p1", "p2", "p3"]


def test_function_by_its_dotted_path():
    assert call("tests.rewards.test_rewards.by_length").total == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(ValueError, match=r"has no 'by_lenght'.*Did you mean .*by_length"):
        Function("tests.rewards.test_rewards.by_lenght")
    with pytest.raises(ValueError, match=r"reward.fn is not set"):
        Function()
    with pytest.raises(ValueError, match=r"must be a function or its dotted path, got 5"):
        Function(5)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([1.0], r"reward fn returned 1 scores for 4 completions"),  # FAULTS B76
        ([1.0] * 3, r"reward fn returned 3 scores for 4 completions"),
        (
            [1.0, Unspeakable(), 1.0, 1.0],
            r"gave <a Unspeakable whose repr raises ZeroDivisionError> .* to row 1",
        ),
        ([1.0, "2", 1.0, 1.0], r"gave '2' \(str\) to row 1, whose text is 'bb'"),
        ([1.0, 1.0, math.nan, 1.0], r"gave nan \(float\) to row 2, whose text is 'ccc'"),
        ([1.0, 1.0, 1.0, math.inf], r"gave inf \(float\) to row 3, whose text is 'dddd'"),
        ([[1.0]] * 4, r"to row 0"),
        ("1111", r"reward fn returned '1111' \(str\)"),
        (1.0, r"reward fn returned 1.0 \(float\)"),
        (None, r"reward fn returned None"),
        (torch.ones(1), r"returned 1 scores"),
        (torch.tensor(1.0), r"returned 1.0"),
    ],
)
def test_b76_what_a_function_returns_is_checked(returned, says):
    def fn(prompts, completions):
        return returned

    with pytest.raises(RewardError, match=says):
        call(fn)


@pytest.mark.parametrize(
    "returned",
    [
        [1, True, None, np.float32(0.5)],
        (1, True, None, torch.tensor(0.5)),
    ],
)
def test_b76_numbers_of_any_kind_and_none_are_allowed(returned):
    def fn(prompts, completions):
        return returned

    assert call(fn).total == [1.0, 1.0, None, 0.5]


def test_arrays_and_tensors_are_allowed():
    assert call(lambda prompts, completions: np.arange(4)).total == [0.0, 1.0, 2.0, 3.0]
    assert call(lambda prompts, completions: torch.arange(4)).total == [0.0, 1.0, 2.0, 3.0]


def test_function_that_asks_for_a_column_that_is_not_there():
    def fn(prompts, completions, anwser):
        return []

    for on_error in OnError:  # no row can be scored, so none of them abstains
        with pytest.raises(ConfigError, match=r"fn asks for 'anwser'.*Did you mean answer"):
            call(fn, on_error=on_error)

    def defaulted(prompts, completions, other=3):
        return [other] * 4

    assert call(defaulted).total == [3.0] * 4


def picky(prompts, completions):
    if "ccc" in completions:
        raise KeyError("c")
    return [1.0] * len(completions)


def test_function_that_raises_names_the_row_and_its_text():
    with pytest.raises(RewardError, match=r"picky raised KeyError: 'c' at row 2.*'ccc'.*on_error"):
        call(picky)


def test_a_sentence_of_the_error_stands_after_the_row():
    told = (
        r"reward constraints at row 0 .*, raised ValueError: .*choose another reward\. Correct it"
    )
    with pytest.raises(RewardError, match=told):
        ask(Constraints(), [prompt(name="p0")], [completion("a")], name="constraints")


def test_function_that_raises_may_abstain_for_that_row_alone():
    assert call(picky, on_error=OnError.abstain).total == [1.0, 1.0, None, 1.0]


def test_row_alone_has_the_columns_of_its_round():
    def fn(completions, hint):
        if "bb" in completions:
            raise KeyError("k")
        return [0.0 if one is None else 1.0 for one in hint]

    prompts = [prompt(name="p0"), prompt(name="p1"), prompt(name="p2", hint="h")]
    texts = [completion(text) for text in ("a", "bb", "ccc")]
    output = ask(Function(fn), prompts, texts, Patience(on_error=OnError.abstain))
    assert output.total == [0.0, None, 1.0]
    with pytest.raises(RewardError, match=r"raised KeyError: 'k' at row 1 \(prompt p1\)"):
        ask(Function(fn), prompts, texts)


@pytest.mark.parametrize("name", RESERVED)
def test_no_component_takes_the_curve_of_the_whole(name):
    def fn(prompts, completions):
        return [0.5] * len(prompts)

    fn.__name__ = name
    output = call(fn)
    assert output.total == [0.5] * 4 and output.components == {f"fn_{name}": [0.5] * 4}
    for on_error in OnError:
        with pytest.raises(ConfigError, match=rf"reward <lambda> gave a component '{name}'"):
            call(lambda completions: RewardOutput([1.0] * 4, {name: [1.0] * 4}), on_error=on_error)


@pytest.mark.parametrize("name", [*ODD, 3, None])
def test_no_component_has_a_name_that_no_curve_can_have(name):
    with pytest.raises(ConfigError, match=r"gave a component .*, which cannot name the curve"):
        call(lambda completions: RewardOutput([1.0] * 4, {name: [1.0] * 4}))


def coins_of(completions, sides):
    return [float(len(text) % sides) for text in completions]


@pytest.mark.parametrize(
    ("fn", "name"),
    [(functools.partial(coins_of, sides=2), "coins_of"), (Fixed([1.0] * 4), "Fixed")],
)
def test_a_function_without_a_name_has_one_that_is_the_same_in_every_process(fn, name):
    assert Function(fn).label == name


def test_half_characters_in_reasons_are_spelled_out():
    """JSON holds them, and a file in UTF-8 does not; a reason alone ends no run."""
    mine = ["", "b\ud83d", "c\U0001f600", "d"]

    class Reward:
        def __call__(self, prompts, completions):
            return RewardOutput([1.0] * 4, reasons=mine)

    prompts = [prompt(name=f"p{i}") for i in range(4)]
    reasons = ask(Reward(), prompts, [completion("x")] * 4, Patience()).reasons
    assert reasons == ["", r"b\ud83d", "c\U0001f600", "d"]
    assert reasons[3] is mine[3]


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_reward_sets_in_torch_is_set_back(fails):
    cuda = torch.backends.cuda

    def settings():
        return (
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_num_threads(),
            torch.get_deterministic_debug_mode(),
            torch.get_float32_matmul_precision(),
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        )

    def put(gradients, dtype, device, threads, deterministic, precision, *attention):
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(deterministic)
        torch.set_float32_matmul_precision(precision)
        for name, on in zip(("flash", "mem_efficient", "math", "cudnn"), attention, strict=True):
            getattr(cuda, f"enable_{name}_sdp")(on)

    before = settings()
    attention = [not on for on in before[6:]]
    others = (False, torch.float64, torch.device("meta"), before[3] + 1, 1, "medium", *attention)
    seen = []

    def fn(completions):
        put(*others)
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # then the older name has no answer
        seen.append(1)
        return [[][0] if fails else 1.0] * len(completions)

    try:
        call(fn, on_error=OnError.abstain)
        assert seen and settings() == before
    finally:
        put(*before[:2], None, *before[3:])


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_folder_a_reward_goes_to_is_left_again(fails, removed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "sandbox"
    seen = []

    def fn(completions):
        place.mkdir(exist_ok=True)
        os.chdir(place)
        if removed:
            place.rmdir()
        seen.append(1)
        return [[][0] if fails else 1.0] * len(completions)

    call(fn, on_error=OnError.abstain)
    assert seen and Path.cwd() == tmp_path


def test_a_reward_that_takes_the_working_directory_away_is_told_of(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)

    def fn(completions):
        torch.set_grad_enabled(False)
        os.chdir(tmp_path)
        home.rmdir()
        return [1.0] * len(completions)

    with pytest.raises(ConfigError, match=rf"left the working directory {home}, which is gone"):
        call(fn)
    assert torch.is_grad_enabled()  # the rest is set back all the same


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_an_autocast_that_a_reward_leaves_on_is_ended(kind, around):
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)

    def fn(completions):
        torch.autocast("cpu", torch.float16).__enter__()
        assert (x @ weight).dtype == torch.float16  # now its half copy is kept
        torch.autocast(kind, torch.float16, cache_enabled=False).__enter__()
        torch.set_autocast_enabled(kind, True)  # where torch itself does not know the device
        return [1.0] * len(completions)

    def state():
        flags = [torch.is_autocast_enabled(one) for one in ("cpu", "cuda")]
        dtypes = [torch.get_autocast_dtype(one) for one in ("cpu", "cuda")]
        return flags, dtypes, torch.is_autocast_cache_enabled()

    with torch.autocast("cpu", torch.bfloat16) if around else contextlib.nullcontext():
        before = state()
        call(fn)
        assert state() == before
    assert (x @ weight).dtype == torch.float32
    for factor in (2, 3):  # a copy that outlived its autocast would be of the old weight
        with torch.no_grad():
            weight.fill_(factor)
        with torch.autocast("cpu", torch.float16):
            assert (x @ weight).tolist() == [[2.0 * factor] * 2] * 2


def test_what_a_reward_writes_into_a_row_is_not_kept():
    class Writes:
        def __call__(self, prompts, completions):
            for p in prompts:
                seen.append((p.columns["answer"], len(p.columns["tests"][0]["in"])))
                p.columns["answer"] = "written"
                p.columns["tests"][0]["in"].append(1)
                p.columns["ids"][0] = 7
                p.messages[0]["content"] += "!"
                completions.clear()
            return RewardOutput([1.0] * len(prompts))

    def row():
        return Prompt(
            "p",
            ({"role": "user", "content": "1 + 1 ="},),
            columns={"answer": "2", "tests": ({"in": []},), "lock": lock, "ids": bytearray(2)},
        )

    lock, seen = threading.Lock(), []  # there is no copy of a lock, and none is needed
    asked = row()
    reward = Weighted({"a": {"weight": 1, "reward": Writes()}, "b": Writes()})
    for _ in range(2):
        ask(reward, [asked] * 3, [completion("a")] * 3)  # a group's rows are of one prompt
    assert asked == row() and set(seen) == {("2", 0)}


@pytest.mark.filterwarnings("error")
def test_an_async_reward_is_refused_whatever_failures_mean():
    class Asks:
        async def __call__(self, prompts, completions):
            return RewardOutput([1.0] * len(prompts))

    async def asks(completions):
        return [1.0] * len(completions)

    for reward, name in ((Asks(), "Asks"), (Function(asks), "asks")):
        for on_error in OnError:
            with pytest.raises(ConfigError, match=rf"reward {name} is async.*asyncio\.run"):
                ask(reward, [prompt("1")], [completion("a")], Patience(None, on_error))
    gc.collect()


def longer_than_the_mean(completions):
    """Compares the rows of a call, and fails where one is empty."""
    assert all(completions)
    mean = sum(map(len, completions)) / len(completions)
    return RewardOutput(
        [float(len(text) > mean) for text in completions],
        {"length": [float(len(text)) for text in completions]},
        ["failed" if len(text) <= mean else "long" for text in completions],
    )


def rows_of(texts):
    return [prompt(name=f"p{i}") for i in range(len(texts))], [completion(t) for t in texts]


def test_rows_that_do_not_fail_are_compared_with_each_other():
    texts = ["aa", "", "aaaa", "aaaaaa", ""]  # the others' mean is 4
    output = ask(Function(longer_than_the_mean), *rows_of(texts), Patience(None, OnError.abstain))
    assert output.total == [0.0, None, 0.0, 1.0, None]
    assert output.components == {"length": [2.0, None, 4.0, 6.0, None]}
    assert output.reasons == ["failed", "failed", "failed", "long", "failed"]
    # the reward's own reason `failed` is no failure
    assert failures(output) == 2
    assert [reason is FAILED for reason in output.reasons] == [False, True, False, False, True]


def test_rows_that_fail_only_together_are_left_unscored_and_not_asked_again():
    asked = []

    def fn(completions):
        asked.append(len(completions))
        assert len(completions) == 1
        return [1.0]

    with pytest.warns(UserWarning, match=r"reward fn fails on rows together .*all 3 of the round"):
        output = ask(Function(fn), *rows_of("abc"), Patience(None, OnError.abstain))
    assert output.total == [None] * 3 and failures(output) == 3
    assert asked == [3, 1, 1, 1]


def test_a_round_that_is_late_as_a_whole_costs_no_second_deadline():
    asked = []

    def slow(completions):
        asked.append(len(completions))
        time.sleep(60.0 * (len(completions) > 1))
        return [1.0] * len(completions)

    with pytest.warns(UserWarning, match="together that do not fail alone"):
        output = ask(Function(slow), *rows_of("abc"), Patience(1.0, OnError.abstain))
    assert output.total == [None] * 3 and asked == [3, 1, 1, 1]


def stranger(**attributes):
    """A reward with attributes that zoo has a meaning for."""

    def called(self, prompts, completions):
        return RewardOutput([1.0] * len(prompts))

    return type("Stranger", (), {"__call__": called, **attributes})()


def raises(self, *_):
    raise OSError("no weights")


@pytest.mark.parametrize("value", ["some.text", 3, 0.5, None, ["a"]])
def test_attributes_of_a_reward_that_happen_to_have_a_name_of_zoos_mean_nothing(value):
    names = ("label", "__name__", "module", "load", "fingerprint", "penalty")
    reward = stranger(**dict.fromkeys(names[2:], value), label=3, __name__=["x"])
    assert name_of(reward) == "Stranger" and module_of(reward) is None
    assert not load(reward, "cpu") and fingerprint([reward]) == ""
    Weighted({"a": {"weight": -1, "reward": reward}}).load("cpu")
    assert name_of(stranger(label=raises)) == "Stranger"
    loaded = torch.nn.Linear(1, 1)
    assert module_of(stranger(module=loaded)) is loaded


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({"load": raises}, r"reward Stranger: load\(device\) raised OSError: no weights"),
        ({"fingerprint": raises}, r"reward Stranger: fingerprint\(\) raised OSError: no weights"),
        ({"fingerprint": lambda self: 5}, r"reward Stranger: fingerprint\(\) returned 5, not a"),
    ],
)
def test_what_a_reward_does_wrong_before_the_first_step_is_told_by_its_name(attributes, says, wrap):
    reward = stranger(**attributes)
    reward = Weighted({"a": reward}) if wrap else reward
    with pytest.raises(ConfigError, match=says):
        load(reward, "cpu")
        fingerprint([reward])


def test_function_that_fails_on_the_rows_together():
    def fn(prompts, completions):
        return [1.0] if len(completions) == 1 else [][0]

    with pytest.raises(RewardError, match=r"raised IndexError.* on 4 rows together"):
        call(fn)


def test_function_may_return_a_whole_output():
    def fn(prompts, completions):
        return RewardOutput([1.0] * 4, {"a": [2.0] * 4}, ["x"] * 4)

    output = call(fn)
    assert (output.components, output.reasons) == ({"a": [2.0] * 4}, ["x"] * 4)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (RewardOutput([1.0]), "returned 1 scores for 2"),
        (RewardOutput([1.0, 2.0], {"part": [1.0]}), "reward r/part returned 1 scores"),
        (RewardOutput([1.0, 2.0], reasons=["x"]), "gave 1 reasons for 2 completions"),
        (RewardOutput([1.0, math.nan]), "gave nan"),
        ([1.0, 2.0], "not a RewardOutput"),
    ],
)
def test_any_reward_is_checked(output, says):
    with pytest.raises(RewardError, match=says):
        check_output(output, [completion("a"), completion("b")], "r")


def test_checked_scores_are_plain_floats():
    scores = check_scores([np.float64(1), True], [completion("a")] * 2, "r")
    assert [type(s) for s in scores] == [float, float]


def test_of_many_rows_that_hang_a_few_alone_are_waited_for():
    asked = []

    def hangs(completions):
        asked.append(len(completions))
        time.sleep(60)

    patience = Patience(0.2, OnError.abstain)
    output = ask(Function(hangs), *rows_of("abcdefghijkl"), patience)
    assert output.total == [None] * 12
    assert asked[0] == 12 and asked[1:] in ([1], [1, 1])  # two limits' worth, not twelve
