"""The stream server process, which sends versions of the weights to generators that request them. No torch.

``python -m async_rl.weights.tcp.server FD``: the learner starts the process and instructs it over the Unix socket
``FD``. The instructions say which memory holds which buckets, which sessions may read them, and which deltas to
compute. The process only reads that memory, and makes no decisions. Every connection has a thread of its own. The
process ends when the learner ends.

Unencrypted bytes are sent from the mapped memory by ``send``, not by ``sendfile``. ``sendfile`` would save a copy
here, but the receiver would then copy from cold pages of 4 KiB. That costs more, and the receiver is the slower side.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from async_rl.errors import AsyncRLError
from async_rl.net.streams import (
    MAX_UNAUTHENTICATED,
    MAX_UNAUTHENTICATED_OF_ADDRESS,
    UnauthenticatedPeers,
    descriptors_for_peers,
    is_out_of_resources,
    raise_descriptor_limit,
    shut_down,
    until,
)
from async_rl.terminal import log_visibly
from async_rl.weights.server_process import MapSlot, receive_message, send_message
from async_rl.weights.tcp import protocol
from async_rl.weights.tcp.delta import encode_delta
from async_rl.weights.tcp.protocol import NONCE_BYTES, RECORD_BYTES, RecordCipher, Request, read_header, read_items

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
_SPARE_DESCRIPTORS = 64
_HEADER_S = 5.0
"""Time from a connection's begin to the end of its first request's header."""
_FULL_S = 1.0
"""Without descriptors for another connection, wait for one to end, at most this long at a time."""
_STALL_S = 30
"""A connection on which nothing moves for this long is closed."""
_SESSION_S = 3.0
"""How long a request waits for its session: the generator may learn of it before this process does."""


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """The staging memory of one version, mapped into this process.

    The learner may overwrite the memory while it is read, so receivers verify digests.
    """

    fd: int
    buckets: Sequence[mmap.mmap]
    sizes: Sequence[int]
    offsets: Sequence[int]

    def bucket(self, index: int) -> np.ndarray:
        """Return the bucket with this number as uint8 [N], read-only."""
        return np.frombuffer(self.buckets[index], np.uint8)[: self.sizes[index]]


@dataclass(slots=True, eq=False)
class _Session:
    """A permission to fetch one version: the items that a generator may request.

    Attributes:
        slot: the memory of the version's buckets.
        chain: ``chain[l][b]`` is the delta of bucket b in step l. None where the whole bucket must be requested.
        key: the key that encrypts the stream. Empty: it is not encrypted.
        connections: connections that wait for an answer of this session.
    """

    slot: _Slot
    chain: Sequence[Sequence[bytes | None]]
    key: bytes
    connections: set[socket.socket] = field(default_factory=set)

    @property
    def num_items(self) -> int:
        """Number of items that one request may name."""
        return len(self.slot.sizes) * (1 + len(self.chain))


class StreamServer:
    """Keeps the sessions, the deltas and the connections of the stream server process."""

    def __init__(self, learner: socket.socket) -> None:
        self._learner = learner
        self._lock = threading.Lock()
        self._session_opened, self._connection_ended = threading.Condition(self._lock), threading.Condition(self._lock)
        self._send_lock = threading.Lock()
        self._slots: dict[int, _Slot] = {}
        self._sessions: dict[bytes, _Session] = {}
        self._deltas: dict[int, list[bytes | None]] = {}
        self._max_descriptors = raise_descriptor_limit()
        most = descriptors_for_peers(self._max_descriptors, _SPARE_DESCRIPTORS)
        self._max_connections, self._has_warned_full = min(MAX_CONNECTIONS, most), False
        self._num_connections = 0
        self._unauthenticated: UnauthenticatedPeers[socket.socket] = UnauthenticatedPeers(
            most=MAX_UNAUTHENTICATED, most_of_address=MAX_UNAUTHENTICATED_OF_ADDRESS
        )
        self._newest_job = -1

    def run(self) -> None:
        """Follow the learner's instructions until the learner closes the pipe."""
        while (received := receive_message(self._learner, protocol.TO_SERVER)) is not None:
            message, fd = received
            match message:
                case protocol.Listen():
                    assert fd is not None, "no listening socket"
                    self._listen(fd)
                case MapSlot(slot, sizes, offsets):
                    assert fd is not None, "a slot without memory"
                    self._map(slot, fd, sizes, offsets)
                case protocol.OpenSession():
                    self._open_session(message)
                case protocol.EndSession(token):
                    self._end_session(token)
                case protocol.EncodeDelta():
                    self._newest_job = message.job
                    threading.Thread(target=self._encode, args=(message,), daemon=True).start()
                case protocol.ForgetDelta(job):
                    with self._lock:
                        self._deltas.pop(job, None)

    def _listen(self, fd: int) -> None:
        listener = socket.socket(fileno=fd)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        self._send(protocol.Listening())

    def _map(self, slot: int, fd: int, sizes: Sequence[int], offsets: Sequence[int]) -> None:
        buckets = [
            mmap.mmap(fd, max(1, size), access=mmap.ACCESS_READ, offset=offset)
            for size, offset in zip(sizes, offsets, strict=True)
        ]
        with self._lock:
            self._slots[slot] = _Slot(fd, buckets, sizes, offsets)

    def _open_session(self, order: protocol.OpenSession) -> None:
        with self._lock:
            chain = [self._deltas[job] for job in order.jobs]
            self._sessions[order.token] = _Session(self._slots[order.slot], chain, order.key)
            self._session_opened.notify_all()

    def _end_session(self, token: bytes) -> None:
        with self._lock:
            session = self._sessions.pop(token, None)
            connections = list(session.connections) if session is not None else []
        for connection in connections:
            shut_down(connection)

    def _send(self, message: protocol.ServerMessage) -> None:
        with self._send_lock, contextlib.suppress(OSError):  # a learner that is gone ends ``run``
            send_message(self._learner, message)

    # One thread for each connection.

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, (address, *_) = listener.accept()
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                    raise
                if is_out_of_resources(error):
                    logger.warning("can't accept another connection for weights: %s; waiting until one ends", error)
                    with self._lock:
                        self._connection_ended.wait(_FULL_S)
                # Otherwise that one peer was gone before it was accepted.
                continue
            with self._lock:
                is_admitted = self._num_connections < self._max_connections
                self._num_connections += is_admitted
                ended = self._unauthenticated.add(connection, address, time.monotonic()) if is_admitted else []
            for other in ended:
                shut_down(other)  # its thread ends then
            if not is_admitted:
                connection.close()
                self._warn_full()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError as error:
                logger.warning("can't serve a connection for weights: %s", error)
                self._end(connection)

    def _warn_full(self) -> None:
        if self._has_warned_full:
            return
        self._has_warned_full = True
        logger.warning(
            "closed a connection for weights: all %d are in use; raise the limit on open files (ulimit -n), which is "
            "%d",
            self._max_connections, self._max_descriptors,
        )  # fmt: skip

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._answer_requests(connection)
        except (OSError, AsyncRLError) as error:
            # It affects this peer alone. A generator that is alive reports the failure to the publisher.
            logger.info("a weights connection ended: %s", error)
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        connection.close()
        with self._lock:
            self._num_connections -= 1
            self._unauthenticated.remove(connection)
            self._connection_ended.notify_all()

    def _answer_requests(self, connection: socket.socket) -> None:
        timeout = struct.pack("ll", _STALL_S, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Until the first token is checked, nothing but a header is read, and not for long.
        read, is_known = until(connection, time.monotonic() + _HEADER_S), False
        while (header := read_header(read)) is not None:
            session = self._find_session(header.token, connection)
            if session is None:
                return
            try:
                if not is_known:
                    read, is_known = connection.recv, True
                    connection.settimeout(None)
                    with self._lock:
                        self._unauthenticated.remove(connection)
                request = read_items(connection, header, session.num_items)
                self._answer(connection, session, request)
            finally:
                with self._lock:
                    session.connections.discard(connection)

    def _find_session(self, token: bytes, connection: socket.socket) -> _Session | None:
        """Return the session with this token. None if no such session is opened within ``_SESSION_S``."""
        with self._lock:
            if not self._session_opened.wait_for(lambda: token in self._sessions, _SESSION_S):
                return None
            session = self._sessions[token]
            session.connections.add(connection)
            return session

    def _answer(self, connection: socket.socket, session: _Session, request: Request) -> None:
        """Send all items of a request over the connection.

        The connection is removed from the session before its last byte is sent. After that byte the generator may
        report the version at once, so that the learner ends the session and its connections are closed. This one must
        stay open.
        """
        for chunk, is_last in _chunks(session, request):
            if is_last:
                connection.sendall(chunk[:-1])
                with self._lock:
                    session.connections.discard(connection)
                chunk = chunk[-1:]
            connection.sendall(chunk)

    # Deltas: only the newest job matters.

    def _encode(self, order: protocol.EncodeDelta) -> None:
        start = time.monotonic()
        with self._lock:
            base, target = self._slots[order.base_slot], self._slots[order.target_slot]
        deltas: list[bytes | None] = []
        for index, runs in enumerate(order.bucket_runs()):
            if order.job != self._newest_job:
                self._send(protocol.DeltaEncoded(order.job, [], 0.0))
                return
            deltas.append(encode_delta(base.bucket(index), target.bucket(index), runs))
        with self._lock:
            self._deltas[order.job] = deltas
        sizes = [-1 if delta is None else len(delta) for delta in deltas]
        self._send(protocol.DeltaEncoded(order.job, sizes, time.monotonic() - start))


def _chunks(session: _Session, request: Request) -> Iterator[tuple[memoryview, bool]]:
    """Yield the items of a request in its order, as pairs (bytes, whether these are the last ones).

    The bytes are encrypted if the session has a key. They are valid until the next pair is requested, because the
    buffer is reused.
    """
    cipher, size = None, 0
    if session.key:
        nonce = os.urandom(NONCE_BYTES)
        yield memoryview(nonce), False
        cipher, size = RecordCipher(session.key, request, nonce), RECORD_BYTES
    for number, item in enumerate(request.items, start=1):
        data = _delta_or_bucket(session, item)
        step = size or max(1, len(data))
        for start in range(0, len(data), step):
            record = data[start : start + step]
            is_last = number == len(request.items) and start + step >= len(data)
            yield (record if cipher is None else cipher.encrypt(record)), is_last


def _delta_or_bucket(session: _Session, item: int) -> memoryview:
    num_buckets = len(session.slot.sizes)
    if item < num_buckets:
        return session.slot.bucket(item).data
    number, bucket = divmod(item - num_buckets, num_buckets)
    delta = session.chain[number][bucket] if number < len(session.chain) else None
    if delta is None:
        raise OSError(
            f"expected a request for items of the generator's session, got item {item}, which the session lacks"
        )
    return memoryview(delta)


def main(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ, leave: Callable[[int], None] = os._exit
):
    """Serve until the learner closes the pipe. Then exit at once, even if generators still fetch weights."""
    log_visibly(environment.get("ASYNC_RL_LOG", "WARNING"), "stream server: %(message)s")
    # Ctrl-C in the terminal reaches the whole process group, but only the learner ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(arguments[0])) as learner:
        StreamServer(learner).run()
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1:])
