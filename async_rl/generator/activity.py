"""What a generator has done so far, for its heartbeats; and the warning when it has done nothing for long. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from async_rl.generator.backend import Backend
from async_rl.queue.messages import GeneratorStats

logger = logging.getLogger(__name__)

WATCHDOG_S = 30.0


class Activity:
    """Cumulative figures of one generator. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s = self._idle_since_s = clock()
        self._busy_s = self._busy_sequence_s = self._pause_s = 0.0
        self._num_activations = 0
        self._has_warned = False

    def add_step(self, duration_s: float, num_running: int) -> None:
        """Count a decode step over ``num_running`` sequences."""
        self._busy_s += duration_s
        self._busy_sequence_s += duration_s * num_running

    def add_activation(self, pause_s: float) -> None:
        """Count an activation of new weights."""
        self._pause_s += pause_s
        self._num_activations += 1

    def stats(self, backend: Backend) -> GeneratorStats:
        """The figures since this object was made."""
        return GeneratorStats(
            max_running=backend.max_running,
            wall_s=self._clock() - self._started_s,
            busy_s=self._busy_s,
            busy_sequence_s=self._busy_sequence_s,
            pause_s=self._pause_s,
            num_activations=self._num_activations,
            num_tokens=backend.num_tokens,
        )

    def check_idle(self, generator_id: str, *, is_running: bool, awaited: Callable[[], str]) -> None:
        """Log once, after ``WATCHDOG_S`` without a running sequence, what the generator waits for."""
        now_s = self._clock()
        if is_running:
            self._idle_since_s = now_s
            self._has_warned = False
        elif now_s - self._idle_since_s > WATCHDOG_S and not self._has_warned:
            self._has_warned = True
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - (now_s - self._idle_since_s)))
            logger.warning("generator %s: waiting since %s for %s", generator_id, since, awaited())
