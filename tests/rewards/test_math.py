"""The math verifier's contract, rule by rule; the expected verdicts are arithmetic or the rule
itself.
"""

import itertools

import pytest

from zoo.rewards.extract import extract, last_box
from zoo.rewards.math import Reason, check_gold, check_golds, verify

RIGHT, WRONG = 1.0, 0.0


def boxed(answer: str, gold: str, style: str = "math") -> float:
    return verify(f"The answer is $\\boxed{{{answer}}}$.", gold, style).score


def accepted(gold: str, *answers: str) -> None:
    refused = [answer for answer in answers if boxed(answer, gold) != RIGHT]
    assert not refused, f"gold {gold!r}"


def refused(gold: str, *answers: str) -> None:
    taken = [answer for answer in answers if boxed(answer, gold) != WRONG]
    assert not taken, f"gold {gold!r}"


# ---------------------------------------------------------------- which answer counts


def test_the_last_complete_box_counts():
    assert verify("First \\boxed{3}, then \\boxed{4}.", "4").score == RIGHT
    assert verify("First \\boxed{4}, then \\boxed{3}.", "4").score == WRONG
    assert verify("\\boxed{4} and now \\boxed{5", "4").score == RIGHT
    assert verify("so $\\fbox{4}$", "4").score == RIGHT


def test_a_box_beats_a_hash_and_a_hash_beats_a_phrase():
    assert verify("#### 5\n\\boxed{4}", "4").score == RIGHT
    assert verify("\\boxed{4}\n#### 5", "4").score == RIGHT
    assert verify("The answer is 5.\n#### 4", "4").score == RIGHT
    assert verify("#### 4\nThe answer is 5.", "4").score == RIGHT


def test_nested_boxes_are_one_answer():
    assert boxed("\\boxed{7}", "7") == RIGHT
    assert last_box("\\boxed{a\\boxed{b}c}") == "a\\boxed{b}c"
    assert last_box("\\boxed{\\{1,2\\}}") == "\\{1,2\\}"


def test_an_empty_box_is_no_answer():
    assert verify("\\boxed{}", "0").reason is Reason.NO_ANSWER
    assert verify("\\boxed{3} \\boxed{}", "3").reason is Reason.NO_ANSWER


def test_the_answer_after_the_thinking_beats_the_box_inside_it():
    assert verify("<think>\\boxed{3}</think>\\boxed{4}", "4").score == RIGHT
    assert verify("<think>\\boxed{3}</think><answer>4</answer>", "4").score == RIGHT
    assert verify("<think>\\boxed{3}</think>The answer is 4.", "4").score == RIGHT


@pytest.mark.parametrize(
    "completion",
    [
        "The answer is 12.",
        "So the final answer is **12**.",
        "**Answer:** 12",
        "Final Answer: The final answer is $12$. I hope it is correct.",
        "The answer is: \\[ 12 \\]",
        "The answer is 12 because 5 + 7 = 12.",
        "The answer is 12, altogether.",
        "My answer would be $12.",
        "<answer>12</answer>",
        "#### 12",
        "####12\n",
        "####\n12",
        "#### The answer is 12",
        "#### 12 eggs",
        "#### **12**",
        "#### x = 12",
        "#### 3*4=12",
        "#### 12<|im_end|>",
        "#### 12</s>",
        "12",
    ],
)
def test_markers(completion):
    assert verify(completion, "12", "gsm8k").score == RIGHT


@pytest.mark.parametrize(
    "completion",
    [
        "There were 12 of them, and I do not know.",
        "The answer is not 12. It is 13.",
        "The answer is 13, not 12.",
        "The answer is between 11 and 13.",
        "The answer is 12.5.",
        "#### 12 or 13",
        "#### 12, 13",
        "#### 12 13",
        "#### 12\n#### 13",
        "#### -12",
        "#### 1 2",
        "#### 12 - 1",
        "#### None",
        "#### ",
        "### 12",
        "12 is mentioned",
        "",
    ],
)
def test_markers_that_do_not_answer(completion):
    assert verify(completion, "12", "gsm8k").score == WRONG


def test_a_line_that_begins_with_a_colon_answers_only_gsm8k():
    assert verify("3 + 4 = 7\nA: 7", "7", "gsm8k").score == RIGHT
    assert verify("Which?\nA: 7", "7", "math").score == WRONG


