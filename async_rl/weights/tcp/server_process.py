"""The learner's handle on its stream server: starts it, tells it things, starts it again when it died.

Used by the publisher alone, by one thread at a time. What the server says comes by ``poll``; ``fileno`` says when.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess

from async_rl.errors import WeightsError
from async_rl.process.child import module_command, package_environment
from async_rl.weights.shared_memory import SharedBuckets
from async_rl.weights.tcp import server_link as link

logger = logging.getLogger(__name__)

MAX_STARTS = 5
_SAY_S = 5.0
_END_S = 5.0


class StreamHost:
    """A stream server that listens at any port of ``bind_host``. It takes a moment to come up; nobody waits for it."""

    def __init__(self, bind_host: str) -> None:
        self._bind_host = bind_host
        self._mapped: dict[int, SharedBuckets] = {}
        self._num_starts = 0
        self._start()

    def fileno(self) -> int:
        """Readable when ``poll`` has something to give. Another one after the server was started again."""
        return self._link.fileno()

    @property
    def port(self) -> int | None:
        """Where it listens; None while it is starting."""
        return self._port

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_starts(self) -> int:
        """How often it was started; sessions and deltas of the starts before are gone."""
        return self._num_starts

    def poll(self) -> link.Encoded | None:
        """What the server said, if anything. Call only when readable.

        Raises:
            WeightsError: it died, and can't be started again.
        """
        received = link.receive(self._link, link.TO_LEARNER)
        if received is None:
            self._restart()
            return None
        message, _ = received
        if isinstance(message, link.Listening):
            self._port = message.port
            return None
        return message

    def map_slot(self, number: int, memory: SharedBuckets) -> None:
        """Tell of this buffer, unless the server knows it."""
        if self._mapped.get(number) is not memory:
            self._mapped[number] = memory
            self._say(link.MapSlot(number, memory.sizes, memory.offsets), memory.fd)

    def open_session(self, session: link.OpenSession) -> None:
        self._say(session)

    def end_session(self, token: bytes) -> None:
        self._say(link.EndSession(token))

    def encode(self, order: link.Encode) -> None:
        self._say(order)

    def forget(self, job: int) -> None:
        self._say(link.Forget(job))

    def close(self) -> None:
        """End the server."""
        self._link.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _say(self, message: link.LearnerMessage, fd: int | None = None) -> None:
        # A dead server shows as the end of its stream, which ``poll`` sees; what was said to it goes with its sessions.
        with contextlib.suppress(OSError):
            link.send(self._link, message, fd)

    def _start(self) -> None:
        self._num_starts += 1
        self._port: int | None = None
        self._link, theirs = socket.socketpair()
        self._link.settimeout(_SAY_S)
        with theirs:
            self._process = subprocess.Popen(
                module_command("async_rl.weights.tcp.server", str(theirs.fileno()), flags=("-P",)),
                pass_fds=(theirs.fileno(),),
                env={**package_environment(), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
            )
        self._say(link.Listen(self._bind_host))

    def _restart(self) -> None:
        self._link.close()
        self._process.kill()
        code = self._process.wait()
        if self._num_starts >= MAX_STARTS:
            raise WeightsError(
                f"the stream server of the weights (tcp, at {self._bind_host}) ended {MAX_STARTS} times, at last with "
                f"code {code}; what it wrote is in this log"
            )
        logger.warning("the stream server of the weights died with code %d: starting it again", code)
        self._start()
        mapped, self._mapped = self._mapped, {}
        for number, memory in mapped.items():
            self.map_slot(number, memory)
