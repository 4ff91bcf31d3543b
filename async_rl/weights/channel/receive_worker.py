"""The generator's transfer thread. It receives one version of the weights at a time.

The receiver's control thread submits orders. Every order ends with one call of its ``reply``, whose argument is the
message for the publisher.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from async_rl.errors import CorruptWeightsError, WeightsError
from async_rl.net.wire import SAME_VERSION
from async_rl.weights import control
from async_rl.weights.channel.engine_ranks import EngineRanks
from async_rl.weights.channel.transports import TRANSPORTS, make_receiver
from async_rl.weights.collective.libraries import COLLECTIVES
from async_rl.weights.manifest import Manifest
from async_rl.weights.receive_buffers import ReceiveBuffers
from async_rl.weights.tcp.arrivals import Arrivals
from async_rl.weights.transport import ReceiveOrder, TransportReceiver

Reply = Callable[[control.MemberMessage], None]

_CLOSE_LIMIT_S = 10.0
_ACTIVATE_S = 5.0
"""How long a collective's other ranks may be kept waiting for the engine to activate the version before."""


class JobThread:
    """A daemon thread that runs functions one after the other. They must handle their own errors: one that raises ends
    it.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Add a function to those that the thread will run."""
        self._jobs.put(job)

    def close(self, last: Callable[[], None], timeout_s: float) -> None:
        """Run the functions that were submitted, then ``last``, and end the thread. Wait at most ``timeout_s`` for
        that.
        """
        self._jobs.put(last)
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class ReceiveWorker:
    """The generator's transfer thread. It receives versions of the weights into ``buffers``, one after the other.

    Args:
        buffers: the memory for versions.
        on_received: called in the transfer thread for every version that is complete.
        device: this generator's CUDA device. None if there is no CUDA device.
        engine: receives collectives in the engine's workers. None: they are received here.
        arrivals: what this generator can pass on to others.
    """

    def __init__(
        self,
        buffers: ReceiveBuffers,
        on_received: Callable[[], None],
        device: str | None,
        engine: EngineRanks | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        self._arrivals = arrivals
        self._buffers = buffers
        self._on_received = on_received
        self._device = device
        self._engine = engine
        self._receivers: dict[str, TransportReceiver[ReceiveOrder]] = {}
        self._jobs = JobThread("weights-transfer")
        self._due = float("inf")
        self.pulled_bytes = 0
        self.error: str | None = None

    def count_pulled(self, num_bytes: int) -> None:
        """Count bytes that have arrived. Only the transfer thread calls this."""
        self.pulled_bytes += num_bytes

    @property
    def is_stuck(self) -> bool:
        """Whether a call of a collective's library does not return. Only the end of the process ends such a call."""
        return time.monotonic() > self._due

    def prepare(self, manifest: Manifest, attempt: int, reply: Reply) -> None:
        """Order the transfer thread to allocate memory for the weights of ``manifest``, before a collective sends them.

        Return at once. The thread then calls ``reply`` with ``Ready``, or with ``Failed`` if it can't allocate them.
        """
        self._jobs.submit(lambda: self._prepare(manifest, attempt, reply))

    def receive(self, order: ReceiveOrder[control.StartCollective | control.Pull], reply: Reply) -> None:
        """Let the transfer thread receive the version of ``order``. ``reply`` gets ``Ack`` or ``Failed``."""
        self._jobs.submit(lambda: self._receive(order, reply))

    def disconnect(self) -> None:
        """Let the transfer thread close all its connections, because this generator is no longer a member.

        The existing communicator must not be used again: a restarted learner may use the same epoch number for another
        one.
        """
        self._jobs.submit(self._disconnect)

    def close(self, timeout_s: float) -> None:
        """Finish the orders that were submitted, close all connections and end the thread. Wait at most ``timeout_s``
        for that.
        """
        self._jobs.close(self._disconnect, timeout_s)

    # The transfer thread. Jobs report their result and raise nothing.

    def _prepare(self, manifest: Manifest, attempt: int, reply: Reply) -> None:
        try:
            if self._engine is None:
                self._buffers.reserve(manifest)
            else:
                self._engine.reserve(manifest)
        except (RuntimeError, WeightsError) as error:
            reason = f"can't allocate {manifest.size_bytes} bytes of memory for the weights: {error}"
            self._fail(manifest, attempt, reason, reply)
            return
        reply(control.Ready(attempt))

    def _receive(self, order: ReceiveOrder, reply: Reply) -> None:
        if isinstance(order.message, control.StartCollective):
            # The library's own deadlines end it before. Pulls end by the timeouts of their sockets.
            self._due = order.deadline + 2 * order.message.stall_s
        self._take(order, reply)
        self._due = float("inf")

    def _take(self, order: ReceiveOrder, reply: Reply) -> None:
        message, manifest = order.message, order.manifest
        start = time.monotonic()
        try:
            receiver = self._receiver(message.transport)
            is_here = receiver is not self._engine
            buffer = self._buffers.reserve(manifest) if is_here else self._buffers.reserve_engine(_ACTIVATE_S)
            result = receiver.receive(order, buffer, self._buffers)
        except Exception as error:
            # After any error the publisher must know, and a communicator can't be used again.
            self._buffers.abandon_engine()
            is_corrupt = isinstance(error, CorruptWeightsError)
            if not is_corrupt and message.transport in self._receivers:
                self._receivers[message.transport].close()
            self._fail(manifest, message.attempt, str(error) or repr(error), reply, is_corrupt=is_corrupt)
            return
        received = self._buffers.commit(buffer, manifest, time.monotonic() - start)
        ack = control.Ack(
            message.attempt, received.version, received.digest, result.wire_bytes, result.num_corrupt, result.verify_s,
            result.peer_bytes,
        )  # fmt: skip
        reply(ack)
        self.error = None
        self._on_received()

    def _receiver(self, transport: str) -> TransportReceiver[ReceiveOrder]:
        if transport not in TRANSPORTS:
            raise WeightsError(
                f"expected a transport of {list(TRANSPORTS)} from the learner, got {transport!r}; {SAME_VERSION}"
            )
        if transport not in self._receivers:
            in_engine = self._engine if transport in COLLECTIVES else None
            self._receivers[transport] = in_engine or make_receiver(transport, self._device, self._arrivals)
        return self._receivers[transport]

    def _fail(self, manifest: Manifest, attempt: int, reason: str, reply: Reply, *, is_corrupt: bool = False) -> None:
        self.error = f"version {manifest.version} was not received: {reason}"
        reply(control.Failed(attempt, reason, is_corrupt))

    def _disconnect(self) -> None:
        self._due = time.monotonic() + _CLOSE_LIMIT_S
        for receiver in self._receivers.values():
            receiver.close()
        self._due = float("inf")
