"""The parts of Linux that isolate programs: system calls, a filter on system calls, and a root directory for programs.

The launcher and its children call this module. Python 3.11 lacks the system calls for namespaces, mounts, capabilities
and seccomp, so they are made through the C library. If the kernel refuses a call, OSError is raised with the name of
the call as its file name.

The seccomp filter permits only the system calls that a computing Python program needs. libseccomp (through pyseccomp)
builds it in the launcher, and every program's process loads it just before the program's code runs. A call that is not
listed fails with ENOSYS, so that libraries behave as on an older kernel, which lacks the call.

The root directory for programs has the interpreter's libraries, read-only, and nothing else of the machine: no
``/proc``, no ``/etc``, no home directories, no executables. The launcher enters it once, before it gets any program.
``SCRATCH`` is an empty directory in it, over which every program's process mounts a private directory.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_THREAD = 0x00010000

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

_SECCOMP_MODE_FILTER = 2
# The same numbers on every architecture: both calls are younger than the common table.
_SYS_CLOSE_RANGE, _SYS_MOUNT_SETATTR = 436, 442
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 1, 2
_CAPABILITY_VERSION_3 = 0x20080522
_FILTER_INSTRUCTION_BYTES = 8

_libc: Any = ctypes.CDLL(None, use_errno=True)

# mincore, and preadv2 by its flags, would say which parts of shared files other programs have read.
_MEMORY = "brk mmap mprotect munmap mremap madvise msync membarrier mlock munlock"
_THREADS = (
    "set_robust_list get_robust_list set_tid_address rseq gettid sched_yield sched_getaffinity "
    "sched_setaffinity sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min getcpu "
    "getpriority setpriority"
)
_PROCESS = (
    "exit exit_group getpid getppid getpgrp getpgid getsid setsid setpgid getuid geteuid getgid getegid getresuid "
    "getresgid getgroups getrusage getrlimit setrlimit prlimit64 times uname sysinfo arch_prctl prctl umask getcwd "
    "wait4 waitid capget"
)
_SIGNALS = (
    "rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait rt_sigqueueinfo sigaltstack "
    "kill tkill tgkill alarm getitimer setitimer pause restart_syscall signalfd signalfd4 pidfd_open "
    "pidfd_send_signal"
)
_TIME = (
    "clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time timer_create timer_settime timer_gettime "
    "timer_getoverrun timer_delete timerfd_create timerfd_settime timerfd_gettime"
)
_FILES = (
    "read write readv writev pread64 pwrite64 preadv pwritev open openat creat close close_range "
    "lseek stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getdents "
    "getdents64 mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat chmod "
    "fchmod fchmodat truncate ftruncate fallocate fsync fdatasync utime utimes utimensat chdir fchdir "
    "fadvise64 sendfile copy_file_range dup dup2 dup3 pipe pipe2 getrandom"
)
_EVENTS = (
    "poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd "
    "eventfd2"
)
# asyncio's event loop wakes itself through a pair of sockets that are connected to each other and to nothing else.
_PAIRED_SOCKETS = "sendto recvfrom sendmsg recvmsg shutdown getsockname getpeername getsockopt setsockopt"

ALLOWED = " ".join((_MEMORY, _THREADS, _PROCESS, _SIGNALS, _TIME, _FILES, _EVENTS, _PAIRED_SOCKETS))

# These calls would fail without an entry too; EPERM gives programs a clear message.
REFUSED = (
    "socket connect bind listen accept accept4 execve execveat ptrace process_vm_readv process_vm_writev mount umount2 "
    "pivot_root chroot unshare setns bpf keyctl io_uring_setup perf_event_open memfd_create shmget msgget semget "
    "chown fchown lchown fchownat mknod mknodat setuid setgid setreuid setregid setresuid setresgid setgroups"
)

_TERMINAL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""The permitted ``ioctl`` requests, which ``isatty`` and file objects use: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO,
FIONCLEX and FIOCLEX."""

_FILE_REQUESTS = (0, 1, 2, 3, 4, 1030, 1032, 1034)
"""The permitted ``fcntl`` requests: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ and
F_GET_SEALS. A lock or a lease on a file that all programs can read would be a message to those that ask for it."""

_LOCK_REQUESTS = (6, 7, 37, 38)
"""The ``fcntl`` requests that lock a range of a file: F_SETLK, F_SETLKW, F_OFD_SETLK and F_OFD_SETLKW."""

_FUTEX_PRIVATE, _FUTEX_CLOCK_REALTIME = 128, 256
_SHARED_FUTEXES = (0, 1, 9, 10)
"""FUTEX_WAIT, FUTEX_WAKE, FUTEX_WAIT_BITSET and FUTEX_WAKE_BITSET, without the flag FUTEX_PRIVATE."""

_AF_UNIX = 1


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


