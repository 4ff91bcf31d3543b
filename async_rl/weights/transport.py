"""The table of transports that carry weights, and the protocols that a transport implements. No torch.

A transport has a sender at the learner and a receiver at each generator. A collective transport (``nccl``, ``gloo``)
sends a version to all members at once. With the pull transport (``tcp``) each member fetches the version on its own.
The publisher uses the transport that ``choose_transport`` returns, and ``PULL`` for every member that can't use a
collective now. To add a transport, write a sender and a receiver, and add an entry to ``TRANSPORTS``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from async_rl.weights import control
from async_rl.weights.manifest import Manifest

if TYPE_CHECKING:
    import zmq

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
    """The learner's side of a transport. Only the publisher's thread calls it, and ``deliver`` and ``end`` return at
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

    def poll(self, ready: Mapping[Any, int]) -> None:
        """Handle pending events. ``ready`` is what the publisher's poller returned."""
        ...


MessageT = TypeVar("MessageT", covariant=True)
OrderT = TypeVar("OrderT", contravariant=True)


@dataclass(frozen=True, slots=True)
class ReceiveOrder(Generic[MessageT]):
    """An order to a transport's receiver: receive one version.

    Attributes:
        message: the publisher's message that offered the version.
        manifest: the version's manifest.
        host: the publisher's address.
        local_host: an address of this machine at which other generators reach it.
        deadline: when the transfer must have ended, on the monotonic clock.
    """

    message: MessageT
    manifest: Manifest
    host: str
    local_host: str
    deadline: float


@dataclass(frozen=True, slots=True)
class ReceiveResult:
    """What a successful transfer took.

    Attributes:
        wire_bytes: bytes that were transferred.
        num_corrupt: buckets that were transferred again, because they did not match their digests.
    """

    wire_bytes: int
    num_corrupt: int = 0


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


class JobThread:
    """A daemon thread that runs functions one after the other. They must handle their own errors: one that raises ends
    it.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Add a function to those that the thread will run."""
        self._jobs.put(job)

    def close(self, last: Callable[[], None], timeout_s: float) -> None:
        """Run the functions that were submitted, then ``last``, and end the thread. Wait at most ``timeout_s`` for
        that.
        """
        self._jobs.put(last)
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


@dataclass(frozen=True, slots=True)
class CollectiveSettings:
    """The settings of a collective's sender.

    Attributes:
        transport: name of the collective.
        bind_host: the address at which the rendezvous stores listen. It may be a wildcard.
        local_host: an address of this machine at which generators reach the stores and the collectives.
        stall_s: how long one collective may take.
        chunk_bytes: largest number of bytes in one collective.
        device: the learner's CUDA device. None if there is no CUDA device.
        on_sent: called in the sender's thread after every transfer with the seconds it took, and its error or None.
    """

    transport: TransportName
    bind_host: str
    local_host: str
    stall_s: float
    chunk_bytes: int
    device: str | None
    on_sent: Callable[[Delivery, float, Exception | None], None]


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
        max_chunk_bytes: upper limit of ``CollectiveSettings.chunk_bytes``. None if there is no limit.
    """

    make_sender: Callable[[CollectiveSettings], TransportSender]
    max_chunk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PullTransport(Transport):
    """A transport with which each member fetches a version on its own. ``make_sender`` creates the learner's side."""

    make_sender: Callable[[PullSettings], PullSender]


# Imported when they are first used: the collectives load torch.


def _collective_sender(settings: CollectiveSettings) -> TransportSender:
    from async_rl.weights.collective import CollectiveSender

    return CollectiveSender(settings)


def _collective_receiver(device: str | None) -> TransportReceiver[ReceiveOrder[control.StartCollective]]:
    from async_rl.weights.collective import CollectiveReceiver

    return CollectiveReceiver(device)


def _stream_sender(settings: PullSettings) -> PullSender:
    from async_rl.weights.tcp.sender import StreamSender

    return StreamSender(settings)


def _stream_receiver(_: str | None) -> TransportReceiver[ReceiveOrder[control.Pull]]:
    from async_rl.weights.tcp.receiver import StreamReceiver

    return StreamReceiver()


_GLOO_CHUNK_BYTES = 8 << 20
"""A chunk is digested while the next one travels. Smaller chunks cost more to agree on than that saves."""

PULL = PullTransport(
    "tcp", needs_cuda=False, needs_trust=False, make_receiver=_stream_receiver, make_sender=_stream_sender
)
_NCCL = CollectiveTransport(
    "nccl", needs_cuda=True, needs_trust=True, make_receiver=_collective_receiver, make_sender=_collective_sender
)
_GLOO = CollectiveTransport(
    "gloo", needs_cuda=False, needs_trust=True, make_receiver=_collective_receiver, make_sender=_collective_sender,
    max_chunk_bytes=_GLOO_CHUNK_BYTES,
)  # fmt: skip
TRANSPORTS: Mapping[str, Transport] = {transport.name: transport for transport in (_NCCL, _GLOO, PULL)}
"""In order of preference: ``auto`` takes the first whose needs are met."""


def collectives(*, has_cuda: bool) -> list[str]:
    """Return the names of the collective transports that a machine with or without CUDA can take part in."""
    return [
        name
        for name, transport in TRANSPORTS.items()
        if isinstance(transport, CollectiveTransport) and (has_cuda or not transport.needs_cuda)
    ]


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
