"""The protocols that a transport of weights implements, and their records. No torch.

A transport has a sender at the learner and a receiver at each generator. A collective transport (``nccl``, ``gloo``)
sends a version to all members at once. With the pull transport (``tcp``) each member fetches the version on its own.
``channel.transports`` has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from async_rl.weights import control
from async_rl.weights.manifest import Manifest
from async_rl.weights.receive_buffers import ReceiveBuffer, ReceiveBuffers
from async_rl.weights.scheduler import Member

if TYPE_CHECKING:
    import zmq

    from async_rl.weights.staging import StagedVersion

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
    """

    attempt: int
    staged: StagedVersion
    members: tuple[Member, ...]
    deadline: float
    epoch: int = 0
    build: bool = False


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
        peer_faults: how often a generator that served others failed.
        server_starts: how often the stream server process was started.
    """

    delta_bytes: int = 0
    delta_s: float = 0.0
    server_starts: int = 0
    peer_faults: int = 0


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
        again later. If so, ``deliver`` follows.
        """
        ...

    def mark_claimed(self, member: Member, pulled_bytes: int) -> None:
        """Record how many bytes ``member`` says that it has pulled since its start.

        This counts only if members pull from each other: nobody else knows then.
        """
        ...

    def mark_peer_failed(self, member: Member, failure: control.PeerFailed) -> None:
        """Record that the generator from which ``member`` pulled did not send it everything."""
        ...


MessageT = TypeVar("MessageT", covariant=True)
OrderT = TypeVar("OrderT", contravariant=True)


def _ignore(*_: object) -> None:
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
        on_peer_failed: a pull calls it when it goes on without the peer of the offer, with the reason and whether the
            peer is to blame (``PeerFailed``).
    """

    message: MessageT
    manifest: Manifest
    host: str
    local_host: str
    deadline: float
    on_bytes: Callable[[int], None] = _ignore
    to_open: str = ""
    on_peer_failed: Callable[[str, bool], None] = _ignore


@dataclass(frozen=True, slots=True)
class ReceiveResult:
    """What a successful transfer took.

    Attributes:
        wire_bytes: bytes that were transferred.
        num_corrupt: buckets that were transferred again, because they did not match their digests.
        verify_s: seconds of the transfer that computing digests took.
        peer_bytes: those of ``wire_bytes`` that came from another generator.
    """

    wire_bytes: int
    num_corrupt: int = 0
    verify_s: float = 0.0
    peer_bytes: int = 0


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
        host: the address at which rank 0 listens, and at which generators reach it.
        stall_s: how long one collective may take.
        chunk_bytes: largest number of bytes in one collective.
        device: the learner's CUDA device. None if there is no CUDA device.
        poller: the publisher's poller, with which the sender registers its sockets.
        on_sent: called after every delivery, with the seconds that it took, its error ("" if there was none), and
            whether the members were told of it.
    """

    transport: str
    host: str
    stall_s: float
    chunk_bytes: int
    device: str | None
    poller: zmq.Poller
    on_sent: Callable[[Delivery, float, str, bool], None]


@dataclass(frozen=True, slots=True)
class PullSettings:
    """The settings of a pull transport's sender.

    Attributes:
        host: the address at which it listens.
        ports: it listens at the first of these that is free. None: any free port.
        is_encrypted: encrypt and authenticate the bytes. The keys travel over the control channel.
        has_deltas: send only the difference to members that hold the previous version.
        poller: the publisher's poller, with which the sender registers its sockets.
        on_pulled: called with a member's id, the attempt of its pull, and the bytes of the pull that were sent so far.
        members: the members at present, by id. None: every member pulls from the learner, none from another.
    """

    host: str
    ports: Sequence[int] | None
    is_encrypted: bool
    has_deltas: bool
    poller: zmq.Poller
    on_pulled: Callable[[bytes, int, int], None]
    members: Mapping[bytes, Member] | None = None
