"""What the server takes in at all: how much of a peer, and how large a message of which type. Pure; time is ``now``.

A peer is one connection, by its routing id. Not a key and not a host: a run's roles share both by default, and one
that goes wrong must not silence the others. The server asks for every message, before it decodes anything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from async_rl.errors import WireError
from async_rl.net.wire import Limits, Message
from async_rl.queue.protocol import EXTRA_MESSAGE_BYTES

BLOCKED_S = 60.0
MAX_PEERS = 8192
"""Peers whose rates are remembered; the one that was silent longest is forgotten first."""
_SMALL_BYTES = 1 << 20
_LARGEST = 2**53
_HEADER_BYTES = 256 << 10
"""Bounds what a header can become in memory: msgpack's smallest values grow to about 64 times their size."""


@dataclass(slots=True)
class _Peer:
    """Two token buckets, as of ``at``: messages, and malformed ones."""

    messages: float
    malformed: float
    at: float
    blocked_until: float = 0.0


class Gate:
    """Rates by peer, and counts of what was kept out."""

    def __init__(self, *, max_messages_per_s: float, max_malformed_per_minute: float) -> None:
        self._message_rate, self._malformed_rate = max_messages_per_s, max_malformed_per_minute / 60
        self._message_burst, self._malformed_burst = max(1.0, max_messages_per_s), max_malformed_per_minute
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        self.num_malformed = self.num_limited = 0

    def __len__(self) -> int:
        return len(self._peers)

    def lets_in(self, peer: bytes, now: float) -> bool:
        """Whether this peer's next message is looked at; else it is dropped, unanswered, and counted."""
        known = self._peer(peer, now)
        if now < known.blocked_until or known.messages < 1:
            self.num_limited += 1
            return False
        known.messages -= 1
        return True

    def note_malformed(self, peer: bytes, now: float) -> bool:
        """A message was malformed. Whether it was one too many, so that the peer is not heard for ``BLOCKED_S``."""
        self.num_malformed += 1
        known = self._peer(peer, now)
        known.malformed -= 1
        if known.malformed >= 0 or now < known.blocked_until:
            return False
        known.malformed, known.blocked_until = self._malformed_burst, now + BLOCKED_S
        return True

    def _peer(self, peer: bytes, now: float) -> _Peer:
        known = self._peers.get(peer)
        if known is None:
            known = self._peers[peer] = _Peer(self._message_burst, self._malformed_burst, now)
            if len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)
            return known
        self._peers.move_to_end(peer)
        passed_s, known.at = max(0.0, now - known.at), max(now, known.at)
        known.messages = min(self._message_burst, known.messages + passed_s * self._message_rate)
        known.malformed = min(self._malformed_burst, known.malformed + passed_s * self._malformed_rate)
        return known


class Sizes:
    """How large messages to the server may be. ``max_bytes`` is ``queue.max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._by_type = {"attach": max_bytes + EXTRA_MESSAGE_BYTES, "return": max_bytes}
        self.limits = Limits(
            max_bytes=max_bytes + EXTRA_MESSAGE_BYTES,
            max_header_bytes=_HEADER_BYTES,
            max_arrays=1024,
            max_items=_HEADER_BYTES,
        )

    def check(self, message: Message, num_bytes: int) -> None:
        """Whether a message of its type may be a frame of ``num_bytes``, and say what it says.

        Raises:
            WireError: it is too large, its arrays overlap (copies of them would be larger than the frame), or one of
                its numbers is absurd.
        """
        most = self._by_type.get(message.type, _SMALL_BYTES)
        if num_bytes > most:
            raise WireError(f"expected at most {most} bytes in a {message.type[:40]!r} message, got {num_bytes}")
        claimed = sum(array.nbytes for array in message.arrays)
        if claimed > num_bytes:
            raise WireError(f"arrays overlap: they claim {claimed} bytes, the frame has {num_bytes}")
        _check_numbers(message.fields.values())


def _check_numbers(values: Iterable[Any]) -> None:
    """What sums, clocks, JSON and the journal can't carry is kept out: NaN, infinities, integers near 64 bits."""
    for value in values:
        kind = type(value)
        if kind is int or kind is float:
            if not -_LARGEST <= value <= _LARGEST:
                raise WireError(f"expected numbers within {_LARGEST}, got {value}")
        elif kind is dict:
            _check_numbers(value.values())
        elif kind is list:
            _check_numbers(value)
