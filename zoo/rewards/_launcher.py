"""Start one untrusted program: namespaces, limits, privileges, reaping. Standard library only.

Never imported: `zoo.rewards.sandbox` runs it as `python -I -S`, in its own session and with an
empty environment. Three processes, of which only the last ever runs untrusted code:

    launcher   outside the namespaces; waits for the program's end or the caller's word, then kills
               and reaps
    init       process 1 of the PID namespace; its death takes every process in it along
    program    another uid or no capabilities, rlimits, seccomp; forked, so no second interpreter

Arguments: path of this file and of the child script, then the numbers of the job, result and
control descriptors. The job is a marshalled dict from the caller. The launcher kills everything
when it reads a byte, or the end, of the control pipe; a copy of the pipe in some other child of the
caller must not keep it waiting. Its last line on the result pipe is the program's exit status.
"""

import ctypes
import marshal
import os
import select
import sys
from _frozen_importlib_external import SourceFileLoader  # type: ignore[import-not-found]
from _signal import (  # type: ignore[import-not-found]
    SIG_BLOCK,
    SIG_DFL,
    SIG_SETMASK,
    SIGCHLD,
    SIGKILL,
    pthread_sigmask,
    signal,
    sigtimedwait,
)

MACHINE = os.uname().machine
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 24, 36, 38
CLONE_NEW = {
    "mnt": 0x20000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE, MS_RELATIME, MNT_DETACH = 16384, 1 << 18, 1 << 21, 2
SYS_MOUNT_SETATTR, SYS_LANDLOCK = 442, 444
# Numbers of system calls, per machine; from 424 on they are the same everywhere.
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS = {
    "x86_64": {
        "acct": 163,
        "add_key": 248,
        "bind": 49,
        "bpf": 321,
        "chroot": 161,
        "clone": 56,
        "connect": 42,
        "finit_module": 313,
        "init_module": 175,
        "kexec_load": 246,
        "keyctl": 250,
        "kill": 62,
        "memfd_create": 319,
        "msgget": 68,
        "mount": 165,
        "open_by_handle_at": 304,
        "perf_event_open": 298,
        "pivot_root": 155,
        "prlimit64": 302,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "ptrace": 101,
        "quotactl": 179,
        "reboot": 169,
        "request_key": 249,
        "rt_sigqueueinfo": 129,
        "rt_tgsigqueueinfo": 297,
        "semget": 64,
        "sendmmsg": 307,
        "sendmsg": 46,
        "sendto": 44,
        "setns": 308,
        "setsockopt": 54,
        "shmget": 29,
        "swapon": 167,
        "tgkill": 234,
        "tkill": 200,
        "umount2": 166,
        "unshare": 272,
        "userfaultfd": 323,
    },
    "aarch64": {
        "acct": 89,
        "add_key": 217,
        "bind": 200,
        "bpf": 280,
        "chroot": 51,
        "clone": 220,
        "connect": 203,
        "finit_module": 273,
        "init_module": 105,
        "kexec_load": 104,
        "keyctl": 219,
        "kill": 129,
        "memfd_create": 279,
        "msgget": 186,
        "mount": 40,
        "open_by_handle_at": 265,
        "perf_event_open": 241,
        "pivot_root": 41,
        "prlimit64": 261,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "ptrace": 117,
        "quotactl": 60,
        "reboot": 142,
        "request_key": 218,
        "rt_sigqueueinfo": 138,
        "rt_tgsigqueueinfo": 240,
        "semget": 190,
        "sendmmsg": 269,
        "sendmsg": 211,
        "sendto": 206,
        "setns": 268,
        "setsockopt": 208,
        "shmget": 194,
        "swapon": 224,
        "tgkill": 131,
        "tkill": 130,
        "umount2": 39,
        "unshare": 97,
        "userfaultfd": 282,
    },
}
SAME = {
    "clone3": 435,
    "fsmount": 432,
    "fsopen": 430,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "io_uring_setup": 425,
    "memfd_secret": 447,
    "mount_setattr": 442,
    "move_mount": 429,
    "open_tree": 428,
    "pidfd_send_signal": 424,
}
KILLS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
UNREACHABLE = ("connect", "bind", "sendmsg", "sendmmsg")
# Refused to every program: namespaces and mounts, other processes' memory, the kernel's own
# affairs, and memory that no rlimit counts (memfd, System V), some of which outlives its process.
REFUSED = (
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount"),
    *("fsopen", "fsmount", "mount_setattr", "open_by_handle_at"),
    *("ptrace", "process_vm_readv", "process_vm_writev"),
    *("keyctl", "add_key", "request_key", "bpf", "perf_event_open", "userfaultfd"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("init_module", "finit_module", "kexec_load", "swapon", "reboot", "acct", "quotactl"),
    *("memfd_create", "memfd_secret", "shmget", "msgget", "semget"),
)
SOCKET_BYTES = 212_992  # of a socket's buffer, by default
libc = ctypes.CDLL(None, use_errno=True)


def libc_call(name, *arguments):
    """Call into the C library; integers are passed as longs, as prctl and syscall expect."""
    converted = [ctypes.c_long(a) if type(a) is int else a for a in arguments]
    function = getattr(libc, name)
    function.restype = ctypes.c_long if name == "syscall" else ctypes.c_int
    result = function(*converted)
    if result == -1:
        code = ctypes.get_errno()
        shown = " ".join(str(a) for a in arguments[:3])
        raise OSError(code, f"{name}({shown}): {os.strerror(code)}")
    return result


def write_file(path, text):
    with open(path, "w") as file:
        file.write(text)


# ------------------------------------------------------------------ namespaces


def enter_namespaces():
    """Leave the host's processes, network, IPC and mounts, through a user namespace unless root."""
    flags = sum(v for k, v in CLONE_NEW.items() if k != "user")
    uid, gid = os.getuid(), os.getgid()
    user = os.geteuid() != 0
    libc_call("unshare", flags | (CLONE_NEW["user"] if user else 0))
    if user:
        write_file("/proc/self/setgroups", "deny")
        write_file("/proc/self/uid_map", f"{uid} {uid} 1")
        write_file("/proc/self/gid_map", f"{gid} {gid} 1")
    libc_call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)


def bind(source, target):
    """Bind a tree read-only, with its submounts."""
    libc_call("mount", os.fsencode(source), os.fsencode(target), None, MS_BIND | MS_REC, None)
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID, 0, 0, 0)
    try:
        libc_call("syscall", SYS_MOUNT_SETATTR, -100, os.fsencode(target), 0x8000, attributes, 32)
    except OSError:  # before Linux 5.12
        # In a user namespace flags inherited from the host are locked: a remount must repeat them.
        held = os.statvfs(target).f_flag
        flags = held & 0xC0F | (MS_RELATIME if held & 0x1000 else 0)
        remount = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | flags
        libc_call("mount", b"none", os.fsencode(target), None, remount, None)


