"""The process behind `zoo.rewards.pool`: answers (gold, answer) pairs with math-verify until its
input closes.

Run as a script, by path, with `python -P`: it imports nothing of zoo, so it starts the same
whatever the caller's main module is and whether or not it guards `__main__`. Messages are a 4-byte
big-endian length and that much JSON.
"""

import json
import os
import struct
import sys
import threading
from typing import Any, BinaryIO

HEADER = struct.Struct(">I")
MAX_MESSAGE = 1 << 16
WARM_UP = (
    ("\\frac{1}{2}+x", "x+\\frac{2}{4}"),
    ("2x", "\\frac{d}{dx} x^2"),
)


def limit_memory(max_bytes: int) -> None:
    """Cap this process's address space: a formula that explodes fails here, not in the trainer."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def read_message(stream: BinaryIO) -> Any | None:
    """The next message; None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    if size > MAX_MESSAGE:
        return None
    return json.loads(stream.read(size))


def write_message(stream: BinaryIO, message: Any) -> None:
    """Send one message."""
    data = json.dumps(message).encode()
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()


def compare(gold: str, answer: str) -> bool:
    """math-verify's opinion, strict, unrounded, its own timeouts off (they use signals)."""
    from math_verify import LatexExtractionConfig, parse, verify

    config = (LatexExtractionConfig(boxed_match_priority=0),)
    options: dict[str, Any] = {
        "extraction_config": config,
        "extraction_mode": "first_match",
        "fallback_mode": "no_fallback",
        "parsing_timeout": None,
    }
    golds = parse(f"$\\boxed{{{gold}}}$", **options)
    answers = parse(f"$\\boxed{{{answer}}}$", **options)
    if (
        len(golds) != 1
        or len(answers) != 1
        or isinstance(golds[0], str)
        or isinstance(answers[0], str)
    ):
        return False
    if _kind(golds[0]) != _kind(answers[0]):
        # Its comparison takes a tuple for a set and an equation for its right side.
        return False
    # math-verify rounds to `float_rounding` decimals and forgives an equation its left side unless
    # strict.
    settings: dict[str, Any] = {
        "float_rounding": 15,
        "numeric_precision": 30,
        "strict": True,
        "timeout_seconds": None,
    }
    return bool(verify(golds, answers, **settings) and verify(answers, golds, **settings))


def _kind(value: Any) -> str:
    from sympy import Expr, MatrixBase, Set, Tuple
    from sympy.logic.boolalg import Boolean

    for kind in (MatrixBase, Tuple, Set, Boolean, Expr):
        if isinstance(value, kind):
            return type(value).__name__ if kind is Set else kind.__name__
    return type(value).__name__


def main() -> None:
    """Serve until standard input closes; the caller's death closes it, even in the middle of a
    computation.
    """
    # Keep the pipes to ourselves: a library that prints must not corrupt the messages.
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    limit_memory(int(sys.argv[1]))
    sys.setrecursionlimit(2000)
    try:
        ready = True
        # sympy imports much of itself on first use; that is not to count against a deadline.
        for gold, answer in WARM_UP:
            ready = compare(gold, answer) and ready
    except ImportError:
        ready = None
    write_message(replies, {"ready": ready})
    inbox: list[Any] = []
    arrived = threading.Condition()

    def receive() -> None:
        while True:
            message = read_message(requests)
            if message is None:
                os._exit(0)
            with arrived:
                inbox.append(message)
                arrived.notify()

    threading.Thread(target=receive, daemon=True).start()
    while True:
        with arrived:
            while not inbox:
                arrived.wait()
            gold, answer = inbox.pop(0)
        try:
            reply = {"same": compare(gold, answer)}
        except Exception as error:
            reply = {"same": False, "error": type(error).__name__}
        write_message(replies, reply)


if __name__ == "__main__":
    main()
