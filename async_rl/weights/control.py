"""The control channel between publisher and receivers: its messages and its two sockets. Weights are not sent here.

A receiver sends ``Join``, then ``Heartbeat`` every second. The publisher answers each with ``Ping``, or with
``NotMember`` if it does not know the sender. A version goes out in one of two ways:

- by a collective: ``PrepareCollective`` -> ``Ready`` -> ``StartCollective`` -> (broadcast) -> ``Ack`` or ``Failed``;
- by a pull: ``Pull`` -> (pull) -> ``Ack`` or ``Failed``.

An epoch names a communicator, which is kept while the members stay the same. Within an epoch an ``Ack`` also means
``Ready`` for the next attempt, which then begins with ``StartCollective``.

One thread uses a socket at a time. Another thread wakes it with ``Wake``.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import zmq

from async_rl.errors import AddressError, WeightsError, WireError
from async_rl.net.codec import read_as
from async_rl.net.connections import RouterConnections
from async_rl.net.keys import ClientKeys, Guard, ServerKeys
from async_rl.net.streams import is_readable
from async_rl.net.wire import Limits, decode, encode

HEARTBEAT_S = 1.0
WILDCARDS = ("*", "0.0.0.0", "::")

TO_PUBLISHER_LIMITS = Limits(max_bytes=1 << 16, max_header_bytes=1 << 16, max_arrays=0, max_items=64, max_depth=3)
TO_MEMBER_LIMITS = Limits(max_bytes=64 << 20, max_arrays=0, max_depth=None)
"""Larger, because the queue announces the publisher's key. Each field is still checked against its type."""
_MAX_REASON = 2000
_LINGER_MS = 500


class Join(msgspec.Struct, frozen=True):
    """This generator asks for every version.

    Its collectives listen at ``host``. It can take part in the collectives named in ``collectives``. ``digest`` is the
    digest of the newest weights that it holds, or empty.
    """

    generator_id: str
    host: str
    pid: int
    collectives: list[str]
    digest: str


class Heartbeat(msgspec.Struct, frozen=True):
    """This member is alive."""


class Leave(msgspec.Struct, frozen=True):
    """This member ends; do not wait for it."""


class Ready(msgspec.Struct, frozen=True):
    """This member has allocated memory for the attempt; ``StartCollective`` may follow."""

    attempt: int


class Ack(msgspec.Struct, frozen=True):
    """This member holds the whole version, verified. It may have held the version before the attempt.

    It received ``wire_bytes`` for it, and received ``num_corrupt`` buckets again because their digests did not match.
    """

    attempt: int
    version: int
    digest: str
    wire_bytes: int
    num_corrupt: int


class Failed(msgspec.Struct, frozen=True):
    """This member did not receive the version. ``corrupt``: the received bytes do not match the manifest."""

    attempt: int
    reason: str
    corrupt: bool


class Ping(msgspec.Struct, frozen=True):
    """The publisher is alive and knows this member."""


class NotMember(msgspec.Struct, frozen=True):
    """The publisher does not know the sender; it must send ``Join``."""


class Dropped(msgspec.Struct, frozen=True):
    """This generator is no longer a member; it may send ``Join`` again after ``retry_s``."""

    reason: str
    retry_s: float


class PrepareCollective(msgspec.Struct, frozen=True):
    """Allocate memory for the version of ``manifest``, which has the form of ``manifest_fields``."""

    attempt: int
    manifest: Mapping[str, Any]


class StartCollective(msgspec.Struct, frozen=True):
    """Receive now, as ``rank`` of ``size``, using the collective ``transport``.

    The ranks of a new ``epoch`` connect through the store at ``store_port`` of the publisher's host. If the port is 0,
    they use the existing communicator. ``stall_s`` limits each collective, ``deadline_s`` all of them. Buckets are sent
    in chunks of ``chunk_bytes``. If ``manifest`` is not empty, no ``PrepareCollective`` came before. A member that does
    not take part closes its communicator, so that the others fail at once.
    """

    attempt: int
    epoch: int
    rank: int
    size: int
    store_port: int
    stall_s: float
    deadline_s: float
    chunk_bytes: int
    transport: str
    manifest: Mapping[str, Any]


class Pull(msgspec.Struct, frozen=True):
    """Pull this version using ``transport`` from ``port`` of the publisher's host, within ``deadline_s``.

    ``token`` authenticates the pull. If ``key`` is not empty, the stream is encrypted with it. ``delta_sizes[l][b]``
    is the size of the delta of bucket b in link l of a chain that starts at the weights with digest ``base`` (-1: no
    delta). If ``base`` is empty there is no chain. A chain without links means that ``base`` is this version.
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


def seconds_until(deadline: float) -> float:
    """Return the time from now to ``deadline`` on the monotonic clock, at least 0."""
    return max(0.0, deadline - time.monotonic())


def channel(address: str, public_key: bytes | None) -> str:
    """Return ``Announcement.channel``: the publisher's address and the public key (z85) that it must prove, if any."""
    return address if public_key is None else f"{address} {public_key.decode()}"


def parse_channel(text: str) -> tuple[str, bytes | None]:
    """Return the address and the key of a channel. The address is not checked."""
    address, _, key = text.partition(" ")
    return address, key.encode() if key else None


