"""The messages of the stream server: pulls of generators, and instructions of the learner. No torch.

A pull is a request and an answer. A request names a session, by the token that the publisher sent the
generator over the control channel, and items of the session by number. The answer is the bytes of those items, one
after the other, without separators, because both sides know every length. Item ``b`` is bucket ``b`` whole. With ``B``
buckets, item ``B + l * B + b`` is the delta of bucket ``b`` in link ``l`` of the session's chain of deltas.

The stream of a session with a key is encrypted: the answer begins with a nonce of the server, and every item is cut
into records of ``RECORD_BYTES``, each encrypted and authenticated with AES-256-GCM (which adds 16 bytes). The key of an
answer is derived from the session's key, the nonces of both sides and the request. So without the session's key, which
only ever travels inside CURVE, nobody can read, change, remove, move or repeat a record.

Learner and server exchange messages over a Unix socket pair without a name, so no other process can connect. Messages
are frames, some with a file descriptor.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from async_rl.errors import CorruptWeightsError, WireError
from async_rl.net.codec import read_as
from async_rl.net.streams import LENGTH_BYTES, pack_frame, read_body, read_exactly
from async_rl.net.wire import Limits, decode, encode
from async_rl.weights.tcp.delta import Runs

TOKEN_BYTES = 16
KEY_BYTES = 32
NONCE_BYTES = 16
RECORD_BYTES = 4 << 20
"""Plain bytes of one record of an encrypted stream. Smaller records cost more calls."""
TAG_BYTES = 16

_MAGIC = b"ARW3"
_HEADER = struct.Struct(f"<4s{TOKEN_BYTES}s{NONCE_BYTES}sI")
HEADER_BYTES = _HEADER.size
_LIMITS = Limits(max_bytes=256 << 20, max_header_bytes=256 << 20, max_arrays=0, max_depth=None)


@dataclass(frozen=True, slots=True)
class Request:
    """Items of a session, in the order of the answer."""

    token: bytes
    nonce: bytes
    items: tuple[int, ...]

    def encode(self) -> bytes:
        header = _HEADER.pack(_MAGIC, self.token, self.nonce, len(self.items))
        return header + struct.pack(f"<{len(self.items)}I", *self.items)


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """The fixed part of a request. Check its token before reading more."""

    token: bytes
    nonce: bytes
    num_items: int


def make_request(token: bytes, items: Sequence[int]) -> Request:
    """Return a request with a fresh nonce."""
    return Request(token, os.urandom(NONCE_BYTES), tuple(items))


def read_header(read: Callable[[int], bytes]) -> RequestHeader | None:
    """Read the header of the next request with ``read`` (``net.streams``); None if the peer has closed the connection.

    Raises:
        WireError: it is not a request.
        OSError: the connection broke, or the peer was silent for too long.
    """
    header = read_exactly(read, HEADER_BYTES, may_end=True)
    if not header:
        return None
    magic, token, nonce, num_items = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise WireError(
            f"expected a request for weights, which begins with {_MAGIC!r}, got {magic!r}; the peer is not a generator "
            f"of this async-rl version"
        )
    return RequestHeader(token, nonce, num_items)


def read_items(connection: socket.socket, header: RequestHeader, max_items: int) -> Request:
    """Read the rest of the request that began with ``header``.

    Raises:
        WireError: it asks for more than ``max_items``.
        OSError: the connection broke, or the peer was silent for too long.
    """
    if header.num_items > max_items:
        raise WireError(
            f"expected a request for at most {max_items} items of the weights, got one for {header.num_items}"
        )
    body = read_exactly(connection.recv, 4 * header.num_items)
    return Request(header.token, header.nonce, struct.unpack(f"<{header.num_items}I", body))


class RecordCipher:
    """Encrypts or decrypts the records of one answer, in their order. Each side creates one cipher."""

    def __init__(self, session_key: bytes, request: Request, server_nonce: bytes) -> None:
        # BLAKE2b with a key is a pseudo-random function: no two answers share a key, so counters may begin at 0.
        secret = hashlib.blake2b(request.encode() + server_nonce, key=session_key, digest_size=KEY_BYTES).digest()
        self._cipher = AESGCM(secret)
        self._num_records = 0
        self._buffer = bytearray()

    def encrypt(self, record: memoryview) -> memoryview:
        """Return ``record`` encrypted, in memory that is valid until the next call."""
        if not self._buffer:
            self._buffer = bytearray(RECORD_BYTES + TAG_BYTES)
        out = memoryview(self._buffer)[: len(record) + TAG_BYTES]
        self._cipher.encrypt_into(self._next_nonce(), record, None, out)
        return out

    def decrypt(self, encrypted: memoryview, into: memoryview) -> None:
        """Write the plain bytes of ``encrypted`` to ``into``.

        Raises:
            CorruptWeightsError: it is not what the server encrypted.
        """
        try:
            self._cipher.decrypt_into(self._next_nonce(), encrypted, None, into)
        except InvalidTag:
            raise CorruptWeightsError(
                "a part of the encrypted weights was changed on its way: its authentication tag does not match"
            ) from (None)

    def _next_nonce(self) -> bytes:
        nonce = self._num_records.to_bytes(12, "little")
        self._num_records += 1
        return nonce


# Between the learner and its stream server.


class Listen(msgspec.Struct, frozen=True):
    """Accept connections at any port of ``host``."""

    host: str


class MapSlot(msgspec.Struct, frozen=True):
    """Map a staging buffer, whose descriptor comes with this message."""

    slot: int
    sizes: list[int]
    offsets: list[int]


class OpenSession(msgspec.Struct, frozen=True):
    """Let a peer that sends ``token`` pull the buckets of ``slot`` and the deltas of ``jobs``.

    If ``key`` is not empty, encrypt the stream with it.
    """

    token: bytes
    slot: int
    jobs: list[int]
    key: bytes


class EndSession(msgspec.Struct, frozen=True):
    """End this session; a pull in progress is cut off."""

    token: bytes


class EncodeDelta(msgspec.Struct, frozen=True):
    """Compute the deltas from one slot's bytes to another's. ``runs``: (end, width, end, width, ...) of each bucket."""

    job: int
    base_slot: int
    target_slot: int
    runs: list[list[int]]

    def bucket_runs(self) -> list[Runs]:
        return [list(zip(flat[::2], flat[1::2], strict=True)) for flat in self.runs]


class ForgetDelta(msgspec.Struct, frozen=True):
    """Free the deltas of this job; no new session needs them."""

    job: int


class Listening(msgspec.Struct, frozen=True):
    """The server accepts connections at this port."""

    port: int


class DeltaEncoded(msgspec.Struct, frozen=True):
    """Bytes of each bucket's delta; -1 where the bucket is no larger. Empty if a newer job replaced this one."""

    job: int
    sizes: list[int]
    elapsed_s: float


