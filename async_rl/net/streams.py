"""Streams of bytes between processes: TCP sockets and pipes. Read exactly n bytes, and send messages as frames.

A frame is a little-endian uint32 length, followed by that many bytes. Functions here get a function ``read(size)`` that
returns 1 to ``size`` bytes, or ``b""`` at the end of the stream: ``socket.recv``, or the result of ``until``, which has
a deadline. Called by environments, rewards, doctor and the weights' transports. No torch, no ZeroMQ.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from async_rl.errors import WireError

LENGTH_BYTES = 4
_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1 << 20
_MANY_DESCRIPTORS = 10_240
"""What macOS allows where its hard limit is infinite."""


class StreamEndedError(ConnectionError):
    """The stream ended before all expected bytes arrived."""


def read_exactly(read: Callable[[int], bytes], size: int, *, may_end: bool = False) -> bytes:
    """Read ``size`` bytes. With ``may_end``, return ``b""`` if the stream ends before the first byte.

    Raises:
        StreamEndedError: the stream ended before the last byte.
    """
    data = bytearray()
    while len(data) < size:
        chunk = read(min(size - len(data), _CHUNK_BYTES))
        if not chunk:
            if may_end and not data:
                return b""
            raise StreamEndedError(f"the peer closed the connection after {len(data)} of {size} bytes")
        data += chunk
    return bytes(data)


def until(connection: socket.socket, deadline: float) -> Callable[[int], bytes]:
    """Return a ``read`` function that waits for bytes until ``deadline`` (``time.monotonic``), over all calls.

    It changes the connection's timeout. It raises TimeoutError (an OSError) after the deadline.
    """

    def read(size: int) -> bytes:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the peer did not send its whole message before the deadline")
        connection.settimeout(remaining_s)
        return connection.recv(size)

    return read


MAX_UNAUTHENTICATED, MAX_UNAUTHENTICATED_OF_ADDRESS = 256, 128

_C = TypeVar("_C", bound=Hashable)


class UnauthenticatedPeers(Generic[_C]):
    """Connections that have not authenticated themselves yet: a limited number, in total and by address.

    A connection above a limit takes the place of the oldest, so that many slow peers keep nobody out. Not thread-safe.
    """

    def __init__(self, *, most: int, most_of_address: int) -> None:
        self._most, self._most_of_address = most, most_of_address
        self._begun: dict[_C, tuple[str, float]] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._begun)

    def add(self, connection: _C, address: str, now: float) -> list[_C]:
        """Count a new connection. Return the connections to close: the oldest, if there are too many."""
        self._begun[connection] = address, now
        self._counts[address] += 1
        closed: list[_C] = []
        if self._counts[address] > self._most_of_address:
            closed.append(next(other for other, (where, _) in self._begun.items() if where == address))
        elif len(self._begun) > self._most:
            closed.append(next(iter(self._begun)))
        for other in closed:
            self.remove(other)
        return closed

    def remove(self, connection: _C) -> bool:
        """Stop counting a connection, which has authenticated itself or ended. Return whether it was counted."""
        begun = self._begun.pop(connection, None)
        if begun is None:
            return False
        self._counts[begun[0]] -= 1
        if not self._counts[begun[0]]:
            del self._counts[begun[0]]
        return True

    def connections(self) -> list[_C]:
        """All of them, oldest first."""
        return list(self._begun)

    def overdue(self, begun_before: float) -> list[_C]:
        """Those that began before this time."""
        return [connection for connection, (_, begun) in self._begun.items() if begun < begun_before]


def raise_descriptor_limit() -> int:
    """Raise this process's limit on open files to the hard limit. Return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, _MANY_DESCRIPTORS)
    if soft != wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def is_readable(fd: int, timeout_s: float) -> bool:
    """Whether this descriptor is readable, or its other end closed, within ``timeout_s``.

    Unlike ``select.select`` it takes descriptors above 1023 too.
    """
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def is_out_of_resources(error: OSError) -> bool:
    """Whether ``accept`` failed because the process or machine has no room for another connection right now."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def receive_into(connection: socket.socket, into: memoryview) -> None:
    """Fill ``into`` with the next bytes of ``connection``, without a copy.

    Raises:
        StreamEndedError: the stream ended before the last byte.
    """
    filled = 0
    while filled < len(into):
        count = connection.recv_into(into[filled:])
        if count == 0:
            raise StreamEndedError(f"the peer closed the connection after {filled} of {len(into)} bytes")
        filled += count


def pack_frame(body: bytes) -> bytes:
    """Return ``body`` as a frame."""
    return _LENGTH.pack(len(body)) + body


def read_frame(read: Callable[[int], bytes], *, max_bytes: int) -> bytes | None:
    """Read the body of the next frame; None if the stream ends before it.

    Raises:
        WireError: the frame is longer than ``max_bytes``.
        StreamEndedError: the stream ended inside the frame.
    """
    header = read_exactly(read, LENGTH_BYTES, may_end=True)
    return read_body(read, header, max_bytes=max_bytes) if header else None


def read_body(read: Callable[[int], bytes], header: bytes, *, max_bytes: int) -> bytes:
    """Read the body of the frame whose first ``LENGTH_BYTES`` are ``header``.

    Raises:
        WireError, StreamEndedError: see ``read_frame``.
    """
    return read_exactly(read, _checked_length(header, max_bytes))


def take_frame(buffer: bytearray, *, max_bytes: int) -> bytes | None:
    """Remove the first frame from ``buffer`` and return its body; None if the frame is not complete yet.

    Raises:
        WireError: the frame is longer than ``max_bytes``.
    """
    if len(buffer) < LENGTH_BYTES:
        return None
    end = LENGTH_BYTES + _checked_length(buffer, max_bytes)
    if len(buffer) < end:
        return None
    body = bytes(buffer[LENGTH_BYTES:end])
    del buffer[:end]
    return body


def _checked_length(header: bytes | bytearray, max_bytes: int) -> int:
    (length,) = _LENGTH.unpack_from(header)
    if length > max_bytes:
        raise WireError(f"expected a message of at most {max_bytes} bytes, got {length}")
    return length


# TCP sockets.


def listening_socket(host: str) -> socket.socket:
    """Return a socket that listens on any free port of ``host``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(1024)
    return listener


def shut_down(connection: socket.socket) -> None:
    """End a connection for both sides, even during a read or write. Its descriptor stays open."""
    with contextlib.suppress(OSError):  # it may be closed already, by either side
        connection.shutdown(socket.SHUT_RDWR)