def keys_towards(server_key: bytes | None, keys: ClientKeys | None) -> ClientKeys | None:
    """Return a generator's ``keys`` for the publisher with ``server_key``.

    Raises:
        WeightsError: one side has keys and the other has none.
    """
    if server_key is not None and keys is not None:
        return keys.for_server(server_key)
    if server_key is not None or keys is not None:
        expects, has = ("no keys", "some") if server_key is None else ("keys", "none")
        raise WeightsError(f"expected {expects} for the learner's weights channel, but this generator has {has}")
    return None


MemberMessage = Join | Heartbeat | Leave | Ready | Ack | Failed
PublisherMessage = Ping | NotMember | Dropped | PrepareCollective | StartCollective | Pull
TO_PUBLISHER: tuple[type[MemberMessage], ...] = (Join, Heartbeat, Leave, Ready, Ack, Failed)
TO_MEMBER: tuple[type[PublisherMessage], ...] = (Ping, NotMember, Dropped, PrepareCollective, StartCollective, Pull)

_T = TypeVar("_T")


def encode_message(message: MemberMessage | PublisherMessage) -> bytes:
    """Return the message as one frame."""
    if isinstance(message, Failed | Dropped):
        message = msgspec.structs.replace(message, reason=message.reason[:_MAX_REASON])
    return encode(type(message).__name__, message)


def decode_message(frame: bytes | memoryview, expected: Sequence[type[_T]], limits: Limits) -> _T:
    """Return the message in ``frame``, which must be one of ``expected``.

    Raises:
        WireError: it is malformed, or of another type.
    """
    message = decode(frame, limits)
    for record in expected:
        if record.__name__ == message.type:
            return read_as(message.fields, record)
    raise WireError(
        f"expected a message of type {' or '.join(record.__name__ for record in expected)}, got {message.type!r}"
    )


class MemberSocket:
    """The publisher's socket: receives messages of members and sends to one of them.

    It listens at any port of ``bind_host``, which generators reach as ``host``.

    Raises:
        AddressError: ``bind_host`` is not an address of this machine, or no port is free.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], bind_host: str, host: str, keys: ServerKeys | None
    ) -> None:
        self.num_malformed = 0
        self._socket = context.socket(zmq.ROUTER)
        self._connections = RouterConnections(self._socket, has_keys=keys is not None)
        self._guard: Guard | None = None if keys is None else keys.guard(self._socket, context)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, TO_PUBLISHER_LIMITS.max_bytes)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._socket.setsockopt(zmq.IPV6, int(":" in bind_host))
        try:
            port = self._socket.bind_to_random_port(f"tcp://{_url_host(bind_host)}")
        except zmq.ZMQError as error:
            raise AddressError(
                f"can't listen for weights at {bind_host}: {error}; check the network interfaces of this machine"
            ) from error
        self.address = channel(f"tcp://{_url_host(host)}:{port}", keys.public if keys else None)

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)
        self._connections.register(poller)

    def count_in(self, ready: Mapping[Any, int]) -> int:
        """How many of the descriptors that a poller returned are this socket's."""
        return (self._socket in ready) + self._connections.is_among(ready)

    def receive(self) -> Iterator[tuple[bytes, MemberMessage]]:
        """Return all messages that have come, each with its sender. Malformed ones are counted.

        Call it in every turn of the loop: it also closes connections above a limit.
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
                yield frames[0].bytes, decode_message(frames[1].bytes, TO_PUBLISHER, TO_PUBLISHER_LIMITS)
            except WireError:
                self.num_malformed += 1

    def send(self, member_id: bytes, message: PublisherMessage) -> bool:
        """Send, or discard the message if the member does not read. Return whether the member is connected."""
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
    """A generator's socket. It connects to the publisher at ``address`` in the background, and reconnects.

    ``is_ipv6``: the address names an IPv6 host.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: ClientKeys | None, *, is_ipv6: bool
    ) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        # Queue nothing while there is no connection: an old heartbeat is useless.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, TO_MEMBER_LIMITS.max_bytes)
        self._socket.setsockopt(zmq.IPV6, int(is_ipv6))
        if keys is not None:
            keys.identify(self._socket)
        self._socket.connect(address)

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)

    def send(self, message: MemberMessage) -> bool:
        """Send the message. Return False while not connected."""
        try:
            self._socket.send(encode_message(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> PublisherMessage | None:
        """Return the next message; None if none has come.

        Raises:
            WireError: it is malformed.
        """
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return decode_message(frame, TO_MEMBER, TO_MEMBER_LIMITS)

    def leave(self, poller: zmq.Poller | None = None) -> None:
        """Send ``Leave`` and close."""
        self.send(Leave())
        if poller is not None:
            poller.unregister(self._socket)
        self._socket.close(linger=_LINGER_MS)


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class Wake:
    """A flag with a file descriptor that is readable while the flag is set. Any thread may set, clear or wait."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        # If the pipe is full, the flag is set. If it is closed, no thread waits for it.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def wait(self, timeout_s: float) -> bool:
        """Return whether it was set within ``timeout_s``. Does not clear it."""
        return is_readable(self._reader.fileno(), timeout_s)
