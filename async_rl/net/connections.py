"""Limits on the connections of a ROUTER socket. libzmq accepts every connection, and each costs a descriptor.

A connection is unauthenticated until its first message. ``RouterConnections`` keeps only few of those, for a short
time, and with keys it lets them send little more than a handshake: libzmq itself would read a handshake of any size up
to the socket's ``MAXMSGSIZE``. The number of the others is limited too, so that descriptors are left for files.

A monitor of the socket reports the descriptor of each accepted connection. Connections above a limit are shut down by
it, after a check that it still is the same connection; to libzmq, their peer is gone. The monitor's queue is
short: libzmq accepts no further connection before its events are read, so the limits hold however long
that takes. Called by the queue server and by the publisher of weights, from the thread that owns the socket.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator

import zmq
from zmq.utils.monitor import parse_monitor_message

from async_rl.net.streams import (
    MAX_UNAUTHENTICATED,
    MAX_UNAUTHENTICATED_OF_ADDRESS,
    UnauthenticatedPeers,
    raise_descriptor_limit,
)

FIRST_MESSAGE_S = 15.0
"""Time from a connection's begin to its first message. Clients of ours send one at once."""
MAX_CONNECTIONS = 4096
BACKLOG = 1024
_MONITOR_EVENTS = 1000
"""libzmq's own limit of a monitor's queue, to which the reader's ``_READ_EVENTS`` is added."""
_READ_EVENTS = 100
_RESERVED_DESCRIPTORS = 256
"""Descriptors for files and for other sockets of the process."""
_CHECK_S = 0.05
"""Time between two checks of what unauthenticated peers have sent."""
_LOOK_S = 1.0
_SERVER_HANDSHAKE_BYTES = 64 + 170
"""What a server with keys sends before it knows the client: ZMTP's greeting and CURVE's WELCOME."""
_CLIENT_HANDSHAKE_BYTES = 4096
"""A client's greeting, HELLO and INITIATE have less than 1,000 bytes."""
_TCP_INFO_BYTES = 256
_ACKED_AND_RECEIVED = struct.Struct("=QQ")
_ACKED_AT = 120
"""Offset of ``tcpi_bytes_acked`` and ``tcpi_bytes_received`` in Linux's ``struct tcp_info``."""
_CLOSE_MS = 5000

Peer = tuple[str, int]
"""Address and port."""

_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = _REFUSALS | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


