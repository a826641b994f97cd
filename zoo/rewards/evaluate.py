"""Whether two formulas are equal, decided by evaluation instead of simplification.

Three evaluations, each more general and slower:

1. exact rational arithmetic (`Fraction`), for formulas without variables;
2. arithmetic modulo a 61-bit prime at points derived from the variables' names (Schwartz and
Zippel's test):
   decides rational functions in both directions. What is not rational (roots, sines, sums) is a
   random oracle of its argument's value, so equality found this way still holds, and inequality
   sends the pair to 3;
3. 60 significant digits at three points, confirmed with 120: decides roots, logarithms and
trigonometry.

Every number is capped before it is computed: no tower of powers and no factorial costs more than
microseconds. Sources: Schwartz 1980, J. ACM 27(4) lemma 1; Zippel 1979, EUROSAM.
"""

import hashlib
import math
import threading
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath

from zoo.rewards.expression import Node

PRIME = (
    2305843009213693921  # the largest prime below 2**61 that is 1 modulo 4, so that i has an image
)
MAX_BITS = 20_000
MAX_FACTORIAL = 1_000
_POINTS = 3
_MAX_DIGITS = 1_000


class Undefined(ArithmeticError):
    """The formula has no value here: 0/0, log 0, a division by zero."""


class NotExact(ArithmeticError):
    """The value is not a rational number this module computes exactly."""


class TooBig(NotExact):
    """The value exists but is larger than the caps."""


# ---------------------------------------------------------------- exact


def exact(node: Node) -> Fraction:
    """The rational value of a formula without variables.

    Raises:
        NotExact: variables, irrational values; TooBig past `MAX_BITS`.
        Undefined: a division by zero or 0 to a negative power.
    """
    head = node[0]
    if head == "q":
        return node[1]
    if head == "+":
        total = exact(node[1])
        for term in node[2:]:
            total += exact(term)
        return _capped(total)
    if head == "*":
        return _capped(exact(node[1]) * exact(node[2]))
    if head == "/":
        upper, lower = exact(node[1]), exact(node[2])
        if not lower:
            raise Undefined("division by zero")
        return _capped(upper / lower)
    if head == "neg":
        return -exact(node[1])
    if head == "^":
        return exact_power(exact(node[1]), exact(node[2]))
    if head == "fn":
        return _exact_function(node[1], [exact(argument) for argument in node[2:]])
    raise NotExact(head)


