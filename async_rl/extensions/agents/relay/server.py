"""The relay: hands the sessions that fronts offer to the proxies that want one, and forwards messages between both.

It reads no request and no answer. One thread does all; what a slow reader has not taken waits here, up to a limit, and
then its connection is closed. Whoever has lost the connection to another one hears of it (``Gone``), so nobody waits
for an answer that can't come.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from async_rl.config.config import Config
from async_rl.errors import AddressError, ConfigError, WireError, naming
from async_rl.extensions.agents.relay import messages
from async_rl.extensions.agents.relay.messages import (
    FOR_RELAY,
    MAX_BYTES,
    RELAY,
    decode,
    encode,
    pack_number,
    unpack_number,
)
from async_rl.net.address import check_address, refuse_open_bind
from async_rl.net.keys import ServerKeys
from async_rl.net.service import Peer, Service
from async_rl.process.stop import noted_signals
from async_rl.run.directory import RunDir

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
MAX_UNSENT_BYTES = 2 * MAX_BYTES
"""What waits for one slow reader. It loses its connection beyond that, or if it reads nothing for ``STALL_S``."""
STALL_S = 20.0
_HIGH_WATER_MARK = 8
"""Messages of one connection in ZeroMQ's memory, each way."""
_MAX_RECEIVED = 256
"""Most messages that are received before others are sent."""
_LOOK_S = 0.5
_BIND_LIMIT_S = 10.0

Outgoing = tuple[int, int, messages.ToFront | messages.ToProxy]
"""A message with the numbers of its receiver and of the connection in whose name it is sent."""


class Pairing:
    """Which sessions wait for a program, and which proxies for a session, both first come first served. Pure."""

    def __init__(self) -> None:
        self._offers: OrderedDict[tuple[int, str], bytes] = OrderedDict()
        self._wants: OrderedDict[tuple[int, int], float] = OrderedDict()

    def offer(self, front: int, message: messages.Offer) -> list[Outgoing]:
        self._offers[front, message.key] = message.task
        return self._pair()

    def withdraw(self, front: int, key: str) -> None:
        self._offers.pop((front, key), None)

    def want(self, proxy: int, message: messages.Want, now_s: float) -> list[Outgoing]:
        self._wants[proxy, message.number] = now_s + message.wait_s
        return self._pair()

    def expire(self, now_s: float) -> list[Outgoing]:
        """Answer the proxies that have waited as long as they wanted."""
        late = [want for want, until_s in self._wants.items() if until_s <= now_s]
        for want in late:
            del self._wants[want]
        return [(proxy, RELAY, messages.NoSession(number)) for proxy, number in late]

    def forget(self, number: int) -> None:
        """Forget a connection that has ended."""
        self._offers = OrderedDict((offer, task) for offer, task in self._offers.items() if offer[0] != number)
        self._wants = OrderedDict((want, until_s) for want, until_s in self._wants.items() if want[0] != number)

    def _pair(self) -> list[Outgoing]:
        outgoing: list[Outgoing] = []
        while self._offers and self._wants:
            (front, key), task = self._offers.popitem(last=False)
            (proxy, number), _ = self._wants.popitem(last=False)
            # The front must know whose session it is before the first request comes.
            outgoing += [(front, proxy, messages.Taken(key)), (proxy, front, messages.Session(number, key, task))]
        return outgoing


@dataclass(slots=True, eq=False)
class _Client(Peer):
    """A connection. ``number`` is 0 before its first message, and ``role`` empty before its hello."""

    number: int = 0
    role: str = ""


