"""The control channel between the learner's publisher and the generators' receivers: messages and sockets.

The weights themselves are not sent over this channel. A receiver sends ``Join``, then ``Heartbeat`` every second. The
publisher answers each with ``Ping``, or with ``NotMember`` if it does not know the sender. A version is sent in one of
two ways:

- by a collective: ``PrepareCollective`` -> ``Ready`` -> ``StartCollective`` -> (broadcast) -> ``Ack`` or ``Failed``;
- by a pull: ``Pull`` -> (the generator fetches the version) -> ``Ack`` or ``Failed``.

An epoch is the number of a communicator, which is kept while the members stay the same. Within an epoch an ``Ack`` also
means ``Ready`` for the next attempt, which then begins with ``StartCollective``.

A member that pulls from another member (``PeerOffer``) reports with ``PeerFailed`` that it goes on with the publisher.

One thread uses a socket at a time. Another thread wakes it with ``net.wake.Wake``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import zmq

from async_rl.errors import AddressError, WeightsError, WireError, naming
from async_rl.net.address import url_host
from async_rl.net.caller import Caller
from async_rl.net.codec import decode_as
from async_rl.net.keys import ClientKeys, ServerKeys
from async_rl.net.service import Peer, Service
from async_rl.net.wake import Wake
from async_rl.net.wire import Limits, encode
from async_rl.weights.peer_messages import PeerFailed, PeerOffer

HEARTBEAT_S = 1.0
_ANNOUNCED_S = 60.0
"""A learner listens, with a new key, before the queue announces it. So long another key is no trouble."""

TO_PUBLISHER_LIMITS = Limits(max_bytes=1 << 16, max_header_bytes=1 << 16, max_arrays=0, max_items=256, max_depth=5)
TO_MEMBER_LIMITS = Limits(max_bytes=64 << 20, max_arrays=0, max_depth=None)
"""Larger, because the queue announces the publisher's key. Each field is still checked against its type."""
_MAX_REASON = 2000
_LINGER_MS = 500
_HIGH_WATER_MARK = 64
"""Maximum number of messages of one member that wait in the socket's memory, in each direction."""
_MAX_RECEIVED = 1000


class CollectiveOffer(msgspec.Struct, frozen=True):
    """A collective that a process can take part in.

    Attributes:
        name: name of the transport.
        version: version of its library, which must be the same in all ranks. Empty if that does not matter.
        devices: unique ids of the CUDA devices of its ranks. No device can be used by two ranks.
    """

    name: str
    version: str = ""
    devices: list[str] = []


class Join(msgspec.Struct, frozen=True):
    """A generator asks the publisher for every version of the weights from now on.

    Attributes:
        generator_id: the id with which the generator is known to the queue.
        host: the address at which the generator's collectives listen.
        collectives: the collectives that the generator can take part in.
        num_ranks: how many ranks of a collective the generator needs: one for each worker of its engine.
        digest: digest of the newest weights that the generator holds. Empty if there are none.
        peer_port: the port of ``host`` at which it serves weights to other generators. 0: it serves none.
    """

    generator_id: str
    host: str
    collectives: list[CollectiveOffer]
    num_ranks: int
    digest: str
    peer_port: int = 0


class Heartbeat(msgspec.Struct, frozen=True):
    """A member tells the publisher that it is alive.

    ``pulled_bytes`` are the bytes that it has received by pulls since its start. The publisher itself counts those that
    it sends.
    """

    pulled_bytes: int


class Leave(msgspec.Struct, frozen=True):
    """A member tells the publisher that it ends, so that the publisher does not wait for it."""


class Ready(msgspec.Struct, frozen=True):
    """A member tells the publisher that it has allocated memory for the attempt, so that ``StartCollective`` may
    follow.
    """

    attempt: int


class Ack(msgspec.Struct, frozen=True):
    """A member tells the publisher that it holds the whole version and has verified it.

    Attributes:
        attempt: the collective or the pull that is answered.
        version: number of the version.
        digest: digest of the weights that the member holds.
        wire_bytes: bytes that were transferred. 0 if the member held the version before.
        num_corrupt: buckets that were transferred again, because they did not match their digests.
        verify_s: seconds of the transfer that computing digests took.
        peer_bytes: those of ``wire_bytes`` that came from another generator.
    """

    attempt: int
    version: int
    digest: str
    wire_bytes: int
    num_corrupt: int
    verify_s: float
    peer_bytes: int = 0


class Failed(msgspec.Struct, frozen=True):
    """A generator tells the publisher that it did not receive the offered version, and why.

    ``corrupt`` is true if the received bytes, or the offered digest, differ from what was announced.
    """

    attempt: int
    reason: str
    corrupt: bool


class Ping(msgspec.Struct, frozen=True):
    """The publisher tells a member that it is alive and knows this member."""


class NotMember(msgspec.Struct, frozen=True):
    """The publisher tells a sender that it is not a member. The sender must send ``Join``."""


