"""Isolates the programs of agents from each other, so that no session finds the keys and the files of another one.

A program sees only the processes that it has started (its ``/proc`` lists no others), of the folders of sessions its
own, and no socket but those of its own network. There one port is open, that of the session's endpoint, whose
connections ``forward`` carries on. It keeps its user, and with it the machine's files and their Unix sockets.

Many containers forbid mounts, or that of a new ``/proc``, but not user namespaces. There programs see each other's
command lines and folders, but not the keys: the environment and the memory of a process are open only to those of its
user namespace or of one above it.

``isolate`` runs in the process that becomes the program. ``python -m async_rl.extensions.agents.programs.isolation
all|keys FOLDER`` tries it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn

from async_rl.errors import SandboxError
from async_rl.process.child import module_command, package_environment
from async_rl.process.sandbox import system

_CHUNK, _BACKLOG, _TAIL_CHARACTERS, _TRIED_PORT = 1 << 16, 128, 300, 5000
_PR_CAPBSET_DROP, _CAP_SYS_ADMIN = 24, 21
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

Level = Literal["all", "keys", "none"]
"""How far programs are isolated: entirely; only so that no other session's key can be read; or not at all."""


@contextmanager
def session_folder() -> Iterator[Path]:
    """Make a folder that lasts as long as the block. Its parent has the folders of all sessions of this user alone.

    Raises:
        SandboxError: the parent belongs to somebody else.
    """
    parent = Path(tempfile.gettempdir(), f"async-rl-agents-{os.geteuid()}")
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.lstat().st_uid != os.geteuid():
        raise SandboxError(f"expected {parent} to be this user's own directory, got somebody else's; set TMPDIR")
    with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@functools.cache
def reach() -> tuple[Level, str]:
    """Return how far this machine can isolate programs, and why no further."""
    if not (error := _tried("all")):
        return "all", ""
    return "none" if _tried("keys") else "keys", error


def _tried(level: Level) -> str:
    """Return why this machine can't isolate programs so far; empty if it can."""
    if sys.platform != "linux":
        return "namespaces are a part of Linux"
    with session_folder() as folder:
        command = module_command(__name__, level, str(folder))
        tried = subprocess.run(command, env=package_environment(), capture_output=True, text=True)
    return "" if tried.returncode == 0 else tried.stderr.strip()[-_TAIL_CHARACTERS:]


def warning(sandbox: str) -> str:
    """Return a warning, which ends with what to do, if ``environment.sandbox`` can't be had here; else nothing."""
    level, error = reach()
    if sandbox == "off" or level == "all":
        return ""
    what = "see each other's files" if level == "keys" else "run UNPROTECTED, so one can play another's session"
    fix = f"{system.ADVICE['mounts']}, for /proc also --security-opt systempaths=unconfined"
    return f"agents' programs {what}: {error}; {fix}"


def isolate(level: Level, folder: Path, port: int | None, listener_to: socket.socket) -> None:
    """Isolate this process, which is to become a program: its ``preexec_fn``. Return in a child of it.

    This process waits for the child and ends as it does. At the level ``all`` the child is in a process namespace,
    whose process 1 reaps orphans and ends everything with it, and the parent of ``folder`` is ``folder`` there. With
    ``port`` the network is new, and the socket that listens there is sent to ``listener_to``.
    """
    try:
        _isolate(level, folder, port, listener_to)
    except OSError as error:
        os.write(2, f"can't isolate the program: {error}\n".encode())
        os._exit(1)


def _isolate(level: Level, folder: Path, port: int | None, listener_to: socket.socket) -> None:
    spaces = system.CLONE_NEWIPC | (system.CLONE_NEWNS | system.CLONE_NEWPID if level == "all" else 0)
    spaces |= 0 if port is None else system.CLONE_NEWNET
    if os.geteuid() == 0:
        system.unshare_mapped(spaces)
    else:
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
        system.unshare_with_user(spaces, proc)
    if level == "all":
        system.mount("none", "/", None, system.MS_REC | system.MS_PRIVATE)
        system.mount(str(folder), str(folder.parent), None, system.MS_BIND)
    if port is not None:
        with socket.socket() as lo:
            fcntl.ioctl(lo, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
        with socket.create_server(("127.0.0.1", port), backlog=_BACKLOG) as listener:
            socket.send_fds(listener_to, [b"L"], [listener.fileno()])
    _fork_and_wait()
    if level == "all":
        system.mount("proc", "/proc", "proc", system.MS_NOSUID | system.MS_NODEV | system.MS_NOEXEC)
    system.prctl(system.PR_SET_DUMPABLE, 0)  # this memory has the session's second key
    _fork_and_wait()
    os.setsid()
    system.prctl(_PR_CAPBSET_DROP, _CAP_SYS_ADMIN)  # root could unmount what hides the rest


def _fork_and_wait() -> None:
    """Go on in a child, which is killed if this process is. This process reaps, and ends as the child does."""
    child = os.fork()
    if child == 0:
        system.prctl(system.PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        _end_with(child)


def _end_with(child: int) -> NoReturn:
    system.close_from(0)  # also the pipe whose end says that the program has begun
    while (ended := os.wait())[0] != child:
        pass
    code = os.waitstatus_to_exitcode(ended[1])
    os._exit(code if code >= 0 else 128 - code)


async def forward(listener: socket.socket, port: int) -> asyncio.Server:
    """Carry on the connections of ``listener`` to ``port`` on this machine's loopback."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            their_reader, their_writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                await asyncio.gather(_carry(reader, their_writer), _carry(their_reader, writer))
            finally:
                their_writer.close()
        writer.close()

    return await asyncio.start_server(serve, sock=listener)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    writer.write_eof()


if __name__ == "__main__":
    ours, theirs = socket.socketpair()
    given: Any = sys.argv[1]
    isolate(given, Path(sys.argv[2]), _TRIED_PORT, theirs)
    os._exit(0)
