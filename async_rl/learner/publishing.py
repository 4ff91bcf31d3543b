"""Publish the learner's versions: gather, stage, send, announce. The trainer calls this after a step.

It also remembers the digest of every version that may still be in flight, so that rollouts of weights which this run
never published are recognised.
"""

from __future__ import annotations

from async_rl.config.config import Config
from async_rl.learner.batch import sampling_versions
from async_rl.learner.engine.protocol import Engine
from async_rl.learner.parity import ParityGate
from async_rl.learner.state import TrainerState
from async_rl.learner.weights_plane import WeightsPlane
from async_rl.process.fault_points import fault_point
from async_rl.queue.client.learner_client import LearnerQueue
from async_rl.queue.messages import Announcement
from async_rl.records import Group


class VersionPublisher:
    """The publications of one learner start. Digests are kept in ``state``, and so in the checkpoint."""

    def __init__(
        self,
        config: Config,
        state: TrainerState,
        engine: Engine,
        queue: LearnerQueue,
        weights: WeightsPlane,
        parity: ParityGate | None,
    ) -> None:
        self._config, self._state, self._engine, self._queue = config, state, engine, queue
        self._weights, self._parity = weights, parity
        self._newest = -1

    def is_due(self, *, is_last: bool) -> bool:
        """Whether ``weights.sync_every`` versions were made since the last publication; the last version always is."""
        unpublished = self._state.version - self._newest
        return unpublished >= self._config.weights.sync_every or (unpublished > 0 and is_last)

    def publish(self, *, is_last: bool = False) -> None:
        """Publish the version that the engine holds, with a parity probe if a generator is due for one."""
        state, engine = self._state, self._engine
        if self._parity is not None and not is_last:
            self._parity.prepare_probe(state.lineage, state.version)
        published = self._weights.publish(
            state.lineage, state.version, engine.gather(), tick=engine.tick, is_last=is_last
        )
        fault_point("learner.publishing")
        if published is None:
            return
        self._remember(published.version, published.digest)
        probe = b"" if self._parity is None else self._parity.take_probe(published.version)
        self._queue.announce(Announcement(state.lineage, *published, self._weights.channel, probe))
        self._newest = published.version

    def knows_weights(self, group: Group) -> bool:
        """Whether every version that sampled ``group`` came with a digest that this run published for it."""
        digests = self._state.digests
        return all(group.weights_digest.get(v) in digests.get(v, ()) for v in sampling_versions(group))

    def _remember(self, version: int, digest: str) -> None:
        state, config = self._state, self._config
        state.add_digest(version, digest)
        oldest = state.version - config.queue.max_staleness - config.learner.updates_per_batch
        state.digests = {v: digests for v, digests in state.digests.items() if v >= oldest}
