"""The trainer's side of the weight plane: a version's tensors in, its digest out, to be announced.

``StagedWeights`` sends every version at once; ``FixedLagWeights``, for studies of staleness (``learner.fixed_lag``),
sends it exactly so many versions late. Built by ``start.py``.
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
    """Where the learner's weights go."""

    @property
    def channel(self) -> str:
        """Where generators get them."""
        ...

    def publish(
        self, lineage: str, version: int, tensors: NamedTensors, *, tick: Callable[[], None], is_last: bool = False
    ) -> Published | None:
        """Stage ``tensors`` as ``version`` and send them in the background; what is to be announced now, if anything.

        ``tensors`` is exhausted or not begun. ``tick`` is called while there is something to wait for. ``is_last``: no
        training follows, so nothing may be held back.
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
    """Every version goes to ``plane`` when it is ``fixed_lag`` versions old, so that the lag is held, not bounded.

    The batch of version v is then sampled by version v - fixed_lag and nothing else. With ``queue.max_staleness`` equal
    to ``fixed_lag`` (the config sees to that) admission has room for that one batch, and the next version is announced
    after the learner's step, when nothing is in flight. The first fixed_lag steps of a learner start, which have no
    older version, train on what the one that it began with has sampled: lag 0, 1, ..., fixed_lag.

    What it costs: generators and learner take turns, and fixed_lag + 1 versions lie in host memory. An evaluation
    between first and last step waits until the version it is asked of is sent.
    """

    def __init__(self, plane: WeightsPlane, fixed_lag: int) -> None:
        self._plane, self._fixed_lag = plane, fixed_lag
        self._held: dict[int, list[tuple[str, Tensor]]] = {}
        self._published: int | None = None

    @property
    def channel(self) -> str:
        return self._plane.channel

    def publish(
        self, lineage: str, version: int, tensors: NamedTensors, *, tick: Callable[[], None], is_last: bool = False
    ) -> Published | None:
        if version not in self._held:
            # Copies: what the engine gathers is good until its next update.
            self._held[version] = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in tensors]
        due = version if is_last else max(min(self._held), version - self._fixed_lag)
        if due == self._published:
            return None
        for gone in [held for held in self._held if held < due]:
            del self._held[gone]
        self._published = due
        return self._plane.publish(lineage, due, iter(self._held[due]), tick=tick, is_last=is_last)

    def stats(self) -> dict[str, float]:
        return self._plane.stats()
