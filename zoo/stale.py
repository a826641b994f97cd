"""Code in memory that its file no longer holds: a module that was edited and not reloaded."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import psutil

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_SITES = {"site-packages", "dist-packages"}  # also those of another environment or of the user


def edited_since_import(value: Any) -> list[str]:
    """The files that hold other functions than those in memory, of a function's or class's code.

    Of its module, and of the modules that this one names, but for libraries. Only files that were
    written since the process began. Constants are not compared.
    """
    began = psutil.Process().create_time()
    found = list[str]()
    for module, file in _modules_of(value):
        if file.stat().st_mtime > began and any(map(_differs, _functions(vars(module), module))):
            found.append(str(file))
    return sorted(found)


def is_older(value: types.FunctionType | type) -> bool:
    """Whether the file of a function, or of a class's functions, holds others by now.

    Where something rewrites code as it is imported (as pytest does) there is nothing to compare.
    """
    if isinstance(value, types.FunctionType):
        return _differs(value)
    module = sys.modules.get(value.__module__)
    return module is not None and any(map(_differs, _functions(vars(value), module)))


def source_of(value: types.FunctionType | type) -> str:
    """The source of a function or class; "" for none, or where its file holds another by now."""
    if is_older(value):
        return ""
    # Typed into an interpreter, say, or a decorator's that hides what it wraps.
    with contextlib.suppress(OSError, TypeError, ValueError, AttributeError):
        if isinstance(value, types.FunctionType):
            code = inspect.unwrap(value).__code__
            line = _lines(code.co_filename).get(_told(code), code.co_firstlineno)
            if line is not None and line != code.co_firstlineno:  # pushed down by an edit above it
                lines = Path(code.co_filename).read_text("utf-8").splitlines(keepends=True)
                return "".join(inspect.getblock(lines[line - 1 :]))
        return inspect.getsource(value)
    return ""


def bytecode(code: types.CodeType) -> Iterator[str]:
    """What code does, wherever in a file it stands."""
    yield from (code.co_code.hex(), repr(code.co_names))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from bytecode(constant)
        else:
            yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)


def compiled(source: Any) -> types.CodeType | None:
    """The code of a source or syntax tree; None where it is no Python."""
    with warnings.catch_warnings(), contextlib.suppress(SyntaxError, ValueError):
        warnings.simplefilter("ignore")  # whoever imports the module is told
        return compile(source, "<source>", "exec", dont_inherit=True)
    return None


def installed(file: str | None) -> bool:
    """Whether a file belongs to a library."""
    parts = Path(file or "").parts
    return bool(file and file.startswith(_LIBRARIES)) or not _SITES.isdisjoint(parts)


def _modules_of(value: Any) -> Iterator[tuple[types.ModuleType, Path]]:
    todo, seen = [str(getattr(value, "__module__", ""))], set[str]()
    while todo:
        name = todo.pop()
        module = None if name in seen else sys.modules.get(name)
        seen.add(name)
        file = getattr(module, "__file__", None)
        if module is None or not file or installed(file) or name.split(".")[0] == "zoo":
            continue
        if Path(file).is_file():
            yield module, Path(file)
        for item in [*vars(module).values()]:
            is_module = isinstance(item, types.ModuleType)
            of = item.__name__ if is_module else inspect.getattr_static(item, "__module__", "")
            todo.append(str(of))


def _differs(function: types.FunctionType) -> bool:
    if type(function.__globals__.get("__loader__")) is not SourceFileLoader:
        return False
    with contextlib.suppress(OSError):  # no file: nothing to compare
        return _told(function.__code__) not in _lines(function.__code__.co_filename)
    return False


def _lines(file: str) -> dict[str, int]:
    """What a file's code does → the line where it begins."""
    status = Path(file).stat()
    return _lines_of(file, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=256)
def _lines_of(file: str, *_of_this_state: int) -> dict[str, int]:
    code = compiled(Path(file).read_bytes())
    return {_told(inner): inner.co_firstlineno for inner in _codes(code)} if code else {}


def _told(code: types.CodeType) -> str:
    return "\n".join((code.co_qualname, *bytecode(code)))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _functions(
    namespace: types.MappingProxyType[str, Any] | dict[str, Any], module: types.ModuleType
) -> Iterator[types.FunctionType]:
    """What was written in a module's file of the functions of a namespace and its classes."""
    todo, seen, file = [*namespace.values()], set[int](), getattr(module, "__file__", None)
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, type):
            todo += vars(item).values() if item.__module__ == module.__name__ else ()
        elif isinstance(item, property):
            todo.append(item.fget)
        elif isinstance(item, functools.cached_property):
            todo.append(item.func)
        elif isinstance(item, staticmethod | classmethod):
            todo.append(item.__func__)
        elif (inner := inspect.getattr_static(item, "__wrapped__", None)) is not None:
            todo.append(inner)
        elif isinstance(item, types.FunctionType) and item.__code__.co_filename == file:
            yield item
