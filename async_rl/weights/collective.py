"""The transports ``nccl`` and ``gloo``: broadcast a version of the weights to several generators at once.

``CollectiveSender`` (at the learner) and ``CollectiveReceiver`` (at each generator) implement the protocols of
``weights.transport``. A ``Communicator`` connects them: rank 0 is the learner and broadcasts byte buckets, the other
ranks are generators. An epoch is the number of a communicator. Collectives authenticate nobody, so they are for
trusted networks only.

gloo (through host memory) and NCCL (through a device buffer of ``chunk_bytes``) share this code. torch's default
process group is never used. Every wait has a deadline. gloo can't be interrupted: a collective with a frozen peer ends
after ``stall_s``, a collective with a dead peer ends at once. The NCCL branch has never been run, because no machine
with two devices was available.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore

from async_rl.errors import CorruptWeightsError, WeightsError
from async_rl.net.address import interface_of, is_loopback
from async_rl.net.streams import listening_socket
from async_rl.process.fault_points import fault_point
from async_rl.weights.control import StartCollective, seconds_until
from async_rl.weights.manifest import Manifest, manifest_fields
from async_rl.weights.receive_worker import ReceiveBuffer, ReceiveBuffers
from async_rl.weights.transport import (
    CollectiveSettings,
    Delivery,
    JobThread,
    ReceiveOrder,
    ReceiveResult,
    Send,
)

_NCCL_POLL_S = 0.001
_NUM_CONCURRENT_CHUNKS = 2
"""Chunks in flight over gloo: the ranks agree on one chunk while the other is sent."""
# The process group's own watchdog would end the whole process; waits are bounded here instead.
_NCCL_GROUP_TIMEOUT = timedelta(days=1)


class CollectiveSender:
    """The learner's side of ``nccl`` and ``gloo``: rank 0 of every communicator. Implements
    ``transport.TransportSender``.
    """

    def __init__(self, settings: CollectiveSettings) -> None:
        self._settings = settings
        self._listener: socket.socket | None = None
        self._communicator: Communicator | None = None
        self._jobs = JobThread("weights-send")

    def deliver(self, delivery: Delivery, send: Send) -> None:
        """Tell each member to receive the version, and start a background thread's broadcast of it to all of them
        at once.
        """
        port = self._listen() if delivery.build else 0
        size = len(delivery.members) + 1
        manifest = manifest_fields(delivery.staged.manifest) if delivery.skips_prepare else {}
        remaining_s = seconds_until(delivery.deadline)
        for rank, member in enumerate(delivery.members, start=1):
            start = StartCollective(
                attempt=delivery.attempt,
                epoch=delivery.epoch,
                rank=rank,
                size=size,
                store_port=port,
                stall_s=self._settings.stall_s,
                deadline_s=remaining_s,
                chunk_bytes=self._settings.chunk_bytes,
                transport=self._settings.transport,
                manifest=manifest,
            )
            send(member.member_id, start)
        # Start sending last: members take longer to connect than the sending thread takes to start.
        listener, self._listener = self._listener, None
        self._jobs.submit(lambda: self._send(delivery, listener, size))

    def end(self, attempt: int, *, intact: bool) -> None:
        """Close the communicator, unless the attempt left it intact."""
        if not intact:
            self._jobs.submit(self._disconnect)

    def close(self, timeout_s: float) -> None:
        if self._listener is not None:
            self._listener.close()
        self._jobs.close(self._disconnect, timeout_s)

    def _listen(self) -> int:
        """Open a listening socket for a new rendezvous store, and return its port. The next send uses it to
        connect the ranks.
        """
        if self._listener is not None:
            self._listener.close()
        self._listener = listening_socket(self._settings.bind_host)
        return self._listener.getsockname()[1]

    # The sending thread.

    def _send(self, delivery: Delivery, listener: socket.socket | None, size: int) -> None:
        start = time.monotonic()
        error: Exception | None = None
        try:
            if listener is not None:
                self._connect(listener, size)
            assert self._communicator is not None, "a send without a communicator"
            for bucket in delivery.staged.buckets:
                self._communicator.broadcast(bucket, chunk_bytes=self._settings.chunk_bytes, deadline=delivery.deadline)
        except Exception as caught:
            # The publisher counts it. After any error the communicator can't be used again.
            error = caught
            self._disconnect()
        self._settings.on_sent(delivery, time.monotonic() - start, error)

    def _connect(self, listener: socket.socket, size: int) -> None:
        self._disconnect()
        self._communicator = Communicator.create(
            self._settings.transport,
            store_host=self._settings.local_host,
            store_port=listener.getsockname()[1],
            rank=0,
            size=size,
            stall_s=self._settings.stall_s,
            local_host=self._settings.local_host,
            listener=listener,
            device=self._settings.device,
        )

    def _disconnect(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()


class CollectiveReceiver:
    """The generator's side of ``nccl`` and ``gloo``. Implements ``transport.TransportReceiver``.

    ``device`` is this generator's CUDA device, which ``nccl`` needs.
    """

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._communicator: Communicator | None = None
        self._epoch = -1

    def receive(
        self, order: ReceiveOrder[StartCollective], buffer: ReceiveBuffer, buffers: ReceiveBuffers
    ) -> ReceiveResult:
        """Receive every bucket of the version from the learner, and verify the digests. Create the communicator
        if it is new.
        """
        start = order.message
        communicator = self._connect(order)
        digests: list[str] = []
        for bucket in buffer.buckets:
            hasher = xxhash.xxh3_128()
            communicator.broadcast(
                bucket,
                chunk_bytes=start.chunk_bytes,
                deadline=order.deadline,
                on_chunk=lambda chunk, hasher=hasher: hasher.update(chunk.numpy().data),
            )
            digests.append(hasher.hexdigest())
            fault_point("generator.receiving")
        # After the last bucket: a rank that leaves in between breaks the collective for the others.
        _check_digests(digests, order.manifest)
        return ReceiveResult(order.manifest.size_bytes)

    def close(self) -> None:
        communicator, self._communicator = self._communicator, None
        self._epoch = -1
        if communicator is not None:
            communicator.close()

    def _connect(self, order: ReceiveOrder[StartCollective]) -> Communicator:
        start = order.message
        if start.store_port:
            self.close()
            self._communicator = Communicator.create(
                start.transport,
                store_host=order.host,
                store_port=start.store_port,
                rank=start.rank,
                size=start.size,
                stall_s=start.stall_s,
                local_host=order.local_host,
                device=self._device,
            )
            self._epoch = start.epoch
        if self._communicator is None or self._epoch != start.epoch:
            raise WeightsError(
                f"expected the communicator of epoch {start.epoch}, got that of epoch {self._epoch}; the "
                f"learner offers the version again"
            )
        return self._communicator


def _check_digests(digests: Sequence[str], manifest: Manifest) -> None:
    wrong = [
        f"bucket {index}: expected {expected}, got {got}"
        for index, (got, expected) in enumerate(zip(digests, manifest.bucket_digests, strict=True))
        if got != expected
    ]
    if wrong:
        raise CorruptWeightsError(
            f"the received bytes do not match their digests: {'; '.join(wrong[:3])}; the learner offers the version "
            f"again; if this repeats, check the network and the memory of both machines"
        )


class Communicator:
    """A connection between the learner (rank 0) and some generators that carries broadcasts. One thread uses it
    at a time.
    """

    def __init__(self, process_group: Any, *, device: torch.device | None, stall_s: float) -> None:
        self._process_group: Any = process_group
        self._device = device
        self._stall_s = stall_s
        self._device_buffer: Tensor | None = None

    @classmethod
    def create(
        cls,
        backend: str,
        *,
        store_host: str,
        store_port: int,
        rank: int,
        size: int,
        stall_s: float,
        local_host: str,
        listener: socket.socket | None = None,
        device: str | None = None,
    ) -> Communicator:
        """Connect to the other ranks through a rendezvous store, and return the communicator of this rank.

        Args:
            backend: ``gloo`` or ``nccl``.
            store_host: the learner's host, where the store is.
            store_port: port of the store.
            rank: this process's rank.
            size: number of ranks.
            stall_s: how long connecting, and every later collective, may take.
            local_host: the address at which the other ranks reach this one. It is never derived from the host's name.
            listener: the socket at which rank 0 serves the store. None for the other ranks.
            device: the CUDA device, for NCCL.

        Raises:
            WeightsError: not all ranks connected in time.
        """
        timeout = timedelta(seconds=stall_s)
        fd = None if listener is None else listener.detach()
        try:
            store = TCPStore(
                store_host, store_port, None, fd is not None, timeout, wait_for_workers=False, master_listen_fd=fd
            )
            if backend == "gloo":
                return cls(_gloo(store, rank, size, timeout, local_host), device=None, stall_s=stall_s)
            if backend == "nccl":
                chosen = torch.device(device or "cuda")
                return cls(_nccl(store, rank, size, chosen, local_host), device=chosen, stall_s=stall_s)
        except RuntimeError as error:
            raise WeightsError(
                f"rank {rank} of {size} could not connect to the others at {store_host}:{store_port} within "
                f"{stall_s:.1f} s: {_first_line(error)}; check the network between them"
            ) from error
        raise WeightsError(
            f"expected transport 'gloo' or 'nccl', got {backend!r}; this is a bug in async-rl, please report it"
        )

    def broadcast(
        self, bucket: Tensor, *, chunk_bytes: int, deadline: float, on_chunk: Callable[[Tensor], None] | None = None
    ) -> None:
        """Copy rank 0's ``bucket`` (uint8 [N], host memory) into the ``bucket`` of every other rank.

        Args:
            chunk_bytes: largest number of bytes to send at once.
            deadline: when the broadcast must have ended, on the monotonic clock.
            on_chunk: called with each chunk after it has arrived, in their order. gloo sends the next chunk meanwhile.

        Raises:
            WeightsError: a peer died or stalled, or the deadline passed. The communicator can't be used again.
        """
        in_flight: deque[tuple[Any, Tensor]] = deque()
        try:
            for start in range(0, bucket.numel(), chunk_bytes):
                chunk = bucket[start : start + chunk_bytes]
                remaining_s = min(self._stall_s, deadline - time.monotonic())
                if remaining_s <= 0:
                    raise WeightsError(
                        "the broadcast of this version did not end within weights.deadline_s; raise it, or check the "
                        "network"
                    )
                if self._device is not None:
                    self._broadcast_by_device(chunk, remaining_s)
                    _report(on_chunk, chunk)
                    continue
                in_flight.append((self._broadcast_once(chunk, remaining_s), chunk))
                if len(in_flight) == _NUM_CONCURRENT_CHUNKS:
                    _finish_one(in_flight, on_chunk)
            while in_flight:
                _finish_one(in_flight, on_chunk)
        except RuntimeError as error:
            raise WeightsError(
                f"the broadcast of this version failed: {_first_line(error)}; the learner offers it again"
            ) from error

    def _broadcast_once(self, tensor: Tensor, timeout_s: float) -> Any:
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_s)
        return self._process_group.broadcast([tensor], options)

    def _broadcast_by_device(self, chunk: Tensor, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        if self._device_buffer is None or self._device_buffer.numel() < chunk.numel():
            self._device_buffer = torch.empty(chunk.numel(), dtype=torch.uint8, device=self._device)
        staged = self._device_buffer[: chunk.numel()]
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
            if self._process_group.rank() == 0:
                staged.copy_(chunk, non_blocking=True)
            work = self._broadcast_once(staged, timeout_s)
            while not work.is_completed():
                if time.monotonic() > until:
                    raise WeightsError(
                        f"the broadcast of this version failed: a peer did not answer for {timeout_s:.1f} s; the "
                        f"learner offers it again"
                    )
                time.sleep(_NCCL_POLL_S)
            if self._process_group.rank() != 0:
                chunk.copy_(staged)
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Close all connections, so that ranks that wait for this rank fail at once."""
        process_group, self._process_group = self._process_group, None
        if process_group is not None:
            process_group.abort()


