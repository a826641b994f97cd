"""Assertions taken apart: the calls for the untrusted process, the comparison for this one.

`assert abs(f(2.5) - 0.5) < 1e-6` becomes the call `f(2.5)` and the template `abs(_0 - 0.5) < 1e-6`.
Only the call is sent; the template, and with it the expected value, is evaluated here by a small
interpreter over plain data, with real built-ins whatever the code has patched.
"""

import ast
import copy
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zoo.rewards._plain import Stopwatch

MAX_LENGTH = 1_000_000  # of what a template may build
MAX_BITS = 1 << 16  # of an integer in a product or power
MAX_TURNS = 1000  # of all loops of a test together


class CannotSplit(ValueError):
    """The test needs more than the interpreter here knows; it must run beside the code."""


class Rejected(Exception):
    """The template failed on the values, as the assertion itself would have."""


@dataclass(frozen=True)
class Check:
    """One assertion: what the sandbox evaluates, and what is asked of the values.

    Attributes:
        calls: expressions to evaluate beside the code, in order; their values are `_0`, `_1`, …
        iterated: for each call, whether only its items matter, as in `list(f(3)) == [0, 1, 2]`: it
            may then give a generator or another iterable that is no plain data.
        template: an expression over those names; true where the assertion holds.
        cheatable: the code's process decides the verdict, or makes the value it is compared with.
    """

    calls: tuple[str, ...]
    template: ast.expr
    cheatable: bool = False
    iterated: tuple[bool, ...] = ()

    def holds(self, values: list[Any]) -> bool:
        """Whether the assertion holds on decoded values of the calls.

        Raises:
            Rejected: an operation failed (1 < "a"), as it would in the assertion.
        """
        names = {f"_{i}": v for i, v in enumerate(values)}
        return bool(evaluate(self.template, names))


def split_assert(test: ast.expr) -> Check:
    """Take one asserted expression apart."""
    lifter = _Lifter()
    template = lifter.visit(copy.deepcopy(test))
    if not lifter.calls and (shadowed := _called_first(test)):
        # Nothing of the code would be called: the function under test has a built-in's name.
        lifter = _Lifter(shadowed)
        template = lifter.visit(copy.deepcopy(test))
    if lifter.opaque:
        whole = f"bool({ast.unparse(test)})"
        return Check((whole,), ast.Name("_0", ast.Load()), cheatable=True)
    made_there = any(all(map(_mentions_value, sides)) for sides in _compared(template))
    iterated = tuple(i in lifter.iterated for i in range(len(lifter.calls)))
    return Check(tuple(lifter.calls), template, made_there, iterated)


def _compared(template: ast.expr) -> list[tuple[ast.expr, ...]]:
    """The sides of each comparison; a difference and `isclose` compare too."""
    sides: list[tuple[ast.expr, ...]] = []
    for node in ast.walk(template):
        if isinstance(node, ast.Compare):
            sides.append((node.left, *node.comparators))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            sides.append((node.left, node.right))
        elif isinstance(node, ast.Call) and _dotted(node.func) == "math.isclose":
            sides.append(tuple(node.args))
    return [s for s in sides if s]


def _called_first(test: ast.expr) -> str:
    """The built-in name called on the left of the first comparison; empty where none is."""
    comparison = next((n for n in ast.walk(test) if isinstance(n, ast.Compare)), None)
    left = comparison.left if comparison else test
    calls = (n for n in ast.walk(left) if isinstance(n, ast.Call))
    return next((c.func.id for c in calls if isinstance(c.func, ast.Name)), "")


def literal(source: str) -> Any:
    """The value of an expression of literals and safe built-ins, such as `{1: 'a'}` or
    `float('inf')`.

    Raises:
        ValueError: anything else, with the source.
    """
    try:
        return evaluate(ast.parse(source.strip(), mode="eval").body, {})
    except (SyntaxError, ValueError, Rejected, RecursionError, MemoryError) as error:
        raise ValueError(
            f"expected value {source[:200]!r} is not plain data ({error}); write a Python literal."
        ) from None


