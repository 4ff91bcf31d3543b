"""The messages of the stream server: requests of generators, and instructions of the learner. No torch.

A generator sends a request and gets an answer. A session is the permission to fetch one version, and is identified by a
token, which the publisher sent the generator over the control channel. A request names the token and the numbers of the
items that the generator wants. The answer is the bytes of those items, one after the other, without separators, because
both sides know every length. With ``B`` buckets, item ``b`` is the whole bucket ``b``, and item ``B + l * B + b`` is
the delta of bucket ``b`` in step ``l`` of the session's list of deltas.

The stream of a session with a key is encrypted. The answer begins with a nonce of the server. Every item is cut into
records of ``RECORD_BYTES``, and each record is encrypted and authenticated with AES-256-GCM, which adds 16 bytes. The
key of an answer is derived from the session's key, the nonces of both sides and the request. The session's key travels
only over the encrypted control channel (CURVE). Without it nobody can read, change, remove, move or repeat a record.

Learner and server exchange messages over the pipe of ``weights.server_process``.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from async_rl.errors import CorruptWeightsError, WireError
from async_rl.net.streams import read_exactly
from async_rl.weights.server_process import MapSlot
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


@dataclass(frozen=True, slots=True)
class Request:
    """A generator's request for some items of a session, in the order in which the answer shall bring them."""

    token: bytes
    nonce: bytes
    items: tuple[int, ...]

    def encode(self) -> bytes:
        header = _HEADER.pack(_MAGIC, self.token, self.nonce, len(self.items))
        return header + struct.pack(f"<{len(self.items)}I", *self.items)


@dataclass(frozen=True, slots=True)
class RequestHeader:
    """The fixed part of a request. The server checks its token before it reads more."""

    token: bytes
    nonce: bytes
    num_items: int


def make_request(token: bytes, items: Sequence[int]) -> Request:
    """Return a request for ``items`` of the session with this token. Its nonce is random."""
    return Request(token, os.urandom(NONCE_BYTES), tuple(items))


def read_header(read: Callable[[int], bytes]) -> RequestHeader | None:
    """Read the header of the next request with ``read`` (see ``net.streams``). None if the peer has closed the
    connection.

    Raises:
        WireError: the bytes are not a request.
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
    """Read the rest of the request that began with ``header``, and return the whole request.

    Raises:
        WireError: the request names more than ``max_items`` items.
        OSError: the connection broke, or the peer was silent for too long.
    """
    if header.num_items > max_items:
        raise WireError(
            f"expected a request for at most {max_items} items of the weights, got one for {header.num_items}; "
            f"the peer is not a generator of this async-rl version"
        )
    body = read_exactly(connection.recv, 4 * header.num_items)
    return Request(header.token, header.nonce, struct.unpack(f"<{header.num_items}I", body))


class RecordCipher:
    """Encrypts or decrypts the records of one answer, in their order. Server and generator create one for each
    answer.
    """

    def __init__(self, session_key: bytes, request: Request, server_nonce: bytes) -> None:
        # BLAKE2b with a key is a pseudo-random function: no two answers share a key, so counters may begin at 0.
        secret = hashlib.blake2b(request.encode() + server_nonce, key=session_key, digest_size=KEY_BYTES).digest()
        self._cipher = AESGCM(secret)
        self._num_records = 0
        self._buffer = bytearray()

    def encrypt(self, record: memoryview) -> memoryview:
        """Return ``record`` encrypted. The returned memory is valid until the next call."""
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
                f"record {self._num_records} of an answer with encrypted weights was changed on its way: its "
                f"authentication tag does not match"
            ) from None

    def _next_nonce(self) -> bytes:
        nonce = self._num_records.to_bytes(12, "little")
        self._num_records += 1
        return nonce


# Between the learner and its stream server.


class Listen(msgspec.Struct, frozen=True):
    """The learner tells the server to accept connections. The descriptor of the listening socket comes with this
    message, so that a restarted server has the same port.
    """


class OpenSession(msgspec.Struct, frozen=True):
    """The learner opens a session: the generator that sends ``token`` may fetch one version.

    The version's buckets are in ``slot``. The deltas that the generator may fetch instead are those that the server
    keeps under the numbers ``jobs``. If ``key`` is not empty, the server encrypts the stream with it.
    """

    token: bytes
    slot: int
    jobs: list[int]
    key: bytes


class EndSession(msgspec.Struct, frozen=True):
    """The learner ends this session. The server closes the connections that still read from it."""

    token: bytes


class EncodeDelta(msgspec.Struct, frozen=True):
    """The learner asks for the deltas from the version in ``base_slot`` to the version in ``target_slot``.

    ``job`` is the number under which the server keeps the deltas. ``runs`` holds (end, width, end, width, ...) for each
    bucket, see ``delta.element_runs``.
    """

    job: int
    base_slot: int
    target_slot: int
    runs: list[list[int]]

    def bucket_runs(self) -> list[Runs]:
        return [list(zip(flat[::2], flat[1::2], strict=True)) for flat in self.runs]


class ForgetDelta(msgspec.Struct, frozen=True):
    """The learner tells the server to free the deltas with the number ``job``, because no new session needs them."""

    job: int


class Listening(msgspec.Struct, frozen=True):
    """The server tells the learner that it accepts connections."""


class DeltaEncoded(msgspec.Struct, frozen=True):
    """The server tells the learner that the deltas with the number ``job`` are complete.

    ``sizes`` holds the bytes of each bucket's delta, or -1 where the whole bucket is no larger. It is empty if a newer
    ``EncodeDelta`` replaced this one. ``elapsed_s`` is the time that the deltas took to compute.
    """

    job: int
    sizes: list[int]
    elapsed_s: float


class Delivered(msgspec.Struct, frozen=True):
    """The server tells the learner how many bytes of each session have reached the generator, when that has changed.

    The keys are the sessions' tokens.
    """

    num_bytes: dict[bytes, int]


LearnerMessage = Listen | MapSlot | OpenSession | EndSession | EncodeDelta | ForgetDelta
ServerMessage = Listening | DeltaEncoded | Delivered
TO_SERVER: tuple[type[LearnerMessage], ...] = (Listen, MapSlot, OpenSession, EndSession, EncodeDelta, ForgetDelta)
TO_LEARNER: tuple[type[ServerMessage], ...] = (Listening, DeltaEncoded, Delivered)
