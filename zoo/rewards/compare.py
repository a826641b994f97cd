"""Whether an answer is the gold, kind by kind: exact, and unforgiving where the two say different
things.
"""

import itertools
import re
from fractions import Fraction
from typing import Any

from zoo.rewards.answer import (
    Answer,
    Based,
    Matrix,
    NamedSet,
    Ordered,
    Parsed,
    Ratio,
    Relation,
    Scalar,
    Several,
    Union,
    Words,
    parse_answer,
)
from zoo.rewards.evaluate import (
    NotExact,
    Undefined,
    exact,
    has_symbols,
    real_value,
    same_up_to_factor,
    same_value,
    symbols,
)
from zoo.rewards.expression import Node

INFINITY: Node = ("const", "inf")
_ONE: Node = ("q", Fraction(1))
_FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}
_WORDLESS = re.compile(r"\s+")
_FUNCTION = re.compile(r"[a-zA-Z]'*(?:\^\{-1\})?\([a-z]\)")
_NO_LETTER = re.compile(r"\\[A-Za-z]+|[^A-Za-z]")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
# Decimals of a non-terminating value are accepted from this many significant digits.
ENOUGH_DIGITS = 15


def same_answer(gold: Parsed, answer: Parsed, *, ignore_percent: bool = False) -> bool | None:
    """Whether an answer equals the gold under the contract's rules; None if either was not
    understood.

    Args:
        gold: the reference, read by `parse_answer`.
        answer: what the model gave, read the same way.
        ignore_percent: a trailing percent sign of the answer also counts as none (GSM8K's golds
        drop it).
    Returns:
        True or False where both were understood (or are spelled alike), None otherwise.
    """
    if gold.text == answer.text or (gold.tokens and gold.tokens == answer.tokens):
        return True
    if gold.words and gold.words == answer.words and _are_words(gold, answer):
        return True
    if isinstance(gold.answer, Words):
        return _same_words(gold, answer)
    if gold.answer is None or answer.answer is None:
        if _WORDLESS.sub("", gold.text) == _WORDLESS.sub("", answer.text) and not re.search(
            r"\d\s+\d", answer.text
        ):
            return True
        if _unwrapped(gold.text) == _unwrapped(answer.text):
            return True
        return False if gold.too_complex or answer.too_complex else None
    if _equal(gold.answer, answer.answer, ignore_percent):
        return True
    if isinstance(gold.answer, Several | Ordered | Relation) and "," in answer.text:
        # `100,200` is a number to a single-valued gold and a list to a gold that is one.
        listed = parse_answer(answer.text, commas=False)
        if listed.answer is not None and listed.answer != answer.answer:
            return _equal(gold.answer, listed.answer, ignore_percent)
    return False


def _unwrapped(text: str) -> str:
    """`\\text{May 5}` and `May  5` as the same words."""
    match = _TEXT.fullmatch(text)
    return " ".join((text if match is None else match[1]).split())


def is_several(gold: Answer | None, answer: Answer | None) -> bool:
    """Whether an answer offers more than one value to a gold that has one."""
    single = isinstance(gold, Scalar | Words | Based | Ratio) or (
        isinstance(gold, Relation) and "=" in gold.signs
    )
    if not single:
        return False
    if isinstance(answer, Relation):
        return any(sign != "=" for sign in answer.signs)
    return isinstance(answer, Several | Union) or (
        isinstance(answer, Ordered) and len(answer.items) > 1
    )


def _are_words(gold: Parsed, answer: Parsed) -> bool:
    """Whether letters are words, whose case does not matter: `ab` and `AB` are other variables."""
    if gold.answer is None or answer.answer is None:
        return True
    named = isinstance(gold.answer, Words), isinstance(answer.answer, Words)
    if not any(named):
        return False
    return (
        all(named)
        or len(gold.words) != 2
        or _NO_LETTER.sub("", gold.text) == _NO_LETTER.sub("", answer.text)
    )


