"""A connection to the relay, for a program with an asyncio loop. A thread of its own has the socket.

The connection is made again when it was lost. What was under way then is lost with it: the listener hears of it, and
says hello again. The relay ignores what comes before the hello, because it was meant for the old connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from async_rl.extensions.agents.relay.messages import (
    MAX_BYTES,
    ToFront,
    ToProxy,
    ToRelay,
    encode,
    pack_number,
    unpack_number,
)
from async_rl.net.address import check_address
from async_rl.net.caller import Caller
from async_rl.net.keys import ClientKeys
from async_rl.net.wake import Wake

_LOOK_S, _SEND_AGAIN_S = 0.25, 0.005
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
        check_address(address)
        self._address, self._keys, self._loop, self._listener = address, keys, loop, listener
        self._outgoing: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._wake = Wake()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def send(self, to: int, message: ToRelay | ToFront | ToProxy) -> None:
        """Send a message to the connection number ``to``. It is lost if this connection is lost or closed meanwhile."""
        if self._is_closed:
            return
        self._outgoing.put([pack_number(to), encode(message)])
        self._wake.set()

    def close(self) -> None:
        """End the connection."""
        self._is_closed = True
        self._wake.set()
        self._thread.join()
        self._wake.close()

    def _tell(self, listen: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(listen, *arguments)

    def _run(self) -> None:
        caller = Caller(
            self._address, "the relay", self._keys, max_bytes=MAX_BYTES, receive_mark=_HIGH_WATER_MARK,
            send_mark=_HIGH_WATER_MARK,
        )  # fmt: skip
        caller.poller.register(self._wake, zmq.POLLIN)
        try:
            self._exchange(caller)
        finally:
            caller.close(linger_ms=1000 if caller.link.is_connected else 0)

    def _exchange(self, caller: Caller) -> None:
        unsent: deque[list[bytes]] = deque()
        is_connected = False
        while True:
            is_closed = self._is_closed  # what was sent before is sent first
            has_connected = caller.wait(_SEND_AGAIN_S if unsent else _LOOK_S)
            self._wake.clear()
            # Read first: the last message of a relay that ends may be here together with its end.
            for sender, body in caller.receive():
                self._tell(self._listener.received, unpack_number(sender.buffer), body.bytes)
            if is_connected and (has_connected or not caller.link.is_connected):
                is_connected = False
                unsent.clear()
                self._tell(self._listener.disconnected)
            if has_connected:
                is_connected = True
                self._tell(self._listener.connected)
            while not self._outgoing.empty():
                message = self._outgoing.get()
                if is_connected:
                    unsent.append(message)
            while unsent and caller.send(unsent[0]):
                unsent.popleft()
            self.trouble = caller.link.trouble
            if is_closed:
                return
