"""What runs in the sandboxed process: the program's code, then the calls, by value.

Loaded by `_launcher.py`, never imported. It is given the code and the call expressions, never an
expected value: whatever the code does to this process, it can do no better than to state the values
of its calls.

A message is one ASCII line, `nonce index payload`; the payload is JSON in which an object has one
key, the type of a container or number that JSON lacks (`{"t": […]}` a tuple). Types are taken
exactly.
"""

import builtins
import collections
import os
import sys
import types
from _sitebuiltins import Quitter

try:
    from _json import encode_basestring_ascii as quote
except ImportError:
    from json.encoder import py_encode_basestring_ascii as quote

MAX_DEPTH = 100


class NotPlain(Exception):
    """The value is not plain data: of another type, too deep, or too large."""


# Names bound here, so that patching builtins or modules cannot change what is sent for a plain
# value. `type` and the methods of the built-in types cannot be patched.
def make_encoder(limit):
    type_, len_, hex_, repr_, isinstance_ = type, len, hex, repr, isinstance
    iterate, tuple_, dict_, str_, list_ = iter, tuple, dict, str, list
    ordered = (collections.OrderedDict, collections.defaultdict, collections.Counter)
    infinity = float("inf")
    pieces = []
    size = 0

    def put(text):
        nonlocal size
        size += len_(text)
        if size > limit:
            raise NotPlain("too large")
        pieces.append(text)

    def sequence(tag, items, depth):
        put('{"' + tag + '":[' if tag else "[")
        first = True
        for item in items:
            if not first:
                put(",")
            first = False
            node(item, depth + 1)
        put("]}" if tag else "]")

    def number(x):
        if x != x:
            put("NaN")
        elif x in (infinity, -infinity):
            put("Infinity" if x > 0 else "-Infinity")
        else:
            put(repr_(x))

    def node(x, depth):
        kind = type_(x)
        if depth > MAX_DEPTH:
            raise NotPlain("too deep")
        if x is None:
            put("null")
        elif x is True:
            put("true")
        elif x is False:
            put("false")
        elif kind is int:
            # Decimal conversion is quadratic, and refused past 4,300 digits.
            put(repr_(x) if -(1 << 64) < x < 1 << 64 else '{"i":"' + hex_(x) + '"}')
        elif kind is float:
            number(x)
        elif kind is str_:
            if len_(x) > limit:
                raise NotPlain("too large")
            put(quote(x))
        elif kind is list:
            sequence("", x, depth)
        elif kind is tuple_:
            sequence("t", x, depth)
        elif kind is dict_ or kind in ordered:
            put('{"d":[')
            first = True
            for key, value in dict_.items(x):
                put("[" if first else ",[")
                first = False
                node(key, depth + 1)
                put(",")
                node(value, depth + 1)
                put("]")
            put("]}")
        elif kind is set:
            sequence("s", x, depth)
        elif kind is frozenset:
            sequence("z", x, depth)
        elif kind is bytes or kind is bytearray:
            if len_(x) > limit:
                raise NotPlain("too large")
            put('{"' + ("b" if kind is bytes else "a") + '":"' + kind.hex(x) + '"}')
        elif kind is complex:
            put('{"c":[')
            number(x.real)
            put(",")
            number(x.imag)
            put("]}")
        elif kind is range:
            sequence("r", (x.start, x.stop, x.step), depth)
        elif kind is collections.deque:
            sequence("q", iterate(x), depth)
        elif kind.__base__ is tuple_ and "_fields" in type_.__dict__["__dict__"].__get__(kind):
            # A namedtuple equals the tuple of its items; they are read past whatever it overrides.
            sequence("t", tuple_.__iter__(x), depth)
        else:
            raise NotPlain("of type " + type_name(kind))

    def type_name(kind):
        name = type_.__dict__["__name__"].__get__(kind)
        return name if type_(name) is str_ and isinstance_(name, str_) else "?"

    def encode(value):
        nonlocal size
        pieces.clear()
        size = 0
        node(value, 0)
        return "".join(pieces)

    def encode_items(value):
        """As it is where it is plain data, else the list of its items."""
        try:
            return encode(value)
        except NotPlain:
            return encode(list_(value))

    def failure(error):
        text = ""
        try:
            shown = str_(error)
            if type_(shown) is str_:
                text = shown[:200]
        except BaseException:
            pass
        return '{"e":[' + quote(type_name(type_(error))) + "," + quote(text) + "]}"

    return encode, encode_items, failure


def main(job, result):
    sys.argv[:] = ["solution.py"]
    os.environ.clear()
    # What the module site, which -S leaves out, would have made and scripts call.
    builtins.exit, builtins.quit = Quitter("exit", "Ctrl-D"), Quitter("quit", "Ctrl-D")
    nonce = job["nonce"]
    job["started"] = True
    if job["script"]:
        os.write(result, f"{nonce} ready\n".encode())
        os.close(result)
        run_script(job["code"])
    run_calls(job["code"], job["steps"], nonce, result, job["result_bytes"])


def run_script(code):
    """Run as `python solution.py`: standard streams, uncaught errors and exit status as usual."""
    sys.excepthook = show_error
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(code, "solution.py", "exec", dont_inherit=True), module.__dict__)
    raise SystemExit(0)


def show_error(kind, error, trace):
    """As Python shows an uncaught error, without the frames that are not the script's."""
    while trace and trace.tb_frame.f_code.co_filename != "solution.py":
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def run_calls(code, steps, nonce, result, limit):
    encode, encode_items, failure = make_encoder(limit)
    write, leave, compile_, run, evaluate = os.write, os._exit, compile, exec, eval
    untrace, unprofile, range_, len_ = sys.settrace, sys.setprofile, range, len

    def send(index, payload):
        data = (nonce + " " + index + " " + payload + "\n").encode("ascii")
        start = 0
        while start < len_(data):
            start += write(result, data[start:])

    write(result, (nonce + " ready\n").encode())
    # Registered under its name: dataclasses and pickle look their module up. Not `__main__`: a
    # script's own demonstration is not under test.
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    names = module.__dict__
    try:
        run(compile_(code, "solution.py", "exec", dont_inherit=True), names)
    except BaseException as error:
        untrace(None)
        unprofile(None)
        send("load", failure(error))
        leave(1)
    for index in range_(len_(steps)):
        kind, source = steps[index]
        try:
            if kind == "exec":
                value = run(compile_(source, "test", "exec", dont_inherit=True), names)
            else:
                value = evaluate(compile_(source, "call", "eval", dont_inherit=True), names)
            untrace(None)
            unprofile(None)
            shown = encode_items(value) if kind == "items" else encode(value)
            payload = '{"v":' + shown + "}"
        except BaseException as error:
            untrace(None)
            unprofile(None)
            payload = failure(error)
        send(str(index), payload)
    send("done", "0")
    leave(0)