class _FilterProgram(ctypes.Structure):
    _fields_ = (("num_instructions", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _check(result: int, call: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), call)


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def unshare_with_user(spaces: int, proc: int) -> None:
    """Enter a new user namespace, in which this process's user and group keep their ids, and others (``CLONE_NEW...``).

    ``proc`` is a descriptor of the directory ``/proc``.
    """
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | spaces)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        fd = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(fd, text.encode())
        os.close(fd)


def unshare_mapped(spaces: int) -> None:
    """Enter the same namespaces, but all users and groups of this one keep their ids. Root calls this."""
    pid = os.getpid()
    reading, writing = os.pipe()
    helper = os.fork()  # only a process outside of the namespace may map several users
    if helper == 0:
        os.close(writing)
        if os.read(reading, 1):
            for name in ("uid_map", "gid_map"):
                ranges = [line.split() for line in Path(f"/proc/self/{name}").read_text().splitlines()]
                Path(f"/proc/{pid}/{name}").write_text("".join(f"{first} {first} {n}\n" for first, _, n in ranges))
            os._exit(0)
        os._exit(1)
    os.close(reading)
    try:
        unshare(CLONE_NEWUSER | spaces)
        os.write(writing, b"x")
    finally:
        os.close(writing)
        _, status = os.waitpid(helper, 0)
    if status != 0:
        raise PermissionError(errno.EPERM, "can't map users into a user namespace", f"/proc/{pid}/uid_map")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def detach(target: str) -> None:
    """Unmount ``target`` and all mounts below it, even if they are in use."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    _check(_libc.pivot_root(os.fsencode(new_root), os.fsencode(put_old)), "pivot_root")


def make_read_only(target: str) -> None:
    """Make all mounts at and below ``target`` read-only, without setuid programs. This needs Linux 5.12."""
    attributes = _MountAttributes(attr_set=_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR), ctypes.c_int(-1), os.fsencode(target), ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)),
    )  # fmt: skip
    _check(result, "mount_setattr")


def prctl(option: int, value: int) -> None:
    _check(_libc.prctl(ctypes.c_int(option), *(ctypes.c_ulong(part) for part in (value, 0, 0, 0))), f"prctl {option}")


def drop_capabilities() -> None:
    """Give up all capabilities of this thread (permitted, effective and inheritable). They can't be regained."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def load_filter(program: bytes) -> None:
    """Apply the seccomp filter ``program`` (BPF instructions) to this thread and all threads and processes it starts.

    The filter can't be removed.
    """
    instructions = _FilterProgram(len(program) // _FILTER_INSTRUCTION_BYTES, program)
    result = _libc.prctl(
        ctypes.c_int(PR_SET_SECCOMP), ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(instructions), 0, 0
    )
    _check(result, "seccomp")


def close_from(fd: int) -> None:
    """Close all open descriptors whose number is ``fd`` or higher."""
    result = _libc.syscall(ctypes.c_long(_SYS_CLOSE_RANGE), ctypes.c_uint(fd), ctypes.c_uint(~0), ctypes.c_uint(0))
    _check(result, "close_range")


def kernel_release() -> tuple[int, int]:
    """Return the major and minor version of the running Linux kernel. (0, 0) on other systems."""
    if sys.platform != "linux":
        return (0, 0)
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def build_filter() -> bytes:
    """Return the filter on system calls as BPF instructions for ``load_filter``.

    The filter permits the calls in ``ALLOWED``. A program can start threads, but no processes.

    Raises:
        RuntimeError, OSError: libseccomp is missing, or can't build the filter.
    """
    import pyseccomp as seccomp

    built = seccomp.SyscallFilter(seccomp.ERRNO(errno.ENOSYS))
    refused = seccomp.ERRNO(errno.EPERM)

    def add(action: int, name: str, *conditions: seccomp.Arg) -> None:
        number = seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
        if number >= 0:  # else the architecture lacks it, or libseccomp is older than it: ENOSYS, the default
            built.add_rule(action, number, *conditions)

    for name in ALLOWED.split():
        add(seccomp.ALLOW, name)
    for name in REFUSED.split():
        add(refused, name)
    for request in _TERMINAL_REQUESTS:
        add(seccomp.ALLOW, "ioctl", seccomp.Arg(1, seccomp.EQ, request))
    _filter_messages(add)
    add(seccomp.ALLOW, "socketpair", seccomp.Arg(0, seccomp.EQ, _AF_UNIX))
    # clone3 hides its flags from filters; ENOSYS, the default, makes the C library use clone.
    add(seccomp.ALLOW, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, CLONE_THREAD, CLONE_THREAD))
    add(refused, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, CLONE_THREAD, 0))
    for name in ("fork", "vfork"):
        add(refused, name)
    with os.fdopen(os.memfd_create("filter", os.MFD_CLOEXEC), "rb+") as file:
        built.export_bpf(file)
        file.seek(0)
        return file.read()


