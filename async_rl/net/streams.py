"""Byte streams between processes (TCP sockets and pipes): read exactly n bytes, send and receive frames. No ZeroMQ.

A frame is a little-endian uint32 length, followed by that many bytes. The functions that read get a function
``read(size)`` as an argument. It returns 1 to ``size`` bytes, or ``b""`` at the end of the stream. ``socket.recv`` is
such a function, and ``until`` returns one with a deadline. Environments, rewards, doctor and the weights' transports
use this module.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import select
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from async_rl.errors import AddressError, WireError
from async_rl.net.address import url_host

LENGTH_BYTES = 4
_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1 << 20
_MANY_DESCRIPTORS = 10_240
"""The largest limit on open files that macOS accepts if its hard limit is infinite."""


class StreamEndedError(ConnectionError):
    """A stream ended before all expected bytes arrived."""


def read_exactly(read: Callable[[int], bytes], size: int, *, may_end: bool = False) -> bytes:
    """Read and return ``size`` bytes. With ``may_end``, return ``b""`` if the stream ends before the first byte.

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
    """Return a function ``read(size)`` that reads from ``connection`` until ``deadline``, a time of ``time.monotonic``.

    The deadline holds for all calls together. ``read`` changes the timeout of ``connection``, and raises TimeoutError
    (an OSError) after the deadline.
    """

    def read(size: int) -> bytes:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the peer did not send its whole message before the deadline")
        connection.settimeout(remaining_s)
        return connection.recv(size)

    return read


_TCP_INFO_BYTES = 256
_ACKED_AND_RECEIVED = struct.Struct("=QQ")
_ACKED_AT = 120
"""Offset of ``tcpi_bytes_acked`` and ``tcpi_bytes_received`` in Linux's ``struct tcp_info``."""


def tcp_counts(connection: socket.socket) -> tuple[int, int]:
    """Return how many bytes the peer's system has acknowledged, and how many have come from it. 0 if this system does
    not count them.

    Raises:
        OSError: the connection is closed.
    """
    if sys.platform != "linux":
        return 0, 0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return _ACKED_AND_RECEIVED.unpack_from(info.ljust(_TCP_INFO_BYTES, b"\0"), _ACKED_AT)


MAX_UNAUTHENTICATED, MAX_UNAUTHENTICATED_OF_ADDRESS = 256, 128

_C = TypeVar("_C", bound=Hashable)


class UnauthenticatedPeers(Generic[_C]):
    """The connections whose peers have not authenticated themselves yet.

    Their number is limited, in total and by address. A new connection above a limit replaces the oldest one, so that
    many slow peers can't keep others out. Not thread-safe.

    Args:
        most: limit on all of these connections.
        most_of_address: limit on those from one IP address.
    """

    def __init__(self, *, most: int, most_of_address: int) -> None:
        self._most, self._most_of_address = most, most_of_address
        self._begun: dict[_C, tuple[str, float]] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._begun)

    def add(self, connection: _C, address: str, now: float) -> list[_C]:
        """Add a new connection.

        Return the connections that the caller must close: the oldest one if a limit is exceeded.
        """
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
        """Remove a connection that has authenticated itself or ended. Return whether it was present."""
        begun = self._begun.pop(connection, None)
        if begun is None:
            return False
        self._counts[begun[0]] -= 1
        if not self._counts[begun[0]]:
            del self._counts[begun[0]]
        return True

    def connections(self) -> list[_C]:
        """Return all unauthenticated connections, the oldest first."""
        return list(self._begun)

    def overdue(self, begun_before: float) -> list[_C]:
        """Return the unauthenticated connections that began before the time ``begun_before``."""
        return [connection for connection, (_, begun) in self._begun.items() if begun < begun_before]


def raise_descriptor_limit() -> int:
    """Raise this process's limit on open files to the hard limit. Return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, _MANY_DESCRIPTORS)
    if soft != wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def descriptors_for_peers(max_descriptors: int, others: int) -> int:
    """Return how many of a process's descriptors its connections may use, if it needs ``others`` for other things.

    They may use at least a quarter, so that a process with a low limit serves a few peers and not none.
    """
    return max(max_descriptors - others, max_descriptors // 4)


def is_readable(fd: int, timeout_s: float) -> bool:
    """Wait until descriptor ``fd`` is readable or its other end is closed. Return False if ``timeout_s`` passes first.

    Unlike ``select.select``, it also accepts descriptors above 1023.
    """
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def is_out_of_resources(error: OSError) -> bool:
    """Return whether ``accept`` failed only because the process or machine has no room for another connection now."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def receive_into(connection: socket.socket, into: memoryview) -> None:
    """Fill the buffer ``into`` with the next bytes of ``connection``, without a copy.

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
    """Return ``body`` as a frame: its length, then its bytes."""
    return _LENGTH.pack(len(body)) + body


def read_frame(read: Callable[[int], bytes], *, max_bytes: int) -> bytes | None:
    """Read a frame and return its body; None if the stream ends before the frame.

    Raises:
        WireError: the frame is longer than ``max_bytes``.
        StreamEndedError: the stream ended inside the frame.
    """
    header = read_exactly(read, LENGTH_BYTES, may_end=True)
    return read_body(read, header, max_bytes=max_bytes) if header else None


def read_body(read: Callable[[int], bytes], header: bytes, *, max_bytes: int) -> bytes:
    """Read and return the body of a frame whose length, ``header``, was already read (``LENGTH_BYTES`` bytes).

    Raises:
        WireError: the frame is longer than ``max_bytes``.
        StreamEndedError: the stream ended inside the frame.
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


def listening_socket(host: str, ports: Sequence[int] | None = None) -> socket.socket:
    """Return a TCP socket that listens at ``host``, on the first free port of ``ports``. None takes any free port.

    Raises:
        AddressError: all of ``ports`` are in use, or ``host`` is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (0,) if ports is None else ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        # Only to a port that is chosen by the user: connections of an earlier process may still be closing there.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port > 0))
        try:
            listener.bind((host, port))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE and port:
                continue
            raise AddressError(
                f"can't listen at {url_host(host)}:{port}: {error.strerror}; choose other ports (weights.port), or "
                f"an address of this machine"
            ) from error
        return listener
    raise no_free_port(host, ports)


def no_free_port(host: str, ports: Sequence[int] | None) -> AddressError:
    """Return the error for ``ports`` of ``host`` that are all in use. None stands for all ports of this machine."""
    named = "all ports" if ports is None else f"the ports {ports[0]} to {ports[-1]}"
    return AddressError(
        f"weights.port: expected two free ports, one for each listener of the learner, but {named} of {url_host(host)} "
        f"are in use (ss -ltnp shows by whom); set weights.port to other ports, or to a larger range"
    )


def shut_down(connection: socket.socket) -> None:
    """End a connection in both directions, even while a thread reads or writes it. Its descriptor stays open."""
    with contextlib.suppress(OSError):  # it may be closed already, by either side
        connection.shutdown(socket.SHUT_RDWR)
