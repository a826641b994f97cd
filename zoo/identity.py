"""What code and objects are, where no setting tells: a short hash of their source and state."""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import inspect
import sys
import sysconfig
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from zoo.config import ConfigError

CODE_KEYS = ("_target_", "fn")  # of a mapping or an object: a text under them is a dotted path
_CODE = (types.FunctionType, type, types.ModuleType)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_NUMBERS_READ = 2**20  # of each tensor


def identity(value: Any) -> str:
    """Eight hexadecimal digits, equal in every process for equal code and equal state.

    Of a function counts its source, its defaults, what it encloses, and the functions, classes,
    modules and single values of its module that it names; of a functools.partial its parts; of an
    object its class and all its attributes. Code of zoo and of libraries counts by its name alone,
    and what cannot be looked into (a lock, a connection) by its type.
    """
    return _Walk(value).of(value)[:8]


def findable(value: Any) -> bool:
    """Whether a function or class is what its own dotted path leads to."""
    found = sys.modules.get(getattr(value, "__module__", None) or "")
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is not None and found == value


def hidden_state(value: Any, told: Collection[str]) -> str:
    """`identity` of what an object keeps beside the attributes in `told`; "" where that is all."""
    if isinstance(value, functools.partial) or not hasattr(value, "__dict__"):
        return identity(value)
    rest = {
        name: item
        for name, item in vars(value).items()
        if name not in told and not _computed(type(value), name)
    }
    return identity(rest) if rest else ""


class _Walk:
    def __init__(self, root: Any) -> None:
        while isinstance(root, functools.partial):
            root = root.func
        named = root if inspect.isroutine(root) or isinstance(root, type) else type(root)
        # A reward in an installed package is looked into, what it imports from others is not.
        self._package = _package(getattr(named, "__module__", None))
        self._inside: dict[int, int] = {}  # id → depth, of what is being told: it may hold itself
        self._known: dict[int, str] = {}  # id of code → what was told of it

    def of(self, value: Any) -> str:
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            return _hash(type(value).__name__, repr(value))
        if id(value) in self._inside:
            return _hash("again", str(len(self._inside) - self._inside[id(value)]))
        if id(value) in self._known:
            return self._known[id(value)]
        self._inside[id(value)] = len(self._inside)
        try:
            told = _hash(type(value).__qualname__, *self._parts(value))
        finally:
            del self._inside[id(value)]
        if isinstance(value, _CODE):  # outlives the walk, so that no other gets its id
            self._known[id(value)] = told
        return told

    def _parts(self, value: Any) -> Iterator[str]:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if isinstance(value, functools.partial):
            yield from map(self.of, (value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            yield from map(self.of, (value.__func__, value.__self__))
        elif isinstance(value, _CODE):
            yield from self._code(value)
        elif isinstance(value, Mapping):
            yield from sorted(self._item(key, item) for key, item in value.items())
        elif isinstance(value, set | frozenset):
            yield from sorted(map(self.of, value))
        elif isinstance(value, list | tuple):
            yield from map(self.of, value)
        elif torch is not None and isinstance(value, torch.Tensor):
            yield f"{value.dtype} {tuple(value.shape)}"
            with contextlib.suppress(RuntimeError):  # on the meta device, say
                flat = value.detach().flatten()
                some = flat[:: max(1, len(flat) // _NUMBERS_READ)].contiguous().cpu()
                yield hashlib.sha256(some.view(torch.uint8).numpy().tobytes()).hexdigest()
        elif numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
            yield f"{value.dtype} {value.shape}"
            yield hashlib.sha256(value.tobytes()).hexdigest()
        else:
            yield from self._object(value)

    def _item(self, key: Any, value: Any) -> str:
        if key in CODE_KEYS and isinstance(value, str):
            from zoo.instantiate import locate  # here, not at the top: it needs this module

            with contextlib.suppress(ConfigError):  # somebody else's error to name
                return _hash(key, value, identity(locate(value)))
        return _hash(self.of(key), self.of(value))

    def _object(self, value: Any) -> Iterator[str]:
        """As pickle takes objects apart, but for values that their class computes and keeps."""
        kind = type(value)
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # a lock, a file, or a mistake in a method of the user's
            reduced = (kind, (), getattr(value, "__dict__", None))
        if isinstance(reduced, str):  # the name of something global
            yield reduced
            return
        function, arguments, *states = reduced
        yield from (self.of(function), self.of(kind), self.of(arguments))
        for state in states:
            if isinstance(state, Mapping):
                state = {k: v for k, v in state.items() if not _computed(kind, k)}
            elif isinstance(state, Iterator):
                state = list(state)
            yield self.of(state)

    def _code(self, value: Any) -> Iterator[str]:
        module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
        yield f"{module}.{getattr(value, '__qualname__', '')}"
        if not self._looked_into(module):
            return
        source = ""
        with contextlib.suppress(OSError, TypeError):  # typed into an interpreter, say
            source = inspect.getsource(value)
            yield source
        if isinstance(value, type):
            yield from map(self.of, value.__bases__)
            for item in vars(value).values():
                item = getattr(item, "fget", None) or getattr(item, "func", item)  # properties
                item = getattr(item, "__func__", item)  # static methods and class methods
                if isinstance(item, types.FunctionType):
                    yield from self._named(item)
        elif isinstance(value, types.FunctionType):
            if not source or value.__name__ == "<lambda>":  # several of which may share a line
                yield from _bytecode(value.__code__)
            cells = [_content(cell) for cell in value.__closure__ or ()]
            yield from map(self.of, (value.__defaults__, value.__kwdefaults__, cells))
            yield from self._named(value)

    def _named(self, function: types.FunctionType) -> Iterator[str]:
        """What a function names of its module. What code changes while it runs is no part of it."""
        for name in sorted(_globals(function.__code__)):
            value = function.__globals__.get(name)
            if isinstance(value, (*_CODE, functools.partial)):
                yield self._item(name, value)
            elif type(value) in _PLAIN and name in function.__globals__:
                yield _hash(name, repr(value))

    def _looked_into(self, module: str | None) -> bool:
        package = _package(module)
        if package in ("zoo", "builtins", ""):
            return False
        file = getattr(sys.modules.get(module or ""), "__file__", None)
        if file is None:
            return package in ("__main__", self._package)
        return package == self._package or not file.startswith(_LIBRARIES)


def _package(module: str | None) -> str:
    return (module or "").split(".")[0]


def _globals(code: types.CodeType) -> set[str]:
    found, stored = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.add(instruction.argval)
        elif instruction.opname == "STORE_GLOBAL":
            stored.add(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= _globals(inner)
    return found - stored


def _bytecode(code: types.CodeType) -> Iterator[str]:
    yield from (code.co_code.hex(), repr(code.co_names))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _bytecode(constant)
        else:
            yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)


def _computed(kind: type, name: Any) -> bool:
    """Whether an attribute is a cached_property, or zoo's own note of the settings."""
    if name == "_zoo_node":
        return True
    return isinstance(inspect.getattr_static(kind, str(name), None), functools.cached_property)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _hash(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        text = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(text) + text)
    return digest.hexdigest()
