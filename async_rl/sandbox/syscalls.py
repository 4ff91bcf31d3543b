"""The seccomp filter: the system calls that a computing Python program needs, and no other.

Built by libseccomp (through pyseccomp) in the launcher, loaded by every program just before its own code runs. What is
not listed fails with ENOSYS, so that libraries fall back as they do on older kernels.
"""

from __future__ import annotations

import errno
import os

from async_rl.sandbox.system import CLONE_THREAD

_MEMORY = "brk mmap mprotect munmap mremap madvise mincore msync membarrier mlock munlock"
_THREADS = (
    "futex futex_waitv set_robust_list get_robust_list set_tid_address rseq gettid sched_yield sched_getaffinity "
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
    "read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat creat close close_range "
    "lseek stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getdents "
    "getdents64 mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat chmod "
    "fchmod fchmodat truncate ftruncate fallocate fsync fdatasync flock utime utimes utimensat chdir fchdir fcntl "
    "fadvise64 sendfile copy_file_range dup dup2 dup3 pipe pipe2 getrandom"
)
_EVENTS = (
    "poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd "
    "eventfd2"
)
# asyncio's event loop wakes itself through a pair of sockets that are connected to each other and to nothing else.
_PAIRED_SOCKETS = "sendto recvfrom sendmsg recvmsg shutdown getsockname getpeername getsockopt setsockopt"

ALLOWED = " ".join((_MEMORY, _THREADS, _PROCESS, _SIGNALS, _TIME, _FILES, _EVENTS, _PAIRED_SOCKETS))

# These would fail anyway; EPERM gives programs a clear message.
REFUSED = (
    "socket connect bind listen accept accept4 execve execveat ptrace process_vm_readv process_vm_writev mount umount2 "
    "pivot_root chroot unshare setns bpf keyctl io_uring_setup perf_event_open memfd_create shmget msgget semget "
    "chown fchown lchown fchownat mknod mknodat setuid setgid setreuid setregid setresuid setresgid setgroups"
)

_TERMINAL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: what ``isatty`` and file objects ask."""

_AF_UNIX = 1
_NEW_NAMESPACES = 0x7E020000
"""Every CLONE_NEW* flag."""


def build_filter(*, allow_processes: bool) -> bytes:
    """The filter as BPF instructions for ``system.load_filter``.

    Args:
        allow_processes: ``fork`` and its relatives, but never a new program (``execve``).

    Raises:
        RuntimeError, OSError: libseccomp is missing or refuses.
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
    add(seccomp.ALLOW, "socketpair", seccomp.Arg(0, seccomp.EQ, _AF_UNIX))
    # clone3 hides its flags from filters; ENOSYS, the default, makes the C library use clone.
    if allow_processes:
        add(seccomp.ALLOW, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _NEW_NAMESPACES, 0))
        for name in ("fork", "vfork"):
            add(seccomp.ALLOW, name)
    else:
        add(seccomp.ALLOW, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, CLONE_THREAD, CLONE_THREAD))
        add(refused, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, CLONE_THREAD, 0))
        for name in ("fork", "vfork"):
            add(refused, name)
    with os.fdopen(os.memfd_create("filter", os.MFD_CLOEXEC), "rb+") as file:
        built.export_bpf(file)
        file.seek(0)
        return file.read()
