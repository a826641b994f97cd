"""The reward for code reads the tests from the prompt and pays for passing them."""

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
