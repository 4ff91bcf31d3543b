"""The control channel between the learner's publisher and the generators' receivers: messages and sockets.

The weights themselves are not sent over this channel. A receiver sends ``Join``, then ``Heartbeat`` every second. The
publisher answers each with ``Ping``, or with ``NotMember`` if it does not know the sender. A version is sent in one of
two ways:

- by a collective: ``PrepareCollective`` -> ``Ready`` -> ``StartCollective`` -> (broadcast) -> ``Ack`` or ``Failed``;
- by a pull: ``Pull`` -> (the generator fetches the version) -> ``Ack`` or ``Failed``.

An epoch is the number of a communicator, which is kept while the members stay the same. Within an epoch an ``Ack`` also
means ``Ready`` for the next attempt, which then begins with ``StartCollective``.

A member that pulls from another member (``PeerOffer``) reports with ``PeerFailed`` that it goes on with the publisher.

One thread uses a socket at a time. Another thread wakes it with ``wake.Wake``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import zmq

from async_rl.errors import AddressError, WeightsError, WireError
from async_rl.net.address import url_host
from async_rl.net.codec import read_as
from async_rl.net.connections import RouterConnections
from async_rl.net.keys import ClientKeys, Guard, ServerKeys
from async_rl.net.link import Link
from async_rl.net.streams import no_free_port
from async_rl.net.wire import SAME_VERSION, Limits, decode, encode
from async_rl.weights.peer_messages import PeerFailed, PeerOffer

HEARTBEAT_S = 1.0

TO_PUBLISHER_LIMITS = Limits(max_bytes=1 << 16, max_header_bytes=1 << 16, max_arrays=0, max_items=256, max_depth=5)
TO_MEMBER_LIMITS = Limits(max_bytes=64 << 20, max_arrays=0, max_depth=None)
"""Larger, because the queue announces the publisher's key. Each field is still checked against its type."""
_MAX_REASON = 2000
_LINGER_MS = 500
_HIGH_WATER_MARK = 64
"""Maximum number of messages of one member that wait in the socket's memory, in each direction."""


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
        pid: the generator's process id.
        collectives: the collectives that the generator can take part in.
        num_ranks: how many ranks of a collective the generator needs: one for each worker of its engine.
        digest: digest of the newest weights that the generator holds. Empty if there are none.
        peer_port: the port of ``host`` at which it serves weights to other generators. 0: it serves none.
    """

    generator_id: str
    host: str
    pid: int
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

    ``manifest`` has the form that ``manifest_fields`` returns.
    """

    attempt: int
    manifest: Mapping[str, Any]


