"""Where the learner's weights go: a version's tensors enter, its digest leaves, to be announced.

``StagedWeights`` sends every version at once. ``FixedLagWeights``, for studies of staleness (``learner.fixed_lag``),
sends it a fixed number of versions later. ``start.py`` builds one; ``publishing.py`` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from async_rl.weights.publisher import Publisher
from async_rl.weights.staging import Staging

NamedTensors = Iterator[tuple[str, Tensor]]


class Published(NamedTuple):
    """A version that is on its way to the generators."""

    version: int
    digest: str


class WeightsPlane(Protocol):
    """Stages and sends versions of the weights."""

    @property
    def channel(self) -> str:
        """The address where generators get the weights."""
        ...

    def publish(
        self, lineage: str, version: int, tensors: NamedTensors, *, tick: Callable[[], None], is_last: bool = False
    ) -> Published | None:
        """Stage ``tensors`` as ``version`` and send them in the background. Returns what to announce now, if anything.

        Args:
            lineage: the learner's.
            version: the version of the weights.
            tensors: names and tensors; either read to the end or not read at all.
            tick: called while waiting.
            is_last: no training follows, so nothing may be delayed.
        """
        ...

    def stats(self) -> dict[str, float]: ...


class StagedWeights:
    """Gather, stage, send."""

    def __init__(self, staging: Staging, publisher: Publisher) -> None:
        self._staging, self._publisher = staging, publisher

    @property
    def channel(self) -> str:
        return self._publisher.address

    def publish(
        self, lineage: str, version: int, tensors: NamedTensors, *, tick: Callable[[], None], is_last: bool = False
    ) -> Published:
        staged = self._staging.stage(lineage, version, tensors, tick=tick)
        self._publisher.publish(staged)
        return Published(version, staged.manifest.digest)

    def stats(self) -> dict[str, float]:
        stats = self._publisher.stats()
        return {
            "members": stats.members,
            "transfer_s": stats.last_transfer_s,
            "pulled_bytes": stats.pulled_bytes,
            "pulled_full_bytes": stats.pulled_full_bytes,
            "delta_bytes": stats.delta_bytes,
            "delta_s": stats.delta_s,
            "failures": stats.failures,
            "corrupt": stats.corrupt,
            "dropped_members": stats.dropped,
            "superseded": stats.superseded,
            "dropped_versions": self._staging.num_dropped,
        }


class FixedLagWeights:
    """Sends every version to ``plane`` when it is ``fixed_lag`` versions old, so that the lag is fixed, not bounded.

    The batch that version v trains on is then wholly sampled by version v - fixed_lag. The config requires
    ``queue.max_staleness`` to equal ``fixed_lag``, so admission has room for that one batch, and the next version is
    announced after the learner's step, when nothing is in flight. The first fixed_lag steps of a learner start have no
    older version; they train on samples of the version that it began with: lag 0, 1, ..., fixed_lag.

    The cost: generators and learner take turns, and fixed_lag + 1 versions lie in host memory. An evaluation between
    first and last step waits until its version is sent.
    """

    def __init__(self, plane: WeightsPlane, fixed_lag: int) -> None:
        self._plane, self._fixed_lag = plane, fixed_lag
        self._delayed: dict[int, list[tuple[str, Tensor]]] = {}
        self._published: int | None = None

    @property
    def channel(self) -> str:
        return self._plane.channel

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
        return self._plane.publish(lineage, due, iter(self._delayed[due]), tick=tick, is_last=is_last)

    def stats(self) -> dict[str, float]:
        return self._plane.stats()
