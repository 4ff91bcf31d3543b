"""Limit the connections of a ZeroMQ ROUTER socket, because each connection uses a file descriptor of the process.

libzmq itself accepts every connection, and reads a handshake of any size up to the socket's ``MAXMSGSIZE``. Until its
first message, a connection counts as unauthenticated. ``RouterConnections`` allows only a small number of
unauthenticated connections, for a short time, and with keys only the bytes of a handshake. It also limits the number of
the other connections, so that descriptors are left for files.

libzmq reports the descriptor of each accepted connection as an event of a monitor socket. To close a connection, this
module shuts its descriptor down, after a check that the descriptor still is that connection. libzmq then sees that the
peer is gone. The monitor's event queue is short, and libzmq accepts no further connection while the queue is full. So
the limits hold even if the events are read late.

On a server with keys, CURVE checks a key only when a connection begins. This module asks the server's list again at
each message, and closes the connections of keys that the list has lost.

A machine that loses power or its network ends no connection. The kernel's keepalive finds that out, and closes it.
libzmq's own heartbeats must not be used for that: its timer aborts this process if a peer has filled the receive queue
and is gone (libzmq issue 4364).

``net.service`` uses this module, in the thread that owns the socket.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import zmq
from zmq.utils.monitor import parse_monitor_message

from async_rl.net.keys import AllowList
from async_rl.net.streams import UnauthenticatedPeers, descriptors_for_peers, raise_descriptor_limit, tcp_counts

FIRST_MESSAGE_S = 15.0
"""Seconds from the begin of a connection until its first message must have arrived. The clients of async-rl send a
message at once."""
MAX_UNAUTHENTICATED, MAX_UNAUTHENTICATED_OF_ADDRESS = 1024, 512
"""More than at other ports: all generators of a run may connect at once, when a busy server has time again."""
MAX_CONNECTIONS = 4096
BACKLOG = 1024
_MONITOR_EVENTS = 1000
"""libzmq's default length of a socket's send queue. The monitor's queue can hold this many events and ``_READ_EVENTS``
more."""
_READ_EVENTS = 100
_RESERVED_DESCRIPTORS = 256
"""Number of file descriptors that are kept free for files and other sockets of the process."""
_CHECK_S = 0.05
"""Seconds between two checks of how many bytes unauthenticated peers have sent."""
_LOOK_S = 1.0
_SERVER_HANDSHAKE_BYTES = 64 + 170
"""Number of bytes that a server with keys sends before the client has authenticated itself: ZMTP's greeting and CURVE's
WELCOME."""
_CLIENT_HANDSHAKE_BYTES = 4096
"""Number of bytes that an unauthenticated client may send. The handshake (greeting, HELLO and INITIATE) has less than
1,000."""
KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 10, zmq.TCP_KEEPALIVE_INTVL: 5, zmq.TCP_KEEPALIVE_CNT: 4}
"""The kernel asks a peer that was silent for 10 s every 5 s, and closes its connection after 4 questions without an
answer."""
_CLOSE_MS = 5000

Peer = tuple[str, int]
"""IP address and port of a connection's peer."""

_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = _REFUSALS | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


