"""One rank of a communicator: rank 0 (the learner) broadcasts byte buckets to the other ranks (generators).

gloo (host memory) and NCCL (through one device buffer of ``chunk_bytes``) share this code. It never touches torch's
default process group. Collectives authenticate nobody, so they are for trusted networks only.

Every wait has a deadline. gloo can't be interrupted: a collective with a frozen peer ends after ``stall_s``, one with a
dead peer at once. The NCCL branch has never been run: no machine with two devices was available.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore

from async_rl.errors import WeightsError

_NCCL_POLL_S = 0.001
_NUM_CONCURRENT_CHUNKS = 2
"""Chunks in flight over gloo: the ranks agree on one while the other travels."""
# The process group's own watchdog would end the whole process; waits are bounded here instead.
_NCCL_GROUP_TIMEOUT = timedelta(days=1)


class Communicator:
    """One rank. One thread uses it at a time."""

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
        """Connect to the other ranks through the rendezvous store, which rank 0 serves from ``listener``.

        Args:
            backend: ``gloo`` or ``nccl``.
            local_host: the address at which the other ranks reach this one; never guessed from the host's name.
            stall_s: bound on connecting, and on every later collective.
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
                return cls(_nccl(store, rank, size, chosen), device=chosen, stall_s=stall_s)
        except RuntimeError as error:
            raise WeightsError(
                f"rank {rank} of {size} could not connect to the others at {store_host}:{store_port} within "
                f"{stall_s:.1f} s: {_first_line(error)}"
            ) from error
        raise WeightsError(f"expected transport 'gloo' or 'nccl', got {backend!r}")

    def broadcast(
        self, bucket: Tensor, *, chunk_bytes: int, deadline: float, on_chunk: Callable[[Tensor], None] | None = None
    ) -> None:
        """Copy rank 0's bytes into every rank's ``bucket``: uint8 [N], host memory.

        Args:
            deadline: on the monotonic clock.
            on_chunk: called with each chunk when it has arrived, in order; over gloo the next one travels meanwhile.

        Raises:
            WeightsError: a peer died or stalled, or the deadline passed; the communicator can't be used again.
        """
        in_flight: deque[tuple[Any, Tensor]] = deque()
        try:
            for start in range(0, bucket.numel(), chunk_bytes):
                chunk = bucket[start : start + chunk_bytes]
                remaining_s = min(self._stall_s, deadline - time.monotonic())
                if remaining_s <= 0:
                    raise WeightsError("broadcast: the deadline of this version has passed (weights.deadline_s)")
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
            raise WeightsError(f"broadcast failed: {_first_line(error)}") from error

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
                    raise WeightsError(f"broadcast: a peer stalled for {timeout_s:.1f} s")
                time.sleep(_NCCL_POLL_S)
            if self._process_group.rank() != 0:
                chunk.copy_(staged)
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Close all connections, so that ranks that wait for this one fail at once."""
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


def _nccl(store: TCPStore, rank: int, size: int, device: torch.device) -> Any:
    from torch.distributed import ProcessGroupNCCL

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


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
