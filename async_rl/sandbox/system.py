"""The Linux calls that Python 3.11 lacks: namespaces, mounts, capabilities, seccomp. Thin, through the C library.

Each raises OSError, with the call's name for a file name, when the kernel refuses. Called by the launcher's modules.
"""

from __future__ import annotations

import ctypes
import os
import sys
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


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def detach(target: str) -> None:
    """Unmount ``target`` and all below it, in use or not."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    _check(_libc.pivot_root(os.fsencode(new_root), os.fsencode(put_old)), "pivot_root")


def make_read_only(target: str) -> None:
    """Every mount at and below ``target``, whatever other flags it has. Needs Linux 5.12."""
    attributes = _MountAttributes(attr_set=_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR), ctypes.c_int(-1), os.fsencode(target), ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)),
    )  # fmt: skip
    _check(result, "mount_setattr")


def prctl(option: int, value: int) -> None:
    _check(_libc.prctl(ctypes.c_int(option), *(ctypes.c_ulong(part) for part in (value, 0, 0, 0))), f"prctl {option}")


def drop_capabilities() -> None:
    """Give up every capability for good: permitted, effective and inheritable."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def load_filter(program: bytes) -> None:
    """Put the seccomp filter ``program`` (BPF instructions) on this thread and all it starts. For good."""
    instructions = _FilterProgram(len(program) // _FILTER_INSTRUCTION_BYTES, program)
    result = _libc.prctl(
        ctypes.c_int(PR_SET_SECCOMP), ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(instructions), 0, 0
    )
    _check(result, "seccomp")


def close_from(fd: int) -> None:
    """Close every descriptor from ``fd`` on."""
    result = _libc.syscall(ctypes.c_long(_SYS_CLOSE_RANGE), ctypes.c_uint(fd), ctypes.c_uint(~0), ctypes.c_uint(0))
    _check(result, "close_range")


def kernel_release() -> tuple[int, int]:
    """Major and minor version of the running kernel; (0, 0) where it is not Linux."""
    if sys.platform != "linux":
        return (0, 0)
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)
