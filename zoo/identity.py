"""What code and objects are, where no setting tells: a short hash of their source and state."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import hashlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from zoo.config import ConfigError
from zoo.sources import (
    began_older,
    compiled,
    edited_since,
    functions_of,
    is_older,
    source_in,
    source_of,
    spec_of,
)

CODE_KEYS = ("_target_", "fn")  # of a mapping or an object: a text under them is a dotted path
_CODE = (types.FunctionType, type, types.ModuleType)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_SITES = {"site-packages", "dist-packages"}  # also those of another environment or of the user
_NUMBERS_READ = 2**20  # of each tensor
# What a constant is written with
_WRITTEN = (ast.Constant, ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator, ast.Tuple, ast.Load)
_Statement = tuple[str, types.CodeType, ast.stmt]  # with its source


def identity(value: Any) -> str:
    """Eight hexadecimal digits, equal in every process for equal code and equal state.

    Of a function counts its source, what it encloses, the modules it imports, its defaults, and
    what it names of its module. Of these last two, functions, classes, modules and constants count
    as they are, others (objects, lists, what is made at run time or read from the environment) by
    the statements that make them. Of a module counts its source and the modules it imports; of a
    functools.partial its parts; of an object its class and all its attributes. Code of zoo and of
    libraries counts by its name alone, and what cannot be looked into (a lock, a connection) by
    its type. Not noticed are edits that reach a global by another name only: `alias = names;
    alias.append("more")`, `globals()["names"] = …`, `exec`, `import_module("…")` in a function,
    what another module or a base's `__init_subclass__` puts into a list or mapping; nor files that
    code reads itself.
    """
    return _Walk(value).of(value)[:8]


def edited_since_import(value: Any) -> list[str]:
    """The files of code that were edited after this process imported them, of which `identity` is.

    Told is what was there at first sight, which is what runs; of a file that was edited before that
    only functions can be compared, by what they do.
    """
    walk = _Walk(value)
    walk.of(value)
    began = psutil.Process().create_time()
    found = list[str]()
    for module in sorted(walk.read):
        file = _file(module)
        if file is None or not Path(file).is_file() or Path(file).stat().st_mtime <= began:
            continue
        if module in walk.older or edited_since(module):
            found.append(file)
    return found


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
        # A reward in an installed package is looked into, what it imports from others is not.
        self._package = _package(getattr(root, "__module__", None) or type(root).__module__)
        self._inside: dict[int, int] = {}  # id → depth, of what is being told: it may hold itself
        self._known: dict[int, str] = {}  # id of code → what was told of it
        self._made: dict[tuple[int, str], str] = {}  # a global → what was told of its making
        self._statements: dict[int, dict[str, list[_Statement]]] = {}  # of namespaces, by id
        self.read = set[str]()  # modules whose source was told
        self.older = set[str]()  # those that hold code which is no more in it

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
        elif isinstance(value, re.Pattern):  # which only pickle itself takes apart
            yield from map(self.of, (value.pattern, value.flags))
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
        if isinstance(reduced, str):  # the name of something global: of a cached function, say
            yield from (reduced, self.of(kind), self.of(_wrapped(value)))
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
        if isinstance(value, types.ModuleType):
            yield from self._modules({module})
            return
        self.read.add(module)
        if older := is_older(value):
            self.older.add(module)
            for function in functions_of(value):
                yield from _bytecode(function.__code__, older)
        source = "" if older else source_in(module, value)
        if source:
            yield source
        # A wrapper's own globals are those of the module that wraps.
        namespace = getattr(sys.modules.get(module), "__dict__", {})
        if isinstance(value, type):
            yield from map(self.of, value.__bases__)
            name = value.__qualname__.split(".")[0]
            known = name in self._made_by(namespace)
            if known:
                yield self._making(name, namespace)  # what its body reads, and what changes it
            written = known and "<locals>" not in value.__qualname__
            for key, item in vars(value).items():
                if type(item) in _PLAIN and not written and not key.startswith("__"):
                    yield self._item(key, item)  # of a function's argument, say
                item = getattr(item, "fget", None) or getattr(item, "func", item)  # properties
                item = getattr(item, "__func__", item)  # static methods and class methods
                if not isinstance(item, types.FunctionType):
                    item = _wrapped(item) or item  # cached methods
                if isinstance(item, types.FunctionType):
                    yield from self._named(item.__code__, item.__globals__)
                    if not written:  # what the function that makes the class was given
                        yield from (self.of(_content(cell)) for cell in item.__closure__ or ())
                        keyed = item.__kwdefaults__ or {}
                        defaults = (*(item.__defaults__ or ()), *keyed.values())
                        yield from (self.of(d) for d in defaults if type(d) in _PLAIN)
                elif self._looked_into(type(item).__module__):
                    yield self.of(type(item))
        elif isinstance(value, types.FunctionType):
            if not source or value.__name__ == "<lambda>":  # several of which may share a line
                yield from _bytecode(value.__code__)
            cells = [_content(cell) for cell in value.__closure__ or ()]
            defaults, name = (value.__defaults__, value.__kwdefaults__), value.__qualname__
            made = self._made_by(namespace).get(name, ())
            if cells and made:  # decorated: what the decorator keeps may be made at run time
                yield self._making(name, namespace)
                cells = [item for item in cells if isinstance(item, (*_CODE, functools.partial))]
            fixed = not made or self._constant(name, namespace)
            if len(made) > 1 or (any(defaults) and not fixed):
                yield self._making(name, namespace)  # what is made at run time, or changed
            if fixed:
                yield from map(self.of, defaults)
            yield self.of(cells)
            yield from self._named(value.__code__, value.__globals__)

    def _named(self, code: types.CodeType, namespace: dict[str, Any]) -> Iterator[str]:
        """What code names of its module, and what it imports itself."""
        known = self._made_by(namespace)
        for name in sorted(_globals(code, known)):
            value = namespace.get(name)
            if name not in namespace:  # a builtin, or not made yet, not here, or deleted
                if name in known:
                    yield self._making(name, namespace)
            elif isinstance(value, (*_CODE, functools.partial, re.Pattern)):
                yield self._item(name, value)
                module = isinstance(value, types.ModuleType)
                inside = value.__name__ if module else getattr(value, "__module__", None)
                # Of a package: which modules of it. Of others: what is changed in them here.
                if self._looked_into(inside) and (module or len(known.get(name, ())) > 1):
                    yield self._making(name, namespace)
            elif type(value) not in _PLAIN or not self._constant(name, namespace):
                yield self._making(name, namespace)
            else:
                yield _hash(name, repr(value))
        yield from self._modules(_imports(code, namespace.get("__package__")))

    def _making(self, name: str, namespace: dict[str, Any]) -> str:
        """A global by the statements that make it: what code changes in it is no part of it."""
        key, value = (id(namespace), name), namespace.get(name)
        if key in self._made:
            return self._made[key]
        self._made[key] = _hash("again", name)
        told = list[str]()
        if self._looked_into(str(namespace.get("__name__"))):
            for text, code, _ in self._made_of(name, namespace):
                told += [text, *self._named(code, namespace)]
            told += ["older"] if namespace.get("__name__") in self.older else []
        own = self._looked_into(type(value).__module__)
        if own:
            told.append(self.of(type(value)))
        if not told or (own and len(told) == 1):  # a notebook's, say
            fixed = own or isinstance(value, tuple | frozenset) or _wrapped(value) is not None
            told += [self.of(value)] if fixed else []
        self._made[key] = _hash(name, *told)
        return self._made[key]

    def _made_by(self, namespace: Mapping[str, Any]) -> dict[str, list[_Statement]]:
        """The statements of a module; of what is none, as a notebook's cells are, nothing."""
        if id(namespace) not in self._statements:
            module = str(namespace.get("__name__"))
            there = getattr(sys.modules.get(module), "__dict__", None) is namespace
            self._statements[id(namespace)] = _statements(self._text(module)) if there else {}
        return self._statements[id(namespace)]

    def _made_of(self, name: str, namespace: Mapping[str, Any]) -> list[_Statement]:
        known = self._made_by(namespace)
        return [*known.get(name, ()), *known.get("*", ())]

    def _constant(
        self, name: str, namespace: Mapping[str, Any], through: tuple[str, ...] = ()
    ) -> bool:
        """Whether a global is what is written down for it, in its module or in one it is from.

        Of a function, its defaults. So is one that no statement makes: typed into an interpreter,
        or put there by other code.
        """
        known, module = self._made_by(namespace), str(namespace.get("__name__"))
        if name.startswith("__") and name not in known:
            return False  # __file__ is where the code lies, not what it is
        for _, _, statement in self._made_of(name, namespace):
            if isinstance(statement, ast.ImportFrom):
                there = _imported(statement, namespace)
                names = {item.asname or item.name: item.name for item in statement.names}
                told = names.get(name, name)
                known_there = told in there and module not in through
                if known_there and not self._constant(told, there, (*through, module)):
                    return False
            elif not _written(statement, name):
                return False
        return True

    def _modules(self, names: Collection[str]) -> Iterator[str]:
        """The sources of modules and of all that they import. Nothing is imported for it."""
        found, todo = dict[str, str](), list(names)
        while todo:
            name = todo.pop()
            if name not in found and self._looked_into(name):
                found[name] = self._text(name)
                if not _installed(_file(name)):  # of a package, thousands
                    todo += _imports_of(found[name], getattr(spec_of(name), "parent", None))
        for name in sorted(found):
            yield _hash(name, found[name], *(["older"] if name in self.older else []))

    def _text(self, module: str) -> str:
        self.read.add(module)
        if began_older(module):
            self.older.add(module)
        return source_of(module)

    def _looked_into(self, module: str | None) -> bool:
        package = _package(module)
        if module is None or package in ("zoo", "builtins", ""):
            return False
        file = _file(module)
        if file is None:
            return module in sys.modules and package in ("__main__", self._package)
        return package == self._package or not _installed(file)


