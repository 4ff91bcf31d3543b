"""The generator's side of ``tcp``: fetches the buckets of a version, or the deltas to it, from the stream server.

Bytes are read from the socket straight into their place, and the digest is computed while they are in the cache. A
bucket that does not match its digest is requested again, as a whole. The other buckets are kept, also for the next
pull if this one breaks off: a bucket is requested only if the buffer does not hold its bytes already.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import xxhash

from async_rl.errors import CorruptWeightsError, WeightsError
from async_rl.net.link import unreachable_text
from async_rl.net.streams import StreamEndedError, read_exactly, receive_into
from async_rl.net.wire import SAME_VERSION
from async_rl.process.fault_points import fault_point
from async_rl.weights.control import Pull
from async_rl.weights.manifest import digest_bytes
from async_rl.weights.peer_messages import PeerOffer
from async_rl.weights.receive_buffers import ReceiveBuffer, ReceiveBuffers
from async_rl.weights.tcp.arrivals import Arrival, Arrivals
from async_rl.weights.tcp.delta import Runs, apply_delta, element_runs
from async_rl.weights.tcp.peer_pull import PeerPull
from async_rl.weights.tcp.protocol import NONCE_BYTES, RECORD_BYTES, TAG_BYTES, RecordCipher, Request, make_request
from async_rl.weights.transport import ReceiveOrder, ReceiveResult

MAX_REQUESTS = 4
"""Requests for one version: the first for all buckets, the others for buckets that arrived corrupt."""
_CONNECT_S = 5.0
_STALL_S = 10.0
_KEEP_S = 20.0
"""An idle connection is not used again after this time: the server, or a device on the way, may have closed it."""
_PIECE_BYTES = 4 << 20
"""Received and digested at a time. Smaller reads cost more calls; larger ones leave the cache."""


class StreamReceiver:
    """Implements ``transport.TransportReceiver`` for ``tcp``. It keeps its connection to the stream server
    between versions.

    ``arrivals`` gets what arrives, for other generators.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._connection = _KeptConnection()

    def receive(self, order: ReceiveOrder[Pull], buffer: ReceiveBuffer, buffers: ReceiveBuffers) -> ReceiveResult:
        """Fetch the version into ``buffer`` and verify it.

        The learner may offer deltas from an older version. They are used if ``buffers`` still holds that version.
        """
        base = buffers.find(order.message.base) if order.message.base else None
        return _VersionPull(order, buffer, base, self._connection, self._arrivals).run()

    def close(self) -> None:
        self._connection.close()


class _KeptConnection:
    """The connection to the stream server, which is kept open between requests.

    A fresh connection is slow for the first megabytes, until the kernel gives it large windows.
    """

    def __init__(self) -> None:
        self._kept: tuple[tuple[str, int], socket.socket, float] | None = None

    @contextmanager
    def send(self, host: str, port: int, deadline: float, request: Request, to_open: str) -> Iterator[socket.socket]:
        """Send ``request`` to the stream server, and yield the connection. The caller must read the whole answer from
        it.

        If the caller raises an error, the connection is closed, else it is kept for the next request. ``to_open`` is
        that of ``ReceiveOrder``.

        Raises:
            WeightsError: the deadline has passed, or the server can't be reached.
            OSError: the connection broke.
        """
        connection = self._take((host, port)) or _connect(host, port, deadline, to_open)
        try:
            connection.sendall(request.encode())
            yield connection
        except BaseException:
            connection.close()
            raise
        self._kept = (host, port), connection, time.monotonic()

    def close(self) -> None:
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None

    def _take(self, server: tuple[str, int]) -> socket.socket | None:
        if self._kept is None:
            return None
        kept_server, connection, used_at = self._kept
        if kept_server != server or time.monotonic() - used_at > _KEEP_S or _has_ended(connection):
            self.close()
            return None
        self._kept = None
        return connection


def _has_ended(connection: socket.socket) -> bool:
    """Return whether an idle connection can't be used again. If anything can be read from it, that is an end or
    an error.
    """
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _connect(host: str, port: int, deadline: float, to_open: str) -> socket.socket:
    timeout_s = min(_CONNECT_S, deadline - time.monotonic())
    if timeout_s <= 0:
        raise WeightsError(
            "this version of the weights was not received within weights.deadline_s; raise it, or check the network"
        )
    try:
        connection = socket.create_connection((host, port), timeout_s)
    except OSError as error:
        server = "the learner's stream server"
        raise WeightsError(unreachable_text(server, host, port, error, timeout_s, to_open=to_open)) from error
    # Blocking, with the kernel's clock: Python's own would poll before every read.
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_STALL_S), 0))
    return connection


