"""Plain data from an untrusted process: decoding, and comparison by type and value."""

import json
from collections import deque
from typing import Any

# Parsing and hashing must stay cheap whatever the text: see `_hashable`.
FEW = 64


class Malformed(ValueError):
    """The text is not what the encoder writes."""


def decode(payload: str) -> Any:
    """The value of one payload of `_child.py`: JSON whose objects have one key that names a type.

    Only built-in plain types come out, so `==`, `len` or `sorted` on the result run no foreign
    code.

    Raises:
        Malformed: anything else, nesting too deep, or a set or dict built to collide.
    """
    try:
        value = json.loads(payload, object_hook=_typed)
    except (ValueError, TypeError, LookupError, RecursionError, MemoryError) as error:
        raise Malformed(f"{type(error).__name__}: {error}") from None
    return value


def _typed(tagged: dict[str, Any]) -> Any:
    ((tag, x),) = tagged.items()
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
        pairs = [(k, v) for k, v in x]
        return dict(zip(_hashable([k for k, _ in pairs]), [v for _, v in pairs], strict=True))
    if tag == "s":
        return set(_hashable(x))
    if tag == "z":
        return frozenset(_hashable(x))
    if tag == "q":
        return deque(x)
    if tag == "c":
        return complex(float(x[0]), float(x[1]))
    if tag == "r":
        return range(*x)
    raise Malformed(f"tag {tag!r}")


def _check(x: Any, kind: type) -> Any:
    if type(x) is not kind:
        raise Malformed(f"{type(x).__name__} where {kind.__name__} was due")
    return x


def _hashable(items: list) -> list:
    """The items, unless so many share a hash that a set of them would take quadratic time."""
    # Integers hash to themselves, so anybody can write thousands that collide; equal hashes in a
    # set of hashes are equal elements and cost nothing.
    if len(items) > FEW and len({hash(x) for x in items}) < len(items) - FEW:
        raise Malformed(f"{len(items)} elements that share hashes")
    return items


def same(value: Any, expected: Any) -> bool:
    """Equal in value and in type, all the way down: 3, 3.0 and True differ, and so do a list and a
    tuple.

    Two NaN are the same; 0.0 and −0.0 are too. Arguments are plain built-in data.
    """
    try:
        return _marked(value) == _marked(expected)
    except RecursionError:
        return False


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
    if kind is bytearray:
        return kind, bytes(x)
    return kind, x
