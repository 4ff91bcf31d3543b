"""The table of transports that carry weights, and the protocols that a transport implements. No torch.

A transport has a sender at the learner and a receiver at each generator. A collective transport (``nccl``, ``gloo``)
sends a version to all members at once. With the pull transport (``tcp``) each member fetches the version on its own.
The publisher uses the transport that ``choose_transport`` returns, and ``PULL`` for every member that can't use a
collective now. CONTRIBUTING.md says how to add a transport.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from async_rl.weights import control
from async_rl.weights.manifest import Manifest

if TYPE_CHECKING:
    import zmq

    from async_rl.weights.collective.library import Endpoint, Library
    from async_rl.weights.receive_worker import ReceiveBuffer, ReceiveBuffers
    from async_rl.weights.scheduler import Member
    from async_rl.weights.staging import StagedVersion

TransportName = Literal["nccl", "gloo", "tcp"]
Send = Callable[[bytes, control.PublisherMessage], None]
"""Sends a message to a member over the control channel."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """An order to a transport's sender: send one version to some members. The version's memory is kept until ``end``.

    Attributes:
        attempt: number of this collective or pull.
        staged: the version.
        members: the members that shall receive the version.
        deadline: when the transfer must have ended, on the monotonic clock.
        epoch: number of the communicator. Only for collectives.
        build: create the communicator first. Only for collectives.
        skips_prepare: the members have not got ``PrepareCollective``. Only for collectives.
    """

    attempt: int
    staged: StagedVersion
    members: tuple[Member, ...]
    deadline: float
    epoch: int = 0
    build: bool = False
    skips_prepare: bool = False


class TransportSender(Protocol):
    """The learner's side of a transport. Only the publisher's thread calls it. All methods but ``close`` return at
    once.
    """

    def deliver(self, delivery: Delivery, send: Send) -> None:
        """Send each member the message with which it receives the version, and start the transfer."""
        ...

    def end(self, attempt: int, *, intact: bool) -> None:
        """Release what the attempt used: every member has answered, or is gone.

        ``intact`` is false if the attempt's communicator can't be used again. It is always true for pulls.
        """
        ...

    def close(self, timeout_s: float) -> None:
        """Close all connections. Wait at most ``timeout_s`` for transfers in progress."""
        ...

    def poll(self, ready: Mapping[Any, int]) -> None:
        """Handle pending events. Called in every turn of the publisher's loop. ``ready`` is from its poller."""
        ...


class BroadcastSender(TransportSender, Protocol):
    """The learner's side of a transport that sends to all members at once."""

    @property
    def is_up(self) -> bool:
        """Whether a delivery can begin. While it is False, members pull."""
        ...


@dataclass(frozen=True, slots=True)
class PullStats:
    """Counters of the pull transport's sender.

    Attributes:
        delta_bytes: size of the newest delta, in bytes. 0 if there is none.
        delta_s: seconds that the newest delta took to compute. 0 if there is none.
        server_starts: how often the stream server process was started.
    """

    delta_bytes: int = 0
    delta_s: float = 0.0
    server_starts: int = 0


class PullSender(TransportSender, Protocol):
    """The learner's side of a transport from which each member pulls. ``Delivery.members`` has exactly one member."""

    stats: PullStats
    port: int
    """The port to which members connect."""

    def publish(self, staged: StagedVersion, *, has_members: bool) -> None:
        """Compute the delta from the previous version to this version, if there are members that could use it.

        Called only in runs in which members pull every version.
        """
        ...

    def can_offer(self, staged: StagedVersion, member: Member) -> bool:
        """Return whether ``member`` can be offered ``staged``, the newest version, now. If not, the publisher asks
        again later.
        """
        ...


MessageT = TypeVar("MessageT", covariant=True)
OrderT = TypeVar("OrderT", contravariant=True)