def test_reasons():
    assert verify("\\boxed{3}", "3").reason is Reason.MATCHED
    assert verify("\\boxed{4}", "3").reason is Reason.WRONG
    assert verify("I do not know that.", "3").reason is Reason.NO_ANSWER
    assert verify("\\boxed{3 \\text{ or } 4}", "3").reason is Reason.SEVERAL_ANSWERS
    assert verify("\\boxed{3, 4}", "3").reason is Reason.SEVERAL_ANSWERS
    assert verify("\\boxed{3}", "").reason is Reason.UNPARSED_GOLD
    assert verify("\\boxed{3}", " ?! ").reason is Reason.UNPARSED_GOLD


def test_truncated_completions():
    assert verify("and so 3 + 4", "7", truncated=True).reason is Reason.TRUNCATED
    assert verify("so \\boxed{\\frac{1}{2", "7", truncated=True).reason is Reason.TRUNCATED
    # "#### 12" may have been going to be "#### 1234", but a box has an end.
    assert verify("#### 12", "12", truncated=True).reason is Reason.TRUNCATED
    assert verify("#### 12\nThat is", "12", truncated=True).reason is Reason.MATCHED
    assert verify("\\boxed{12}", "12", truncated=True).reason is Reason.MATCHED


def test_an_unknown_style_is_an_error():
    with pytest.raises(ValueError, match="gsm8k"):
        verify("\\boxed{1}", "1", "latex")


# ---------------------------------------------------------------- FAULTS


def test_b80_the_whole_completion_is_searched():
    talk = "and so we are done, as one can see. " * 12
    assert len(talk) > 400
    assert verify("#### 42\n" + talk, "42", "gsm8k").score == RIGHT
    assert verify("#### 42 " + talk, "42", "gsm8k").score == RIGHT
    assert verify("\\boxed{42} " + talk * 100, "42").score == RIGHT


@pytest.mark.parametrize(
    "answer", ["42.", "42.0", "$42", "**42**", "\\boxed{42}", "42%", "42 ", " 42"]
)
def test_b81_decorated_numbers_equal_the_gold(answer):
    assert verify(f"#### {answer}", "42", "gsm8k").score == RIGHT
    assert verify(answer, "42", "gsm8k").score == RIGHT


def test_b81_other_numbers_do_not():
    assert verify("#### 1,234", "1234", "gsm8k").score == RIGHT
    for answer in ("−42", "-42", "421", "4.2", "42,000", "42 thousand"):
        assert verify(f"#### {answer}", "42", "gsm8k").score == WRONG


def test_b83_the_gold_and_the_completion_have_their_own_places():
    assert verify("\\boxed{.5}", "1/2").score == RIGHT
    assert verify(completion="\\boxed{1}", gold="x>1").score == WRONG
    assert verify(completion="\\boxed{x>1}", gold="1").score == WRONG


def test_b85_a_missing_answer_is_not_an_empty_one():
    assert verify("<think>a</think> <answer>4</answer><eos>", "4").score == RIGHT
    assert verify("<think>a</think> nothing", "").score == WRONG
    assert verify("<answer></answer>", "").score == WRONG


# ---------------------------------------------------------------- equality


def test_fractions_are_compared_by_value():
    accepted(
        "\\frac{1}{2}", "1/2", "0.5", ".50", "\\dfrac12", "\\frac 1 2", "{1 \\over 2}",
        "\\frac{2}{4}", "½", "50\\%", "2^{-1}", "5e-1", "5 \\times 10^{-1}",
        "\\frac{\\frac14}{\\frac12}", "\\left(\\frac{1}{2}\\right)", "x = \\frac12",
        "\\sin 30^\\circ", "\\cos \\frac{\\pi}{3}",
    )  # fmt: skip
    refused("\\frac{1}{2}", "-1/2", "2", "12", "0.49", "1:2", "\\frac12 x", "5", "50")
    accepted("-\\frac{2}{7}", "\\frac{-2}{7}", "\\frac{2}{-7}", "−2/7")
    accepted("\\frac{1}{7}", "0.\\overline{142857}", "0.142857142857142857")
    refused("\\frac{1}{7}", "0.142857", "0.14", "0.1428571")


def test_mixed_numbers():
    accepted("\\frac{11}{4}", "2\\frac34", "2 \\frac{3}{4}", "2 3/4", "2¾", "2.75")
    refused("\\frac{11}{4}", "2", "\\frac{23}{4}", "2 \\cdot \\frac{3}{4}")
    accepted("-\\frac{11}{4}", "-2\\frac34")


