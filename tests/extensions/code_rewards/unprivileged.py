"""Becomes somebody with fewer rights, then runs the tests that are named.

    python -m tests.extensions.code_rewards.unprivileged ordinary|container TESTS

``ordinary`` is a user like any other; ``container`` is root as in a container: without the right to mount.
Root's home is closed to others, and the interpreter may lie in it: in a mount namespace of this process alone it is put
where it was, under directories that are open.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from async_rl.process.sandbox import system

ROOT = Path(__file__).resolve().parents[3]
ORDINARY = 12345
OPTIONS = ("-q", "-p", "no:cacheprovider")
PR_CAPBSET_DROP, CAP_SYS_ADMIN = 24, 21


def main() -> None:
    who, *tests = sys.argv[1:]
    if who == "container":
        if os.geteuid() == 0:
            system.prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN)
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *OPTIONS, *tests])
    base = tempfile.mkdtemp()
    os.environ["HOME"] = base
    if os.geteuid() == 0:
        os.chown(base, ORDINARY, ORDINARY)
        open_directories([sys.base_prefix, sys.prefix, str(ROOT)])
        os.setgroups([])
        os.setresgid(ORDINARY, ORDINARY, ORDINARY)
        os.setresuid(ORDINARY, ORDINARY, ORDINARY)
        system.prctl(system.PR_SET_DUMPABLE, 1)  # as any process of theirs that was not root before
    assert os.geteuid() != 0
    code = pytest.main([*OPTIONS, "--basetemp", f"{base}/tests", *tests])
    shutil.rmtree(base)
    raise SystemExit(code)


def open_directories(needed: list[str]) -> None:
    """Make every path of ``needed`` reachable to all users, in a new mount namespace."""
    system.unshare(system.CLONE_NEWNS)
    system.mount("none", "/", None, system.MS_REC | system.MS_PRIVATE)
    stage = "/mnt"
    system.mount("tmpfs", stage, "tmpfs", 0, "mode=755")
    closed: dict[str, list[str]] = {}
    for path in dict.fromkeys(os.path.realpath(path) for path in needed):
        shut = [str(p) for p in reversed(Path(path).parents) if not p.stat().st_mode & 0o001]
        if shut:
            closed.setdefault(shut[0], []).append(path)
    for number, path in enumerate(path for paths in closed.values() for path in paths):
        os.mkdir(f"{stage}/{number}")
        system.mount(path, f"{stage}/{number}", None, system.MS_BIND | system.MS_REC)
    number = 0
    for directory, paths in closed.items():
        system.mount("tmpfs", directory, "tmpfs", 0, "mode=755")
        for path in paths:
            os.makedirs(path, exist_ok=True)
            system.mount(f"{stage}/{number}", path, None, system.MS_BIND | system.MS_REC)
            number += 1


if __name__ == "__main__":
    main()