def _filter_messages(add: Callable[..., None]) -> None:
    """Let ``add`` the rules on calls by which programs could pass messages through files that all of them can read.

    Locks succeed without any effect. A program is alone in its directory, so nobody else could hold a lock there.

    A futex without the flag ``FUTEX_PRIVATE`` in a page of a shared library is the same futex for every program. Calls
    that wait for one or wake one return at once. The C library makes them only to join a thread, and asks again: waking
    up for no reason is allowed.
    """
    import pyseccomp as seccomp

    without_effect = seccomp.ERRNO(0)  # the call returns 0
    add(without_effect, "flock")
    for request in _LOCK_REQUESTS:
        add(without_effect, "fcntl", seccomp.Arg(1, seccomp.EQ, request))
    for request in _FILE_REQUESTS:
        add(seccomp.ALLOW, "fcntl", seccomp.Arg(1, seccomp.EQ, request))
    add(seccomp.ALLOW, "futex", seccomp.Arg(1, seccomp.MASKED_EQ, _FUTEX_PRIVATE, _FUTEX_PRIVATE))
    for operation in _SHARED_FUTEXES:
        for clock in (0, _FUTEX_CLOCK_REALTIME):
            add(without_effect, "futex", seccomp.Arg(1, seccomp.EQ, operation | clock))


SCRATCH = "/scratch"
"""The only directory in which a program may write. It is also the program's working directory. It is not ``/tmp``,
because the interpreter may be installed below ``/tmp``."""

_STAGE = "/tmp"
"""The directory over which the new root directory is built. Every machine has it."""

_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SHARED_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_DATA = ("/usr/share/zoneinfo",)


def library_paths(*, with_packages: bool) -> list[str]:
    """Return ``sys.path`` for programs: the standard library and, if ``with_packages`` is set, installed packages.

    Other folders of ``sys.path`` are left out, because they may have private files.
    """
    names = {"lib-dynload", *(("site-packages", "dist-packages") if with_packages else ())}
    standard = sysconfig.get_path("stdlib")
    paths = [standard, *(path for path in sys.path if os.path.basename(path) in names)]
    return list(dict.fromkeys(os.path.realpath(path) for path in paths if os.path.isdir(path)))


def visible_paths(libraries: Iterable[str]) -> list[str]:
    """Return the directories that programs may read: ``libraries``, shared libraries and time zones.

    A directory inside another one of them is left out.
    """
    shared = [*_SHARED_LIBRARIES, *(os.path.join(sys.base_prefix, name) for name in ("lib", "lib64"))]
    wanted = {os.path.realpath(path) for path in (*shared, *_DATA, *libraries) if os.path.isdir(path)}
    return [path for path in sorted(wanted) if not any(str(parent) in wanted for parent in Path(path).parents)]


def enter_root(visible: Iterable[str]) -> None:
    """Build a read-only root directory with the paths in ``visible`` and a few harmless devices, and enter it.

    This process can't reach the old root directory afterwards.

    Raises:
        OSError: the kernel refuses a mount.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    # Two steps: the new root is built where the old one stays whole, for what is mounted may lie below it.
    mount("tmpfs", _STAGE, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.makedirs(f"{_STAGE}/new")
    os.makedirs(f"{_STAGE}/old")
    pivot_root(_STAGE, f"{_STAGE}/old")
    os.chdir("/")
    for path in visible:
        os.makedirs(f"/new{path}")
        mount(f"/old{path}", f"/new{path}", None, MS_BIND | MS_REC)
    for path in _SHARED_LIBRARIES:
        if os.path.islink(f"/old{path}"):
            os.symlink(os.readlink(f"/old{path}"), f"/new{path}")
    os.mkdir("/new/dev")
    for path in _DEVICES:
        Path(f"/new{path}").touch()
        mount(f"/old{path}", f"/new{path}", None, MS_BIND)
    os.mkdir(f"/new{SCRATCH}")
    detach("/old")
    mount("/new", "/new", None, MS_BIND | MS_REC)
    os.chdir("/new")
    pivot_root(".", ".")  # stacks the old root on the new one, to be unmounted from there
    detach(".")
    os.chdir("/")
    make_read_only("/")


def mount_scratch(size_bytes: int) -> None:
    """Mount an empty directory of ``size_bytes`` at ``SCRATCH``, and make it the working directory.

    Files in it can't be executed. It is removed together with the mount namespace of this process.
    """
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    mount("tmpfs", SCRATCH, "tmpfs", flags, f"mode=700,size={size_bytes},nr_inodes=4096")
    os.chdir(SCRATCH)


ADVICE = {
    "libseccomp": "install libseccomp (Debian, Ubuntu: apt install libseccomp2; Fedora: dnf install libseccomp)",
    "namespaces": "allow user namespaces (sysctl user.max_user_namespaces; on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0, in a container --security-opt seccomp=unconfined)",
    "mounts": "allow mounts inside user namespaces (on Ubuntu sysctl kernel.apparmor_restrict_unprivileged_userns=0, "
    "in a container --security-opt seccomp=unconfined --security-opt apparmor=unconfined)",
    "packages": "install the package where async-rl is installed, or change reward.code.packages",
}
"""What to do on a machine that refuses a step of isolating programs, by the name of the step."""
