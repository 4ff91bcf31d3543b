"""What publisher and receivers say to each other on the control channel. Weights themselves never pass here.

A receiver says ``Join`` and then ``Alive`` every second; the publisher answers each with ``Check``, or with
``Unknown`` where it knows no such member. One attempt at a version by a collective: ``Enter`` -> ``Ready`` -> ``Go``
-> (broadcast) -> ``Ack`` or ``Failed``; by the stream: ``Fetch`` -> (pull) -> ``Ack`` or ``Failed``. An epoch names a
communicator; it is kept over attempts while membership stays the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_origin, get_type_hints

from async_rl.codec import field
from async_rl.errors import WeightsError, WireError
from async_rl.keys import ClientKeys
from async_rl.wire import Limits, decode, encode

HEARTBEAT_S = 1.0

TO_PUBLISHER_LIMITS = Limits(max_bytes=1 << 16, max_header_bytes=1 << 16, max_arrays=0, max_items=64, max_depth=3)
TO_MEMBER_LIMITS = Limits(max_bytes=64 << 20, max_arrays=0)
_MAX_REASON = 2000


@dataclass(frozen=True, slots=True)
class Join:
    """I want every version. ``host`` is where my collectives listen, if I take part in any (``collectives``: which).
    ``digest`` is of the newest weights that I hold, empty without any.
    """

    generator_id: str
    host: str
    pid: int
    collectives: list[str]
    digest: str


@dataclass(frozen=True, slots=True)
class Alive:
    """Still here."""


@dataclass(frozen=True, slots=True)
class Leave:
    """I am ending; don't wait for me."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Buffers for this attempt are there; ``Go`` may follow."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Ack:
    """Every byte of this version is here and matches its digest (said at ``Enter`` where it was here before).

    ``wire_bytes`` came for it, ``num_corrupt`` buckets of them twice, since what came first did not match.
    """

    attempt: int
    version: int
    digest: str
    wire_bytes: int
    num_corrupt: int


@dataclass(frozen=True, slots=True)
class Failed:
    """This attempt did not bring me the version; ``corrupt``: bytes came, but not those of the manifest."""

    attempt: int
    reason: str
    corrupt: bool


@dataclass(frozen=True, slots=True)
class Check:
    """The publisher knows you and is alive itself."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """You are no member (any more): say ``Join``."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """You are no member any more; ``Join`` again after ``retry_s``."""

    reason: str
    retry_s: float


@dataclass(frozen=True, slots=True)
class Enter:
    """Make room for this version. ``manifest`` as in ``manifest_fields``; ``backend`` is ``gloo`` or ``nccl``."""

    attempt: int
    backend: str
    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Go:
    """Receive now, as ``rank`` of ``size``. A new ``epoch`` is built over the store at ``store_port`` of my host; port
    0 says to use the one that is there.

    ``stall_s`` bounds every single collective, ``deadline_s`` the whole; buckets travel ``chunk_bytes`` at a time.
    """

    attempt: int
    epoch: int
    rank: int
    size: int
    store_port: int
    stall_s: float
    deadline_s: float
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Fetch:
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


def _plain_type(hint: Any) -> type:
    """What a field of this annotation is on the wire."""
    return {Mapping: dict, list: list}.get(get_origin(hint), hint)


_KINDS: dict[type, dict[str, Any]] = {
    record: {name: _plain_type(hint) for name, hint in get_type_hints(record).items()}
    for record in (*TO_PUBLISHER, *TO_MEMBER)
}


def encode_message(message: MemberMessage | PublisherMessage) -> bytes:
    """One frame."""
    values = {f.name: getattr(message, f.name) for f in fields(message)}
    if "reason" in values:
        values["reason"] = values["reason"][:_MAX_REASON]
    return encode(type(message).__name__, values)


def decode_message(frame: bytes | memoryview, expected: Sequence[type[_T]], limits: Limits) -> _T:
    """The message in ``frame``, which must be one of ``expected``.

    Raises:
        WireError: it is malformed, or of another type.
    """
    message = decode(frame, limits)
    for record in expected:
        if record.__name__ == message.type:
            return record(**{name: field(message.fields, name, kind) for name, kind in _KINDS[record].items()})
    raise WireError(f"expected one of {[record.__name__ for record in expected]}, got {message.type!r}")