def unroll(statements: list[ast.stmt]) -> list[Check]:
    """Checks of a test body: assertions, loops over known values, assignments of known values.

    Raises:
        CannotSplit: any other statement.
    """
    checks: list[Check] = []
    names: dict[str, Any] = {}
    turns = 0

    def walk(body: list[ast.stmt]) -> None:
        nonlocal turns
        for s in body:
            if isinstance(s, ast.Assert):
                checks.append(split_assert(_Substitute(names).visit(copy.deepcopy(s.test))))
            elif isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and _harmless(s.value)):
                continue
            elif isinstance(s, ast.For) and isinstance(s.target, ast.Name) and not s.orelse:
                for item in _known(s.iter, names):
                    turns += 1
                    if turns > MAX_TURNS:
                        raise CannotSplit(f"a loop of more than {MAX_TURNS} turns")
                    names[s.target.id] = item
                    walk(s.body)
            elif (
                isinstance(s, ast.Assign)
                and len(s.targets) == 1
                and isinstance(s.targets[0], ast.Name)
            ):
                names[s.targets[0].id] = _known(s.value, names)
            else:
                raise CannotSplit(f"a statement of type {type(s).__name__}")

    walk(statements)
    return checks


def _harmless(node: ast.expr) -> bool:
    """A docstring, a bare name, or a print of constants."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
        return all(isinstance(a, ast.Constant) for a in node.args)
    return isinstance(node, ast.Constant | ast.Name)


def _known(node: ast.expr, names: dict[str, Any]) -> Any:
    node = _Substitute(names).visit(copy.deepcopy(node))
    try:
        return evaluate(node, {})
    except (ValueError, Rejected) as error:
        raise CannotSplit(f"{ast.unparse(node)[:80]} is not known before the code runs") from error


class _Substitute(ast.NodeTransformer):
    """Write known values in place of their names."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if isinstance(node.ctx, ast.Load) and node.id in self.names:
            return ast.parse(repr(self.names[node.id]), mode="eval").body
        return node


class _Lifter(ast.NodeTransformer):
    """Replace what must run beside the code by a name for its value; keep what can be evaluated
    here."""

    def __init__(self, under_test: str = "") -> None:
        self.under_test = under_test  # a built-in's name that here is the code's own
        self.calls: list[str] = []
        self.iterated: set[int] = set()  # numbers of calls of which only the items matter
        self.opaque = False  # a lifted expression holds a comparison, so the verdict is made there

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, ast.expr) or isinstance(node, ast.Constant):
            return node
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == self.under_test:
                return self.lift(node)
            if _safe_function(node.func) is None or (node.keywords and not _safe_keywords(node)):
                return self.lift(node)
            node.args = [self.visit(a) for a in node.args]
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if name in ITERATING and len(node.args) == 1 and isinstance(node.args[0], ast.Name):
                self.iterated |= {len(self.calls) - 1} if node.args[0].id.startswith("_") else set()
            for keyword in node.keywords:
                keyword.value = self.visit(keyword.value)
            return node
        if isinstance(node, ast.Name):
            return node if node.id in TYPES else self.lift(node)
        if isinstance(node, ast.Attribute):
            return node if _dotted(node) in CONSTANTS else self.lift(node)
        if type(node) in EVALUATORS and not isinstance(node, ast.ListComp | ast.GeneratorExp):
            return self.generic_visit(node)
        return self.lift(node)

    def lift(self, node: ast.expr) -> ast.expr:
        # The arguments of a call are the call's own business; anything else that compares, or that
        # yields an iterator, would have the verdict made there.
        name = ""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
        if not name or name in ("filter", "map", "zip", "eval", "exec"):
            inside = (ast.Compare, ast.BoolOp, ast.IfExp, ast.Lambda, ast.GeneratorExp, ast.Starred)
            self.opaque |= bool(name) or any(isinstance(n, inside) for n in ast.walk(node))
        self.calls.append(ast.unparse(node))
        return ast.Name(f"_{len(self.calls) - 1}", ast.Load())


def _mentions_value(node: ast.AST) -> bool:
    # Names in a template are values of calls, or types.
    return any(isinstance(n, ast.Name) and n.id.startswith("_") for n in ast.walk(node))


# ------------------------------------------------------------------ the interpreter


