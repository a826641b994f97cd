"""Run untrusted Python in a process that cannot reach the caller, the network or the disk.

A program passes through layers, the strongest this machine offers; `isolation_report` says which
hold, by running a program that tries. Linux only. Backends, best first:

    namespaces  mount, PID, network, IPC namespaces made by our own launcher: as root, or through a
                user namespace
    bubblewrap  the same through `bwrap`, where only it may make user namespaces
    uid         root without namespaces: an unprivileged uid of its own for every program
    bare        rlimits, seccomp, Landlock and reaping only

Waiting happens in the calling thread with poll and a monotonic deadline: no signal handler, no
helper thread, no `preexec_fn`. Every process is dead and reaped, and every descriptor and directory
gone, on return.
"""

import contextlib
import dataclasses
import fcntl
import functools
import marshal
import math
import os
import random
import secrets
import select
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from zoo.rewards._plain import decode

HERE = Path(__file__).resolve().parent
LAUNCHER, CHILD = HERE / "_launcher.py", HERE / "_child.py"
# Run through the loader and not as a script, so that the byte code is cached.
BOOTSTRAP = (
    "import sys;from _frozen_importlib_external import SourceFileLoader as L;"
    "exec(L('zoo_launcher',sys.argv[1]).get_code('zoo_launcher'),{'__name__':'__main__'})"
)
BACKENDS = ("namespaces", "bubblewrap", "uid", "bare")
ISOLATED = ("namespaces", "bubblewrap")
MEMORY_EXIT = 98  # exit status of a program killed for the memory of all its processes together
STARTUP_SECONDS = 10.0  # for interpreter and namespaces on a loaded machine; not the program's time


class SandboxError(RuntimeError):
    """Untrusted code cannot be run here as asked: no backend, or none that isolates."""


@dataclass(frozen=True)
class Limits:
    """What one program may use; the defaults fit MBPP, HumanEval and contest problems."""

    memory_bytes: int = 1 << 30  # address space of a process, and memory of all together
    output_bytes: int = 8 << 20  # standard output and error; past it the program is killed
    result_bytes: int = 16 << 20  # one returned value, and all of them together
    file_bytes: int = 32 << 20  # one file
    disk_bytes: int = 64 << 20  # all files, where the working directory is a tmpfs
    disk_files: int = 8192  # number of files, likewise
    processes: int = 64  # processes and threads
    open_files: int = 256  # descriptors of one process

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not int or value < 1:
                raise ValueError(f"Limits.{name} must be a positive integer, got {value!r}.")


@dataclass(frozen=True)
class Layer:
    """One layer of isolation, as found by trying it on this machine."""

    name: str
    active: bool
    detail: str


@dataclass(frozen=True)
class Outcome:
    """How a program ended, and what it said; all of it untrusted text."""

    status: str  # done, exited, timeout, output_limit, result_limit, memory, forged, failed
    messages: tuple[tuple[str, str], ...] = ()  # (index, payload) in order of arrival
    stdout: bytes = b""
    stderr: bytes = b""
    exit_status: int | None = None  # 128 + n for signal n; None where it was killed
    seconds: float = 0.0
    backend: str = ""
    detail: str = ""


@dataclass
class _Pipe:
    """The read end of a pipe and what came through it, up to a cap."""

    fd: int
    cap: int
    data: bytearray = field(default_factory=bytearray)

    def full(self) -> bool:
        return len(self.data) > self.cap


_lock = threading.Lock()
_broken: dict[str, str] = {}  # backend → why it does not work here, found on first use
_working: set[str] = set()  # backends that have worked here
PAUSES = (0.0, 0.3, 1.0)  # seconds before each try of a backend


