"""The pool's side of a fork server (``fork_server``): asks it for processes, without waiting for them.

A fork server that is stopped or hangs delays nobody: ``pool`` goes on with the processes that exist, and replaces a
server that is silent for ``FORK_LIMIT_S`` seconds. One that answers steadily is not silent, however many requests wait.
"""

from __future__ import annotations

import contextlib
import math
import socket
import subprocess
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection

from async_rl.config.generator import EnvironmentConfig
from async_rl.environments.child import FrameError, pack
from async_rl.environments.fork_server import KILLED, MARK, READY, RECORD, REFUSED, digest_word
from async_rl.errors import ConfigError
from async_rl.process.child import module_command, package_environment
from async_rl.process.family import kill_marked

START_TIMEOUT_S = 120.0
"""Time limit for importing the environment's code and for its function ``prepare``."""
FORK_LIMIT_S = 30.0
"""Seconds without any answer after which a fork server that owes one is replaced."""
_EXIT_S = 1.0
_CHUNK = 1 << 16


class ServerLostError(Exception):
    """The fork server has ended, or was silent for too long."""


class KilledAtStartError(ConfigError):
    """A signal has ended the fork server before it was ready. If the code was imported before, it may be again."""


class ForkServer:
    """One fork server. ``control`` is the socket to it, which never blocks. ``clock`` returns the time in seconds.

    Raises:
        ConfigError: ``environment.extra`` is no JSON.
    """

    def __init__(
        self, config: EnvironmentConfig, allowed: Collection[str], digest: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Start the process. It imports the environment's code, and then answers."""
        try:
            settings = pack({"type": "prepare", "extra": config.settings})
        except FrameError as error:
            raise ConfigError(f"environment.extra: {error}") from None
        self._name, self._mark = config.code, uuid.uuid4().hex
        self.control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                module_command(
                    "async_rl.environments.fork_server", str(theirs.fileno()), config.code, digest_word(digest),
                    *allowed, flags=("-P",),
                ),
                stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), env={**package_environment(), MARK: self._mark},
            )  # fmt: skip
        self.control.setblocking(False)
        self.is_ready = False
        self._received, self._outgoing = bytearray(), bytearray(settings)
        self._clock, self._heard_s = clock, -math.inf
        self._requests: deque[float] = deque([clock()])  # when each answer that it owes was asked for
        self._flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def silent_s(self) -> float:
        """How many seconds it has owed an answer and given none; 0 if it owes none."""
        return self._clock() - max(self._requests[0], self._heard_s) if self._requests else 0.0

    def fork(self, connection: socket.socket) -> bool:
        """Ask for a process that gets ``connection``. Return False if the request can't be sent now.

        Raises:
            ServerLostError: the server has ended.
        """
        self._flush()
        if not self.is_ready or self._outgoing:
            return False
        try:
            socket.send_fds(self.control, [RECORD.pack(b"F", 0)], [connection.fileno()])
        except BlockingIOError:
            return False
        except OSError as error:
            raise ServerLostError from error
        self._requests.append(self._clock())
        return True

    def kill(self, pid: int) -> None:
        """Have the server kill the process ``pid`` and all that it started."""
        self._outgoing += RECORD.pack(b"K", pid)
        self._flush()

    def receive(self) -> list[int]:
        """Return the ids of the processes that were forked, in the order of the requests; 0 for one that failed.

        Raises:
            ServerLostError: the server has ended, or was silent for too long.
            ConfigError: it can't import or prepare the environment.
        """
        self._flush()
        has_ended = False
        try:
            while chunk := self.control.recv(_CHUNK):
                self._received += chunk
                self._heard_s = self._clock()
            has_ended = True
        except BlockingIOError:
            pass
        except OSError:
            has_ended = True
        pids: list[int] = []
        while len(self._received) >= RECORD.size:
            kind, value = RECORD.unpack_from(self._received)
            if kind == REFUSED:
                if len(self._received) < RECORD.size + value and not has_ended:
                    break
                raise ConfigError(self._received[RECORD.size : RECORD.size + value].decode(errors="replace"))
            del self._received[: RECORD.size]
            if kind == KILLED:
                continue  # not waited for, only a sign of life
            self._requests.popleft()
            if kind == READY:
                self.is_ready = True
            else:
                pids.append(value)
        if has_ended and not pids:
            self._refuse_code()
            raise ServerLostError
        if self.silent_s > (FORK_LIMIT_S if self.is_ready else START_TIMEOUT_S):
            self._refuse_late()
            raise ServerLostError
        return pids

    def close(self) -> None:
        """End the server and all processes that it or its processes started. It may be stopped."""
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)  # it ends by itself when the socket is closed
        self._process.kill()
        self._process.wait()
        kill_marked(MARK, self._mark)

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self.control.send(self._outgoing)]
        except OSError:  # it reads nothing now, or has ended, which ``receive`` finds
            pass

    def _refuse_code(self) -> None:
        """Raise ConfigError if the process has ended before it was ready, so that it would again."""
        if not self.is_ready:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(FORK_LIMIT_S)  # it is ending; its exit code says why
            code = self._process.returncode
            kind = KilledAtStartError if code is not None and code < 0 else ConfigError
            raise kind(
                f"environment.name: the process that imports {self._name} ended with exit code {code}; "
                f"see its output above"
            )

    def _refuse_late(self) -> None:
        """Raise ConfigError if the process has not become ready in time."""
        if not self.is_ready:
            raise ConfigError(
                f"environment.name: {self._name} was not imported and prepared within {START_TIMEOUT_S:g} s; do slow "
                f"work in reset instead"
            )
