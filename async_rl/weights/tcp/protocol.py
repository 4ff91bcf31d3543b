"""What passes between the stream server and a generator that pulls: requests one way, bytes the other. No torch.

A request names a session (the token that the publisher gave the generator over the control channel) and items of it
by index. The answer is those items' bytes, one after the other, nothing between them: both sides know every length.
Item ``b`` is bucket ``b`` whole; with ``B`` buckets, item ``B + l * B + b`` is the delta of bucket ``b`` in link ``l``
of the session's chain.

A session with a key is sealed: the answer begins with a nonce of the server's, and every item is cut into records of
``RECORD_BYTES``, each sealed with AES-256-GCM (16 bytes longer than what is in it). Its key is derived from the
session's, both sides' nonces and the request, so no record can be changed, cut out, moved, repeated or read without
the key, which only ever travels inside CURVE.
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
"""Of a sealed stream, and received at a time: smaller ones cost more calls."""
TAG_BYTES = 16

_MAGIC = b"ARW3"
_HEAD = struct.Struct(f"<4s{TOKEN_BYTES}s{NONCE_BYTES}sI")


@dataclass(frozen=True, slots=True)
class Request:
    """Items of a session, in the order in which they shall come."""

    token: bytes
    nonce: bytes
    items: tuple[int, ...]

    def encode(self) -> bytes:
        head = _HEAD.pack(_MAGIC, self.token, self.nonce, len(self.items))
        return head + struct.pack(f"<{len(self.items)}I", *self.items)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The fixed part of a request. Its token is checked before more is read."""

    token: bytes
    nonce: bytes
    num_items: int


def make_request(token: bytes, items: Sequence[int]) -> Request:
    """A request with a nonce of its own."""
    return Request(token, os.urandom(NONCE_BYTES), tuple(items))


def read_head(connection: socket.socket) -> RequestHead | None:
    """The head of the next request; None where the other side is done.

    Raises:
        WireError: it is none.
        OSError: the connection broke or the other side is silent.
    """
    head = read_exactly(connection.recv, _HEAD.size, may_end=True)
    if not head:
        return None
    magic, token, nonce, num_items = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise WireError("expected a request for weights")
    return RequestHead(token, nonce, num_items)


def read_items(connection: socket.socket, head: RequestHead, max_items: int) -> Request:
    """The rest of the request that began with ``head``.

    Raises:
        WireError: it asks for more than ``max_items``.
        OSError: the connection broke or the other side is silent.
    """
    if head.num_items > max_items:
        raise WireError(f"expected a request for at most {max_items} items, got {head.num_items}")
    body = read_exactly(connection.recv, 4 * head.num_items)
    return Request(head.token, head.nonce, struct.unpack(f"<{head.num_items}I", body))


class Seal:
    """The records of one answer, in their order; each side makes its own from the session's key."""

    def __init__(self, session_key: bytes, request: Request, server_nonce: bytes) -> None:
        # BLAKE2b with a key is a pseudo-random function: two answers never share a key, so counters may begin at 0.
        secret = hashlib.blake2b(request.encode() + server_nonce, key=session_key, digest_size=KEY_BYTES).digest()
        self._cipher = AESGCM(secret)
        self._count = 0
        self._buffer = bytearray()

    def seal(self, record: memoryview) -> memoryview:
        """``record`` sealed, good until the next call."""
        if not self._buffer:
            self._buffer = bytearray(RECORD_BYTES + TAG_BYTES)
        out = memoryview(self._buffer)[: len(record) + TAG_BYTES]
        self._cipher.encrypt_into(self._next_nonce(), record, None, out)
        return out

    def open(self, sealed: memoryview, into: memoryview) -> None:
        """The record in ``sealed`` to ``into``.

        Raises:
            CorruptWeightsError: it is not what the server sealed.
        """
        try:
            self._cipher.decrypt_into(self._next_nonce(), sealed, None, into)
        except InvalidTag:
            raise CorruptWeightsError(
                "a record of the weights stream was changed on its way: its seal does not match"
            ) from (None)

    def _next_nonce(self) -> bytes:
        nonce = self._count.to_bytes(12, "little")
        self._count += 1
        return nonce