def run_program(
    code: str,
    steps: list[tuple[str, str]] | None = None,
    *,
    stdin: str | None = None,
    timeout: float = 5.0,
    limits: Limits | None = None,
    strict: bool = False,
    backend: str | None = None,
) -> Outcome:
    """Run a program in the sandbox and return how it ended; never raises because of the program.

    Args:
        code: Python source, untrusted.
        steps: [(kind, source)], run after the code: kind "eval" is an expression whose value comes
            back as a message, "items" one of which a list of the items will do, "exec" is
            statements.
        stdin: text for standard input; with it, the program runs as a script.
        timeout: seconds of wall clock from the program's start.
        limits: memory, output, files, processes.
        strict: refuse to run without namespaces.
        backend: one of `BACKENDS`; None takes the best that works.
    Raises:
        SandboxError: strict and no isolation, or the named backend does not work here.
        ValueError: timeout not positive and finite, unknown backend.
        TypeError: code is no str.
    """
    if not isinstance(code, str):
        raise TypeError(f"code must be a str of Python source, got {type(code).__name__}.")
    if not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(f"timeout must be positive seconds, got {timeout!r}. Try timeout=5.")
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
    limits = limits or Limits()
    wanted = (backend,) if backend else ISOLATED if strict else BACKENDS
    outcome = Outcome("failed", detail="no backend was tried")
    for name in wanted:
        if name in _broken:
            continue
        for pause in PAUSES:
            time.sleep(pause)
            try:
                outcome = _attempt(name, code, steps or [], stdin, timeout, limits)
            except OSError as error:  # no descriptor, memory or process left for the pipes
                outcome = Outcome("failed", detail=str(error), backend=name)
            # A machine out of processes or namespaces for a moment is no reason to give up a layer
            # that has worked: better no verdict than one from a weaker layer.
            if outcome.status == "unsupported" and name in _working:
                outcome = dataclasses.replace(outcome, status="failed")
            if outcome.status != "failed":
                break
        if outcome.status != "unsupported":
            if outcome.status != "failed":
                _working.add(name)
            return outcome
        with _lock:
            _broken[name] = outcome.detail
        if name in ISOLATED and backend is None and not strict:
            warnings.warn(
                f"zoo.rewards.sandbox: {name} isolation does not work here ({outcome.detail}); the "
                "next is tried. `zoo doctor` lists the layers; strict=True refuses weaker ones.",
                RuntimeWarning,
                stacklevel=2,
            )
    why = "; ".join(f"{name}: {_broken[name]}" for name in wanted if name in _broken)
    raise SandboxError(
        f"untrusted code cannot be run {'in isolation ' if strict else ''}here ({why}). Allow user "
        "namespaces (sysctl kernel.unprivileged_userns_clone=1, or no AppArmor restriction on "
        "them), install bubblewrap, or pass strict=False to run with weaker layers."
    )


# ------------------------------------------------------------------ one attempt with one backend


def _attempt(
    backend: str,
    code: str,
    steps: list[tuple[str, str]],
    stdin: str | None,
    timeout: float,
    limits: Limits,
) -> Outcome:
    python = _interpreter(backend)
    if python is None:
        return Outcome("unsupported", detail=_unavailable(backend), backend=backend)
    owner = None
    if backend in ("namespaces", "uid") and (spare := _spare_ids()):
        # A uid of its own: RLIMIT_NPROC counts per uid, and programs cannot signal each other.
        uid = random.SystemRandom().choice(spare)
        owner = (uid, uid)
    nonce = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        directory = None
        if backend in ("uid", "bare"):
            directory = tempfile.mkdtemp(prefix="zoo_code_")
            directory = os.path.realpath(directory)
            stack.callback(_remove_tree, directory)
            if owner:
                os.chown(directory, *owner)
        job = vars(limits) | {
            "backend": backend,
            "nonce": nonce,
            # Exact strings, which marshal insists on; an editor's byte order mark is not code.
            "code": str(code).removeprefix("\ufeff"),
            "steps": [(kind, str(source)) for kind, source in steps],
            "script": stdin is not None,
            "cpu_seconds": math.ceil(timeout) + 1,
            "owner": owner,
            "own_root": backend in ISOLATED,
            "cwd": directory or "/tmp/work",
            "trees": _trees(python),
            "memory_exit": MEMORY_EXIT,
        }
        job_fd = _memory_file(stack, marshal.dumps(job, 2))
        text = (stdin or "").encode("utf-8", "surrogatepass")
        stdin_fd = _memory_file(stack, text)
        pipes = {}
        ends = {}
        given = stack.enter_context(contextlib.ExitStack())  # the program's ends
        for name, cap in (("result", limits.result_bytes + 65536), ("out", 0), ("err", 0)):
            read, ends[name] = _pipe(stack, given)
            pipes[name] = _Pipe(read, cap or limits.output_bytes)
        control_read, control = _pipe(given, stack)
        flags = ["-I", "-S", "-X", "utf8", "-c", BOOTSTRAP]
        numbers = [str(job_fd), str(ends["result"]), str(control_read)]
        command = [
            *_wrapper(backend, python, limits),
            python,
            *flags,
            str(LAUNCHER),
            str(CHILD),
            *numbers,
        ]
        started = time.monotonic()
        try:
            process = subprocess.Popen(
                command,
                stdin=stdin_fd,
                stdout=ends["out"],
                stderr=ends["err"],
                env={},
                cwd="/",
                pass_fds=(job_fd, ends["result"], control_read),
                start_new_session=True,
            )
        except OSError as error:
            return Outcome("failed", detail=f"cannot start {python}: {error}", backend=backend)
        given.close()
        try:
            status, began, deadline = _watch(pipes, process, nonce, timeout, stdin is not None)
            if status == "exited":
                # Its pipes are closed, but it may have closed them itself and go on.
                left = deadline - time.monotonic()
                status = "exited" if _ends_within(process, max(left, 0.1)) else "timeout"
        finally:
            # The launcher kills and reaps everything, then exits. A byte, because a child that this
            # process forked meanwhile may hold a copy of the descriptor.
            with contextlib.suppress(BrokenPipeError):
                os.write(control, b"x")
            exit_status = _wait(process)
            ended = time.monotonic()
    return _outcome(status, ended - (began or started), pipes, nonce, exit_status, backend)


