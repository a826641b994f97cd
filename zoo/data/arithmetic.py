"""Generated word problems with worked steps: all a comparison needs, nothing downloaded.

Family A: eight kinds of problem with one or two steps; RL trains on it and is judged on its
held-out part. Family B: other wordings and other combinations of the operations; it is in the
supervised mix but never in RL, so it is the independent evaluation. Family C: short texts without
arithmetic; their held-out part is the guard's perplexity.

A problem is its kind and its numbers, whatever the names: the split into training and held-out
problems is made on those, so that no held-out problem was seen with another name.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TypeVar

from zoo.rewards.verifiable import Verifier
from zoo.types import EvaluationSet, Example, Prompt, Reward

# Shares of the families in the supervised mix. B needs enough to start between 20 and 60 %.
MIX = {"A": 0.6, "B": 0.25, "C": 0.15}
HELD_OUT = 5  # one problem in five is held out

NAMES = (
    "Anna",
    "Ben",
    "Carla",
    "Dan",
    "Ella",
    "Finn",
    "Gina",
    "Hugo",
    "Ida",
    "Jack",
    "Kim",
    "Leo",
    "Mia",
    "Noah",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tina",
    "Vera",
)
ITEMS = ("apples", "books", "coins", "eggs", "marbles", "nuts", "pens", "shells", "stamps", "toys")

Step = tuple[int, str, int]  # left operand, operation, right operand
Numbers = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """One kind of problem: its wording, the ranges of its numbers and how it is solved."""

    name: str
    text: str  # {n}, {m}: people; {i}: items; {a}, {b}, {c}: numbers
    ranges: str  # one letter a number: f factor, s addend
    steps: Callable[..., tuple[Step, ...]]
    # Condition on the numbers, for example that nothing is taken from an empty box.
    valid: Callable[..., bool] = lambda *numbers: True
    shown: Callable[..., Numbers] = lambda *numbers: numbers  # the numbers that the text names


def _value(step: Step) -> int:
    left, operation, right = step
    if operation == "+":
        return left + right
    if operation == "-":
        return left - right
    return left * right if operation == "*" else left // right


FAMILY_A = (
    Kind(
        "gain",
        "{n} has {a} {i}. {m} gives {n} {b} more. How many {i} does {n} have now?",
        "ss",
        lambda a, b: ((a, "+", b),),
    ),
    Kind(
        "lose",
        "{n} had {a} {i} and lost {b} of them. How many {i} are left?",
        "ss",
        lambda a, b: ((a, "-", b),),
        valid=lambda a, b: a > b,
    ),
    Kind(
        "boxes",
        "{n} has {a} boxes with {b} {i} each and {c} more {i}. How many {i} does {n} have?",
        "ffs",
        lambda a, b, c: ((a, "*", b), (a * b, "+", c)),
    ),
    Kind(
        "unpack",
        "{n} has {a} boxes with {b} {i} each and gives {m} {c} {i}. How many {i} are left?",
        "ffs",
        lambda a, b, c: ((a, "*", b), (a * b, "-", c)),
        valid=lambda a, b, c: a * b > c,
    ),
    Kind(
        "more",
        "{n} has {a} {i}. {m} has {b} more than {n}. How many {i} do they have together?",
        "ss",
        lambda a, b: ((a, "+", b), (a, "+", a + b)),
    ),
    Kind(
        "daily",
        "{n} finds {a} {i} a day for {b} days and has {c} {i} at home. How many is that?",
        "ffs",
        lambda a, b, c: ((a, "*", b), (c, "+", a * b)),
    ),
    Kind(
        "share",
        "{n} shares {a} {i} equally among {b} friends. {m} is one of them and has {c} {i} already. "
        "How many {i} does {m} have now?",
        "ffs",
        lambda a, b, c: ((a * b, "/", b), (a, "+", c)),
        shown=lambda a, b, c: (a * b, b, c),
    ),
    Kind(
        "sell",
        "{n} sells {a} {i} to {m} and {b} to others for {c} dollars each. "
        "How many dollars does {n} get?",
        "fff",
        lambda a, b, c: ((a, "+", b), (a + b, "*", c)),
    ),
)

FAMILY_B = (
    Kind(
        "twice",
        "{m} owns twice as many {i} as {n}, who owns {a}. What do both own in total?",
        "s",
        lambda a: ((a, "*", 2), (a, "+", 2 * a)),
    ),
    Kind(
        "fewer",
        "One shelf holds {a} {i}, the next one {b} fewer. What is the number of {i} on both?",
        "ss",
        lambda a, b: ((a, "-", b), (a, "+", a - b)),
        valid=lambda a, b: a > b,
    ),
    Kind(
        "colours",
        "In a jar there are {a} red, {b} blue and {c} green {i}. What is their total?",
        "sff",
        lambda a, b, c: ((a, "+", b), (a + b, "+", c)),
    ),
    Kind(
        "change",
        "At the market {i} cost {a} dollars each. {n} takes {b} and pays with {c} dollars. "
        "What is the change?",
        "ffs",
        lambda a, b, c: ((a, "*", b), (a * b + c, "-", a * b)),
        shown=lambda a, b, c: (a, b, a * b + c),
    ),
    Kind(
        "rows",
        "{a} rows of {b} seats: {c} seats are taken. What number of seats is free?",
        "ffs",
        lambda a, b, c: ((a, "*", b), (a * b, "-", c)),
        valid=lambda a, b, c: a * b > c,
    ),
    Kind(
        "apart",
        "{n} counts {a} {i} and {m} only {b}. By what number do they differ?",
        "ss",
        lambda a, b: ((a, "-", b),),
        valid=lambda a, b: a > b,
    ),
)

# Family C. What a place offers and what an animal does belong together, so there is something to
# know, and hence something to forget.
_ANIMALS = (
    ("cat", "sleeps", "mice"),
    ("dog", "barks", "bones"),
    ("bird", "sings", "seeds"),
    ("horse", "runs", "hay"),
    ("fish", "swims", "worms"),
    ("bee", "flies", "flowers"),
)
_COLOURS = ("black", "brown", "grey", "red", "white", "yellow")
_PLACES = (("garden", "under a tree"), ("house", "by the door"), ("field", "in the sun"))
_TIMES = ("At night", "In the morning", "Every summer", "On cold days")
_MOODS = ("calm", "happy", "hungry", "old", "shy", "young")


@dataclass(frozen=True)
class Arithmetic:
    """Word problems of one or two steps with answers such as `7 * 8 = 56. 56 + 15 = 71. #### 71`.

    A model that was trained on `examples()` knows the right way, and samples it less than half of
    the time, because a share of the demonstrations is wrong in two systematic ways: they stop one
    step short, or end with the wrong operation. That is what reinforcement can change; arithmetic
    itself it cannot teach.

    Everything is a function of the fields: two calls give the same lists.

    Raises:
        ValueError: a field out of its range, or more problems than there are.
    """

    n_problems: int = 4000  # training prompts for RL, all different
    n_examples: int = 24000  # supervised mix of the families A, B and C
    n_heldout: int = 500  # evaluation problems of family A
    n_independent: int = 500  # evaluation problems of family B
    n_texts: int = 200  # guard texts of family C
    flawed: float = 0.55  # share of the demonstrations (A and B) that are systematically wrong
    largest_factor: int = 9  # factors and divisors are 2 … this
    largest_addend: int = 20  # what is added or taken away is 2 … this
    max_new_tokens: int = 40  # the longest right answer has 23 tokens
    data_seed: int = 0  # of the problems; independent of the run's seed, so that runs compare

    def __post_init__(self) -> None:
        for key in ("n_problems", "n_examples", "n_heldout", "n_independent", "n_texts"):
            if getattr(self, key) < 1:
                raise ValueError(
                    f"data.{key} must be at least 1, got {getattr(self, key)}: an empty set trains "
                    f"and measures nothing. Try data.{key}=100."
                )
        if not 0.0 <= self.flawed <= 1.0:
            raise ValueError(
                f"data.flawed must lie in [0, 1], got {self.flawed}: it is a share of the "
                "demonstrations. Try data.flawed=0.55."
            )
        for key in ("largest_factor", "largest_addend"):
            if not 4 <= getattr(self, key) <= 99:
                raise ValueError(
                    f"data.{key} must lie in 4 … 99, got {getattr(self, key)}: numbers start at 2 "
                    "and have at most two digits. "
                    f"Try data.{key}={9 if key == 'largest_factor' else 20}."
                )
        if self.max_new_tokens < 1:
            raise ValueError(
                f"data.max_new_tokens must be at least 1, got {self.max_new_tokens}: the model "
                "could write nothing. Try data.max_new_tokens=40."
            )

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({"prompts", "examples"})

    def prompts(self) -> list[Prompt]:
        """`n_problems` different prompts of family A, none of a held-out problem."""
        return self._distinct("A", "train", self.n_problems)

    def examples(self) -> list[Example]:
        """`n_examples` demonstrations: A and B from the training side, and texts of family C."""
        rng = random.Random(f"{self.data_seed}/examples")
        problems = {family: self._problems(family, "train") for family in ("A", "B")}
        result = []
        for _ in range(self.n_examples):
            draw = rng.random()
            if draw < MIX["A"] + MIX["B"]:
                family = "A" if draw < MIX["A"] else "B"
                kind, numbers = _draw(problems[family], rng)
                steps = kind.steps(*numbers)
                wrong = rng.random() < self.flawed
                solution = _flawed(steps, rng.random() < 0.5) if wrong else _solution(steps)
                result.append(Example(_prompt(family, kind, numbers, rng), solution))
            else:
                result.append(_text_example(_text(rng, held_out=False)))
        return result

    def verifier(self) -> Reward:
        """Right is 1: the number after the last `####` (style gsm8k) equals the gold."""
        return Verifier()

    def evaluation_sets(self) -> list[EvaluationSet]:
        """heldout (A), independent (B) and guard (perplexity on C)."""
        heldout = self._distinct("A", "heldout", self.n_heldout)
        independent = self._distinct("B", "heldout", self.n_independent)
        return [
            EvaluationSet("heldout", "accuracy", tuple(heldout), self.verifier()),
            EvaluationSet("independent", "accuracy", tuple(independent), self.verifier()),
            EvaluationSet("guard", "perplexity", texts=tuple(self._guard_texts())),
        ]

    # the problems ----------------------------------------------------------------------------

    def _problems(self, family: str, side: str) -> list[tuple[Kind, list[Numbers]]]:
        kinds = FAMILY_A if family == "A" else FAMILY_B
        sides = (_split(kind, self.largest_factor, self.largest_addend) for kind in kinds)
        index = ("train", "heldout").index(side)
        return [(kind, s[index]) for kind, s in zip(kinds, sides, strict=True) if s[index]]

    def _distinct(self, family: str, side: str, count: int) -> list[Prompt]:
        rng = random.Random(f"{self.data_seed}/{family}/{side}")
        problems = self._problems(family, side)

        def draw() -> tuple[str, Prompt]:
            prompt = _prompt(family, *_draw(problems, rng), rng)
            return prompt.messages[0]["content"], prompt

        return _different(draw, count, f"{side} problems of family {family}")

    def _guard_texts(self) -> list[str]:
        rng = random.Random(f"{self.data_seed}/C/heldout")

        def draw() -> tuple[str, str]:
            text = _text(rng, held_out=True)
            return text, text

        return _different(draw, self.n_texts, "guard texts")


def _different(draw: Callable[[], tuple[str, T]], count: int, what: str) -> list[T]:
    """`count` draws of different content, in the order in which they came."""
    found: dict[str, T] = {}
    misses = 0
    while len(found) < count:
        content, value = draw()
        misses = misses + 1 if content in found else 0
        found.setdefault(content, value)
        if misses == 500:  # nearly all of them are found
            raise ValueError(
                f"data=arithmetic: {count} different {what} were asked for, and only about "
                f"{len(found)} exist. Ask for fewer, or raise data.largest_addend."
            )
    return list(found.values())


def problem_of(prompt: Prompt) -> str:
    """The problem behind a prompt: its family, kind and numbers, without the names."""
    return "/".join(prompt.id.split("/")[:3])


def _held_out(content: str) -> bool:
    digest = hashlib.blake2b(content.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT == 0


@lru_cache(maxsize=64)
def _split(kind: Kind, largest_factor: int, largest_addend: int) -> tuple[list[Numbers], ...]:
    """All numbers of a kind on their two sides; the side depends on nothing but the problem."""
    largest = {"f": largest_factor, "s": largest_addend}
    sides: tuple[list[Numbers], list[Numbers]] = ([], [])
    for numbers in product(*(range(2, largest[letter] + 1) for letter in kind.ranges)):
        if kind.valid(*numbers):
            sides[_held_out(f"{kind.name}/{numbers}")].append(numbers)
    return sides


def _pick(values: Sequence[T], rng: random.Random) -> T:
    # `random.random` is the one generator method whose stream Python promises never to change.
    return values[int(rng.random() * len(values))]


def _draw(problems: list[tuple[Kind, list[Numbers]]], rng: random.Random) -> tuple[Kind, Numbers]:
    kind, numbers = _pick(problems, rng)
    return kind, _pick(numbers, rng)


def _prompt(family: str, kind: Kind, numbers: Numbers, rng: random.Random) -> Prompt:
    name = _pick(NAMES, rng)
    other = _pick([candidate for candidate in NAMES if candidate != name], rng)
    item = _pick(ITEMS, rng)
    shown = dict(zip("abc", kind.shown(*numbers), strict=False))
    text = kind.text.format(n=name, m=other, i=item, **shown)
    answer = str(_value(kind.steps(*numbers)[-1]))
    return Prompt(
        id=f"{family}/{kind.name}/{'-'.join(map(str, numbers))}/{name}/{other}/{item}",
        messages=({"role": "user", "content": text[0].upper() + text[1:]},),
        columns={"answer": answer, "style": "gsm8k", "family": family},
    )


# the solutions -------------------------------------------------------------------------------


def _solution(steps: Sequence[Step]) -> str:
    lines = [f"{left} {op} {right} = {_value((left, op, right))}." for left, op, right in steps]
    return " ".join([*lines, f"#### {_value(steps[-1])}"])


def _flawed(steps: Sequence[Step], stop_short: bool) -> str:
    """A wrong solution: one step short, or with the wrong operation in its last step."""
    *first, (left, operation, right) = steps
    larger, smaller = max(left, right), min(left, right)
    slip = (larger, "-", smaller) if operation == "+" else (left, "+", right)
    # One step short of one step: a number of the problem.
    short = (_solution(first), _value(first[-1])) if first else (f"#### {left}", left)
    wrong = (_solution([*first, slip]), _value(slip))
    candidates = [short, wrong] if stop_short else [wrong, short]
    # 2 * 2 and 2 + 2 agree: such a slip would not be one.
    return next(text for text, value in candidates if value != _value(steps[-1]))


# the texts -----------------------------------------------------------------------------------


def _sentences(rng: random.Random) -> Iterator[str]:
    name = _pick(NAMES, rng)
    animal, verb, food = _pick(_ANIMALS, rng)
    place, spot = _pick(_PLACES, rng)
    colour = _pick(_COLOURS, rng)
    yield f"{name} has a {colour} {animal} in the {place}."
    yield f"{_pick(_TIMES, rng)} the {colour} {animal} {verb} {spot}."
    yield f"It is {_pick(_MOODS, rng)} and likes {food}."


def _text(rng: random.Random, held_out: bool) -> str:
    while True:
        text = " ".join(_sentences(rng))
        if _held_out(text) == held_out:
            return text


def _text_example(text: str) -> Example:
    # A raw text, begun by its first word: what the guard's perplexity reads, in the same form.
    first, rest = text.split(" ", 1)
    prompt = Prompt(id=f"C/{text}", text=first, columns={"family": "C"})
    return Example(prompt, f" {rest}")
