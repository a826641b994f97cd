"""Mutations that mutmut does not make itself, of the kinds that spoil numerical code.

A gradient that is not stopped, a mask that is not applied, a check that is not made, operands or
arguments the wrong way round, a reduction that is another one. Each takes a node of the syntax tree
and yields what to put in its place.
"""

from collections.abc import Iterator

import libcst as cst
import libcst.matchers as m

OTHER_NAME = {
    "amax": "amin",
    "amin": "amax",
    "all": "any",
    "any": "all",
    "max": "min",
    "maximum": "minimum",
    "mean": "sum",
    "min": "max",
    "minimum": "maximum",
    "ones_like": "zeros_like",
    "sqrt": "square",
    "square": "abs",
    "sum": "mean",
    "zeros_like": "ones_like",
}
OPPOSITE = {
    cst.LessThan: cst.GreaterThanEqual,
    cst.LessThanEqual: cst.GreaterThan,
    cst.GreaterThan: cst.LessThanEqual,
    cst.GreaterThanEqual: cst.LessThan,
}
MODULES = m.Name("torch") | m.Name("math") | m.Name("_checks")
ORDERED = m.Subtract() | m.Divide() | m.FloorDivide() | m.Modulo() | m.Power()
# Whose order says nothing, or whose swap fails before the mathematics begins.
UNORDERED = ("minimum", "maximum", "min", "max", "isinstance", "floats", "bools", "integers")


def dropped_call(node: cst.Call) -> Iterator[cst.BaseExpression]:
    """x.detach() and x.clamp(…) become x."""
    if isinstance(node.func, cst.Attribute) and not m.matches(node.func.value, MODULES):
        yield node.func.value


def other_call(node: cst.Call) -> Iterator[cst.Call]:
    """minimum(a, b) becomes maximum(a, b), x.any(…) x.all(…), x.sum(…) x.mean(…)."""
    name = _name(node.func)
    if name is not None and name.value in OTHER_NAME:
        yield node.with_deep_changes(name, value=OTHER_NAME[name.value])


def swapped_arguments(node: cst.Call) -> Iterator[cst.Call]:
    """where(c, a, b) becomes where(c, b, a): the last two positional arguments change places."""
    plain = [i for i, each in enumerate(node.args) if each.keyword is None and not each.star]
    name = _name(node.func)
    if len(plain) < 2 or (name is not None and name.value in UNORDERED):
        return
    i, j = plain[-2:]
    arguments = list(node.args)
    arguments[i] = node.args[i].with_changes(value=node.args[j].value)
    arguments[j] = node.args[j].with_changes(value=node.args[i].value)
    yield node.with_changes(args=arguments)


def swapped_operands(node: cst.BinaryOperation) -> Iterator[cst.BinaryOperation]:
    """a − b becomes b − a."""
    if m.matches(node.operator, ORDERED):
        yield node.with_changes(left=_bracketed(node.right), right=_bracketed(node.left))


def opposite_comparison(node: cst.ComparisonTarget) -> Iterator[cst.ComparisonTarget]:
    """a < b becomes a >= b; mutmut itself makes a <= b of it."""
    if type(node.operator) in OPPOSITE:
        yield node.with_changes(operator=OPPOSITE[type(node.operator)]())


def smaller_number(node: cst.BaseNumber) -> Iterator[cst.BaseExpression]:
    """A number becomes less by one; mutmut itself makes it more by one."""
    if isinstance(node, cst.Integer | cst.Float):
        yield cst.parse_expression(f"({node.evaluated_value - 1!r})")


def forced_branch(node: cst.If) -> Iterator[cst.If]:
    """The branch of an if is never taken, or always."""
    test = _bracketed(node.test)
    for operator, value in ((cst.And(), "False"), (cst.Or(), "True")):
        yield node.with_changes(test=cst.BooleanOperation(test, operator, cst.Name(value)))


def dropped_statement(node: cst.SimpleStatementLine) -> Iterator[cst.SimpleStatementLine]:
    """A check, a write to part of a tensor, or a step like x = where(mask, x, 0) is left out."""
    if len(node.body) != 1:
        return
    statement = node.body[0]
    dropped = isinstance(statement, cst.AugAssign) or m.matches(statement, m.Expr(value=m.Call()))
    if isinstance(statement, cst.Assign):
        targets = [name for each in statement.targets for name in _names(each)]
        read = _names(statement.value)
        part = m.findall(statement.targets[0], m.Subscript())
        # A first assignment that is dropped is a NameError, which is no test of the tests.
        dropped = bool(part) or all(target in read for target in targets)
    if dropped:
        yield node.with_changes(body=[cst.Pass()])


def negated_result(node: cst.Return) -> Iterator[cst.Return]:
    """return a − b becomes return −(a − b); mutmut itself turns a sign that is there."""
    calculation = m.BinaryOperation() | m.Call(func=m.Attribute())
    if node.value is not None and m.matches(node.value, calculation):
        negative = cst.UnaryOperation(cst.Minus(), _bracketed(node.value))
        yield node.with_changes(value=negative)


OPERATORS = (
    (cst.Call, dropped_call),
    (cst.Call, other_call),
    (cst.Call, swapped_arguments),
    (cst.BinaryOperation, swapped_operands),
    (cst.ComparisonTarget, opposite_comparison),
    (cst.BaseNumber, smaller_number),
    (cst.If, forced_branch),
    (cst.SimpleStatementLine, dropped_statement),
    (cst.Return, negated_result),
)


def _name(function: cst.BaseExpression) -> cst.Name | None:
    function = function.attr if isinstance(function, cst.Attribute) else function
    return function if isinstance(function, cst.Name) else None


def _names(node: cst.CSTNode) -> list[str]:
    return [name.value for name in m.findall(node, m.Name()) if isinstance(name, cst.Name)]


def _bracketed(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