def _watch(
    pipes: dict[str, _Pipe], process: subprocess.Popen, nonce: str, timeout: float, script: bool
) -> tuple[str, float | None, float]:
    """Read until the program is done, ends, passes a cap or runs out of time.

    Returns the status, when the program began (None: never), and its deadline.
    """
    # The launcher's end, and not only that of the pipes: a child that this process forked meanwhile
    # may hold copies of their write ends.
    end = _end_of(process)
    try:
        return _read_until(pipes, end, nonce, timeout, script)
    finally:
        if end is not None:
            os.close(end)


def _read_until(
    pipes: dict[str, _Pipe], end: int | None, nonce: str, timeout: float, script: bool
) -> tuple[str, float | None, float]:
    ready, done = f"{nonce} ready\n".encode(), f"{nonce} done 0\n".encode()
    result = pipes["result"]
    began: float | None = None
    deadline = time.monotonic() + STARTUP_SECONDS
    poll = select.poll()
    by_fd = {pipe.fd: pipe for pipe in pipes.values()}
    for fd in by_fd:
        os.set_blocking(fd, False)
        poll.register(fd, select.POLLIN)
    if end is not None:
        poll.register(end, select.POLLIN)
    while by_fd:
        left = deadline - time.monotonic()
        if left <= 0:
            return ("timeout" if began else "failed"), began, deadline
        ready_fds = [fd for fd, _ in poll.poll(left * 1000 + 1)]
        # After the end nobody writes any more: read what is there, then stop.
        ended = end in ready_fds
        for fd in list(by_fd) if ended else ready_fds:
            pipe = by_fd[fd]
            try:
                chunk = os.read(fd, 1 << 16)
            except BlockingIOError:  # empty, though not at its end
                chunk = b""
            if not chunk:
                poll.unregister(fd)
                del by_fd[fd]
            pipe.data += chunk
            if pipe.full():
                return ("result_limit" if pipe is result else "output_limit"), began, deadline
        if began is None and result.data.startswith(ready):
            began = time.monotonic()
            deadline = began + timeout
        if not script and result.data.endswith(done):
            return "done", began, deadline
    return "exited", began, deadline


def _end_of(process: subprocess.Popen) -> int | None:
    """A descriptor that is ready to read once the process has ended, where the kernel has such."""
    if not hasattr(os, "pidfd_open") or process.returncode is not None:
        return None
    try:
        return os.pidfd_open(process.pid)
    except OSError:  # before Linux 5.3, or no descriptor left
        return None


def _ends_within(process: subprocess.Popen, seconds: float) -> bool:
    """Wait for the launcher without the growing pauses of Popen.wait, where the kernel lets us."""
    end = _end_of(process)
    if end is not None:
        poll = select.poll()
        poll.register(end, select.POLLIN)
        poll.poll(max(seconds, 0) * 1000)
        os.close(end)
        return process.poll() is not None
    try:
        process.wait(timeout=max(seconds, 0))
    except subprocess.TimeoutExpired:
        return False
    return True


