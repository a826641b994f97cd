"""The code reward gives every program its due, and no program outlives or escapes its verdict."""

import ast
import asyncio
import contextlib
import functools
import gzip
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.rewards import sandbox
from zoo.rewards._asserts import CannotSplit, Rejected, evaluate, literal, split_assert, unroll
from zoo.rewards._plain import Malformed, TooLarge, decode, same
from zoo.rewards.code import (
    CodeReward,
    extract_code,
    run_asserts,
    run_check,
    run_many,
    run_stdio,
    run_tests,
)
from zoo.rewards.sandbox import Limits, SandboxError, isolation_report, run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

ADD = "def add(a, b):\n    return a + b\n"
# 1 + 2 = 3; −5 + 5 = 0; 10⁹ + 1.
TESTS = [
    {"call": "add(1, 2)", "expected": "3"},
    {"call": "add(-5, 5)", "expected": "0"},
    {"call": "add(10**9, 1)", "expected": "1000000001"},
]


@functools.cache
def isolated() -> bool:
    return isolation_report()[0].active


@functools.cache
def works(backend: str) -> bool:
    return len(isolation_report(backend)) > 1


def processes_with(marker: str) -> list[int]:
    """Pids whose command line holds the marker, zombies and this process left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


# ------------------------------------------------------------------ verdicts


def test_right_code_scores_one_and_wrong_code_zero():
    assert run_tests(ADD, TESTS).score == 1.0
    verdict = run_tests(ADD.replace("+", "-"), TESTS)
    assert (verdict.score, verdict.reason, verdict.passed) == (0.0, "wrong", (False, False, False))


def test_fraction_counts_tests_that_passed():
    # a - b equals a + b only where b = 0: of these, one in two.
    tests = [{"call": "add(4, 0)", "expected": "4"}, {"call": "add(4, 1)", "expected": "5"}]
    verdict = run_tests(ADD.replace("+", "-"), tests)
    assert (verdict.score, verdict.fraction) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("returned", "expected", "score"),
    [
        ("3", "3", 1),
        ("3.0", "3", 0),
        ("True", "1", 0),
        ("1", "True", 0),
        ("'3'", "3", 0),
        ("[1, 2]", "(1, 2)", 0),
        ("(1, 2)", "(1, 2)", 1),
        ("[1, (2.0, None)]", "[1, (2.0, None)]", 1),
        ("[1, (2, None)]", "[1, (2.0, None)]", 0),
        ("{1: 'a', 'b': [2]}", "{'b': [2], 1: 'a'}", 1),
        ("{1, 2, 3}", "{3, 2, 1}", 1),
        ("{True}", "{1}", 0),
        ("frozenset({1})", "{1}", 0),
        ("set()", "set()", 1),
        ("{}", "set()", 0),
        ("float('nan')", "float('nan')", 1),
        ("float('-inf')", "float('inf')", 0),
        ("1j", "1j", 1),
        ("b'\\x00'", "b'\\x00'", 1),
        ("'\\ud800\\n\\x00é'", "'\\ud800\\n\\x00é'", 1),
        ("10**5000", "10**5000", 1),
        ("10**5000 + 1", "10**5000", 0),
        ("__import__('collections').Counter('aab')", "{'a': 2, 'b': 1}", 1),
        ("__import__('collections').OrderedDict(a=1)", "{'a': 1}", 1),
        ("__import__('collections').namedtuple('P', 'x y')(1, 2)", "(1, 2)", 1),
        ("object()", "None", 0),
        ("(i for i in [1])", "[1]", 0),
    ],
)
def test_values_are_compared_by_type_and_value(returned, expected, score):
    code = f"def f():\n    return {returned}\n"
    assert run_tests(code, [{"call": "f()", "expected": expected}]).score == score


REASONS = [
    ("raises", "def add(a, b):\n    raise ValueError('no')", "error"),
    ("missing name", "def plus(a, b):\n    return a + b", "error"),
    ("syntax", "def add(a, b:\n", "syntax"),
    ("null byte", "x = 1\0\n" + ADD, "syntax"),
    ("empty", "", "error"),
    ("forever", "while True: pass", "timeout"),
    ("asleep", "import time; time.sleep(1e6)", "timeout"),
    ("memory", "x = bytearray(1 << 33)", "memory"),
    ("segfault", "import ctypes\ndef add(a, b): return ctypes.string_at(0)", "crashed"),
    ("exit", "import os; os._exit(0)", "exited"),
    ("system exit", "raise SystemExit(0)", "exited"),
    ("prints", "while True: print('x' * 10000)", "output_limit"),
    ("stderr", "import sys\nwhile True: sys.stderr.write('x' * 10000)", "output_limit"),
    ("large value", "def add(a, b): return 'x' * 10**8", "not_plain"),
    ("own object", "class A: pass\ndef add(a, b): return A()", "not_plain"),
    ("cycle", "def add(a, b):\n    x = []\n    x.append(x)\n    return x", "not_plain"),
    ("exponential value", "x = []\nfor _ in range(60): x = [x, x]\ndef add(a, b): return x", None),
]


@pytest.mark.parametrize(("name", "code", "reason"), REASONS, ids=[r[0] for r in REASONS])
def test_each_failure_has_its_reason(name, code, reason):
    if name == "null byte" and sys.version_info >= (3, 12):
        reason = "syntax"
    verdict = run_tests(code, TESTS, timeout=1.0)
    assert verdict.score == 0.0
    if name == "null byte":
        assert verdict.reason in ("syntax", "error")  # ValueError before Python 3.12
    elif reason:
        assert verdict.reason == reason, verdict


# ------------------------------------------------------------------ cheats: none may score

CHEATS = {
    "universal equality": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
def add(a, b): return Any()
""",
    "int subclass": """
class I(int):
    def __eq__(self, other): return True
    def __repr__(self): return '3'
    __index__ = __int__ = lambda self: 3
    __hash__ = int.__hash__
def add(a, b): return I(0)
""",
    "lying class": """
class I:
    __class__ = int
    def __repr__(self): return '3'
def add(a, b): return I()
""",
    "lying metaclass": """
class M(type):
    def __eq__(cls, other): return True
    __hash__ = type.__hash__
    __name__ = 'int'
class I(metaclass=M): pass
def add(a, b): return I()
""",
    "lying dict": """
import collections
class D(collections.Counter):
    def __eq__(self, other): return True
    def items(self): return [('a', 1)]
def add(a, b): return D()
""",
    "patched builtins": """
import builtins
builtins.repr = lambda x: '3'
builtins.type = lambda x: int
builtins.len = lambda x: 0
builtins.str = builtins.compile = builtins.eval = lambda *a, **k: '3'
def add(a, b): return 0
""",
    "patched modules": """
import json, sys, os
for m in list(sys.modules.values()):
    for n in ('dumps', 'write', 'quote', 'encode_basestring_ascii', 'equal'):
        try: setattr(m, n, lambda *a, **k: '3')
        except Exception: pass
def add(a, b): return 0
""",
    "forged protocol": """
import os
def add(a, b): return 0
for fd in range(3, 64):
    for text in (b'0 {"v":3}', b'{"v":3}', b'done 0', b'ready'):
        try: os.write(fd, text + bytes([10]))
        except OSError: pass
""",
    "forged protocol without an end of line": """
import os
def add(a, b): return a + b
for fd in range(3, 64):
    try: os.write(fd, b'x')
    except OSError: pass
""",
    "forged protocol with the nonce": """
import gc, os, re, sys
def add(a, b): return 0
nonces = set()
f = sys._getframe()
while f:
    for v in f.f_locals.values():
        if isinstance(v, dict) and 'nonce' in v: nonces.add(v['nonce'])
        if isinstance(v, str) and re.fullmatch('[0-9a-f]{32}', v): nonces.add(v)
    f = f.f_back
for n in nonces:
    for fd in range(3, 64):
        try: os.write(fd, (n + ' done 0' + chr(10)).encode())
        except OSError: pass
os._exit(0)
""",
    "claims to be a broken sandbox": """
import os, sys, re
f = sys._getframe()
while f:
    for v in f.f_locals.values():
        if isinstance(v, str) and re.fullmatch('[0-9a-f]{32}', v):
            for fd in range(3, 64):
                try: os.write(fd, (v + ' setup failed no' + chr(10)).encode())
                except OSError: pass
    f = f.f_back
os._exit(97)
""",
    "exit status of the memory watch": "import os; os._exit(98)",
    "exit in a call": "def add(a, b): raise SystemExit(0)",
    "atexit": """
import atexit, os
atexit.register(os._exit, 0)
def add(a, b): raise KeyboardInterrupt
""",
    "closes descriptors": ADD + "import os; os.closerange(0, 4096)",
    "replaces descriptors": ADD
    + """
import os
for fd in range(3, 64):
    try: os.dup2(1, fd)
    except OSError: pass
""",
    "redefines in a later call": """
calls = 0
def add(a, b):
    global calls
    calls += 1
    return a + b if calls > 1 else None
""",
    "trace function": """
import sys
def trace(frame, event, arg):
    if event == 'line':
        try: frame.f_lineno += 1
        except Exception: pass
    return trace
sys.settrace(trace)
def add(a, b): return 0
""",
    "looks for the expected values": """
import gc, os, re, sys
seen = [str(o) for o in gc.get_objects()] + sys.argv + list(os.environ.values())
for fd in range(0, 64):
    try: seen.append(os.pread(fd, 1 << 20, 0).decode('utf-8', 'replace'))
    except OSError: pass
for p in ('cmdline', 'environ', 'maps'):
    for who in ('self', '1', str(os.getppid())):
        try: seen.append(open('/proc/%s/%s' % (who, p)).read())
        except OSError: pass
nine = 9
found = str(10 ** nine + 1) in ''.join(seen)
def add(a, b): return a + b if found else None
""",
    "answers None": "def add(a, b): pass",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_earn_nothing(name):
    verdict = run_tests(CHEATS[name], TESTS, timeout=3.0)
    assert verdict.score == 0.0, verdict