def test_numbers_are_exact():
    refused("10000", "10001", "9999.9999")
    refused("12", "1200", "0.12")
    refused("50", "0.5")
    refused("123456789123456789", "123456789123456788")
    refused("0", "10^{-30}", "0.0001")
    accepted("0.00012", "1.2\\times10^{-4}", "1.2e-4", "\\frac{12}{100000}")
    accepted("1", "0.\\overline{9}")


def test_thousands_separators():
    accepted(
        "2345678",
        "2,345,678",
        "2{,}345{,}678",
        "2\\,345\\,678",
        "2,\\!345,\\!678",
        "2 345 678",
        "2'345'678",
    )
    refused("2345678", "2", "678", "23,45,678", "2.345.678", "2345,678")
    refused("25", "2 5", "2,5")
    # Inside brackets a comma separates.
    accepted("(1,200)", "(1, 200)")
    accepted("100, 200", "100,200")


def test_percentages():
    accepted("35\\%", "35", "35\\%", "35 percent", "0.35", "\\frac{7}{20}")
    refused("35\\%", "3500", "0.0035", "36\\%")
    accepted("0.35", "35\\%")
    refused("0.35", "35")
    assert boxed("35\\%", "35", "gsm8k") == RIGHT


def test_surds_pi_and_powers():
    accepted(
        "3\\sqrt{5}",
        "\\sqrt{45}",
        "3 \\cdot \\sqrt5",
        "\\frac{15}{\\sqrt5}",
        "3*sqrt(5)",
        "45^{1/2}",
        "3√5",
    )
    refused("3\\sqrt{5}", "15", "5\\sqrt3", "\\sqrt{15}", "6.708")
    accepted("\\sqrt{3}+\\sqrt{7}", "\\sqrt{10+2\\sqrt{21}}")
    accepted("\\sqrt{2}", "1.4142135623730950488")
    accepted("6\\pi", "\\pi\\cdot 6", "6π", "6 \\pi \\text{ cm}^2", "\\frac{12\\pi}{2}")
    refused("6\\pi", "6", "18.85", "6\\pi^2", "\\frac{132}{7}")
    accepted("2^{1000}", "4^{500}", "2 \\cdot 2^{999}")
    refused("2^{1000}", "2^{1001}", "2^{1000}+1")
    accepted("3^{1/3}", "\\sqrt[3]{3}")
    accepted("-3", "\\sqrt[3]{-27}")


def test_complex_numbers():
    accepted("2+3i", "3i+2", "2 + 3 i", "\\frac{4+6i}{2}")
    refused("2+3i", "2-3i", "(2,3)", "5i", "2")
    accepted("-1", "i^2")


def test_polynomials_and_functions():
    accepted(
        "x^2-4x+4",
        "(x-2)^2",
        "4 - 4x + x^2",
        "(2-x)^{2}",
        "x(x-4)+4",
        "x**2-4*x+4",
        "f(x) = (x-2)^2",
    )
    accepted("x-y", "-(y-x)", "-\\left(y-x\\right)", "(x-y)", "1-(y-x)-1")
    refused("x-y", "y-x", "-(x-y)")
    refused("x^2-4x+4", "(x+2)^2", "x^2-4x", "y^2-4y+4", "4", "x^2-4x+4=0")
    accepted("\\frac{1}{x-1}", "\\frac{-1}{1-x}", "1/(x-1)")
    refused("\\frac{1}{x-1}", "1/x-1")
    accepted("\\sin 2x", "2\\sin x\\cos x")
    accepted("\\sin^2 x", "1-\\cos^2 x", "(\\sin x)^2")
    refused("\\sin x", "\\cos x", "\\sin y")
    accepted("2^{n+1}", "2\\cdot2^n")
    accepted("\\log_3 9", "2")
    accepted("|a-b|", "|b-a|")
    refused("\\sqrt{x^2}", "x")
    accepted("\\binom{6}{2}", "15")
    accepted("4!", "24")
    accepted("\\lfloor 7.9 \\rfloor", "7")
    accepted("\\sum_{k=1}^{n} a_k b_{n-k}", "\\sum_{j=1}^{n} b_{n-j} a_j")
    refused("\\sum_{k=1}^{n} a_k", "\\sum_{k=0}^{n} a_k")


