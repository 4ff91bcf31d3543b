"""What learner and stream server say to each other, over a Unix socket pair: frames, some with a descriptor. No torch.

Both are one user's processes, the server a child of the learner; the socket has no name, so nobody else can speak.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from async_rl.errors import WireError
from async_rl.net.codec import read_as
from async_rl.net.framing import LENGTH_BYTES, pack_frame, read_body
from async_rl.net.wire import Limits, decode, encode
from async_rl.weights.tcp.delta import Runs

_LIMITS = Limits(max_bytes=256 << 20, max_header_bytes=256 << 20, max_arrays=0, max_depth=None)


class Listen(msgspec.Struct, frozen=True):
    """Take connections at any port of ``host``."""

    host: str


class MapSlot(msgspec.Struct, frozen=True):
    """A staging buffer; its descriptor comes with this."""

    slot: int
    sizes: list[int]
    offsets: list[int]


class OpenSession(msgspec.Struct, frozen=True):
    """Whoever shows ``token`` may pull ``slot``'s buckets and the deltas of ``jobs``. A ``key``: sealed."""

    token: bytes
    slot: int
    jobs: list[int]
    key: bytes


class EndSession(msgspec.Struct, frozen=True):
    """Nothing more under this token; who still pulls is cut off."""

    token: bytes


class Encode(msgspec.Struct, frozen=True):
    """Compute the deltas from one slot's bytes to another's. ``runs``: (end, width, end, width, ...) of each bucket."""

    job: int
    base_slot: int
    target_slot: int
    runs: list[list[int]]

    def bucket_runs(self) -> list[Runs]:
        return [list(zip(flat[::2], flat[1::2], strict=True)) for flat in self.runs]


class Forget(msgspec.Struct, frozen=True):
    """No new session will want this job's deltas."""

    job: int


class Listening(msgspec.Struct, frozen=True):
    """At this port."""

    port: int


class Encoded(msgspec.Struct, frozen=True):
    """Bytes of each bucket's delta, -1 where the bucket itself is no larger; empty: given up for a newer job."""

    job: int
    sizes: list[int]
    elapsed_s: float


LearnerMessage = Listen | MapSlot | OpenSession | EndSession | Encode | Forget
ServerMessage = Listening | Encoded
TO_SERVER: tuple[type[LearnerMessage], ...] = (Listen, MapSlot, OpenSession, EndSession, Encode, Forget)
TO_LEARNER: tuple[type[ServerMessage], ...] = (Listening, Encoded)

_T = TypeVar("_T")


def send(link: socket.socket, message: LearnerMessage | ServerMessage, fd: int | None = None) -> None:
    """One frame, and a descriptor with it.

    Raises:
        OSError: the other side is gone.
    """
    frame = encode(type(message).__name__, message)
    data = pack_frame(frame)
    sent = socket.send_fds(link, [data], [] if fd is None else [fd])
    if sent < len(data):
        link.sendall(data[sent:])


def receive(link: socket.socket, expected: Sequence[type[_T]]) -> tuple[_T, int | None] | None:
    """The next message, one of ``expected``, with the descriptor that came along; None when the other side is gone.

    Raises:
        WireError: it is none of them.
    """
    try:
        header, descriptors, _, _ = socket.recv_fds(link, LENGTH_BYTES, 1, socket.MSG_WAITALL)
    except OSError:
        return None
    try:
        frame = read_body(link.recv, header, max_bytes=_LIMITS.max_bytes) if len(header) == LENGTH_BYTES else None
    except OSError:
        frame = None
    if frame is None:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    message = decode(frame, _LIMITS)
    for record in expected:
        if record.__name__ == message.type:
            return read_as(message.fields, record), descriptors[0] if descriptors else None
    raise WireError(f"expected one of {[record.__name__ for record in expected]}, got {message.type!r}")
