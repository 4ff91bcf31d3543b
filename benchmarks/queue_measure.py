"""What every side of the queue benchmark shares: its load, its processes, and one meter at the receiving end.

A side moves groups of ``size_bytes`` from one producer to one consumer, each a process of its own, over TCP on
loopback. The consumer measures: groups/s after a warm-up, the time since each group was handed over, and what every
process of the side spent of CPU meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

_SPAWN = multiprocessing.get_context("spawn")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """``rate`` in groups/s paces the producer; None: as fast as it goes. Times in seconds."""

    size_bytes: int
    rate: float | None = None
    warmup_s: float = 1.0
    measured_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Measured:
    """``cpu_us`` is what a group cost each role, microseconds of CPU; ``latencies_ms`` is empty for unpaced loads."""

    groups_per_s: float
    latencies_ms: tuple[float, ...]
    cpu_us: Mapping[str, float]

    def latency_ms(self, percentile: float) -> float:
        return float(np.percentile(self.latencies_ms, percentile))


@dataclass(slots=True)
class Meter:
    """Counts what arrives; ``pids`` names the processes by role."""

    load: Load
    pids: Mapping[str, Sequence[int]]
    _first_at: float | None = None
    _begun_at: float | None = None
    _cpu_before: dict[str, float] = field(default_factory=dict)
    _num_groups: int = 0
    _latencies_s: list[float] = field(default_factory=list)

    def arrive(self, sent_at: Sequence[float]) -> Measured | None:
        """Groups are here that were handed over at these times (``time.monotonic``); the result once it is complete."""
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        if self._begun_at is None:
            if now - self._first_at >= self.load.warmup_s:
                self._begun_at, self._cpu_before = now, self._cpu_s()
            return None
        self._num_groups += len(sent_at)
        if self.load.rate is not None:
            self._latencies_s += [now - sent for sent in sent_at]
        if now - self._begun_at < self.load.measured_s:
            return None
        used = {role: after - self._cpu_before[role] for role, after in self._cpu_s().items()}
        return Measured(
            groups_per_s=self._num_groups / (now - self._begun_at),
            latencies_ms=tuple(1e3 * s for s in self._latencies_s),
            cpu_us={role: 1e6 * cpu_s / self._num_groups for role, cpu_s in used.items()},
        )

    def _cpu_s(self) -> dict[str, float]:
        return {role: sum(map(cpu_seconds, pids)) for role, pids in self.pids.items()}


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process, at the resolution of the kernel's tick."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        words = file.read().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / _TICKS_PER_S


class Pacer:
    """When the next group is due. Without a rate that is always now."""

    def __init__(self, rate: float | None) -> None:
        self._period_s = 0.0 if rate is None else 1 / rate
        self._due_at = time.monotonic()

    def left_s(self) -> float:
        """Seconds until the next group is due, 0 if it is."""
        return max(0.0, self._due_at - time.monotonic()) if self._period_s else 0.0

    def step(self) -> None:
        """A group was handed over. One that came late is not made up for by a burst."""
        self._due_at = max(self._due_at + self._period_s, time.monotonic() - self._period_s)

    def wait(self) -> None:
        """Sleep until the next group is due."""
        if (left_s := self.left_s()) > 0:
            time.sleep(left_s)


class Processes:
    """A side's processes, ended with it. Roles run ``function(*arguments, pipe)`` in a fresh interpreter."""

    def __init__(self) -> None:
        self._started: list[tuple[BaseProcess, Connection]] = []

    def start(self, function: Callable[..., None], *arguments: Any) -> tuple[int, Connection]:
        """The process id, and the parent's end of its pipe."""
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=function, args=(*arguments, theirs), daemon=True)
        process.start()
        theirs.close()
        self._started.append((process, ours))
        assert process.pid is not None
        return process.pid, ours

    def close(self) -> None:
        for process, _ in self._started:
            process.terminate()
        for process, pipe in self._started:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()


@contextmanager
def processes() -> Iterator[Processes]:
    started = Processes()
    try:
        yield started
    finally:
        started.close()


def receive(pipe: Connection, timeout_s: float = _START_S) -> Any:
    """What a role says.

    Raises:
        TimeoutError: it says nothing in time. EOFError: it has ended.
    """
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"a process of the benchmark said nothing for {timeout_s:.0f} s")
    return pipe.recv()


def result_of(pipe: Connection, load: Load) -> Measured:
    """The consumer's result."""
    return receive(pipe, result_timeout_s(load))


def result_timeout_s(load: Load) -> float:
    """A side that has not measured by then never will."""
    return _START_S + 10 * (load.warmup_s + load.measured_s)
