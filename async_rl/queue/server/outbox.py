"""What a turn of the server has to say: messages by peer, held until what they tell is committed.

Used by ``service`` alone. Small messages to one peer go out as one bundle, which wakes the socket's thread, and the
peer, once; the peer reads them one by one all the same. A bundle arrives whole or not at all, so large messages go out
apart, and the first can be worked on while the next is on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from async_rl.queue.storage.payloads import Bytes

_BUNDLE_BYTES = 1 << 20


@dataclass(slots=True)
class _Bundle:
    frames: list[Bytes] = field(default_factory=list)
    num_bytes: int = 0


class Outbox:
    """Bundles of frames, each message's frame with its parts behind it."""

    def __init__(self) -> None:
        self._bundles: dict[bytes, list[_Bundle]] = {}

    def add(self, peer: bytes, frames: Sequence[Bytes]) -> None:
        """One message, behind those that ``peer`` is to get already."""
        bundles = self._bundles.setdefault(peer, [])
        if not bundles or bundles[-1].num_bytes >= _BUNDLE_BYTES:
            bundles.append(_Bundle())
        bundles[-1].frames.extend(frames)
        bundles[-1].num_bytes += sum(map(len, frames))

    def drain(self) -> Iterator[tuple[bytes, Sequence[Bytes]]]:
        """All of them, peer by peer and in their order."""
        taken, self._bundles = self._bundles, {}
        return ((peer, bundle.frames) for peer, bundles in taken.items() for bundle in bundles)