class _VersionPull:
    """Fetches one version into ``buffer``.

    ``base`` holds the buckets of the weights to which the deltas are applied. It is None if no deltas can be used.
    """

    def __init__(
        self, order: ReceiveOrder[Pull], buffer: ReceiveBuffer, base: Sequence | None, connection: _KeptConnection,
        arrivals: Arrivals,
    ) -> None:  # fmt: skip
        self._pull, self._manifest = order.message, order.manifest
        self._host = order.host
        self._connection, self._arrivals = connection, arrivals
        self._order, self._buffer = order, buffer
        self._limit_s = order.deadline - time.monotonic()
        self._buckets = [np.asarray(bucket.numpy()) for bucket in buffer.buckets]
        self._base = None if base is None else [np.asarray(bucket.numpy()) for bucket in base]
        self._runs: list[Runs] = []
        if self._pull.delta_sizes:
            self._runs += element_runs(self._manifest.tensors, self._manifest.bucket_sizes)
        self._wire_bytes = self._peer_bytes = 0
        self._verify_s = 0.0
        self._num_corrupt = 0
        self._check_delta_sizes()

    def run(self) -> ReceiveResult:
        for offer in self._pull.peers:
            self._pull_from(offer)
        missing, reason = self._missing(), ""
        if not missing:
            return self._result()
        for number in range(MAX_REQUESTS):
            by_delta = {b for b in missing if number == 0 and self._is_smaller_by_delta(b)}
            try:
                missing, reason = self._request(missing, by_delta)
            except (OSError, struct.error) as error:
                raise WeightsError(
                    f"can't receive weights from the learner at {self._host}:{self._pull.port}: {error}; the "
                    f"learner offers the version again"
                ) from error
            if not missing:
                return self._result()
            self._num_corrupt += len(missing)
        raise CorruptWeightsError(
            f"{len(missing)} buckets of the weights were still damaged after {MAX_REQUESTS} requests: {reason}; check "
            f"the network and the memory of both machines"
        )

    def _missing(self) -> list[int]:
        held = zip(self._buffer.digests, self._manifest.bucket_digests, strict=True)
        return [bucket for bucket, (digest, wanted) in enumerate(held) if digest != wanted]

    def _result(self) -> ReceiveResult:
        return ReceiveResult(self._wire_bytes, self._num_corrupt, self._verify_s, self._peer_bytes)

    def _pull_from(self, offer: PeerOffer) -> None:
        """Fetch what is missing from another generator. What it does not send is then fetched from the learner."""
        if not (missing := self._missing()):
            return
        result = PeerPull(offer, self._manifest, self._buffer, self._arrivals, self._order.on_bytes).run(missing)
        self._wire_bytes += result.wire_bytes
        self._peer_bytes += result.wire_bytes
        self._verify_s += result.verify_s
        if result.failure:
            self._order.on_peer_failed(result.failure, result.is_faulty)

    def _request(self, buckets: Sequence[int], by_delta: set[int]) -> tuple[list[int], str]:
        """Request these buckets and read the answer. Return the buckets that arrived corrupt, and the reason of
        the last one.
        """
        items = [item for bucket in buckets for item in self._items(bucket, bucket in by_delta)]
        request = make_request(self._pull.token, items)
        corrupt: list[int] = []
        remaining, reason = deque(buckets), ""
        try:
            with self._answer(request) as answer:
                while remaining:
                    bucket = remaining[0]
                    self._buffer.digests[bucket] = ""
                    expected = self._manifest.bucket_digests[bucket]
                    place, memory = (id(self._buffer), bucket), self._buckets[bucket].data
                    with self._arrivals.receiving(place, expected, memory) as arrival:
                        is_delta = bucket in by_delta
                        digest = self._by_delta(answer, bucket) if is_delta else self._whole(answer, arrival)
                        arrival.end(is_valid=digest == expected)
                    if digest == expected:
                        self._buffer.digests[bucket] = digest
                    else:
                        corrupt.append(bucket)
                        reason = (
                            f"the received bytes do not match their digests: bucket {bucket}: expected {expected}, "
                            f"got {digest}"
                        )
                    remaining.popleft()
                    fault_point("generator.receiving")  # a bucket of a version has arrived, the version is not verified
        except CorruptWeightsError as error:
            # A record was changed: nothing that follows it on this connection can be trusted.
            return [*corrupt, *remaining], str(error)
        return corrupt, reason

    @contextmanager
    def _answer(self, request: Request) -> Iterator[_Answer]:
        """Send ``request``, and yield the answer. The caller must read all its items."""
        deadline = time.monotonic() + self._limit_s
        to_open = self._order.to_open
        with self._connection.send(self._host, self._pull.port, deadline, request, to_open) as connection:
            cipher = None
            if self._pull.key:
                cipher = RecordCipher(self._pull.key, request, read_exactly(connection.recv, NONCE_BYTES))
            answer = _Answer(connection, cipher, self._limit_s, self._order.on_bytes)
            try:
                yield answer
            finally:
                self._wire_bytes += answer.num_bytes
                self._verify_s += answer.verify_s

    def _items(self, bucket: int, by_delta: bool) -> list[int]:
        count = len(self._buckets)
        if not by_delta:
            return [bucket]
        return [count + link * count + bucket for link in range(len(self._pull.delta_sizes))]

    def _is_smaller_by_delta(self, bucket: int) -> bool:
        sizes = [link[bucket] for link in self._pull.delta_sizes]
        return self._base is not None and min(sizes, default=0) >= 0 and sum(sizes) < len(self._buckets[bucket])

    def _whole(self, answer: _Answer, arrival: Arrival) -> str:
        """Read the whole bucket from the answer into its place. Return the digest of the bytes."""
        hasher = xxhash.xxh3_128()
        answer.read(arrival.memory, hasher, arrival.advance)
        return hasher.hexdigest()

    def _by_delta(self, answer: _Answer, bucket: int) -> str:
        """Read the bucket's deltas from the answer and apply them to the base. Return the digest of the result."""
        assert self._base is not None
        values = self._buckets[bucket]
        values[:] = self._base[bucket]
        deltas = [bytearray(link[bucket]) for link in self._pull.delta_sizes]
        for delta in deltas:
            answer.read(memoryview(delta), None)
        try:
            for delta in deltas:
                apply_delta(values, memoryview(delta), self._runs[bucket])
        except WeightsError as error:
            return f"a delta that can't be applied ({error}); the bucket is requested as a whole"
        return digest_bytes(values.data)

    def _check_delta_sizes(self) -> None:
        for number, link in enumerate(self._pull.delta_sizes):
            is_valid = len(link) == len(self._buckets) and all(
                (type(size) is int and -1 <= size < len(bucket)) or size == -1
                for size, bucket in zip(link, self._buckets, strict=False)
            )
            if not is_valid:
                raise WeightsError(
                    f"link {number} of the chain of deltas: expected {len(self._buckets)} sizes, each smaller than its "
                    f"bucket, got {len(link)} sizes, some of them too large; {SAME_VERSION}"
                )