def evaluate(node: ast.expr, names: dict[str, Any]) -> Any:
    """The value of a template; plain data in, plain data out, in bounded time.

    Raises:
        ValueError: a construct or a name that is not known here.
        Rejected: an operation failed.
    """
    handler = EVALUATORS.get(type(node))
    if handler is None:
        raise ValueError(f"{type(node).__name__} is not a literal")
    try:
        return handler(node, names)
    except Rejected:
        raise
    except (TypeError, ArithmeticError, LookupError, RecursionError, MemoryError) as error:
        raise Rejected(f"{type(error).__name__}: {error}") from None


def _name(node: ast.Name, names: dict[str, Any]) -> Any:
    if node.id in names:
        return names[node.id]
    if node.id in TYPES:
        return TYPES[node.id]
    raise ValueError(f"the name {node.id!r}")


def _unary(node: ast.UnaryOp, names: dict[str, Any]) -> Any:
    return UNARY[type(node.op)](evaluate(node.operand, names))


def _binary(node: ast.BinOp, names: dict[str, Any]) -> Any:
    operation = BINARY.get(type(node.op))
    if operation is None:
        raise ValueError(f"the operator {type(node.op).__name__}")
    left, right = evaluate(node.left, names), evaluate(node.right, names)
    if isinstance(node.op, ast.Mult | ast.Pow | ast.FloorDiv | ast.Mod | ast.LShift):
        _small(left, right, node.op)
    return operation(left, right)


def _small(left: Any, right: Any, op: ast.operator) -> None:
    """Refuse products, powers and repetitions that would take long."""
    if isinstance(op, ast.Mod) and isinstance(left, str | bytes):
        raise Rejected("formatting, whose widths have no bound")
    for one, other in ((left, right), (right, left)):
        if isinstance(one, int) and one.bit_length() > MAX_BITS:
            raise Rejected("an integer too large to compute with")
        sized = isinstance(one, str | bytes | list | tuple)
        if sized and isinstance(other, int) and len(one) * other > MAX_LENGTH:
            raise Rejected("a sequence too long")
    if isinstance(op, ast.Pow | ast.LShift) and isinstance(left, int) and isinstance(right, int):
        growth = right * (left.bit_length() if isinstance(op, ast.Pow) else 1)
        if growth > MAX_BITS:
            raise Rejected("a power too large")


def _boolean(node: ast.BoolOp, names: dict[str, Any]) -> Any:
    stop_at = isinstance(node.op, ast.Or)
    value = not stop_at
    for part in node.values:
        value = evaluate(part, names)
        if bool(value) is stop_at:
            break
    return value


def _compare(node: ast.Compare, names: dict[str, Any]) -> bool:
    left = evaluate(node.left, names)
    for op, comparator in zip(node.ops, node.comparators, strict=True):
        right = evaluate(comparator, names)
        if not COMPARE[type(op)](left, right):
            return False
        left = right
    return True


def _call(node: ast.Call, names: dict[str, Any]) -> Any:
    function = _safe_function(node.func)
    if function is None:
        raise ValueError(f"a call of {ast.unparse(node.func)[:60]}")
    arguments = [evaluate(a, names) for a in node.args]
    keywords = {k.arg: evaluate(k.value, names) for k in node.keywords if k.arg}
    if any(isinstance(a, range) and len(a) > MAX_LENGTH for a in arguments):
        raise Rejected("a range too long")
    if function is bytes and any(isinstance(a, int) and a > MAX_LENGTH for a in arguments):
        raise Rejected("bytes too long")
    if function is sum and len(arguments) > 1 and len(arguments[0]) > MAX_TURNS:
        raise Rejected("a sum of too many sequences")  # each is copied as often as one follows
    try:
        return function(*arguments, **keywords)
    except ValueError as error:
        raise Rejected(f"ValueError: {error}") from None


def _pairs(x: Any) -> Any:
    return x.items() if isinstance(x, dict) else x


def _attribute(node: ast.Attribute, names: dict[str, Any]) -> Any:
    dotted = _dotted(node)
    if dotted not in CONSTANTS:
        raise ValueError(f"the attribute {dotted or node.attr!r}")
    return CONSTANTS[dotted]


def _subscript(node: ast.Subscript, names: dict[str, Any]) -> Any:
    return evaluate(node.value, names)[evaluate(node.slice, names)]


