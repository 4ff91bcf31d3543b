"""The relay: hands the sessions that fronts offer to the proxies that want one, and forwards messages between both.

It reads no request and no answer. One thread does all; what a slow reader has not taken waits here, up to a limit, and
then its connection is closed. Whoever has lost the connection to another one hears of it (``Gone``), so nobody waits
for an answer that can't come.
"""

from __future__ import annotations

import logging
import secrets
import signal
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import zmq

from async_rl.config.config import Config
from async_rl.errors import AddressError, ConfigError, WireError
from async_rl.net.address import refuse_open_bind
from async_rl.net.connections import RouterConnections, bind_router
from async_rl.net.keys import Guard, ServerKeys
from async_rl.relay import messages
from async_rl.relay.messages import FOR_RELAY, MAX_BYTES, RELAY, decode, encode, pack_number, unpack_number
from async_rl.run.directory import RunDir

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
MAX_UNSENT_BYTES = 2 * MAX_BYTES
"""What waits for one slow reader. It loses its connection beyond that, or if it reads nothing for ``STALL_S``."""
STALL_S = 20.0
_HIGH_WATER_MARK = 8
"""Messages of one connection in ZeroMQ's memory, each way."""
_MAX_RECEIVED = 256
"""Most messages that are received before others are sent."""
_SEND_AGAIN_S, _LOOK_S = 0.005, 0.5
_BIND_LIMIT_S = 10.0

Outgoing = tuple[int, int, messages.ToFront | messages.ToProxy]
"""A message with the numbers of its receiver and of the connection in whose name it is sent."""


