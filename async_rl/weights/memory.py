"""Host memory for the buckets of one version of the weights, which several processes of a machine map.

torch is imported when a tensor is made.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import TYPE_CHECKING, Any

from async_rl.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

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

    bucket = torch.frombuffer(memory.append(size), dtype=torch.uint8)
    if torch.cuda.is_available():
        pin(bucket)
    return bucket[:size]


def pin(bucket: Tensor) -> None:
    """Lock the memory of ``bucket``, uint8 [N], so that a CUDA device copies from and to it without a detour.

    Call ``unpin`` before the memory is given up, unless the process ends. Exactly these bytes are locked; torch's own
    pinned memory is rounded up to a power of two.

    Raises:
        WeightsError: CUDA refuses.
    """
    import torch

    cudart: Any = torch.cuda.cudart()
    status = cudart.cudaHostRegister(bucket.data_ptr(), bucket.numel(), 0)
    if int(status) != 0:
        raise WeightsError(
            f"can't pin {bucket.numel()} bytes of host memory for weights (CUDA error {int(status)}); raise the limit "
            f"on locked memory (ulimit -l)"
        )


def unpin(bucket: Tensor) -> None:
    """Unlock what ``pin`` locked. Without CUDA nothing was locked."""
    import torch

    if torch.cuda.is_available():
        cudart: Any = torch.cuda.cudart()
        cudart.cudaHostUnregister(bucket.data_ptr())