def test_lists_and_sets_have_no_order():
    accepted(
        "4, 9",
        "9, 4",
        "\\{4, 9\\}",
        "4 \\text{ and } 9",
        "x=4 \\text{ or } x=9",
        "4;9",
        "x_1 = 9, x_2 = 4",
    )
    refused("4, 9", "4", "(4,9)", "[4,9]", "4, 9, 10", "4, 8", "49", "13")
    accepted("\\{1,3,5\\}", "{5,3,1}", "1, 3, 5", "x \\in \\{1,3,5\\}")
    accepted("\\pm 6", "6, -6", "\\{-6, 6\\}", "x = \\pm 6", "\\mp 6")
    refused("\\pm 6", "6", "-6", "\\pm 5")
    accepted("\\frac{3\\pm\\sqrt2}{5}", "\\frac{3-\\sqrt2}{5}, \\frac{3+\\sqrt2}{5}")
    refused("6", "\\pm 6", "6 \\pm 1", "6 \\lor 7", "\\{6, 7\\}")


def test_names_decide_the_order_where_there_are_names():
    accepted("x = 1, y = 8", "y = 8, x = 1", "1, 8", "(1, 8)")
    refused("x = 1, y = 8", "x = 8, y = 1", "8, 1", "(8, 1)")
    accepted("(x,y) = (1,8)", "(1,8)", "x=1, y=8", "y=8, x=1")
    refused("(x,y) = (1,8)", "x=8, y=1")


def test_tuples_have_an_order():
    accepted("(2,-5)", "(2, -5)", "\\left(2,-5\\right)", "(x,y)=(2,-5)", "(\\frac42,-5)")
    refused("(2,-5)", "(-5,2)", "\\{2,-5\\}", "2", "(2,5)", "(2,-5,0)")
    accepted("(1,2),(3,4)", "(3,4),(1,2)")
    refused("(1,2),(3,4)", "(2,1),(3,4)", "(1,2)")


def test_interval_ends_matter():
    accepted(
        "(1,5]", "(1, 5]", "\\left(1,5\\right]", "1 < x \\le 5", "x \\in (1,5]", "5 \\ge x > 1"
    )
    refused("(1,5]", "(1,5)", "[1,5]", "[1,5)", "(1,6]", "5")
    accepted("x \\le 3", "(-\\infty, 3]", "3 \\ge x", "2x \\leq 6", "x<=3", "-x \\ge -3")
    refused("x \\le 3", "x < 3", "(-\\infty,3)", "3", "x = 3", "y \\le 3", "x \\ge 3")
    accepted(
        "(-\\infty,0)\\cup(0,\\infty)",
        "x \\ne 0",
        "\\mathbb{R}\\setminus\\{0\\}",
        "x<0 \\text{ or } x>0",
    )
    refused("(-\\infty,0)\\cup(0,\\infty)", "(-\\infty,\\infty)", "\\mathbb{R}", "x > 0")
    accepted("[0,2]", "[0,1]\\cup[1,2]", "x \\ge 0 \\text{ and } x \\le 2")
    accepted("(-\\infty,\\infty)", "\\mathbb{R}", "x \\in \\mathbb R")
    accepted("\\emptyset", "\\varnothing", "\\{\\}")


def test_matrices():
    gold = "\\begin{pmatrix}1&2\\\\3&\\frac12\\end{pmatrix}"
    accepted(
        gold,
        "\\begin{bmatrix} 1 & 2 \\\\ 3 & 0.5 \\end{bmatrix}",
        "\\left(\\begin{array}{cc}1&2\\\\3&1/2\\end{array}\\right)",
        "A = \\begin{pmatrix}1&2\\\\3&\\frac12\\\\\\end{pmatrix}",
    )
    refused(
        gold,
        "\\begin{pmatrix}1&3\\\\2&\\frac12\\end{pmatrix}",
        "\\begin{vmatrix}1&2\\\\3&\\frac12\\end{vmatrix}",
        "\\begin{pmatrix}1&2\\end{pmatrix}",
        "-\\frac{11}{2}",
    )
    refused("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1&2\\end{pmatrix}")


def test_equations_are_equal_up_to_a_factor():
    accepted("y = 3x - 2", "3x - y = 2", "2y = 6x - 4", "3x-2", "y+2 = 3x")
    refused("y = 3x - 2", "y = 3x + 2", "y", "0", "x = 3y - 2")
    accepted("x^2+y^2=9", "9 = y^2+x^2", "\\frac{x^2}{9}+\\frac{y^2}{9}=1")
    refused("x^2+y^2=9", "9", "x^2-y^2=9", "x^2+y^2")
    accepted("x = 4", "4", "4 = x")
    accepted(
        "4", "x = 4", "n=4", "f(3)=4", "\\angle A = 4^\\circ", "AB = 4", "\\text{Area} = 4", "1+3=4"
    )
    refused("4", "x^2 = 4", "2x = 4", "x + y = 4", "1+2=4", "1=2=3=4")