def _same_words(gold: Parsed, answer: Parsed) -> bool:
    if len(gold.words) == 1 and answer.words:
        return gold.words.casefold() == answer.words.casefold()
    if _unwrapped(gold.text) == _unwrapped(answer.text):
        return True
    if (
        isinstance(answer.answer, Relation)
        and answer.answer.labels[0]
        and answer.answer.signs == ("=",)
    ):
        last = answer.answer.sides[-1]
        return isinstance(last, Words) and last.key == gold.words != ""
    return False


def _equal(gold: Answer, answer: Answer, loose: bool) -> bool:
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _same_relation(gold, answer, loose)
    if (
        isinstance(gold, Several)
        and len(gold.items) == 1
        and gold.kind == "set"
        and not isinstance(answer, Several)
        and not _names_a_set(gold.items[0])
    ):
        return _equal(gold.items[0], answer, loose)
    if isinstance(answer, Several) and not isinstance(gold, Several):
        if answer.kind == "pm":
            return all(_equal(gold, item, loose) for item in answer.items)
        if len(answer.items) == 1 and answer.kind == "set" and not _names_a_set(answer.items[0]):
            return _equal(gold, answer.items[0], loose)
        if isinstance(gold, Ordered) and _same_assignment(gold, answer, loose):
            return True
    if (
        isinstance(gold, Several)
        and isinstance(answer, Ordered)
        and _same_assignment(answer, gold, loose)
    ):
        return True
    if _is_set(gold) and _is_set(answer):
        return _same_sets(gold, answer)
    if type(gold) is not type(answer):
        return False
    if isinstance(gold, Scalar) and isinstance(answer, Scalar):
        return same_scalar(gold, answer, loose)
    if isinstance(gold, Words) and isinstance(answer, Words):
        return bool(gold.key) and gold.key == answer.key
    if isinstance(gold, Ordered) and isinstance(answer, Ordered):
        return (
            gold.opening == answer.opening
            and gold.closing == answer.closing
            and _all_equal(gold.items, answer.items, loose)
        )
    if isinstance(gold, Several) and isinstance(answer, Several):
        return _same_several(gold, answer, loose)
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        return (
            gold.determinant == answer.determinant
            and len(gold.rows) == len(answer.rows)
            and all(_all_equal(a, b, loose) for a, b in zip(gold.rows, answer.rows, strict=True))
        )
    if isinstance(gold, Ratio) and isinstance(answer, Ratio):
        return _all_equal(gold.items, answer.items, loose) and not units_conflict(
            gold.unit, answer.unit
        )
    return gold == answer


def _names_a_set(answer: Answer) -> bool:
    """What braces are no mere decoration around: the set of the empty set is not empty."""
    return isinstance(answer, NamedSet | Union)


def _all_equal(golds: tuple[Answer, ...], answers: tuple[Answer, ...], loose: bool) -> bool:
    return len(golds) == len(answers) and all(
        _equal(a, b, loose) for a, b in zip(golds, answers, strict=True)
    )


# ---------------------------------------------------------------- one value


def same_scalar(gold: Scalar, answer: Scalar, loose: bool) -> bool:
    """Whether two formulas agree in value, percent signs and units considered.

    A gold with a percent sign also accepts the number without one; an answer's sign is only
    forgiven when `loose`. Both units are ignored unless they are known and different.
    """
    if gold.unit and answer.unit and units_conflict(gold.unit, answer.unit):
        return False
    pairs = [(gold.node, answer.node)]
    if gold.bare is not None and answer.bare is None:
        pairs.append((gold.bare, answer.node))
    if loose and answer.bare is not None and gold.bare is None:
        pairs.append((gold.node, answer.bare))
    if answer.product is not None and has_symbols(gold.node):
        pairs.append((gold.node, answer.product))
    if gold.product is not None:
        pairs.append((gold.product, answer.product or answer.node))
    if any(same_value(one, other) for one, other in pairs):
        return True
    if max(gold.decimals, answer.decimals) >= ENOUGH_DIGITS:
        return any(_rounds_to(gold, one, answer, other) for one, other in pairs)
    return False


