"""Publishes new versions of the learner's weights: gathers, stages, sends and announces them.

The trainer calls ``VersionPublisher`` after a step. ``VersionPublisher`` remembers the digest of every version with
which rollouts may still arrive, so that it recognises rollouts of weights which this run never published.

A ``WeightsSender`` takes a version's tensors and returns the digest to announce. ``StagedWeights`` sends every version
at once. ``FixedLagWeights``, for studies of staleness (``learner.fixed_lag``), sends each version a fixed number of
versions later. ``start.py`` builds the one that the config asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from async_rl.config.config import Config
from async_rl.learner.checkpoints.files import TrainerState
from async_rl.learner.interface import Engine
from async_rl.process.fault_points import fault_point
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.messages import Announcement
from async_rl.records import Group
from async_rl.weights.channel.publisher import Publisher
from async_rl.weights.staging import Staging

if TYPE_CHECKING:
    from async_rl.learner.loop.parity import ParityGate

NamedTensors = Iterator[tuple[str, Tensor]]


class Published(NamedTuple):
    """A version of the weights that is being sent to the generators, and the digest of its weights."""

    version: int
    digest: str


class WeightsSender(Protocol):
    """Sends versions of the weights to the generators.

    Attributes:
        channel: the address where generators get the weights, as announced to them.
        ports: the ports of this machine to which generators connect for the weights.
    """

    channel: str
    ports: tuple[int, ...]

    def publish(
        self, lineage: str, version: int, tensors: NamedTensors, *, tick: Callable[[], None], is_last: bool = False
    ) -> Published | None:
        """Take the weights of ``version`` and send them in the background. Return the version that must be announced
        now.

        The result is None if no version must be announced. It can be an older version if versions are sent with a
        delay.

        Args:
            lineage: the learner's lineage.
            version: number of the version.
            tensors: names and tensors, which are read to the end or not at all.
            tick: called while waiting.
            is_last: no training follows, so the version must not be delayed.
        """
        ...

    def stats(self) -> dict[str, float]: ...


class StagedWeights:
    """Sends every version of the weights to the generators at once."""

    def __init__(self, staging: Staging, publisher: Publisher) -> None:
        self._staging, self._publisher = staging, publisher
        self.channel, self.ports = publisher.address, publisher.ports
        self._gather_s = 0.0

    def publish(
        self, lineage: str, version: int, tensors: NamedTensors, *, tick: Callable[[], None], is_last: bool = False
    ) -> Published:
        staged = self._staging.stage(lineage, version, tensors, tick=tick)
        self._gather_s = staged.gather_s
        self._publisher.publish(staged)
        return Published(version, staged.manifest.digest)

    def stats(self) -> dict[str, float]:
        stats = self._publisher.stats()
        return {
            "time/gather_s": self._gather_s,
            "time/transfer_s": stats.last_transfer_s,
            "time/verify_s": stats.last_verify_s,
            "throughput/transfer_bytes_per_s": stats.last_transfer_bytes / max(stats.last_transfer_s, 1e-9),
            "weights/bytes": stats.last_transfer_bytes,
            "weights/members": stats.members,
            "weights/pulled_bytes": stats.pulled_bytes,
            "weights/pulled_full_bytes": stats.pulled_full_bytes,
            "weights/peer_bytes": stats.peer_bytes,
            "weights/peer_faults": stats.peer_faults,
            "weights/delta_bytes": stats.delta_bytes,
            "weights/delta_s": stats.delta_s,
            "weights/failures": stats.failures,
            "weights/corrupt": stats.corrupt,
            "weights/dropped_members": stats.dropped,
            "weights/superseded": stats.superseded,
            "weights/dropped_versions": self._staging.num_dropped,
        }


class FixedLagWeights:
    """Sends every version to the generators only when the learner is ``fixed_lag`` versions ahead of it.

    So every rollout is trained at exactly this lag. The config requires ``queue.max_staleness`` to equal ``fixed_lag``,
    so the queue has room for one batch, and version v - fixed_lag samples all of the batch that the learner trains at
    version v. The next version is announced after the learner's step, when no group is being sampled.

    In the first ``fixed_lag`` steps after a start of the learner no version is old enough. They train on samples of the
    version that the learner started with, at lags 0, 1, ..., fixed_lag - 1.

    The cost: generators and learner take turns, host memory holds ``fixed_lag`` + 1 versions, and an evaluation during
    the run waits until its version is sent. The last version of a run is sent at once.
    """

    def __init__(self, sender: WeightsSender, fixed_lag: int) -> None:
        self._sender, self._fixed_lag = sender, fixed_lag
        self.channel, self.ports = sender.channel, sender.ports
        self._delayed: dict[int, list[tuple[str, Tensor]]] = {}
        self._published: int | None = None

    def publish(
        self, lineage: str, version: int, tensors: NamedTensors, *, tick: Callable[[], None], is_last: bool = False
    ) -> Published | None:
        if version not in self._delayed:
            # Copied, because a gathered tensor is valid only until the engine's next update.
            self._delayed[version] = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in tensors]
        due = version if is_last else max(min(self._delayed), version - self._fixed_lag)
        if due == self._published:
            return None
        for old in [delayed for delayed in self._delayed if delayed < due]:
            del self._delayed[old]
        self._published = due
        return self._sender.publish(lineage, due, iter(self._delayed[due]), tick=tick, is_last=is_last)

    def stats(self) -> dict[str, float]:
        return self._sender.stats()


class VersionPublisher:
    """Publishes the versions of one learner start. It keeps their digests in ``state``, and so in the checkpoint."""

    def __init__(
        self,
        config: Config,
        state: TrainerState,
        engine: Engine,
        queue: LearnerQueue,
        weights: WeightsSender,
        probes: ParityGate | None,
    ) -> None:
        self._config, self._state, self._engine, self._queue = config, state, engine, queue
        self._weights, self._probes = weights, probes
        self.newest: Published | None = None
        """The version that was announced last. None before the first."""

    def is_due(self, *, is_last: bool) -> bool:
        """Return whether the engine's version must be published now.

        It must be after ``weights.sync_every`` versions since the last publication, or if it is the last and not
        published.
        """
        unpublished = self._state.version - (-1 if self.newest is None else self.newest.version)
        return unpublished >= self._config.weights.sync_every or (unpublished > 0 and is_last)

    def publish(self, *, tick: Callable[[], None], is_last: bool = False) -> None:
        """Publish the engine's version, with a parity probe (see ``parity.py``) if one is due.

        ``tick`` is called while waiting for free memory. If it raises, nothing is published.
        """
        state, engine = self._state, self._engine
        if self._probes is not None and not is_last:
            self._probes.prepare_probe()
        published = self._weights.publish(state.lineage, state.version, engine.gather(), tick=tick, is_last=is_last)
        fault_point("learner.publishing")  # the version is staged, not announced
        if published is None:
            return
        self._remember(published.version, published.digest)
        probe = b"" if self._probes is None else self._probes.take_probe(published.version)
        self._queue.announce(Announcement(state.lineage, *published, self._weights.channel, probe, self._weights.ports))
        self.newest = published

    def knows_weights(self, group: Group) -> bool:
        """Return whether this run published all weights that sampled ``group``: their digests are those of its
        versions.

        Versions whose digests are forgotten do not count: none of their tokens is trained on, because they are too old.
        A rollout may have such tokens, if it took longer than ``queue.max_staleness`` versions.
        """
        digests, oldest = self._state.digests, self._oldest_remembered
        sampled = [s.versions[s.loss_mask] for rollout in group.rollouts for s in rollout.sequences]
        versions = np.unique(np.concatenate(sampled)).tolist() if sampled else []
        return all(group.weights_digest.get(v) in digests.get(v, ()) for v in versions if v >= oldest)

    @property
    def _oldest_remembered(self) -> int:
        config = self._config
        return self._state.version - config.queue.max_staleness - config.learner.versions_per_batch

    def _remember(self, version: int, digest: str) -> None:
        state, oldest = self._state, self._oldest_remembered
        state.add_digest(version, digest)
        state.digests = {v: digests for v, digests in state.digests.items() if v >= oldest}