def _wait(process: subprocess.Popen) -> int | None:
    """The launcher's exit status; it kills, reaps and ends within milliseconds."""
    if not _ends_within(process, STARTUP_SECONDS):
        # Only a stuck kernel leads here. The launcher's death kills init, and with it the
        # namespace.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
    return process.wait()


def _outcome(
    status: str,
    seconds: float,
    pipes: dict[str, _Pipe],
    nonce: str,
    exit_status: int | None,
    backend: str,
) -> Outcome:
    result = pipes["result"]
    lines = result.data.decode("ascii", "replace").split("\n")
    common = {
        "stdout": bytes(pipes["out"].data),
        "stderr": bytes(pipes["err"].data),
        "seconds": seconds,
        "backend": backend,
    }
    if lines[0] != f"{nonce} ready":
        # Nothing untrusted has run yet, so this text is our launcher's own.
        head, _, text = lines[0].partition(" setup ")
        kind, _, detail = text.partition(" ")
        if head != nonce:
            # A wrapper (bwrap) or an interpreter that cannot start here says so on standard error.
            kind = "unsupported" if status == "exited" else "failed"
            detail = (
                common["stderr"][-300:].decode("utf-8", "replace").strip()
                or f"{status} before start"
            )
        return Outcome(kind, detail=detail, **common)
    messages = []
    for line in lines[1:-1]:
        head, _, rest = line.partition(" ")
        index, _, payload = rest.partition(" ")
        if head != nonce or index == "ready":
            return Outcome("forged", detail="a line that the runner did not write", **common)
        messages.append((index, payload))
    if messages and messages[-1][0] == "exit":
        # The launcher's word: Popen knows the status only where nobody else waits for our children.
        last = messages.pop()[1]
        exit_status = int(last) if last.isdecimal() and len(last) < 4 else exit_status
        status = "done" if status == "exited" and messages[-1:] == [("done", "0")] else status
    if status == "exited":
        if exit_status == MEMORY_EXIT:
            status = "memory"
        elif lines[-1]:
            return Outcome("forged", detail="an unfinished line on the result pipe", **common)
    killed = status != "exited"
    return Outcome(status, tuple(messages), exit_status=None if killed else exit_status, **common)


# ------------------------------------------------------------------ interpreter and command


def _interpreter(backend: str) -> str | None:
    """The interpreter to start; None where the backend cannot work on this machine."""
    base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    if sys.platform != "linux":
        return None
    if backend == "bubblewrap" and shutil.which("bwrap") is None:
        return None
    if backend == "uid":
        if not _spare_ids():
            return None
        # The program imports as another uid: an interpreter below root's home cannot be read.
        system = os.path.realpath("/usr/bin/python3")
        return next((p for p in (base, system) if _world_readable(p)), None)
    return base


def _unavailable(backend: str) -> str:
    if sys.platform != "linux":
        return f"{sys.platform} is not Linux"
    return {
        "bubblewrap": "bwrap is not installed",
        "uid": "only root can change the uid, to one of its user namespace, and to an interpreter "
        "that others may read",
    }.get(backend, "not available")