def _rounds_to(gold: Scalar, gold_node: Node, answer: Scalar, answer_node: Node) -> bool:
    """Whether one side is the other's decimal expansion, cut or rounded, to enough digits."""
    if gold.decimals and answer.decimals:
        return False
    literal, decimal, value = answer, answer_node, gold_node
    if gold.decimals:
        literal, decimal, value = gold, gold_node, answer_node
    if literal.decimals < ENOUGH_DIGITS or literal.bare is not None or has_symbols(value):
        return False
    try:
        written = exact(decimal)
        try:
            true = exact(value)
            if not _recurs(true):
                return False
        except NotExact:
            true = real_value(value)
            written = real_value(decimal)
    except (NotExact, Undefined, OverflowError, ValueError, TypeError):
        return False
    missing = (abs(true) - abs(written)) * 10**literal.places
    # Cut, or rounded to the nearest.
    return bool(true * written > 0 and (0 <= missing < 1 or 2 * abs(missing) <= 1))


def _recurs(value: Fraction) -> bool:
    rest = value.denominator
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    return rest > 1


_UNITS = {
    "in": "inch", "inches": "inch", "inch": "inch", "ft": "foot", "feet": "foot", "foot": "foot",
    "yd": "yard", "yard": "yard", "yards": "yard", "mi": "mile", "mile": "mile", "miles": "mile",
    "mm": "mm", "millimeters": "mm", "millimeter": "mm", "cm": "cm", "centimeter": "cm",
    "centimeters": "cm", "centimetres": "cm", "m": "m", "meter": "m", "meters": "m", "metre": "m",
    "metres": "m", "km": "km", "kilometer": "km", "kilometers": "km", "kilometres": "km", "g": "g",
    "gram": "g", "grams": "g", "kg": "kg", "kilogram": "kg", "kilograms": "kg", "lb": "pound",
    "lbs": "pound", "pound": "pound", "pounds": "pound", "oz": "ounce", "ounce": "ounce",
    "ounces": "ounce", "second": "s", "seconds": "s", "sec": "s", "minute": "min",
    "minutes": "min", "min": "min", "hour": "h", "hours": "h", "hr": "h", "hrs": "h", "day": "day",
    "days": "day", "week": "week", "weeks": "week", "month": "month", "months": "month",
    "year": "year", "years": "year", "cent": "cent", "cents": "cent", "dollar": "dollar",
    "dollars": "dollar", "degree": "degree", "degrees": "degree", "radian": "radian",
    "radians": "radian", "am": "am", "pm": "pm", "a.m": "am", "p.m": "pm",
}  # fmt: skip


def units_conflict(first: str, second: str) -> bool:
    """Whether both units are known words for different things: 10 cm and 10 m, cm² and cm³, AM and
    PM.
    """
    one, power = _unit_word(first)
    two, other = _unit_word(second)
    if not one or not two:
        return False
    return one != two or (power != other and min(power, other) > 1)


def _unit_word(unit: str) -> tuple[str, int]:
    """The unit a text names and its power; "" for anything but one known word."""
    power = 2 if "square" in unit or "^ 2" in unit or "^ { 2" in unit else 1
    power = 3 if "cubic" in unit or "^ 3" in unit or "^ { 3" in unit else power
    words = [
        word
        for word in re.split(r"[^a-z.]+", unit.lower())
        if word not in ("", "square", "cubic", "sq", "cu")
    ]
    return (_UNITS.get(words[0].rstrip("."), "") if len(words) == 1 else ""), power


# ---------------------------------------------------------------- several values


def _same_several(gold: Several, answer: Several, loose: bool) -> bool:
    ranges = _as_range(gold), _as_range(answer)
    if ranges[0] is not None and ranges[1] is not None:
        return _same_sets(gold, answer)
    golds, gold_names = _named_values(gold)
    answers, answer_names = _named_values(answer)
    if gold_names and answer_names and sorted(gold_names) == sorted(answer_names):
        by_name = dict(zip(answer_names, answers, strict=True))
        return all(
            _equal(value, by_name[name], loose)
            for name, value in zip(gold_names, golds, strict=True)
        )
    if gold_names or any(_is_dots(item) for item in golds):
        return _all_equal(golds, answers, loose)
    # As sets: a value given twice is given, but far more values than the gold's only cost time.
    if len(answers) > 2 * len(golds) + 2:
        return False
    return all(any(_equal(value, other, loose) for other in answers) for value in golds) and all(
        any(_equal(value, other, loose) for value in golds) for other in answers
    )