class RouterConnections:
    """Counts the connections of ``router`` and shuts down those above a limit. Create it before ``router`` is bound.

    The service calls ``check`` in every turn of its loop.

    Args:
        allow_list: the clients that ``router`` admits. None: any.
        max_connections: limit on authenticated connections. The limit on open files may lower it.
        on_ended: called with the descriptor of each connection that has ended.

    Attributes:
        num_refused: number of handshakes that were refused.
        num_closed: number of connections that were shut down because of a limit.
        num_above: those of them that were more than ``max_connections``.
        max_connections: the limit on authenticated connections.
    """

    def __init__(
        self, router: zmq.Socket[bytes], *, allow_list: AllowList | None, max_connections: int = MAX_CONNECTIONS,
        on_ended: Callable[[int], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.num_refused = self.num_closed = self.num_above = 0
        self._router, self._allow_list, self._on_ended = router, allow_list, on_ended
        self._keys: dict[int, bytes] = {}
        self._num_removed = 0 if allow_list is None else allow_list.num_removed
        self.max_connections = min(max_connections, most_connections(raise_descriptor_limit()))
        self._unauthenticated: UnauthenticatedPeers[int] = UnauthenticatedPeers(
            most=MAX_UNAUTHENTICATED, most_of_address=MAX_UNAUTHENTICATED_OF_ADDRESS
        )
        self._addresses: dict[int, Peer] = {}
        self._checked_at = 0.0
        router.setsockopt(zmq.BACKLOG, BACKLOG)
        for option, value in KEEPALIVE.items():
            router.setsockopt(option, value)
        endpoint = f"inproc://connections-{id(self)}"
        router.monitor(endpoint, int(_EVENTS))
        self._monitor = router.context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, _READ_EVENTS)
        self._monitor.connect(endpoint)

    def register(self, poller: zmq.Poller) -> None:
        """Make ``poller`` wake up when a connection of the socket begins or ends."""
        poller.register(self._monitor, zmq.POLLIN)

    @property
    def check_within_s(self) -> float:
        """Seconds until ``check`` must be called again even if nothing arrives; infinity if it need not be called."""
        if not self._unauthenticated:
            return float("inf") if self._allow_list is None else _LOOK_S
        return _LOOK_S if self._allow_list is None else _CHECK_S

    def note_message(self, frame: zmq.Frame) -> bool:
        """Record that the connection from which ``frame`` came has sent a message, so that it counts as authenticated.

        Return False if there are too many connections, or if the sender's key is not admitted any more. This connection
        is then shut down, and the caller must ignore its message.
        """
        fd = int(frame.get("__fd"))
        if fd not in self._addresses:
            self._read_events()  # its begin was reported before its message came
        if self._allow_list is not None:
            key = str(frame.get("User-Id")).encode()
            if self._allow_list.name_of(key) is None:
                self._shut_down(fd)
                return False
            self._keys[fd] = key
        if not self._unauthenticated.remove(fd):
            return True
        if len(self._addresses) - len(self._unauthenticated) > self.max_connections:
            is_closed = self._shut_down(fd)
            self.num_closed, self.num_above = self.num_closed + is_closed, self.num_above + is_closed
            return False
        return True

    def check(self) -> None:
        """Read the monitor's events, and shut down each connection that is above a limit."""
        self._read_events()
        now = time.monotonic()
        if now - self._checked_at < min(_CHECK_S, self.check_within_s):
            return
        self._checked_at = now
        for fd in self._unauthenticated.overdue(now - FIRST_MESSAGE_S):
            self.num_closed += self._shut_down(fd)
        if self._allow_list is not None:
            for fd in self._unauthenticated.connections():
                if _sends_too_much(fd):
                    self.num_closed += self._shut_down(fd)
            self._send_away_removed(self._allow_list)

    def shut_down(self, fd: int) -> None:
        """End the connection with the descriptor ``fd``, for a reason of the owner. It does not count as closed."""
        self._shut_down(fd)

    def is_open(self, fd: int) -> bool:
        """Return whether the connection with this descriptor goes on. Its last messages may come after its end."""
        return fd in self._addresses

    def close(self) -> None:
        """Stop the monitor. The owner must have closed the router socket before."""
        # libzmq may wait for a place in the monitor's queue until it is told to stop.
        while self._monitor.poll(_CLOSE_MS):
            if parse_monitor_message(self._monitor.recv_multipart())["event"] == zmq.EVENT_MONITOR_STOPPED:
                break
        self._monitor.close()

    def _send_away_removed(self, allow_list: AllowList) -> None:
        """Close the connections of removed keys.

        Close those without a message, too, because their keys are not known: an admitted client connects again.
        """
        if allow_list.num_removed == self._num_removed:
            return
        self._num_removed = allow_list.num_removed
        for fd in self._unauthenticated.connections():
            self._shut_down(fd)
        for fd in [fd for fd, key in self._keys.items() if allow_list.name_of(key) is None]:
            self._shut_down(fd)

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
                address = _peer_of(connection, self.port)
        except OSError:
            return  # it has ended already
        if address is None:
            return
        self._addresses[fd] = address
        for other in self._unauthenticated.add(fd, address[0], time.monotonic()):
            self.num_closed += self._shut_down(other)

    def _forget(self, fd: int) -> None:
        if self._addresses.pop(fd, None) is not None:
            self._on_ended(fd)
        self._keys.pop(fd, None)
        self._unauthenticated.remove(fd)

    def _shut_down(self, fd: int) -> bool:
        """End a connection. Return False if it has ended already."""
        address = self._addresses.get(fd)
        self._forget(fd)
        with contextlib.suppress(OSError), _borrowed(fd) as connection:  # it may have ended meanwhile
            if address is not None and _peer_of(connection, self.port) == address:
                connection.shutdown(socket.SHUT_RDWR)
                return True
        return False

    @property
    def port(self) -> int:
        """The port to which ``router`` is bound."""
        endpoint = self._router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").rsplit(b":", 1)[1])


def most_connections(max_descriptors: int) -> int:
    """Return the limit on authenticated connections for a process that may open ``max_descriptors`` files.

    The limit leaves descriptors for files and for connections that libzmq accepts before they are counted.
    """
    reserved = _RESERVED_DESCRIPTORS + _MONITOR_EVENTS + _READ_EVENTS + MAX_UNAUTHENTICATED
    return min(MAX_CONNECTIONS, descriptors_for_peers(max_descriptors, reserved))


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Yield a socket object for a descriptor that libzmq owns. The descriptor stays open afterwards.

    Raises:
        OSError: the descriptor is closed, or is no socket.
    """
    connection = socket.socket(fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()


def _peer_of(connection: socket.socket, port: int) -> Peer | None:
    """Return the address of the peer of ``connection``; None if it is not a connection to our ``port``.

    The check is needed because another part of the process may have got the descriptor after the connection ended.

    Raises:
        OSError: the connection has ended.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
        return None
    return connection.getpeername()[:2]


def _sends_too_much(fd: int) -> bool:
    """Return whether the peer of descriptor ``fd`` sent more bytes than a handshake before it authenticated itself."""
    try:
        with _borrowed(fd) as connection:
            acked, received = tcp_counts(connection)
    except OSError:
        return False
    return acked <= _SERVER_HANDSHAKE_BYTES and received > _CLIENT_HANDSHAKE_BYTES