class _Answer:
    """The stream server's answer to one request. Items are read one by one, and decrypted if there is a cipher.

    Each piece must arrive within ``limit_s``. ``on_bytes`` is called with the size of each piece.
    """

    def __init__(
        self,
        connection: socket.socket,
        cipher: RecordCipher | None,
        limit_s: float,
        on_bytes: Callable[[int], None],
    ) -> None:
        self.num_bytes = 0
        self.verify_s = 0.0
        self._connection = connection
        self._cipher = cipher
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._on_bytes = on_bytes
        # Only for encrypted records: clearing it takes a millisecond.
        self._encrypted = memoryview(b"" if cipher is None else bytearray(RECORD_BYTES + TAG_BYTES))

    def read(
        self, into: memoryview, hasher: xxhash.xxh3_128 | None, on_piece: Callable[[int], None] | None = None
    ) -> None:
        """Read the next item into ``into``, whose length must be that of the item. Update ``hasher`` with the bytes if
        given. Call ``on_piece`` with the size of each piece that is in its place.

        Raises:
            CorruptWeightsError: a record was changed on its way.
            WeightsError: a piece took longer than the deadline allowed the whole.
            OSError: the connection broke, or nothing arrived for too long.
        """
        size = RECORD_BYTES if self._cipher is not None else _PIECE_BYTES
        for start in range(0, len(into), size):
            piece = into[start : start + size]
            if self._cipher is None:
                self._receive(piece)
            else:
                encrypted = self._encrypted[: len(piece) + TAG_BYTES]
                self._receive(encrypted)
                self._cipher.decrypt(encrypted, piece)
            if hasher is not None:
                begin = time.perf_counter()
                hasher.update(piece)
                self.verify_s += time.perf_counter() - begin
            if on_piece is not None:
                on_piece(len(piece))

    def _receive(self, into: memoryview) -> None:
        try:
            receive_into(self._connection, into)
        except StreamEndedError as error:
            raise ConnectionError(
                f"the learner's stream server closed the connection, because the pull was too slow or the server was "
                f"restarted: {error}"
            ) from None
        self.num_bytes += len(into)
        self._on_bytes(len(into))
        now = time.monotonic()
        if now > self._deadline:
            raise WeightsError(
                f"{len(into)} bytes of weights were not received within weights.deadline_s; raise it, or check the "
                f"network"
            )
        self._deadline = now + self._limit_s
