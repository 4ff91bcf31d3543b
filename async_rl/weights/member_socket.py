"""The publisher's control socket: members' messages in, messages to members out. Used by the publisher's thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import zmq

from async_rl.errors import AddressError, WireError
from async_rl.net.keys import Guard, ServerKeys
from async_rl.weights import control

WILDCARDS = ("*", "0.0.0.0", "::")


class MemberSocket:
    """Listens at any port of ``bind_host``, which generators reach as ``host``.

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
        """Of what a poller returned."""
        return self._socket in ready

    def receive(self) -> Iterator[tuple[bytes, control.MemberMessage]]:
        """All that came: who said it, and what. What is malformed is counted."""
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

    def tell(self, member_id: bytes, message: control.PublisherMessage) -> bool:
        """Send, or lose it if the member does not read; whether there is a connection at all."""
        try:
            self._socket.send_multipart([member_id, control.encode_message(message)], zmq.NOBLOCK)
        except zmq.Again:
            self.num_unsent += 1  # Its silence will drop it.
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        self._socket.close()
        if self._guard is not None:
            self._guard.stop()


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