def test_units_currency_and_degrees_are_ignored():
    accepted(
        "20", "20 \\text{ cm}", "20\\,\\mathrm{m/s}", "20 square inches", "20 km/h", "\\$20",
        "$20", "20 dollars", "€20", "20^\\circ", "20°", "20 degrees", "20^{\\circ}\\text{C}",
        "20 people", "20 cm^2", "20.", "20 (twenty)", "n = 20 \\text{ cm}",
    )  # fmt: skip
    refused("20", "20x", "20i", "20!", "20\\pi", "20 or 21", "20 to 21", "20-21", "\\frac{20}{21}")
    accepted("20 \\text{ cm}^2", "20", "20\\mathrm{cm}^2")
    refused("20 \\text{ cm}^2", "20 \\text{ cm}^3", "400", "20^2")
    refused("8:30 \\text{ a.m.}", "8:30 p.m.", "830", "8:31 a.m.")
    accepted("8:30", "8:30 a.m.", "8:30 AM")


def test_words():
    accepted(
        "\\text{parabola}", "parabola", "Parabola.", "\\textbf{Parabola}", "\\mathrm{parabola}"
    )
    refused("\\text{parabola}", "hyperbola", "p", "not a parabola", "parabola+1")
    accepted("\\text{(D)}", "D", "(D)", "\\textbf{(D)}", "D.", "\\text{D}")
    refused("\\text{(D)}", "C", "D or C", "(D), (C)", "DC", "0")


def test_case_of_a_variable_matters():
    refused("3R^2", "3r^2")
    refused("2k+2", "2n+2")


def test_number_bases_and_ratios():
    accepted("212_3", "212_{3}", "212_{\\text{3}}")
    refused("212_3", "2123", "212", "212_4", "23", "211_3")
    accepted("2:7", "2 : 7", "a:b = 2:7", "2 \\text{ to } 7")
    refused("2:7", "7:2", "27", "2", "2:7:1")


def test_structures_that_only_look_alike():
    refused("1, 2, \\ldots, n", "1, 4, \\ldots, n^2")
    refused("ab", "a+b")
    refused("\\frac43", "43")
    refused("\\frac{5}{0}", "\\frac{6}{0}", "5")
    refused("\\infty", "-\\infty", "1")


def test_no_two_different_golds_are_equal():
    golds = [
        "1",
        "-1",
        "\\frac12",
        "2",
        "\\sqrt2",
        "\\pi",
        "e",
        "i",
        "x",
        "x^2",
        "2x",
        "x=3",
        "y=3",
        "x>3",
        "(1,2)",
        "(2,1)",
    ]
    golds += [
        "[1,2]",
        "(1,2]",
        "\\{1,3\\}",
        "\\{1,2,3\\}",
        "1:2",
        "12_3",
        "\\text{cat}",
        "\\text{A}",
        "\\emptyset",
        "\\mathbb{R}",
    ]
    for gold, other in itertools.permutations(golds, 2):
        assert boxed(other, gold) == WRONG, (gold, other)
    for gold in golds:
        assert boxed(gold, gold) == RIGHT


# ---------------------------------------------------------------- golds


def test_golds_are_checked_when_data_is_loaded():
    assert check_gold("\\frac{3}{4}") is None
    assert check_gold("The rest is 3.\n#### 1,234", "gsm8k") is None
    assert check_gold("so it is $\\boxed{2}$") is None
    assert check_gold("") == "no_answer: read as None"
    assert check_golds(["1", "2"]) == 2
    with pytest.raises(ValueError, match="row 1"):
        check_golds(["1", "..."])


def test_a_gold_may_be_a_whole_solution():
    assert verify("#### 72", "48/2 = 24\n#### 72", "gsm8k").score == RIGHT
    assert verify("#### 24", "48/2 = 24\n#### 72", "gsm8k").score == WRONG


def test_where_the_answer_was_read():
    assert extract("\\boxed{1}").source == "boxed"
    assert extract("#### 1").source == "hash"
    assert extract("<answer>1</answer>").source == "tag"
    assert extract("The answer is 1").source == "phrase"
    assert extract("1").source == "whole"
    assert extract("Nothing was said about that") is None


# ---------------------------------------------------------------- spellings


def test_layout_and_decoration_do_not_count():
    accepted(
        "25", "\\textcolor{red}{25}", "\\color{blue}25", "25 \\tag{1}", "\\phantom{2}25",
        "\\underline{25}", "\\displaystyle 25", "\\large 25", "25\\hspace{1cm}", "\\(25\\)",
        "\\[25\\]", "{25}", "+25", "25^{\\text{th}}", "25th", "25^o", "US$25", "Rs. 25",
        "２５", "𝟐𝟓",
    )  # fmt: skip


