"""Host memory for the buckets of one version of the weights, which several processes of a machine map. No torch."""

from __future__ import annotations

import mmap
import os
import tempfile

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
