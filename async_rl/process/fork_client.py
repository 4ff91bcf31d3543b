"""A fork server, seen from its owner: asks it for processes, without waiting for them unless ``wait`` is called.

A server that is silent for ``FORK_LIMIT_S`` seconds is lost. One that answers steadily is not silent, however many
requests wait. Each owner starts its own server, so the user's code shares no process with others.
"""

from __future__ import annotations

import math
import select
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable

from async_rl.process.child import package_environment
from async_rl.process.family import kill_marked
from async_rl.process.fork_server import FORK, KILL, KILL_FAMILY, MARK, READY, RECORD, REFUSED
from async_rl.process.helper import Channel, Helper

START_TIMEOUT_S = 120.0
"""Time limit for importing and preparing what the processes share, on a busy machine too."""
FORK_LIMIT_S = 30.0
"""Seconds without any answer after which a fork server that owes one is lost."""
_EXIT_S = 1.0
_LOOK_MS = 1000


class ServerLostError(Exception):
    """The fork server has ended, or was silent for too long."""


class StartError(Exception):
    """The fork server did not become ready. ``exit_code`` is None unless it ended."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ForkServer:
    """One fork server.

    Args:
        module: the module of its process, a helper that uses ``fork_server.Forker``, and ``arguments`` for it.
        content: what it imports, for messages.
        settings: bytes that it reads before it is ready.
        clock: returns the time in seconds.
    """

    def __init__(
        self, module: str, *arguments: str, content: str, settings: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._content, self._mark = content, uuid.uuid4().hex
        self._helper = Helper(module, *arguments, environment={**package_environment(), MARK: self._mark})
        self._channel = Channel(self._helper.socket)
        self._channel.send(settings)
        self.is_ready = False
        self._clock, self._heard_s = clock, -math.inf
        self._requests: deque[float] = deque([clock()])  # when each answer that it owes was asked for

    @property
    def pid(self) -> int:
        return self._helper.pid

    @property
    def control(self) -> socket.socket:
        """The socket to the server, readable when ``receive`` has something to return."""
        return self._channel.socket

    @property
    def silent_s(self) -> float:
        """How many seconds it has owed an answer and given none; 0 if it owes none."""
        return self._clock() - max(self._requests[0], self._heard_s) if self._requests else 0.0

    def fork(self, connection: socket.socket) -> bool:
        """Ask for a process that gets ``connection``. Return False if the request can't be sent now.

        Raises:
            ServerLostError: the server has ended.
        """
        self._channel.send()
        if not self.is_ready or self._channel.outgoing:
            return False
        try:
            socket.send_fds(self.control, [RECORD.pack(FORK, 0)], [connection.fileno()])
        except BlockingIOError:
            return False
        except OSError as error:
            raise ServerLostError from error
        self._requests.append(self._clock())
        return True

    def kill(self, pid: int, *, with_family: bool = False) -> None:
        """Have the server kill the process ``pid``, ``with_family`` also all that it started."""
        self._channel.send(RECORD.pack(KILL_FAMILY if with_family else KILL, pid))

    def receive(self) -> list[tuple[bytes, int]]:
        """Return the server's answers, as ``fork_server`` lists them, in the order of the requests.

        Raises:
            ServerLostError: the server has ended, or was silent for too long.
            StartError: the same before it was ready, or it has refused.
        """
        self._channel.send()
        received, size = self._channel.incoming, len(self._channel.incoming)
        is_alive = self._channel.receive()
        if len(received) > size:
            self._heard_s = self._clock()
        answers: list[tuple[bytes, int]] = []
        while len(received) >= RECORD.size:
            kind, number = RECORD.unpack_from(received)
            if kind == REFUSED:
                if len(received) < RECORD.size + number and is_alive:
                    break
                raise StartError(received[RECORD.size : RECORD.size + number].decode(errors="replace"))
            del received[: RECORD.size]
            answers.append((kind, number))
            if kind in (FORK, READY):  # which is not waited for, only a sign of life
                self._requests.popleft()
            self.is_ready |= kind == READY
        if not is_alive and not answers:
            raise ServerLostError if self.is_ready else self._ended_early()
        if self.is_ready and self.silent_s > FORK_LIMIT_S:
            raise ServerLostError
        if not self.is_ready and self.silent_s > START_TIMEOUT_S:
            raise StartError(
                f"{self._content} was not imported and prepared within {START_TIMEOUT_S:g} s; do slow work in each "
                f"process instead, such as in an environment's reset"
            )
        return answers

    def wait(self) -> list[tuple[bytes, int]]:
        """Wait until ``receive`` has answers, and return them. It raises the same errors."""
        deadline_s = self._clock() + FORK_LIMIT_S
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        while not (answers := self.receive()):
            if self.is_ready and self._clock() > deadline_s:
                raise ServerLostError
            poller.poll(_LOOK_MS)
        return answers

    def close(self) -> None:
        """End the server and all processes that it or its processes started. It may be stopped."""
        self._helper.stop(_EXIT_S)
        kill_marked(MARK, self._mark)

    def _ended_early(self) -> StartError:
        code = self._helper.wait(FORK_LIMIT_S)  # it is ending; its exit code says why
        return StartError(
            f"the process that imports {self._content} ended with exit code {code}; see its output above", code
        )
