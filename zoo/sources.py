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

    by: Any
    text: str
    older: bool = False  # some of its functions are others in this text already


_SEEN: dict[str, _Seen] = {}


def source_of(module: str) -> str:
    """The source of a module: of a loaded one as it was at first sight, "" for none in Python."""
    loaded = sys.modules.get(module)
    by = getattr(loaded, "__spec__", None) or getattr(loaded, "__loader__", None)
    known = _SEEN.get(module)
    if by is None or known is None or known.by is not by:
        known = _Seen(by, _read(module))
        if by is not None:
            first = module not in _SEEN  # after a reload, names that are gone may hold old ones
            _SEEN[module] = known
            if first and any(map(is_older, _own(vars(loaded), module))):
                _SEEN[module] = known = replace(known, older=True)
    return known.text


def began_older(module: str) -> bool:
    """Whether a module's file had other functions than were loaded from it at first sight."""
    source_of(module)
    return module in _SEEN and _SEEN[module].older


def _own(namespace: dict[str, Any], module: str) -> list[types.FunctionType | type]:
    kinds = (types.FunctionType, type)
    own = [item for item in [*namespace.values()] if type(item) in kinds]
    return [item for item in own if item.__module__ == module]


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


def is_older(value: types.FunctionType | type) -> bool:
    """Whether a function, or one of a class, is another in its module's source.

    Such are those of a file that was edited before it was first looked at, and those that another
    module took from this one before it was reloaded. Where something rewrites code as it is
    imported (as pytest does) there is nothing to compare.
    """
    items = [value] if isinstance(value, types.FunctionType) else [*vars(value).values()]
    for item in items:
        item = item.fget if isinstance(item, property) else getattr(item, "__func__", item)
        if type(item) is types.FunctionType and _differs(item):
            return True
    return False


def _differs(function: types.FunctionType) -> bool:
    namespace, code = function.__globals__, function.__code__
    if type(namespace.get("__loader__")) is not SourceFileLoader:
        return False
    if namespace.get("__file__") != code.co_filename:  # made by exec, as those of dataclasses are
        return False
    there = _codes_in(source_of(str(namespace.get("__name__"))))
    return _plain(code) not in there


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
    inner = (_plain(one) if isinstance(one, types.CodeType) else one for one in code.co_consts)
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
    loader = getattr(spec_of(module), "loader", None)
    with contextlib.suppress(Exception):  # no file, or none in Python
        if loader is not None:
            return loader.get_source(module) or ""
        file = sys.modules[module].__file__  # of a script that is being run
        linecache.checkcache(file)
        return "".join(linecache.getlines(str(file)))
    return ""
