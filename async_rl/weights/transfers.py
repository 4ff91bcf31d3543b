"""The generator's bulk side: one thread that receives one version at a time, by whichever inlet it is told to use.

The receiver's control thread submits orders; what came of them is handed back by ``reply``, as the message that the
publisher is to hear. The buffers are written to here alone.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from async_rl.errors import CorruptWeightsError, WireError
from async_rl.weights import control
from async_rl.weights.background import Wake
from async_rl.weights.buffers import Buffers
from async_rl.weights.collective.receiver import CollectiveInlet, CollectiveOrder
from async_rl.weights.manifest import Manifest, manifest_from_fields
from async_rl.weights.tcp.receiver import StreamInlet, StreamOrder
from async_rl.weights.transport import Inlet

Reply = Callable[[control.MemberMessage], None]
Lacks = Callable[[int, Manifest, Reply], bool]
"""Whether the version of this attempt is to be received; if not, the publisher is told why."""


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    """Cumulative. ``corrupt`` transfers brought bytes that did not match their digests; they count as failed too.

    ``corrupt_buckets`` came again by themselves. ``wire_bytes`` is what was transferred for ``received_bytes``.
    """

    received: int = 0
    failed: int = 0
    corrupt: int = 0
    corrupt_buckets: int = 0
    receive_s: float = 0.0
    received_bytes: int = 0
    wire_bytes: int = 0


class Transfers:
    """Receives into ``buffers``; ``arrived`` is called in the transfer thread for every version that is whole.

    ``lacks`` is asked there about what comes without having been ordered here.
    """

    def __init__(self, buffers: Buffers, arrived: Callable[[], None], lacks: Lacks, device: str | None) -> None:
        self._buffers = buffers
        self._arrived = arrived
        self._lacks = lacks
        self._collective = CollectiveInlet(device)
        self._stream = StreamInlet()
        self._said: tuple[control.Ack, Reply] | None = None
        self._last_attempt = 0
        self._jobs: deque[Callable[[], None] | None] = deque()
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name="weights-transfer", daemon=True)
        self._thread.start()
        self.stats = ReceiverStats()
        self.error: str | None = None

    def prepare(self, manifest: Manifest, attempt: int, reply: Reply) -> None:
        """Make room for a version that will come by the collective."""
        self._submit(lambda: self._prepare(manifest, attempt, reply))

    def collect(self, order: CollectiveOrder, manifest: Manifest, reply: Reply) -> None:
        """Take part in the collective."""
        go = order.go
        deadline = time.monotonic() + go.deadline_s
        self._submit(lambda: self._receive(self._collective, order, manifest, go.attempt, deadline, reply))

    def pull(self, order: StreamOrder, manifest: Manifest, reply: Reply) -> None:
        """Get it from the stream."""
        fetch = order.fetch
        deadline = time.monotonic() + fetch.deadline_s
        self._submit(lambda: self._receive(self._stream, order, manifest, fetch.attempt, deadline, reply))

    def disconnect(self) -> None:
        """The communicator was of an epoch that is over (numbers may come again); nothing more comes by itself."""
        self._submit(self._forget)

    def close(self, timeout_s: float) -> None:
        """Let go of all connections after the jobs that are left, and end; that is waited for so long."""
        self._submit(self._close)
        self._submit(None)
        self._thread.join(timeout_s)

    def _submit(self, job: Callable[[], None] | None) -> None:
        self._jobs.append(job)
        self._wake.set()

    # The transfer thread. Jobs hand on what came of them and raise nothing.

    def _run(self) -> None:
        while True:
            self._wait()
            self._wake.clear()
            while self._jobs:
                job = self._jobs.popleft()
                if job is None:
                    return
                job()

    def _wait(self) -> None:
        """Until there is a job, or something came to where this side stands."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while not self._jobs:
            standing = self._stream.standing()
            if standing is None:
                poller.poll()
                return
            connection, until = standing
            remaining_s = until - time.monotonic()
            if remaining_s <= 0:
                self._stream.close()
                continue
            poller.register(connection, select.POLLIN)
            ready = dict(poller.poll(1000 * remaining_s))
            poller.unregister(connection)
            if connection.fileno() in ready:
                self._take_pushed()
            elif ready:
                return

    def _take_pushed(self) -> None:
        assert self._said is not None, "standing without having said something"
        said, reply = self._said
        try:
            received = self._stream.receive_message()
            manifest = None if received is None else manifest_from_fields(received[1].manifest)
        except (OSError, WireError) as error:
            received = manifest = None
            self.error = f"what the learner sent without being asked could not be read: {error}"
        if received is None or manifest is None:
            # The line may have ended before what was said was heard.
            self._stream.close()
            reply(said)
            return
        host, message = received
        is_pull = isinstance(message, control.Fetch)
        inlet: Inlet[Any] = self._stream if is_pull else self._collective
        if not self._lacks(message.attempt, manifest, reply):
            # What is behind the head is not wanted; or the others in the collective must not wait for this rank.
            inlet.close()
            return
        order = StreamOrder(message, host, is_pushed=True) if is_pull else CollectiveOrder(message, host)
        deadline = time.monotonic() + message.deadline_s
        self._receive(inlet, order, manifest, message.attempt, deadline, reply)

    def _prepare(self, manifest: Manifest, attempt: int, reply: Reply) -> None:
        try:
            self._buffers.reserve(manifest)
        except RuntimeError as error:
            self._failed(manifest, attempt, _no_memory(manifest, error), reply)
            return
        reply(control.Ready(attempt))

    def _receive(
        self, inlet: Inlet[Any], order: Any, manifest: Manifest, attempt: int, deadline: float, reply: Reply
    ) -> None:
        if attempt == self._last_attempt:
            return  # said twice, where the publisher could not know that it was heard
        self._last_attempt = attempt
        start = time.monotonic()
        try:
            buffer = self._buffers.reserve(manifest)
            filled = inlet.fill(order, manifest, buffer, self._buffers, deadline=deadline)
        except Exception as error:
            # Whatever it was, the publisher must know, and a communicator is of no use any more.
            is_corrupt = isinstance(error, CorruptWeightsError)
            if not is_corrupt:
                inlet.close()
            self._failed(manifest, attempt, str(error) or repr(error), reply, is_corrupt=is_corrupt)
            return
        elapsed_s = time.monotonic() - start
        staged = self._buffers.commit(buffer, manifest, elapsed_s)
        ack = control.Ack(attempt, staged.version, staged.digest, filled.wire_bytes, filled.num_corrupt)
        self._said = ack, reply
        if not self._stream.stand(order.host, order.message, ack):
            reply(ack)
        self.error = None
        before = self.stats
        self.stats = replace(
            before,
            received=before.received + 1,
            corrupt_buckets=before.corrupt_buckets + filled.num_corrupt,
            receive_s=before.receive_s + elapsed_s,
            received_bytes=before.received_bytes + manifest.size_bytes,
            wire_bytes=before.wire_bytes + filled.wire_bytes,
        )
        self._arrived()

    def _failed(self, manifest: Manifest, attempt: int, reason: str, reply: Reply, *, is_corrupt: bool = False) -> None:
        self.stats = replace(self.stats, failed=self.stats.failed + 1, corrupt=self.stats.corrupt + is_corrupt)
        self.error = f"version {manifest.version} did not arrive: {reason}"
        reply(control.Failed(attempt, reason, is_corrupt))

    def _forget(self) -> None:
        """Attempts are numbered anew."""
        self._last_attempt = 0
        self._close()

    def _close(self) -> None:
        self._collective.close()
        self._stream.close()


def _no_memory(manifest: Manifest, error: Exception) -> str:
    return f"no host memory for {manifest.size_bytes} bytes of weights: {error}"
