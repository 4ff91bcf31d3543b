"""The two sockets of the control channel: the publisher's, and a generator's. Each is used by one thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import zmq

from async_rl.errors import AddressError, WireError
from async_rl.net.keys import ClientKeys, Guard, ServerKeys
from async_rl.weights import control

WILDCARDS = ("*", "0.0.0.0", "::")
_LINGER_MS = 500


class MemberSocket:
    """The publisher's socket: receives messages of members and sends to one of them.

    It listens at any port of ``bind_host``, which generators reach as ``host``.

    Raises:
        AddressError: ``bind_host`` is no address of this machine, or no port is free.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], bind_host: str, host: str, keys: ServerKeys | None
    ) -> None:
        self.num_malformed = 0
        self.num_unsent = 0
        self._socket = context.socket(zmq.ROUTER)
        self._guard: Guard | None = None if keys is None else keys.guard(self._socket, context)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, control.TO_PUBLISHER_LIMITS.max_bytes)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._socket.setsockopt(zmq.IPV6, int(":" in bind_host))
        try:
            port = self._socket.bind_to_random_port(f"tcp://{_url_host(bind_host)}")
        except zmq.ZMQError as error:
            raise AddressError(f"can't listen for weights at {bind_host}: {error}") from error
        self.address = control.channel(f"tcp://{_url_host(host)}:{port}", keys.public if keys else None)

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)

    def is_among(self, ready: Mapping[Any, int]) -> bool:
        """Whether a poller returned this socket."""
        return self._socket in ready

    def receive(self) -> Iterator[tuple[bytes, control.MemberMessage]]:
        """Return all messages that have come, each with its sender. Malformed ones are counted."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 2:
                    raise WireError(f"expected 2 frames, got {len(frames)}")
                yield frames[0], control.decode_message(frames[1], control.TO_PUBLISHER, control.TO_PUBLISHER_LIMITS)
            except WireError:
                self.num_malformed += 1

    def send(self, member_id: bytes, message: control.PublisherMessage) -> bool:
        """Send, or discard the message if the member does not read. Returns whether there is a connection."""
        try:
            self._socket.send_multipart([member_id, control.encode_message(message)], zmq.NOBLOCK)
        except zmq.Again:
            self.num_unsent += 1  # The scheduler drops a member that stays silent.
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        self._socket.close()
        if self._guard is not None:
            self._guard.stop()


class PublisherSocket:
    """A generator's socket: connects to the publisher at ``address`` in the background, again and again.

    ``is_ipv6``: the address names an IPv6 host.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: ClientKeys | None, *, is_ipv6: bool
    ) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        # Queue nothing while there is no connection: an old heartbeat is useless.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, control.TO_MEMBER_LIMITS.max_bytes)
        self._socket.setsockopt(zmq.IPV6, int(is_ipv6))
        if keys is not None:
            keys.identify(self._socket)
        self._socket.connect(address)

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)

    def send(self, message: control.MemberMessage) -> bool:
        """Send. Returns False while there is no connection."""
        try:
            self._socket.send(control.encode_message(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> control.PublisherMessage | None:
        """Return the next message; None if none has come.

        Raises:
            WireError: it is malformed.
        """
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return control.decode_message(frame, control.TO_MEMBER, control.TO_MEMBER_LIMITS)

    def leave(self, poller: zmq.Poller | None = None) -> None:
        """Send ``Leave`` and close."""
        self.send(control.Leave())
        if poller is not None:
            poller.unregister(self._socket)
        self._socket.close(linger=_LINGER_MS)


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