def build_root(job, owner):
    """A root of tmpfs with the system's programs and this interpreter, read-only; a small /tmp."""
    # The new root is mounted over /tmp of this mount namespace only: nothing is made on the host.
    base = "/tmp"
    libc_call("mount", b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV, b"size=1m,mode=755")
    os.umask(0o022)
    trees = ["/usr", *job["trees"]]
    trees = [
        t for t in trees if not any(t.startswith(o.rstrip("/") + "/") for o in trees if o != t)
    ]
    for tree in dict.fromkeys(trees):
        os.makedirs(base + tree, exist_ok=True)
        bind(tree, base + tree)
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink("/" + name):
            os.symlink(os.readlink("/" + name), f"{base}/{name}")
        elif os.path.isdir("/" + name):
            os.mkdir(f"{base}/{name}")
            bind("/" + name, f"{base}/{name}")
    for name in ("etc", "dev", "dev/shm", "proc", "tmp"):
        os.mkdir(f"{base}/{name}")
    write_file(base + "/etc/passwd", f"program:x:{owner[0]}:{owner[1]}::/tmp/work:/bin/sh\n")
    for name in (
        "etc/ld.so.cache",
        "dev/null",
        "dev/zero",
        "dev/full",
        "dev/random",
        "dev/urandom",
    ):
        if os.path.exists("/" + name):
            write_file(f"{base}/{name}", "")
            # Not through bind(): nodev on a device node would make it useless.
            target = f"{base}/{name}".encode()
            libc_call("mount", f"/{name}".encode(), target, None, MS_BIND, None)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink("/proc/self/fd" + target, f"{base}/dev/{name}")
    options = f"size={job['disk_bytes']},nr_inodes={job['disk_files']},mode=1777".encode()
    inner = (base + "/tmp").encode()
    libc_call("mount", b"tmpfs", inner, b"tmpfs", MS_NOSUID | MS_NODEV, options)
    for name in ("work", "shm"):
        os.mkdir(f"{base}/tmp/{name}")
        os.chown(f"{base}/tmp/{name}", *owner)
        os.chmod(f"{base}/tmp/{name}", 0o700)
    # One quota for both: shared memory would otherwise be outside the disk limit.
    libc_call("mount", inner + b"/shm", (base + "/dev/shm").encode(), None, MS_BIND, None)
    # A container that hides parts of its own /proc may not mount a new one: the program has none.
    try:
        flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
        libc_call("mount", b"proc", (base + "/proc").encode(), b"proc", flags, None)
    except OSError:
        os.rmdir(base + "/proc")
    os.chdir(base)
    # With both arguments the same, the old root ends up on top of the new one, and is detached.
    libc_call("syscall", NUMBERS[MACHINE]["pivot_root"], b".", b".")
    libc_call("umount2", b".", MNT_DETACH)
    os.chdir("/")
    flags = MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV
    libc_call("mount", b"none", b"/", None, flags, b"size=1m,mode=755")


