"""A client's DEALER socket, which stays connected to a server.

It connects in the background, and again when the connection was lost. A message is sent only while there is a
connection. What was sent over one that is lost may be lost with it, so after ``wait`` has returned True the owner
sends again what has no answer.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

import zmq

from async_rl.net.address import check_address
from async_rl.net.connections import KEEPALIVE
from async_rl.net.frames import has_message, send_frames
from async_rl.net.keys import ClientKeys
from async_rl.net.link import Link
from async_rl.net.wire import Frame

_LOOK_S = 0.5
"""How often to look for the cause while there is no connection."""


class Caller:
    """The socket of a client of the server at ``address``. One thread uses it.

    Args:
        server: what the server is called in texts, such as "the queue server".
        keys: needed if the server has keys. Messages are then sent only to the server whose public key they have.
        name: begins the id under which the server knows this client, also when it connects again. None: the server
            knows each connection by another id.
        max_bytes: largest frame that the server may send; -1: any.
        receive_mark, send_mark: messages in libzmq's memory, each way.
        drops_unsent: drop what libzmq holds for a connection when that ends. At its end libzmq may then also lose
            messages that have arrived and were not read yet, such as the last answer of a server that ends.
        to_open: what to open if a firewall drops the packets; the port of ``address`` if it is empty.

    Attributes:
        link: says whether the socket is connected, and why not.
        poller: of ``wait``. What else the owner registers wakes ``wait``, too.

    Raises:
        AddressError: the address is malformed.
    """

    def __init__(
        self, address: str, server: str, keys: ClientKeys | None, *, name: str | None = "", max_bytes: int = -1,
        receive_mark: int = 1000, send_mark: int = 1000, drops_unsent: bool = False, to_open: str = "",
    ) -> None:  # fmt: skip
        host, _ = check_address(address)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        if name is not None:
            # Whoever knows this id can take over the connection, so it is random.
            self._socket.setsockopt(zmq.IDENTITY, f"{name[:60]}-{uuid.uuid4().hex}".encode())
        options = {
            zmq.RECONNECT_IVL: 100, zmq.RECONNECT_IVL_MAX: 2000, zmq.MAXMSGSIZE: max_bytes, zmq.RCVHWM: receive_mark,
            zmq.SNDHWM: send_mark, zmq.IMMEDIATE: drops_unsent, zmq.IPV6: ":" in host, **KEEPALIVE,
        }  # fmt: skip
        for option, value in options.items():
            self._socket.setsockopt(option, int(value))
        if keys is not None:
            keys.identify(self._socket)
        public_key = "" if keys is None else keys.public.decode()
        self.link = Link(self._socket, address, server, public_key, to_open=to_open)
        self.poller = zmq.Poller()
        self.poller.register(self._socket, zmq.POLLIN)
        self.link.register(self.poller)
        self._socket.connect(address)

    def wait(self, timeout_s: float) -> bool:
        """Wait for messages, for a change of the connection, or for what the owner registered.

        Return whether the socket has connected since the last call.
        """
        if not self.link.is_connected:
            timeout_s = min(timeout_s, _LOOK_S)
        self.poller.poll(max(1, int(timeout_s * 1000)) if timeout_s > 0 else 0)
        return self.link.update()

    def send(self, frames: Sequence[Frame]) -> bool:
        """Send one message. Return False if there is no connection, or no room."""
        if not self.link.is_connected:
            return False
        try:
            send_frames(self._socket, frames)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Iterator[list[zmq.Frame]]:
        """Yield the messages that have arrived."""
        while has_message(self._socket):
            yield self._socket.recv_multipart(zmq.NOBLOCK, copy=False)

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket. What libzmq holds is sent for at most ``linger_ms``. A second call does nothing."""
        self.link.close()
        self._socket.close(linger=linger_ms)
        self._context.term()
