"""The file system that programs see: the interpreter's libraries, read-only, and nothing else of the machine.

Called once by the launcher, in a mount namespace of its own, before anything untrusted is near. No ``/proc``, no
``/etc``, no home directories, no executables. ``SCRATCH`` is empty here; every program gets one of its own over it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from async_rl.sandbox import system

SCRATCH = "/scratch"
"""Where a program may write; also its working directory. Not /tmp: the interpreter itself may be installed there."""

_STAGE = "/tmp"
"""A directory that every machine has, to build the new root over."""

_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SHARED_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_DATA = ("/usr/share/zoneinfo",)


def library_paths(*, with_packages: bool) -> list[str]:
    """``sys.path`` of the programs: the standard library, with ``with_packages`` also the installed packages.

    Paths that came some other way (a checkout installed in place) are left out: who knows what lies in them.
    """
    names = {"lib-dynload", *(("site-packages", "dist-packages") if with_packages else ())}
    standard = sysconfig.get_path("stdlib")
    paths = [standard, *(path for path in sys.path if os.path.basename(path) in names)]
    return list(dict.fromkeys(os.path.realpath(path) for path in paths if os.path.isdir(path)))


def visible_paths(libraries: Iterable[str]) -> list[str]:
    """Directories that programs may read, none of them inside another."""
    shared = [*_SHARED_LIBRARIES, *(os.path.join(sys.base_prefix, name) for name in ("lib", "lib64"))]
    wanted = {os.path.realpath(path) for path in (*shared, *_DATA, *libraries) if os.path.isdir(path)}
    return [path for path in sorted(wanted) if not any(str(parent) in wanted for parent in Path(path).parents)]


def enter_root(visible: Iterable[str]) -> None:
    """Make a new root of ``visible`` and the harmless devices, read-only, and leave the old one for good.

    Raises:
        OSError: a mount is refused.
    """
    system.mount("none", "/", None, system.MS_REC | system.MS_PRIVATE)
    # Two steps: the new root is built where the old one stays whole, for what is mounted may lie below it.
    system.mount("tmpfs", _STAGE, "tmpfs", system.MS_NOSUID | system.MS_NODEV, "mode=755,size=1m")
    os.makedirs(f"{_STAGE}/new")
    os.makedirs(f"{_STAGE}/old")
    system.pivot_root(_STAGE, f"{_STAGE}/old")
    os.chdir("/")
    for path in visible:
        os.makedirs(f"/new{path}")
        system.mount(f"/old{path}", f"/new{path}", None, system.MS_BIND | system.MS_REC)
    for path in _SHARED_LIBRARIES:
        if os.path.islink(f"/old{path}"):
            os.symlink(os.readlink(f"/old{path}"), f"/new{path}")
    os.mkdir("/new/dev")
    for path in _DEVICES:
        Path(f"/new{path}").touch()
        system.mount(f"/old{path}", f"/new{path}", None, system.MS_BIND)
    os.mkdir(f"/new{SCRATCH}")
    system.detach("/old")
    system.mount("/new", "/new", None, system.MS_BIND | system.MS_REC)
    os.chdir("/new")
    system.pivot_root(".", ".")  # stacks the old root on the new one, to be unmounted from there
    system.detach(".")
    os.chdir("/")
    system.make_read_only("/")


def mount_scratch(size_bytes: int) -> None:
    """An empty directory of this program's own, gone with its mount namespace. Nothing in it can be executed."""
    flags = system.MS_NOSUID | system.MS_NODEV | system.MS_NOEXEC
    system.mount("tmpfs", SCRATCH, "tmpfs", flags, f"mode=700,size={size_bytes},nr_inodes=4096")
    os.chdir(SCRATCH)
