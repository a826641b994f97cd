"""The generated problems: right golds, disjoint sides, demonstrations of mixed quality."""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from zoo.data.arithmetic import FAMILY_A, FAMILY_B, MIX, Arithmetic, problem_of
from zoo.types import Completion

DATA = Arithmetic(n_problems=2000, n_examples=6000)
SOLUTION = re.compile(r"((?:\d+ [-+*/] \d+ = -?\d+\. )*)#### (-?\d+)")


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def slow_answer(kind, given):
    """Each kind solved again, from the numbers that its text shows."""
    a, b, c = [*given, 0, 0][:3]
    return {
        "gain": a + b,
        "lose": a - b,
        "boxes": a * b + c,
        "unpack": a * b - c,
        "more": 2 * a + b,
        "daily": a * b + c,
        "share": a // b + c if b else None,
        "sell": (a + b) * c,
        "twice": 3 * a,
        "fewer": 2 * a - b,
        "colours": a + b + c,
        "change": c - a * b,
        "rows": a * b - c,
        "apart": a - b,
    }[kind]


@pytest.mark.parametrize("family", ["A", "B"])
def test_gold_is_the_answer_of_the_text(family):
    heldout, independent, _ = DATA.evaluation_sets()
    prompts = DATA.prompts() + list(heldout.prompts) if family == "A" else independent.prompts
    kinds = set()
    for prompt in prompts:
        _, kind, *_ = prompt.id.split("/")
        kinds.add(kind)
        given = numbers(prompt.messages[0]["content"])
        assert int(prompt.columns["answer"]) == slow_answer(kind, given), prompt
    assert kinds == {kind.name for kind in (FAMILY_A if family == "A" else FAMILY_B)}


def test_what_is_shared_divides_without_remainder():
    shares = [p for p in DATA.prompts() if "/share/" in p.id]
    assert shares
    for prompt in shares:
        total, friends, _ = numbers(prompt.messages[0]["content"])
        assert total % friends == 0


def test_answers_are_never_negative():
    for prompt in DATA.prompts():
        assert int(prompt.columns["answer"]) >= 0


def test_training_and_heldout_share_no_problem_whatever_the_names():
    heldout, independent, _ = DATA.evaluation_sets()
    trained = {problem_of(p) for p in DATA.prompts()}
    trained |= {problem_of(e.prompt) for e in DATA.examples()}
    judged = {problem_of(p) for p in (*heldout.prompts, *independent.prompts)}
    assert len(trained) > 1000 and len(judged) > 300
    assert not trained & judged

    # The numbers in the text, not only the id: read them back.
    def shown(prompt):
        return (prompt.id.split("/")[1], *numbers(prompt.messages[0]["content"]))

    assert not {shown(p) for p in DATA.prompts()} & {shown(p) for p in heldout.prompts}


def test_prompts_are_all_different_and_bear_their_columns():
    prompts = DATA.prompts()
    assert len({p.messages[0]["content"] for p in prompts}) == len(prompts) == 2000
    assert len({p.id for p in prompts}) == 2000
    for prompt in prompts:
        assert [turn["role"] for turn in prompt.messages] == ["user"]
        assert prompt.columns["style"] == "gsm8k" and prompt.columns["family"] == "A"


def test_family_b_is_never_in_the_training_prompts():
    assert {p.columns["family"] for p in DATA.prompts()} == {"A"}
    families = Counter(e.prompt.columns["family"] for e in DATA.examples())
    for family, share in MIX.items():
        # 6,000 draws: a standard deviation of at most 0.0065, so 0.03 is more than four of them.
        assert abs(families[family] / 6000 - share) < 0.03