def _named_values(several: Several) -> tuple[tuple[Answer, ...], tuple[str, ...]]:
    """Values, and their names if every value has its own: `x = 2, y = 3` but not `x = 1, x =
    -2`.
    """
    values: list[Answer] = []
    names: list[str] = []
    for item in several.items:
        if isinstance(item, Relation) and item.signs == ("=",) and item.labels[0]:
            values.append(item.sides[1])
            names.append(item.labels[0])
        else:
            values.append(item)
    distinct = len(names) == len(values) and len(set(names)) == len(names)
    return tuple(values), tuple(names) if distinct else ()


def _is_dots(answer: Answer) -> bool:
    return isinstance(answer, Scalar) and answer.node == ("const", "dots")


def _same_assignment(pair: Ordered, named: Several, loose: bool) -> bool:
    """`p = 5, q = 2` and (5,2) agree, in that order."""
    values, names = _named_values(named)
    return (
        bool(names)
        and pair.opening == "("
        and pair.closing == ")"
        and _all_equal(pair.items, values, loose)
    )


# ---------------------------------------------------------------- relations


def _same_relation(gold: Answer, answer: Answer, loose: bool) -> bool:
    equation, given = _as_equation(gold), _as_equation(answer)
    if equation and given:
        return _same_equation(equation, given, loose)
    if equation:
        # An equation is only answered by a bare value if one side is a mere name.
        # (`\sin x = 1` is no name of 1: it may be the equation that was asked for.)
        label = equation.labels[0]
        named = label != "" and label[:3] != "fn:" and not isinstance(answer, Relation)
        if named and _equal(equation.sides[-1], answer, loose):
            return True
        return _named_list(equation, answer, loose)
    if given:
        value = _value_of(given)
        return value is not None and _equal(gold, value, loose)
    if (
        isinstance(answer, Relation)
        and answer.signs == ("in",)
        and answer.labels[0]
        and isinstance(answer.sides[1], Several)
    ):
        return _equal(gold, answer.sides[1], loose)
    if (
        isinstance(gold, Relation)
        and gold.signs == ("in",)
        and gold.labels[0]
        and isinstance(gold.sides[1], Several)
    ):
        return _equal(gold.sides[1], answer, loose)
    if isinstance(gold, Several) or isinstance(answer, Several):
        return _is_set(gold) and _is_set(answer) and _same_sets(gold, answer)
    if (
        isinstance(gold, Relation)
        and isinstance(answer, Relation)
        and _same_inequality(gold, answer)
    ):
        return True
    return _is_set(gold) and _is_set(answer) and _same_sets(gold, answer)


def _as_equation(answer: Answer) -> Relation | None:
    return answer if isinstance(answer, Relation) and set(answer.signs) == {"="} else None


def _named_list(gold: Relation, answer: Answer, loose: bool) -> bool:
    """`(p,q) = (3,2)` is answered by `p = 3, q = 2`."""
    value = gold.sides[-1]
    if (
        not isinstance(value, Ordered)
        or not isinstance(answer, Several)
        or not gold.labels[0].startswith("(")
    ):
        return False
    values, names = _named_values(answer)
    wanted = gold.labels[0].strip("()").split(",")
    if sorted(names) != sorted(wanted):
        return False
    by_name = dict(zip(names, values, strict=True))
    return _all_equal(value.items, tuple(by_name[name] for name in wanted), loose)


def _value_of(relation: Relation) -> Answer | None:
    """What an equation answers: the last side, if the first is a name or all constant sides
    agree.
    """
    constants = [
        side for side in relation.sides if isinstance(side, Scalar) and not has_symbols(side.node)
    ]
    if any(
        not same_value(first.node, second.node) for first, second in itertools.pairwise(constants)
    ):
        return None
    if relation.labels[0]:
        return relation.sides[-1]
    if len(relation.sides) == 2 and relation.labels[1] and constants:
        return relation.sides[0]
    return relation.sides[-1] if len(constants) == len(relation.sides) else None