def _finish_one(in_flight: deque[tuple[Any, Tensor]], on_chunk: Callable[[Tensor], None] | None) -> None:
    work, chunk = in_flight.popleft()
    work.wait()
    _report(on_chunk, chunk)


def _report(on_chunk: Callable[[Tensor], None] | None, chunk: Tensor) -> None:
    if on_chunk is not None:
        on_chunk(chunk)


def _gloo(store: TCPStore, rank: int, size: int, timeout: timedelta, local_host: str) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [ProcessGroupGloo.create_device(hostname=local_host)]
    options._timeout = timeout
    options._threads = _NUM_CONCURRENT_CHUNKS
    return ProcessGroupGloo(PrefixStore("weights", store), rank, size, options)


def _nccl(store: TCPStore, rank: int, size: int, device: torch.device, local_host: str) -> Any:
    from torch.distributed import ProcessGroupNCCL

    choose_nccl_interface(local_host)
    options = ProcessGroupNCCL.Options()
    options._timeout = _NCCL_GROUP_TIMEOUT
    # Read when a process group is created: if set, a generator's death would end the learner's process.
    key = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(key)
    os.environ[key] = "0"
    try:
        with torch.cuda.device(device):
            return ProcessGroupNCCL(PrefixStore("weights", store), rank, size, options)
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


def choose_nccl_interface(local_host: str) -> None:
    """Let NCCL use the network interface that has the address ``local_host``, unless the user has chosen one.

    NCCL would take the first interface that is up, which often leads elsewhere. It reads the variable once, when a
    process uses it for the first time. Over loopback all ranks are on this machine, so NCCL needs no interface.
    """
    if "NCCL_SOCKET_IFNAME" not in os.environ and not is_loopback(local_host):
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface_of(local_host)}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
