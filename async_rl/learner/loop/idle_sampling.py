"""A part of the step that lets the ranks sample while the trainer waits (``learner.generate``)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from async_rl.learner.loop.parts import StepPart
from async_rl.learner.loop.publishing import Published
from async_rl.learner.loop.step_result import StepResult
from async_rl.learner.sampling import ID_PREFIX, SamplingEngine, SamplingOrder


class IdleSampling(StepPart):
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

    def begin(self) -> None:
        self._used = 0.0

    def record(self, result: StepResult) -> Mapping[str, float]:
        """Return what the ranks sampled of the step's groups, and how much of the wait rank 0 used."""
        own = [item.group for item in result.groups if item.group.generator_id.startswith(ID_PREFIX)]
        tokens = sum(int(s.loss_mask.sum()) for group in own for r in group.rollouts for s in r.sequences)
        used, self._used = self._used, 0.0  # a step that does not wait does not sample
        return {
            "learner_sampled/groups": len(own),
            "learner_sampled/tokens": tokens,
            "idle/learner_used": used,
        }