class Pairing:
    """Which sessions wait for a program, and which proxies for a session, both first come first served. Pure."""

    def __init__(self) -> None:
        self._offers: OrderedDict[tuple[int, str], bytes] = OrderedDict()
        self._wants: OrderedDict[tuple[int, int], float] = OrderedDict()

    def offer(self, front: int, message: messages.Offer) -> list[Outgoing]:
        self._offers[front, message.key] = message.task
        return self._pair()

    def withdraw(self, front: int, key: str) -> None:
        self._offers.pop((front, key), None)

    def want(self, proxy: int, message: messages.Want, now_s: float) -> list[Outgoing]:
        self._wants[proxy, message.number] = now_s + message.wait_s
        return self._pair()

    def expire(self, now_s: float) -> list[Outgoing]:
        """Answer the proxies that have waited as long as they wanted."""
        late = [want for want, until_s in self._wants.items() if until_s <= now_s]
        for want in late:
            del self._wants[want]
        return [(proxy, RELAY, messages.NoSession(number)) for proxy, number in late]

    def forget(self, number: int) -> None:
        """Forget a connection that has ended."""
        self._offers = OrderedDict((offer, task) for offer, task in self._offers.items() if offer[0] != number)
        self._wants = OrderedDict((want, until_s) for want, until_s in self._wants.items() if want[0] != number)

    def _pair(self) -> list[Outgoing]:
        found: list[Outgoing] = []
        while self._offers and self._wants:
            (front, key), task = self._offers.popitem(last=False)
            (proxy, number), _ = self._wants.popitem(last=False)
            # The front must know whose session it is before the first request comes.
            found += [(front, proxy, messages.Taken(key)), (proxy, front, messages.Session(number, key, task))]
        return found


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection. ``role`` is empty before its hello. ``moved_s`` is when it took a message, or had taken all."""

    number: int
    identity: bytes
    fd: int
    moved_s: float
    role: str = ""
    unsent: deque[tuple[bytes, bytes | zmq.Frame]] = field(default_factory=deque)
    num_unsent_bytes: int = 0


class Relay:
    """The ROUTER socket at ``address``. ``keys`` admit its clients; None: anybody.

    Raises:
        AddressError: the address can't be bound.
    """

    def __init__(self, address: str, keys: ServerKeys | None = None) -> None:
        self._pairing = Pairing()
        self._by_identity: dict[bytes, _Peer] = {}
        self._by_number: dict[int, _Peer] = {}
        self._by_fd: dict[int, _Peer] = {}
        self._blocked: set[_Peer] = set()
        self._next_number = secrets.randbits(62) + 1
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        allow_list = None if keys is None else keys.allow_list()
        self._connections = RouterConnections(
            self._socket, allow_list=allow_list, max_connections=MAX_CONNECTIONS, on_ended=self._note_ended
        )
        self._guard: Guard | None = None
        try:
            if keys is not None and allow_list is not None:
                self._guard = keys.guard(self._socket, self._context, allow_list)
            bind_router(
                self._socket, address, max_bytes=MAX_BYTES, receive_mark=_HIGH_WATER_MARK, send_mark=_HIGH_WATER_MARK,
                wait_s=_BIND_LIMIT_S,
            )  # fmt: skip
        except AddressError:
            self.close()
            raise

    def serve(self, is_over: Callable[[], bool]) -> None:
        """Relay messages until ``is_over``, which is called at least every half second."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        self._connections.register(poller)
        while not is_over():
            wait_s = min(_LOOK_S, self._connections.check_within_s, _SEND_AGAIN_S if self._blocked else _LOOK_S)
            poller.poll(round(wait_s * 1000))
            self._connections.check()
            for _ in range(_MAX_RECEIVED):
                if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    break
                self._receive(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
            now_s = time.monotonic()
            self._send_all(self._pairing.expire(now_s))
            for peer in list(self._blocked):
                self._flush(peer, now_s)

    def finish(self) -> None:
        """Tell the proxies that the run is finished."""
        self._send_all((peer.number, RELAY, messages.Finished()) for peer in self._of_role("proxy"))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=1000)
        self._connections.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.term()

    def _receive(self, frames: Sequence[zmq.Frame]) -> None:
        fd = int(frames[-1].get("__fd"))
        if not self._connections.note_message(frames[-1]) or not self._connections.is_open(fd):
            return
        peer = self._peer_of(frames[0].bytes, fd)
        try:
            if len(frames) != 3:
                raise WireError(f"expected a message of two frames, got {len(frames) - 1}")
            to = unpack_number(frames[1].buffer)
            if to == RELAY:
                self._take(peer, frames[2])
            elif peer.role:
                self._forward(peer, to, frames[2])
        except WireError as error:
            logger.warning("a connection is closed: %s", error)
            self._connections.shut_down(fd)

    def _peer_of(self, identity: bytes, fd: int) -> _Peer:
        known = self._by_identity.get(identity)
        if known is not None and known.fd == fd:
            return known
        if known is not None:
            self._forget(known)
        peer = _Peer(self._next_number, identity, fd, time.monotonic())
        self._next_number += 1
        self._by_identity[identity] = self._by_number[peer.number] = self._by_fd[fd] = peer
        return peer

    def _take(self, peer: _Peer, frame: zmq.Frame) -> None:
        message = decode(frame.buffer, FOR_RELAY)
        if isinstance(message, messages.Hello):
            peer.role = message.role
            self._tell_proxies()
        elif isinstance(message, messages.Offer) and peer.role == "front":
            self._send_all(self._pairing.offer(peer.number, message))
        elif isinstance(message, messages.Withdraw):
            self._pairing.withdraw(peer.number, message.key)
        elif isinstance(message, messages.Want) and peer.role == "proxy":
            self._send_all(self._pairing.want(peer.number, message, time.monotonic()))
        # Anything else was meant for an earlier connection.

    def _forward(self, peer: _Peer, to: int, frame: zmq.Frame) -> None:
        receiver = self._by_number.get(to)
        if receiver is None or receiver.role == peer.role:
            self._send_all([(peer.number, to, messages.Gone())])
        else:
            self._post(receiver, peer.number, frame, len(frame))

    def _tell_proxies(self) -> None:
        message = messages.Proxies(len(self._of_role("proxy")))
        self._send_all((front.number, RELAY, message) for front in self._of_role("front"))

    def _of_role(self, role: str) -> list[_Peer]:
        return [peer for peer in self._by_number.values() if peer.role == role]

    def _send_all(self, outgoing: Iterable[Outgoing]) -> None:
        for to, sender, message in list(outgoing):
            if (receiver := self._by_number.get(to)) is not None:
                body = encode(message)
                self._post(receiver, sender, body, len(body))

    def _post(self, peer: _Peer, sender: int, body: bytes | zmq.Frame, num_bytes: int) -> None:
        now_s = time.monotonic()
        if not peer.unsent:
            peer.moved_s = now_s
        peer.unsent.append((pack_number(sender), body))
        peer.num_unsent_bytes += num_bytes
        self._flush(peer, now_s)

    def _flush(self, peer: _Peer, now_s: float) -> None:
        try:
            while peer.unsent:
                number, body = peer.unsent[0]
                self._socket.send_multipart([peer.identity, number, body], zmq.NOBLOCK, copy=False)
                peer.unsent.popleft()
                peer.num_unsent_bytes -= len(body)
                peer.moved_s = now_s
            self._blocked.discard(peer)
        except zmq.Again:
            self._blocked.add(peer)
            if peer.num_unsent_bytes > MAX_UNSENT_BYTES or now_s - peer.moved_s > STALL_S:
                logger.warning("the connection of a %s is closed: it reads too slowly", peer.role or "client")
                self._connections.shut_down(peer.fd)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(peer)

    def _note_ended(self, fd: int) -> None:
        if (peer := self._by_fd.get(fd)) is not None:
            self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        if self._by_number.pop(peer.number, None) is None:
            return
        if self._by_identity.get(peer.identity) is peer:
            del self._by_identity[peer.identity]
        if self._by_fd.get(peer.fd) is peer:
            del self._by_fd[peer.fd]
        self._blocked.discard(peer)
        peer.unsent.clear()
        self._pairing.forget(peer.number)
        if peer.role:
            self._send_all(
                (other.number, peer.number, messages.Gone()) for other in self._by_number.values() if other.role
            )
            self._tell_proxies()


def run_relay(config: Config, *, insecure: bool) -> None:
    """Relay at ``environment.relay`` until SIGTERM, SIGINT or the end of the run: the body of ``async-rl relay``.

    Raises:
        ConfigError: the config has no relay.
        AddressError: the address can't be bound, or is open to a network.
        KeyFileError: the keys of ``queue.keys`` are missing or malformed.
    """
    if config.environment.relay is None:
        raise ConfigError("environment.relay: expected the address of the relay, got none; set it")
    keys = None if config.queue.keys is None else ServerKeys.load(config.queue.keys)
    try:
        refuse_open_bind(config.environment.relay, insecure=insecure, has_keys=keys is not None)
    except AddressError as error:
        raise AddressError(f"environment.relay: {error}") from None
    run_dir, began_s = RunDir(Path(config.run.dir)), time.time()
    stopped: list[int] = []

    def stop(signum: int, _frame: FrameType | None) -> None:
        stopped.append(signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)

    def is_finished() -> bool:
        """Return whether the run has finished since the relay began: a run that goes on has the mark of its end."""
        return run_dir.is_finished and run_dir.finished_marker.stat().st_mtime >= began_s

    relay = Relay(config.environment.relay, keys)
    logger.info("the relay listens at %s", config.environment.relay)
    try:
        relay.serve(lambda: bool(stopped) or is_finished())
        if is_finished():
            relay.finish()
    finally:
        relay.close()