def test_output_on_every_stream_does_not_disturb_a_right_answer():
    code = (
        "import sys\ndef add(a, b):\n    print('3'); print('3', file=sys.stderr)\n    return a + b"
    )
    assert run_tests(code, TESTS).score == 1.0


def test_source_text_is_taken_as_an_editor_leaves_it():
    for code in ("\ufeff" + ADD, ADD.replace("\n", "\r\n"), "\f" + ADD, "# coding: rot13\n" + ADD):
        assert run_tests(code, TESTS).score == 1.0, repr(code)
    tests = [{"stdin": "", "stdout": "3\r\n\r\n"}]
    assert run_stdio("\ufeffprint(3, end='  \\n')", tests).score == 1.0


@pytest.mark.parametrize("raised", ["ValueError('\\ud800\\x1b[31m\\0')", "KeyError('\\udcff')"])
def test_what_a_program_says_can_be_written_anywhere(raised):
    detail = run_tests(f"def add(a, b): raise {raised}", TESTS).detail
    detail.encode()
    assert detail.isprintable()


def test_main_guard_and_dataclasses_work():
    code = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int\n"
        "def add(a, b):\n    return P(a).x + b\n"
        "if __name__ == '__main__':\n    print(input())\n"
    )
    assert run_tests(code, TESTS).score == 1.0


# ------------------------------------------------------------------ isolation

ESCAPES = {
    "writes outside": """
import os
def add(a, b):
    library = os.path.dirname(os.__file__)
    for d in ('/', '/usr', '/etc', '/home', '/root', '/var/tmp', '/opt', library):
        try:
            with open(d + '/zoo_test_escape', 'w'): return None
        except OSError: pass
    return a + b
""",
    "network": """
import socket
def add(a, b):
    for family, kind, address in (
        (socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', PORT)),
        (socket.AF_INET, socket.SOCK_DGRAM, ('127.0.0.1', PORT)),
        (socket.AF_UNIX, socket.SOCK_STREAM, chr(0) + 'zoo_test_PORT'),
    ):
        s = socket.socket(family, kind)
        s.settimeout(1)
        try:
            s.connect(address)
            s.send(b'leak')
            return None
        except OSError: pass
    return a + b
""",
    "environment": """
import os
def add(a, b): return None if os.environ else a + b
""",
    "secrets of the caller": """
import glob
def add(a, b):
    for p in glob.glob('/proc/[0-9]*/environ'):
        try:
            if b'ZOO_TEST_SECRET' in open(p, 'rb').read(): return None
        except OSError: pass
    return a + b
""",
    "another process's memory": """
import os
def add(a, b):
    for pid in (1, os.getppid()):
        try:
            with open('/proc/%d/mem' % pid, 'r+b'): return None
        except OSError: pass
    return a + b
""",
    "ptrace": """
import ctypes, os
def add(a, b):
    return None if ctypes.CDLL(None).ptrace(16, os.getppid() or 1, 0, 0) == 0 else a + b
""",
    "user namespace": """
import ctypes
def add(a, b): return None if ctypes.CDLL(None).unshare(0x10000000) == 0 else a + b
""",
    "memory of the kernel": """
import ctypes, os
libc = ctypes.CDLL(None)
made = [libc.shmget(0, 4096, 0o1600), libc.msgget(0, 0o1600), libc.semget(0, 9, 0o1600)]
made += [libc.memfd_create(b'x', 0)]
import socket
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
    try: socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, option, 1 << 20)
    except OSError: made.append(-1)
    else: made.append(0)
socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
def add(a, b): return a + b if set(made) == {-1} else None
""",
    "privileges": """
import os
def add(a, b):
    device = lambda: os.mknod('x', 0o60600, 2049)
    for call in (lambda: os.setuid(0), lambda: os.chroot('.'), device):
        try: call()
        except OSError: continue
        if os.getuid() == 0: return None
    return a + b
""",
    "limits of others": """
import os, resource
def add(a, b):
    for pid in {1, os.getppid() or 1} - {os.getpid()}:
        try: resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))
        except OSError: continue
        return None
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    return a + b
""",
    "signals to others": """
import os, signal
def add(a, b):
    for pid in (os.getppid(), 1):
        if pid > 0:
            try: os.kill(pid, signal.SIGKILL)
            except OSError: pass
    return a + b
""",
    "fork bomb within limits": """
import os
def add(a, b):
    made = 0
    try:
        for _ in range(500):
            if os.fork() == 0:
                import time; time.sleep(60); os._exit(0)
            made += 1
    except OSError: pass
    return a + b if made < 100 else None
""",
}