def _same_equation(gold: Relation, answer: Relation, loose: bool) -> bool:
    if len(gold.sides) == 2 and len(answer.sides) == 2:
        difference, other = _difference(gold), _difference(answer)
        if difference and other and same_up_to_factor(difference, other):
            return True
    value = _value_of(answer)
    if gold.labels[0] and value is not None and answer.labels[0]:
        if gold.labels[0] == answer.labels[0] or _names_agree(gold.labels[0], answer.labels[0]):
            return _equal(gold.sides[-1], value, loose)
        return False
    if len(gold.sides) != len(answer.sides):
        return False
    return _all_equal(gold.sides, answer.sides, loose)


def _names_agree(first: str, second: str) -> bool:
    """Words name anything, and `y` names a function's value; two different letters do not agree."""
    if first.startswith("text:") or second.startswith("text:"):
        return True
    names = sorted((first, second), key=len)
    primes = [name.count("'") for name in names]
    return (
        names[0].rstrip("'") == "y"
        and primes[0] in (0, primes[1])
        and _FUNCTION.fullmatch(names[1]) is not None
    )


def _difference(relation: Relation) -> Node | None:
    left, right = relation.sides
    if not isinstance(left, Scalar) or not isinstance(right, Scalar):
        return None
    return ("+", left.product or left.node, ("neg", right.product or right.node))


def _same_inequality(gold: Relation, answer: Relation) -> bool:
    if len(gold.sides) != 2 or len(answer.sides) != 2:
        if len(gold.sides) != len(answer.sides):
            return False
        turned = Relation(
            answer.sides[::-1],
            tuple(_FLIP.get(s, s) for s in answer.signs[::-1]),
            answer.labels[::-1],
        )
        return any(
            gold.signs == other.signs and _all_equal(gold.sides, other.sides, False)
            for other in (answer, turned)
        )
    sign, other = gold.signs[0], answer.signs[0]
    if sign not in _FLIP or other not in _FLIP:
        return sign == other and _all_equal(gold.sides, answer.sides, False)
    first, second = _difference(gold), _difference(answer)
    if first is None or second is None:
        return False
    factor = same_up_to_factor(first, second)
    if factor == 0:
        return False
    return sign == (other if factor > 0 else _FLIP[other])


# ---------------------------------------------------------------- sets of numbers

# A range is a list of pieces (low, low is in, high, high is in) and the variable it is about (""
# for none).
Piece = tuple[Node, bool, Node, bool]
Range = tuple[list[Piece], str]

_EVERYTHING: Piece = (("neg", INFINITY), False, INFINITY, False)


def _is_set(answer: Answer) -> bool:
    if isinstance(answer, Union | NamedSet):
        return True
    if isinstance(answer, Ordered):
        return len(answer.items) == 2 and (answer.opening, answer.closing) != ("{", "}")
    if isinstance(answer, Relation):
        return True
    return isinstance(answer, Several) and _as_range(answer) is not None


def _same_sets(gold: Answer, answer: Answer) -> bool:
    if isinstance(gold, Ordered) and isinstance(answer, Ordered):
        # Two plain pairs are compared in order, entry by entry: they may be points.
        return (gold.opening, gold.closing) == (answer.opening, answer.closing) and _all_equal(
            gold.items, answer.items, False
        )
    first, second = _as_range(gold), _as_range(answer)
    if first is None or second is None:
        return gold == answer
    if first[1] and second[1] and first[1] != second[1]:
        return False
    pieces, others = _merged(first[0]), _merged(second[0])
    if pieces is None or others is None:
        pieces, others = first[0], second[0]
    return len(pieces) == len(others) and all(
        one[1] == two[1]
        and one[3] == two[3]
        and same_end(one[0], two[0])
        and same_end(one[2], two[2])
        for one, two in zip(pieces, others, strict=True)
    )


def same_end(first: Node, second: Node) -> bool:
    """Whether two interval ends are equal; infinities by sign."""
    return first == second or same_value(first, second)


