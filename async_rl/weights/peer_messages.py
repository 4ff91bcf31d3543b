"""Messages of the control channel about generators that serve weights to others. See ``control``. No torch."""

from __future__ import annotations

import msgspec


class PeerOffer(msgspec.Struct, frozen=True):
    """A generator that has a version, or receives it, and serves it at ``host``:``port``.

    Attributes:
        generator_id: its id at the queue.
        token: authenticates the pull.
        key: the stream is encrypted with this key. Empty: it is not encrypted.
        depth: number of pulls from the learner to the member that gets this offer.
    """

    generator_id: str
    host: str
    port: int
    token: bytes
    key: bytes
    depth: int


class PeerFailed(msgspec.Struct, frozen=True):
    """A member tells the publisher that it could not pull everything from its peer, and goes on with the publisher.

    ``is_faulty`` is false if the peer only has a newer version by now.
    """

    attempt: int
    reason: str
    is_faulty: bool
