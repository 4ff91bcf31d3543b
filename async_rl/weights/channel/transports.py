"""The transports that carry weights: which there are, which one a run uses, and both sides of each. No torch.

The publisher uses the transport that ``choose_transport`` returns, and ``PULL`` for every member that can't use a
collective now. The modules of a transport are imported when they are first used: receivers of collectives load torch.
CONTRIBUTING.md says how to add a transport.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from async_rl.weights.collective.libraries import COLLECTIVES, TransportName
from async_rl.weights.control import CollectiveOffer
from async_rl.weights.tcp.arrivals import Arrivals
from async_rl.weights.transport import (
    BroadcastSender,
    CollectiveSettings,
    PullSender,
    PullSettings,
    ReceiveOrder,
    TransportReceiver,
)

PULL: TransportName = "tcp"
TRANSPORTS: Mapping[str, TransportName] = {**{name: row.name for name, row in COLLECTIVES.items()}, PULL: PULL}
"""The transports by name, in order of preference: ``auto`` takes the first whose needs are met."""


def collective_sender(settings: CollectiveSettings) -> BroadcastSender:
    """Return the learner's side of the collective ``settings.transport``."""
    from async_rl.weights.collective.sender import CollectiveSender

    return CollectiveSender(settings)


def pull_sender(settings: PullSettings) -> PullSender:
    """Return the learner's side of ``PULL``."""
    from async_rl.weights.tcp.sender import StreamSender

    return StreamSender(settings)


def make_receiver(
    transport: str, device: str | None, arrivals: Arrivals | None = None
) -> TransportReceiver[ReceiveOrder[Any]]:
    """Return the generator's side of ``transport``, on this CUDA device. None: without one. What it pulls is in
    ``arrivals``, for other generators.
    """
    if transport in COLLECTIVES:
        from async_rl.weights.collective.receiver import CollectiveReceiver

        return CollectiveReceiver(device)
    from async_rl.weights.tcp.receiver import StreamReceiver

    return StreamReceiver(arrivals or Arrivals())


def obstacle(own: CollectiveOffer, offered: Sequence[CollectiveOffer], taken: Collection[str]) -> str:
    """Return why a generator can't take part in the learner's collective. Empty if it can.

    Args:
        own: the learner's own offer.
        offered: what the generator offers.
        taken: ids of the devices of the other generators.
    """
    theirs = next((offer for offer in offered if offer.name == own.name), None)
    if theirs is None:
        return f"it can't use {own.name}, or does not trust the network"
    if theirs.version != own.version:
        return f"its version of {own.name} is {theirs.version}, the learner's {own.version}"
    if shared := {*own.devices, *taken} & {*theirs.devices}:
        return f"it shares the device {min(shared)} with the learner or with another generator"
    return ""


def choose_transport(setting: str, *, has_cuda: bool, is_trusted: bool, has_ports: bool = False) -> TransportName:
    """Return the transport of this run. It is ``setting`` unless that is ``auto``.

    Args:
        setting: the value of ``weights.transport``.
        has_cuda: the learner has a CUDA device.
        is_trusted: everything is on one host, or the user trusts the network.
        has_ports: ``weights.port`` is set. Collectives choose their own ports, so ``auto`` takes none of them.

    Raises:
        ValueError: ``setting`` is not a transport's name.
    """
    if setting in TRANSPORTS:
        return TRANSPORTS[setting]
    if setting != "auto":
        raise ValueError(
            f"weights.transport: expected 'auto' or one of {list(TRANSPORTS)}, got {setting!r}; correct it"
        )
    for row in COLLECTIVES.values():  # they authenticate nobody
        if is_trusted and not has_ports and (has_cuda or not row.needs_cuda):
            return row.name
    return PULL
