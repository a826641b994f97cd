"""What kind of thing an answer is: a number, words, a list, a pair, an interval, a matrix, a
relation.
"""

import re
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from zoo.rewards.expression import (
    Node,
    ParseError,
    Token,
    TooComplex,
    number,
    parse_formula,
    tokenize,
)
from zoo.rewards.normalize import clean, join_thousands, word_key

MAX_CHARACTERS = 1500
MAX_ITEMS = 100


@dataclass(frozen=True, slots=True)
class Scalar:
    """One formula. `bare` is the value without its percent sign, `unit` the words behind it.

    `decimals` counts the significant digits of a decimal literal with a fractional part (0
    otherwise), and `product` is set where a letter after a space may be a unit or a factor: `node`
    is then the number alone.
    """

    node: Node
    bare: Node | None = None
    unit: str = ""
    decimals: int = 0
    places: int = 0
    product: Node | None = None


@dataclass(frozen=True, slots=True)
class Words:
    """An answer in words; `key` is its spelling without case and decoration."""

    key: str


@dataclass(frozen=True, slots=True)
class Several:
    """Values in any order; `kind` is "list", "set", "or", "and" (the words) or "pm" (both
    signs).
    """

    items: tuple["Answer", ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Ordered:
    """Values in order between two brackets: a point, a vector, or an interval."""

    opening: str
    items: tuple["Answer", ...]
    closing: str


@dataclass(frozen=True, slots=True)
class Union:
    """A union of sets, and what is taken out of it."""

    parts: tuple["Answer", ...]
    removed: tuple["Answer", ...] = ()


@dataclass(frozen=True, slots=True)
class Relation:
    """Sides joined by "=", "<", "<=", ">", ">=", "!=", "in", …; `labels[k]` names side k if it is
    only a name.
    """

    sides: tuple["Answer", ...]
    signs: tuple[str, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of entries; a determinant (`vmatrix`) is a matrix of another kind."""

    rows: tuple[tuple["Answer", ...], ...]
    determinant: bool = False


@dataclass(frozen=True, slots=True)
class Ratio:
    """Two or more quantities joined by colons, a time of day included."""

    items: tuple["Answer", ...]
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Based:
    """Digits in a named base."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class NamedSet:
    """ℝ, ℤ, …, or ∅ ("empty")."""

    name: str


Answer = Scalar | Words | Several | Ordered | Union | Relation | Matrix | Ratio | Based | NamedSet


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer's readings: its structure (None if it has none we know), tokens and words."""

    text: str
    answer: Answer | None
    tokens: tuple[Token, ...] = field(default=())
    words: str = ""
    too_complex: bool = False


_BASED = re.compile(
    r"[({]?(-?)([0-9A-Z]{1,60}|\d[0-9A-Za-z]{0,60})[)}]?_\{{0,2}\(?(\d{1,2})\)?\}{0,2}"
)
_LAYOUT = re.compile(
    r"\s+|\\(?:displaystyle|textstyle|left|right|math(?:bf|rm|it|tt)|text(?:bf|rm|it|tt)?)(?![a-z])"
)
_LETTERS_AND_DIGITS = re.compile(r"[A-Z]*\d[0-9A-Z]*")
_OPEN = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
_CLOSE = frozenset((")", "]", "}", "\\}"))
_MATRICES = {
    "matrix",
    "pmatrix",
    "bmatrix",
    "Bmatrix",
    "array",
    "smallmatrix",
    "vmatrix",
    "Vmatrix",
}
_SCALES = {
    "ten": 10, "hundred": 100, "thousand": 1000, "lakh": 10**5, "crore": 10**7, "million": 10**6,
    "billion": 10**9, "trillion": 10**12, "dozen": 12, "percent": Fraction(1, 100),
    "per cent": Fraction(1, 100),
}  # fmt: skip
_SCALES_PATTERN = re.compile(rf"({'|'.join(_SCALES)})s?\b\s*(.*)", re.DOTALL)
_PREAMBLE = re.compile(
    r"(?:so |thus |therefore |hence )?(?:the )?(?:final |correct )?(?:answer|result)(?: is)?\s*:?",
    re.IGNORECASE,
)
# A number among a unit's words that is no power: `cm^2`, `m2`, but not `hours 30 minutes`.
_LOOSE_DIGIT = re.compile(r"(?:^|[\s(,;])\d")
_LEADING_UNIT = frozenset(("usd", "us", "eur", "gbp", "rs", "rs.", "cny", "rmb"))


@lru_cache(maxsize=16384)
def parse_answer(text: str, commas: bool = True) -> Parsed:
    """The structure of an answer, cached by its text.

    Args:
        text: the answer as extracted.
        commas: whether `1,234` outside brackets is one number.
    Returns:
        the readings; `answer` is None for what is not a formula of the grammar, and never raises.
    """
    if len(text) > MAX_CHARACTERS:
        return Parsed(text, None, too_complex=True)
    cleaned = clean(text)
    if cleaned.startswith(("\\boxed", "\\fbox")) or "\\boxed{" in cleaned:
        cleaned = _unboxed(cleaned)
    words = word_key(cleaned)
    if len(cleaned) > 2 * MAX_CHARACTERS:
        return Parsed(cleaned, None, too_complex=True)
    based = _BASED.fullmatch(_plain(cleaned)) if "_" in cleaned else None
    if based is not None and _LETTERS_AND_DIGITS.fullmatch(based[2]):
        return Parsed(
            cleaned, Based(based[1] + (based[2].lstrip("0") or "0"), int(based[3])), words=""
        )
    try:
        tokens = tokenize(join_thousands(cleaned, commas=commas))
        return Parsed(cleaned, _parse(tokens), tuple(tokens), words)
    except TooComplex:
        return Parsed(cleaned, None, (), words, too_complex=True)
    except ParseError:
        answer = Words(words) if words else None
        return Parsed(cleaned, answer, (), words)
    except RecursionError:
        # Deep input met a caller that is deep already; the depth cap bounds what we add.
        return Parsed(cleaned, None, (), words, too_complex=True)


def _unboxed(text: str) -> str:
    return _without_braces(re.sub(r"\\(?:boxed|fbox)\s*\{", "{", text))


def _plain(text: str) -> str:
    """The text without layout, for numbers in a named base."""
    return _without_braces(_LAYOUT.sub("", text))


def _without_braces(text: str) -> str:
    while text.startswith("{") and text.endswith("}") and _wraps(text):
        text = text[1:-1].strip()
    return text


def _wraps(text: str) -> bool:
    depth = 0
    for at, mark in enumerate(text):
        depth += (mark == "{") - (mark == "}")
        if depth == 0:
            return at == len(text) - 1
    return False


def _parse(tokens: list[Token]) -> Answer:
    tokens = _trimmed(tokens)
    if not tokens:
        raise ParseError("nothing to read")
    groups = _split(tokens, lambda token: token == ("op", ";"))
    if len(groups) > 1:
        return Several(_expanded([_group(group) for group in groups if group]), "list")
    return _list(tokens)


def _group(tokens: list[Token]) -> Answer:
    """One of several groups between semicolons: `p=5,q=2` in `p=5,q=2;p=7,q=2` is the pair
    (5,2).
    """
    answer = _list(tokens)
    if isinstance(answer, Several) and answer.kind == "list":
        values = tuple(
            item.sides[-1] if isinstance(item, Relation) and item.signs == ("=",) else item
            for item in answer.items
        )
        return Ordered("(", values, ")")
    return answer


def _list(tokens: list[Token]) -> Answer:
    kind = "list"
    items: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += _depth_change(token)
        if depth == 0 and (token == ("op", ",") or token[0] == "sep"):
            if token[0] == "sep":
                if kind == "list" or kind == token[1]:
                    kind = token[1]
                else:
                    raise ParseError("both 'and' and 'or'")
            if items[-1] or token[0] != "sep":
                items.append([])
        else:
            items[-1].append(token)
    if not items[-1]:
        items.pop()
    if not items or any(not item for item in items):
        raise ParseError("an empty place in a list")
    if len(items) > MAX_ITEMS:
        raise TooComplex(f"more than {MAX_ITEMS} values")
    if len(items) == 1:
        return _item(items[0])
    grouped = _alternatives(tokens) if kind == "or" and len(items) > 2 else None
    return grouped or _several([_item(item) for item in items], kind)


def _several(items: list[Answer], kind: str) -> Answer:
    first, last = items[0], items[-1]
    if isinstance(last, Relation) and last.signs == ("in",) and isinstance(last.sides[1], NamedSet):
        # `x = 2k, k \\in \\mathbb{Z}`: the range of a parameter is no second value.
        parameter = last.sides[1].name in ("Z", "N") and not any(
            isinstance(item, Relation) and (item.signs == ("in",) or last.labels[0] in item.labels)
            for item in items[:-1]
        )
        if parameter:
            items = items[:-1]
            if len(items) == 1:
                return items[0]
    if isinstance(first, Relation) and first.signs == ("!=",):
        # `x \\ne 2, 3` excludes both, and so does `x \\ne 2 \\text{ or } 3`.
        if any(isinstance(item, Scalar) for item in items):
            kind = "and"
        items = [
            Relation((first.sides[0], item), first.signs, (first.labels[0], ""))
            if isinstance(item, Scalar)
            else item
            for item in items
        ]
        kind = "and" if kind == "list" else kind
    return Several(_expanded(items), kind)


def _alternatives(tokens: list[Token]) -> Answer | None:
    """`x = 1, y = 2 or x = 3, y = 4`: alternatives that each name several values."""
    groups = [
        _list(group) for group in _split(tokens, lambda token: token == ("sep", "or")) if group
    ]
    pairs: list[Answer] = []
    for group in groups:
        if not isinstance(group, Several) or len(group.items) < 2:
            return None
        values = [
            item.sides[1] if isinstance(item, Relation) and item.signs == ("=",) else None
            for item in group.items
        ]
        if any(value is None for value in values):
            return None
        pairs.append(Ordered("(", tuple(value for value in values if value is not None), ")"))
    return Several(tuple(pairs), "list") if len(pairs) > 1 else None


def _expanded(items: list[Answer]) -> tuple[Answer, ...]:
    out: list[Answer] = []
    for item in items:
        if isinstance(item, Several) and item.kind == "pm":
            out.extend(item.items)
        elif (
            isinstance(item, Relation)
            and isinstance(item.sides[-1], Several)
            and item.sides[-1].kind == "pm"
        ):
            for value in item.sides[-1].items:
                out.append(Relation((*item.sides[:-1], value), item.signs, item.labels))
        else:
            out.append(item)
    return tuple(out)


def _item(tokens: list[Token]) -> Answer:
    tokens = _trimmed(tokens)
    if not tokens:
        raise ParseError("nothing to read")
    if all(kind == "text" for kind, _ in tokens):
        key = word_key(" ".join(value for _, value in tokens))
        return NamedSet("R") if key in ("all real numbers", "all reals") else Words(key)
    relation = _relation(tokens)
    return relation if relation is not None else _side(tokens)


def _relation(tokens: list[Token]) -> Answer | None:
    sides: list[list[Token]] = [[]]
    signs: list[str] = []
    depth = 0
    for token in tokens:
        depth += _depth_change(token)
        sign = token[1] if token[0] == "rel" or (token[0] == "op" and token[1] in "=<>") else ""
        if depth == 0 and sign and sign != ":":
            if sign == "~" and not signs and not sides[-1]:
                continue
            signs.append(sign)
            sides.append([])
        else:
            sides[-1].append(token)
    if not signs:
        return _side(sides[0]) if len(sides[0]) != len(tokens) else None
    at = signs.index("~") if "~" in signs else -1
    if at >= 0 and not any(kind == "sym" for kind, _ in sides[at + 1]):
        # What follows an "about" is a rounding of what stands before it.
        if not _may_round(sides[at], sides[at + 1]):
            raise ParseError("an approximation of something else")
        if at == 0 and _label(sides[0]):
            # `x \approx 3.4` answers 3.4, not x.
            signs[0] = "="
            at = 1
        sides, signs = sides[: at + 1], signs[:at]
        if not signs:
            return _side(sides[0])
    if any(not side for side in sides):
        raise ParseError("a relation with an empty side")
    if len(sides) > 12:
        raise TooComplex("a chain of relations")
    labels = tuple(_label(side) for side in sides)
    parsed = tuple(_named_side(side, label) for side, label in zip(sides, labels, strict=True))
    last = parsed[-1]
    if isinstance(last, Several) and last.kind == "pm" and signs == ["="]:
        return Several(
            tuple(Relation((parsed[0], value), ("=",), labels) for value in last.items), "pm"
        )
    return Relation(parsed, tuple(signs), labels)


def _may_round(value: list[Token], rounded: list[Token]) -> bool:
    """Whether a whole number is not "about" another one: `42 \\approx 43` offers two values."""
    if not all(len(side) == 1 and side[0][0] == "num" for side in (value, rounded)):
        return True
    whole, _, decimals = rounded[0][1].partition(".")
    places = len(decimals) or len(whole.rstrip("0")) - len(whole)
    return abs(number(value[0][1]) - number(rounded[0][1])) < Fraction(10) ** -places


def _named_side(tokens: list[Token], label: str) -> Answer:
    if label.startswith("text:"):
        return Words(label)
    try:
        return _side(tokens)
    except TooComplex:
        raise
    except ParseError:
        # A name need not be a formula: `\\angle A`, `V_1:V_2`.
        if not label:
            raise
        return Words(label)


def _label(tokens: list[Token]) -> str:
    """The name a side consists of ("x", "f(x)", "a_3", "AB", "∠A", "(p,q)", words), or ""."""
    if all(kind == "text" for kind, _ in tokens):
        return "text:" + " ".join(value for _, value in tokens)
    if tokens[0][0] == "text" and any(kind == "op" and value in "()" for kind, value in tokens):
        return "text:" + "".join(value for _, value in tokens)
    if tokens[0][0] == "text" and all(kind in ("sym", "const") for kind, _ in tokens[1:]):
        # `\text{Area of } ABC`
        return "text:" + " ".join(value for _, value in tokens)
    if tokens[0] == ("op", "{") and len(tokens) > 2 and _match(tokens, 0) == len(tokens) - 1:
        # `\mathbf{v}`: the command is gone, its braces are not.
        return _label(tokens[1:-1])
    spelled = "".join(value for _, value in tokens)
    if tokens[0][0] != "cmd" and any(token == ("op", "angle") for token in tokens):
        return (
            spelled
            if all(kind in ("sym", "const") or value == "angle" for kind, value in tokens)
            else ""
        )
    first = tokens[0]
    if first[0] in ("sym", "const") and tokens[-1] == ("op", ")"):
        # A function's value, `f(3)` or `P(X = 2)`; `a(b+c)` with a product inside is also only a
        # name here.
        rest = _after_name(tokens, 1)
        if tokens[rest : rest + 5] == _INVERSE:
            rest += 5
        simple = all(
            kind in ("sym", "const", "num", "rel") or value in ",_{}=<>"
            for kind, value in tokens[rest + 1 : -1]
        )
        return spelled if rest < len(tokens) - 2 and tokens[rest] == ("op", "(") and simple else ""
    if any(
        kind == "num" and (at == 0 or tokens[at - 1][1] not in "_{")
        for at, (kind, _) in enumerate(tokens)
    ):
        return ""
    if first[0] == "cmd" and first[1] in _NAMING and len(tokens) > 1:
        # `\cos A`, `\gcd(a, b)`: a quantity by its usual name.
        plain = all(k in ("sym", "const") or v in ("(", ")", ",", "angle") for k, v in tokens[1:])
        return "fn:" + spelled if plain else ""
    if _DERIVATIVE.fullmatch(spelled):
        return spelled
    if first == ("op", "[") and tokens[-1] == ("op", "]") and len(tokens) > 4:
        # The area of a polygon, `[ABC]`.
        letters = [value for kind, value in tokens[1:-1] if kind == "sym"]
        area = len(letters) == len(tokens) - 2 and "".join(letters[-3:]).isupper()
        return spelled if area else ""
    if first == ("cmd", "overline"):
        return spelled
    if first[0] in ("sym", "const") and first[1] not in ("pi",):
        rest = _after_name(tokens, 1)
        if rest >= len(tokens):
            return spelled
        tail = tokens[rest:]
        if tail[0] == ("op", ":") or tail[0] == ("rel", ":"):
            return spelled
        if all(kind in ("sym", "const") or value == ":" for kind, value in tail) and ":" in spelled:
            return spelled
        letters = tokens[1:] if first[1] == "\\triangle" else tokens
        if len(letters) <= 4 and all(
            kind in ("sym", "const") and value.isupper() for kind, value in letters
        ):
            return spelled
        return ""
    if first == ("op", "|") and tokens[-1] == ("op", "|"):
        # A length, `|AB|`; `|x|` is a formula.
        letters = [value for kind, value in tokens[1:-1] if kind == "sym"]
        return spelled if len(letters) == len(tokens) - 2 > 1 and spelled[1:-1].isupper() else ""
    names = all(kind in ("sym", "const", "num") or value in ",_{}" for kind, value in tokens[1:-1])
    return spelled if first == ("op", "(") and tokens[-1] == ("op", ")") and names else ""


_NAMING = frozenset(("sin", "cos", "tan", "cot", "sec", "csc", "gcd", "lcm", "max", "min", "det"))
_DERIVATIVE = re.compile(r"frac\{d\w?\}\{d\w\}")
_INVERSE = [("op", "^"), ("op", "{"), ("op", "-"), ("num", "1"), ("op", "}")]


def _after_name(tokens: list[Token], at: int) -> int:
    while at < len(tokens) and tokens[at] == ("op", "'"):
        at += 1
    if at < len(tokens) and tokens[at] == ("op", "_"):
        at += 1
        if at < len(tokens) and tokens[at] == ("op", "{"):
            end = _match(tokens, at)
            at = len(tokens) if end is None else end + 1
        else:
            at += 1
    return at


def _side(tokens: list[Token]) -> Answer:
    tokens = _trimmed(tokens)
    if not tokens:
        raise ParseError("nothing to read")
    if tokens[0][0] == "set" and tokens[1:3] == [("op", "-"), ("op", "\\{")]:
        # `\mathbb{R} - \{0\}`
        tokens = [tokens[0], ("op", "setminus"), *tokens[2:]]
    for value, build in (("cup", _union), ("setminus", _difference)):
        parts = _split(tokens, lambda token, value=value: token == ("op", value))
        if len(parts) > 1:
            return build(parts)
    colons = _split(tokens, lambda token: token[1] == ":" or token == ("text", "to"))
    if len(colons) > 1:
        return _ratio(colons)
    if len(tokens) == 1 and tokens[0][0] == "set":
        return NamedSet(tokens[0][1])
    if tokens == [("op", "empty")] or tokens == [("op", "\\{"), ("op", "\\}")]:
        return NamedSet("empty")
    if any(kind == "env" for kind, _ in tokens):
        return _matrix(tokens)
    if tokens[0][0] == "op" and tokens[0][1] in _OPEN and _match(tokens, 0) == len(tokens) - 1:
        bracketed = _bracketed(tokens)
        if bracketed is not None:
            return bracketed
    return _scalar(tokens)


def _union(parts: list[list[Token]]) -> Answer:
    if len(parts) > MAX_ITEMS:
        raise TooComplex("a long union")
    sides = tuple(_side(part) for part in parts)
    if all(isinstance(side, Several) and side.kind == "set" for side in sides):
        # `\{1,2\} \cup \{3\}` is a set of three.
        items = [item for side in sides if isinstance(side, Several) for item in side.items]
        return Several(tuple(items), "set")
    return Union(sides)


def _difference(parts: list[list[Token]]) -> Answer:
    return Union((_side(parts[0]),), tuple(_side(part) for part in parts[1:]))


def _ratio(parts: list[list[Token]]) -> Answer:
    if any(not part for part in parts):
        raise ParseError("a ratio with an empty side")
    items = [_side(part) for part in parts]
    unit = items[-1].unit if isinstance(items[-1], Scalar) else ""
    return Ratio(tuple(items), unit)


def _bracketed(tokens: list[Token]) -> Answer | None:
    opening, closing = tokens[0][1], tokens[-1][1]
    inside = tokens[1:-1]
    if opening == "{" and any(kind == "sep" for kind, _ in inside):
        return _list(inside)
    semicolons = _split(inside, lambda token: token == ("op", ";"))
    parts = (
        semicolons if len(semicolons) > 1 else _split(inside, lambda token: token == ("op", ","))
    )
    if opening == "\\{" and closing == "\\}":
        builder = _set_builder(inside)
        if builder is not None:
            return builder
    if len(parts) == 1:
        if opening == "\\{" and closing == "\\}":
            return Several(_expanded([_item(inside)]), "set")
        if opening == "{" and closing == "}":
            return _item(inside)
        if opening == "(" and closing == ")":
            try:
                inner = _item(inside)
            except ParseError:
                return None
            return inner
        return None
    if len(parts) > MAX_ITEMS:
        raise TooComplex("a long tuple")
    if any(not part for part in parts):
        raise ParseError("an empty place between brackets")
    if (opening in ("\\{", "{")) != (closing in ("\\}", "}")):
        raise ParseError("brackets that do not match")
    items = [_item(part) for part in parts]
    if opening in ("\\{", "{"):
        return Several(_expanded(items), "set")
    return Ordered(opening, tuple(items), closing)


def _set_builder(inside: list[Token]) -> Answer | None:
    """`\\{x : x > 3\\}` is what stands behind the bar or colon."""
    for at, token in enumerate(inside[:12]):
        if token in (("op", "|"), ("op", ":"), ("rel", "mid"), ("rel", ":")):
            head = inside[:at]
            real = len(head) == 1 or head[1:] == [("rel", "in"), ("set", "R")]
            names = head[:1] and head[0][0] == "sym" and real
            return _parse(inside[at + 1 :]) if names and inside[at + 1 :] else None
    return None


def _matrix(tokens: list[Token]) -> Answer:
    start = next(at for at, token in enumerate(tokens) if token[0] == "env")
    name = tokens[start][1].partition("{")[2].rstrip("}*")
    end = _match(tokens, start)
    if end is not None and (name == "cases" or tokens[:start] == [("op", "\\{")]):
        return _system(tokens[start + 1 : end], tokens[end + 1 :])
    if end is None or name not in _MATRICES or not tokens[start][1].startswith("begin"):
        raise ParseError(f"an environment {name!r} that is not a matrix")
    before, after = tokens[:start], tokens[end + 1 :]
    while before and after and before[-1][0] == "op" and _OPEN.get(before[-1][1]) == after[0][1]:
        before, after = before[:-1], after[1:]
    bars = name in ("vmatrix", "Vmatrix")
    if before and after and before[-1] == ("op", "|") and after[0] == ("op", "|"):
        before, after, bars = before[:-1], after[1:], True
    if after:
        raise ParseError("something after a matrix")
    inside = tokens[start + 1 : end]
    if name == "array" and inside and inside[0] == ("op", "{"):
        close = _match(inside, 0)
        inside = inside[(close or 0) + 1 :]
    rows = []
    for line in _split(inside, lambda token: token == ("op", "\\\\")):
        if line:
            cells = _split(line, lambda token: token == ("op", "&"))
            rows.append(tuple(_item(cell) for cell in cells))
    if (
        not rows
        or len(rows) * max(len(row) for row in rows) > MAX_ITEMS
        or len({len(row) for row in rows}) > 1
    ):
        raise TooComplex("a matrix that is ragged or too large")
    if before:
        factor = (
            ("neg", ("q", Fraction(1)))
            if before == [("op", "-")]
            else parse_formula([t for t in before if t != ("op", "*")])
        )
        rows = [tuple(_scaled(cell, factor) for cell in row) for row in rows]
    return Matrix(tuple(rows), bars)


def _system(inside: list[Token], after: list[Token]) -> Answer:
    """Equations below each other behind a brace: `x = 1` and `y = 2`."""
    if inside and inside[0] == ("op", "{"):
        inside = inside[(_match(inside, 0) or 0) + 1 :]
    lines = [line for line in _split(inside, lambda token: token == ("op", "\\\\")) if line]
    if after or not lines or any(token == ("op", "&") for token in inside):
        raise ParseError("a system that is not a list of relations")
    if len(lines) > MAX_ITEMS:
        raise TooComplex("a long system")
    items = [_item(_trimmed(line)) for line in lines]
    return items[0] if len(items) == 1 else Several(_expanded(items), "and")


def _scaled(cell: Answer, factor: Node) -> Answer:
    if not isinstance(cell, Scalar):
        raise ParseError("a matrix entry that is not a number")
    return Scalar(("*", factor, cell.node))


def _scalar(tokens: list[Token]) -> Answer:
    tokens, unit, product = _without_unit(tokens)
    scale: Fraction | int = 1
    percent = False
    while True:
        match = _SCALES_PATTERN.match(unit.lower())
        if match is None:
            break
        scale *= _SCALES[match[1]]
        percent = percent or match[1].startswith("per")
        unit = match[2]
    tail = tokens
    if tail[-1] == ("op", "%"):
        percent, tail, scale = True, tail[:-1], scale * Fraction(1, 100)
    if not tail:
        raise ParseError("a percent sign alone")
    bare = parse_formula(tail)
    decimals = places = 0
    literal = tail[1:] if tail[0][1] in ("-", "+") else tail
    if (
        len(literal) == 1
        and literal[0][0] == "num"
        and "." in literal[0][1]
        and "e" not in literal[0][1].lower()
    ):
        decimals = len(literal[0][1].replace(".", "").lstrip("0"))
        places = len(literal[0][1].partition(".")[2])
    node = bare if scale == 1 else ("*", bare, ("q", Fraction(scale)))
    both = _both_signs(node)
    if both is not None:
        bares = _both_signs(bare) or both
        return Several(
            tuple(
                Scalar(value, plain if percent else None, unit)
                for value, plain in zip(both, bares, strict=True)
            ),
            "pm",
        )
    other = parse_formula(product) if product is not None else None
    return Scalar(node, bare if percent else None, unit, decimals, places, other)


def _without_unit(tokens: list[Token]) -> tuple[list[Token], str, list[Token] | None]:
    """The tokens before a trailing unit, the unit's words, and the reading in which the unit is a
    factor.
    """
    start = 0
    while start < len(tokens) and tokens[start][0] == "text":
        words = tokens[start][1].lower()
        if words.rstrip(":. ") not in _LEADING_UNIT and not _PREAMBLE.fullmatch(words.strip()):
            raise ParseError("words before the formula")
        start += 1
    tokens = tokens[start:]
    depth = 0
    for at, token in enumerate(tokens):
        depth += _depth_change(token)
        if depth == 1 and at and _is_remark(tokens[at:]):
            return tokens[:at], "", None
        if depth or not at:
            continue
        after = tokens[at + 1] if at + 1 < len(tokens) else ("end", "")
        loose = token[0] == "gap" and after[0] == "sym"
        if token[0] == "text" or loose or (token == ("op", "/") and after[0] == "text"):
            tail = tokens[at:]
            if not _is_unit(tail):
                if loose and not _has_text(tail):
                    return [item for item in tokens if item[0] != "gap"], "", None
                raise ParseError("words inside the formula")
            unit = " ".join(value for kind, value in tail if kind != "gap")
            product = (
                [item for item in tokens if item[0] != "gap"]
                if loose and not _has_text(tail)
                else None
            )
            return tokens[:at], unit, product
    if not tokens:
        raise ParseError("words without a formula")
    return tokens, "", None


def _is_remark(tokens: list[Token]) -> bool:
    """Words in brackets at the end: `42 (forty-two)`."""
    if len(tokens) < 3 or tokens[0] != ("op", "(") or tokens[-1] != ("op", ")"):
        return False
    inside = tokens[1:-1]
    # The "six" of "thirty-six" is too short to be a word by itself.
    letters = ("text", "sym", "const") if inside[1:2] == [("op", "-")] else ("text",)
    return inside[0][0] == "text" and all(
        value == "-" or (kind in letters and not _changes(value)) for kind, value in inside
    )


def _changes(words: str) -> bool:
    """Whether words behind a number are more than a unit: `or`, `thirds`, a second number."""
    found = re.findall(r"[a-z]+", words.lower())
    return not _CHANGING.isdisjoint(found) or _LOOSE_DIGIT.search(words) is not None


def _has_text(tokens: list[Token]) -> bool:
    return any(kind == "text" for kind, _ in tokens)


# Words that change what stands before them: they are no unit.
_CHANGING = frozenset((
    "or", "than", "if", "when", "unless", "not", "except", "minus", "plus", "times", "over",
    "divided", "squared", "cubed", "half", "halves", "third", "thirds", "quarter", "quarters",
    "fourths", "fifth", "fifths", "sixths", "sevenths", "eighths", "ninths", "tenth", "tenths",
    "elevenths", "twelfths", "fifteenths", "sixteenths", "twentieths", "hundredth", "hundredths",
    "thousandth", "thousandths", "millionth", "millionths", "permille", "doubled", "tripled",
    "multiplied", "increased", "decreased", "point", "power", "below", "factorial", "negative",
    "wrong", "incorrect",
))  # fmt: skip
# A second number, unless it repeats the first: `5 feet and six inches`, but `20 (twenty)`.
_NUMBER_WORDS = frozenset((
    "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "fifteen", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
))  # fmt: skip


def _is_unit(tokens: list[Token]) -> bool:
    words = [value for kind, value in tokens if kind == "text"]
    if any(
        _changes(value) or not _NUMBER_WORDS.isdisjoint(value.lower().split()) for value in words
    ):
        return False
    for at, (kind, value) in enumerate(tokens):
        if kind in ("text", "gap", "sym"):
            continue
        if kind == "num":
            before = [token for token in tokens[:at] if token not in (("op", "{"), ("op", "-"))]
            if not before or before[-1] != ("op", "^"):
                return False
        elif kind != "op" or value not in ("^", "/", "{", "}", "(", ")", "*", ".", "-", "'"):
            return False
    return True


def _both_signs(node: Node) -> tuple[Node, Node] | None:
    if not _has_pm(node):
        return None
    return _signed(node, 1), _signed(node, -1)


def _has_pm(node: Node) -> bool:
    return node[0] == "pm" or any(_has_pm(part) for part in node[1:] if isinstance(part, tuple))


def _signed(node: Node, sign: int) -> Node:
    if node[0] == "pm":
        inner = _signed(node[2], sign)
        return inner if node[1] * sign > 0 else ("neg", inner)
    return tuple(_signed(part, sign) if isinstance(part, tuple) else part for part in node)


def _trimmed(tokens: list[Token]) -> list[Token]:
    start, end = 0, len(tokens)
    while start < end and tokens[start] in (
        ("op", "="),
        ("rel", "="),
        ("rel", "~"),
        ("op", ":"),
        ("op", "."),
        ("op", "\\\\"),
    ):
        start += 1
    while end > start and tokens[end - 1] in (
        ("op", "."),
        ("op", ","),
        ("op", ";"),
        ("op", "\\\\"),
        ("op", ":"),
    ):
        end -= 1
    return tokens[start:end]


def _depth_change(token: Token) -> int:
    kind, value = token
    if kind == "op":
        return 1 if value in _OPEN else -1 if value in _CLOSE else 0
    if kind == "env":
        return 1 if value.startswith("begin") else -1
    return 0


def _match(tokens: list[Token], start: int) -> int | None:
    depth = 0
    for at in range(start, len(tokens)):
        depth += _depth_change(tokens[at])
        if depth == 0:
            return at
    return None


def _split(tokens: list[Token], is_separator) -> list[list[Token]]:
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += _depth_change(token)
        if depth == 0 and is_separator(token):
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


__all__ = ["MAX_CHARACTERS", "Answer", "Parsed", "number", "parse_answer"]