def test_words_that_change_a_number_are_no_unit():
    refused(
        "25",
        "25 or more",
        "25 less than x",
        "25 squared",
        "25 thirds",
        "25 below zero",
        "at least 25",
    )
    refused("25", "25 out of 26", "25 hours and 30 minutes", "25 if x > 0")


def test_set_builders_and_systems():
    accepted(
        "(3,\\infty)", "\\{x \\mid x > 3\\}", "\\{x : x > 3\\}", "\\{x \\in \\mathbb{R} | x > 3\\}"
    )
    refused("(3,\\infty)", "\\{x \\mid x \\ge 3\\}")
    accepted("(1,2)", "\\begin{cases} x=1 \\\\ y=2 \\end{cases}")
    refused("(1,2)", "\\begin{cases} x=2 \\\\ y=1 \\end{cases}")
    accepted("(1,2),(3,4)", "x=1, y=2 \\text{ or } x=3, y=4")
    accepted("2k\\pi", "x = 2k\\pi, k \\in \\mathbb{Z}")


def test_decimals_of_a_value_without_end_need_fifteen_digits():
    accepted("\\frac{2}{3}", "0.666666666666667", "0.66666666666666666666")
    refused("\\frac{2}{3}", "0.66666666666667", "0.667", "0.666666666666668")
    # What has an end must be written to its end.
    refused("\\frac{1}{10}", "0.10000000000000001")


def test_talk_around_the_answer():
    for completion in (
        "The answer is $2x + 1$, as shown.",
        "The answer to this problem is $2x+1$.",
        "The ANSWER IS 2x+1",
        "The answer is:\n$$2x+1$$",
        "Answer:\n\n**2x+1**",
    ):
        assert verify(completion, "2x+1").score == RIGHT, completion
    for completion in (
        "The answer is 84; this matches our estimate.",
        "The answer is 84: seven times twelve.",
        "#### So 84",
    ):
        assert verify(completion, "84").score == RIGHT, completion
    for completion in (
        "The answer is 84; maybe a little more.",
        "The answer is 84, but I doubt it.",
        "The answer is 84; 85 is near.",
        "The answer is 84: 85",
    ):
        assert verify(completion, "84").score == WRONG, completion
    assert verify("The answer is 5\nBut wait, the answer is 6", "5").score == WRONG


def test_a_name_without_its_subscript_is_read():
    # Found by fuzzing: the side of a relation ended in an underscore.
    assert boxed("x_=3", "4") == WRONG


def test_emphasis_that_begins_before_the_answer_is_no_part_of_it():
    for completion in (
        "**The answer is 21**",
        "#### **Answer: 21**",
        "The answer is ***21***.",
        "__Answer:__ 21",
        "## Answer\n\n**Final answer: 21**",
    ):
        assert verify(completion, "21", "gsm8k").score == RIGHT, completion
        assert verify(completion, "22", "gsm8k").score == WRONG, completion


def test_calculator_annotations_are_no_part_of_an_answer():
    assert verify("#### 9*2 = <<9*2=18>>18", "18", "gsm8k").score == RIGHT
    assert verify("#### <<9*2=18>>", "18", "gsm8k").score == WRONG


def test_a_question_after_an_answer_withdraws_it():
    assert verify("The answer is 12? No, 13.", "12").score == WRONG


def test_the_case_of_letters_matters_to_variables_only():
    for gold in ("ab", "p-q", "x", "xyz", "AB", "a,b", "mn", "R"):
        accepted(gold, gold)
        refused(gold, gold.swapcase())
    accepted("\\text{Bob}", "bob", "BOB", "\\text{Bob}.")
    accepted("\\text{AB}", "AB")
    refused("\\text{AB}", "ab")


def test_marks_behind_a_letter_belong_to_it():
    refused("n!", "n", "n!!", "(n+1)!")
    refused("n", "n!", "n'")
    refused("a", "a'", "a''")
    accepted("\\text{Yes}", "Yes!", "'yes'")


@pytest.mark.parametrize("letter", "abcdfghjklmnopqrstuvwxyz")
def test_identities_that_fail_for_some_values_are_none(letter):
    refused(
        letter, f"\\sqrt{{{letter}^2}}", f"|{letter}|", f"\\max({letter}, 0)",
        f"\\arctan(\\tan {letter})", f"\\arcsin(\\sin {letter})", f"\\arccos(\\cos {letter})",
    )  # fmt: skip
    accepted(f"|{letter}|", f"\\sqrt{{{letter}^2}}", f"|-{letter}|")
    refused(f"\\lfloor {letter} \\rfloor + 1", f"\\lceil {letter} \\rceil")