def _capped(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > 2 * MAX_BITS:
        raise TooBig("more bits than the cap")
    return value


def exact_power(base: Fraction, exponent: Fraction) -> Fraction:
    """base to the power exponent when that is rational and within the caps."""
    if exponent.denominator != 1:
        if exponent.denominator > 64:
            raise NotExact("a root of high degree")
        root = exact_root(base, exponent.denominator)
        return exact_power(root, Fraction(exponent.numerator))
    count = exponent.numerator
    if not base:
        if count < 0:
            raise Undefined("zero to a negative power")
        if count == 0:
            raise Undefined("zero to the power zero")
        return Fraction(0)
    if abs(base) == 1:
        return base if count % 2 else Fraction(1)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if count.bit_length() > 32 or bits * abs(count) > MAX_BITS:
        raise TooBig("a power past the cap")
    return base**count


def exact_root(value: Fraction, degree: int) -> Fraction:
    """The real root of a perfect power; NotExact when there is none."""
    if degree < 1 or degree > 64:
        raise NotExact("a root of high degree")
    if value < 0:
        if degree % 2 == 0:
            raise NotExact("an even root of a negative number")
        return -exact_root(-value, degree)
    return Fraction(
        _integer_root(value.numerator, degree), _integer_root(value.denominator, degree)
    )


def _integer_root(value: int, degree: int) -> int:
    if degree == 1 or value < 2:
        return value
    root = math.isqrt(value) if degree == 2 else _floor_root(value, degree)
    if root**degree != value:
        raise NotExact("not a perfect power")
    return root


def _floor_root(value: int, degree: int) -> int:
    low, high = 1, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if middle**degree <= value:
            low = middle
        else:
            high = middle - 1
    return low


def _exact_function(name: str, values: list[Fraction]) -> Fraction:
    if name == "root":
        index = values[1]
        if index.denominator != 1:
            raise NotExact("a root of fractional degree")
        return exact_root(values[0], index.numerator)
    if name == "abs":
        return abs(values[0])
    if name == "floor":
        return Fraction(math.floor(values[0]))
    if name == "ceil":
        return Fraction(math.ceil(values[0]))
    if name == "max":
        return max(values)
    if name == "min":
        return min(values)
    if name in ("factorial", "binom", "gcd", "lcm"):
        if any(value.denominator != 1 or value < 0 for value in values):
            raise NotExact(f"{name} of something that is not a natural number")
        whole = [value.numerator for value in values]
        if name == "gcd":
            return Fraction(math.gcd(*whole))
        if name == "lcm":
            return _capped(Fraction(math.lcm(*whole)))
        if name == "factorial":
            if whole[0] > MAX_FACTORIAL:
                raise TooBig("a factorial past the cap")
            return Fraction(math.factorial(whole[0]))
        if min(whole[1], whole[0] - whole[1]) > MAX_FACTORIAL or whole[0].bit_length() > 64:
            raise TooBig("a binomial past the cap")
        return Fraction(math.comb(whole[0], whole[1]))
    raise NotExact(name)


# ---------------------------------------------------------------- modulo a prime


@lru_cache(maxsize=1)
def _imaginary_unit() -> int:
    for candidate in range(2, 100):
        root = pow(candidate, (PRIME - 1) // 4, PRIME)
        if root * root % PRIME == PRIME - 1:
            return root
    raise AssertionError("a prime that is 1 modulo 4 has a root of -1")


@lru_cache(maxsize=65536)
def _oracle(*key: Any) -> int:
    """A fixed pseudo-random residue for a key: the same in every process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "big") % PRIME


class Residues:
    """Evaluates formulas modulo `PRIME` at one point; `oracles` says whether anything was not
    rational.
    """

    def __init__(self, point: int) -> None:
        self.point = point
        self.oracles = False
        self.bound: dict[str, int] = {}

    def value(self, node: Node) -> int:
        head = node[0]
        if head == "q":
            fraction: Fraction = node[1]
            if fraction.denominator == 1:
                return fraction.numerator % PRIME
            return fraction.numerator * self._inverse(fraction.denominator % PRIME) % PRIME
        if head == "+":
            return sum([self.value(term) for term in node[1:]]) % PRIME
        if head == "*":
            return self.value(node[1]) * self.value(node[2]) % PRIME
        if head == "/":
            return self.value(node[1]) * self._inverse(self.value(node[2])) % PRIME
        if head == "neg":
            return -self.value(node[1]) % PRIME
        if head == "^":
            return self._power(node[1], node[2])
        if head == "sym":
            return self._symbol(node[1], node[2])
        if head == "const":
            if node[1] == "i":
                return _imaginary_unit()
            return _oracle("const", node[1])
        if head == "fn":
            return self._function(node)
        if head == "bound":
            return self._bound_operator(node)
        raise NotExact(head)

    def _inverse(self, value: int) -> int:
        if not value:
            raise Undefined("division by zero")
        return pow(value, -1, PRIME)

    def _symbol(self, name: str, subscript: Node | None) -> int:
        if subscript is None:
            level = self.bound.get(name)
            return (
                _oracle("symbol", name, self.point)
                if level is None
                else _oracle("index", level, self.point)
            )
        return _oracle("symbol", name, self.value(subscript), self.point)

    def _power(self, base: Node, exponent: Node) -> int:
        try:
            power = exact(exponent)
        except NotExact:
            power = None
        low = self.value(base)
        if power is not None and power.denominator == 1:
            count = power.numerator
            if not low:
                if count <= 0:
                    raise Undefined("zero to a power that is not positive")
                return 0
            return pow(low, count % (PRIME - 1), PRIME)
        self.oracles = True
        return _oracle("^", low, self.value(exponent))

    def _function(self, node: Node) -> int:
        try:
            fraction = exact(node)
        except NotExact:
            pass
        else:
            return fraction.numerator * self._inverse(fraction.denominator % PRIME) % PRIME
        self.oracles = True
        arguments = [self.value(argument) for argument in node[2:]]
        if node[1] in ("max", "min", "gcd", "lcm"):
            arguments.sort()
        return _oracle("fn", node[1], *arguments)

    def _bound_operator(self, node: Node) -> int:
        _, operator, index, low, high, body = node
        self.oracles = True
        ends = [None if end is None else self.value(end) for end in (low, high)]
        shadowed = self.bound.get(index)
        if index:
            self.bound[index] = len(self.bound)
        inner = self.value(body)
        if index:
            del self.bound[index]
            if shadowed is not None:
                self.bound[index] = shadowed
        return _oracle("bound", operator, *ends, inner)


# ---------------------------------------------------------------- many digits


_contexts = threading.local()


def _context(digits: int) -> Any:
    """An mpmath context of this thread's own: the global one may be changed by anybody, and some
    functions raise a context's precision while they run.
    """
    found = getattr(_contexts, "by_digits", None)
    if found is None:
        found = _contexts.by_digits = {}
    if digits not in found:
        found[digits] = mpmath.MPContext()
        found[digits].dps = digits
    return found[digits]


class Digits:
    """Evaluates formulas to `digits` significant digits at one real point."""

    def __init__(self, digits: int, point: int) -> None:
        self.mp = _context(digits)
        self.point = point

    def value(self, node: Node) -> Any:
        head = node[0]
        mp = self.mp
        if head == "q":
            return mp.mpf(node[1].numerator) / node[1].denominator
        if head == "+":
            total = self.value(node[1])
            for term in node[2:]:
                total = total + self.value(term)
            return total
        if head == "*":
            return self.value(node[1]) * self.value(node[2])
        if head == "/":
            upper, lower = self.value(node[1]), self.value(node[2])
            if not lower:
                raise Undefined("division by zero")
            return upper / lower
        if head == "neg":
            return -self.value(node[1])
        if head == "^":
            return self._power(node[1], node[2])
        if head == "sym":
            return self._symbol(node[1], node[2])
        if head == "const":
            if node[1] == "pi":
                return +mp.pi
            if node[1] == "e":
                return +mp.e
            if node[1] == "i":
                return mp.mpc(0, 1)
            raise NotExact(node[1])
        if head == "fn":
            return self._function(node[1], node[2:])
        raise NotExact(head)

    def _symbol(self, name: str, subscript: Node | None) -> Any:
        key = None if subscript is None else Residues(self.point).value(subscript)
        seed = _oracle("real", name, key, self.point)
        if self.point == _POINTS:
            return self.mp.mpf(seed % 50 + 2)
        # The first point is positive, where roots and logarithms behave. The others have opposite
        # signs, so that |x| is not x; the last lies past π, so that arctan(tan x) is not x.
        start = self.mp.mpf(16) / 5 if self.point == _POINTS - 1 else self.mp.mpf(1) / 5
        size = self.mp.mpf(seed % (1 << 40)) / (1 << 40) * 2 + start
        sign = _oracle("sign", name, key) >> 20 & 1
        return -size if self.point and sign ^ (self.point & 1) else size

    def _power(self, base: Node, exponent: Node) -> Any:
        low = self.value(base)
        try:
            power = exact(exponent)
        except NotExact:
            high = self.value(exponent)
        else:
            if not low and power > 0:
                return low
            if power.denominator == 1 and abs(power) <= 10**6:
                if not low and power <= 0:
                    raise Undefined("zero to a power that is not positive")
                self._check_growth(low, power.numerator)
                return low**power.numerator
            if power.denominator % 2 and _is_real_negative(low):
                # (-8)^(1/3) is -2, as it is in schools and for odd roots.
                self._check_growth(low, power)
                size = self.mp.power(-low, self.mp.mpf(power.numerator) / power.denominator)
                return -size if power.numerator % 2 else size
            high = self.mp.mpf(power.numerator) / power.denominator
        if not low:
            raise Undefined("zero to a power that is not a whole number")
        self._check_growth(low, high)
        return self.mp.power(low, high)

    def _check_growth(self, base: Any, exponent: Any) -> None:
        if not base:
            return
        size = abs(self.mp.log(abs(base))) + 4
        power = (
            abs(self.mp.mpf(exponent.numerator) / exponent.denominator)
            if isinstance(exponent, Fraction)
            else abs(exponent)
        )
        if power * size > 10**6:
            raise TooBig("a power past the cap")

    def _function(self, name: str, nodes: tuple[Node, ...]) -> Any:
        mp = self.mp
        if name in ("factorial", "binom", "gcd", "lcm"):
            value = exact(("fn", name, *nodes))
            return mp.mpf(value.numerator) / value.denominator
        if name == "root":
            return self._power(nodes[0], ("/", ("q", Fraction(1)), nodes[1]))
        values = [self.value(node) for node in nodes]
        if any(abs(value) > 10**9 for value in values) and name != "ln" and name != "abs":
            raise TooBig(f"{name} of a huge argument")
        if name == "abs":
            return abs(values[0])
        if name in ("max", "min"):
            if any(isinstance(value, mp.mpc) for value in values):
                raise Undefined("complex numbers have no order")
            return max(values) if name == "max" else min(values)
        if name in ("floor", "ceil"):
            return mp.floor(values[0]) if name == "floor" else mp.ceil(values[0])
        if name == "ln":
            if not values[0]:
                raise Undefined("the logarithm of zero")
            return mp.log(values[0])
        if name == "Re" or name == "Im":
            return mp.re(values[0]) if name == "Re" else mp.im(values[0])
        function = getattr(mp, _MP_NAMES.get(name, name), None)
        if function is None or name in ("det", "arg"):
            raise NotExact(name)
        try:
            return function(values[0])
        except (ZeroDivisionError, ValueError) as error:
            raise Undefined(f"{name} has no value here") from error


class Watched(Digits):
    """Digits that note the smallest and the largest power of two among all values on the way, 1
    included: what is added to something far larger is lost.
    """

    def __init__(self, digits: int, point: int) -> None:
        super().__init__(digits, point)
        self.low = self.high = 0

    def value(self, node: Node) -> Any:
        value = super().value(node)
        if value:
            size = self.mp.mag(value)
            self.low, self.high = min(self.low, size), max(self.high, size)
        return value

    def spread(self) -> int:
        """Decimal digits between the smallest and the largest value."""
        return int((self.high - self.low) * 0.30103) + 1


_MP_NAMES = {
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "arcsec": "asec",
    "arccsc": "acsc", "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh",
}  # fmt: skip


def _is_real_negative(value: Any) -> bool:
    return not hasattr(value, "_mpc_") and value < 0


# ---------------------------------------------------------------- equality


def same_value(left: Node, right: Node) -> bool:
    """Whether two formulas are equal for all values of their variables, as far as this module can
    tell.

    Undefined and too large formulas are equal to nothing but a formula with the same residues.
    """
    if left == right:
        return not _is_undefined(left)
    try:
        return exact(left) == exact(right)
    except NotExact:
        pass
    except Undefined:
        return False
    try:
        pairs, oracles = _residue_pairs(left, right)
    except Undefined:
        return False
    except NotExact:
        return False
    if all(first == second for first, second in pairs):
        return True
    if not oracles:
        return False
    return _same_digits(left, right)


def same_up_to_factor(left: Node, right: Node) -> int:
    """Sign of the constant c with left = c · right for all values of the variables; 0 if there is
    none.

    Used for equations (multiples of an equation are equal) and inequalities (where the sign
    matters).
    """
    try:
        first = [Residues(point) for point in range(2)]
        lefts = [residues.value(left) for residues in first]
        rights = [residues.value(right) for residues in first]
    except (Undefined, NotExact):
        return 0
    if not any(lefts) or not any(rights):
        return 0
    proportional = lefts[0] * rights[1] % PRIME == lefts[1] * rights[0] % PRIME
    if not proportional and not any(residues.oracles for residues in first):
        return 0
    signs = set()
    ratio = None
    compared = 0
    for point in range(_POINTS):
        try:
            digits = Digits(60, point)
            upper, lower = digits.value(left), digits.value(right)
        except (Undefined, NotExact, OverflowError):
            continue
        if not upper or not lower:
            continue
        quotient = upper / lower
        if isinstance(quotient, digits.mp.mpc):
            if abs(quotient.imag) > abs(quotient) * digits.mp.mpf(10) ** -40:
                return 0
            quotient = quotient.real
        if ratio is not None and abs(quotient - ratio) > abs(ratio) * digits.mp.mpf(10) ** -40:
            return 0
        ratio = quotient
        compared += 1
        signs.add(1 if quotient > 0 else -1)
    return signs.pop() if len(signs) == 1 and compared > 1 else 0


def real_value(node: Node) -> Any:
    """A real constant to 60 digits, for ordering the ends of intervals; NotExact for anything
    else.
    """
    if has_symbols(node):
        raise NotExact("variables have no order")
    if node == ("const", "inf"):
        return _context(60).inf
    if node == ("neg", ("const", "inf")):
        return -_context(60).inf
    value = Digits(60, 0).value(node)
    if hasattr(value, "_mpc_"):
        raise NotExact("complex numbers have no order")
    return value


def has_symbols(node: Node) -> bool:
    """Whether a formula contains a variable."""
    if node[0] == "sym" or node[0] == "bound":
        return True
    return any(has_symbols(part) for part in node[1:] if isinstance(part, tuple))


def _has_steps(node: Node) -> bool:
    return node[:2] in (("fn", "floor"), ("fn", "ceil")) or any(
        _has_steps(part) for part in node[1:] if isinstance(part, tuple)
    )


def symbols(node: Node) -> set[str]:
    """Names of the variables in a formula, subscripts included."""
    if node[0] == "sym":
        return {node[1] if node[2] is None else f"{node[1]}_{node[2]!r}"}
    found: set[str] = set()
    for part in node[1:]:
        if isinstance(part, tuple):
            found |= symbols(part)
    return found


def _is_undefined(node: Node) -> bool:
    try:
        Residues(0).value(node)
    except Undefined:
        return True
    except NotExact:
        return False
    return False


def _residue_pairs(left: Node, right: Node) -> tuple[list[tuple[int, int]], bool]:
    pairs, oracles = [], False
    for point in range(2):
        residues = Residues(point)
        pairs.append((residues.value(left), residues.value(right)))
        oracles = oracles or residues.oracles
        if pairs[-1][0] != pairs[-1][1]:
            break
    return pairs, oracles


def _same_digits(left: Node, right: Node) -> bool:
    compared = 0
    varying = has_symbols(left) or has_symbols(right)
    # Floors and ceilings differ at whole numbers.
    steps = varying and (_has_steps(left) or _has_steps(right))
    for point in range((_POINTS + steps) if varying else 1):
        try:
            if not _agree(left, right, point):
                return False
        except Undefined:
            continue
        except (NotExact, OverflowError, ValueError, TypeError):
            return False
        compared += 1
    return compared >= (2 if varying else 1)


def _agree(left: Node, right: Node, point: int) -> bool:
    """Whether two formulas agree to 60 and to 120 digits, and to more where their values span many
    magnitudes.
    """
    wide = _distance(Digits(60, point), left, right, 45)
    if wide is None:
        return False
    watched = Watched(120, point)
    fine = _distance(watched, left, right, 105)
    # A difference that is real stays when the digits double; a rounding error does not.
    if fine is None or (wide and fine > wide * 1e-20):
        return False
    if watched.spread() <= 45:
        return True
    digits = watched.spread() + 120
    if digits > _MAX_DIGITS:
        raise TooBig("values of too many magnitudes")
    finest = _distance(Digits(digits, point), left, right, digits - 15)
    return finest is not None and not (fine and finest > fine * 1e-20)


def _distance(context: Digits, left: Node, right: Node, digits: int) -> Any | None:
    """How far apart two values are; None if they differ within so many digits."""
    first, second = context.value(left), context.value(right)
    distance = abs(first - second)
    size = max(abs(first), abs(second))
    limit = context.mp.mpf(10) ** -digits * (size if size > 1e-6 else 1)
    return distance if distance <= limit else None