def test_flawed_share_of_the_demonstrations_is_wrong_and_the_rest_right():
    examples = [e for e in DATA.examples() if e.prompt.columns["family"] != "C"]
    wrong = 0
    for example in examples:
        steps, final = SOLUTION.fullmatch(example.completion).groups()
        for left, op, right, value in re.findall(r"(\d+) ([-+*/]) (\d+) = (-?\d+)\.", steps):
            left, right = int(left), int(right)
            expected = {
                "+": left + right,
                "-": left - right,
                "*": left * right,
                "/": left // right if right else None,
            }[op]
            assert int(value) == expected  # the working is right even where the way is wrong
        wrong += final != example.prompt.columns["answer"]
    # 5,100 draws at 0.55: a standard deviation of 0.007.
    assert abs(wrong / len(examples) - 0.55) < 0.03


def test_without_flaws_every_demonstration_is_right():
    examples = replace(DATA, flawed=0.0, n_examples=1500).examples()
    for example in examples:
        if example.prompt.columns["family"] != "C":
            assert example.completion.endswith(f"#### {example.prompt.columns['answer']}")


def test_all_flawed_means_none_is_right():
    # 2 * 2 = 2 + 2, and change that equals the price: a slip that hits the answer is not used.
    for example in replace(DATA, flawed=1.0, n_examples=6000).examples():
        if example.prompt.columns["family"] != "C":
            assert not example.completion.endswith(f"#### {example.prompt.columns['answer']}")


def test_solution_has_the_documented_form():
    boxes = next(k for k in FAMILY_A if k.name == "boxes")
    from zoo.data.arithmetic import _flawed, _solution

    steps = boxes.steps(10, 8, 15)
    assert _solution(steps) == "10 * 8 = 80. 80 + 15 = 95. #### 95"
    assert _flawed(steps, stop_short=True) == "10 * 8 = 80. #### 80"
    assert _flawed(steps, stop_short=False) == "10 * 8 = 80. 80 - 15 = 65. #### 65"


def test_guard_texts_hold_no_numbers_and_are_not_trained_on():
    guard = DATA.evaluation_sets()[2]
    assert guard.kind == "perplexity" and len(set(guard.texts)) == len(guard.texts) == 200
    trained = {e.prompt.text + e.completion for e in DATA.examples() if e.prompt.text}
    assert len(trained) > 300
    assert not trained & set(guard.texts)
    assert not any(numbers(text) for text in guard.texts)


def test_verifier_pays_the_gold_and_nothing_else():
    prompts = DATA.prompts()[:50]
    verifier = DATA.verifier()
    for shift, expected in ((0, 1.0), (1, 0.0)):
        completions = [
            Completion(f"#### {int(p.columns['answer']) + shift}", (5, 2), (0.0, 0.0), False)
            for p in prompts
        ]
        assert verifier(prompts, completions).total == [expected] * 50


def test_two_processes_make_the_same_lists():
    script = (
        "import hashlib; from zoo.data.arithmetic import Arithmetic;"
        "d = Arithmetic(n_problems=300, n_examples=300);"
        "print(hashlib.sha256(repr((d.prompts(), d.examples(), d.evaluation_sets())).encode())"
        ".hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_another_data_seed_makes_other_problems_on_the_same_sides():
    other = replace(DATA, data_seed=1)
    assert {p.id for p in other.prompts()} != {p.id for p in DATA.prompts()}
    judged = {problem_of(p) for p in DATA.evaluation_sets()[0].prompts}
    assert not judged & {problem_of(p) for p in other.prompts()}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"flawed": 1.5}, "data.flawed must lie in"),
        ({"n_problems": 0}, "data.n_problems must be at least 1, got 0"),
        ({"largest_factor": 1}, "data.largest_factor must lie in 4"),
        ({"max_new_tokens": 0}, "data.max_new_tokens must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        Arithmetic(**change)


def test_more_texts_than_there_are_is_an_error_not_a_loop():
    # 20 names, 6 animals, 6 colours, 3 places, 4 times, 6 moods: 51,840, one in five held out.
    with pytest.raises(ValueError, match="20000 different guard texts were asked for"):
        Arithmetic(n_texts=20_000).evaluation_sets()
