"""Code in memory that its file no longer holds: a notebook's module, edited and not reloaded."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import psutil

from zoo.identity import compiled, installed


def edited_since_import(value: Any) -> list[str]:
    """The files that hold other functions than those in memory, of a function's or class's code.

    Of its module, and of the modules that this one names, but for libraries. Only files that were
    written since the process began, and that are imported as they are: where something rewrites
    code as it is imported (as pytest does) there is nothing to compare. Constants are not compared.
    """
    began = psutil.Process().create_time()
    found = list[str]()
    for module, file in _modules_of(value):
        loader = type(getattr(module.__spec__, "loader", None))
        if loader is SourceFileLoader and file.stat().st_mtime > began and _differs(module, file):
            found.append(str(file))
    return sorted(found)


def _modules_of(value: Any) -> Iterator[tuple[types.ModuleType, Path]]:
    todo, seen = [value.__module__], set[str]()
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


def _differs(module: types.ModuleType, file: Path) -> bool:
    code = compiled(file.read_bytes())
    there = {*_codes(code)} if code is not None else set()
    return any(one not in there for one in _functions(module))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _functions(module: types.ModuleType) -> Iterator[types.CodeType]:
    """What was written in a module's file of the functions at its top and in its classes."""
    todo, seen = [*vars(module).values()], set[int]()
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
        elif isinstance(item, types.FunctionType) and item.__code__.co_filename == module.__file__:
            yield item.__code__