def _ignore(_: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class ReceiveOrder(Generic[MessageT]):
    """An order to a transport's receiver: receive one version.

    Attributes:
        message: the publisher's message that offered the version.
        manifest: the version's manifest.
        host: the publisher's address.
        local_host: an address of this machine at which other generators reach it.
        deadline: when the transfer must have ended, on the monotonic clock. A pull must have made progress by then: its
            deadline moves with every piece that arrives.
        on_bytes: a pull calls it with the number of bytes that have arrived since the last call.
        to_open: what to open if a firewall drops a pull's packets (``control.ports_to_open``).
    """

    message: MessageT
    manifest: Manifest
    host: str
    local_host: str
    deadline: float
    on_bytes: Callable[[int], None] = _ignore
    to_open: str = ""


@dataclass(frozen=True, slots=True)
class ReceiveResult:
    """What a successful transfer took.

    Attributes:
        wire_bytes: bytes that were transferred.
        num_corrupt: buckets that were transferred again, because they did not match their digests.
        verify_s: seconds of the transfer that computing digests took.
    """

    wire_bytes: int
    num_corrupt: int = 0
    verify_s: float = 0.0


class TransportReceiver(Protocol, Generic[OrderT]):
    """The generator's side of a transport. Only the transfer thread calls it."""

    def receive(self, order: OrderT, buffer: ReceiveBuffer, buffers: ReceiveBuffers) -> ReceiveResult:
        """Receive the version of ``order`` into ``buffer`` and verify it. ``buffers`` may hold an older version for
        deltas.

        Call the fault point ``generator.receiving`` after each bucket. Tests kill generators there.

        Raises:
            CorruptWeightsError: the received bytes do not match their digests.
            WeightsError: the version could not be received.
        """
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


@dataclass(frozen=True, slots=True)
class CollectiveSettings:
    """The settings of a collective's sender.

    Attributes:
        transport: name of the collective.
        bind_host: the address at which rank 0 listens. It may be a wildcard.
        local_host: an address of this machine at which generators reach rank 0.
        stall_s: how long one collective may take.
        chunk_bytes: largest number of bytes in one collective.
        device: the learner's CUDA device. None if there is no CUDA device.
        poller: the publisher's poller, with which the sender registers its sockets.
        on_sent: called after every delivery, with the seconds that it took, its error ("" if there was none), and
            whether the members were told of it.
    """

    transport: TransportName
    bind_host: str
    local_host: str
    stall_s: float
    chunk_bytes: int
    device: str | None
    poller: zmq.Poller
    on_sent: Callable[[Delivery, float, str, bool], None]


@dataclass(frozen=True, slots=True)
class PullSettings:
    """The settings of a pull transport's sender.

    Attributes:
        bind_host: the address at which it listens. It may be a wildcard.
        ports: it listens at the first of these that is free. None: any free port.
        is_encrypted: encrypt and authenticate the bytes. The keys travel over the control channel.
        has_deltas: send only the difference to members that hold the previous version.
        poller: the publisher's poller, with which the sender registers its sockets.
    """

    bind_host: str
    ports: Sequence[int] | None
    is_encrypted: bool
    has_deltas: bool
    poller: zmq.Poller


@dataclass(frozen=True, slots=True)
class Transport:
    """An entry of the table of transports.

    Attributes:
        name: name of the transport, as in ``weights.transport``.
        needs_cuda: learner and generator each need a CUDA device.
        needs_trust: the transport authenticates nobody, so the network must be trusted.
        make_receiver: creates the generator's side. Its argument is the generator's CUDA device, or None.
    """

    name: TransportName
    needs_cuda: bool
    needs_trust: bool
    make_receiver: Callable[[str | None], TransportReceiver[ReceiveOrder[Any]]]


@dataclass(frozen=True, slots=True)
class CollectiveTransport(Transport):
    """A transport that sends a version to all members at once.

    Attributes:
        make_sender: creates the learner's side.
        make_library: creates one rank's library object. It runs in the broadcaster, and where a rank receives.
        offer: returns what a process with this CUDA device (None: without one) can offer. None if it can't take part.
        max_chunk_bytes: upper limit of ``CollectiveSettings.chunk_bytes``. None if there is no limit.
        max_ranks: most ranks of generators in one collective. None if there is no limit.
    """

    make_sender: Callable[[CollectiveSettings], BroadcastSender]
    make_library: Callable[[Endpoint], Library]
    offer: Callable[[str | None], control.CollectiveOffer | None]
    max_chunk_bytes: int | None = None
    max_ranks: int | None = None


@dataclass(frozen=True, slots=True)
class PullTransport(Transport):
    """A transport with which each member fetches a version on its own. ``make_sender`` creates the learner's side."""

    make_sender: Callable[[PullSettings], PullSender]


# Imported when they are first used: receivers of collectives load torch.


def _collective_sender(settings: CollectiveSettings) -> BroadcastSender:
    from async_rl.weights.collective.sender import CollectiveSender

    return CollectiveSender(settings)


def _collective_receiver(device: str | None) -> TransportReceiver[ReceiveOrder[control.StartCollective]]:
    from async_rl.weights.collective.receiver import CollectiveReceiver

    return CollectiveReceiver(device)


def _gloo_library(endpoint: Endpoint) -> Library:
    from async_rl.weights.collective.gloo import GlooLibrary

    return GlooLibrary(endpoint)


def _nccl_library(endpoint: Endpoint) -> Library:
    from async_rl.weights.collective.nccl import NcclLibrary

    return NcclLibrary(endpoint)


def _nccl_offer(device: str | None) -> control.CollectiveOffer | None:
    if device is None:
        return None
    from async_rl.weights.collective import nccl

    return nccl.offer(device)


def _stream_sender(settings: PullSettings) -> PullSender:
    from async_rl.weights.tcp.sender import StreamSender

    return StreamSender(settings)


def _stream_receiver(_: str | None) -> TransportReceiver[ReceiveOrder[control.Pull]]:
    from async_rl.weights.tcp.receiver import StreamReceiver

    return StreamReceiver()


_GLOO_CHUNK_BYTES = 8 << 20
"""A chunk is digested while the next one travels. Smaller chunks cost more to agree on than that saves."""
_GLOO_RANKS = 32
"""Gloo connects each rank with each other one. With 166 ranks on one machine it did not return, and what a rank can't
leave ends its generator."""

PULL = PullTransport(
    "tcp", needs_cuda=False, needs_trust=False, make_receiver=_stream_receiver, make_sender=_stream_sender
)
_NCCL = CollectiveTransport(
    "nccl", needs_cuda=True, needs_trust=True, make_receiver=_collective_receiver, make_sender=_collective_sender,
    make_library=_nccl_library, offer=_nccl_offer,
)  # fmt: skip
_GLOO = CollectiveTransport(
    "gloo", needs_cuda=False, needs_trust=True, make_receiver=_collective_receiver, make_sender=_collective_sender,
    make_library=_gloo_library, offer=lambda _: control.CollectiveOffer("gloo"), max_chunk_bytes=_GLOO_CHUNK_BYTES,
    max_ranks=_GLOO_RANKS,
)  # fmt: skip
TRANSPORTS: Mapping[str, Transport] = {transport.name: transport for transport in (_NCCL, _GLOO, PULL)}
"""In order of preference: ``auto`` takes the first whose needs are met."""


def collectives(*, has_cuda: bool) -> list[str]:
    """Return the names of the collective transports that fit a machine with or without CUDA."""
    return [
        name
        for name, transport in TRANSPORTS.items()
        if isinstance(transport, CollectiveTransport) and (has_cuda or not transport.needs_cuda)
    ]


def offers(device: str | None) -> list[control.CollectiveOffer]:
    """Return what a generator with this CUDA device (None: without one) can offer to the learner."""
    rows = [transport for transport in TRANSPORTS.values() if isinstance(transport, CollectiveTransport)]
    return [offer for row in rows if (offer := row.offer(device)) is not None]


def obstacle(own: control.CollectiveOffer, offered: Sequence[control.CollectiveOffer], taken: Collection[str]) -> str:
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
        return TRANSPORTS[setting].name
    if setting != "auto":
        raise ValueError(
            f"weights.transport: expected 'auto' or one of {list(TRANSPORTS)}, got {setting!r}; correct it"
        )
    usable = (t for t in TRANSPORTS.values() if (has_cuda or not t.needs_cuda) and (is_trusted or not t.needs_trust))
    return PULL.name if has_ports else next(usable).name
