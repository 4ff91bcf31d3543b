"""The protocol between the stream server and a generator that pulls: requests one way, bytes the other. No torch.

A request names a session, by the token that the publisher sent the generator over the control channel, and items of the
session by number. The answer is the bytes of those items, one after the other, with nothing between them: both sides
know every length. Item ``b`` is bucket ``b`` whole. With ``B`` buckets, item ``B + l * B + b`` is the delta of bucket
``b`` in link ``l`` of the session's chain of deltas.

The stream of a session with a key is encrypted: the answer begins with a nonce of the server, and every item is cut
into records of ``RECORD_BYTES``, each encrypted and authenticated with AES-256-GCM (which adds 16 bytes). The key of an
answer is derived from the session's key, the nonces of both sides and the request. So without the session's key, which
only ever travels inside CURVE, nobody can read, change, remove, move or repeat a record.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from async_rl.errors import CorruptWeightsError, WireError
from async_rl.net.framing import read_exactly

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
    """Items of a session, in the order in which the answer shall have them."""

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


def read_header(connection: socket.socket) -> RequestHeader | None:
    """Read the header of the next request; None if the peer has closed the connection.

    Raises:
        WireError: it is no request.
        OSError: the connection broke, or the peer was silent for too long.
    """
    header = read_exactly(connection.recv, HEADER_BYTES, may_end=True)
    if not header:
        return None
    magic, token, nonce, num_items = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise WireError(f"expected a request for weights that begins with {_MAGIC!r}, got {magic!r}")
    return RequestHeader(token, nonce, num_items)


def read_items(connection: socket.socket, header: RequestHeader, max_items: int) -> Request:
    """Read the rest of the request that began with ``header``.

    Raises:
        WireError: it asks for more than ``max_items``.
        OSError: the connection broke, or the peer was silent for too long.
    """
    if header.num_items > max_items:
        raise WireError(f"expected a request for at most {max_items} items, got {header.num_items}")
    body = read_exactly(connection.recv, 4 * header.num_items)
    return Request(header.token, header.nonce, struct.unpack(f"<{header.num_items}I", body))


class RecordCipher:
    """Encrypts or decrypts the records of one answer, in their order. Each side makes its own."""

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
                "a record of the weights stream was changed on its way: its authentication tag does not match"
            ) from (None)

    def _next_nonce(self) -> bytes:
        nonce = self._num_records.to_bytes(12, "little")
        self._num_records += 1
        return nonce