def test_differences_of_any_size_count():
    refused("0", "e^{-300}", "\\sqrt2\\cdot10^{-300}", "\\sin(10^{-200})", "\\frac{1}{1000!}")
    refused("\\sqrt2", "\\sqrt2-\\pi^{-300}", "\\sqrt{2+10^{-80}}", "\\sqrt2+10^{-3000}")
    refused("\\sqrt{2}\\cdot10^{-300}", "\\sqrt{3}\\cdot10^{-300}", "\\sqrt{2}\\cdot10^{-301}", "0")
    accepted("2^{500}\\sqrt2", "\\sqrt{2^{1001}}")
    accepted("1", "1+\\sin\\pi", "e^{2\\pi i}")


def test_an_equation_is_proportional_at_more_than_one_point():
    refused("y=\\ln x", "y=\\ln|x|", "y=2\\ln x", "y=\\ln(-x)")
    refused("y=\\sqrt{x}", "y=\\sqrt[3]{x}", "y=x")
    accepted("y=\\sqrt{x}", "2y=2\\sqrt{x}", "y-x^{1/2}=0")


def test_words_of_number_change_the_number():
    refused(
        "5", "5\\text{ thousands}", "5\\text{ tens}", "5\\text{ dozens}", "5\\text{ lakh}",
        "5\\text{ sevenths}", "5\\text{ sixteenths}", "5\\text{ hundredth}", "5‰",
        "5\\text{ feet and six inches}", "5\\text{ point five}", "5\\text{ (or 6)}",
        "5\\text{ (or six)}", "5\\text{ hours 30 minutes}", "5\\text{ doubled}",
    )  # fmt: skip
    accepted("500", "5\\text{ hundreds}", "5 hundred")
    accepted("300000", "3\\text{ lakh}")
    accepted("36", "36 (thirty-six)", "36\\text{ cm}^2", "36\\text{ m2}", "36 \\text{ months}")


def test_a_letter_behind_a_value_is_a_unit():
    accepted("\\frac{9}{2}", "\\frac{9}{2}\\text{ m}", "4.5\\,\\mathrm{m}", "\\frac92\\mathrm{~s}")
    accepted("10\\pi", "10\\pi\\text{ m}")
    accepted("4.5\\times10^{-7}", "4.5 \\times 10^{-7} \\text{ m}")
    refused("4.5\\times10^{-7}", "4.5 \\times 10^{-7} m^2 + 1")


def test_a_currency_sign_between_digits_is_no_decoration():
    refused("56", "5€6", "5\\$6", "5£6", "5$6")
    refused("1500", "1€500", "1\\$500", "1 \\$ 500")
    accepted("56", "€56", "56€", "\\$56", "$56$", "Rs.\\,56", "US\\$56")
    accepted("-40", "-€40", "-\\$40", "\\$-40")


def test_an_approximation_must_be_one():
    accepted("\\frac{2}{3}", "\\frac{2}{3} \\approx 0.667", "x = \\frac23 \\approx 0.67")
    accepted("1234", "1234 \\approx 1200")
    refused("42", "42 \\approx 43", "43 \\approx 42")
    refused("x", "x \\approx 3.4")


def test_relations_of_other_signs_are_others():
    refused("AB \\parallel CD", "AB \\perp CD")
    refused("p \\Rightarrow q", "p \\iff q")
    refused("\\triangle ABC", "\\angle ABC")
    refused("\\emptyset", "\\{\\emptyset\\}", "\\{0\\}", "0")


def test_decimals_are_cut_or_rounded_not_raised():
    # 3.141592653589793…: cut and rounded after fourteen places, it ends in 79.
    accepted("\\pi", "3.14159265358979", "3.141592653589793")
    refused("\\pi", "3.14159265358980", "3.14159265358978")


def test_names_of_values():
    accepted("f^{-1}(x) = \\frac{x-3}{2}", "\\frac{x-3}{2}", "y = \\frac{x-3}{2}")
    accepted("5:4", "AB:BC = 5:4")
    accepted(
        "\\begin{pmatrix}3\\\\4\\end{pmatrix}", "\\mathbf{v}=\\begin{pmatrix}3\\\\4\\end{pmatrix}"
    )
    refused("5", "x^{-1} = 5", "2^{-1}(x) = 5")


