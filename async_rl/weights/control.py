"""What publisher and receivers say to each other on the control channel. Weights themselves never pass here.

A receiver says ``Join`` and then ``Alive`` every second; the publisher answers each with ``Check``, or with
``Unknown`` where it knows no such member. One attempt at a version by a collective: ``Enter`` -> ``Ready`` -> ``Go``
-> (broadcast) -> ``Ack`` or ``Failed``; by the stream: ``Fetch`` -> (pull) -> ``Ack`` or ``Failed``. An epoch names a
communicator; it is kept over attempts while membership stays the same, and an ``Ack`` in it says ``Ready`` for the next
attempt as well, which then begins with its ``Go``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from async_rl.errors import WeightsError, WireError
from async_rl.net.codec import read_as
from async_rl.net.keys import ClientKeys
from async_rl.net.wire import Limits, decode, encode

HEARTBEAT_S = 1.0

TO_PUBLISHER_LIMITS = Limits(max_bytes=1 << 16, max_header_bytes=1 << 16, max_arrays=0, max_items=64, max_depth=3)
TO_MEMBER_LIMITS = Limits(max_bytes=64 << 20, max_arrays=0, max_depth=None)
"""The publisher is believed: the queue vouches for its key. What is read of it is checked against its type."""
_MAX_REASON = 2000


class Join(msgspec.Struct, frozen=True):
    """I want every version. ``host`` is where my collectives listen, if I take part in any (``collectives``: which).
    ``digest`` is of the newest weights that I hold, empty without any.
    """

    generator_id: str
    host: str
    pid: int
    collectives: list[str]
    digest: str


class Alive(msgspec.Struct, frozen=True):
    """Still here."""


class Leave(msgspec.Struct, frozen=True):
    """I am ending; don't wait for me."""


class Ready(msgspec.Struct, frozen=True):
    """Buffers for this attempt are there; ``Go`` may follow."""

    attempt: int


class Ack(msgspec.Struct, frozen=True):
    """Every byte of this version is here and matches its digest (said at ``Enter`` where it was here before).

    ``wire_bytes`` came for it, ``num_corrupt`` buckets of them twice, since what came first did not match.
    """

    attempt: int
    version: int
    digest: str
    wire_bytes: int
    num_corrupt: int


class Failed(msgspec.Struct, frozen=True):
    """This attempt did not bring me the version; ``corrupt``: bytes came, but not those of the manifest."""

    attempt: int
    reason: str
    corrupt: bool


class Check(msgspec.Struct, frozen=True):
    """The publisher knows you and is alive itself."""


class Unknown(msgspec.Struct, frozen=True):
    """You are no member (any more): say ``Join``."""


class Dropped(msgspec.Struct, frozen=True):
    """You are no member any more; ``Join`` again after ``retry_s``."""

    reason: str
    retry_s: float


class Enter(msgspec.Struct, frozen=True):
    """Make room for this version. ``manifest`` as in ``manifest_fields``."""

    attempt: int
    manifest: Mapping[str, Any]


class Go(msgspec.Struct, frozen=True):
    """Receive now, as ``rank`` of ``size``. A new ``epoch`` is built over the store at ``store_port`` of my host; port
    0 says to use the one that is there.

    ``stall_s`` bounds every single collective of ``backend``, ``deadline_s`` the whole; buckets travel in chunks of
    ``chunk_bytes``. A ``manifest`` that is not empty: there was no ``Enter`` before. Who does not take part leaves
    the communicator.
    """

    attempt: int
    epoch: int
    rank: int
    size: int
    store_port: int
    stall_s: float
    deadline_s: float
    chunk_bytes: int
    backend: str
    manifest: Mapping[str, Any]


class Fetch(msgspec.Struct, frozen=True):
    """Pull this version from ``port`` of my host, showing ``token``, within ``deadline_s``. A ``key``: it is sealed.

    ``delta_sizes[l][b]`` is the size of bucket b's delta in link l of a chain from the weights with digest ``base``
    (-1: none); an empty ``base`` means that there is no chain. A chain of no links: you hold these very weights.
    """

    attempt: int
    manifest: Mapping[str, Any]
    port: int
    token: bytes
    key: bytes
    base: str
    delta_sizes: list[list[int]]
    deadline_s: float


def seconds_until(deadline: float) -> float:
    """From now to a time of the monotonic clock; not below 0."""
    return max(0.0, deadline - time.monotonic())


def channel(address: str, public_key: bytes | None) -> str:
    """``Announcement.channel``: where the publisher is, and the key (z85) that it must prove, if it has one."""
    return address if public_key is None else f"{address} {public_key.decode()}"


def parse_channel(text: str) -> tuple[str, bytes | None]:
    """The address and the key of a channel; a malformed address is left to whoever connects."""
    address, _, key = text.partition(" ")
    return address, key.encode() if key else None


def keys_towards(server_key: bytes | None, keys: ClientKeys | None) -> ClientKeys | None:
    """A generator's ``keys`` for a publisher with ``server_key``, which the queue vouches for.

    Raises:
        WeightsError: one side has keys and the other has none.
    """
    if server_key is None and keys is None:
        return None
    if server_key is None or keys is None:
        wants, has = ("keys", "none") if server_key is not None else ("no keys", "some")
        raise WeightsError(f"the learner's weights channel wants {wants}, this generator has {has}")
    return keys.for_server(server_key)


MemberMessage = Join | Alive | Leave | Ready | Ack | Failed
PublisherMessage = Check | Unknown | Dropped | Enter | Go | Fetch
TO_PUBLISHER: tuple[type[MemberMessage], ...] = (Join, Alive, Leave, Ready, Ack, Failed)
TO_MEMBER: tuple[type[PublisherMessage], ...] = (Check, Unknown, Dropped, Enter, Go, Fetch)

_T = TypeVar("_T")


def encode_message(message: MemberMessage | PublisherMessage) -> bytes:
    """One frame."""
    if isinstance(message, Failed | Dropped):
        message = msgspec.structs.replace(message, reason=message.reason[:_MAX_REASON])
    return encode(type(message).__name__, message)


def decode_message(frame: bytes | memoryview, expected: Sequence[type[_T]], limits: Limits) -> _T:
    """The message in ``frame``, which must be one of ``expected``.

    Raises:
        WireError: it is malformed, or of another type.
    """
    message = decode(frame, limits)
    for record in expected:
        if record.__name__ == message.type:
            return read_as(message.fields, record)
    raise WireError(f"expected one of {[record.__name__ for record in expected]}, got {message.type!r}")
