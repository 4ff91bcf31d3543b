"""The worker processes of an inference engine as ranks of a collective. torch is imported in the workers only.

An engine such as vLLM computes in worker processes. With a collective each of them receives every version itself, into
memory of its own, so the generator is a member with several ranks. ``EngineRanks`` is the generator's side. For the
transfer thread it is the receiver of a collective, which passes each order on to all workers. ``RankThread`` runs in a
worker and receives while the worker goes on decoding. In the engine's pause the worker takes over what was received.

Orders and reports go through pipes past the engine, whose own calls would wait for the decode step and then hold up the
next one. The pipes have no names; the workers run as the same user and open them through ``/proc``.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import asdict

from async_rl.errors import CorruptWeightsError, WeightsError
from async_rl.net.codec import decode_as
from async_rl.net.streams import pack_frame, read_frame, take_frame
from async_rl.net.wire import Limits, encode
from async_rl.weights.control import StartCollective, seconds_until
from async_rl.weights.manifest import Manifest, TensorSpec, manifest_from_fields
from async_rl.weights.receive_buffers import ReceiveBuffer, ReceiveBuffers
from async_rl.weights.transport import ReceiveOrder, ReceiveResult

if TYPE_CHECKING:
    from torch import Tensor

_LIMITS = Limits(max_bytes=64 << 20, max_arrays=0, max_depth=None)
_RESERVE_S = 60.0
_CLOSE_S = 30.0
_REPORT_BYTES = 3000
"""A pipe takes a write of less than 4096 bytes as a whole, so reports of workers never mix."""


class Reserve(msgspec.Struct, frozen=True):
    """Allocate memory for a version of ``manifest`` (``manifest_from_fields`` reads it)."""

    number: int
    manifest: Mapping[str, Any]


class Receive(msgspec.Struct, frozen=True):
    """Receive a version as rank ``start.rank``. ``host`` and ``local_host`` are as in ``ReceiveOrder``."""

    number: int
    start: StartCollective
    manifest: Mapping[str, Any]
    host: str
    local_host: str
    deadline_s: float


class Disconnect(msgspec.Struct, frozen=True):
    """Close the communicator."""

    number: int


_ORDERS: tuple[type[Reserve | Receive | Disconnect], ...] = (Reserve, Receive, Disconnect)


class Report(msgspec.Struct, frozen=True):
    """Worker ``worker`` has carried out order ``number``, or failed with ``error``. ``verify_s`` as in ``Ack``."""

    number: int
    worker: int
    error: str
    is_corrupt: bool
    verify_s: float


class HeldByEngine(Mapping[str, TensorSpec]):
    """A version that the engine's workers hold: its tensors' names, and what they are instead of their bytes.

    ``number`` is that of the order with which the workers received it.
    """

    def __init__(self, manifest: Manifest, number: int) -> None:
        self._specs = {spec.name: spec for spec in manifest.tensors}
        self.number = number

    def __getitem__(self, name: str) -> TensorSpec:
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


class EngineRanks:
    """The generator's side: the pipes to ``num_workers`` workers. Implements ``transport.TransportReceiver``."""

    def __init__(self, num_workers: int) -> None:
        # All ends stay open here, so a worker can open its end at any time.
        self._orders = [os.pipe2(os.O_CLOEXEC) for _ in range(num_workers)]
        self._reports = os.pipe2(os.O_CLOEXEC)
        self._received = bytearray()
        self._number = 0

    @property
    def num_ranks(self) -> int:
        return len(self._orders)

    @property
    def order_paths(self) -> list[str]:
        """The path at which each worker opens its pipe for orders."""
        return [f"/proc/{os.getpid()}/fd/{read_fd}" for read_fd, _ in self._orders]

    @property
    def report_path(self) -> str:
        """The path at which all workers open the pipe for reports."""
        return f"/proc/{os.getpid()}/fd/{self._reports[1]}"

    def reserve(self, manifest: Manifest) -> None:
        """Let every worker allocate memory for a version with this layout.

        Raises:
            WeightsError: a worker can't.
        """
        number = self._next()
        self._call(number, [Reserve(number, asdict(manifest))] * self.num_ranks, _RESERVE_S)

    def receive(
        self, order: ReceiveOrder[StartCollective], buffer: ReceiveBuffer, buffers: ReceiveBuffers
    ) -> ReceiveResult:
        """Let every worker receive and verify the version. Their ranks begin with ``order.message.rank``."""
        number, start, remaining_s = self._next(), order.message, seconds_until(order.deadline)
        fields = asdict(order.manifest)
        orders = [
            Receive(
                number, msgspec.structs.replace(start, rank=start.rank + worker), fields, order.host,
                order.local_host, remaining_s,
            )
            for worker in range(self.num_ranks)
        ]  # fmt: skip
        # The workers' own deadlines come first; the generator ends when a worker does not return (``is_stuck``).
        reports = self._call(number, orders, remaining_s + 4 * start.stall_s)
        buffer.tensors = HeldByEngine(order.manifest, number)
        verify_s = max(report.verify_s for report in reports)
        return ReceiveResult(order.manifest.size_bytes * self.num_ranks, verify_s=verify_s)

    def close(self) -> None:
        """Let every worker close its communicator."""
        if self._number:
            number = self._next()
            self._call(number, [Disconnect(number)] * self.num_ranks, _CLOSE_S)

    def end(self) -> None:
        """Close the pipes. That ends the workers' threads."""
        for pipe in (*self._orders, self._reports):
            for fd in pipe:
                os.close(fd)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _call(self, number: int, orders: Sequence[Reserve | Receive | Disconnect], timeout_s: float) -> list[Report]:
        """Send each worker its order, wait for all reports, and return them.

        Raises:
            CorruptWeightsError: a worker received bytes that do not match their digests.
            WeightsError: a worker failed, or did not report in time.
        """
        deadline = time.monotonic() + timeout_s
        for (_, write_fd), order in zip(self._orders, orders, strict=True):
            frame = memoryview(pack_frame(encode(type(order).__name__, order)))
            while frame:
                frame = frame[os.write(write_fd, frame) :]
        reports: dict[int, Report] = {}
        while len(reports) < self.num_ranks:
            if not select.select([self._reports[0]], [], [], seconds_until(deadline))[0]:
                missing = sorted(set(range(self.num_ranks)) - reports.keys())
                raise WeightsError(f"the engine's workers {missing} did not answer within {timeout_s:.0f} s")
            self._received += os.read(self._reports[0], 1 << 16)
            while (body := take_frame(self._received, max_bytes=_LIMITS.max_bytes)) is not None:
                report = decode_as(body, (Report,), _LIMITS)
                if report.number == number:
                    reports[report.worker] = report
        failed = [report for report in reports.values() if report.error]
        if failed:
            kind = CorruptWeightsError if any(report.is_corrupt for report in failed) else WeightsError
            raise kind("; ".join(f"engine worker {report.worker}: {report.error}" for report in failed))
        return list(reports.values())


