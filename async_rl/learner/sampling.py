"""Sampling with the learner's devices while the learner waits (``learner.generate``), as the learner sees it.

``Trainer`` wraps its waits in ``IdleSampling.while_waiting``. There the engine lets every rank's ``RankSampler`` sample
with the policy's weights. Whatever the engine computes next ends that first. ``async_rl.colocated`` implements
``RankSampler`` with the loop and the engine of a generator, because this folder does not import those. To the queue
each rank is a generator of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from async_rl.config.config import Config
from async_rl.queue.messages import TakenGroup

if TYPE_CHECKING:
    from torch import Tensor, device

    from async_rl.learner.loop.publishing import Published

_ID_PREFIX = "learner-"


def sampler_id(rank: int, lineage: str) -> str:
    """Return the id by which the queue knows ``rank`` of the learner's start ``lineage`` as a generator."""
    return f"{_ID_PREFIX}{rank}-{lineage}"


@dataclass(frozen=True, slots=True)
class SamplingOrder:
    """What a rank needs to know to sample.

    Attributes:
        address: the queue server's, ``tcp://HOST:PORT``.
        lineage: the learner's lineage.
        version: the version of the policy's weights.
        digest: the digest with which this version was announced.
    """

    address: str
    lineage: str
    version: int
    digest: str


class RankSampler(Protocol):
    """A generator on one rank of the learner, which uses the rank's device when the rank does not."""

    @property
    def busy_s(self) -> float:
        """Seconds in which it used the device, since it was made."""
        ...

    def resume(self, order: SamplingOrder, weights: Iterable[tuple[str, Tensor]] | None) -> None:
        """Go on sampling, in the background. ``weights`` are those of a new version, by their Hugging Face names.

        They are read at once, to the end, and must stay valid and unchanged until ``pause``. None: the version is the
        one of the last call.
        """
        ...

    def pause(self) -> None:
        """Return when the present decode step, if there is one, is done. No other begins before ``resume``."""
        ...

    def check(self) -> None:
        """Raise the error with which sampling has ended, if it has."""
        ...

    def close(self) -> None:
        """Give the leases back to the queue, and end."""
        ...


class MakeSampler(Protocol):
    """Makes the ``RankSampler`` of one rank, before the engine is loaded.

    ``report`` is called with the text of an error that ends sampling on this rank.
    """

    def __call__(
        self, config: Config, *, rank: int, device: device, report: Callable[[str], object]
    ) -> RankSampler: ...


class SamplingEngine(Protocol):
    """The methods of an engine that let the ranks sample. ``FsdpEngine`` implements them."""

    def sample(self, order: SamplingOrder) -> None:
        """Let every rank sample with the present weights, which are those of ``order``, until its next command."""
        ...

    def stop_sampling(self) -> float:
        """Let rank 0 sample no more. Return the seconds in which its device has sampled so far."""
        ...


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
        own = [item.group for item in taken if item.group.generator_id.startswith(_ID_PREFIX)]
        tokens = sum(int(s.loss_mask.sum()) for group in own for r in group.rollouts for s in r.sequences)
        used, self._used = self._used, 0.0  # a step that does not wait does not sample
        return {
            "learner_sampled/groups": len(own),
            "learner_sampled/tokens": tokens,
            "idle/learner_used": used,
        }
