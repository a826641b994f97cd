"""Code and objects are the same where their source and state are, and nowhere else."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zoo.compose import compose
from zoo.config import RunConfig
from zoo.identity import identity
from zoo.instantiate import config_hash, resolved, structured
from zoo.rewards.function import Function


def enclosing(scale: float) -> Callable[..., list[float]]:
    def score(completions: list[str]) -> list[float]:
        return [scale * len(text) for text in completions]

    return score


def by_default(scale: float) -> Callable[..., list[float]]:
    return lambda completions, s=scale: [s * len(text) for text in completions]


def scaled(scale: float, completions: list[str]) -> list[float]:
    return [scale * len(text) for text in completions]


class Keeper:
    """Keeps its argument under another name, beside what cannot be looked into."""

    def __init__(self, scale: Any):
        self._scale = scale
        self._lock = threading.Lock()

    def __call__(self, prompts: Any, completions: Any) -> Any:
        return scaled(self._scale, completions)

    @functools.cached_property
    def loaded(self) -> object:
        return object()


class Slotted:
    __slots__ = ("_scale",)

    def __init__(self, scale: float):
        self._scale = scale

    def __call__(self, prompts: Any, completions: Any) -> Any:
        return scaled(self._scale, completions)


class Inner(Keeper):
    """Keeps what it is given inside another object."""

    def __init__(self, scale: float):
        super().__init__([Keeper({"scale": scale})])


MADE = {
    "closure": lambda scale: Function(enclosing(scale)),
    "default": lambda scale: Function(by_default(scale)),
    "partial": lambda scale: Function(functools.partial(scaled, scale)),
    "partial keyword": lambda scale: Function(functools.partial(scaled, scale=scale)),
    "bound method": lambda scale: Function(Keeper(scale).__call__),
    "callable object": lambda scale: Function(Keeper(scale)),
    "private attribute": Keeper,
    "slots": Slotted,
    "inside": Inner,
    "tensor": lambda scale: Keeper(torch.tensor([[scale], [0.0]], dtype=torch.bfloat16)),
    "array": lambda scale: Keeper(np.array([scale])),
    "module": lambda scale: Keeper(torch.nn.ParameterList([torch.full((2,), scale)])),
    "local class": lambda scale: type("Local", (Keeper,), {"__doc__": "mine"})(scale),
}


def run_of(reward: Any) -> RunConfig:
    return replace(structured(compose([])), reward=reward)


@pytest.mark.parametrize("kind", MADE)
def test_rewards_made_in_python_are_one_run_only_where_their_state_is_equal(kind: str) -> None:
    make = MADE[kind]
    assert config_hash(run_of(make(1.0))) == config_hash(run_of(make(1.0)))
    assert config_hash(run_of(make(1.0))) != config_hash(run_of(make(-1.0)))
    assert "#" not in str(resolved(run_of(make(1.0)))["reward"])  # which is written to config.yaml


def test_two_lambdas_of_one_line_are_two() -> None:
    first, second = lambda c: [1.0 for _ in c], lambda c: [2.0 for _ in c]
    assert identity(first) != identity(second)


def test_what_is_found_by_its_path_is_the_run_of_its_path() -> None:
    path = f"{__name__}.by_default"
    assert config_hash(run_of(Function(by_default))) == config_hash(run_of(Function(path)))


def test_a_computed_attribute_a_lock_and_a_ring_are_no_difference() -> None:
    one, other = Keeper(1.0), Keeper(1.0)
    assert one.loaded is one.loaded
    assert identity(one) == identity(other)
    one._scale, other._scale = [one], [other]
    assert identity(one) == identity(other)


CODE = """
import mine_too
LIMIT = {limit}
calls = 0
def inner(text): return mine_too.deep(text) + {inner}
class Reward:
    def __call__(self, prompts, completions):
        global calls
        calls += 1
        return [inner(c.text) + LIMIT for c in completions]
