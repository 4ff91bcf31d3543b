"""Where the learner's time goes, and how busy the generators were meanwhile: the step's time metrics.

Overlap efficiency is steps/s over ``1 / max(gen, train)``: gen is the generators' busy sequence-seconds of a step over
their slots, train the learner's busy seconds of a step. 1.0 means that nothing waited for anything but the slower side.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from async_rl.queue.messages import GeneratorStats

logger = logging.getLogger(__name__)

WAIT_LOG_S = 30.0
"""A wait is logged every so many seconds."""


class WaitLog:
    """Logs every 30 s what one wait is for, and since when. Make one where the wait begins."""

    def __init__(self) -> None:
        self._start = self._last_log = time.monotonic()

    def still_waiting(self, reason: str) -> None:
        """Call this after every attempt that failed."""
        now = time.monotonic()
        if now - self._last_log >= WAIT_LOG_S:
            logger.warning("waiting for %.0f s: %s", now - self._start, reason)
            self._last_log = now


class StepClock:
    """Times the parts of one step; ``lap`` closes it and gives its metrics."""

    def __init__(self, elapsed_s: float) -> None:
        self._origin = time.monotonic() - elapsed_s
        self._lap_start = time.monotonic()
        self._parts: dict[str, float] = {}
        self._generators: tuple[Sequence[str], GeneratorStats] | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run started, restarts not counted."""
        return time.monotonic() - self._origin

    def start_lap(self) -> None:
        """The first step begins now: what came before is no step's time."""
        self._lap_start, self._parts = time.monotonic(), {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the block's duration to ``name`` (``wait``, ``train``, ``publish``)."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + time.monotonic() - start

    def lap(self, generators: GeneratorStats, *, roster: Sequence[str], trained_tokens: int) -> dict[str, float]:
        """Metrics of the step that ends now; ``generators`` are cumulative, so differences between laps count.

        ``roster`` names those that are summed in ``generators``.
        """
        now = time.monotonic()
        wall = max(now - self._lap_start, 1e-9)
        parts = {name: self._parts.get(name, 0.0) for name in ("wait", "train", "publish")}
        busy = max(wall - parts["wait"], 0.0)
        metrics = {
            "time_s": self.elapsed_s,
            "time/step_s": wall,
            "time/wait_s": parts["wait"],
            "time/train_s": parts["train"],
            "time/publish_s": parts["publish"],
            "idle/learner": min(parts["wait"] / wall, 1.0),
            "throughput/trained_tokens_per_s": trained_tokens / wall,
            **self._generator_metrics(roster, generators, wall, busy),
        }
        self._lap_start, self._parts, self._generators = now, {}, (roster, generators)
        return metrics

    def _generator_metrics(
        self, roster: Sequence[str], now: GeneratorStats, wall: float, learner_busy: float
    ) -> dict[str, float]:
        # Without two readings of the same generators there is no difference to speak of: leave the keys out. Equal
        # names and slots are not enough: a generator that was restarted under its name counts from 0 again.
        if self._generators is None or now.max_running == 0 or tuple(roster) != tuple(self._generators[0]):
            return {}
        before = self._generators[1]
        shrunk = any(getattr(now, name) < getattr(before, name) for name in GeneratorStats.__struct_fields__)
        if shrunk or now.max_running != before.max_running or now.wall_s <= before.wall_s:
            return {}
        # Readings come with heartbeats, which may be rarer than steps: what they tell of is a rate, never this step's
        # own count. ``each_s`` is the time between the two readings of one generator, on average.
        each_s = (now.wall_s - before.wall_s) / len(roster)
        generate = (now.busy_sequence_s - before.busy_sequence_s) / (now.max_running * each_s) * wall
        activations = now.num_activations - before.num_activations
        return {
            "idle/generators": min(max(1.0 - (now.busy_s - before.busy_s) / (now.wall_s - before.wall_s), 0.0), 1.0),
            "throughput/generated_tokens_per_s": (now.num_tokens - before.num_tokens) / each_s,
            "time/pause_s": (now.pause_s - before.pause_s) / activations if activations else 0.0,
            "time/generate_s": generate,
            "overlap/efficiency": max(generate, learner_busy) / wall,
        }
