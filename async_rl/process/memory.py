"""What the C library does with freed memory, for processes that pass large messages on. Called once, at their start."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK_BYTES = 32 << 20
_KEPT_BYTES = 128 << 20


def reuse_freed_memory() -> None:
    """Keep up to 128 MiB of freed memory at hand instead of giving it back at once.

    By default glibc gives a freed block of a few hundred KiB back to the system, and every message pays anew for the
    page faults of its copies: up to half of what a 256 KiB group costs a process. Elsewhere this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