@functools.lru_cache(maxsize=1)
def _spare_ids() -> range | None:
    """Ids for programs, of users and groups alike, that nobody else has; None where we have none.

    Root in a container without privileges owns only the ids that its user namespace maps.
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return None
    users, groups = _mapped_ids("uid"), _mapped_ids("gid")
    common = [range(max(u[0], g[0]), min(u[-1], g[-1]) + 1) for u in users for g in groups]
    largest = max(common, key=len, default=range(0))
    # Far above the ids of people and services; in a small map the upper half of it.
    high = range(max(largest.start, 1 << 30), min(largest.stop, (1 << 30) + (1 << 28)))
    if high:
        return high
    upper = range(largest.start + len(largest) // 2, min(largest.stop, 65_534))
    return upper if len(upper) >= 4096 else None


def _mapped_ids(kind: str) -> list[range]:
    try:
        lines = Path(f"/proc/self/{kind}_map").read_text().splitlines()
    except OSError:  # no /proc
        return [range(1 << 32)]
    rows = [[int(number) for number in line.split()] for line in lines]
    return [range(inside, inside + count) for inside, _, count in rows if count]


def _world_readable(path: str) -> bool:
    parents = [Path(path), *Path(path).parents]
    try:
        return all(p.stat().st_mode & stat.S_IXOTH for p in parents)
    except OSError:
        return False


@functools.lru_cache(maxsize=8)
def _trees(python: str) -> list[str]:
    """Directories that the interpreter needs, to be bound read-only."""
    trees = ["/nix"] if python.startswith("/nix/") else []
    base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    if python == base:
        trees += [sys.base_prefix, sys.base_exec_prefix]
        trees += [os.path.realpath(sys.base_prefix)]
    trees.append(os.path.dirname(os.path.dirname(python)))
    return [t for t in dict.fromkeys(trees) if t != "/" and os.path.isdir(t)]


def _wrapper(backend: str, python: str, limits: Limits) -> list[str]:
    """The command that goes before the interpreter's: bubblewrap's."""
    if backend != "bubblewrap":
        return []
    bwrap = shutil.which("bwrap") or "bwrap"
    command = [bwrap, "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    command += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink("/" + name):
            command += ["--symlink", os.readlink("/" + name), "/" + name]
        elif os.path.isdir("/" + name):
            command += ["--ro-bind", "/" + name, "/" + name]
    for tree in [*_trees(python), str(HERE)]:
        if not tree.startswith("/usr/"):
            command += ["--ro-bind", tree, tree]
    size = ["--size", str(limits.disk_bytes)] if _bwrap_has_size(bwrap) else []
    command += ["--proc", "/proc", "--dev", "/dev", *size, "--tmpfs", "/dev/shm"]
    # HERE may lie below /tmp, which a tmpfs there would hide: the work directory is its own mount,
    # and /tmp is a symbolic link's worth of room on the root.
    return [*command, *size, "--tmpfs", "/tmp/work", "--chdir", "/tmp/work", "--"]


@functools.lru_cache(maxsize=8)
def _bwrap_has_size(bwrap: str) -> bool:
    run = subprocess.run([bwrap, "--help"], capture_output=True, stdin=subprocess.DEVNULL)
    return b"--size" in run.stdout + run.stderr


# ------------------------------------------------------------------ files


def _pipe(read_stack: contextlib.ExitStack, write_stack: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe's read and write end, each closed with its stack."""
    read, write = map(_past_streams, os.pipe())
    read_stack.callback(os.close, read)
    write_stack.callback(os.close, write)
    return read, write


def _past_streams(fd: int) -> int:
    """The descriptor under a number above 2: below, the program's own streams would replace it."""
    if fd > 2:
        return fd
    higher = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return higher


def _memory_file(stack: contextlib.ExitStack, data: bytes) -> int:
    """A descriptor, at its start, of an unnamed file: written whole, so no pipe can block."""
    if hasattr(os, "memfd_create"):
        fd = _past_streams(os.memfd_create("zoo"))
        stack.callback(os.close, fd)
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 — closed with the stack
        fd = stack.enter_context(file).fileno()
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _remove_tree(path: str) -> None:
    """Remove a directory that an untrusted program filled, however deep, whatever its modes.

    Neither recursion nor long paths (shutil.rmtree fails on both past a thousand levels): one
    descriptor goes down into each directory and up again by `..`, which nobody moves any more.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    os.chmod(path, 0o700)
    here = os.open(path, flags)
    levels = [_empty_of_files(here)]  # names of the directories still to remove, for each level
    names: list[str] = []
    while levels:
        below = levels[-1].pop() if levels[-1] else None
        if below is not None:
            os.chmod(below, 0o700, dir_fd=here)
            inner = os.open(below, flags, dir_fd=here)
            names.append(below)
        else:
            levels.pop()
            if not names:
                break
            inner = os.open("..", flags, dir_fd=here)
        os.close(here)
        here = inner
        if below is not None:
            levels.append(_empty_of_files(here))
        else:
            os.rmdir(names.pop(), dir_fd=here)
    os.close(here)
    os.rmdir(path)


def _empty_of_files(fd: int) -> list[str]:
    """Unlink everything but directories; the names of those."""
    directories = []
    with os.scandir(fd) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=fd)
    return directories


# ------------------------------------------------------------------ what holds on this machine

_PROBE = """
import os, socket
def refused(action):
    try:
        action()
    except OSError:
        return True
    return False
def connect():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.connect(("192.0.2.1", 9))
def limits():
    import resource
    return {n: resource.getrlimit(getattr(resource, n))[0] for n in (
        "RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_CORE")}
def status():
    import ctypes
    libc = ctypes.CDLL(None)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    zero = ctypes.c_long(0)
    return {
        "capabilities": list(sets),
        "seccomp": libc.prctl(21, zero, zero, zero, zero),
        "no_new_privs": libc.prctl(39, zero, zero, zero, zero),
    }