def _slice(node: ast.Slice, names: dict[str, Any]) -> slice:
    parts = (node.lower, node.upper, node.step)
    return slice(*(None if p is None else evaluate(p, names) for p in parts))


def _dict(node: ast.Dict, names: dict[str, Any]) -> dict:
    if any(k is None for k in node.keys):
        raise ValueError("** in a dict")
    keys = [evaluate(k, names) for k in node.keys if k is not None]
    return dict(zip(keys, [evaluate(v, names) for v in node.values], strict=True))


def _if(node: ast.IfExp, names: dict[str, Any]) -> Any:
    return evaluate(node.body if evaluate(node.test, names) else node.orelse, names)


def _comprehension(node: ast.ListComp | ast.GeneratorExp, names: dict[str, Any]) -> list:
    if len(node.generators) != 1 or not isinstance(node.generators[0].target, ast.Name):
        raise ValueError("a comprehension of more than one loop")
    loop = node.generators[0]
    target, found = node.generators[0].target.id, []
    items = evaluate(loop.iter, names)
    if len(items) > MAX_TURNS:
        raise Rejected(f"a comprehension of more than {MAX_TURNS} turns")
    for item in items:
        inner = names | {target: item}
        if all(evaluate(c, inner) for c in loop.ifs):
            found.append(evaluate(node.elt, inner))
    return found


def _items(kind: Callable[[list], Any]) -> Callable[[Any, dict[str, Any]], Any]:
    return lambda node, names: kind([evaluate(e, names) for e in node.elts])


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return ""


def _safe_function(func: ast.expr) -> Callable[..., Any] | None:
    if isinstance(func, ast.Name):
        return FUNCTIONS.get(func.id)
    return FUNCTIONS.get(_dotted(func))


def _safe_keywords(node: ast.Call) -> bool:
    return all(k.arg in ("abs_tol", "rel_tol", "reverse", "ndigits") for k in node.keywords)


TYPES: dict[str, Any] = {
    t.__name__: t
    for t in (int, float, complex, str, bytes, bool, list, tuple, dict, set, frozenset)
}
# Where only the items of an argument matter.
ITERATING = ("all", "any", "dict", "frozenset", "len", "list", "max", "min", "set", "sorted")
ITERATING += ("sum", "tuple")
FUNCTIONS: dict[str, Callable[..., Any]] = TYPES | {
    f.__name__: f for f in (abs, all, any, isinstance, len, max, min, range, round, sorted, sum)
}
FUNCTIONS |= {"type": lambda x: type(x)}
FUNCTIONS |= {
    f"math.{n}": getattr(math, n)
    for n in ("ceil", "fabs", "floor", "isclose", "isinf", "isnan", "log", "sqrt", "pow")
}
# Their arguments' hashes may have been chosen to collide.
FUNCTIONS |= {
    "set": lambda *items: Stopwatch().build_set(*items) if items else set(),
    "frozenset": lambda *items: frozenset(Stopwatch().build_set(*items) if items else ()),
    "dict": lambda *pairs: Stopwatch().build_dict(*map(_pairs, pairs)) if pairs else {},
}
CONSTANTS = {f"math.{n}": getattr(math, n) for n in ("pi", "e", "inf", "nan", "tau")}
UNARY: dict[type, Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    # Identity of decoded values means nothing beyond None, True and False, for which it is
    # equality.
    ast.Is: lambda a, b: type(a) is type(b) and a == b,
    ast.IsNot: lambda a, b: not (type(a) is type(b) and a == b),
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
EVALUATORS: dict[type, Callable[[Any, dict[str, Any]], Any]] = {
    ast.Constant: lambda node, names: node.value,
    ast.Name: _name,
    ast.UnaryOp: _unary,
    ast.BinOp: _binary,
    ast.BoolOp: _boolean,
    ast.Compare: _compare,
    ast.Call: _call,
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    ast.Slice: _slice,
    ast.IfExp: _if,
    ast.List: _items(list),
    ast.Tuple: _items(tuple),
    ast.Set: _items(set),
    ast.Dict: _dict,
    ast.ListComp: _comprehension,
    ast.GeneratorExp: _comprehension,
}
