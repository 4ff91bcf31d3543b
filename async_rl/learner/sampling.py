"""Sampling with the learner's devices while the learner waits (``learner.generate``), as the learner sees it.

While ``loop.idle_sampling`` waits, the engine lets every rank's ``RankSampler`` sample with the policy's weights.
Whatever the engine computes next ends that first. ``async_rl.colocated`` implements ``RankSampler`` with the loop and
the engine of a generator, because this folder does not import those. To the queue each rank is a generator of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

ID_PREFIX = "learner-"


def sampler_id(rank: int, lineage: str) -> str:
    """Return the id by which the queue knows ``rank`` of the learner's start ``lineage`` as a generator."""
    return f"{ID_PREFIX}{rank}-{lineage}"


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


MakeSampler = Callable[..., RankSampler]
"""(config, *, rank, device, report) -> the sampler of one rank, before the engine is loaded. ``report`` is called with
the text of an error that ends sampling on this rank."""


class SamplingEngine(Protocol):
    """The methods of an engine that let the ranks sample. ``FsdpEngine`` implements them."""

    def sample(self, order: SamplingOrder) -> None:
        """Let every rank sample with the present weights, which are those of ``order``, until its next command."""
        ...

    def stop_sampling(self) -> float:
        """Let rank 0 sample no more. Return the seconds in which its device has sampled so far."""
        ...
