"""What an untrusted program may use, and how its process gives up all else just before the program runs."""

from __future__ import annotations

import math
import os
import resource
from dataclasses import dataclass

from async_rl.process.sandbox import system


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one run of one program.

    Attributes:
        time_s: wall-clock seconds. The limit on processor seconds is between 1 and 2 s higher.
        memory_bytes: size of the address space.
        output_bytes: size of standard output, and of any file that the program writes.
        scratch_bytes: size of all files in the program's private directory together.
        max_threads: number of threads, with the main thread. A program can't start processes.
    """

    time_s: float
    memory_bytes: int
    output_bytes: int
    scratch_bytes: int
    max_threads: int


ENVIRONMENT = {
    "HOME": system.SCRATCH,
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "PATH": "",
    "PYTHONHASHSEED": "0",  # the same program gives the same output
    "TMPDIR": system.SCRATCH,
    "TZ": "UTC",
    # Numerical libraries start one thread per core when imported; a forked child would lack these threads.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""All environment variables of a program."""

_STACK_BYTES = 112 << 20
"""Maximum size in bytes of the main thread's stack. Linux keeps 128 MiB free below that stack, so a larger stack could
overwrite other memory."""

_MAX_OPEN_FILES = 64


def confine(limits: Limits, seccomp_filter: bytes) -> None:
    """Isolate this process and take its rights away, before the program's code runs.

    The process gets a private directory, a network and a user namespace, and limits. It loses all capabilities and most
    system calls.

    Raises:
        OSError: the kernel refuses one of these steps.
    """
    os.setsid()
    system.unshare(system.CLONE_NEWNS | system.CLONE_NEWNET)
    system.mount_scratch(limits.scratch_bytes)
    # A separate user namespace, with no user mapped into it, counts the program's threads separately.
    system.unshare(system.CLONE_NEWUSER)
    set_limits(limits)
    resource.setrlimit(resource.RLIMIT_NPROC, (limits.max_threads, limits.max_threads))
    system.prctl(system.PR_SET_NO_NEW_PRIVS, 1)
    system.drop_capabilities()
    system.load_filter(seccomp_filter)


def set_limits(limits: Limits) -> None:
    """Set the limits on time, memory and files for this process. The limit on threads is set in ``confine``."""
    cpu_s = math.ceil(limits.time_s) + 1
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, limits.output_bytes),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_AS, limits.memory_bytes),
    ):
        resource.setrlimit(kind, (value, value))
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    stack = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