def _package(module: str | None) -> str:
    return (module or "").split(".")[0]


def _file(module: str) -> str | None:
    file, spec = getattr(sys.modules.get(module), "__file__", None), spec_of(module)
    if file is None and spec is not None:  # a package without an __init__ is a folder
        folders = spec.submodule_search_locations or ()
        return spec.origin if spec.has_location else next(iter(folders), None)
    return file


def _installed(file: str | None) -> bool:
    parts = Path(file or "").parts
    return bool(file and file.startswith(_LIBRARIES)) or not _SITES.isdisjoint(parts)


def _globals(code: types.CodeType, known: Collection[str]) -> set[str]:
    """The globals that code reads, but those that it makes itself, where no statement is known."""
    found, stored = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.add(instruction.argval)
        elif instruction.opname == "STORE_GLOBAL":
            stored.add(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= _globals(inner, known)
    return found - stored.difference(known)


def _imports(code: types.CodeType, package: str | None) -> set[str]:
    """Modules that code imports, and what it imports from them, which may be modules too."""
    found: set[str] = set()
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME":
            # Beyond the top of its package: somebody else's error to name.
            with contextlib.suppress(ImportError, ValueError):
                name = importlib.util.resolve_name("." * level.argval + step.argval, package)
                found |= {name, *(f"{name}.{item}" for item in names.argval or ())}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= _imports(inner, package)
    return found


@functools.lru_cache(maxsize=1024)
def _imports_of(source: str, package: str | None) -> frozenset[str]:
    code = compiled(source)
    return frozenset(_imports(code, package) if code else ())


@functools.lru_cache(maxsize=1024)
def _statements(source: str) -> dict[str, list[_Statement]]:
    """Name → the statements at the top of a module that bind it or change what it holds."""
    found: dict[str, list[_Statement]] = {}
    changed: dict[str, set[str]] = {}  # by the functions that do it
    lines = source.split("\n")  # as ast counts: splitlines parts at a form feed too
    with contextlib.suppress(SyntaxError, ValueError):
        for statement in ast.parse(source).body:
            if (code := compiled(ast.Module([statement], []))) is None:
                continue
            above = [item.lineno for item in getattr(statement, "decorator_list", ())]
            text = "\n".join(lines[min([statement.lineno, *above]) - 1 : statement.end_lineno])
            bound = _bound(statement)
            called = getattr(statement, "decorator_list", [statement])
            for node in (inner for item in called for inner in ast.walk(item)):
                bound = bound | changed.get(getattr(node, "id", ""), set())
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                changed[statement.name] = bound - {statement.name}
            for name in bound:
                found.setdefault(name, []).append((text, code, statement))
    return found


def _written(statement: ast.stmt, name: str) -> bool:
    """Whether what a statement gives to a name is a constant, or a function's defaults are."""
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        given: list[ast.AST] = [statement.value or statement]
    elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        if statement.name != name or statement.decorator_list:  # a decorator may make others
            return False
        given = [d for d in (*statement.args.defaults, *statement.args.kw_defaults) if d]
    else:
        return False
    return all(isinstance(node, _WRITTEN) for value in given for node in ast.walk(value))


def _imported(statement: ast.ImportFrom, namespace: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the module holds that a `from … import` reads."""
    name = ""
    with contextlib.suppress(ImportError, ValueError):
        above = "." * statement.level + (statement.module or "")
        name = importlib.util.resolve_name(above, namespace.get("__package__"))
    return getattr(sys.modules.get(name), "__dict__", {})


def _bound(statement: ast.stmt) -> set[str]:
    found: set[str] = set()
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            for inner in ast.walk(node):
                found.update(inner.names if isinstance(inner, ast.Global) else ())
                if isinstance(inner, ast.Subscript) and isinstance(inner.ctx, ast.Store):
                    found.add(_holder(inner))  # REWARDS[name] = function
            found.update(*map(_passed, node.decorator_list))
            continue  # what else is inside is bound there
        if isinstance(node, ast.alias):
            found.add(node.asname or node.name.split(".")[0])
        elif isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            found.add(_holder(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found.add(_holder(node.func))  # names.append("more")
        elif isinstance(node, ast.Expr):
            found |= _passed(node.value)
        todo += ast.iter_child_nodes(node)
    return found


def _passed(call: ast.AST) -> set[str]:
    """The names that a call for its effect, or a decorator, may change: `shuffle(names)`."""
    found = set[str]()
    if isinstance(call, ast.Call):
        found = {_holder(item) for item in (*call.args, *(word.value for word in call.keywords))}
        call = call.func
    return found | {_holder(call)} if isinstance(call, ast.Attribute) else found


def _holder(node: ast.AST) -> str:
    """The name that `name`, `name.part` and `name[0]` begin with."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return getattr(node, "id", "")


def _bytecode(code: types.CodeType, older: bool = False) -> Iterator[str]:
    yield from (code.co_code.hex(), repr(code.co_names))
    if older:  # else the source tells
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        yield repr((code.co_varnames, *counts))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _bytecode(constant, older)
        else:
            yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)


def _computed(kind: type, name: Any) -> bool:
    """Whether an attribute is a cached_property, or zoo's own note of the settings."""
    if name == "_zoo_node":
        return True
    return isinstance(inspect.getattr_static(kind, str(name), None), functools.cached_property)


def _wrapped(value: Any) -> Any:
    return inspect.getattr_static(value, "__wrapped__", None)  # asks no proxy, which may refuse


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
