"""How the C library reuses freed memory. Called once, at the start of processes that pass large messages on."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK_BYTES = 32 << 20
_KEPT_BYTES = 128 << 20


def reuse_freed_memory() -> None:
    """Keep up to 128 MiB of freed memory in the process instead of returning it at once.

    By default glibc returns a freed block of a few hundred KiB to the system, so every message causes page faults
    again: up to half of a process's time for a 256 KiB group. With other C libraries this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