def _as_range(answer: Answer) -> Range | None:
    if isinstance(answer, NamedSet):
        if answer.name == "R":
            return [_EVERYTHING], ""
        return ([], "") if answer.name == "empty" else None
    if isinstance(answer, Ordered):
        return _interval(answer)
    if isinstance(answer, Union):
        return _union_range(answer)
    if isinstance(answer, Relation):
        return _relation_range(answer)
    if isinstance(answer, Several):
        if answer.kind in ("or", "and", "list") and all(
            isinstance(item, Relation) and "=" not in item.signs for item in answer.items
        ):
            ranges = [_as_range(item) for item in answer.items]
            return _combined(ranges, answer.kind)
        return None
    return None


def _interval(pair: Ordered) -> Range | None:
    if len(pair.items) != 2 or not all(isinstance(item, Scalar) for item in pair.items):
        return None
    low, high = pair.items
    assert isinstance(low, Scalar) and isinstance(high, Scalar)
    return [(low.node, pair.opening == "[", high.node, pair.closing == "]")], ""


def _union_range(union: Union) -> Range | None:
    pieces: list[Piece] = []
    for part in union.parts:
        inner = _points(part) if isinstance(part, Several) else _as_range(part)
        if inner is None:
            return None
        pieces.extend(inner[0])
    for part in union.removed:
        taken = _points(part)
        if taken is None:
            return None
        for point in taken[0]:
            cut = _without(pieces, point[0])
            if cut is None:
                return None
            pieces = cut
    return pieces, ""


def _points(answer: Answer) -> Range | None:
    if not isinstance(answer, Several) or answer.kind not in ("set", "list", "pm"):
        return None
    if not all(isinstance(item, Scalar) for item in answer.items):
        return None
    return [
        (item.node, True, item.node, True) for item in answer.items if isinstance(item, Scalar)
    ], ""


def _without(pieces: list[Piece], point: Node) -> list[Piece] | None:
    kept: list[Piece] = []
    for low, low_in, high, high_in in pieces:
        try:
            at, start, end = real_value(point), real_value(low), real_value(high)
        except (NotExact, Undefined, TypeError, ValueError):
            return None
        if start < at < end:
            kept.extend([(low, low_in, point, False), (point, False, high, high_in)])
        else:
            inside_low, inside_high = low_in and at != start, high_in and at != end
            kept.append((low, inside_low, high, inside_high))
    return kept


def _combined(ranges: list[Range | None], kind: str) -> Range | None:
    pieces: list[list[Piece]] = []
    names = set()
    for one in ranges:
        if one is None:
            return None
        pieces.append(one[0])
        if one[1]:
            names.add(one[1])
    if len(names) > 1:
        return None
    name = names.pop() if names else ""
    together = [piece for part in pieces for piece in part]
    if kind == "or":
        return together, name
    current = pieces[0]
    for part in pieces[1:]:
        crossed = _crossed(current, part)
        if crossed is None:
            return None
        current = crossed
    if kind == "list" and not current:
        # `x < 1, x > 2` cannot mean both.
        return together, name
    return current, name


def _crossed(first: list[Piece], second: list[Piece]) -> list[Piece] | None:
    out: list[Piece] = []
    for one, two in itertools.product(first, second):
        try:
            lows = [(real_value(piece[0]), not piece[1], piece[0]) for piece in (one, two)]
            highs = [(real_value(piece[2]), piece[3], piece[2]) for piece in (one, two)]
        except (NotExact, Undefined, TypeError, ValueError):
            return None
        low = max(lows, key=lambda end: end[:2])
        high = min(highs, key=lambda end: end[:2])
        if low[0] < high[0] or (low[0] == high[0] and not low[1] and high[1]):
            out.append((low[2], not low[1], high[2], high[1]))
    return out


