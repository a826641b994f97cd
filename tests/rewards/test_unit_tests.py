"""The reward for code reads the tests from the prompt and pays for passing them."""

import json
from pathlib import Path
from typing import Any

import pytest

from zoo.data.jsonl import JSONL
from zoo.rewards.audit import judge, read_labelled
from zoo.rewards.check import RewardError
from zoo.rewards.unit_tests import UnitTests
from zoo.types import Completion, Prompt

PROMPT = Prompt(id="p", columns={"test_list": ["assert f(2) == 4", "assert f(3) == 9"]})


def completion(code: str) -> Completion:
    return Completion(f"```python\n{code}\n```", (), (), truncated=False)


def test_right_half_right_and_broken_programs() -> None:
    programs = ["def f(x): return x * x", "def f(x): return 4", "def f(x) return 4"]
    completions = [completion(code) for code in programs]
    output = UnitTests()([PROMPT] * 3, completions)
    assert output.total == [1.0, 0.0, 0.0]
    assert output.reasons == ["passed", "wrong", "syntax"]
    assert UnitTests(partial=True)([PROMPT] * 3, completions).total == [1.0, 0.5, 0.0]


IMPORTS = "from typing import List\n\n"
SIGNATURE = f"{IMPORTS}def f(x: List[int]) -> int:\n"
HUMANEVAL = f'{SIGNATURE}    """Sum.\n\n    >>> f([1])\n    1\n    """\n'
BODY = "    return sum(x)\n"
WHOLE = "def f(x: List[int]) -> int:\n    return sum(x)\n"
BARE = "def f(x):\n    return sum(x)\n"
FUTURE = f"from __future__ import division\n{BARE}"
WORDS = "Write f(x), the sum of a list."
SLOW = "def f(x):\n    return sum(i for i in x)\n"
SETUPS = (
    "sys\nsys.setrecursionlimit(5000)",
    "math\ntry:\n    import fast\nexcept ImportError:\n    fast = None",
    "math\nEPS: float = 1.0",
    "math\nasync def h(x):\n    return x",
)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        *[(HUMANEVAL, code) for code in (BODY, WHOLE, BARE, FUTURE)],
        *[(SIGNATURE, code) for code in (BODY, WHOLE, BARE)],  # nothing but words to go on with
        (HUMANEVAL.rstrip(), BODY),
        (f"{HUMANEVAL}    return ", "sum(x)"),
        (f"{HUMANEVAL}    return", " sum(x)"),
        (f"{HUMANEVAL}    return (", "sum(x))\n"),
        (f"{HUMANEVAL}    # The sum:", BODY),
        *[(f"Complete this:\n```python\n{HUMANEVAL}```\nCode alone.", c) for c in (BODY, WHOLE)],
        *[(f"{IMPORTS}# the sum of a list: f(x)", code) for code in (WHOLE, BARE, "f = sum")],
        *[(words, code) for words in (WORDS, "Square", "Task: sums") for code in (BARE, "f = sum")],
        *[(f"import {setup}\n", BARE) for setup in SETUPS],
        (f"Make it fast:\n```python\n{IMPORTS}{SLOW}```", WHOLE.replace("return", "return 0 +")),
        (f"{WORDS}\n```python\nfrom solution import f\nf([1]) == 1\n```", BARE),
        (
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": HUMANEVAL}],
            WHOLE,
        ),
    ],
)
@pytest.mark.parametrize("instruction", ["", "Answer in a code block, please."])
def test_prompts_that_begin_the_program_are_run_with_it_in_training_and_in_audits(
    prompt: Any, code: str, instruction: str, tmp_path: Path
) -> None:
    cut_off = isinstance(prompt, str) and prompt.endswith(("return", "return ", "("))
    if cut_off and instruction:
        return  # a base model's prompt, which no instruction follows
    test = "def check(candidate):\n    assert candidate([1, 2]) == 3\n"
    row = {"prompt": prompt, "test": test, "entry_point": "f", "label": True}
    rows = [row | {"completion": text} for text in (code, code.replace("sum", "max"))]
    for name, lines in (("a", rows), ("b", [row])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    file = str(tmp_path / "b.jsonl")
    prompts = JSONL(path=file, instruction=instruction, chat=not instruction)._rows(file)
    completions = [Completion(r["completion"], (), (), truncated=False) for r in rows]
    assert UnitTests()([*prompts] * 2, completions).total == [1.0, 0.0]
    # Without a gold, which this reward does not read.
    labelled = list(read_labelled(tmp_path / "a.jsonl", {}, golds=False))
    assert [j.score for j in judge(UnitTests(), labelled)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({}, "has no tests for code"),
        ({"test_list": ["assert f(1) and"]}, "is not Python"),
        ({"test_list": 5}, "TypeError: 'int' object is not iterable"),
    ],
)
def test_tests_that_are_none_are_told_of_the_data(columns: dict[str, Any], told: str) -> None:
    with pytest.raises(RewardError, match=rf"tests of prompt p: .*{told}.*Correct that row of the"):
        UnitTests()([Prompt("p", columns=columns)], [completion("f = sum")])


@pytest.mark.parametrize(
    "prompt",
    [
        SLOW,
        f"Make this fast:\n```python\n{SLOW}```",
        f"{SLOW}\nMake this fast.",
        f"Make this fast:\n```python\n{IMPORTS}if True:\n    f = sum\n```",
        "```python\nfrom statistics import fsum as f\n```",
    ],
)
@pytest.mark.parametrize(
    "code", ["pass", "    pass", "x = 1", "def g(x):\n    return 0", '"""\ndef f(x):\n"""']
)
def test_an_answer_in_the_prompt_does_not_pass_for_the_completion_s(prompt: str, code: str) -> None:
    test = "def check(candidate):\n    assert candidate([1, 2]) == 3\n"
    asked = Prompt("p", text=prompt, columns={"test": test, "entry_point": "f"})
    assert UnitTests()([asked], [completion(code)]).total == [0.0]
