"""A communicator of one epoch: rank 0 (the learner) broadcasts byte buckets to the other ranks (generators).

One code path for gloo (host memory) and NCCL (through one device buffer of ``chunk_bytes``). It stands beside
torch's default process group and never touches it. Unauthenticated by nature: for trusted networks only.

Every wait has a deadline. gloo can't be interrupted: a collective with a frozen peer ends after ``stall_s``, one with
a dead peer at once. The NCCL branch has never been run: no machine with two devices was at hand.
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
_NUM_UNDER_WAY = 2
"""Chunks that travel at once over gloo: one is agreed upon while the other moves."""
# The group's own watchdog would end the whole process; waits are bounded here instead.
_NCCL_GROUP_TIMEOUT = timedelta(days=1)


class CollectiveGroup:
    """One rank of an epoch's communicator. One thread uses it at a time."""

    def __init__(self, group: Any, *, device: torch.device | None, stall_s: float) -> None:
        self._group: Any = group
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
    ) -> CollectiveGroup:
        """Meet the other ranks at the store. Rank 0 serves it, from ``listener``.

        Args:
            local_host: the address at which this rank's peers reach it; never guessed from the host's name.
            stall_s: bound on the meeting and on every later collective.
            device: for NCCL, the CUDA device.

        Raises:
            WeightsError: not all ranks came in time.
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
                f"rank {rank} of {size} could not meet the others at {store_host}:{store_port} within {stall_s:.1f} s: "
                f"{_first_line(error)}"
            ) from error
        raise WeightsError(f"expected transport 'gloo' or 'nccl', got {backend!r}")

    def broadcast(
        self, bucket: Tensor, *, chunk_bytes: int, deadline: float, done: Callable[[Tensor], None] | None = None
    ) -> None:
        """Rank 0's bytes into everyone's ``bucket``: uint8 [N], host memory. ``deadline`` is on the monotonic clock.

        ``done`` gets the chunks in their order, each when it is there; over gloo the next one travels meanwhile.

        Raises:
            WeightsError: a peer died or stalled, or the deadline passed; the group is of no use any more.
        """
        under_way: deque[tuple[Any, Tensor]] = deque()
        try:
            for start in range(0, bucket.numel(), chunk_bytes):
                chunk = bucket[start : start + chunk_bytes]
                remaining_s = min(self._stall_s, deadline - time.monotonic())
                if remaining_s <= 0:
                    raise WeightsError("broadcast: the deadline of this version has passed (weights.deadline_s)")
                if self._device is not None:
                    self._broadcast_by_device(chunk, remaining_s)
                    _say_done(done, chunk)
                    continue
                under_way.append((self._broadcast_once(chunk, remaining_s), chunk))
                if len(under_way) == _NUM_UNDER_WAY:
                    _finish_one(under_way, done)
            while under_way:
                _finish_one(under_way, done)
        except RuntimeError as error:
            raise WeightsError(f"broadcast failed: {_first_line(error)}") from error

    def _broadcast_once(self, tensor: Tensor, timeout_s: float) -> Any:
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_s)
        return self._group.broadcast([tensor], options)

    def _broadcast_by_device(self, chunk: Tensor, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        if self._device_buffer is None or self._device_buffer.numel() < chunk.numel():
            self._device_buffer = torch.empty(chunk.numel(), dtype=torch.uint8, device=self._device)
        staged = self._device_buffer[: chunk.numel()]
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
            if self._group.rank() == 0:
                staged.copy_(chunk, non_blocking=True)
            work = self._broadcast_once(staged, timeout_s)
            while not work.is_completed():
                if time.monotonic() > until:
                    raise WeightsError(f"broadcast: a peer stalled for {timeout_s:.1f} s")
                time.sleep(_NCCL_POLL_S)
            if self._group.rank() != 0:
                chunk.copy_(staged)
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Cut all connections, so that peers that still wait for this rank fail at once."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def _finish_one(under_way: deque[tuple[Any, Tensor]], done: Callable[[Tensor], None] | None) -> None:
    work, chunk = under_way.popleft()
    work.wait()
    _say_done(done, chunk)


def _say_done(done: Callable[[Tensor], None] | None, chunk: Tensor) -> None:
    if done is not None:
        done(chunk)


def _gloo(store: TCPStore, rank: int, size: int, timeout: timedelta, local_host: str) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [ProcessGroupGloo.create_device(hostname=local_host)]
    options._timeout = timeout
    options._threads = _NUM_UNDER_WAY
    return ProcessGroupGloo(PrefixStore("weights", store), rank, size, options)


def _nccl(store: TCPStore, rank: int, size: int, device: torch.device) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = _NCCL_GROUP_TIMEOUT
    # Read when a group is made: with it, a generator's death would take the learner's process down.
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