def _relation_range(relation: Relation) -> Range | None:
    if len(relation.signs) == 1 and relation.signs[0] == "in":
        if not relation.labels[0]:
            return None  # `2x \in [0,1]` is not `x \in [0,1]`
        inner = relation.sides[1]
        named = _points(inner) if isinstance(inner, Several) else _as_range(inner)
        return None if named is None else (named[0], relation.labels[0])
    sides = [side.node if isinstance(side, Scalar) else None for side in relation.sides]
    if any(side is None for side in sides):
        return None
    whole: Range | None = None
    for left, sign, right in zip(sides, relation.signs, sides[1:], strict=False):
        assert left is not None and right is not None
        one = _half_line(left, sign, right)
        if one is None:
            return None
        whole = one if whole is None else _combined([whole, one], "and")
        if whole is None:
            return None
    return whole


def _half_line(left: Node, sign: str, right: Node) -> Range | None:
    """The solutions of one linear inequality in one variable."""
    if sign not in _FLIP or sign == "=":
        return None
    names = symbols(left) | symbols(right)
    if len(names) != 1 or ("const", "inf") in (left, right):
        if len(names) == 1 and (left[0] == "sym" or right[0] == "sym"):
            # `-\infty < x` says nothing.
            return [_EVERYTHING], names.pop()
        return None
    name = names.pop()
    if (right[0] == "sym" or right[:2] == ("fn", "abs")) and not has_symbols(left):
        left, sign, right = right, _FLIP[sign], left
    if left[:2] == ("fn", "abs") and left[2][0] == "sym" and not has_symbols(right):
        around = _around_zero(sign, right)
        return None if around is None else (around, name)
    if left[0] == "sym" and not has_symbols(right):
        bound = right
    else:
        linear = _linear_bound(("+", left, ("neg", right)))
        if linear is None:
            return None
        bound, flipped = linear
        sign = _FLIP[sign] if flipped else sign
    low, high = _EVERYTHING[0], _EVERYTHING[2]
    if sign == "!=":
        return [(low, False, bound, False), (bound, False, high, False)], name
    if sign[0] == "<":
        return [(low, False, bound, sign == "<=")], name
    return [(bound, sign == ">=", high, False)], name


def _around_zero(sign: str, bound: Node) -> list[Piece] | None:
    """The solutions of |x| < b or |x| > b; None unless b is above 0."""
    try:
        positive = real_value(bound) > 0
    except (NotExact, Undefined, TypeError, ValueError):
        return None
    if not positive or sign == "!=":
        return None
    low, high = ("neg", bound), bound
    if sign in ("<", "<="):
        return [(low, sign == "<=", high, sign == "<=")]
    least, _, most, _ = _EVERYTHING
    return [(least, False, low, sign == ">="), (high, sign == ">=", most, False)]


def _linear_bound(node: Node) -> tuple[Node, bool] | None:
    """Root of a·x + b and whether a is negative, if the formula is that."""
    try:
        at = [exact(_substituted(node, ("q", Fraction(value)))) for value in (0, 1, 2, 5)]
    except (NotExact, Undefined):
        return None
    slope = at[1] - at[0]
    if not slope or at[2] - at[0] != 2 * slope or at[3] - at[0] != 5 * slope:
        return None
    return ("q", -at[0] / slope), slope < 0


def _substituted(node: Node, value: Node) -> Node:
    if node[0] == "sym":
        return value
    return tuple(_substituted(part, value) if isinstance(part, tuple) else part for part in node)


def _merged(pieces: list[Piece]) -> list[Piece] | None:
    """Pieces in order, overlapping and touching ones joined; None when an end has variables."""
    try:
        keyed: list[tuple[Any, Any, Piece]] = [
            (real_value(p[0]), real_value(p[2]), p) for p in pieces
        ]
    except (NotExact, Undefined, TypeError, ValueError, OverflowError):
        return None
    keyed.sort(key=lambda entry: (entry[0], not entry[2][1], entry[1]))
    out: list[tuple[Any, Any, Piece]] = []
    for low, high, piece in keyed:
        if out:
            before_low, before_high, before = out[-1]
            touches = low == before_high and (piece[1] or before[3])
            if low < before_high or touches:
                if high > before_high or (high == before_high and piece[3]):
                    out[-1] = (before_low, high, (before[0], before[1], piece[2], piece[3]))
                continue
        out.append((low, high, piece))
    return [piece for _, _, piece in out]
