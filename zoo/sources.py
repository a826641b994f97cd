"""The sources of modules as they were when they were first looked at: files change behind them.

A process runs what it imported. What a file holds later, as in a notebook whose module was edited
and not reloaded, is another thing, and what a run records must not be of it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import io
import linecache
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any


@dataclass(frozen=True)
class _Seen:
    """A module's source, and what it was loaded by: another one after a reload."""

    module: types.ModuleType | None
    by: Any
    text: str
    older: bool = False  # some of its functions are others in this text already


_SEEN: dict[str, _Seen] = {}


def source_of(module: str) -> str:
    """The source of a module: of a loaded one as it was at first sight, "" for none in Python."""
    loaded = sys.modules.get(module)
    by = getattr(loaded, "__spec__", None) or getattr(loaded, "__loader__", None)
    known = _SEEN.get(module)
    if known is not None and known.by is by and not known.older:
        return known.text
    seen = _Seen(loaded, by, _read(module))
    if by is None:
        return seen.text
    _SEEN[module] = seen
    # After a reload, names that are gone may hold functions of before.
    reloaded = known is not None and known.module is loaded and known.by is not by
    if not reloaded and any(map(is_older, _own(vars(loaded), module))):
        _SEEN[module] = replace(seen, older=True)
    return seen.text


def began_older(module: str) -> bool:
    """Whether a module's file had other functions than were loaded from it at first sight."""
    source_of(module)
    return module in _SEEN and _SEEN[module].older


def _own(namespace: dict[str, Any], module: str) -> Iterator[Any]:
    """What a module defines itself of what may hold functions."""
    for item in [*namespace.values()]:
        plain = type(item) is types.FunctionType or issubclass(type(item), type)
        # Of a cached function, say: asks no proxy, which may refuse.
        of = item.__module__ if plain else inspect.getattr_static(item, "__module__", None)
        if of == module:
            yield item


def source_in(module: str, value: types.FunctionType | type) -> str:
    """The source of a function or class in its module's; "" for none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    text = source_of(module) if file else ""
    before = linecache.cache.get(str(file))
    if text:  # without a time, so that nobody looks whether the file is another by now
        linecache.cache[str(file)] = (len(text), None, io.StringIO(text).readlines(), str(file))
    try:
        return inspect.getsource(value)
    except (OSError, TypeError, SyntaxError):  # typed into an interpreter, say
        return ""
    finally:
        if text:
            linecache.cache.pop(str(file), None)
            linecache.cache.update({str(file): before} if before else {})


def edited_since(module: str) -> bool:
    """Whether a loaded module's file holds another source than at first sight."""
    return module in _SEEN and _SEEN[module].text != _read(module)


def is_older(value: Any) -> bool:
    """Whether a function, or one of a class, is another in its module's source.

    Such are those of a file that was edited before it was first looked at, and those that another
    module took from this one before it was reloaded. Where something rewrites code as it is
    imported (as pytest does) there is nothing to compare.
    """
    return any(map(_differs, functions_of(value)))


def functions_of(value: Any) -> Iterator[types.FunctionType]:
    """A function and what it wraps, or those of a class and of the classes in it."""
    todo, seen = [value], set[int]()
    while todo:
        item = todo.pop()
        kind = type(item)  # no isinstance: a proxy may answer anything, or raise
        if id(item) in seen:
            continue
        seen.add(id(item))
        if kind is types.FunctionType:
            yield item
        if issubclass(kind, type):
            inner = item.__qualname__.startswith(f"{getattr(value, '__qualname__', '')}.")
            if item is value or (inner and item.__module__ == value.__module__):
                todo += vars(item).values()
        elif kind is property:
            todo += (item.fget, item.fset, item.fdel)
        elif kind is functools.cached_property:
            todo.append(item.func)
        elif kind in (staticmethod, classmethod):
            todo.append(item.__func__)
        elif (wrapped := inspect.getattr_static(item, "__wrapped__", None)) is not None:
            todo.append(wrapped)


def _differs(function: types.FunctionType) -> bool:
    namespace, code = function.__globals__, function.__code__
    if type(namespace.get("__loader__")) is not SourceFileLoader:
        return False
    if namespace.get("__file__") != code.co_filename:  # made by exec, as those of dataclasses are
        return False
    source = source_of(str(namespace.get("__name__")))
    return bool(source) and _plain(code) not in _codes_in(source)


@functools.lru_cache(maxsize=256)
def _codes_in(source: str) -> frozenset[types.CodeType]:
    code = compiled(source)
    return frozenset(map(_plain, _all_of(code))) if code else frozenset()


def _all_of(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _all_of(inner)


def _plain(code: types.CodeType) -> types.CodeType:
    """The code wherever in a file it stands."""
    inner = [_plain(one) if isinstance(one, types.CodeType) else one for one in code.co_consts]
    if sys.version_info >= (3, 13) and not code.co_flags & inspect.CO_OPTIMIZED:
        # Of a class: where it begins, and names in the order of a set.
        inner = [one for one in inner if type(one) not in (int, tuple)]
    return code.replace(co_firstlineno=1, co_linetable=b"", co_filename="", co_consts=tuple(inner))


def compiled(source: Any) -> types.CodeType | None:
    """The code of a source or syntax tree; None where it is no Python."""
    with warnings.catch_warnings(), contextlib.suppress(SyntaxError, ValueError):
        warnings.simplefilter("ignore")  # whoever imports the module is told
        return compile(source, "<source>", "exec", dont_inherit=True)
    return None


def spec_of(module: str) -> ModuleSpec | None:
    """Where a module is or would be imported from; importlib's own imports the packages above."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__spec__", None)
    above = module.rpartition(".")[0]
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        if not above:
            return importlib.util.find_spec(module)
        places = getattr(spec_of(above), "submodule_search_locations", None)
        return None if places is None else PathFinder.find_spec(module, places)
    return None


def _read(module: str) -> str:
    spec: Any = spec_of(module)
    loader = getattr(spec, "loader", None)
    with contextlib.suppress(Exception):  # no file, or none in Python
        if loader is not None:
            return loader.get_source(spec.name) or ""  # of `python -m` another name than __main__
        file = sys.modules[module].__file__  # of a script that is being run
        linecache.checkcache(file)
        return "".join(linecache.getlines(str(file)))
    return ""
