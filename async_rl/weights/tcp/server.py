"""The stream server process, which sends versions of the weights to generators that request them. No torch.

``python -m async_rl.weights.tcp.server FD``: the learner starts the process and instructs it over the Unix socket
``FD``. The instructions say which memory holds which buckets, which sessions may read them, and which deltas to
compute. The process only reads that memory, and makes no decisions. It ends when the learner ends.

Unencrypted bytes are sent from the mapped memory by ``send``, not by ``sendfile``. ``sendfile`` would save a copy
here, but the receiver would then copy from cold pages of 4 KiB. That costs more, and the receiver is the slower side.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from async_rl.net.streams import tcp_counts
from async_rl.process.helper import parent_socket
from async_rl.terminal import log_visibly
from async_rl.weights.server_process import MapSlot, receive_message, send_message
from async_rl.weights.tcp import protocol
from async_rl.weights.tcp.delta import encode_delta
from async_rl.weights.tcp.protocol import NONCE_BYTES, RECORD_BYTES, RecordCipher, Request
from async_rl.weights.tcp.request_server import RequestServer

_REPORT_S = 0.1


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
        acked_before: bytes that had been acknowledged on each of its connections when it was first used.
        delivered: bytes that were acknowledged since then. Those that were written if this system does not count them.
    """

    slot: _Slot
    chain: Sequence[Sequence[bytes | None]]
    key: bytes
    connections: set[socket.socket] = field(default_factory=set)
    acked_before: dict[socket.socket, int] = field(default_factory=dict)
    delivered: Counter[socket.socket] = field(default_factory=Counter)

    @property
    def num_items(self) -> int:
        """Number of items that one request may name."""
        return len(self.slot.sizes) * (1 + len(self.chain))

    def delivered_bytes(self) -> int:
        """Return the bytes that have reached the generator's machine."""
        for connection, before in list(self.acked_before.items()):
            with contextlib.suppress(OSError):  # it is closed
                if acked := tcp_counts(connection)[0]:
                    self.delivered[connection] = acked - before
        return sum(list(self.delivered.values()))


class StreamServer:
    """Keeps the versions, the deltas and the sessions of the stream server process."""

    def __init__(self, learner: socket.socket) -> None:
        self._learner = learner
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._slots: dict[int, _Slot] = {}
        self._deltas: dict[int, list[bytes | None]] = {}
        self._requests: RequestServer[_Session] = RequestServer(self._answer)
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
                    self._requests.end_session(token)
                case protocol.EncodeDelta():
                    self._newest_job = message.job
                    threading.Thread(target=self._encode, args=(message,), daemon=True).start()
                case protocol.ForgetDelta(job):
                    with self._lock:
                        self._deltas.pop(job, None)

    def _listen(self, fd: int) -> None:
        listener = socket.socket(fileno=fd)
        threading.Thread(target=self._requests.accept, args=(listener,), daemon=True).start()
        threading.Thread(target=self._report, daemon=True).start()
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
            session = _Session(self._slots[order.slot], chain, order.key)
        self._requests.open_session(order.token, session)

    def _send(self, message: protocol.ServerMessage) -> None:
        with self._send_lock, contextlib.suppress(OSError):  # a learner that is gone ends ``run``
            send_message(self._learner, message)

    def _answer(self, connection: socket.socket, session: _Session, request: Request) -> None:
        """Send all items of a request over the connection.

        The connection is removed from the session before its last byte is sent. After that byte the generator may
        report the version at once, so that the learner ends the session and its connections are closed. This one must
        stay open.
        """
        session.acked_before.setdefault(connection, tcp_counts(connection)[0])
        for chunk, is_last in _chunks(session, request):
            if is_last:
                connection.sendall(chunk[:-1])
                self._requests.finish(connection, session)
            connection.sendall(chunk[-1:] if is_last else chunk)
            session.delivered[connection] += len(chunk)

    def _report(self) -> None:
        """Tell the learner again and again how far the pulls of its sessions are."""
        last: dict[bytes, int] = {}
        while True:
            time.sleep(_REPORT_S)
            counts = {token: session.delivered_bytes() for token, session in self._requests.sessions()}
            if counts != last:
                self._send(protocol.Delivered(counts))
            last = counts

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
    with parent_socket(arguments[0]) as learner:
        StreamServer(learner).run()
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1:])
