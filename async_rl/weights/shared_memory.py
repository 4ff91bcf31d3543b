"""Memory that two processes see: anonymous files, handed from one to the other as descriptors. No torch.

The learner stages versions in it and the stream server reads them there, so no byte is copied between the two. The
kernel frees a file when the last process that holds it is gone, however it went; nothing is left under ``/dev/shm``.
"""

from __future__ import annotations

import mmap
import os
import tempfile

PAGE_BYTES = mmap.ALLOCATIONGRANULARITY


class SharedBuckets:
    """A file of buckets, each beginning on a page: ``offsets[i]`` is where bucket ``i`` of ``sizes[i]`` bytes lies."""

    def __init__(self) -> None:
        self.fd = _anonymous_file()
        self.sizes: list[int] = []
        self.offsets: list[int] = []
        self._end = 0

    def append(self, size: int) -> mmap.mmap:
        """Room for one more bucket, writable, at least one byte long."""
        offset, mapped = self._end, max(1, size)
        self._end += -(-mapped // PAGE_BYTES) * PAGE_BYTES
        os.ftruncate(self.fd, self._end)
        view = mmap.mmap(self.fd, mapped, offset=offset)
        self.sizes.append(size)
        self.offsets.append(offset)
        return view

    def close(self) -> None:
        """Let go of the descriptor; what is mapped stays mapped."""
        os.close(self.fd)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("async-rl-weights", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # a system without memfd
        return os.dup(file.fileno())
