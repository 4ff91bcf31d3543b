"""The generator's side of ``tcp``: pulls the buckets of a version, or the deltas to it, from the stream server.

Bytes go from the socket straight to where they stay, and are digested while they are warm. A bucket that does not
match its digest is asked for again, whole; the rest of what came stays.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import xxhash

from async_rl.errors import CorruptWeightsError, WeightsError
from async_rl.net.framing import StreamEndedError, read_exactly, receive_into
from async_rl.weights import control
from async_rl.weights.buffers import Buffer, Buffers
from async_rl.weights.manifest import Manifest, digest_bytes
from async_rl.weights.tcp.delta import Runs, apply_delta, element_runs
from async_rl.weights.tcp.protocol import (
    NONCE_BYTES,
    RECORD_BYTES,
    TAG_BYTES,
    Request,
    Seal,
    make_request,
)
from async_rl.weights.transport import Filled, bucket_received

MAX_ROUNDS = 4
"""One for all buckets, and so many less one for those that came corrupt."""
_STALL_S = 10.0
_KEEP_S = 20.0
"""A connection without use for longer is not trusted: the server ends it soon, and whatever lies between may have."""
_PIECE_BYTES = 4 << 20
"""Received and digested at a time. Smaller reads cost more, each for itself; larger ones leave the cache."""


@dataclass(frozen=True, slots=True)
class StreamOrder:
    """``host`` is where the server is reached."""

    fetch: control.Fetch
    host: str


class StreamInlet:
    """See ``transport.Inlet``. One connection serves pull after pull."""

    def __init__(self) -> None:
        self._line = _Line()

    def fill(
        self, order: StreamOrder, manifest: Manifest, buffer: Buffer, buffers: Buffers, *, deadline: float
    ) -> Filled:
        # None, too, where its buffer is the one that is now needed for what comes: every bucket then comes whole.
        base = buffers.find(order.fetch.base) if order.fetch.base else None
        return _Pull(order, manifest, buffer, base, self._line, deadline).run()

    def close(self) -> None:
        self._line.close()


class _Line:
    """The connection to the stream server, kept for the next request: a fresh one takes milliseconds, megabytes of
    weights, until the kernel gives it large windows.
    """

    def __init__(self) -> None:
        self._kept: tuple[tuple[str, int], socket.socket, float] | None = None

    @contextmanager
    def lend(self, host: str, port: int, deadline: float, request: Request) -> Iterator[socket.socket]:
        """The kept connection, or a fresh one, after ``request`` was sent.

        It is kept again if nothing is raised: its answer was read to the end.

        Raises:
            WeightsError: the deadline has passed. OSError: the server can't be reached.
        """
        connection = self._take((host, port)) or _connect(host, port, deadline)
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
    """Of one on which nothing is awaited: whatever can be read says that it is of no use any more."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    remaining_s = min(_STALL_S, deadline - time.monotonic())
    if remaining_s <= 0:
        raise WeightsError("the deadline of this version has passed (weights.deadline_s)")
    connection = socket.create_connection((host, port), timeout=remaining_s)
    # Blocking, with the kernel's clock: Python's own would poll before every read.
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_STALL_S), 0))
    return connection


