"""Limits on what the server accepts: the rate of messages from a peer, the size of a message by type. Pure.

The server asks for every message, before it decodes it. A peer is one connection, known by its routing id, and not a
key or a host: by default all roles of a run share those, and a faulty client must not silence the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from async_rl.errors import WireError
from async_rl.net.wire import Limits, Message

BLOCKED_S = 60.0
"""A peer that sent too many malformed messages is ignored for so long."""
MAX_PEERS = 8192
"""Peers whose rates are kept. Beyond, the one that has been silent longest is forgotten."""
_ATTACH_BYTES = 256 << 20
"""An attach may be larger than the queue by this: it carries tokenizer files beside a snapshot."""
_SMALL_BYTES = 1 << 20
_LARGEST = 2**53
_HEADER_BYTES = 256 << 10
"""Limits the memory that a header can take: msgpack's smallest values grow to about 64 times their size."""


@dataclass(slots=True)
class _Peer:
    """Two token buckets as of ``at``: one for messages, one for malformed messages."""

    messages: float
    malformed: float
    at: float
    blocked_until: float = 0.0


class RateLimiter:
    """Message rates by peer, and counts of what was dropped. Time comes as ``now``, in seconds."""

    def __init__(self, *, max_messages_per_s: float, max_malformed_per_minute: float) -> None:
        self._message_rate, self._malformed_rate = max_messages_per_s, max_malformed_per_minute / 60
        self._message_burst, self._malformed_burst = max(1.0, max_messages_per_s), max_malformed_per_minute
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        self.num_malformed = self.num_limited = 0

    def __len__(self) -> int:
        return len(self._peers)

    def admits(self, peer: bytes, now: float) -> bool:
        """Whether to accept this peer's next message. Others are dropped without answer, and counted."""
        known = self._peer(peer, now)
        if now < known.blocked_until or known.messages < 1:
            self.num_limited += 1
            return False
        known.messages -= 1
        return True

    def note_malformed(self, peer: bytes, now: float) -> bool:
        """Count a malformed message; whether it was one too many, so that the peer is ignored for ``BLOCKED_S``."""
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


class MessageLimits:
    """Size limits of messages to the server. ``max_bytes`` is ``queue.max_bytes``."""

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
        most = self._by_type.get(message.type, _SMALL_BYTES)
        if num_bytes > most:
            raise WireError(f"expected at most {most} bytes in a {message.type[:40]!r} message, got {num_bytes}")
        claimed = sum(array.nbytes for array in message.arrays)
        if claimed > num_bytes:
            raise WireError(f"arrays overlap: they claim {claimed} bytes, the frame has {num_bytes}")
        _check_numbers(message.fields.values())


def _check_numbers(values: Iterable[Any]) -> None:
    """Reject what sums, clocks, JSON or the journal can't hold: NaN, infinities, integers near 64 bits."""
    for value in values:
        kind = type(value)
        if kind is int or kind is float:
            if not -_LARGEST <= value <= _LARGEST:
                raise WireError(f"expected numbers within {_LARGEST}, got {value}")
        elif kind is dict:
            _check_numbers(value.values())
        elif kind is list:
            _check_numbers(value)
