"""Lets the ranks sample while the trainer waits (``learner.generate``). ``Trainer`` wraps its waits in this."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from async_rl.learner.loop.publishing import Published
from async_rl.learner.sampling import ID_PREFIX, SamplingEngine, SamplingOrder
from async_rl.queue.messages import TakenGroup


class IdleSampling:
    """Lets the engine's ranks sample while the trainer waits, and measures it."""

    def __init__(self, engine: SamplingEngine, *, address: str, lineage: str) -> None:
        """``address`` is the queue server's, as all ranks reach it."""
        self._engine, self._address, self._lineage = engine, address, lineage
        self._busy_s = self._used = 0.0

    @contextmanager
    def while_waiting(self, published: Published) -> Iterator[None]:
        """Sample while the ``with`` block waits, with the weights that were published last."""
        started_s = time.monotonic()
        self._engine.sample(SamplingOrder(self._address, self._lineage, published.version, published.digest))
        try:
            yield
        finally:
            busy_s = self._engine.stop_sampling()
            self._used = min(1.0, (busy_s - self._busy_s) / max(time.monotonic() - started_s, 1e-9))
            self._busy_s = busy_s

    def start_lap(self) -> None:
        """Begin the first step now. What was sampled before belongs to no step."""
        self._used = 0.0

    def metrics(self, taken: Sequence[TakenGroup]) -> dict[str, float]:
        """Return the step's metrics: what the ranks sampled of its groups, and how much of the wait rank 0 used."""
        own = [item.group for item in taken if item.group.generator_id.startswith(ID_PREFIX)]
        tokens = sum(int(s.loss_mask.sum()) for group in own for r in group.rollouts for s in r.sequences)
        used, self._used = self._used, 0.0  # a step that does not wait does not sample
        return {
            "learner_sampled/groups": len(own),
            "learner_sampled/tokens": tokens,
            "idle/learner_used": used,
        }
