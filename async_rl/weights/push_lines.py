"""The learner's side of *standing*: connections over which versions go out unasked. No torch.

A member that has a version connects to ``port``, shows the token that came with it, and says what became of it; it
stands then. The next version goes out as soon as it is published: a head (the control message that would have
announced it), and all buckets behind. Buckets that did not match are asked for again over the same connection.

The publisher sends heads, and of small versions what the kernel takes at once, and reads what is asked, without ever
waiting; one thread at a time is in here. The rest is sent by a thread of the line's own, which waits in the kernel,
outside the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from async_rl.errors import WireError
from async_rl.net.sockets import hang_up, listening_socket
from async_rl.weights import control
from async_rl.weights.tcp.protocol import MAX_SAID_BYTES, TOKEN_BYTES, Request, encode_head, take_request

logger = logging.getLogger(__name__)

MAX_LINES = 4096
_STALL_S = 30
"""A line on which nothing moves for so long is ended."""
_AT_ONCE_BYTES = 16 << 20
"""Versions of up to this size, all lines together, are sent by the publisher itself, which takes the learner a few
milliseconds. 10 MB that a thread is woken for take a quarter longer; a larger version takes its time anyway."""
MAX_REQUEST_BYTES = MAX_SAID_BYTES + 100
"""Of who has not shown a token yet: a request without items."""
_STRANGER_S = 10.0
"""Who connects has so long to show a token."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A member said this by its line, and stands now."""

    member_id: bytes
    ack: control.Ack


@dataclass(frozen=True, slots=True)
class Lost:
    """What was pushed in this attempt did not reach the member, or nobody knows."""

    member_id: bytes
    attempt: int


@dataclass(frozen=True, slots=True)
class _Push:
    """A version under way. ``buckets`` are whole, of any bytes-like kind; ``token`` is what more is asked for with."""

    attempt: int
    token: bytes
    buckets: Sequence[memoryview]


@dataclass(slots=True, eq=False)
class _Line:
    """One connection; ``member_id`` once a token was shown. It stands while there is no ``push``."""

    connection: socket.socket
    since: float
    inbox: bytearray = field(default_factory=bytearray)
    member_id: bytes | None = None
    push: _Push | None = None
    work: queue.SimpleQueue[Sequence[memoryview] | None] = field(default_factory=queue.SimpleQueue)