class Relay:
    """The ROUTER socket at ``address``. ``keys`` admit its clients; None: anybody.

    Raises:
        AddressError: the address can't be bound.
    """

    def __init__(self, address: str, keys: ServerKeys | None = None) -> None:
        self._pairing = Pairing()
        self._by_number: dict[int, _Client] = {}
        self._next_number = secrets.randbits(62) + 1
        host, port = check_address(address)
        self._service = Service(
            host, [port], keys, _Client, max_bytes=MAX_BYTES, receive_mark=_HIGH_WATER_MARK,
            send_mark=_HIGH_WATER_MARK, max_unsent_bytes=MAX_UNSENT_BYTES, stall_s=STALL_S,
            max_connections=MAX_CONNECTIONS, bind_limit_s=_BIND_LIMIT_S, on_ended=self._forget,
        )  # fmt: skip

    def serve(self, is_over: Callable[[], bool]) -> None:
        """Relay messages until ``is_over``, which is called at least every half second."""
        poller = zmq.Poller()
        self._service.register(poller)
        while not is_over():
            poller.poll(round(min(_LOOK_S, self._service.turn_within_s) * 1000))
            for client, frames in self._service.receive(_MAX_RECEIVED):
                if client.is_open:
                    self._receive(client, frames)
            self._send_all(self._pairing.expire(time.monotonic()))
            self._service.flush()

    def finish(self) -> None:
        """Tell the proxies that the run is finished."""
        self._send_all((proxy.number, RELAY, messages.Finished()) for proxy in self._of_role("proxy"))
        self._service.flush()

    def close(self) -> None:
        """Close the socket."""
        self._service.close()

    def _receive(self, client: _Client, frames: Sequence[zmq.Frame]) -> None:
        if not client.number:
            client.number, self._next_number = self._next_number, self._next_number + 1
            self._by_number[client.number] = client
        try:
            if len(frames) != 2:
                raise WireError(f"expected a message of two frames, got {len(frames)}")
            to = unpack_number(frames[0].buffer)
            if to == RELAY:
                self._take(client, frames[1])
            elif client.role:
                self._forward(client, to, frames[1])
        except WireError as error:
            self._service.disconnect(client, f"has sent a malformed message: {error}")

    def _take(self, client: _Client, frame: zmq.Frame) -> None:
        message = decode(frame.buffer, FOR_RELAY)
        if isinstance(message, messages.Hello):
            client.role = message.role
            self._tell_proxies()
        elif isinstance(message, messages.Offer) and client.role == "front":
            self._send_all(self._pairing.offer(client.number, message))
        elif isinstance(message, messages.Withdraw):
            self._pairing.withdraw(client.number, message.key)
        elif isinstance(message, messages.Want) and client.role == "proxy":
            self._send_all(self._pairing.want(client.number, message, time.monotonic()))
        # Anything else was meant for an earlier connection.

    def _forward(self, client: _Client, to: int, frame: zmq.Frame) -> None:
        receiver = self._by_number.get(to)
        if receiver is None or receiver.role == client.role:
            self._send_all([(client.number, to, messages.Gone())])
        else:
            self._service.post(receiver, [pack_number(client.number), frame.buffer])

    def _tell_proxies(self) -> None:
        message = messages.Proxies(len(self._of_role("proxy")))
        self._send_all((front.number, RELAY, message) for front in self._of_role("front"))

    def _of_role(self, role: str) -> list[_Client]:
        return [client for client in self._by_number.values() if client.role == role]

    def _send_all(self, outgoing: Iterable[Outgoing]) -> None:
        for to, sender, message in list(outgoing):
            if (receiver := self._by_number.get(to)) is not None:
                self._service.post(receiver, [pack_number(sender), encode(message)])

    def _forget(self, client: _Client) -> None:
        self._by_number.pop(client.number, None)
        self._pairing.forget(client.number)
        if client.role:
            self._send_all(
                (other.number, client.number, messages.Gone()) for other in self._by_number.values() if other.role
            )
            self._tell_proxies()


def run_relay(config: Config, *, insecure: bool) -> None:
    """Relay at ``environment.relay`` until SIGTERM, SIGINT or the end of the run: the body of ``async-rl relay``.

    Raises:
        ConfigError: the config has no relay.
        AddressError: the address can't be bound, or is open to a network.
        KeyFileError: the keys of ``queue.keys`` are missing or malformed.
    """
    if config.environment.relay is None:
        raise ConfigError("environment.relay: expected the address of the relay, got none; set it")
    keys = None if config.queue.keys is None else ServerKeys.load(config.queue.keys)
    with naming("environment.relay", AddressError):
        refuse_open_bind(config.environment.relay, insecure=insecure, has_keys=keys is not None)
    run_dir, began_s = RunDir(Path(config.run.dir)), time.time()
    stopped = noted_signals()

    def is_finished() -> bool:
        """Return whether the run has finished since the relay began: a run that goes on has the mark of its end."""
        return run_dir.is_finished and run_dir.finished_marker.stat().st_mtime >= began_s

    relay = Relay(config.environment.relay, keys)
    logger.info("the relay listens at %s", config.environment.relay)
    try:
        relay.serve(lambda: bool(stopped) or is_finished())
        if is_finished():
            relay.finish()
    finally:
        relay.close()