class RankThread:
    """A worker's side: a thread that carries out orders, one after the other. It ends when the generator ends.

    Args:
        worker: number of the worker among the engine's.
        order_path: see ``EngineRanks.order_paths``.
        report_path: see ``EngineRanks.report_path``.
        device: the worker's CUDA device. None if it has none.
        memory: where versions are received, as in ``ReceiveBuffer``. None: host memory is allocated.
    """

    def __init__(
        self, worker: int, *, order_path: str, report_path: str, device: str | None, memory: Tensor | None = None
    ) -> None:
        from async_rl.weights.collective.receiver import CollectiveReceiver

        self._worker = worker
        self._report_fd = os.open(report_path, os.O_WRONLY)
        self._receiver = CollectiveReceiver(device)
        self._buffer = ReceiveBuffer([], memory=memory)
        self._holds = 0
        threading.Thread(target=self._serve, args=(order_path,), name="receive-weights", daemon=True).start()

    def tensors(self, number: int) -> Mapping[str, Tensor]:
        """Return the tensors of the version that order ``number`` brought, as views into the buffer.

        Raises:
            WeightsError: the buffer holds another version, or none.
        """
        if self._holds != number:
            raise WeightsError(
                f"expected the version of order {number} in engine worker {self._worker}, got that of order "
                f"{self._holds} (0: none); this is a bug in async-rl, please report it"
            )
        return self._buffer.tensors

    def _serve(self, order_path: str) -> None:
        with open(order_path, "rb") as orders:
            while (body := read_frame(orders.read, max_bytes=_LIMITS.max_bytes)) is not None:
                self._carry_out(decode_as(body, _ORDERS, _LIMITS))

    def _carry_out(self, order: Reserve | Receive | Disconnect) -> None:
        error, is_corrupt, verify_s = "", False, 0.0
        try:
            match order:
                case Reserve(_, fields):
                    if self._buffer.fit(manifest_from_fields(fields)):
                        self._holds = 0
                case Receive():
                    verify_s = self._receive(order)
                case Disconnect():
                    self._receiver.close()
        except Exception as caught:  # the boundary: the generator decides
            error, is_corrupt = str(caught) or repr(caught), isinstance(caught, CorruptWeightsError)
            self._receiver.close()
        short = error.encode("ascii", "replace").decode()[:_REPORT_BYTES]
        report = Report(order.number, self._worker, short, is_corrupt, verify_s)
        os.write(self._report_fd, pack_frame(encode("Report", report)))

    def _receive(self, order: Receive) -> float:
        """Receive and verify the version. Return the seconds that computing digests took."""
        manifest = manifest_from_fields(order.manifest)
        deadline = time.monotonic() + order.deadline_s
        self._holds = 0
        self._buffer.fit(manifest)
        received = ReceiveOrder(order.start, manifest, order.host, order.local_host, deadline)
        result = self._receiver.receive(received, self._buffer, ReceiveBuffers())
        self._holds = order.number
        return result.verify_s