class _Pull:
    """One version on its way into ``buckets``."""

    def __init__(
        self, order: StreamOrder, manifest: Manifest, buffer: Buffer, base: Sequence | None, line: _Line,
        deadline: float,
    ) -> None:  # fmt: skip
        self._fetch, self._host, self._manifest, self._deadline = order.fetch, order.host, manifest, deadline
        self._line = line
        self._buckets = [np.asarray(bucket.numpy()) for bucket in buffer.buckets]
        self._base = None if base is None else [np.asarray(bucket.numpy()) for bucket in base]
        self._runs: list[Runs] = []
        if order.fetch.delta_sizes:
            self._runs += element_runs(manifest.tensors, manifest.bucket_sizes)
        self._wire_bytes = 0
        self._num_corrupt = 0
        self._check_sizes()

    def run(self) -> Filled:
        todo = list(range(len(self._buckets)))
        trouble = ""
        for number in range(MAX_ROUNDS):
            by_delta = {b for b in todo if number == 0 and self._is_smaller_by_delta(b)}
            try:
                todo, trouble = self._round(todo, by_delta)
            except (OSError, struct.error) as error:
                raise WeightsError(f"the stream from {self._host}:{self._fetch.port} broke: {error}") from error
            if not todo:
                return Filled(self._wire_bytes, self._num_corrupt)
            self._num_corrupt += len(todo)
        raise CorruptWeightsError(f"{trouble} ({len(todo)} buckets, tried {MAX_ROUNDS} times)")

    def _round(self, todo: Sequence[int], by_delta: set[int]) -> tuple[list[int], str]:
        """Ask for these buckets; which of them are still to come, and why."""
        items = [item for bucket in todo for item in self._items(bucket, bucket in by_delta)]
        request = make_request(self._fetch.token, items)
        bad: list[int] = []
        remaining, trouble = deque(todo), ""
        try:
            with self._ask(request) as source:
                while remaining:
                    bucket = remaining[0]
                    digest = self._by_delta(source, bucket) if bucket in by_delta else self._whole(source, bucket)
                    if digest != self._manifest.bucket_digests[bucket]:
                        bad.append(bucket)
                        trouble = f"bucket {bucket}: expected {self._manifest.bucket_digests[bucket]}, got {digest}"
                    remaining.popleft()
                    bucket_received()
        except CorruptWeightsError as error:
            # A broken seal: what comes after it on this connection proves nothing.
            return [*bad, *remaining], str(error)
        return bad, f"digest mismatch in {trouble}"

    @contextmanager
    def _ask(self, request: Request) -> Iterator[_Source]:
        """The answer to ``request``, to be read to its end."""
        with self._line.lend(self._host, self._fetch.port, self._deadline, request) as connection:
            source = _Source(connection, self._deadline)
            if self._fetch.key:
                nonce = read_exactly(connection.recv, NONCE_BYTES)
                source.unseal(Seal(self._fetch.key, request, nonce))
            try:
                yield source
            finally:
                self._wire_bytes += source.num_bytes

    def _items(self, bucket: int, by_delta: bool) -> list[int]:
        count = len(self._buckets)
        if not by_delta:
            return [bucket]
        return [count + link * count + bucket for link in range(len(self._fetch.delta_sizes))]

    def _is_smaller_by_delta(self, bucket: int) -> bool:
        sizes = [link[bucket] for link in self._fetch.delta_sizes]
        return self._base is not None and min(sizes, default=0) >= 0 and sum(sizes) < len(self._buckets[bucket])

    def _whole(self, source: _Source, bucket: int) -> str:
        hasher = xxhash.xxh3_128()
        data = self._buckets[bucket].data
        source.read(data, hasher)
        return hasher.hexdigest()

    def _by_delta(self, source: _Source, bucket: int) -> str:
        assert self._base is not None
        values = self._buckets[bucket]
        values[:] = self._base[bucket]
        deltas = [bytearray(link[bucket]) for link in self._fetch.delta_sizes]
        for delta in deltas:
            source.read(memoryview(delta), None)
        try:
            for delta in deltas:
                apply_delta(values, memoryview(delta), self._runs[bucket])
        except WeightsError as error:
            return f"a delta that can't be applied ({error})"
        return digest_bytes(values.data)

    def _check_sizes(self) -> None:
        for link in self._fetch.delta_sizes:
            right = len(link) == len(self._buckets) and all(
                (type(size) is int and -1 <= size < len(bucket)) or size == -1
                for size, bucket in zip(link, self._buckets, strict=False)
            )
            if not right:
                raise WeightsError("expected one size below that of its bucket for each delta of a link")


class _Source:
    """The answer to one request: plain bytes, or sealed records."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.num_bytes = 0
        self._connection = connection
        self._deadline = deadline
        self._seal: Seal | None = None
        self._sealed = memoryview(b"")

    def unseal(self, seal: Seal) -> None:
        """From here on it is sealed."""
        self._seal = seal
        self._sealed = memoryview(bytearray(RECORD_BYTES + TAG_BYTES))

    def read(self, into: memoryview, hasher: xxhash.xxh3_128 | None) -> None:
        """The next item, ``len(into)`` bytes.

        Raises:
            CorruptWeightsError: a seal is broken.
            WeightsError: the deadline passed.
            OSError: the connection broke, or nothing moved for long.
        """
        size = RECORD_BYTES if self._seal is not None else _PIECE_BYTES
        for start in range(0, len(into), size):
            piece = into[start : start + size]
            if self._seal is None:
                self._receive(piece)
            else:
                sealed = self._sealed[: len(piece) + TAG_BYTES]
                self._receive(sealed)
                self._seal.open(sealed, piece)
            if hasher is not None:
                hasher.update(piece)

    def _receive(self, into: memoryview) -> None:
        try:
            receive_into(self._connection, into)
        except StreamEndedError as error:
            raise ConnectionError(
                f"the server ended it (the pull was too slow, or the server was started again): {error}"
            ) from None
        self.num_bytes += len(into)
        if time.monotonic() > self._deadline:
            raise WeightsError("the deadline of this version has passed (weights.deadline_s)")
