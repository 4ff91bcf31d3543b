"""A connection to the relay, for a program with an asyncio loop. A thread of its own has the socket.

The connection is made again when it was lost. What was under way then is lost with it: the listener hears of it, and
says hello again. The relay ignores what comes before the hello, because it was meant for the old connection. (libzmq's
option ``IMMEDIATE`` is not used: at the end of a connection it may lose messages that have arrived.)
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from async_rl.net.address import check_address
from async_rl.net.connections import KEEPALIVE
from async_rl.net.keys import ClientKeys
from async_rl.net.link import Link
from async_rl.relay.messages import MAX_BYTES, ToFront, ToProxy, ToRelay, encode, pack_number, unpack_number

_LOOK_MS = 250
_HIGH_WATER_MARK = 64


class Listener(Protocol):
    """Hears of the connection, in the loop."""

    def connected(self) -> None: ...
    def disconnected(self) -> None: ...
    def received(self, sender: int, body: bytes) -> None: ...


class RelayClient:
    """Connects to the relay at ``address`` and stays connected until ``close``.

    Attributes:
        trouble: why there is no connection, and what to do about it; empty if there is one or the cause is not known.

    Raises:
        AddressError: the address is malformed.
    """

    def __init__(
        self, address: str, keys: ClientKeys | None, loop: asyncio.AbstractEventLoop, listener: Listener
    ) -> None:
        self.trouble = ""
        self._host, _ = check_address(address)
        self._address, self._keys, self._loop, self._listener = address, keys, loop, listener
        self._outgoing: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def send(self, to: int, message: ToRelay | ToFront | ToProxy) -> None:
        """Send a message to the connection number ``to``. It is lost if this connection is lost or closed meanwhile."""
        if self._is_closed:
            return
        self._outgoing.put([pack_number(to), encode(message)])
        self._wake()

    def close(self) -> None:
        """End the connection."""
        self._is_closed = True
        self._wake()
        self._thread.join()
        self._woken.close()
        self._waker.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is awake
            self._waker.send(b"x")

    def _tell(self, listen: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(listen, *arguments)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = self._dealer(context)
        public_key = "" if self._keys is None else self._keys.public.decode()
        link = Link(dealer, self._address, "the relay", public_key)
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        link.register(poller)
        dealer.connect(self._address)
        try:
            self._exchange(dealer, link, poller)
        finally:
            link.close()
            dealer.close(linger=1000 if link.is_connected else 0)
            context.term()

    def _dealer(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        dealer = context.socket(zmq.DEALER)
        # Whoever knows this id can take over the connection, so it is random.
        dealer.setsockopt(zmq.IDENTITY, uuid.uuid4().hex.encode())
        dealer.setsockopt(zmq.RECONNECT_IVL, 100)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        dealer.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        dealer.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        dealer.setsockopt(zmq.IPV6, int(":" in self._host))
        for option, value in KEEPALIVE.items():
            dealer.setsockopt(option, value)
        if self._keys is not None:
            self._keys.identify(dealer)
        return dealer

    def _exchange(self, dealer: zmq.Socket[bytes], link: Link, poller: zmq.Poller) -> None:
        unsent: deque[list[bytes]] = deque()
        is_connected = False
        while True:
            is_closed = self._is_closed  # what was sent before is sent first
            poller.modify(dealer, zmq.POLLIN | (zmq.POLLOUT if unsent else 0))
            poller.poll(_LOOK_MS)
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
            # Read first: the last message of a relay that ends may be here together with its end.
            with contextlib.suppress(zmq.Again):
                while True:
                    sender, body = dealer.recv_multipart(zmq.NOBLOCK)
                    self._tell(self._listener.received, unpack_number(sender), body)
            has_connected = link.update()
            if is_connected and (has_connected or not link.is_connected):
                is_connected = False
                unsent.clear()
                self._tell(self._listener.disconnected)
            if has_connected and link.is_connected:
                is_connected = True
                self._tell(self._listener.connected)
            while not self._outgoing.empty():
                message = self._outgoing.get()
                if is_connected:
                    unsent.append(message)
            with contextlib.suppress(zmq.Again):
                while unsent:
                    dealer.send_multipart(unsent[0], zmq.NOBLOCK)
                    unsent.popleft()
            self.trouble = link.trouble
            if is_closed:
                return
