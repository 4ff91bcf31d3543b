"""NCCL as a ``Library``: broadcasts between CUDA devices, each rank on one of its own.

It is used through ``nccl4py``, without c10d: the watchdog of torch's process groups would end the learner when a
generator dies. Communicators are non-blocking, so that each call returns at once and ``state`` tells how it went on.
A communicator must not be used while ``state`` is False, and no work may be queued on its stream.

It has run with the real nccl4py 0.6.0 over a libnccl that tests compile, which copies host memory between processes
(``tests/weights/fake_nccl.c``). It has never run with NCCL itself, because no machine with a CUDA device was available.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from typing import Any

import torch
from torch import Tensor

from async_rl.errors import WeightsError
from async_rl.net.address import interface_of, is_loopback
from async_rl.weights.collective.library import Endpoint
from async_rl.weights.control import CollectiveOffer

logger = logging.getLogger(__name__)

_PACKAGE = "nccl"
_SUCCESS, _IN_PROGRESS = 0, 7
"""Of NCCL's ``ncclResult_t``. ``get_async_error`` of nccl4py 0.6.0 returns a number, though it announces an enumeration
whose members equal those numbers."""


class NcclLibrary:
    """Implements ``library.Library``."""

    def __init__(self, endpoint: Endpoint) -> None:
        if not is_installed():
            raise WeightsError(
                "NCCL needs the package nccl4py, which is not installed; install it with: pip install 'async-rl[nccl]'"
            )
        import nccl.core  # pyright: ignore[reportMissingImports]

        self._nccl: Any = nccl.core
        self.device = torch.device(endpoint.device or "cuda")
        self._stream, self._copies = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        self._communicator: Any = None
        choose_interface(endpoint.local_host)

    def unique_id(self) -> bytes:
        with _as_runtime_error():
            return bytes(self._nccl.get_unique_id())

    def init(self, unique_id: bytes, rank: int, size: int, timeout_s: float) -> None:
        config = self._nccl.NCCLConfig(blocking=False)
        with torch.cuda.device(self.device), _as_runtime_error():
            found = self._nccl.UniqueId.from_bytes(unique_id)
            self._communicator = self._nccl.Communicator.init(size, rank, found, config)

    def state(self) -> bool:
        with _as_runtime_error():
            result = self._communicator.get_async_error()
            if result not in (_SUCCESS, _IN_PROGRESS):
                what = self._nccl.get_error_string(result)
                raise RuntimeError(f"NCCL: {what}: {self._communicator.get_last_error()}")
        return result == _SUCCESS

    def broadcast(self, memory: Tensor, timeout_s: float, *, after: torch.cuda.Event | None = None) -> None:
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.device(self.device), _as_runtime_error():
            self._communicator.broadcast(memory, memory, 0, stream=self._stream.cuda_stream)

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=device.type == "cpu")
        if device.type == "cuda":
            # Kernels that use what lay there before may still run, on the stream for which torch has allocated it.
            torch.cuda.current_stream(device).synchronize()
        return memory

    def copy(self, target: Tensor, source: Tensor, *, after: torch.cuda.Event | None = None) -> torch.cuda.Event:
        if after is not None:
            self._copies.wait_event(after)
        with torch.cuda.device(self.device), torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
        return _recorded(self._copies)

    def event(self) -> torch.cuda.Event:
        return _recorded(self._stream)

    def done(self, event: torch.cuda.Event) -> bool:
        return event.query()

    def abort(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            try:
                communicator.abort()
            except Exception as error:  # the communicator has failed before, and is not used again
                logger.info("a communicator of NCCL could not be closed: %s", error)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def is_installed() -> bool:
    """Return whether this environment has the package with which NCCL is used."""
    return importlib.util.find_spec(_PACKAGE) is not None


def offer(device: str) -> CollectiveOffer | None:
    """Return what a rank on this CUDA device offers. None if NCCL can't be used here."""
    if not is_installed():
        return None
    import nccl.core  # pyright: ignore[reportMissingImports]

    # Not torch.cuda.nccl.version(): that is how torch was built, and this is the library that a communicator will use.
    found: Any = nccl.core.get_version().libnccl
    if found is None:
        logger.warning("nccl4py finds no libnccl.so.2 on this machine, so weights don't travel by NCCL")
        return None
    return CollectiveOffer("nccl", str(found.version), [str(torch.cuda.get_device_properties(device).uuid)])


def choose_interface(local_host: str) -> None:
    """Let NCCL use the network interface that has the address ``local_host``, unless the user has chosen one.

    NCCL would take the first interface that is up, which often leads elsewhere. It reads the variable once, when a
    process uses it for the first time. Over loopback all ranks are on this machine, so NCCL needs no interface.
    """
    if "NCCL_SOCKET_IFNAME" not in os.environ and not is_loopback(local_host):
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface_of(local_host)}"


@contextlib.contextmanager
def _as_runtime_error() -> Any:
    """Turn the errors of ``nccl4py``, which have no common base class, into RuntimeErrors."""
    try:
        yield
    except RuntimeError:
        raise
    except Exception as error:
        raise RuntimeError(f"NCCL: {error}") from error