class PushLines:
    """All lines of a publisher; listens at any port of ``host``."""

    def __init__(self, host: str) -> None:
        self._listener = listening_socket(host)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.num_malformed = 0
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._lines: dict[int, _Line] = {}
        self._expected: dict[bytes, bytes] = {}
        self._tokens: dict[bytes, bytes] = {}
        self._standing: dict[bytes, _Line] = {}
        self._pushing: defaultdict[int, set[_Line]] = defaultdict(set)

    def fileno(self) -> int:
        """Readable when ``poll`` has something to do."""
        return self._epoll.fileno()

    def expect(self, member_id: bytes) -> bytes:
        """The token with which this member may stand, from now on the only one."""
        self._forget(member_id)
        token = self._tokens[member_id] = os.urandom(TOKEN_BYTES)
        self._expected[token] = member_id
        return token

    def stands(self, member_id: bytes) -> bool:
        return member_id in self._standing

    def push(self, member_id: bytes, attempt: int, token: bytes, head: bytes, buckets: Sequence[memoryview]) -> bool:
        """Send a version to a member, or a word about one (without ``buckets``); False unless it stands.

        The buckets are read until its acknowledgement is heard, it is lost, or ``end`` is called.
        """
        line = self._standing.pop(member_id, None)
        if line is None:
            return False
        left = deque([memoryview(encode_head(head)), *buckets])
        try:
            is_small = sum(map(len, left)) * len(self._lines) <= _AT_ONCE_BYTES
            _send_some(line.connection, left, len(left) if is_small else 1)
        except OSError:
            self._drop(line)
            return False
        line.push = _Push(attempt, token, buckets)
        self._pushing[attempt].add(line)
        if left:
            line.work.put([*left])
        return True

    def end(self, attempt: int) -> None:
        """Nobody waits for this attempt any more: what is still under way is cut off."""
        for line in [*self._pushing.get(attempt, ())]:
            self._drop(line)

    def keep(self, member_ids: Container[bytes]) -> None:
        """Nobody else stands any more, nor may."""
        for member_id in [m for m in {*self._tokens, *self._standing} if m not in member_ids]:
            self._forget(member_id)
            if (line := self._standing.get(member_id)) is not None:
                self._drop(line)

    def poll(self) -> list[Heard | Lost]:
        """Hear what was said. Call when readable."""
        events: list[Heard | Lost] = []
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            elif (line := self._lines.get(fd)) is not None:
                events += self._read(line)
        return events

    def close(self) -> None:
        """End all lines, what is under way included."""
        for line in list(self._lines.values()):
            self._drop(line)
        self._listener.close()
        self._epoll.close()

    def _accept(self) -> None:
        now = time.monotonic()
        for line in [x for x in self._lines.values() if x.member_id is None and now - x.since > _STRANGER_S]:
            self._drop(line)
        with contextlib.suppress(OSError):  # it is gone again, or this process is out of descriptors for a while
            connection, _ = self._listener.accept()
            if len(self._lines) >= MAX_LINES:
                connection.close()
                return
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _STALL_S, 0))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._lines[connection.fileno()] = _Line(connection, now)
            self._epoll.register(connection, select.EPOLLIN)

    def _read(self, line: _Line) -> list[Heard | Lost]:
        try:
            data = line.connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return self._drop(line)
        line.inbox += data
        events: list[Heard | Lost] = []
        try:
            while (request := take_request(line.inbox)) is not None:
                events += self._take(line, request)
            if line.member_id is None and len(line.inbox) > MAX_REQUEST_BYTES:
                raise WireError(f"expected a token within {MAX_REQUEST_BYTES} bytes")
        except WireError as error:
            logger.info("a line of the weights ended: %s", error)
            self.num_malformed += 1
            return [*events, *self._drop(line)]
        return events

    def _take(self, line: _Line, request: Request) -> list[Heard]:
        """
        Raises:
            WireError: it is not what may be asked now.
        """
        if not request.said:
            push = line.push
            if push is None or request.token != push.token or any(i >= len(push.buckets) for i in request.items):
                raise WireError("expected a request for buckets of what is under way")
            line.work.put([push.buckets[index] for index in request.items])
            return []
        ack = control.decode_message(request.said, (control.Ack,), control.TO_PUBLISHER_LIMITS)
        member_id = self._expected.get(request.token)
        if member_id is None:
            raise WireError("expected a token with which somebody may stand")
        self._forget(member_id)
        if (other := self._standing.get(member_id)) is not None and other is not line:
            self._drop(other)
        if line.member_id is None:
            threading.Thread(target=_send_all, args=(line,), name="weights-line", daemon=True).start()
        line.member_id = member_id
        self._done(line)
        self._standing[member_id] = line
        return [Heard(member_id, ack)]

    def _done(self, line: _Line) -> _Push | None:
        """Nothing is under way on this line any more; what was."""
        push, line.push = line.push, None
        if push is not None:
            self._pushing[push.attempt].discard(line)
            if not self._pushing[push.attempt]:
                del self._pushing[push.attempt]
        return push

    def _drop(self, line: _Line) -> list[Heard | Lost]:
        """End a line; what is lost by that."""
        fd = line.connection.fileno()
        self._epoll.unregister(fd)
        del self._lines[fd]
        push, member_id = self._done(line), line.member_id
        if member_id is None:
            line.connection.close()
            return []
        if self._standing.get(member_id) is line:
            del self._standing[member_id]
        # Its thread may be amid a send: that ends now, and the thread closes the connection.
        hang_up(line.connection)
        line.work.put(None)
        return [] if push is None else [Lost(member_id, push.attempt)]

    def _forget(self, member_id: bytes) -> None:
        if (token := self._tokens.pop(member_id, None)) is not None:
            del self._expected[token]


def _send_some(connection: socket.socket, parts: deque[memoryview], num_parts: int) -> None:
    """Take from ``parts`` what can be sent at once of the first ``num_parts``."""
    end = len(parts) - num_parts
    with contextlib.suppress(BlockingIOError):
        while len(parts) > end:
            count = connection.send(parts[0], socket.MSG_DONTWAIT)
            part = parts.popleft()
            if count < len(part):
                parts.appendleft(part[count:])


def _send_all(line: _Line) -> None:
    """The line's thread: sends what it is given, until it is given None."""
    with line.connection:
        try:
            # By names of its own: one that lasts would keep a version's memory.
            while _send_next(line):
                pass
        except OSError as error:
            logger.info("a line of the weights ended: %s", error)
            # The publisher sees it end, and says so.
            hang_up(line.connection)
            while line.work.get() is not None:
                pass


def _send_next(line: _Line) -> bool:
    """Whether there was something to send, and more may come."""
    parts = line.work.get()
    for part in parts or ():
        line.connection.sendall(part)
    return parts is not None