# ------------------------------------------------------------------ confinement of the program


def set_limits(job):
    import resource

    def limit(name, value):
        number = getattr(resource, name, None)
        if number is not None:
            hard = resource.getrlimit(number)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (value, value))

    limit("RLIMIT_AS", job["memory_bytes"])
    limit("RLIMIT_CPU", job["cpu_seconds"])
    limit("RLIMIT_FSIZE", job["file_bytes"])
    limit("RLIMIT_NOFILE", job["open_files"])
    limit("RLIMIT_NPROC", job["processes"])
    limit("RLIMIT_STACK", 8 << 20)
    limit("RLIMIT_CORE", 0)
    limit("RLIMIT_MEMLOCK", 0)
    limit("RLIMIT_MSGQUEUE", 0)


def drop_privileges(owner):
    """Another uid where root may choose one, no capability in any case, none to be had by exec."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, ctypes.c_long(capability), 0, 0, 0) == -1:
            break
    if os.geteuid() == 0 and owner[0] != 0:
        os.setgroups([])
        os.setresgid(owner[1], owner[1], owner[1])
        os.setresuid(owner[0], owner[0], owner[0])
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    libc_call("capset", header, (ctypes.c_uint32 * 6)())
    libc_call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # Changing uid hides /proc/self from the program; nothing in this process is secret from it.
    libc_call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)


def restrict_files(job):
    """Landlock, where there is no mount namespace: read the system and the interpreter, write in
    cwd."""
    version = libc.syscall(ctypes.c_long(SYS_LANDLOCK), None, ctypes.c_long(0), ctypes.c_long(1))
    if version < 1:
        return
    read, write = 1 | 4 | 8, 2 | 4
    every = (1 << 13) - 1 | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    # Files, TCP (version 4), abstract sockets and signals outside (version 6).
    handled = (ctypes.c_uint64 * 3)(every, 3, 3)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = libc_call("syscall", SYS_LANDLOCK, handled, size, 0)

    class Beneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))

    allowed = dict.fromkeys(("/usr", "/bin", "/lib", "/lib64", *job["trees"]), read)
    allowed |= {"/etc/ld.so.cache": 4, "/dev/null": write, "/dev/zero": write, "/dev/urandom": 4}
    for path, rights in (allowed | {job["cwd"]: every}).items():
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rule = Beneath(rights, fd)
        libc_call("syscall", SYS_LANDLOCK + 1, rules, 1, ctypes.byref(rule), 0)
        os.close(fd)
    libc_call("syscall", SYS_LANDLOCK + 2, rules, 0)
    os.close(rules)


def install_seccomp(signals_only_to):
    """Refuse dangerous system calls; with a pid, also the network, and signals to others.

    The last two are for where our own namespaces do not hold: the program could otherwise reach the
    network, and kill its caller or its launcher.
    """
    if MACHINE not in NUMBERS:
        return
    call = NUMBERS[MACHINE] | SAME
    load, equal, any_bit, at_least, give = 0x20, 0x15, 0x45, 0x35, 0x06
    allow, eperm, enosys = 0x7FFF0000, 0x00050001, 0x00050026
    # (code, jump if true, jump if false, k); offset 0 of the data is the number, 4 the
    # architecture, 16 and 24 the low words of the first two arguments.
    program = [(load, 0, 0, 4), (equal, 1, 0, AUDIT[MACHINE]), (give, 0, 0, eperm), (load, 0, 0, 0)]
    if MACHINE == "x86_64":  # the x32 numbers are a second door to every call
        program += [(at_least, 0, 1, 0x40000000), (give, 0, 0, enosys)]
    for name in REFUSED:
        program += [(equal, 0, 1, call[name]), (give, 0, 0, eperm)]
    # clone3 keeps its flags in memory, where a filter cannot look; the C library then falls back to
    # clone.
    program += [(equal, 0, 1, call["clone3"]), (give, 0, 0, enosys)]
    new = CLONE_NEW["user"] | CLONE_NEW["mnt"] | CLONE_NEW["pid"] | CLONE_NEW["net"]
    program += [
        (equal, 0, 3, call["clone"]),
        (load, 0, 0, 16),
        (any_bit, 0, 1, new),
        (give, 0, 0, eperm),
    ]
    program += [(load, 0, 0, 0)]
    # Another's limits, such as init's: without root they have the program's uid.
    program += [(equal, 0, 4, call["prlimit64"]), (load, 0, 0, 16), (equal, 1, 0, 0)]
    program += [(give, 0, 0, eperm), (load, 0, 0, 0)]
    # Larger socket buffers: level SOL_SOCKET, SO_SNDBUF or SO_RCVBUF. See resident_bytes.
    program += [(equal, 0, 7, call["setsockopt"]), (load, 0, 0, 24), (equal, 0, 4, 1)]
    program += [(load, 0, 0, 32), (equal, 1, 0, 7), (equal, 0, 1, 8), (give, 0, 0, eperm)]
    program += [(load, 0, 0, 0)]
    if signals_only_to:
        # Sockets may be made, but reach nobody: no connect, bind or sendmsg, and no sendto an
        # address.
        for name in UNREACHABLE:
            program += [(equal, 0, 1, call[name]), (give, 0, 0, eperm)]
        program += [
            (equal, 0, 6, call["sendto"]),
            (load, 0, 0, 48),
            (equal, 0, 2, 0),
            (load, 0, 0, 52),
        ]
        program += [(equal, 1, 0, 0), (give, 0, 0, eperm), (load, 0, 0, 0)]
        for name in KILLS:
            # pidfd_send_signal names its target by a descriptor: refused whole.
            target = signals_only_to if name != "pidfd_send_signal" else 0xFFFFFFFF
            program += [(equal, 0, 4, call[name]), (load, 0, 0, 16), (equal, 1, 0, target)]
            program += [(give, 0, 0, eperm), (load, 0, 0, 0)]
    program += [(give, 0, 0, allow)]

    class Filter(ctypes.Structure):
        _fields_ = (
            ("code", ctypes.c_uint16),
            ("jt", ctypes.c_uint8),
            ("jf", ctypes.c_uint8),
            ("k", ctypes.c_uint32),
        )

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_uint16), ("filters", ctypes.POINTER(Filter)))

    filters = (Filter * len(program))(*program)
    try:
        libc_call("prctl", PR_SET_SECCOMP, 2, ctypes.byref(Program(len(program), filters)), 0, 0)
    except OSError as error:
        if error.errno != 22:  # EINVAL: a kernel without seccomp; isolation_report says so
            raise


# ------------------------------------------------------------------ the three processes


def children():
    """Pids of this process's children: the kernel's list, else a scan of /proc."""
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children") as file:
            return [int(p) for p in file.read().split()]
    except OSError:
        found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    if int(file.read().rsplit(b")", 1)[1].split()[1]) == me:
                        found.append(int(name))
            except OSError:
                continue
    return found


def kill_uid(uid):
    """Kill everything a uid runs, in one pass of the kernel, which even a fork bomb cannot
    outrun."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def reap_all(owner):
    """Kill and reap until nothing is left; orphans come to us because we are a subreaper."""
    while True:
        if owner is not None and os.geteuid() == 0:
            kill_uid(owner[0])
        for pid in children():
            try:
                os.kill(pid, SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        sigtimedwait({SIGCHLD}, 0.01)


def resident_bytes():
    """Memory of the PID namespace, shared pages counted once: RLIMIT_AS counts each process
    alone.

    What lies in the buffers of sockets belongs to no process. Descriptors past the first 64 of each
    are therefore counted as if all were sockets with full buffers.
    """
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                total += field(f"/proc/{name}/smaps_rollup", b"Pss:") << 10
                slots = field(f"/proc/{name}/status", b"FDSize:")
                total += max(slots - 64, 0) * SOCKET_BYTES
            except (OSError, ValueError, StopIteration):
                continue
    return total


def field(path, key):
    """The number beside a key of a file in /proc."""
    with open(path, "rb") as file:
        return int(next(line for line in file if line.startswith(key)).split()[1])


def exit_code(status):
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def init(job, child, result, inside):
    """Process 1: build the root, start the program, wait, watch memory. Its exit ends the
    namespace."""
    owner = job["owner"] or (os.getuid(), os.getgid())
    if inside:
        build_root(job, owner)
    else:
        libc_call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pthread_sigmask(SIG_BLOCK, {SIGCHLD})
    pid = os.fork()
    if pid == 0:
        run_program(job, child, result, owner)
    os.close(result)
    for fd in (0, 1, 2):
        os.close(fd)
    watch = inside and os.path.isdir("/proc/1")
    code = None
    while code is None:
        done, status = os.waitpid(-1, os.WNOHANG)
        if done == pid:
            code = exit_code(status)
        elif not done:
            sigtimedwait({SIGCHLD}, 0.1)
            if watch and resident_bytes() > job["memory_bytes"]:
                code = job["memory_exit"]
    if not inside:
        reap_all(job["owner"])
    os._exit(code)


def run_program(job, child, result, owner):
    """Give everything up, then run the untrusted program in this process."""
    pthread_sigmask(SIG_SETMASK, ())
    for fd in job["close"]:
        os.close(fd)
    os.setsid()
    os.chdir(job["cwd"])
    os.umask(0o077)
    drop_privileges(owner)
    set_limits(job)
    if not job["own_root"]:
        restrict_files(job)
    # Under bubblewrap, launcher and init are in the program's namespace, with its uid.
    install_seccomp(0 if job["backend"] == "namespaces" else os.getpid())
    child["main"](job, result)


def main():
    path, job_fd, result, control = sys.argv[2], *map(int, sys.argv[3:6])
    with open(job_fd, "rb") as file:
        job = marshal.load(file)
    child = {"__name__": "zoo_child"}
    exec(SourceFileLoader("zoo_child", path).get_code("zoo_child"), child)  # type: ignore[arg-type]
    try:
        # A caller that ignores SIGCHLD hands that down, and waiting would then find no child.
        signal(SIGCHLD, SIG_DFL)
        # The caller may die by SIGKILL; bubblewrap sees to it by itself.
        libc_call("prctl", PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        libc_call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if hasattr(libc, "mallopt"):  # each thread's arena would reserve 64 MiB of RLIMIT_AS
            libc.mallopt(-8, 1)
        inside = job["backend"] == "namespaces"
        if inside:
            enter_namespaces()
        # From here on no process of the same uid may read or write this one's memory.
        libc_call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
        alive, lifeline = os.pipe()
        pid = os.fork()
        if pid == 0:
            libc_call("prctl", PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
            os.close(alive)
            job["close"] = (control, lifeline)
            init(job, child, result, inside)
    except BaseException as error:
        if job.get("started"):  # the program's own SystemExit or error, in the program's process
            raise
        # Only the caller's nonce makes this count, and only before the program has begun.
        kind = "unsupported" if isinstance(error, OSError | AttributeError | KeyError) else "failed"
        text = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        os.write(result, f"{job['nonce']} setup {kind} {text}\n".encode("ascii", "replace"))
        os._exit(97)
    # Whoever reads our standard output must see its end when the program ends.
    for fd in (lifeline, 0, 1, 2):
        os.close(fd)
    pthread_sigmask(SIG_BLOCK, {SIGCHLD})
    # Not select: in a caller with many open files the descriptors' numbers are past its 1,024.
    either = select.poll()
    for fd in (control, alive):
        either.register(fd, select.POLLIN)
    if alive not in (fd for fd, _ in either.poll()):
        os.kill(pid, SIGKILL)
    code = exit_code(os.waitpid(pid, 0)[1])
    reap_all(job["owner"] if not inside else None)
    # A flood may have filled the pipe; our own exit status must then do.
    room = select.poll()
    room.register(result, select.POLLOUT)
    if room.poll(0) == [(result, select.POLLOUT)]:
        os.write(result, f"{job['nonce']} exit {code}\n".encode())
    os._exit(code)


if __name__ == "__main__":
    main()
