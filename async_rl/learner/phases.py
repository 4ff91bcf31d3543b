"""Where the time of an optimizer step goes, on this rank: ``PhaseClock`` times named parts of it.

Each part is also a range of that name in a trace of ``torch.profiler`` (``learner/loop/profiling.py``). On CUDA they
are timed by events on the device, which are read after the step, so that the host never waits for the device within a
micro-batch. Called by ``fsdp_engine.py``.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch.profiler import record_function

Phase = Literal["pack", "scatter", "forward", "backward", "optimizer"]
"""What a rank does in a step. ``pack`` and ``scatter`` are on rank 0's host. ``forward`` includes the transfer of a
micro-batch to the device, head and loss. With several ranks ``forward`` and ``backward`` include the collectives of
FSDP, which run at the same time as the computation, and waits for other stages of a pipeline; ``optimizer`` includes
the sum of the statistics over ranks and the gradient's norm."""

_ON_HOST: tuple[Phase, ...] = ("pack", "scatter")


class PhaseClock:
    """Collects the durations of a step's phases, from ``phase`` to ``read``."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[Phase, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Add the duration of the ``with`` block to the phase ``name``, unless the block raises."""
        with record_function(name):
            if self._is_cuda and name not in _ON_HOST:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                yield
                end.record()
                self._events.append((name, start, end))
            else:
                began = time.perf_counter()
                yield
                self._add(name, time.perf_counter() - began)

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, and begin anew. On CUDA, wait for the device first."""
        if self._events:
            self._events[-1][2].synchronize()
        for name, start, end in self._events:
            self._add(name, start.elapsed_time(end) / 1000)
        seconds, self._seconds, self._events = self._seconds, {}, []
        return seconds

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds


_highest_bytes = {"cuda": 0}
"""Of what ``peak_memory_bytes`` has returned; a process uses one device."""


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: on CUDA torch's on the device since the last call, else the
    resident memory since the process began.
    """
    if device.type != "cuda":
        return highest_memory_bytes(device)
    peak = torch.cuda.max_memory_allocated(device)
    _highest_bytes["cuda"] = max(peak, _highest_bytes["cuda"])
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def highest_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes since it began: on CUDA torch's on the device, else the resident
    memory. torch's own figure forgets what was before a call of ``peak_memory_bytes``, which every step makes.
    """
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(device), _highest_bytes["cuda"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
