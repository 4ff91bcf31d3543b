"""The process of a fork server: it imports once what its processes share, then forks a process for each request.

A fork takes milliseconds and shares what the import loaded, such as a search index. A crash or an endless loop ends
only the process in which it happens. ``fork_client`` is the owner's side.

On the socket to the owner are records of 5 bytes: a kind, and a number. The server first says ``READY``, or
``REFUSED`` with the size of the error's text, which follows. Then it answers each request with a record of its kind:

- ``FORK`` comes with a descriptor, on which the new process gets its work. The answer is the process's id, or 0 if the
  machine refuses another process.
- ``KILL`` has the id of a forked process, and the answer the signal that ended it.
- ``KILL_FAMILY`` has the same: all that the process started is killed, too, and nothing waits for the end.

When the socket closes or the owner dies, all processes end. The environment variable ``MARK`` marks the server and all
that it or its forked processes start, and ``CHILD_MARK`` what one forked process of the user's code starts, so that
they are found in sessions of their own, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from async_rl.process.child import be_killed_first
from async_rl.process.family import descendants_of, kill_all, kill_marked
from async_rl.process.fault_points import fault_point
from async_rl.process.helper import parent_socket

RECORD = struct.Struct("<cI")
READY, REFUSED, FORK, KILL, KILL_FAMILY = b"R", b"E", b"F", b"K", b"A"
MARK, CHILD_MARK = "ASYNC_RL_FORK_SERVER", "ASYNC_RL_FORKED"
_PR_SET_PDEATHSIG = 1
_ORPHAN_CHECK_MS = 1000


class Forker:
    """The fork server in its own process. Create it first, then import, then call ``serve`` or ``refuse``.

    What the processes print goes to the owner's log, line by line.

    Args:
        descriptor: that of this end of the socket, the first argument of the process.
        is_user_code: its processes may start others, and are the first to be killed if memory runs out.

    Attributes:
        control: the socket to the owner.
    """

    def __init__(self, descriptor: str, *, is_user_code: bool = False) -> None:
        self.control, self._owner = parent_socket(descriptor), os.getppid()
        self._is_user_code = is_user_code
        _die_with_parent(self._owner)  # also in an import that hangs
        os.dup2(2, 1)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        self._children: set[int] = set()
        self._killed: set[int] = set()

    def refuse(self, error: str) -> None:
        """Tell the owner that this server can't serve."""
        body = error.encode(errors="replace")
        self.control.sendall(RECORD.pack(REFUSED, len(body)) + body)

    def serve(self, work: Callable[[socket.socket], None]) -> NoReturn:
        """Serve until the owner closes the socket or dies. ``work`` gets the connection of a forked process in it."""
        signal.signal(signal.SIGTERM, lambda *_: self._end(0))
        # From now on this process has others to kill. The kernel's parent is a thread, which may end before the owner.
        _set_death_signal(0)
        try:
            self.control.sendall(RECORD.pack(READY, 0))
            self._run(work)
        except ConnectionError:
            pass  # the owner has closed the socket
        except Exception:
            traceback.print_exc()
            self._end(1)
        self._end(0)

    def _run(self, work: Callable[[socket.socket], None]) -> None:
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        kill = {KILL: self._kill, KILL_FAMILY: self._kill_family}
        # A process forked from the owner may hold the other end open, so a closed socket is not the only sign.
        while os.getppid() == self._owner:
            if not poller.poll(_ORPHAN_CHECK_MS):
                continue
            data, descriptors, _, _ = socket.recv_fds(self.control, RECORD.size, 1, socket.MSG_WAITALL)
            if len(data) < RECORD.size:
                break
            kind, pid = RECORD.unpack(data)
            answer = self._fork(descriptors[0], work) if kind == FORK else kill[kind](pid)
            self.control.sendall(RECORD.pack(kind, answer))
            self._reap()

    def _fork(self, descriptor: int, work: Callable[[socket.socket], None]) -> int:
        """Fork a process. Return its id, or 0 if the machine refuses."""
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            self._be_child(descriptor, work, server)
        os.close(descriptor)
        if pid > 0:
            with contextlib.suppress(OSError):  # the child may have done this already, or may have ended
                os.setpgid(pid, pid)
            self._children.add(pid)
        fault_point("fork_server.forked")  # a process for an agent is forked, the generator does not know its id
        return max(pid, 0)

    def _be_child(self, descriptor: int, work: Callable[[socket.socket], None], server: int) -> NoReturn:
        code = 1
        try:
            os.set_inheritable(descriptor, False)
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            _die_with_parent(server)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._is_user_code:
                os.environ[CHILD_MARK] = f"{os.environ.get(MARK, '')}-{os.getpid()}"
                be_killed_first()
            self.control.close()
            work(socket.socket(fileno=descriptor))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            # The forked child must never return into the server's loop.
            os._exit(code)

    def _kill(self, pid: int) -> int:
        """Kill the forked process ``pid`` if it still runs. Return the signal that ended it, or 0.

        No other process can have its id, because its exit status was not collected yet.
        """
        if pid not in self._children:
            return 0
        self._children.discard(pid)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0

    def _kill_family(self, pid: int) -> int:
        """Kill the forked process ``pid`` and all that it started, without waiting for the end."""
        if pid in self._children:
            fault_point("fork_server.killing")  # a process shall be killed with all that it started, none of them is
            family = descendants_of(pid)  # before they lose their parents
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
            kill_all(family)
            kill_marked(CHILD_MARK, f"{os.environ.get(MARK, '')}-{pid}")
            self._children.discard(pid)
            self._killed.add(pid)
        return 0

    def _reap(self) -> None:
        for pid in list(self._killed):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            self._killed.discard(pid)

    def _end(self, code: int) -> NoReturn:
        """Kill all that this process and its forked processes started, and exit. A second signal does not interrupt it.

        The owner learns of it first, so that it asks this server for nothing after it has seen a process end.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.control.close()
        kill_marked(MARK, os.environ.get(MARK, ""))
        os._exit(code)


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. Exit if ``parent``, its process id, is dead already."""
    _set_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _set_death_signal(signum: int) -> None:
    """Have the kernel send ``signum`` when the parent dies, or nothing if it is 0. Elsewhere than on Linux do nothing.

    There a process ends when its socket closes.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