class RouterConnections:
    """The connections of ``router``, which is not bound yet. The owner calls ``check`` in every turn of its loop.

    ``has_keys``: the socket admits only clients with a listed key.

    Attributes:
        num_refused: handshakes that were refused. ``num_closed``: connections that were shut down for a limit.
    """

    def __init__(self, router: zmq.Socket[bytes], *, has_keys: bool, max_connections: int | None = None) -> None:
        self.num_refused = self.num_closed = 0
        self._router, self._has_keys = router, has_keys
        self._max = max_connections or most_connections(raise_descriptor_limit())
        self._unauthenticated: UnauthenticatedPeers[int] = UnauthenticatedPeers(
            most=MAX_UNAUTHENTICATED, most_of_address=MAX_UNAUTHENTICATED_OF_ADDRESS
        )
        self._addresses: dict[int, Peer] = {}
        self._checked_at = 0.0
        router.setsockopt(zmq.BACKLOG, BACKLOG)
        endpoint = f"inproc://connections-{id(self)}"
        router.monitor(endpoint, int(_EVENTS))
        self._monitor = router.context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, _READ_EVENTS)
        self._monitor.connect(endpoint)

    def register(self, poller: zmq.Poller) -> None:
        """Wake ``poller`` when connections begin or end."""
        poller.register(self._monitor, zmq.POLLIN)

    def is_among(self, ready: Iterable[object]) -> bool:
        """Whether a poller returned the monitor."""
        return self._monitor in ready

    @property
    def check_within_s(self) -> float:
        """Call ``check`` again after this time, even if nothing arrives."""
        if not self._unauthenticated:
            return float("inf")
        return _CHECK_S if self._has_keys else _LOOK_S

    def note_message(self, frame: zmq.Frame) -> bool:
        """Note that a connection sent the message of this frame.

        Return False if there are too many connections; it is shut down, and the message must be ignored.
        """
        fd = int(frame.get("__fd"))
        if fd not in self._addresses:
            self._read_events()  # its begin was reported before its message came
        if not self._unauthenticated.remove(fd):
            return True
        if len(self._addresses) - len(self._unauthenticated) > self._max:
            self._shut_down(fd)
            return False
        return True

    def check(self) -> None:
        """Read what has happened to connections, and shut down those above a limit."""
        self._read_events()
        now = time.monotonic()
        if now - self._checked_at < min(_CHECK_S, self.check_within_s):
            return
        self._checked_at = now
        for fd in self._unauthenticated.overdue(now - FIRST_MESSAGE_S):
            self._shut_down(fd)
        if self._has_keys:
            for fd in self._unauthenticated.connections():
                if _sends_too_much(fd):
                    self._shut_down(fd)

    def close(self) -> None:
        """Stop watching. The owner has closed the socket."""
        # libzmq may wait for a place in the monitor's queue until it is told to stop.
        while self._monitor.poll(_CLOSE_MS):
            if parse_monitor_message(self._monitor.recv_multipart())["event"] == zmq.EVENT_MONITOR_STOPPED:
                break
        self._monitor.close()

    def _read_events(self) -> None:
        while self._monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] & _REFUSALS:
                self.num_refused += 1
            elif event["event"] == zmq.EVENT_ACCEPTED:
                self._add(event["value"])
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._forget(event["value"])

    def _add(self, fd: int) -> None:
        self._forget(fd)
        try:
            with _borrowed(fd) as connection:
                address = _peer_of(connection, self._port())
        except OSError:
            return  # it has ended already
        if address is None:
            return
        self._addresses[fd] = address
        for other in self._unauthenticated.add(fd, address[0], time.monotonic()):
            self._shut_down(other)

    def _forget(self, fd: int) -> None:
        self._addresses.pop(fd, None)
        self._unauthenticated.remove(fd)

    def _shut_down(self, fd: int) -> None:
        address = self._addresses.get(fd)
        self._forget(fd)
        with contextlib.suppress(OSError), _borrowed(fd) as connection:  # it may have ended meanwhile
            if address is not None and _peer_of(connection, self._port()) == address:
                connection.shutdown(socket.SHUT_RDWR)
                self.num_closed += 1

    def _port(self) -> int:
        endpoint = self._router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").rsplit(b":", 1)[1])


def most_connections(max_descriptors: int) -> int:
    """The number of connections that leaves descriptors for everything else, however many more are accepted."""
    others = _RESERVED_DESCRIPTORS + _MONITOR_EVENTS + _READ_EVENTS + MAX_UNAUTHENTICATED
    return min(MAX_CONNECTIONS, max(max_descriptors - others, max_descriptors // 4))


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A socket object of libzmq's descriptor, which stays open. Raises OSError: it is none, or no socket."""
    connection = socket.socket(fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()


def _peer_of(connection: socket.socket, port: int) -> Peer | None:
    """The address of the peer, if this is a connection to our ``port``.

    Another part of the process may have got the descriptor meanwhile. Raises OSError: the connection has ended.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
        return None
    return connection.getpeername()[:2]


def _sends_too_much(fd: int) -> bool:
    """Whether a peer sent more than a handshake before the server knew it."""
    if sys.platform != "linux":
        return False
    try:
        with _borrowed(fd) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return False
    acked, received = _ACKED_AND_RECEIVED.unpack_from(info, _ACKED_AT)
    return acked <= _SERVER_HANDSHAKE_BYTES and received > _CLIENT_HANDSHAKE_BYTES
