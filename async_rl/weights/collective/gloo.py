"""gloo as a ``Library``: broadcasts through host memory, over sockets.

gloo can't be interrupted. A collective with a frozen peer ends after its timeout, one with a dead peer at once. torch's
default process group is never used.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from async_rl.net.streams import listening_socket
from async_rl.weights.collective.library import NUM_CONCURRENT_CHUNKS, Endpoint


class GlooLibrary:
    """Implements ``library.Library``. The unique id is the port of rank 0's rendezvous store."""

    device = torch.device("cpu")

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._listener: socket.socket | None = None
        self._process_group: Any = None
        self._newest: Any = None

    def unique_id(self) -> bytes:
        self._listener = listening_socket(self._endpoint.local_host)
        return str(self._listener.getsockname()[1]).encode()

    def init(self, unique_id: bytes, rank: int, size: int, timeout_s: float) -> None:
        """Connect to all other ranks, and return when that has happened or ``timeout_s`` have passed."""
        timeout = timedelta(seconds=timeout_s)
        listener, self._listener = self._listener, None
        fd = None if listener is None else listener.detach()
        if fd is None:
            _check_listens(self._endpoint.learner_host, int(unique_id), timeout_s)
        store = TCPStore(
            self._endpoint.learner_host, int(unique_id), None, fd is not None, timeout, wait_for_workers=False,
            master_listen_fd=fd,
        )  # fmt: skip
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [ProcessGroupGloo.create_device(hostname=self._endpoint.local_host)]
        options._timeout = timeout
        options._threads = NUM_CONCURRENT_CHUNKS  # so many broadcasts are in flight at once
        self._process_group = ProcessGroupGloo(PrefixStore("weights", store), rank, size, options)

    def state(self) -> bool:
        return self._process_group is not None

    def broadcast(self, memory: Tensor, timeout_s: float, *, after: Any = None) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_s)
        self._newest = self._process_group.broadcast([memory], options)

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def copy(self, target: Tensor, source: Tensor, *, after: Any = None) -> Any:
        """Copy at once, when the broadcast ``after`` has ended: gloo has no stream that would keep the order."""
        if after is not None:
            after.wait()
        target.copy_(source)
        return None

    def event(self) -> Any:
        return self._newest

    def done(self, event: Any) -> bool:
        if event is not None:
            event.wait()
        return True

    def abort(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        process_group, self._process_group = self._process_group, None
        if process_group is not None:
            process_group.abort()


def _check_listens(host: str, port: int, timeout_s: float) -> None:
    """Check that rank 0 listens. torch's store would try again with growing pauses, up to three times ``timeout_s``.

    Raises:
        RuntimeError: it does not: it has given up, or can't be reached.
    """
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        raise RuntimeError(f"the learner does not listen at {host} port {port}: {error}") from error
