"""Plain data from an untrusted process: decoding, and comparison by type and value."""

import json
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

# Parsing and hashing must stay cheap whatever the text.
MAX_LISTS = 1 << 21  # lists in one value, of about 60 bytes each
MAX_TAGGED = 1 << 20  # tuples and other typed containers, of about 100 bytes and 1 µs each
WEIGHTS = {"d": 3, "s": 3, "z": 3, "q": 10}  # of those that are larger or slower
HASHING_SECONDS = 0.5  # processor time to build all sets and dicts of one value; 10⁶ elements: 0.4


class Malformed(ValueError):
    """The text is not what the encoder writes."""


class TooLarge(Malformed):
    """The value has too many parts, or sets built to collide."""


def decode(payload: str) -> Any:
    """The value of one payload of `_child.py`: JSON whose objects have one key that names a type.

    Only built-in plain types come out, so `==`, `len` or `sorted` on the result run no foreign
    code.

    Raises:
        TooLarge: too many parts, or a set or dict built to collide.
        Malformed: anything else, or nesting too deep.
    """
    if payload.count("[") > MAX_LISTS:
        raise TooLarge(f"more than {MAX_LISTS} lists")
    try:
        value = json.loads(payload, object_hook=_Decoder().typed)
    except Malformed:
        raise
    except (ValueError, TypeError, LookupError, RecursionError, MemoryError) as error:
        raise Malformed(f"{type(error).__name__}: {error}") from None
    return value


class _Decoder:
    """Builds the typed containers of one value, within bounds on their number and on time."""

    def __init__(self) -> None:
        self.left = MAX_TAGGED
        self.clock = Stopwatch()

    def typed(self, tagged: dict[str, Any]) -> Any:
        ((tag, x),) = tagged.items()
        self.left -= WEIGHTS.get(tag, 1)
        if self.left < 0:
            raise TooLarge(f"more than {MAX_TAGGED} containers")
        if tag in ("v", "e"):
            return tagged
        if tag == "i":
            return int(_check(x, str), 16)
        if tag in ("b", "a"):
            return (bytes if tag == "b" else bytearray).fromhex(_check(x, str))
        _check(x, list)
        if tag == "t":
            return tuple(x)
        if tag == "d":
            return self.clock.build_dict(x)
        if tag in ("s", "z"):
            filled = self.clock.build_set(x)
            return filled if tag == "s" else frozenset(filled)
        if tag == "q":
            return deque(x)
        if tag == "c":
            return complex(float(x[0]), float(x[1]))
        if tag == "r":
            return range(*x)
        raise Malformed(f"tag {tag!r}")


class Stopwatch:
    """Builds sets and dicts of foreign elements, and gives up when that takes too long.

    Integers hash to themselves, so anybody can write 10⁵ of them that collide, by equal hashes or
    along the table's order of probing, and a set of those takes hours. No test of the elements
    finds them all, so the time is measured: the thread's own, at each element.
    """

    def __init__(self) -> None:
        self.spent = 0.0

    def build_set(self, items: Iterable[Any]) -> set[Any]:
        """`set(items)`.

        Raises:
            TooLarge: all calls together took `HASHING_SECONDS` of processor time.
        """
        filled: set[Any] = set()
        started, until, clock = time.thread_time(), 0.0, time.perf_counter
        for item in items:
            filled.add(item)
            if clock() > until:
                until = self._until(started)
        self.spent += time.thread_time() - started
        return filled

    def build_dict(self, pairs: Iterable[Any]) -> dict[Any, Any]:
        """`dict(pairs)`, likewise."""
        filled: dict[Any, Any] = {}
        started, until, clock = time.thread_time(), 0.0, time.perf_counter
        for key, value in pairs:
            filled[key] = value
            if clock() > until:
                until = self._until(started)
        self.spent += time.thread_time() - started
        return filled

    def _until(self, started: float) -> float:
        """The earliest time at which the thread can have spent what it may."""
        # The thread's own clock is the fair one and takes a system call; this one is cheap.
        left = HASHING_SECONDS - self.spent - (time.thread_time() - started)
        if left < 0:
            raise TooLarge("a set or dict that takes too long to build")
        return time.perf_counter() + left


def _check(x: Any, kind: type) -> Any:
    if type(x) is not kind:
        raise Malformed(f"{type(x).__name__} where {kind.__name__} was due")
    return x


def same(value: Any, expected: Any) -> bool:
    """Equal in value and in type, all the way down: 3, 3.0 and True differ, and so do a list and a
    tuple.

    Two NaN are the same; 0.0 and −0.0 are too. Arguments are plain built-in data; a foreign one
    comes first, and is read no further than it agrees with the other.
    """
    try:
        return _same(value, expected)
    except RecursionError:
        return False


def _same(value: Any, expected: Any) -> bool:
    kind = type(expected)
    if type(value) is not kind:
        return False
    if kind in (list, tuple, deque):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if kind in (set, frozenset, dict):
        if len(value) != len(expected):
            return False
        pairs = _paired(_items(value), _items(expected))
        return pairs is not None and all(_same(x, y) for x, y in pairs)
    return _marked(value) == _marked(expected)


def _items(x: Any) -> Iterable[tuple[Any, Any]]:
    return x.items() if type(x) is dict else ((element, None) for element in x)


def _paired(
    items: Iterable[tuple[Any, Any]], expected: Iterable[tuple[Any, Any]]
) -> list[tuple[Any, Any]] | None:
    """(value, expected value) of the keys that are the same; None where one has no partner."""
    # Looked up among the expected keys, which nobody built to collide. Several can be NaN.
    due: dict[Any, list[Any]] = {}
    for key, value in expected:
        due.setdefault(_marked(key), []).append(value)
    pairs = []
    for key, value in items:
        left = due.get(_marked(key))
        if not left:
            return None
        pairs.append((value, left.pop()))
    return pairs


def _marked(x: Any) -> Any:
    """The value with each type written beside it, hashable, so that `==` compares both."""
    kind = type(x)
    if kind in (list, tuple, deque):
        return kind, tuple(_marked(i) for i in x)
    if kind in (set, frozenset):
        return kind, frozenset(_marked(i) for i in x)
    if kind is dict:
        return kind, frozenset((_marked(k), _marked(v)) for k, v in x.items())
    if kind is float and x != x:
        return kind, "nan"
    if kind is complex:
        return kind, _marked(x.real), _marked(x.imag)
    if kind is bytearray:
        return kind, bytes(x)
    return kind, x
