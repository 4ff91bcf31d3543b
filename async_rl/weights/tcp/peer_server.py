"""Serves the weights that this generator has, or receives, to other generators. No torch.

The learner gives every member a token (and a key) with which it shall serve a version, and gives the same to the
generators that it sends there. The bytes are those in ``Arrivals``. Threads of this process send them.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from async_rl.net.streams import listening_socket, shut_down
from async_rl.weights.manifest import Manifest
from async_rl.weights.tcp.arrivals import Arrival, Arrivals
from async_rl.weights.tcp.peer_protocol import END, GONE, RECORD, RESTART, WAIT, WAIT_S
from async_rl.weights.tcp.protocol import NONCE_BYTES, RECORD_BYTES, RecordCipher, Request
from async_rl.weights.tcp.request_server import RequestServer

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 64
_MAX_SESSIONS = 4
"""One more than the versions in memory."""


@dataclass(slots=True, eq=False)
class _Session:
    """The permission to fetch the version of ``manifest`` from this generator. See ``request_server.Session``."""

    manifest: Manifest
    key: bytes
    connections: set[socket.socket] = field(default_factory=set)

    @property
    def num_items(self) -> int:
        return len(self.manifest.bucket_sizes)


class PeerServer:
    """Listens at ``host``, on the first free port of ``ports`` (None: any), and serves what is in ``arrivals``.

    Raises:
        AddressError: no port is free.
    """

    def __init__(self, arrivals: Arrivals, host: str, ports: Sequence[int] | None) -> None:
        self.host = host
        self._arrivals = arrivals
        self._listener = listening_socket(host, ports)
        self.port: int = self._listener.getsockname()[1]
        self._requests: RequestServer[_Session] = RequestServer(self._answer, _MAX_CONNECTIONS)
        self._tokens: deque[bytes] = deque()
        self._newest = ""
        self._is_closed = False
        threading.Thread(target=self._accept, name="weights-serve", daemon=True).start()

    def open_session(self, token: bytes, key: bytes, manifest: Manifest) -> None:
        """Serve the version of ``manifest``, which this generator has or will receive next, to those with ``token``."""
        self._newest = manifest.digest
        if token in self._tokens:  # the learner offers the version again
            return
        self._requests.open_session(token, _Session(manifest, key))
        self._tokens.append(token)
        if len(self._tokens) > _MAX_SESSIONS:
            self._requests.end_session(self._tokens.popleft())

    def close(self) -> None:
        """Stop listening, and close the connections."""
        self._is_closed = True
        while self._tokens:
            self._requests.end_session(self._tokens.popleft())
        shut_down(self._listener)  # wakes ``accept``
        self._listener.close()

    # Threads of the server.

    def _accept(self) -> None:
        try:
            self._requests.accept(self._listener)
        except OSError as error:
            if not self._is_closed:
                logger.warning("this generator serves no more weights to others: %s", error)

    def _answer(self, connection: socket.socket, session: _Session, request: Request) -> None:
        cipher = None
        if session.key:
            nonce = os.urandom(NONCE_BYTES)
            connection.sendall(nonce)
            cipher = RecordCipher(session.key, request, nonce)
        for bucket in request.items:
            connection.sendall(self._send_bucket(connection, session, bucket, cipher))

    def _send_bucket(
        self, connection: socket.socket, session: _Session, bucket: int, cipher: RecordCipher | None
    ) -> bytes:
        """Send the bucket as often as it turns out not to be valid. Return the status that ends it."""
        while True:
            arrival = self._arrivals.find(session.manifest.bucket_digests[bucket], WAIT_S)
            if arrival is not None and self._send(connection, arrival, cipher):
                return END
            if arrival is None and session.manifest.digest != self._newest:
                return GONE
            connection.sendall(WAIT if arrival is None else RESTART)

    def _send(self, connection: socket.socket, arrival: Arrival, cipher: RecordCipher | None) -> bool:
        """Send the bucket as its bytes arrive. Return whether they were valid until the last one was sent."""
        for start in range(0, len(arrival.memory), RECORD_BYTES):
            record = arrival.memory[start : start + RECORD_BYTES]
            while not arrival.wait(start + len(record), WAIT_S):
                connection.sendall(WAIT)
            if arrival.is_valid is False:
                return False
            connection.sendall(RECORD)
            connection.sendall(record if cipher is None else cipher.encrypt(record))
        while not arrival.wait_for_end(WAIT_S):
            connection.sendall(WAIT)
        return arrival.is_valid is True