class StartCollective(msgspec.Struct, frozen=True):
    """The publisher tells a member to receive a version by a collective now.

    A member that does not take part closes its communicator, so that the other ranks fail at once.

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
        manifest: manifest of the version. Empty if ``PrepareCollective`` brought it before.
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
    manifest: Mapping[str, Any]


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

_T = TypeVar("_T")


def encode_message(message: MemberMessage | PublisherMessage) -> bytes:
    """Return the message as bytes. A long ``reason`` is cut off."""
    if isinstance(message, Failed | PeerFailed | Dropped):
        message = msgspec.structs.replace(message, reason=message.reason[:_MAX_REASON])
    return encode(type(message).__name__, message)


def decode_message(frame: bytes | memoryview, expected: Sequence[type[_T]], limits: Limits) -> _T:
    """Return the message in ``frame``. Its type must be one of ``expected``.

    Raises:
        WireError: the message is malformed, or of another type.
    """
    message = decode(frame, limits)
    for record in expected:
        if record.__name__ == message.type:
            return read_as(message.fields, record)
    raise WireError(
        f"expected a message of type {' or '.join(record.__name__ for record in expected)}, got "
        f"{message.type!r}; {SAME_VERSION}"
    )


class MemberSocket:
    """The publisher's socket, over which it exchanges messages with the members.

    It listens at ``bind_host``, at the first free port of ``ports``. None takes any free port. Generators reach
    ``bind_host`` under the name ``host``.

    Raises:
        AddressError: ``bind_host`` is not an address of this machine, or no port is free.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        bind_host: str,
        host: str,
        keys: ServerKeys | None,
        ports: Sequence[int] | None = None,
    ) -> None:
        self.num_malformed = 0
        self._socket = context.socket(zmq.ROUTER)
        self._allowed = None if keys is None else keys.allow_list()
        self._connections = RouterConnections(self._socket, allow_list=self._allowed)
        self._guard: Guard | None = None
        if keys is not None and self._allowed is not None:
            self._guard = keys.guard(self._socket, context, self._allowed)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, TO_PUBLISHER_LIMITS.max_bytes)
        for option in (zmq.RCVHWM, zmq.SNDHWM):
            self._socket.setsockopt(option, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.IPV6, int(":" in bind_host))
        self.port = self._bind(bind_host, ports)
        self.address = channel(f"tcp://{url_host(host)}:{self.port}", keys.public if keys else None)

    def _bind(self, host: str, ports: Sequence[int] | None) -> int:
        """Bind the socket to the first free port of ``ports``, or to any free port. Return the port."""
        for port in ("*",) if ports is None else ports:
            try:
                self._socket.bind(f"tcp://{url_host(host)}:{port}")
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE:
                    continue
                raise AddressError(
                    f"can't listen for weights at {host}: {error}; check the network interfaces of this machine"
                ) from error
            bound = self._socket.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(bound, bytes)
            return int(bound.rstrip(b"\0").rsplit(b":", 1)[1])
        raise no_free_port(host, ports)

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)
        self._connections.register(poller)

    def receive(self) -> Iterator[tuple[bytes, str, MemberMessage]]:
        """Yield all messages that have arrived as (member id, key, message). Malformed ones are counted and skipped.

        ``key`` is the sender's public key, which CURVE has verified, or empty on a publisher without keys.

        Call this in every turn of the loop, because it also closes connections above the limits, and those of removed
        keys.
        """
        self._connections.check()
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if not self._connections.note_message(frames[-1]):
                continue
            try:
                if len(frames) != 2:
                    raise WireError(f"expected a sender and a message, 2 frames, got {len(frames)}")
                key = "" if self._guard is None else str(frames[1].get("User-Id"))
                yield frames[0].bytes, key, decode_message(frames[1].bytes, TO_PUBLISHER, TO_PUBLISHER_LIMITS)
            except WireError:
                self.num_malformed += 1

    @property
    def num_removed_keys(self) -> int:
        """How many keys the list of admitted clients has lost since the start."""
        return 0 if self._allowed is None else self._allowed.num_removed

    def admits(self, key: str) -> bool:
        """Return whether a client with this public key is admitted. On a publisher without keys, all are."""
        return self._allowed is None or self._allowed.name_of(key.encode()) is not None

    def send(self, member_id: bytes, message: PublisherMessage) -> bool:
        """Send ``message`` to a member. Return whether the member is connected.

        The message is discarded if the member does not read its messages.
        """
        try:
            self._socket.send_multipart([member_id, encode_message(message)], zmq.NOBLOCK)
        except zmq.Again:
            pass  # The member does not read. The scheduler drops it if it stays silent.
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        self._socket.close()
        self._connections.close()
        if self._guard is not None:
            self._guard.stop()


class PublisherSocket:
    """A generator's socket, over which it exchanges messages with the publisher at ``address``.

    It connects in the background, and reconnects if the connection breaks. ``is_ipv6`` is true if the address names
    an IPv6 host. ``to_open`` is what ``ports_to_open`` returns.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: ClientKeys | None, *, is_ipv6: bool,
        to_open: str = "",
    ) -> None:  # fmt: skip
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        # Queue nothing while there is no connection: an old heartbeat is useless.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, TO_MEMBER_LIMITS.max_bytes)
        self._socket.setsockopt(zmq.IPV6, int(is_ipv6))
        if keys is not None:
            keys.identify(self._socket)
        public_key = "" if keys is None else keys.public.decode()
        self._link = Link(self._socket, address, "the learner", public_key, to_open=to_open)
        self._socket.connect(address)

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)
        self._link.register(poller)

    @property
    def is_connected(self) -> bool:
        return self._link.is_connected

    def trouble_after(self, seconds: float) -> str:
        """Return why there has been no connection for ``seconds``, and what to do about it; empty if there was one."""
        return self._link.trouble if self._link.lost_s >= seconds else ""

    def send(self, message: MemberMessage) -> bool:
        """Send ``message`` to the publisher. Return False if there is no connection, so that the message was not
        sent.
        """
        try:
            self._socket.send(encode_message(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> PublisherMessage | None:
        """Return the next message of the publisher. None if no message has arrived.

        Raises:
            WireError: the message is malformed.
        """
        self._link.update()
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return decode_message(frame, TO_MEMBER, TO_MEMBER_LIMITS)

    def leave(self, poller: zmq.Poller | None = None) -> None:
        """Send ``Leave`` to the publisher and close the socket. Remove it from ``poller`` if given."""
        self.send(Leave())
        if poller is not None:
            poller.unregister(self._socket)
            self._link.unregister(poller)
        self._link.close()
        self._socket.close(linger=_LINGER_MS)
