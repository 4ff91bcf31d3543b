"""Imports an environment's code once, lets it prepare, then forks a process for each concurrent rollout.

A fork takes milliseconds and shares what the import loaded, such as a search index. Because every rollout has its own
process, a crash or an endless loop ends only that rollout.

``pool.py`` starts the fork server and sends it ``environment.extra``, as a message of ``child``, over a socket. The
environment's function ``prepare``, if it has one, gets it. Then come records of 5 bytes. The record ``F`` comes with a
descriptor and asks for a fork. The answer is the new process's id, or 0 if the fork failed. The record ``K`` kills one
forked process and all processes that it started; the same record is the answer. When the socket closes or the pool's
process dies, all processes end.

The environment variable ``MARK`` marks this process and all that it or its forked processes start, and ``CHILD_MARK``
what one forked process starts, so that they are found in sessions of their own, too.

The command is ``python -m async_rl.environments.fork_server DESCRIPTOR NAME DIGEST ALLOWED...``. ``DIGEST`` is a
result of ``digest_word``, and ``ALLOWED`` is the list ``generator.allow_code``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import traceback
from typing import NoReturn

from async_rl.process.family import descendants_of, kill_all, kill_marked
from async_rl.process.fault_points import fault_point

RECORD = struct.Struct("<cI")
READY, REFUSED, KILLED = b"R", b"E", b"K"
MARK, CHILD_MARK = "ASYNC_RL_ENVIRONMENTS", "ASYNC_RL_ENVIRONMENT"
_ANY, _SHA256 = "any", "sha256:"
_PR_SET_PDEATHSIG = 1
_MOST_KILLABLE = b"1000"


def digest_word(digest: str | None) -> str:
    """Return the argument that tells the fork server which digest the environment's code must have.

    If ``digest`` is None, any code is accepted. If it is empty, no code is accepted.
    """
    return _ANY if digest is None else _SHA256 + digest


def main() -> None:
    descriptor, name, word, *allowed = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the generator; this process ends when its socket does
    _die_with_parent(None)
    os.dup2(2, 1)  # what an environment prints goes to the generator's log, line by line
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    control = socket.socket(fileno=int(descriptor))
    control.set_inheritable(False)
    from async_rl.errors import ConfigError
    from async_rl.process.user_code import load_code

    try:
        code = load_code(name, allowed=allowed, digest=None if word == _ANY else word.removeprefix(_SHA256))
    except ConfigError as error:
        _refuse(control, f"environment.name: {error}")
        return
    if not callable(code) and not any(hasattr(code, name) for name in ("step", "generate", "run")):
        _refuse(
            control,
            f"environment.name: expected {name} to have a function step or generate, or to be an agent (run), got "
            f"neither; see docs/environments.md",
        )
        return
    from async_rl.environments.child import prepare  # with all that it imports, so that no forked process has to

    if error := prepare(control, code):
        _refuse(control, error)
        return
    signal.signal(signal.SIGTERM, lambda *_: _end(0))
    _die_with_parent(None, signal.SIGTERM)
    try:
        control.sendall(RECORD.pack(READY, 0))
        _Server(control, code).run()
    except ConnectionError:
        pass  # the pool has closed the socket
    except Exception:
        traceback.print_exc()
        _end(1)
    _end(0)


def _end(code: int) -> NoReturn:
    """Kill all that this process and its forked processes started, and exit.

    A parent that dies closes the socket first, and then the kernel sends SIGTERM. So the signal may come while this
    function runs, and must not interrupt it halfway.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kill_marked(MARK, os.environ.get(MARK, ""))
    os._exit(code)


def _refuse(control: socket.socket, error: str) -> None:
    body = error.encode(errors="replace")
    control.sendall(RECORD.pack(REFUSED, len(body)) + body)


def _die_with_parent(expected_parent: int | None, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send this process ``signum`` when its parent dies, on Linux.

    Exit at once if ``expected_parent`` is not the parent's process id, because the parent is dead then. On other
    systems this process ends when its socket closes.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if expected_parent is not None and os.getppid() != expected_parent:
        os._exit(1)


class _Server:
    def __init__(self, control: socket.socket, code: object) -> None:
        self._control = control
        self._code = code
        self._children: set[int] = set()
        self._killed: set[int] = set()

    def run(self) -> None:
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._control, RECORD.size, 1)
            while data and len(data) < RECORD.size:
                data += self._control.recv(RECORD.size - len(data))
            if not data:
                break
            kind, pid = RECORD.unpack(data)
            if kind == b"F":
                self._fork(descriptors[0])
            else:
                self._kill(pid)
                self._control.sendall(RECORD.pack(KILLED, pid))
            self._reap()

    def _fork(self, descriptor: int) -> None:
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            self._be_child(descriptor, server)
        os.close(descriptor)
        if pid > 0:
            with contextlib.suppress(OSError):  # the child may have done this already, or may have ended
                os.setpgid(pid, pid)
            self._children.add(pid)
        fault_point("fork_server.forked")
        self._control.sendall(RECORD.pack(b"F", max(pid, 0)))

    def _be_child(self, descriptor: int, server: int) -> None:
        code = 1
        try:
            os.set_inheritable(descriptor, False)
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            _die_with_parent(server)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ[CHILD_MARK] = f"{os.environ.get(MARK, '')}-{os.getpid()}"
            _be_killed_first()
            self._control.close()
            from async_rl.environments.child import serve

            serve(socket.socket(fileno=descriptor), self._code)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            # The forked child must never return into the server's loop.
            os._exit(code)

    def _kill(self, pid: int) -> None:
        """Kill the forked process ``pid`` and all that it started. Do nothing if ``pid`` was killed before.

        No other process can have got the id ``pid`` meanwhile, because the exit status was not collected yet.
        """
        if pid not in self._children:
            return
        fault_point("fork_server.killing")
        family = descendants_of(pid)  # before they lose their parents
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        kill_all(family)
        kill_marked(CHILD_MARK, f"{os.environ.get(MARK, '')}-{pid}")
        self._children.discard(pid)
        self._killed.add(pid)

    def _reap(self) -> None:
        for pid in list(self._killed):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            self._killed.discard(pid)


def _be_killed_first() -> None:
    """Ask the kernel to kill this process before the generator if the machine runs out of memory."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        file.write(_MOST_KILLABLE)


if __name__ == "__main__":
    main()