class Dropped(msgspec.Struct, frozen=True):
    """The publisher tells a generator that it is no longer a member. It may send ``Join`` again after ``retry_s``."""

    reason: str
    retry_s: float


class PrepareCollective(msgspec.Struct, frozen=True):
    """The publisher asks a member to allocate memory for the version of ``manifest``, which a collective will bring.

    ``manifest`` has the fields of a ``Manifest``.
    """

    attempt: int
    manifest: Mapping[str, Any]


class StartCollective(msgspec.Struct, frozen=True):
    """The publisher tells a member to receive the version of ``PrepareCollective`` by a collective now.

    Attributes:
        attempt: number of this collective.
        epoch: number of the communicator.
        rank: the member's first rank. A member with several ranks has consecutive ones.
        size: number of ranks.
        unique_id: with this the ranks of a new communicator find each other (see ``collective.library``). Empty: use
            the existing communicator.
        stall_s: how long one collective may take.
        deadline_s: how long the whole version may take.
        chunk_bytes: the buckets are sent in chunks of this size.
        transport: name of the collective.
    """

    attempt: int
    epoch: int
    rank: int
    size: int
    unique_id: bytes
    stall_s: float
    deadline_s: float
    chunk_bytes: int
    transport: str


class Pull(msgspec.Struct, frozen=True):
    """The publisher offers a version to a member, which shall pull it from ``port`` of the publisher's host.

    A delta holds the difference of a bucket between two consecutive versions. A list of such deltas leads from the
    weights with digest ``base`` to this version.

    Attributes:
        attempt: number of this pull.
        transport: name of the transport.
        manifest: manifest of the version.
        port: port of the stream server.
        token: authenticates the pull.
        key: the stream is encrypted with this key. Empty: it is not encrypted.
        base: digest of the weights that the deltas start from. Empty: there are no deltas.
        delta_sizes: ``delta_sizes[l][b]`` is the size in bytes of the delta of bucket b in step l, or -1 if there is
            none. An empty list means that ``base`` is the digest of this version.
        deadline_s: how long the pull may take.
        peers: other generators to pull from first. Empty: pull from the publisher.
        serve_token: the member shall serve this version to those that send this token. Empty: to nobody.
        serve_key: encrypt what is served with this key. Empty: do not encrypt it.
    """

    attempt: int
    transport: str
    manifest: Mapping[str, Any]
    port: int
    token: bytes
    key: bytes
    base: str
    delta_sizes: list[list[int]]
    deadline_s: float
    peers: list[PeerOffer] = []
    serve_token: bytes = b""
    serve_key: bytes = b""


def seconds_until(deadline: float) -> float:
    """Return the time from now to ``deadline`` on the monotonic clock, at least 0."""
    return max(0.0, deadline - time.monotonic())


def channel(address: str, public_key: bytes | None) -> str:
    """Return the text of ``Announcement.channel``: the publisher's address, and its public key (z85) if there is
    one.
    """
    return address if public_key is None else f"{address} {public_key.decode()}"


def parse_channel(text: str) -> tuple[str, bytes | None]:
    """Return the publisher's address and public key that ``channel`` wrote. The key is None if there is none.

    The address is not checked.
    """
    address, _, key = text.partition(" ")
    return address, key.encode() if key else None


def keys_towards(server_key: bytes | None, keys: ClientKeys | None) -> ClientKeys | None:
    """Return a generator's ``keys`` for the connection to the publisher with ``server_key``. None if neither has keys.

    Raises:
        WeightsError: one side has keys and the other has none.
    """
    if server_key is not None and keys is not None:
        return keys.for_server(server_key)
    if server_key is not None or keys is not None:
        learner, generator = ("no keys", "keys") if server_key is None else ("keys", "none")
        raise WeightsError(
            f"the learner sends weights with {learner}, but this generator has {generator}; start all roles with "
            f"queue.keys, or all without"
        )
    return None


def ports_to_open(ports: Sequence[int], *, are_set: bool) -> str:
    """Return what to open if a firewall drops a generator's packets to the learner, as the text of a message.

    Args:
        ports: the ports of the learner to which generators connect for the weights.
        are_set: whether ``weights.port`` is set. If it is not, the learner has other ports at its next start.
    """
    if not are_set:
        return "set weights.port, and open its ports"
    return f"open the ports {' and '.join(map(str, ports))} (weights.port)" if ports else ""


MemberMessage = Join | Heartbeat | Leave | Ready | Ack | Failed | PeerFailed
PublisherMessage = Ping | NotMember | Dropped | PrepareCollective | StartCollective | Pull
TO_PUBLISHER: tuple[type[MemberMessage], ...] = (Join, Heartbeat, Leave, Ready, Ack, Failed, PeerFailed)
TO_MEMBER: tuple[type[PublisherMessage], ...] = (Ping, NotMember, Dropped, PrepareCollective, StartCollective, Pull)


