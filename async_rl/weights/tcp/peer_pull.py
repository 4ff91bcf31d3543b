"""Fetches buckets of a version from another generator, until they are complete or that generator has failed."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from async_rl.errors import AsyncRLError, CorruptWeightsError, WireError
from async_rl.net.streams import StreamEndedError, read_exactly
from async_rl.process.fault_points import fault_point
from async_rl.weights.manifest import Manifest
from async_rl.weights.peer_messages import PeerOffer
from async_rl.weights.receive_buffers import ReceiveBuffer
from async_rl.weights.tcp.arrivals import Arrival, Arrivals
from async_rl.weights.tcp.peer_protocol import END, GONE, RECORD, RESTART, SILENT_S, WAIT, WINDOW_BYTES, window_s
from async_rl.weights.tcp.protocol import NONCE_BYTES, RECORD_BYTES, TAG_BYTES, RecordCipher, make_request

_CONNECT_S = 3.0
_MAX_RESTARTS = 16


@dataclass(slots=True)
class PeerResult:
    """What came from a peer.

    Attributes:
        wire_bytes: bytes that were transferred.
        verify_s: seconds of it that computing digests took.
        failure: why some buckets are still missing. Empty: none is.
        is_faulty: whether the peer is to blame for that.
    """

    wire_bytes: int = 0
    verify_s: float = 0.0
    failure: str = ""
    is_faulty: bool = False


class PeerPull:
    """Fetches buckets from the generator of ``offer`` into ``buffer``, and verifies them.

    Args:
        offer: the learner's message.
        manifest: that of the version.
        buffer: the memory for the version. Its ``digests`` say afterwards which buckets are complete.
        arrivals: this generator's own buckets, which it passes on.
        on_bytes: called with the number of bytes that have arrived since the last call.
    """

    def __init__(
        self,
        offer: PeerOffer,
        manifest: Manifest,
        buffer: ReceiveBuffer,
        arrivals: Arrivals,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._offer, self._manifest, self._buffer, self._arrivals = offer, manifest, buffer, arrivals
        self._on_bytes = on_bytes
        self._cipher: RecordCipher | None = None
        self._encrypted = memoryview(b"")
        self._window_s = window_s(offer.depth)
        self._window_end, self._window_bytes = 0.0, 0
        self._num_restarts = 0
        self.result = PeerResult()

    def run(self, buckets: Sequence[int]) -> PeerResult:
        """Fetch these buckets. Raise nothing: what the peer did wrong is in the result."""
        offer, where = self._offer, f"generator {self._offer.generator_id} at {self._offer.host}:{self._offer.port}"
        try:
            with socket.create_connection((offer.host, offer.port), _CONNECT_S) as connection:
                connection.settimeout(SILENT_S)
                request = make_request(offer.token, buckets)
                connection.sendall(request.encode())
                if offer.key:
                    self._cipher = RecordCipher(offer.key, request, read_exactly(connection.recv, NONCE_BYTES))
                    self._encrypted = memoryview(bytearray(RECORD_BYTES + TAG_BYTES))
                self._begin_window()
                for bucket in buckets:
                    if not self._fetch(connection, bucket):
                        self.result.failure = f"{where} does not have version {self._manifest.version} any more"
                        return self.result
                    fault_point("generator.receiving")  # a bucket of a version has arrived, the version is not verified
        except TimeoutError as error:
            self.result.failure, self.result.is_faulty = f"{where} was too slow: {error}", True
        except (OSError, AsyncRLError) as error:
            self.result.failure, self.result.is_faulty = f"{where}: {error}", True
        return self.result

    def _fetch(self, connection: socket.socket, bucket: int) -> bool:
        """Fetch one bucket. Return False if the peer does not have it any more.

        Raises:
            CorruptWeightsError: the peer confirmed wrong bytes.
            WireError: it sent something else.
            OSError: the connection broke, or the peer is too slow.
        """
        into = np.asarray(self._buffer.buckets[bucket].numpy()).data
        expected = self._manifest.bucket_digests[bucket]
        while True:
            self._buffer.digests[bucket] = ""
            with self._arrivals.receiving((id(self._buffer), bucket), expected, into) as arrival:
                hasher = xxhash.xxh3_128()
                status = self._read_records(connection, arrival, hasher)
                if status == END:
                    digest = hasher.hexdigest()
                    arrival.end(is_valid=digest == expected)
                    if digest != expected:
                        raise CorruptWeightsError(
                            f"sent wrong bytes: bucket {bucket} of version {self._manifest.version}: expected digest "
                            f"{expected}, got {digest}"
                        )
                    self._buffer.digests[bucket] = digest
                    return True
            self._num_restarts += 1
            if status == GONE or self._num_restarts > _MAX_RESTARTS:
                return False

    def _read_records(self, connection: socket.socket, arrival: Arrival, hasher: xxhash.xxh3_128) -> bytes:
        """Read records into the memory of ``arrival``. Return the status that follows the last one."""
        start, into = 0, arrival.memory
        while True:
            status = read_exactly(connection.recv, 1)
            if status == WAIT:
                self._check_window()
                continue
            if status in (RESTART, GONE) or (status == END and start == len(into)):
                return status
            record = into[start : start + RECORD_BYTES]
            if status != RECORD or not record:
                raise WireError(f"unexpected status {status!r} after {start} of {len(into)} bytes of a bucket")
            self._read_record(connection, record)
            begin = time.perf_counter()
            hasher.update(record)
            self.result.verify_s += time.perf_counter() - begin
            start += len(record)
            arrival.advance(len(record))

    def _read_record(self, connection: socket.socket, into: memoryview) -> None:
        raw = into if self._cipher is None else self._encrypted[: len(into) + TAG_BYTES]
        filled = 0
        while filled < len(raw):
            count = connection.recv_into(raw[filled:])
            if count == 0:
                raise StreamEndedError("it closed the connection")
            filled += count
            self.result.wire_bytes += count
            self._window_bytes += count
            self._on_bytes(count)
            self._check_window()
        if self._cipher is not None:
            self._cipher.decrypt(raw, into)

    def _begin_window(self) -> None:
        self._window_end, self._window_bytes = time.monotonic() + self._window_s, 0

    def _check_window(self) -> None:
        if time.monotonic() < self._window_end:
            return
        if self._window_bytes < WINDOW_BYTES:
            raise TimeoutError(f"{self._window_bytes} bytes in {self._window_s:g} s")
        self._begin_window()