LearnerMessage = Listen | MapSlot | OpenSession | EndSession | EncodeDelta | ForgetDelta
ServerMessage = Listening | DeltaEncoded
TO_SERVER: tuple[type[LearnerMessage], ...] = (Listen, MapSlot, OpenSession, EndSession, EncodeDelta, ForgetDelta)
TO_LEARNER: tuple[type[ServerMessage], ...] = (Listening, DeltaEncoded)

_T = TypeVar("_T")


def send_message(pipe: socket.socket, message: LearnerMessage | ServerMessage, fd: int | None = None) -> None:
    """Send one message, with the descriptor if given.

    Raises:
        OSError: the other side is gone.
    """
    data = pack_frame(encode(type(message).__name__, message))
    sent = socket.send_fds(pipe, [data], [] if fd is None else [fd])
    if sent < len(data):
        pipe.sendall(data[sent:])


def receive_message(pipe: socket.socket, expected: Sequence[type[_T]]) -> tuple[_T, int | None] | None:
    """Receive the next message, one of ``expected``, and its descriptor; None if the other side is gone.

    Raises:
        WireError: it is none of them.
    """
    try:
        header, descriptors, _, _ = socket.recv_fds(pipe, LENGTH_BYTES, 1, socket.MSG_WAITALL)
    except OSError:
        return None
    try:
        frame = read_body(pipe.recv, header, max_bytes=_LIMITS.max_bytes) if len(header) == LENGTH_BYTES else None
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
    raise WireError(
        f"expected a message of type {' or '.join(record.__name__ for record in expected)}, got {message.type!r}"
    )