"""


def test_code_is_what_it_names_too_but_not_what_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)

    def told(limit: int = 1, inner: int = 1, deep: int = 1, calls: int = 0) -> str:
        for name in ("mine_here", "mine_too"):
            sys.modules.pop(name, None)
        (tmp_path / "mine_here.py").write_text(CODE.format(limit=limit, inner=inner))
        (tmp_path / "mine_too.py").write_text(f"def deep(text): return {deep}")
        importlib.invalidate_caches()
        module = importlib.import_module("mine_here")
        module.calls = calls
        return identity(module.Reward)

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    first = told()
    assert first == told() == told(calls=7)
    assert len({first, told(limit=2), told(inner=2), told(deep=2)}) == 4


# Ways in which a reward leans on code and values; VALUE is what somebody edits, in either module.
LEANING = {
    "imported inside": (
        "def f(c):\n  from leans_on import g\n  return g(c)",
        "def g(c): return VALUE",
    ),
    "imported inside whole": (
        "def f(c):\n  import leans_on as h\n  return h.g(c)",
        "def g(c): return VALUE",
    ),
    "imported inside a package": (
        "def f(c):\n  from leans_in import part\n  return part.g(c)",
        "def g(c): return VALUE",
    ),
    "imported by what is imported": (
        "import leans_in.between\ndef f(c): return leans_in.between.g(c)",
        "def g(c): return VALUE",
    ),
    "pattern": ("import re\nP = re.compile('VALUE')\ndef f(c): return P.findall(c)", ""),
    "pattern of another module": (
        "from leans_on import P\ndef f(c): return P.findall(c)",
        "import re\nP = re.compile('x', VALUE)",
    ),
    "instance": (
        "class J:\n  def g(self, c): return VALUE\nj = J()\ndef f(c): return j.g(c)",
        "",
    ),
    "state of an instance": (
        "from leans_on import J\nj = J(VALUE)\ndef f(c): return j.g(c)",
        "class J:\n  def __init__(self, v): self.v = v",
    ),
    "instance of another module": (
        "from leans_on import j\ndef f(c): return j.g(c)",
        "class J:\n  def __init__(self, v): self.v = v\nj = J(VALUE)",
    ),
    "instance that a class keeps": (
        "from leans_on import J\nclass f:\n  j = J()",
        "class J:\n  def g(self, c): return VALUE",
    ),
    "class of a factory": (
        "def make(v):\n  class J:\n    def g(self, c): return v\n  return J\nf = make(VALUE)",
        "",
    ),
    "class of another module's factory": (
        "from leans_on import make\nf = make(VALUE)",
        "def make(v):\n  class J:\n    def g(self, c): return v\n  return J",
    ),
    "helper that a factory's class encloses": (
        "from leans_on import h, make\nf = make(h)",
        "def h(c): return VALUE\n"
        "def make(v):\n  class J:\n    def g(self, c): return v(c)\n  return J",
    ),
    "default in a factory's class": (
        "def make(v):\n  class J:\n    def g(self, c, w=v, *, x=v): return w\n  return J\n"
        "f = make(VALUE)",
        "",
    ),
    "argument of a decorator": (
        "from leans_on import d\nLIMIT = VALUE\n@d(LIMIT)\ndef f(c): return c",
        "import functools\ndef d(v):\n  def wrap(g):\n    @functools.wraps(g)\n"
        "    def h(c): return g(c) + v\n    return h\n  return wrap",
    ),
    "helper of what is decorated": (
        "from leans_on import d, g\n@d\ndef f(c): return g(c)",
        "import functools\ndef g(c): return VALUE\ndef d(g):\n  @functools.wraps(g)\n"
        "  def h(c): return g(c)\n  return h",
    ),
    "made by a function": (
        "from leans_on import make\nj = make()\ndef f(c): return j(c)",
        "import functools, operator\ndef make(): return operator.itemgetter(VALUE)",
    ),
    "list": ("w = ['a']\nw.append('VALUE')\ndef f(c): return c in w", ""),
    "cached helper": (
        "from leans_on import g\ndef f(c): return g(c)",
        "from functools import lru_cache\n@lru_cache\ndef g(c): return VALUE",
    ),
    "cached itself": ("import functools\n@functools.cache\ndef f(c): return VALUE", ""),
    "cached helper of a cached method": (
        "import functools\nfrom leans_on import g\nclass f:\n  @functools.cache\n"
        "  def __call__(self, c): return g(c)",
        "import functools\n@functools.cache\ndef g(c): return VALUE",
    ),
    "names in a ring": (
        "j = [0]\nj += [lambda: j]\ndef g(c): return f, VALUE\ndef f(c): return j, g",
        "",
    ),
    "star": (
        "from leans_on import *\ndef f(c): return j.g(c), w",
        "class J:\n  def g(self, c): return VALUE\nj = J()\nw = ('a',)",
    ),
    # `time()` is another value in each import, and may make no difference.
    "made at run time": ("from time import time\nT = time() * VALUE\ndef f(c): return T", ""),
    "made at run time elsewhere": (
        "from leans_on import T\ndef f(c): return T",
        "from time import time\nT = time() * VALUE",
    ),
    "made at run time, star": (
        "from leans_on import *\ndef f(c): return T",
        "from time import time\nT = time() * VALUE",
    ),
    "made by a loop": (
        "from time import time\nfor T in (1, time() * VALUE): pass\ndef f(c): return T",
        "",
    ),
    "made by a function that is called": (
        "from time import time\ndef g():\n  global T\n  T = time() * VALUE\ng()\n"
        "def f(c): return T",
        "",
    ),
    "made from a constant": (
        "from time import time\nfrom leans_on import W\nT = time() * W\ndef f(c): return T",
        "W = VALUE",
    ),
    "default made at run time": (
        "from time import time\ndef f(c, t=time() * VALUE): return t",
        "",
    ),
    "default that is a constant": ("W = VALUE\ndef f(c, *, t=W): return t", ""),
    "constant": ("W = -VALUE * 60\ndef f(c): return W", ""),
    "constant elsewhere": ("from leans_on import W as V\ndef f(c): return V", "W = VALUE"),
    "constant, star": ("from leans_on import *\ndef f(c): return W", "W: float = VALUE"),
    "constant in a package": ("from leans_in.between import g\ndef f(c): return g", "g = VALUE"),
    "default changed by a helper": (
        "def f(c, k=1.0): return k\ndef g(h): h.__defaults__ = (VALUE,)\ng(f)",
        "",
    ),
    # Names that the code uses and the module does not hold, now or here.
    "not set yet": ("def g():\n  global M\n  M = VALUE\ndef f(c): return M", ""),
    "not installed": (
        "try:\n  import leans_absent\n  HAS = 0\nexcept ImportError: HAS = VALUE\n"
        "def f(c): return c if HAS else leans_absent",
        "",
    ),
    "for annotations": (
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING: from decimal import Decimal\ndef f(c: Decimal, k=[VALUE]): return k",
        "",
    ),
    "under a condition": (
        "if not __name__: from decimal import Decimal\ndef f(c): return c and Decimal(VALUE)",
        "",
    ),
    "with, deleted": (
        "from contextlib import nullcontext\nwith nullcontext(VALUE) as h: T = [h]\ndel h\n"
        "def f(c): return T",
        "",
    ),
    "loop, deleted": (
        "T = {}\nfor i in (1, VALUE): T[i] = i\ndel i\ndef f(c): return T",
        "",
    ),
    "deleted itself": ("K = [VALUE]\ndef f(c, k=K): return k\nkept = [f]\ndel K", ""),
    "builtin with underscores": ("def f(c): return __import__('json').dumps(VALUE)", ""),
    "annotated class of a function": (
        "def f(c):\n  class J:\n    x: int = VALUE\n  return J",
        "",
    ),
    # What is made or changed in two places.
    "counted on": (
        "W = VALUE\ndef step():\n  global W\n  W *= 0.9\n"
        "def f(c):\n  global W\n  W += 1\n  step()\n  return W",
        "",
    ),
    "made by an argument": (
        "from time import time\ndef g(v):\n  global T\n  T = time() * v\n"
        "if 1: g(VALUE)\ndef f(c): return T",
        "",
    ),
    "made by an argument of a class": (
        "class J:\n  def __init__(self, v):\n    global T\n    T = [v]\nJ(VALUE)\n"
        "def f(c): return T",
        "",
    ),
    "attribute of a function": ("def f(c): return f.w\nf.w = VALUE", ""),
    "attribute of a helper": (
        "from leans_on import g\ndef f(c): return g.w",
        "def g(): pass\ng.w = VALUE",
    ),
    "attribute put on a helper": (
        "from leans_on import g\ng.w = VALUE\ndef f(c): return g.w",
        "def g(): pass",
    ),
    "single dispatch": (
        "import functools\n@functools.singledispatch\ndef f(c): return 0\n"
        "@f.register\ndef _(c: str): return VALUE",
        "",
    ),
    "single dispatch, called": (
        "from leans_on import g\ndef f(c): return g(c)",
        "import functools\n@functools.singledispatch\ndef g(c): return 0\n"
        "@g.register(str)\ndef _(c): return VALUE",
    ),
    "passed on": ("import heapq\nw = [1]\nheapq.heappush(w, VALUE)\ndef f(c): return w", ""),
    "passed on by keyword": (
        "def g(to, x): to.append(x)\nw = []\ng(x=VALUE, to=w)\ndef f(c): return w",
        "",
    ),
    "registered": (
        "w = {}\ndef reg(name):\n  def keep(g):\n    w[name] = g\n    return g\n"
        "  return keep\n@reg('a')\ndef a(c): return VALUE\ndef f(c): return w['a'](c)",
        "",
    ),
    "explicit, then star": (
        "w = [1]\nfrom leans_on import *\ndef f(c): return w",
        "w = [VALUE]",
    ),
    "folder without init": (
        "import leans_bare.part\ndef f(c): return leans_bare.part.g(c)",
        "def g(c): return VALUE",
    ),
    "named tuple": (
        "import collections\nP = collections.namedtuple('P', 'a b', defaults=(VALUE,))\n"
        "def f(c): return P(c).b",
        "",
    ),
    # Lines, as Python counts them and as str.splitlines does.
    "below form feeds": ("\f\n\f\n\fw = [VALUE]\na = b = 0\nd = 1\ndef f(c): return w", ""),
    "below other ends of lines": (
        "t = '\u2028 \x1c \x0b \x85'\nw = [VALUE]\na = 0\nb = 0\nd = 1\ndef f(c): return w",
        "",
    ),
    "put there": ("globals()['P'] = VALUE\ndef f(c): return P", ""),
    "put there from outside": (
        "import sys\nsetattr(sys.modules[__name__], 'Q', VALUE)\ndef f(c): return Q",
        "",
    ),
}

# Ways in which a value reaches what a class does: its body, and what makes `K`, which is [VALUE].
IN_CLASSES = {
    "attribute": "class f:\n  w = K",
    "part of an attribute": "class f:\n  w = {'a': K}",
    "called in the body": "def mk(): return K\nclass f:\n  w = mk()",
    "pattern": "import re\nclass f:\n  w = re.compile(str(K))",
    "default of a method": "class f:\n  def __call__(self, c, w=K): return w",
    "default of a static method": "class f:\n  @staticmethod\n  def g(c, w=K): return w",
    "field": "from dataclasses import dataclass\n@dataclass\nclass f:\n  w: tuple = tuple(K)",
    "factory of a field": (
        "from dataclasses import dataclass, field\ndef mk(): return K\n@dataclass\n"
        "class f:\n  w: list = field(default_factory=mk)"
    ),
    "decorator": "def put(c):\n  c.w = K\n  return c\n@put\nclass f: pass",
    "metaclass": "class M(type):\n  def w(cls): return K\nclass f(metaclass=M): pass",
    "descriptor": (
        "class D:\n  def __init__(self, w): self.w = w\n  def __get__(self, o, t): return self.w\n"
        "class f:\n  w = D(K)"
    ),
    "setter": (
        "def h(v): return K\nclass f:\n  @property\n  def w(self): return 1\n"
        "  @w.setter\n  def w(self, v): self.v = h(v)"
    ),
    "table of functions": "def h(): return K\nclass f:\n  w = {'a': h}",
    "set below": "class f: pass\nf.w = K",
    "set by setattr": "class f: pass\nsetattr(f, 'w', K)",
    "method set below": "class f: pass\nf.g = lambda self: K",
    "inner": "class O:\n  class I:\n    w = K\nf = O.I",
    "in a function": "def mk():\n  class I: w = K\n  return I\nf = mk()",
    "by an argument": "def mk(v):\n  class I: w = v\n  return I\nf = mk(sum(K))",
    "instance": "class J:\n  w = K\n  def __call__(self, c): return self.w\nf = J()",
    "named by a function": "class J:\n  w = K\nj = J()\ndef f(c): return j.w",
}
LEANING |= {f"class: {how}": (f"K = [VALUE]\n{code}", "") for how, code in IN_CLASSES.items()}
LEANING |= {
    f"class elsewhere: {how}": (f"from leans_on import K\n{code}", "K = [VALUE]")
    for how, code in list(IN_CLASSES.items())[::4]
}


def write_leaning(folder: Path, kind: str, value: str) -> None:
    for name in [n for n in sys.modules if n.startswith("leans_")]:
        del sys.modules[name]
    reward, helper = (text.replace("VALUE", value) for text in LEANING[kind])
    (folder / "leans_in").mkdir(exist_ok=True)
    (folder / "leans_bare").mkdir(exist_ok=True)
    (folder / "leans_bare/part.py").write_text(helper)
    (folder / "leans_in/__init__.py").write_text("")
    (folder / "leans_in/between.py").write_text("from . import part\nfrom .part import g")
    (folder / "leans_in/part.py").write_text(helper)
    (folder / "leans_on.py").write_text(helper)
    (folder / "leans_here.py").write_text(reward, encoding="utf-8")
    importlib.invalidate_caches()


@pytest.mark.parametrize("kind", LEANING)
def test_an_edit_of_whatever_code_leans_on_is_noticed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    told = []
    for value in ("2", "2", "8"):
        write_leaning(tmp_path, kind, value)
        module = importlib.import_module("leans_here")
        told.append(identity(module.f))
        if "inside" in kind:  # before it runs and after
            assert not {"leans_on", "leans_in"} & set(sys.modules)
            module.f("")
            assert identity(module.f) == told[-1]
    assert told[0] == told[1] != told[2]


def test_another_process_tells_the_same_of_what_code_leans_on(tmp_path: Path) -> None:
    code = (
        "import sys, functools\nfrom pathlib import Path\nfrom tests.test_identity import *\n"
        f"folder = Path({str(tmp_path)!r})\nsys.path.insert(0, str(folder))\n"
        "sys.dont_write_bytecode = True\n"
        "for kind in LEANING:\n"
        "    write_leaning(folder, kind, '2')\n"
        "    print(identity(importlib.import_module('leans_here').f))\n"
    )
    first, second = told_by_processes(code)
    assert first == second and len(set(first.split())) == len(LEANING)


def test_what_changes_while_code_runs_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "runs_on.py").write_text(
        "import functools, random, time\nseen = {}\nclass J:\n  calls, at = 0, time.time()\n"
        "  def g(self, at=time.time()):\n    self.calls += 1\n    J.calls = f.calls = 1\n"
        "j, dice = J(), random.Random()\n"
        "@functools.cache\ndef h(c): return c\n"
        "calls = own = 0\ndef count():\n  global calls\n  calls += 1\n"
        "def f(c, known=[]):\n  global own\n  own += 1\n"
        "  seen[c] = dice.random()\n  j.g()\n  count()\n"
        "  known.append(calls)\n  return h(c), __file__\n"
        "f.calls = 0\nseen.update(at=time.time())\n"
        "def kept(g):\n  cache, began = {}, time.time()\n  @functools.wraps(g)\n"
        "  def h(*c):\n    nonlocal began\n    began += 1\n    cache[began] = c\n"
        "    return g(*c)\n  return h\n"
        "@kept\ndef decorated(c): return c\n"
        "class K:\n  @kept\n  def g(self, c): return c\n"
    )
    module = importlib.import_module("runs_on")
    others = [identity(module.decorated), identity(module.K)]
    module.decorated("a")
    module.K().g("a")
    assert [identity(module.decorated), identity(module.K)] == others
    before = identity(module.f)
    module.f("a")
    module.__file__ = "moved"
    assert identity(module.f) == before and module.own == module.j.calls == module.calls == 1


def test_another_process_tells_the_same() -> None:
    code = (
        "from tests.test_identity import *\n"
        "words = {'a', 'b', 'c', 'd', frozenset({'x', 'y', 'z'})}\n"
        "print(identity([enclosing(1.0), Inner(1.0), words, np.arange(3), Path('x')]))"
    )
    first, second = told_by_processes(code)
    assert first == second != ""


def told_by_processes(code: str) -> list[str]:
    return [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PATH": "", "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