def facts():
    try:
        names = os.listdir("/proc")
    except OSError:
        names = []
    try:
        interfaces = [n for _, n in socket.if_nameindex()]
    except OSError:
        interfaces = []
    return {
        "pids": sum(n.isdigit() for n in names),
        "pid": os.getpid(),
        "session": os.getsid(0) == os.getpid(),
        "uid": os.getuid(),
        **status(),
        "environment": len(os.environ),
        "interfaces": interfaces,
        "no_route": refused(connect),
        "usr_read_only": refused(lambda: open("/usr/zoo_probe", "x")),
        "prefix_read_only": refused(lambda: open(os.path.dirname(os.__file__) + "/zoo_probe", "x")),
        "hosts_hidden": all(refused(lambda: os.listdir(d)) for d in ("/home", "/var")),
        "disk": os.statvfs(".").f_blocks * os.statvfs(".").f_frsize,
        "no_namespaces": refused(lambda: unshare()),
        "limits": limits(),
        "cwd": os.getcwd(),
    }
def unshare():
    import ctypes
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000) == -1:
        raise OSError
"""


def isolation_report(backend: str | None = None) -> list[Layer]:
    """Which layers hold on this machine, each tried from inside; nothing is guessed from the
    platform.

    Args:
        backend: one of `BACKENDS`; None reports the best that works, which `run_program` uses.
    Returns:
        Layers; the first names the backend, and why better ones are not used.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            outcome = run_program(_PROBE, [("eval", "facts()")], timeout=10.0, backend=backend)
        except SandboxError as error:
            return [Layer("backend", False, str(error))]
    values = [decode(p)["v"] for i, p in outcome.messages if i == "0" and p.startswith('{"v"')]
    if not values:
        detail = outcome.detail or "; ".join(p for _, p in outcome.messages)
        return [
            Layer(
                "backend", False, f"{outcome.backend}: the probe failed: {outcome.status} {detail}"
            )
        ]
    facts = values[0]
    name = outcome.backend
    limits = facts["limits"]
    best = Limits()
    broken = "; ".join(f"{k}: {v}" for k, v in _broken.items())
    root_bound = (facts["uid"] != 0 and name != "bubblewrap") or os.geteuid() != 0
    shown = ", ".join(f"{k[7:]}={v}" for k, v in limits.items())
    alone = facts["pid"] <= 4 and name in ISOLATED
    return [
        Layer("backend", name in ISOLATED, name + (f" (not used: {broken})" if broken else "")),
        Layer("call by value", True, "expected values never enter the program's process"),
        Layer("own session", facts["session"], "signals to its group reach no one else"),
        Layer(
            "kill and reap", True, "PID namespace" if alone else "subreaper, until no child is left"
        ),
        Layer("output cap", True, f"killed past {best.output_bytes} bytes"),
        Layer("empty environment", facts["environment"] == 0, f"{facts['environment']} variables"),
        Layer("temporary directory", True, facts["cwd"]),
        Layer("python -I -S", True, _interpreter(name) or ""),
        Layer("rlimits", limits["RLIMIT_AS"] == best.memory_bytes, shown),
        Layer(
            "memory of all processes",
            name == "namespaces" and facts["pids"] > 0,
            f"killed past {best.memory_bytes} bytes together",
        ),
        Layer("process limit", root_bound, f"{limits['RLIMIT_NPROC']} processes and threads"),
        Layer(
            "no privileges",
            not any(facts["capabilities"]) and facts["no_new_privs"] == 1,
            f"uid {facts['uid']}, no capabilities",
        ),
        Layer(
            "seccomp",
            facts["seccomp"] == 2 and facts["no_namespaces"],
            "namespaces, mounts, ptrace, memfd refused",
        ),
        Layer("PID namespace", alone, f"{facts['pids']} processes visible"),
        Layer("no network", facts["no_route"], f"interfaces: {', '.join(facts['interfaces'])}"),
        Layer(
            "read-only system",
            facts["usr_read_only"] and facts["prefix_read_only"],
            "/usr and the interpreter",
        ),
        Layer("host files hidden", facts["hosts_hidden"], "/home and /var cannot be listed"),
        Layer("disk quota", facts["disk"] <= 2 * best.disk_bytes, f"{facts['disk']} bytes"),
    ]
