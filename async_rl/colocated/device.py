"""Divide a rank's device between training and sampling: each has it in turns, and training decides whose turn it is.

The rank's main thread calls ``open`` and ``close``. The thread that samples keeps the device for one decode step at a
time. An engine that computes between its steps, too, keeps the device until it is asked to leave it. No torch.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WAIT_S = 0.05
"""How long ``turn`` waits for a device that trains. After that the sampling thread looks after its other duties. It is
also how long these may take while an engine keeps the device."""


class SharedDevice:
    """A device that is closed to sampling at first. It implements ``generator.loop.Device``.

    Args:
        max_groups: how many groups of training may begin between ``open`` and the next ``open``; None: any number.
        clock: returns the time in seconds.
        wait_s: how long ``turn`` waits while the device is closed.
    """

    def __init__(
        self, max_groups: int | None = None, *, clock: Callable[[], float] = time.monotonic, wait_s: float = WAIT_S
    ) -> None:
        self._max_groups, self._now, self._wait_s = max_groups, clock, wait_s
        self._changed = threading.Condition()
        self._is_open = self._is_used = False
        self._leave: Callable[[], object] | None = None
        self._num_begun = 0
        self._busy_s = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which the device has sampled."""
        with self._changed:
            return self._busy_s

    @property
    def is_closed(self) -> bool:
        """Whether no further decode step may begin."""
        return not self._is_open

    @property
    def max_wait_s(self) -> float:
        """How long at most the sampling thread may wait between two turns, in seconds."""
        return math.inf if self._leave is None else self._wait_s

    @property
    def groups_left(self) -> int | None:
        """How many groups of training may begin before the next ``open``."""
        return None if self._max_groups is None else max(0, self._max_groups - self._num_begun)

    def group_begins(self) -> None:
        """Count a group of training that begins."""
        self._num_begun += 1

    def open(self) -> None:
        """Let the device sample from now on."""
        with self._changed:
            self._num_begun = 0
            self._is_open = True
            self._changed.notify_all()

    def close(self, timeout_s: float | None = None) -> None:
        """Let the device sample no more. Return when the present decode step, if there is one, is done, and an engine
        that keeps the device has left it, or after ``timeout_s``.
        """
        with self._changed:
            self._is_open = False
            self._changed.wait_for(lambda: not self._is_used, timeout_s)

    def keep(self, leave: Callable[[], object]) -> None:
        """From this turn on keep the device between turns. ``leave`` frees it; ``turn`` calls it when it is closed."""
        self._leave = leave

    def give_up(self) -> None:
        """Nothing samples on the device any more."""
        with self._changed:
            self._leave = None
            self._is_used = False
            self._changed.notify_all()

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Keep the device for the ``with`` block. The value is False if it is closed, after a short wait."""
        with self._changed:
            if self._is_used and self._leave is not None and not self._is_open:
                self._leave()
                self._is_used = False
                self._changed.notify_all()
            self._is_used = is_free = self._changed.wait_for(lambda: self._is_open, self._wait_s)
            began_s = self._now()
        try:
            yield is_free
        finally:
            with self._changed:
                if is_free:
                    self._busy_s += self._now() - began_s
                self._is_used = is_free and self._leave is not None
                self._changed.notify_all()