def test_lists_of_letters_have_no_order():
    accepted("\\text{A, C}", "C, A", "A,C", "\\text{A and C}", "A \\text{ and } C")
    refused("\\text{A, C}", "A", "A, B", "A, B, C", "AC")


def test_an_index_named_i_is_no_imaginary_unit():
    accepted("\\sum_{k=1}^{n} k^2", "\\sum_{i=1}^{n} i^2")
    refused("\\sum_{k=1}^{n} k^2", "\\sum_{i=1}^{n} i", "\\sum_{k=1}^{n} i^2")


def test_unions_of_finite_sets():
    accepted("\\{1,2,3\\}", "\\{1,2\\}\\cup\\{3\\}", "\\{1\\}\\cup\\{2\\}\\cup\\{3\\}")
    refused("\\{1,2,3\\}", "\\{1,2\\}\\cup\\{4\\}", "\\{1,2\\}\\cap\\{3\\}")


def test_numbers_in_a_base_in_other_layout():
    accepted(
        "52_8", "{52_8}", "\\mathbf{52_8}", "\\displaystyle 52_8", "(52)_{8}", "52_{\\text{8}}"
    )
    refused("52_8", "{53_8}", "\\mathbf{52_9}", "52")


def test_other_spellings():
    accepted("1.5", "³⁄₂", "1½")
    accepted("\\bar{x}", "\\bar x", "\\overline{x}")
    accepted("\\frac{7}{9}", "\\mathrm{\\frac{7}{9}}", "\\text{$\\frac{7}{9}$}", "\\frac79\\ ")
    accepted("\\binom{7}{3}", "\\frac{7!}{3!4!}")
    accepted("\\sin 2x + \\cos x", "\\cos x(2\\sin x+1)")
    accepted("\\text{May 5}", "May 5")
    accepted("4, 9", "{4 \\text{ and } 9}")
    refused("\\text{May 5}", "May 6", "May", "5")


def test_quantities_by_their_usual_names():
    accepted("\\frac{3}{5}", "\\cos A = \\frac35", "\\sin\\angle ABC = 0.6", "\\tan\\theta=3/5")
    accepted("12", "[ABC] = 12", "\\gcd(a,b) = 12", "\\text{Area of }\\triangle ABC = 12")
    accepted("2x", "\\frac{dy}{dx} = 2x", "y' = 2x")
    accepted("f'(x) = 2x", "y' = 2x")
    refused("f'(x) = 2x", "y'' = 2x")
    # What is to be solved is no name.
    refused(
        "2", "\\ln x = 2", "\\sqrt{x} = 2", "\\sin^2 x = 2", "\\cos 2x = 2", "e^x = 2", "|x| = 2"
    )
    refused("\\sin x = \\frac12", "\\frac12", "\\cos x = \\frac12")


def test_memberships_are_of_the_variable_itself():
    refused("[-2,7]", "2x \\in [-2,7]", "x^2 \\in [-2,7]", "-x \\in [-2,7]")
    refused("1, 2", "2x \\in \\{1,2\\}", "x \\notin \\{1,2\\}")
    refused("(3,\\infty)", "\\{x \\in \\mathbb{Z} : x > 3\\}", "x > 3, x \\in \\mathbb{Z}")
    accepted("(3,\\infty)", "\\{x \\in \\mathbb{R} : x > 3\\}")


def test_absolute_values_are_ranges():
    accepted("[-3,3]", "|x| \\le 3", "3 \\ge |x|")
    accepted("(-\\infty,-2)\\cup(2,\\infty)", "|x| > 2")
    refused("[-3,3]", "|x| < 3", "|x| \\ge 3", "|x| \\ne 3", "|x| \\le -3", "|x-1| \\le 3")


def test_what_is_excluded():
    accepted("x \\ne 0", "\\mathbb{R} - \\{0\\}", "\\{x \\mid x \\ne 0\\}")
    accepted("x \\ne 1, 2", "x \\ne 1 \\text{ and } x \\ne 2", "\\mathbb{R} \\setminus \\{1,2\\}")
    refused("x \\ne 1, 2", "x \\ne 1 \\text{ or } x \\ne 2", "x \\ne 1")


def test_other_layout_and_operators():
    accepted("6", "\\Huge 6", "\\left.6\\right.", "\\strut 6", "6 \\blacksquare", "\\phantom -6")
    accepted("12", "\\operatorname{lcm}(4,6)", "\\max\\{3,12\\}", "12/\\text{hour}")
    accepted("6000", "6x10^3", "6 x 10^3")
    refused("6000", "6x10^2", "6x")
