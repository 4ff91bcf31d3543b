"""The queue server's socket, with keys and with limits on the rates and sizes of messages. It handles raw frames.

A peer is one connection, and is identified by its routing id instead of its key or host. By default all processes of a
run share a key and a host, and a faulty client must not block the others.

This module does not decode messages. The server's loop, which owns the socket, reports malformed ones to it. Messages
to send are collected until ``flush``. The loop calls ``flush`` after the journal has committed the changes that these
messages report.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from async_rl.config.queue import QueueConfig
from async_rl.config.run import ExperimentalConfig
from async_rl.errors import AddressError, QueueError, WireError, naming
from async_rl.net.address import advertised_address, check_address, refuse_open_bind, url_host
from async_rl.net.keys import DEFAULT_CLIENT, ServerKeys
from async_rl.net.service import Peer, Service
from async_rl.net.wire import SAME_VERSION, Frame, Limits, Message
from async_rl.queue.messages import RECEIVE_HIGH_WATER_MARK

logger = logging.getLogger(__name__)

BLOCKED_S = 60.0
"""Seconds for which a peer is ignored after it sent too many malformed messages."""
MAX_PEERS = 8192
"""Maximum number of peers whose rates are remembered. Above it, the peer that was silent longest is forgotten."""
_ATTACH_BYTES = 256 << 20
"""Bytes by which an attach message may exceed ``queue.max_bytes``, because it has tokenizer files in addition to a
snapshot."""
_SMALL_BYTES = 1 << 20
_LARGEST = 2**53
_HEADER_BYTES = 256 << 10
"""Maximum size of a message's header. It limits memory, because decoding enlarges msgpack's smallest values about 64
times."""
_ANY = "tcp://127.0.0.1:0"


class Endpoint:
    """The queue server's ROUTER socket, bound to ``config.address``, with the rate limits in ``rates``.

    If the config sets no port, the socket first tries ``last_port``, the port of the run's last server.

    Raises:
        AddressError: the address is busy, malformed, can't be reached by others, or is open to the network without keys
            and without ``insecure``.
        KeyFileError: the keys of ``queue.keys`` are missing or malformed.
    """

    def __init__(
        self, config: QueueConfig, rates: ExperimentalConfig, *, insecure: bool, last_port: int | None = None
    ) -> None:
        self._max_malformed = rates.max_malformed_per_minute
        self._limiter = RateLimiter(
            max_messages_per_s=rates.max_messages_per_s, max_malformed_per_minute=rates.max_malformed_per_minute
        )
        self.limits = MessageLimits(config.max_bytes)
        self._outgoing: list[tuple[bytes, Sequence[Frame]]] = []
        self._current: zmq.Frame | None = None
        address = config.address or _ANY
        refuse_open_bind(address, insecure=insecure, has_keys=config.keys is not None)
        host, port = check_address(address)
        shown_host, shown_port = check_address(advertised_address(address, config.advertise))
        with naming("queue.address", AddressError):
            self._service = Service(
                host, [port] if port or last_port is None else [last_port, port],
                None if config.keys is None else ServerKeys.load(config.keys), Peer,
                max_bytes=self.limits.wire.max_bytes, receive_mark=RECEIVE_HIGH_WATER_MARK,
            )  # fmt: skip
        self.address = f"tcp://{url_host(shown_host)}:{shown_port or self._service.port}"

    def register(self, poller: zmq.Poller) -> None:
        """Make ``poller`` wake up for messages, and for connections that begin or end."""
        self._service.register(poller)

    @property
    def most_connections(self) -> int:
        """The limit on clients: each generator has one connection, the learner two."""
        return self._service.connections.max_connections

    @property
    def check_within_s(self) -> float:
        """Seconds after which ``receive`` must be called again, even if nothing arrives."""
        return self._service.turn_within_s

    def receive(self, max_messages: int, now: float) -> Iterator[tuple[bytes, str, list[memoryview]]]:
        """Yield up to ``max_messages`` that have arrived, as (peer, key, frames). Drop those above a peer's rate.

        ``key`` is the client's public key, which CURVE has verified, or empty on a server without keys. Call this
        method in every turn of the loop, because it also closes connections above a limit, and those of removed keys.
        """
        for peer, frames in self._service.receive(max_messages):
            if self._limiter.admits(peer.routing_id, now):
                self._current = frames[-1]
                try:
                    yield peer.routing_id, peer.key, [memoryview(frame.buffer) for frame in frames]
                finally:
                    self._current = None

    def note_malformed(self, peer: bytes, now: float) -> None:
        """Count a malformed message of this peer. A peer that sends too many is ignored for ``BLOCKED_S``."""
        if self._limiter.note_malformed(peer, now):
            logger.warning(
                "peer %r (%s) sent more than experimental.max_malformed_per_minute = %d malformed messages and is "
                "ignored for %.0f s; %s", peer, self._sender(), self._max_malformed, BLOCKED_S, SAME_VERSION,
            )  # fmt: skip

    def require_learner_key(self, type_: str, key: str) -> None:
        """Check that a message that only the learner may send was sent with the key ``client.key``.

        On a server without keys any client may send it.

        Raises:
            QueueError: the message was sent with another key.
        """
        if self._service.allow_list is None:
            return
        name = self._service.allow_list.name_of(key.encode())
        if name != DEFAULT_CLIENT:
            raise QueueError(
                f"expected {type_!r} to be sent with the learner's key ({DEFAULT_CLIENT}.key), got the key of "
                f"{name!r}, which is for generators; set the learner's queue.keys to the directory of this run's keys"
            )

    def send(self, peer: bytes, frames: Sequence[Frame]) -> None:
        """Collect a message to ``peer`` (its frame and its parts) until the next ``flush``."""
        self._outgoing.append((peer, frames))

    def flush(self) -> None:
        """Send all collected messages.

        A message to a peer that does not read is dropped; the peer will repeat its request.
        """
        outgoing, self._outgoing = self._outgoing, []
        for peer, frames in outgoing:
            self._service.send(peer, frames)

    def send_now(self, peer: bytes, frames: Sequence[Frame]) -> None:
        """Send one message at once, before the collected ones. It must not report a change of the queue's state.

        A message to a peer that does not read is dropped.
        """
        self._service.send(peer, frames)

    def discard(self) -> None:
        """Delete the collected messages without sending them."""
        self._outgoing.clear()

    def block(self, peer: bytes, now: float) -> None:
        """Ignore the messages of this peer for ``BLOCKED_S``."""
        self._limiter.block(peer, now)

    def counters(self) -> dict[str, int]:
        """Return the numbers of malformed and rate-limited messages, refused handshakes and closed connections."""
        limiter, connections = self._limiter, self._service.connections
        return {
            "malformed": limiter.num_malformed, "limited": limiter.num_limited,
            "refused_handshakes": connections.num_refused, "closed_connections": connections.num_closed,
        }  # fmt: skip

    def close(self) -> None:
        self._service.close(linger_ms=2000)

    def _sender(self) -> str:
        """Return the public key of the current message's sender or, without keys, the sender's address, as text."""
        frame, name = self._current, "Peer-Address" if self._service.allow_list is None else "User-Id"
        return f"{name} {frame.get(name)}" if frame is not None else "key and address unknown"


# Limits. Time comes as ``now``, in seconds.


@dataclass(slots=True)
class _Rates:
    """How many messages, and how many malformed ones, a peer may still send at the time ``at`` (token buckets)."""

    messages: float
    malformed: float
    at: float
    blocked_until: float = 0.0


class RateLimiter:
    """Limits the message rate of each peer. It counts malformed and dropped messages. All times are in seconds."""

    def __init__(self, *, max_messages_per_s: float, max_malformed_per_minute: float) -> None:
        self._message_rate, self._malformed_rate = max_messages_per_s, max_malformed_per_minute / 60
        self._message_burst, self._malformed_burst = max(1.0, max_messages_per_s), max_malformed_per_minute
        self._peers: OrderedDict[bytes, _Rates] = OrderedDict()
        self.num_malformed = self.num_limited = 0

    def __len__(self) -> int:
        return len(self._peers)

    def admits(self, peer: bytes, now: float) -> bool:
        """Return whether to accept this peer's next message. If not, count it as dropped.

        The peer gets no reply then.
        """
        rates = self._rates_of(peer, now)
        if now < rates.blocked_until or rates.messages < 1:
            self.num_limited += 1
            return False
        rates.messages -= 1
        return True

    def note_malformed(self, peer: bytes, now: float) -> bool:
        """Count a malformed message of this peer.

        Return whether it sent too many, and is now ignored for ``BLOCKED_S``.
        """
        self.num_malformed += 1
        rates = self._rates_of(peer, now)
        rates.malformed -= 1
        if rates.malformed >= 0 or now < rates.blocked_until:
            return False
        rates.malformed = self._malformed_burst
        self.block(peer, now)
        return True

    def block(self, peer: bytes, now: float) -> None:
        """Ignore this peer for ``BLOCKED_S``."""
        self._rates_of(peer, now).blocked_until = now + BLOCKED_S

    def _rates_of(self, peer: bytes, now: float) -> _Rates:
        rates = self._peers.get(peer)
        if rates is None:
            rates = self._peers[peer] = _Rates(self._message_burst, self._malformed_burst, now)
            if len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)
            return rates
        self._peers.move_to_end(peer)
        passed_s, rates.at = max(0.0, now - rates.at), max(now, rates.at)
        rates.messages = min(self._message_burst, rates.messages + passed_s * self._message_rate)
        rates.malformed = min(self._malformed_burst, rates.malformed + passed_s * self._malformed_rate)
        return rates


class MessageLimits:
    """Limits on the sizes of messages to the server. ``max_bytes`` is ``queue.max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._by_type = {"attach": max_bytes + _ATTACH_BYTES, "return": max_bytes}
        self.wire = Limits(
            max_bytes=max_bytes + _ATTACH_BYTES,
            max_header_bytes=_HEADER_BYTES,
            max_arrays=1024,
            max_items=_HEADER_BYTES,
        )

    def check(self, message: Message, num_bytes: int) -> None:
        """Check the size of a message (``num_bytes``, with its parts) and the numbers in it.

        Raises:
            WireError: the message is too large for its type, its arrays overlap (copies would be larger than the
                frame), or a number in it is out of range.
        """
        max_bytes = self._by_type.get(message.type, _SMALL_BYTES)
        if num_bytes > max_bytes:
            remedy = "raise queue.max_bytes" if message.type in self._by_type else SAME_VERSION
            raise WireError(
                f"expected at most {max_bytes} bytes in a {message.type[:40]!r} message, got {num_bytes} bytes; "
                f"{remedy}"
            )
        claimed = sum(array.nbytes for array in message.arrays)
        if claimed > num_bytes:
            raise WireError(
                f"arrays overlap: expected at most {num_bytes} bytes of arrays, the size of this "
                f"{message.type[:40]!r} message, got arrays of {claimed} bytes"
            )
        _check_numbers(message.fields.values())


def _check_numbers(values: Iterable[Any]) -> None:
    """Refuse numbers that sums, clocks, JSON or the journal can't represent: NaN, and absolute values above 2^53.

    Raises:
        WireError: ``values``, or a map or list in it, has such a number.
    """
    for value in values:
        kind = type(value)
        if kind is int or kind is float:
            if not -_LARGEST <= value <= _LARGEST:
                raise WireError(
                    f"expected numbers from -{_LARGEST} to {_LARGEST} in a message, got {value}; this is a bug in the "
                    f"sender of the message, please report it"
                )
        elif kind is dict:
            _check_numbers(value.values())
        elif kind is list:
            _check_numbers(value)
