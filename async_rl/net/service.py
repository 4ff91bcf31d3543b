"""A server's ROUTER socket: keys, limits on connections and messages, and clients that read slowly.

libzmq keeps a few messages for each client. What is posted beyond that waits in this process until the client reads. A
client that reads nothing for too long, or for which too much waits, loses its connection. Unlike posted messages, those
of ``send`` don't wait: what has no room is dropped, because their receivers ask again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import zmq

from async_rl.errors import AddressError
from async_rl.net.address import url_host
from async_rl.net.connections import MAX_CONNECTIONS, RouterConnections
from async_rl.net.frames import has_message, send_frames
from async_rl.net.keys import ServerKeys
from async_rl.net.wire import Frame

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
_BIND_AGAIN_S = 0.2
_MAX_SENT = 64
"""Most messages that are sent to one client before others are received."""
_SEND_AGAIN_S, _MAX_SEND_AGAIN_S = 0.001, 0.05


@dataclass(slots=True)
class LoggedCount:
    """Counts events that peers can cause at will, so that they are logged only once in ``LOG_EVERY_S``."""

    count: int = 0
    _logged: int = 0
    _logged_at: float = -LOG_EVERY_S

    def to_log(self, now: float) -> int:
        """Return the number of new events to log; 0 if there are none, or if the last log line is too recent."""
        new = self.count - self._logged
        if not new or now - self._logged_at < LOG_EVERY_S:
            return 0
        self._logged, self._logged_at = self.count, now
        return new


@dataclass(slots=True)
class _Unsent:
    """One multipart message that waits. It has the frames of several messages if they are small."""

    frames: list[Frame] = field(default_factory=list)
    num_bytes: int = 0
    when_gone: list[Callable[[], None]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Peer:
    """A client's connection. A server that keeps more of its clients derives its own class.

    Attributes:
        routing_id: the id under which messages are sent to it. A client that connects again may keep it.
        fd: the connection's descriptor.
        key: the client's public key, which CURVE has verified; empty on a server without keys.
        is_open: False once the connection has ended. Its last messages may come afterwards.
        num_unsent_bytes: bytes of the posted messages that wait.
    """

    routing_id: bytes
    fd: int
    key: str
    is_open: bool
    num_unsent_bytes: int = 0
    _unsent: deque[_Unsent] = field(default_factory=deque)
    _moved_at: float = 0.0


P = TypeVar("P", bound=Peer)


class Service(Generic[P]):
    """The ROUTER socket at ``host``, on the first free port of ``ports`` (0: any). One thread uses it.

    Args:
        keys: admit only the clients in their list. None: anybody.
        new_peer: makes the record of a connection: ``Peer``, or a class that derives from it.
        max_bytes: largest frame that a client may send.
        receive_mark, send_mark: messages of one connection in libzmq's memory, each way.
        bundle_bytes: a posted message is joined to the one that waits before it, if that has fewer bytes.
        max_unsent_bytes: limit on the bytes that wait for one client.
        stall_s: how long a client may read nothing of what waits for it.
        max_connections: limit on connections. The limit on open files may lower it.
        bind_limit_s: how long to try again if the ports are in use: an earlier process may be about to end.
        on_ended: called with each peer whose connection has ended.

    Attributes:
        port: the port that was bound.
        peers: the open connections, by routing id.
        allow_list: the list of ``keys``.
        connections: their limits and counts.

    Raises:
        AddressError: no port can be bound.
    """

    def __init__(
        self, host: str, ports: Sequence[int], keys: ServerKeys | None, new_peer: Callable[[bytes, int, str, bool], P],
        *, max_bytes: int, receive_mark: int, send_mark: int = 1000, bundle_bytes: int = 0,
        max_unsent_bytes: float = float("inf"), stall_s: float = float("inf"), max_connections: int = MAX_CONNECTIONS,
        bind_limit_s: float = 0.0, on_ended: Callable[[P], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._new_peer, self._on_ended, self._max_connections = new_peer, on_ended, max_connections
        self._bundle_bytes, self._max_unsent_bytes, self._stall_s = bundle_bytes, max_unsent_bytes, stall_s
        self.peers: dict[bytes, P] = {}
        self._by_fd: dict[int, P] = {}
        self._waiting: dict[P, None] = {}
        self._send_again_s = _SEND_AGAIN_S
        self._refused, self._above, self._closed, self._dropped = (LoggedCount() for _ in range(4))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.allow_list = None if keys is None else keys.allow_list()
        self.connections = RouterConnections(
            self._socket, allow_list=self.allow_list, max_connections=max_connections, on_ended=self._note_ended
        )
        self._stop_guard: Callable[[], None] = lambda: None
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        self._socket.setsockopt(zmq.RCVHWM, receive_mark)
        self._socket.setsockopt(zmq.SNDHWM, send_mark)
        # Without this option ZeroMQ would drop what has no room, and not say so.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A client that reconnects uses its old routing id and takes the old connection's place.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            if keys is not None and self.allow_list is not None:
                self._stop_guard = keys.guard(self._socket, self._context, self.allow_list).stop
            self.port = self._bind(host, ports, time.monotonic() + bind_limit_s)
        except BaseException:
            self.close()
            raise

    def register(self, poller: zmq.Poller) -> None:
        """Make ``poller`` wake up for messages, and for connections that begin or end."""
        poller.register(self._socket, zmq.POLLIN)
        self.connections.register(poller)

    @property
    def turn_within_s(self) -> float:
        """Seconds after which ``receive`` and ``flush`` must be called again, even if nothing arrives."""
        return min(self.connections.check_within_s, self._send_again_s if self._waiting else float("inf"))

    def receive(self, max_messages: int) -> Iterator[tuple[P, Sequence[zmq.Frame]]]:
        """Yield up to ``max_messages`` that have arrived, each with the connection from which it came.

        Call it in every turn of the loop, because it also closes connections above a limit, and those of removed keys.
        """
        self.connections.check()
        self._log_counts(time.monotonic())
        for _ in range(max_messages):
            if not has_message(self._socket):
                return
            routing_id, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if self.connections.note_message(frames[-1]):
                yield self._peer_of(routing_id.bytes, frames[-1]), frames

    def send(self, routing_id: bytes, frames: Sequence[Frame]) -> bool:
        """Send one message at once. A client that does not read loses it. Return whether the client is connected."""
        try:
            return self._has_sent(routing_id, frames)
        except zmq.Again:
            self._dropped.count += 1
            if new := self._dropped.to_log(time.monotonic()):
                logger.warning(
                    "dropped %d messages, because their receivers do not read them (the last: %d bytes to peer %r)",
                    new, sum(map(len, frames)), routing_id,
                )  # fmt: skip
            return True

    def post(self, peer: P, frames: Sequence[Frame], when_gone: Callable[[], None] = lambda: None) -> None:
        """Let a message wait for the next ``flush`` at which the client has room.

        ``when_gone`` is called when it has left this process, or is dropped because its connection has ended.
        """
        if not peer.is_open:
            when_gone()
            return
        now, unsent = time.monotonic(), peer._unsent
        if not unsent:
            peer._moved_at, self._waiting[peer] = now, None
        if not unsent or unsent[-1].num_bytes >= self._bundle_bytes:
            unsent.append(_Unsent())
        num_bytes = sum(map(len, frames))
        unsent[-1].frames.extend(frames)
        unsent[-1].num_bytes += num_bytes
        unsent[-1].when_gone.append(when_gone)
        peer.num_unsent_bytes += num_bytes
        while peer.num_unsent_bytes > self._max_unsent_bytes:
            if not self._has_sent_next(peer, now):
                self.disconnect(peer, f"reads too slowly: {peer.num_unsent_bytes} bytes wait for it, which are dropped")

    def flush(self) -> None:
        """Send what has room, one message of each client in turn. Disconnect those that read nothing for too long."""
        now, waiting = time.monotonic(), list(self._waiting)
        self._send_again_s = min(2 * self._send_again_s, _MAX_SEND_AGAIN_S)
        for _ in range(_MAX_SENT):
            waiting = [peer for peer in waiting if self._has_sent_next(peer, now)]
            if not waiting:
                break
            self._send_again_s = _SEND_AGAIN_S
        for peer in [peer for peer in self._waiting if now - peer._moved_at > self._stall_s]:
            self.disconnect(
                peer,
                f"has read nothing of {peer.num_unsent_bytes} bytes for {self._stall_s:.0f} s, which are dropped; see "
                f"whether it is suspended, or its network is down",
            )

    def disconnect(self, peer: P, why: str) -> None:
        """Close a connection, and log why: "it ..."."""
        if not peer.is_open:
            return
        name = f"with the key {peer.key}" if peer.key else "without a key"
        logger.warning("the connection of a client %s is closed: it %s", name, why)
        self.connections.shut_down(peer.fd)
        self._forget(peer)

    def close(self, linger_ms: int = 1000) -> None:
        """Close the socket. What libzmq holds is sent for at most ``linger_ms``."""
        self._socket.close(linger=linger_ms)
        self.connections.close()
        self._stop_guard()
        self._context.term()

    def _bind(self, host: str, ports: Sequence[int], until: float) -> int:
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        addresses = [f"tcp://{url_host(host)}:{port or '*'}" for port in ports]
        while True:
            for address in addresses:
                try:
                    self._socket.bind(address)
                    return self.connections.port
                except zmq.ZMQError as error:
                    if error.errno != zmq.EADDRINUSE or (address == addresses[-1] and time.monotonic() >= until):
                        raise AddressError(
                            f"can't bind {' to '.join(dict.fromkeys((addresses[0], address)))}: {error.strerror}; end "
                            f"what listens there (ss -ltnp shows it), or choose another port or host"
                        ) from None
            time.sleep(_BIND_AGAIN_S)

    def _peer_of(self, routing_id: bytes, frame: zmq.Frame) -> P:
        """Return the connection from which ``frame`` came. Forget another one whose place it took."""
        fd = int(frame.get("__fd"))
        key = "" if self.allow_list is None else str(frame.get("User-Id"))
        peer = self.peers.get(routing_id)
        if peer is not None and (peer.fd, peer.key) == (fd, key):
            return peer
        new = self._new_peer(routing_id, fd, key, self.connections.is_open(fd))
        if new.is_open:
            for earlier in (peer, self._by_fd.get(fd)):
                if earlier is not None:
                    self._forget(earlier)
            self.peers[routing_id] = self._by_fd[fd] = new
        return new

    def _note_ended(self, fd: int) -> None:
        if (peer := self._by_fd.get(fd)) is not None:
            self._forget(peer)

    def _forget(self, peer: P) -> None:
        """Drop what waits for a connection that has ended."""
        if not peer.is_open:
            return
        peer.is_open = False
        del self.peers[peer.routing_id], self._by_fd[peer.fd]
        self._waiting.pop(peer, None)
        for unsent in peer._unsent:
            for when_gone in unsent.when_gone:
                when_gone()
        peer._unsent.clear()
        peer.num_unsent_bytes = 0
        self._on_ended(peer)

    def _has_sent(self, routing_id: bytes, frames: Sequence[Frame]) -> bool:
        """Send a message. Return False if the client is not connected.

        Raises:
            zmq.Again: it does not read, and there is no room for the message.
        """
        try:
            send_frames(self._socket, [routing_id, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _has_sent_next(self, peer: P, now: float) -> bool:
        """Send what has waited longest for this client. Return False if nothing waits, or if there is no room."""
        try:
            if not peer._unsent:
                return False
            if not self._has_sent(peer.routing_id, peer._unsent[0].frames):
                self._forget(peer)
                return False
        except zmq.Again:
            return False
        sent = peer._unsent.popleft()
        peer.num_unsent_bytes -= sent.num_bytes
        peer._moved_at = now
        if not peer._unsent:
            self._waiting.pop(peer, None)
        for when_gone in sent.when_gone:
            when_gone()
        return True

    def _log_counts(self, now: float) -> None:
        """Log how many handshakes were refused, and how many connections were closed because of a limit."""
        counts = self.connections
        self._refused.count, self._above.count = counts.num_refused, counts.num_above
        self._closed.count = counts.num_closed - counts.num_above
        if new := self._refused.to_log(now):
            why = (
                "the client uses keys, but this server has none; set queue.keys for both, or for neither"
                if self.allow_list is None
                else f"the client has no key, or its key is not in {self.allow_list.path}; give it a key that "
                f"`async-rl keys new` made for this run"
            )
            logger.warning("refused %d connections (%d since the start): %s", new, self._refused.count, why)
        if new := self._above.to_log(now):
            logger.warning(
                "closed %d connections (%d since the start), because %d others are open, the most that this server "
                "admits; if that is less than %d, raise the limit on open files (ulimit -Hn, or LimitNOFILE in "
                "systemd)", new, self._above.count, counts.max_connections, self._max_connections,
            )  # fmt: skip
        if new := self._closed.to_log(now):
            logger.warning(
                "closed %d connections (%d since the start) that sent no message in time, or too much before their "
                "handshake; if they are not an attack, look for programs that connect to this port", new,
                self._closed.count,
            )  # fmt: skip
