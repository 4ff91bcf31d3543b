"""The table of transports, and the protocols that a transport implements. No torch.

A transport is a sender at the learner and a receiver at each generator. Collectives (``nccl``, ``gloo``) send a version
to all members at once; a pull transport (``tcp``) lets each member fetch it. The publisher uses the transport that
``choose_transport`` names, and ``PULL`` for every member that can't use a collective now. To add a transport, write a
sender and a receiver, and add a row to ``TRANSPORTS``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
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
    """One version to some members, until ``deadline`` (monotonic clock). Its bytes are kept until the attempt ends.

    ``epoch`` is a collective's communicator number. ``build``: create the communicator first. ``skips_prepare``:
    ``PrepareCollective`` was not sent.
    """

    attempt: int
    staged: StagedVersion
    members: tuple[Member, ...]
    deadline: float
    epoch: int = 0
    build: bool = False
    skips_prepare: bool = False


class TransportSender(Protocol):
    """The learner's side of a transport. Only the publisher's thread calls it; no method waits."""

    def deliver(self, delivery: Delivery, send: Send) -> None:
        """Send each member its instructions, and start."""
        ...

    def end(self, attempt: int, *, intact: bool) -> None:
        """End an attempt: no answer of a member is awaited any more. ``intact``: every member got the version."""
        ...

    def close(self, timeout_s: float) -> None:
        """Release everything. Wait at most ``timeout_s`` for transfers in progress."""
        ...


@dataclass(frozen=True, slots=True)
class PullStats:
    """``delta_bytes`` and ``delta_s``: size of the newest delta and the time to compute it; 0 without one."""

    delta_bytes: int = 0
    delta_s: float = 0.0
    server_starts: int = 0


class PullSender(TransportSender, Protocol):
    """The learner's side of a transport with which each member pulls. ``Delivery.members`` has one member."""

    stats: PullStats

    def publish(self, staged: StagedVersion, *, has_members: bool) -> None:
        """Prepare pulls of this version: compute deltas. Called only if all members pull every version."""
        ...

    def can_offer(self, staged: StagedVersion, member: Member) -> bool:
        """Whether to offer ``member`` this version, the newest, now. If not, ask again later."""
        ...

    def poll(self) -> None:
        """Handle pending events. Called when a socket that the sender registered with the poller is readable."""
        ...


MessageT = TypeVar("MessageT", covariant=True)
OrderT = TypeVar("OrderT", contravariant=True)


@dataclass(frozen=True, slots=True)
class ReceiveOrder(Generic[MessageT]):
    """Receive the version of ``manifest`` until ``deadline`` (monotonic clock).

    ``message`` is what the publisher sent, ``host`` where it is reached, ``local_host`` an address of this machine at
    which other generators reach it.
    """

    message: MessageT
    manifest: Manifest
    host: str
    local_host: str
    deadline: float


@dataclass(frozen=True, slots=True)
class ReceiveResult:
    """The result of a received version. ``num_corrupt`` buckets were received again, because they did not match."""

    wire_bytes: int
    num_corrupt: int = 0


class TransportReceiver(Protocol, Generic[OrderT]):
    """The generator's side of a transport. Only the transfer thread calls it."""

    def receive(self, order: OrderT, buffer: ReceiveBuffer, buffers: ReceiveBuffers) -> ReceiveResult:
        """Receive the version into ``buffer``, whole and verified. ``buffers`` may hold the base of a delta.

        Call the fault point ``generator.receiving`` after each bucket; tests kill generators there.

        Raises:
            CorruptWeightsError: the received bytes do not match their digests.
            WeightsError: the version could not be received.
        """
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


class JobThread:
    """A daemon thread that runs jobs one after the other. Jobs report their own results and raise nothing."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self, last: Callable[[], None], timeout_s: float) -> None:
        """Run the remaining jobs, then ``last``, and end. Wait at most ``timeout_s`` for the end."""
        self._jobs.put(last)
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


@dataclass(frozen=True, slots=True)
class CollectiveSettings:
    """The arguments of a collective's sender.

    Args:
        transport: the name of the collective.
        bind_host: where rendezvous stores listen; may be a wildcard.
        local_host: an address of this machine at which generators reach the stores and the collectives.
        stall_s: bound on each collective.
        chunk_bytes: bytes of one collective, at most.
        device: the learner's CUDA device.
        on_sent: called in the sender's thread after every send, with the seconds that it took and the error, if any.
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
    """The arguments of a pull transport's sender.

    Args:
        bind_host: where it listens; may be a wildcard.
        is_encrypted: encrypt and authenticate the bytes, with keys that travel over the control channel.
        has_deltas: send the difference to the version before.
        poller: the publisher's; the sender registers its sockets there.
    """

    bind_host: str
    is_encrypted: bool
    has_deltas: bool
    poller: zmq.Poller


@dataclass(frozen=True, slots=True)
class Transport:
    """One row of the table.

    ``needs_cuda``: learner and generator each need a CUDA device. ``needs_trust``: it authenticates nobody, so the
    network must be trusted. ``make_receiver`` takes the generator's CUDA device, if it has one.
    """

    name: TransportName
    needs_cuda: bool
    needs_trust: bool
    make_receiver: Callable[[str | None], TransportReceiver[ReceiveOrder[Any]]]


@dataclass(frozen=True, slots=True)
class CollectiveTransport(Transport):
    """A transport that sends a version to all members at once."""

    make_sender: Callable[[CollectiveSettings], TransportSender]
    max_chunk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PullTransport(Transport):
    """A transport with which each member pulls."""

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
    """Return the names of the collectives that a generator can take part in."""
    return [
        name
        for name, transport in TRANSPORTS.items()
        if isinstance(transport, CollectiveTransport) and (has_cuda or not transport.needs_cuda)
    ]


def choose_transport(setting: str, *, has_cuda: bool, is_trusted: bool) -> TransportName:
    """Return the transport that ``weights.transport`` means here.

    Args:
        has_cuda: the learner has a CUDA device.
        is_trusted: everything is on one host, or the user trusts the network.
    """
    if setting in TRANSPORTS:
        return TRANSPORTS[setting].name
    if setting != "auto":
        raise ValueError(
            f"weights.transport: expected 'auto' or one of {list(TRANSPORTS)}, got {setting!r}; correct it"
        )
    usable = (t for t in TRANSPORTS.values() if (has_cuda or not t.needs_cuda) and (is_trusted or not t.needs_trust))
    return next(usable).name
