"""Host memory that CUDA devices copy from and to: of versions of the weights, and of what a checkpoint gets.

``SharedBuckets`` are mapped by several processes of a machine; ``own_memory`` is one process's. ``host_memory`` pins
either. torch's own pinned memory is rounded up to a power of two, which can double it; here exactly what is asked for
is pinned. torch is imported when a tensor is made.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import weakref
from typing import TYPE_CHECKING, Any

from async_rl.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_PAGE_BYTES = mmap.ALLOCATIONGRANULARITY


class SharedBuckets:
    """Shared memory for the buckets of one version. Bucket ``i`` has ``sizes[i]`` bytes at the page-aligned
    ``offsets[i]``.

    The memory is an anonymous file with descriptor ``fd``, which another process may map. The kernel frees it when the
    last process that holds it ends, even if that process is killed. No file is left under ``/dev/shm``.
    """

    def __init__(self) -> None:
        self.fd = _anonymous_file()
        self.sizes: list[int] = []
        self.offsets: list[int] = []
        self._end = 0

    def append(self, size: int) -> mmap.mmap:
        """Add a bucket of ``size`` bytes. Return its writable memory, which has at least one byte."""
        offset, mapped = self._end, max(1, size)
        self._end += -(-mapped // _PAGE_BYTES) * _PAGE_BYTES
        os.ftruncate(self.fd, self._end)
        view = mmap.mmap(self.fd, mapped, offset=offset)
        self.sizes.append(size)
        self.offsets.append(offset)
        return view

    def close(self) -> None:
        """Close the descriptor. Mappings of the memory stay valid."""
        os.close(self.fd)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("async-rl-weights", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # a system without memfd
        return os.dup(file.fileno())


def host_bucket(memory: SharedBuckets, size: int) -> Tensor:
    """Append a bucket to ``memory`` and return it as zeros, uint8 [size]. It is pinned if CUDA is available."""
    import torch

    return host_memory(memory.append(size), pinned=torch.cuda.is_available())[:size]


def own_memory(size: int, *, pinned: bool) -> Tensor:
    """Return zeros, uint8 [size], in memory of this process alone. ``pinned`` as in ``host_memory``.

    Raises:
        WeightsError: there is not so much memory, or CUDA refuses to pin it.
    """
    try:
        view = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise WeightsError(f"can't have {size} bytes of host memory: {error.strerror}; free memory") from error
    return host_memory(view, pinned=pinned)[:size]


def host_memory(view: mmap.mmap, *, pinned: bool) -> Tensor:
    """Return the memory of ``view`` as a tensor, uint8 [N].

    ``pinned``: lock exactly these bytes, so that a CUDA device copies from and to them without a detour. They are
    unlocked before ``view`` is unmapped, when the last tensor in it is gone: wait for the device's copies before that.

    Raises:
        WeightsError: CUDA refuses to pin them.
    """
    import numpy as np
    import torch

    array = np.frombuffer(view, np.uint8)
    memory = torch.from_numpy(array)  # it and all views of it keep the array
    if pinned:
        _pin(memory)
        # An mmap is unmapped before its weak references are called, an array is not. At exit the kernel unlocks.
        weakref.finalize(array, _unpin, memory.data_ptr()).atexit = False
    return memory


def _pin(memory: Tensor) -> None:
    import torch

    cudart: Any = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if status != 0:
        raise WeightsError(
            f"can't pin {memory.numel()} bytes of host memory (CUDA error {status}); free memory, or raise the limit "
            f"on locked memory (ulimit -l)"
        )


def _unpin(address: int) -> None:
    import torch

    cudart: Any = torch.cuda.cudart()
    if (status := int(cudart.cudaHostUnregister(address))) != 0:
        logger.warning("can't unlock pinned host memory (CUDA error %d); it is lost until this process ends", status)
