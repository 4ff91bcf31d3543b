"""The table of communication libraries, each of them a collective transport. No torch until a library is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from async_rl.errors import WeightsError
from async_rl.process.fault_points import substitute
from async_rl.weights.control import CollectiveOffer

if TYPE_CHECKING:
    from async_rl.weights.collective.library import Endpoint, Library

TransportName = Literal["nccl", "gloo", "tcp"]
SUBSTITUTE = "ASYNC_RL_COLLECTIVE_LIBRARY"
"""A test's environment variable: ``MODULE:CLASS`` of a class that takes the place of every library."""

_GLOO_CHUNK_BYTES = 8 << 20
"""A chunk is digested while the next one travels. Smaller chunks cost more to agree on than that saves."""
_GLOO_RANKS = 32
"""Gloo connects each rank with each other one. With 166 ranks on one machine it did not return, and what a rank can't
leave ends its generator."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A transport that sends a version to all members at once. It authenticates nobody.

    Attributes:
        name: its name in ``weights.transport``.
        needs_cuda: learner and generator each need a CUDA device.
        make_library: creates one rank's library object. It runs in the broadcaster, and where a rank receives.
        offer: returns what a process with this CUDA device (None: without one) can offer. None if it can't take part.
        max_chunk_bytes: upper limit of ``CollectiveSettings.chunk_bytes``. None if there is no limit.
        max_ranks: most ranks of generators in one collective. None if there is no limit.
    """

    name: TransportName
    needs_cuda: bool
    make_library: Callable[[Endpoint], Library]
    offer: Callable[[str | None], CollectiveOffer | None]
    max_chunk_bytes: int | None = None
    max_ranks: int | None = None


def _gloo_library(endpoint: Endpoint) -> Library:
    from async_rl.weights.collective.gloo import GlooLibrary

    return GlooLibrary(endpoint)


def _nccl_library(endpoint: Endpoint) -> Library:
    from async_rl.weights.collective.nccl import NcclLibrary

    return NcclLibrary(endpoint)


def _nccl_offer(device: str | None) -> CollectiveOffer | None:
    if device is None:
        return None
    from async_rl.weights.collective import nccl

    return nccl.offer(device)


_NCCL = Collective("nccl", needs_cuda=True, make_library=_nccl_library, offer=_nccl_offer)
_GLOO = Collective(
    "gloo", needs_cuda=False, make_library=_gloo_library, offer=lambda _: CollectiveOffer("gloo"),
    max_chunk_bytes=_GLOO_CHUNK_BYTES, max_ranks=_GLOO_RANKS,
)  # fmt: skip
COLLECTIVES: Mapping[str, Collective] = {row.name: row for row in (_NCCL, _GLOO)}
"""In order of preference."""


def collectives(*, has_cuda: bool) -> list[str]:
    """Return the names of the collective transports that fit a machine with or without CUDA."""
    return [name for name, row in COLLECTIVES.items() if has_cuda or not row.needs_cuda]


def offers(device: str | None) -> list[CollectiveOffer]:
    """Return what a generator with this CUDA device (None: without one) can offer to the learner."""
    return [offer for row in COLLECTIVES.values() if (offer := row.offer(device)) is not None]


def make_library(transport: str, endpoint: Endpoint) -> Library:
    """Return a new library object of the collective ``transport``, not connected yet.

    Raises:
        WeightsError: the library is not installed, or ``transport`` is not a collective.
    """
    if (replacement := substitute(SUBSTITUTE)) is not None:
        return replacement(endpoint)
    if transport not in COLLECTIVES:
        raise WeightsError(
            f"expected a collective, one of {list(COLLECTIVES)}, got {transport!r}; this is a bug in async-rl, please "
            f"report it"
        )
    return COLLECTIVES[transport].make_library(endpoint)