@pytest.fixture
def listener():
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen(4)
        port = tcp.getsockname()[1]
        unix.bind(f"\0zoo_test_{port}")
        unix.listen(4)
        yield port


@pytest.mark.parametrize("name", ESCAPES)
def test_escapes_are_refused(name, listener, monkeypatch):
    if not isolated():
        pytest.skip("no namespaces on this machine")
    monkeypatch.setenv("ZOO_TEST_SECRET", "4711")
    verdict = run_tests(ESCAPES[name].replace("PORT", str(listener)), TESTS, timeout=10.0)
    assert verdict.score == 1.0, verdict


def test_fork_bomb_and_kill_everything_end_with_the_verdict():
    if not isolated():
        pytest.skip("no PID namespace on this machine")
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    everything = "import os\nos.kill(-1, 9)\n" + ADD
    started = time.monotonic()
    assert run_tests(bomb, TESTS, timeout=1.0).score == 0.0
    run_tests(everything, TESTS, timeout=1.0)
    assert time.monotonic() - started < 30


def test_memory_of_all_processes_together_is_bounded():
    if not isolated():
        pytest.skip("no PID namespace on this machine")
    # 16 processes of 64 MiB are 1 GiB, past the 256 MiB of the limit, though each alone is within
    # it.
    code = (
        "import os, time\nfor _ in range(16):\n    if os.fork() == 0:\n"
        "        x = b'x' * (64 << 20)\n        time.sleep(60)\ntime.sleep(60)\n"
    )
    verdict = run_tests(code, TESTS, timeout=30.0, limits=Limits(memory_bytes=256 << 20))
    assert (verdict.score, verdict.reason) == (0.0, "memory")


def test_buffers_of_sockets_count_as_memory():
    if not isolated():
        pytest.skip("no PID namespace on this machine")
    # 250 descriptors take a table of 256, of which 192 count for 212,992 bytes each: 40.9 MB for a
    # process, and 58 of them more than the limit of 1 GiB. One alone is within it.
    code = (
        "import os, time\nfor _ in range(COUNT):\n    if os.fork() == 0: break\n"
        "for _ in range(240): os.dup(0)\nif COUNT: time.sleep(60)\n" + ADD
    )
    many = run_tests(code.replace("COUNT", "57"), TESTS, timeout=30.0)
    assert (many.score, many.reason) == (0.0, "memory")
    assert run_tests(code.replace("COUNT", "0"), TESTS, timeout=30.0).score == 1.0


def test_files_share_one_quota():
    if not isolated():
        pytest.skip("no tmpfs of its own on this machine")
    code = """
import os
def fill():
    written = 0
    try:
        for i in range(1000):
            for d in ('.', '/tmp', '/dev/shm'):
                try:
                    with open('%s/f%d' % (d, i), 'wb') as f: written += f.write(bytes(1 << 20))
                except PermissionError: pass
    except OSError: pass
    return written
"""
    limits = Limits(disk_bytes=8 << 20)
    outcome = run_program(code, [("eval", "fill()")], timeout=10, limits=limits)
    written = decode(outcome.messages[0][1])["v"]
    assert 0 < written <= 8 << 20