def encode_message(message: MemberMessage | PublisherMessage) -> bytes:
    """Return the message as bytes. A long ``reason`` is cut off."""
    if isinstance(message, Failed | PeerFailed | Dropped):
        message = msgspec.structs.replace(message, reason=message.reason[:_MAX_REASON])
    return encode(type(message).__name__, message)


class MemberSocket:
    """The publisher's socket, over which it exchanges messages with the members.

    It listens at ``host``, where generators reach it, at the first free port of ``ports``. None takes any free port.

    Raises:
        AddressError: ``host`` is not an address of this machine, or no port is free.
    """

    def __init__(self, host: str, keys: ServerKeys | None, ports: Sequence[int] | None = None) -> None:
        self.num_malformed = 0
        with naming("weights.port", AddressError):
            self._service = Service(
                host, ports or (0,), keys, Peer, max_bytes=TO_PUBLISHER_LIMITS.max_bytes,
                receive_mark=_HIGH_WATER_MARK, send_mark=_HIGH_WATER_MARK,
            )  # fmt: skip
        self.port = self._service.port
        self.address = channel(f"tcp://{url_host(host)}:{self.port}", keys.public if keys else None)

    def register(self, poller: zmq.Poller) -> None:
        self._service.register(poller)

    def receive(self) -> Iterator[tuple[bytes, str, MemberMessage]]:
        """Yield messages that have arrived as (member id, key, message). Malformed ones are counted and skipped.

        ``key`` is the sender's public key, which CURVE has verified, or empty on a publisher without keys.

        Call this in every turn of the loop, because it also closes connections above the limits, and those of removed
        keys.
        """
        for peer, frames in self._service.receive(_MAX_RECEIVED):
            try:
                if len(frames) != 1:
                    raise WireError(f"expected a message of one frame, got {len(frames)}")
                message = decode_as(frames[0].bytes, TO_PUBLISHER, TO_PUBLISHER_LIMITS)
            except WireError:
                self.num_malformed += 1
            else:
                yield peer.routing_id, peer.key, message

    @property
    def num_removed_keys(self) -> int:
        """How many keys the list of admitted clients has lost since the start."""
        allow_list = self._service.allow_list
        return 0 if allow_list is None else allow_list.num_removed

    def admits(self, key: str) -> bool:
        """Return whether a client with this public key is admitted. On a publisher without keys, all are."""
        allow_list = self._service.allow_list
        return allow_list is None or allow_list.name_of(key.encode()) is not None

    def send(self, member_id: bytes, message: PublisherMessage) -> bool:
        """Send ``message`` to a member. Return whether the member is connected.

        The message is dropped if the member does not read. The scheduler drops the member if it stays silent.
        """
        return self._service.send(member_id, [encode_message(message)])

    def close(self) -> None:
        self._service.close(linger_ms=0)


class PublisherSocket:
    """A generator's socket, over which it exchanges messages with the publisher at ``address``.

    ``wake`` wakes ``wait``. ``to_open`` is what ``ports_to_open`` returns.
    """

    def __init__(self, address: str, keys: ClientKeys | None, wake: Wake | None = None, *, to_open: str = "") -> None:
        # What was sent over a lost connection may be lost, so the next one has another id, and its generator must join.
        # Nothing waits for it in libzmq, because an old heartbeat is useless.
        self._caller = Caller(
            address, "the learner", keys, name=None, max_bytes=TO_MEMBER_LIMITS.max_bytes, drops_unsent=True,
            to_open=to_open,
        )  # fmt: skip
        self._caller.link.new_key_s = _ANNOUNCED_S
        if wake is not None:
            self._caller.poller.register(wake, zmq.POLLIN)

    @property
    def is_connected(self) -> bool:
        return self._caller.link.is_connected

    def trouble_after(self, seconds: float) -> str:
        """Return why there has been no connection for ``seconds``, and what to do about it; empty if there was one."""
        return self._caller.link.trouble if self._caller.link.lost_s >= seconds else ""

    def wait(self, timeout_s: float) -> None:
        """Wait for a message of the publisher, or until it is woken."""
        self._caller.wait(timeout_s)

    def send(self, message: MemberMessage) -> bool:
        """Send ``message`` to the publisher. Return False if there is no connection, so that the message was not
        sent.
        """
        self.wait(0.0)
        return self._caller.send([encode_message(message)])

    def receive(self) -> PublisherMessage | None:
        """Return the next message of the publisher. None if no message has arrived.

        Raises:
            WireError: the message is malformed.
        """
        self.wait(0.0)
        frames = next(self._caller.receive(), None)
        return None if frames is None else decode_as(frames[0].bytes, TO_MEMBER, TO_MEMBER_LIMITS)

    def leave(self) -> None:
        """Send ``Leave`` to the publisher and close the socket."""
        self.send(Leave())
        self._caller.close(_LINGER_MS)