@pytest.mark.parametrize("backend", sandbox.BACKENDS)
def test_nothing_outlives_a_verdict(backend, tmp_path, monkeypatch):
    if not works(backend):
        pytest.skip(f"{backend} does not work on this machine")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o711)
    for parent in tmp_path.parents:
        if backend == "uid" and not parent.stat().st_mode & 1:
            monkeypatch.setattr("tempfile.tempdir", None)
    marker = f"zoo_test_marker_{backend}_{os.getpid()}"
    # A daemon in a session of its own, deaf to SIGTERM, with closed descriptors; a deep tree of
    # files that nobody may read.
    code = f"""
import os, signal, sys, threading, time
threading.Thread(target=time.sleep, args=(1e6,)).start()
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.closerange(0, 256)
        command = 'import time; time.sleep(60) # {marker}'
        os.execv(sys.executable, [sys.executable, '-S', '-c', command])
    os._exit(0)
here = os.getcwd()
for i in range(50):
    os.mkdir('d'); os.chdir('d')
    if i % 20 == 0: open('f', 'w').close()
os.chdir(here); os.symlink('/usr', 'link'); os.mkfifo('fifo'); os.chmod('d', 0)
time.sleep(0.2)
def add(a, b): return a + b
"""
    descriptors = sorted(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    children = set(psutil.Process().children(recursive=True))
    verdict = run_tests(code, TESTS, timeout=5.0, backend=backend)
    assert verdict.score is not None
    assert processes_with(marker) == []
    assert sorted(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []
    assert set(psutil.Process().children(recursive=True)) == children


@pytest.mark.parametrize("backend", sandbox.BACKENDS)
def test_every_backend_gives_the_same_verdicts(backend):
    if not works(backend):
        pytest.skip(f"{backend} does not work on this machine")
    for code, score in (
        (ADD, 1.0),
        (ADD.replace("+", "-"), 0.0),
        (CHEATS["universal equality"], 0.0),
        (CHEATS["forged protocol"], 0.0),
        (ESCAPES["environment"], 1.0),
        (ESCAPES["signals to others"], 1.0),
        (ESCAPES["user namespace"], 1.0),
        ("while True: pass", 0.0),
    ):
        verdict = run_tests(code, TESTS, timeout=1.0, backend=backend)
        assert (verdict.score, verdict.backend) == (score, backend), verdict


def test_directories_past_every_limit_are_removed():
    # 1,100 levels are past Python's recursion limit, 300 · 15 characters past the longest path
    # (4,096).
    top = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    fds = [os.open(top, os.O_RDONLY)]
    for i in range(1100):
        name = "a-longer-name--" if i < 300 else "d"
        os.mkdir(name, dir_fd=fds[-1])
        fds.append(os.open(name, os.O_RDONLY, dir_fd=fds[-1]))
        os.close(fds.pop(0))
    os.close(os.open("file", os.O_CREAT, dir_fd=fds[-1]))
    os.symlink(os.getcwd(), "link", dir_fd=fds[-1])
    os.close(fds.pop())
    for i in range(50):
        os.makedirs(f"{top}/wide{i}/inner")
        os.chmod(f"{top}/wide{i}", 0)
    sandbox._remove_tree(top)
    assert not os.path.lexists(top)
    assert os.path.isdir(os.getcwd())


def test_programs_die_with_their_caller():
    marker = f"zoo_test_orphan_{os.getpid()}"
    code = (
        "import os, sys, time\n"
        f"if os.fork() == 0: os.execv(sys.executable, [sys.executable, '-S', '-c', "
        f"'import time; time.sleep(60) # {marker}'])\ntime.sleep(60)\n"
    )
    script = f"from zoo.rewards.code import run_tests\nrun_tests({code!r}, {TESTS!r}, timeout=60)"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    # The script comes by standard input: on the command line it would hold the marker.
    caller = subprocess.Popen([sys.executable, "-"], stdin=subprocess.PIPE, env=env)
    assert caller.stdin
    caller.stdin.write(script.encode())
    caller.stdin.close()
    end = time.monotonic() + 15
    while not processes_with(marker) and time.monotonic() < end:
        time.sleep(0.05)
    assert processes_with(marker)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    end = time.monotonic() + 5
    while processes_with(marker) and time.monotonic() < end:
        time.sleep(0.05)
    assert processes_with(marker) == []


def test_strict_refuses_without_isolation(monkeypatch):
    monkeypatch.setattr(sandbox, "_broken", {"namespaces": "forbidden", "bubblewrap": "absent"})
    with pytest.raises(SandboxError, match="namespaces: forbidden"):
        run_tests(ADD, TESTS, strict=True)
    assert run_tests(ADD, TESTS).score == 1.0


@pytest.mark.parametrize(
    ("maps", "spare"),
    [
        # The machine's own root: every id but the last.
        ([[range(2**32 - 1)], [range(2**32 - 1)]], range(2**30, 2**30 + 2**28)),
        # A container of 65,536 ids: the upper half, without nobody (65,534).
        ([[range(2**16)], [range(2**16)]], range(2**15, 65_534)),
        # Groups end before users: what both have is [1, 20,001), its middle 10,001.
        ([[range(1), range(1, 2**16)], [range(1), range(1, 20_001)]], range(10_001, 20_001)),
        # Root alone, and no group for any other user: nothing to spare.
        ([[range(1)], [range(1)]], None),
        ([[range(2**16)], [range(1)]], None),
    ],
)
def test_ids_for_programs_are_those_that_the_user_namespace_maps(maps, spare, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sandbox, "_mapped_ids", lambda kind: maps[kind == "gid"])
    assert sandbox._spare_ids.__wrapped__() == spare


def test_root_of_a_container_without_privileges_isolates_all_the_same():
    container = ["unshare", "-Ur"]
    try:
        subprocess.run([*container, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no user namespaces here")
    script = (
        "from zoo.rewards.code import run_tests\n"
        f"print(run_tests({ADD!r}, {TESTS!r}, strict=True).score)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [*container, sys.executable, "-c", script]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.stdout == "1.0\n", run.stderr


def test_a_lost_layer_warns(monkeypatch):
    monkeypatch.setattr(sandbox, "_broken", {})
    monkeypatch.setattr(sandbox, "_working", set())
    real = sandbox._attempt

    def attempt(backend, *rest):
        if backend == "namespaces":
            return sandbox.Outcome("unsupported", detail="forbidden here", backend=backend)
        return real(backend, *rest)

    monkeypatch.setattr(sandbox, "_attempt", attempt)
    with pytest.warns(RuntimeWarning) as record:
        assert run_tests(ADD, TESTS).score == 1.0
    assert "namespaces isolation does not work here (forbidden here)" in str(record[0].message)


def test_a_sandbox_that_cannot_start_abstains(monkeypatch):
    failed = sandbox.Outcome("failed", detail="no processes left")
    monkeypatch.setattr(sandbox, "_attempt", lambda *rest: failed)
    verdict = run_tests(ADD, TESTS)
    assert (verdict.score, verdict.reason) == (None, "sandbox")


def test_a_layer_that_worked_is_not_given_up_for_a_moment_without_resources(monkeypatch):
    assert run_tests(ADD, TESTS, strict=isolated()).score == 1.0
    broken, real, failures = dict(sandbox._broken), sandbox._attempt, [1, 1]

    def attempt(*arguments):
        if failures:
            failures.pop()
            return sandbox.Outcome("unsupported", detail="No space left on device")
        return real(*arguments)

    monkeypatch.setattr(sandbox, "PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr(sandbox, "_attempt", attempt)
    assert run_tests(ADD, TESTS, strict=isolated()).score == 1.0
    # One that stays away is an abstention, not a verdict from a weaker layer.
    failures += [1] * 100
    verdict = run_tests(ADD, TESTS, strict=isolated())
    assert (verdict.score, verdict.reason) == (None, "sandbox")
    assert "No space left" in verdict.detail
    assert sandbox._broken == broken


def test_a_caller_out_of_descriptors_gets_an_abstention_and_loses_none(monkeypatch):
    monkeypatch.setattr(sandbox, "PAUSES", (0.0,))
    monkeypatch.setattr(os, "pipe", lambda: os.open("/does/not/exist", os.O_RDONLY))
    descriptors = sorted(os.listdir("/proc/self/fd"))
    assert run_tests(ADD, TESTS).score is None
    assert sorted(os.listdir("/proc/self/fd")) == descriptors


def test_report_names_every_layer():
    layers = {layer.name: layer for layer in isolation_report()}
    for name in ("own session", "kill and reap", "output cap", "empty environment", "rlimits"):
        assert layers[name].active, layers[name]
    if isolated():
        for name in ("PID namespace", "no network", "read-only system", "no privileges"):
            assert layers[name].active, layers[name]


# ------------------------------------------------------------------ where it is called from


def test_same_verdicts_from_threads_and_event_loop():
    jobs = [(ADD, 1.0), (ADD.replace("+", "*"), 0.0), ("import os; os._exit(0)", 0.0)] * 3
    verdicts = run_many([functools.partial(run_tests, code, TESTS) for code, _ in jobs], workers=4)
    assert [v.score for v in verdicts] == [score for _, score in jobs]

    async def gather():
        calls = [asyncio.to_thread(run_tests, code, TESTS) for code, _ in jobs]
        return await asyncio.gather(*calls)

    assert [v.score for v in asyncio.run(gather())] == [score for _, score in jobs]


CALLERS = {
    # Numbers past 1,024, which select cannot take.
    "many open files": """
import resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
files = [os.open('/dev/null', os.O_RDONLY) for _ in range(1100)]
""",
    # The kernel then reaps children itself, and hands their exit statuses to nobody.
    "ignores its children": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "reaps all children": """
def reap():
    while True:
        try: os.waitpid(-1, os.WNOHANG)
        except ChildProcessError: pass
        time.sleep(0.0005)
threading.Thread(target=reap, daemon=True).start()
""",
    "blocks signals": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
    # A child forked between the making of the pipes and their closing holds every end of them.
    "forks meanwhile": """
class Popen(subprocess.Popen):
    def __init__(self, *a, **k):
        if os.fork() == 0:
            for fd in (0, 1, 2, out): os.close(fd)
            time.sleep(10)
            os._exit(0)
        super().__init__(*a, **k)
subprocess.Popen = Popen
""",
    "has no standard streams": "os.close(0)",
}


@pytest.mark.parametrize("name", CALLERS)
def test_verdicts_do_not_depend_on_the_state_of_the_caller(name):
    script = f"""
import os, signal, subprocess, sys, threading, time
from zoo.rewards.code import run_stdio, run_tests
out = os.dup(1)
{CALLERS[name]}
started = time.monotonic()
test = [{{"stdin": "", "stdout": "3"}}]
strict = {isolated()}
late = "import signal, time; signal.signal(signal.SIGALRM, lambda *a: print(3)); signal.alarm(1)"
verdicts = [
    run_tests("def f(): return 3", [{{"call": "f()", "expected": "3"}}], strict=strict),
    run_stdio("print(3)", test, strict=strict),
    run_stdio("print(3); raise SystemExit(1)", test, strict=strict),
    run_stdio("print(3, flush=True); import os; os.abort()", test, strict=strict),
    run_stdio(late + "; time.sleep(1.5)", test, strict=strict),
]
seconds = time.monotonic() - started
os.write(out, repr(([v.score for v in verdicts], seconds < 9)).encode())
os._exit(0)
"""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    run = subprocess.run([sys.executable, "-"], input=script.encode(), env=env, capture_output=True)
    assert run.stdout.decode() == "([1.0, 1.0, 0.0, 0.0, 1.0], True)", run.stderr.decode()


def test_a_hanging_program_takes_nobody_elses_time():
    # Ten programs hang for all of their second; 30 others in the same pool of threads are right,
    # and their own time begins when they do.
    hang, right = "while True: pass", "import time\ntime.sleep(0.2)\n" + ADD
    codes = [hang if i % 4 == 0 else right for i in range(40)]
    jobs = [functools.partial(run_tests, code, TESTS, timeout=1.0) for code in codes]
    started = time.monotonic()
    verdicts = run_many(jobs, workers=4)
    assert [v.reason for v in verdicts] == ["timeout" if c is hang else "passed" for c in codes]
    # Ten times 1 s and 30 times 0.2 s on four threads are 4 s; the rest is a loaded machine's.
    assert time.monotonic() - started < 30


def test_tests_that_cannot_be_used_are_errors_of_the_data():
    for test in ({"call": "f()"}, {"call": "f()", "expected": 3}, "f() == 3"):
        with pytest.raises(ValueError, match=r"got tests\[0\]"):
            run_tests(ADD, [test])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="tests must be"):
        run_tests(ADD, {"call": "f()", "expected": "3"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="asserts must be a list"):
        run_asserts(ADD, "assert add(1, 2) == 3")
    with pytest.raises(TypeError, match="code must be a str"):
        run_tests(None, TESTS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without tests"):
        run_tests(ADD, [])
    with pytest.raises(ValueError, match="not plain data"):
        run_tests(ADD, [{"call": "add(1, 2)", "expected": "unknown"}])
    with pytest.raises(ValueError, match="not a Python expression"):
        run_tests(ADD, [{"call": "add(1,", "expected": "3"}])
    with pytest.raises(ValueError, match="positive seconds"):
        run_tests(ADD, TESTS, timeout=math.inf)
    with pytest.raises(ValueError, match="check"):
        run_check(ADD, "x = 1", "add")
    with pytest.raises(ValueError, match="no tests for code"):
        CodeReward().verdict("x = 1", {"question": "?"})


# ------------------------------------------------------------------ plain data

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(), inner)
    ),
    max_leaves=20,
)


@functools.cache
def load_encoder(limit=1 << 20):
    path = Path(sandbox.CHILD)
    names: dict = {"__name__": "child"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names["make_encoder"](limit)[0]


@settings(max_examples=200, deadline=None)
@given(plain)
def test_encoding_keeps_type_and_value(value):
    assert same(decode(load_encoder()(value)), value)


@settings(max_examples=200, deadline=None)
@given(st.text() | st.binary().map(lambda b: b.decode("latin-1")))
def test_decoding_any_text_is_a_value_or_malformed(text):
    with contextlib.suppress(Malformed):
        decode(text)


payloads = st.text(max_size=30) | st.sampled_from(
    ['{"v":3}', '{"v":0}', '{"v":1000000001}', '{"v":{"t":[]}}', '{"e":["ValueError","x"]}', "0"]
)
messages = st.lists(
    st.tuples(st.sampled_from(["0", "1", "2", "3", "load", "done", ""]), payloads), max_size=6
)


@settings(max_examples=300, deadline=None)
@given(messages, st.sampled_from(["done", "exited", "timeout", "memory", "forged"]))
def test_whatever_a_program_sends_is_judged_and_only_the_right_values_score(sent, status):
    outcome = sandbox.Outcome(status, tuple(sent), exit_status=0)
    right = [("0", '{"v":3}'), ("1", '{"v":0}'), ("2", '{"v":1000000001}'), ("done", "0")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zoo.rewards.code.run_program", lambda *a, **k: outcome)
        verdict = run_tests(ADD, TESTS)
        assert verdict.score == float(status == "done" and sent == right)
        outcome = sandbox.Outcome("done", tuple(right))
        assert run_tests(ADD, TESTS).score == 1.0


@pytest.mark.parametrize(
    "payload",
    [
        "",
        "nonsense",
        '{"t":3}',
        '{"x":[]}',
        '{"t":[],"s":[]}',
        '{"d":[[1]]}',
        '{"s":[[]]}',
        '{"i":3}',
        '{"i":"zz"}',
        '{"b":"0"}',
        '{"c":[1]}',
        '{"r":[1,2,0]}',
        '{"c":["x","y"]}',
        "[" * 100_000,
        '{"t":[' * 50_000,
        "9" * 100_000,
    ],
)
def test_malformed_results_are_refused(payload):
    with pytest.raises(Malformed):
        decode(payload)


PRIME = (1 << 61) - 1  # integers hash to themselves modulo this


def test_colliding_elements_do_not_hang_the_caller(monkeypatch):
    monkeypatch.setattr("zoo.rewards._plain.HASHING_SECONDS", 0.3)
    # These 100,000 all hash to 0, and a set of them would take 10¹⁰ comparisons.
    text = ",".join('{"i":"' + hex(PRIME * i) + '"}' for i in range(1, 100_001))
    started = time.thread_time()
    pairs = ",".join(f"[{i},0]" for i in text.split(","))
    for tag, body in (('{"s":[%s]}', text), ('{"z":[%s]}', text), ('{"d":[%s]}', pairs)):
        with pytest.raises(TooLarge, match="too long to build"):
            decode(tag % body)
    # The same numbers in a list, of which the assertion makes a set here.
    values = decode(f"[{text}]")
    for source in ("set(_0) == {1}", "frozenset(_0) == {1}", "dict([(i, 1) for i in _0]) == {}"):
        with pytest.raises(Rejected, match=r"too long to build|turns"):
            evaluate(ast.parse(source, mode="eval").body, {"_0": values})
    assert time.thread_time() - started < 8


def test_sets_of_sets_that_collide_do_not_hang_the_caller(monkeypatch):
    monkeypatch.setattr("zoo.rewards._plain.HASHING_SECONDS", 0.3)
    # 200 sets that differ in their last element alone, all with one hash: 20,000 pairs, and each
    # comparison of two of them makes some 61²/2 of their elements.
    inner = [
        '{"z":[' + ",".join('{"i":"' + hex(PRIME * j) + '"}' for j in [*range(60), 99 + i]) + "]}"
        for i in range(200)
    ]
    started = time.thread_time()
    with pytest.raises(TooLarge, match="too long to build"):
        decode('{"s":[' + ",".join(inner) + "]}")
    assert time.thread_time() - started < 4


def test_elements_that_share_hashes_by_nature_are_no_offence():
    # hash(−1) = hash(−2), so a grid of points holds many pairs and eights that collide.
    grid = {(x, y, z) for x in range(-5, 5) for y in range(-5, 5) for z in range(-5, 5)}
    assert same(decode(load_encoder()(grid)), grid)
    many = set(random.Random(0).sample(range(10**9), 100_000))
    assert same(decode(load_encoder()(many)), many)


@pytest.mark.parametrize(
    "payload",
    [
        "[" + "[]," * (5 << 20) + "0]",
        "[" + '{"q":[]},' * 1_500_000 + "0]",
        "[" + '{"s":[]},' * 1_500_000 + "0]",
    ],
    ids=["lists", "deques", "sets"],
)
def test_values_whose_parts_outweigh_their_text_are_refused(payload):
    before = psutil.Process().memory_info().rss
    with pytest.raises(TooLarge):
        decode(payload)
    assert psutil.Process().memory_info().rss - before < 400 << 20


def test_same_tells_types_apart():
    assert same(deque([1]), deque([1]))
    assert not same(deque([1]), [1])
    assert not same({1: 1.0}, {1: 1})
    assert not same({1: 0}, {True: 0})
    assert same([math.nan], [math.nan])
    assert same({math.nan, 1}, {1, math.nan})
    assert not same({math.nan, float("nan")}, {math.nan, 1})
    assert same({1: [{2: {3}}]}, {1: [{2: {3}}]})
    assert not same({1: [{2: {3}}]}, {1: [{2: {3.0}}]})
    assert same(complex(math.nan, 1), complex(math.nan, 1))
    assert same(0.0, -0.0)


def test_a_value_is_read_no_further_than_it_agrees():
    # 200 levels of the same list twice are 2²⁰⁰ leaves.
    value: list = []
    for _ in range(200):
        value = [value, value]
    assert not same([1, value], [2, value])
    assert not same([value, 1], [[], 1])


# ------------------------------------------------------------------ assertions taken apart


@pytest.mark.parametrize(
    ("source", "calls", "template"),
    [
        ("f(1) == 2", ["f(1)"], "_0 == 2"),
        ("not f(1)", ["f(1)"], "not _0"),
        ("abs(f(2.5) - 0.5) < 1e-6", ["f(2.5)"], "abs(_0 - 0.5) < 1e-06"),
        ("math.isclose(f(1), 0.1, rel_tol=0.01)", ["f(1)"], "math.isclose(_0, 0.1, rel_tol=0.01)"),
        ("set(f([1])) == {1}", ["f([1])"], "set(_0) == {1}"),
        ("f(g(1))[0] is None", ["f(g(1))"], "_0[0] is None"),
        ("f(1).lower() == 'a'", ["f(1).lower()"], "_0 == 'a'"),
        ("sum(1, 2) == 3", ["sum(1, 2)"], "_0 == 3"),
        ("f(math.pi) == math.pi", ["f(math.pi)"], "_0 == math.pi"),
        ("type(f(1)) is list", ["f(1)"], "type(_0) is list"),
        ("len(f()) == 2 and f() == 'ab'", ["f()", "f()"], "len(_0) == 2 and _1 == 'ab'"),
    ],
)
def test_only_the_call_is_sent(source, calls, template):
    check = split_assert(ast.parse(source, mode="eval").body)
    assert list(check.calls) == calls
    assert ast.unparse(check.template) == template
    assert not check.cheatable


@pytest.mark.parametrize(
    "source",
    [
        "f(1) == g(1)",  # both sides are made by the code
        "all(f(i) == i for i in range(3))",
        "(lambda x: x == 1)(f(1))",
        "sum(f(i) for i in range(3)) == 3",
        "abs(f(1) - g(1)) < 1e-6",
        "math.isclose(f(1), g(1))",
    ],
)
def test_what_the_code_itself_decides_is_marked_cheatable(source):
    assert split_assert(ast.parse(source, mode="eval").body).cheatable
    code = "import math\ndef f(x):\n    return x\ng = f"
    verdict = run_asserts(code, [f"assert {source}"])
    assert (verdict.score, verdict.cheatable) == (1.0, 1)


@pytest.mark.parametrize(
    "source",
    [
        "1 + 2 * 3 - 4 / 8 // 1 % 5 ** 2",
        "[1, 2, 3][::-1] + [0][:1]",
        "not (1 < 2 <= 2 != 3) or 5 in (5, 6)",
        "{1: 'a', 2: {3, 4}}[2] | {5} & {5} ^ {6}",
        "sorted([3, 1, 2], reverse=True)",
        "round(3.14159, 2) if abs(-1) == 1 else 0",
        "max(1, 5, 3) + min([4, 2]) + len('abc') + sum(range(5))",
        "isinstance(3, int) and math.isclose(0.1 + 0.2, 0.3)",
        "[i ** 2 for i in range(5) if i % 2 != 0 and i > 0]",
        "-2 ** 2 + ~1 << 3 >> 1",
        "'ab' * 2 + str(12)",
        "type([]) is list and type(1) == int and type(True) is not int",
    ],
)
def test_the_small_interpreter_agrees_with_python(source):
    assert evaluate(ast.parse(source, mode="eval").body, {}) == eval(source, {"math": math})


@pytest.mark.parametrize(
    "source",
    [
        "9 ** 9 ** 9",
        "1 << 10 ** 9",
        "'x' * 10 ** 9",
        "[0] * 10 ** 9",
        "'%999999999d' % 1",
        "list(range(10**9))",
        "1 / 0",
        "[][0]",
        "1 < 'a'",
        "math.sqrt(-1)",
        "sorted([1, 'a'])",
        "bytes(10 ** 9)",
        "sum([[1]] * 10000, [])",
    ],
)
def test_the_small_interpreter_is_bounded(source):
    with pytest.raises(Rejected):
        evaluate(ast.parse(source, mode="eval").body, {})


@pytest.mark.parametrize("source", ["open('x')", "().__class__", "x", "lambda: 1", "f'{1}'", "(1"])
def test_expected_values_are_literals(source):
    with pytest.raises(ValueError, match="not plain data"):
        literal(source)


def test_loops_over_known_values_are_unrolled():
    body = "total = 1 + 1\nfor i in range(2, 4):\n    assert f(i, total) == str(i)"
    checks = unroll(ast.parse(body).body)
    assert [c.calls for c in checks] == [("f(2, 2)",), ("f(3, 2)",)]
    with pytest.raises(CannotSplit):
        unroll(ast.parse("for i in range(10 ** 6):\n    assert f(i)").body)
    with pytest.raises(CannotSplit):
        unroll(ast.parse("x = f(1)\nassert x == 1").body)


def test_assertions_compare_as_python_does():
    # The data sets' own rule: 4 == 4.0 holds in an assertion, though the types differ.
    assert run_asserts("def f(x):\n    return x * 2.0", ["assert f(2) == 4"]).score == 1.0
    assert run_asserts("def f(x):\n    return [x]", ["assert f(2) == (2,)"]).score == 0.0
    assert run_asserts("def f(x):\n    return x", ["assert f(2) < 'a'"]).reason == "wrong"


@pytest.mark.parametrize(
    ("body", "source", "score"),
    [
        ("yield from range(n)", "list(f(3)) == [0, 1, 2]", 1),
        ("yield from range(n)", "list(f(3)) == [0, 1]", 0),
        ("yield from range(n)", "sum(f(4)) == 6 and max(f(4)) == 3 and len(list(f(4))) == 4", 1),
        ("return dict.fromkeys(range(n)).keys()", "sorted(f(3), reverse=True) == [2, 1, 0]", 1),
        ("return map(str, range(n))", "set(f(2)) == {'0', '1'}", 1),
        ("return zip(range(n), 'ab')", "dict(f(2)) == {0: 'a', 1: 'b'}", 1),
        ("return [1, 2]", "tuple(f(2)) == (1, 2)", 1),
        ("yield from range(n)", "f(3) == [0, 1, 2]", 0),
        ("while True: yield 1", "list(f(3)) == [0, 1, 2]", 0),
        ("return object()", "list(f(3)) == [0, 1, 2]", 0),
    ],
)
def test_of_an_iterator_the_items_are_compared_where_the_assertion_asks_for_them(
    body, source, score
):
    verdict = run_asserts(f"def f(n):\n    {body}", [f"assert {source}"], timeout=1.0)
    assert (verdict.score, verdict.cheatable) == (score, 0)


def test_setup_code_runs_after_the_code_and_before_the_calls():
    code = "class Node:\n    def __init__(self, v): self.v = v\ndef get(n): return n.v"
    assert run_asserts(code, ["assert get(root) == 7"], "root = Node(7)").score == 1.0
    verdict = run_asserts(code, ["assert get(root) == 7"], "root = Missing(7)")
    assert (verdict.score, verdict.reason, verdict.passed) == (0.0, "error", (False,))


def test_check_functions_are_taken_apart():
    test = "METADATA = {}\ndef check(candidate):\n    assert candidate(2) == 4, 'no'\n"
    verdict = run_check("def square(x):\n    return x * x", test, "square")
    assert (verdict.score, verdict.cheatable) == (1.0, 0)
    assert run_check("def square(x):\n    return x + x + 1", test, "square").score == 0.0


def test_check_functions_that_cannot_be_split_run_beside_the_code():
    test = (
        "def check(candidate):\n    import random\n    x = random.random()\n"
        "    assert candidate(x) == x * x\n"
    )
    verdict = run_check("def square(x):\n    return x * x", test, "square")
    assert (verdict.score, verdict.cheatable) == (1.0, 1)
    verdict = run_check("def square(x):\n    return x", test, "square")
    assert (verdict.score, verdict.reason) == (0.0, "wrong")


# ------------------------------------------------------------------ standard input to output


def test_scripts_are_judged_by_what_they_print():
    tests = [{"stdin": "3\n4\n", "stdout": "7\n"}, {"stdin": "-1\n1\n", "stdout": "0"}]
    good = "a = int(input())\nb = int(input())\nif __name__ == '__main__':\n    print(a + b, ' ')"
    assert run_stdio(good, tests).score == 1.0
    verdict = run_stdio(good.replace("+", "-"), tests)
    assert (verdict.score, verdict.reason, verdict.passed) == (0.0, "wrong", (False, False))
    # 3 · 4 = 12 but −1 · 1 = −1: neither; −1 − 1 is wrong, a² − b² = 0 right for the second only.
    half = "a = int(input())\nb = int(input())\nprint(a * a - b * b)"
    assert run_stdio(half, tests, every=True).passed == (False, True)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print(7); raise ValueError", "error"),
        ("print(7); import sys; sys.exit(1)", "error"),
        ("print(7); exit(1)", "error"),
        ("print(7); import os; os.kill(os.getpid(), 9)", "crashed"),
        ("print(7", "syntax"),
        ("while True: print('7' * 1000)", "output_limit"),
        ("print(7, flush=True)\nwhile True: pass", "timeout"),
    ],
)
def test_scripts_that_fail_after_the_right_output_score_zero(code, reason):
    verdict = run_stdio(code, [{"stdin": "", "stdout": "7"}], timeout=1.0)
    assert (verdict.score, verdict.reason) == (0.0, reason)


@pytest.mark.parametrize(
    "code",
    [
        "import sys; print(7); sys.exit(0)",
        "print(7); exit()",
        "print(7)\nif True: quit(0)",
        "import atexit; atexit.register(print, 7)",
        "import threading; threading.Timer(0.1, lambda: print(7)).start()",
        "import sys; sys.stdout.write('7')",
        "import os; os.write(1, b'7'); os._exit(0)",
        "def main():\n    return print(7)\nmain()",
        "import os\nprint(7, flush=True)\nif os.fork() == 0:\n    import time; time.sleep(60)",
    ],
)
def test_scripts_end_as_python_ends_them(code):
    assert run_stdio(code, [{"stdin": "", "stdout": "7"}], timeout=5.0).score == 1.0


def test_a_scripts_error_is_shown_as_python_shows_it():
    verdict = run_stdio("def f():\n    1 / 0\n\nf()", [{"stdin": "", "stdout": ""}])
    assert verdict.detail.startswith("Traceback (most recent call last):\n")
    frames = [line for line in verdict.detail.splitlines() if "File" in line]
    assert frames == [
        '  File "solution.py", line 4, in <module>',
        '  File "solution.py", line 2, in f',
    ]
    assert verdict.detail.endswith("ZeroDivisionError: division by zero")
    broken = run_stdio("print(1", [{"stdin": "", "stdout": ""}]).detail
    assert broken.startswith('File "solution.py", line 1')


def test_large_input_and_output_pass_through():
    numbers = "\n".join(str(i) for i in range(100_000))
    tests = [{"stdin": numbers, "stdout": numbers}]
    assert run_stdio("import sys; sys.stdout.write(sys.stdin.read())", tests).score == 1.0


# ------------------------------------------------------------------ rows and completions


def test_code_is_taken_from_the_last_closed_fence():
    text = "First:\n```python\nx = 1\n```\nBetter:\n```py\nx = 2\n```\nDone."
    assert extract_code(text) == "x = 2\n"
    assert extract_code("```python\nx = 3\n") == "x = 3\n"
    assert extract_code("x = 4") == "x = 4"
    assert extract_code("") == ""


def test_reward_takes_the_kind_of_test_from_the_row():
    body = "    return a + b\n"
    check = "def check(candidate):\n    assert candidate(1, 2) == 3"
    prompt = "def add(a, b):\n    '''Sum.'''\n"
    rows = [
        {"test_list": ["assert add(1, 2) == 3"], "test_setup_code": ""},
        {"test": check, "entry_point": "add", "prompt": prompt},
        {"test": check, "entry_point": "add", "prompt": prompt},
        {"tests": TESTS},
        {"tests": [{"stdin": "1 2", "stdout": "3"}]},
        {"tests": TESTS},
    ]
    completions = [
        f"```python\n{ADD}```",
        body,
        f"Here:\n```python\n{ADD}```",
        ADD,
        "print(sum(map(int, input().split())))",
        "```python\n```",
    ]
    verdicts = CodeReward(timeout=5.0, workers=2).verdicts(completions, rows)
    assert [v.score for v in verdicts] == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    assert verdicts[-1].reason == "no_code"


# ------------------------------------------------------------------ shared data


def test_shared_programs_have_their_expected_outcome(shared):
    path = shared / "data/code/hostile.jsonl"
    cases = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    cases = [c for c in cases if isolated() or not (c["dangerous"] or c["needs"])]
    jobs = [functools.partial(run_tests, c["code"], c["tests"], timeout=2.0) for c in cases]
    verdicts = run_many(jobs, workers=4)
    wrong = [
        (case["name"], verdict)
        for case, verdict in zip(cases, verdicts, strict=True)
        if case["expected"] is not None and verdict.score != case["expected"]
    ]
    assert wrong == []
    for case in cases:
        assert not case["marker"] or processes_with(case["marker"]) == []
        for made in case["must_not_exist"]:
            assert made.startswith("@") or not os.path.lexists(os.path.expanduser(made))


def test_reference_solutions_score_one_and_without_their_value_zero(shared):
    def without_value(code, name):
        return f"{code}\n_right = {name}\ndef {name}(*a, **k):\n    _right(*a, **k)\n"

    lines = (shared / "data/code/mbpp.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][::24]
    jobs = []
    for row in rows:
        name = ast.parse(row["test_list"][0]).body[0].test.left
        name = next(
            c.func.id for c in ast.walk(name) if isinstance(c, ast.Call) and c.func.id != "set"
        )
        for code in (row["code"], without_value(row["code"], name)):
            setup = row["test_setup_code"]
            jobs.append(functools.partial(run_asserts, code, row["test_list"], setup))
    with gzip.open(shared / "data/code/HumanEval.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file][::12]
    for row in rows:
        code = row["prompt"] + row["canonical_solution"]
        for program in (code, without_value(code, row["entry_point"])):
            jobs.append(functools.partial(run_check, program, row["test"], row["entry_point"]))
    scores = [v.score for v in run_many(jobs)]
    assert scores == [1.0, 0.0] * (len(jobs) // 2)
