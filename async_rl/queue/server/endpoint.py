"""The queue server's socket: bound, guarded by keys, its peers held to their rates. Raw frames in, raw frames out.

Used by ``service`` alone, from its one thread. It knows nothing of what messages mean: ``service`` says which were
malformed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from async_rl.config.queue import QueueConfig
from async_rl.errors import AddressError, QueueError
from async_rl.net.address import check_address, refuse_open_bind
from async_rl.net.keys import DEFAULT_CLIENT, AllowList, Guard, ServerKeys
from async_rl.queue.frames import is_readable, send_frames
from async_rl.queue.protocol import RECEIVE_HIGH_WATER_MARK
from async_rl.queue.server.rate_limiter import BLOCKED_S, Gate, Sizes
from async_rl.queue.storage.payloads import Bytes

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@dataclass(slots=True)
class _Tally:
    """Counts what peers can cause at will, and says when it is time to speak of it again."""

    count: int = 0
    _said: int = 0
    _said_at: float = -LOG_EVERY_S

    def news(self, now: float) -> int:
        """How many since this was last said; 0 while that is not long ago."""
        news = self.count - self._said
        if not news or now - self._said_at < LOG_EVERY_S:
            return 0
        self._said, self._said_at = self.count, now
        return news


class Endpoint:
    """A ROUTER socket at ``config.address``. ``last_port`` is tried first where the config leaves the port open.

    Raises:
        AddressError: the address is busy, malformed, or open to the network without keys and without ``insecure``.
        KeyFileError: the keys of ``queue.keys`` are missing or unfit.
    """

    def __init__(self, config: QueueConfig, *, insecure: bool, last_port: int | None = None) -> None:
        self._config = config
        self._gate = Gate(
            max_messages_per_s=config.max_messages_per_s, max_malformed_per_minute=config.max_malformed_per_minute
        )
        self.sizes = Sizes(config.max_bytes)
        self._current: zmq.Frame | None = None
        self._refused, self._untaken = _Tally(), _Tally()
        self._guard: Guard | None = None
        self._allowed: AllowList | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._monitor = self._socket.get_monitor_socket(_REFUSALS)
        try:
            self._secure(insecure=insecure)
            self.address = self._bind(last_port)
        except BaseException:
            self.close()
            raise

    def register(self, poller: zmq.Poller) -> None:
        """Wake ``poller`` for messages and for refused handshakes."""
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def receive(self, most: int, now: float) -> Iterator[tuple[bytes, list[memoryview]]]:
        """Up to ``most`` messages that are there, those of peers over their rates left out: (peer, its frames)."""
        for _ in range(most):
            if not is_readable(self._socket):
                return
            frames: Sequence[Any] = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            peer = bytes(frames[0].buffer)
            if self._gate.lets_in(peer, now):
                self._current = frames[-1]
                try:
                    yield peer, [memoryview(frame.buffer) for frame in frames[1:]]
                finally:
                    self._current = None

    def lets_in_another(self, peer: bytes, now: float) -> bool:
        """Whether one more message that came together with the peer's last is looked at."""
        return self._gate.lets_in(peer, now)

    def note_malformed(self, peer: bytes, now: float) -> None:
        """A message of this peer was malformed; one that sends too many is not heard for a while."""
        if self._gate.note_malformed(peer, now):
            logger.warning(
                "peer %r (%s) sent more than queue.max_malformed_per_minute = %d malformed messages; it is not heard "
                "for %.0f s", peer, self._sender(), self._config.max_malformed_per_minute, BLOCKED_S,
            )  # fmt: skip

    def refuse_unauthenticated(self, type_: str) -> None:
        """What only the learner may say needs the run's own key, ``client.key``; without keys anyone may.

        Raises:
            QueueError: the message that is being handled came under another key.
        """
        if self._allowed is None or self._current is None:
            return
        name = self._allowed.name_of(str(self._current.get("User-Id")).encode())
        if name != DEFAULT_CLIENT:
            raise QueueError(
                f"expected {type_!r} under the learner's key, {DEFAULT_CLIENT}.key, got it under that of {name!r}, "
                f"which is for generators"
            )

    def note_refused(self, now: float) -> None:
        """Count handshakes that were refused since the last call; say so now and then."""
        while is_readable(self._monitor):
            parse_monitor_message(self._monitor.recv_multipart())
            self._refused.count += 1
        if news := self._refused.news(now):
            why = "no key, or one that is not in allowed.txt" if self._config.keys else "this server has no keys"
            logger.warning("refused %d handshakes (%d in all): %s", news, self._refused.count, why)

    def send(self, peer: bytes, frames: Sequence[Bytes]) -> None:
        """Hand a bundle of messages to the socket; what a peer does not read is dropped, for it asks again."""
        try:
            send_frames(self._socket, [peer, *frames])
        except zmq.Again:
            self._untaken.count += 1
            if news := self._untaken.news(time.monotonic()):
                num_bytes = sum(map(len, frames))
                logger.warning("%d replies were not taken, the last, of %d bytes, by %r", news, num_bytes, peer)

    def counters(self) -> dict[str, int]:
        """Messages that were malformed, that came over a rate, and handshakes that were refused, so far."""
        gate = self._gate
        return {
            "malformed": gate.num_malformed, "limited": gate.num_limited, "refused_handshakes": self._refused.count,
        }  # fmt: skip

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.term()

    def _sender(self) -> str:
        """The key, or without keys the address, behind the message that is being handled."""
        frame, name = self._current, "User-Id" if self._config.keys else "Peer-Address"
        return f"{name} {frame.get(name)}" if frame is not None else "of an earlier message"

    def _secure(self, *, insecure: bool) -> None:
        config = self._config
        refuse_open_bind(config.address or _ANY, insecure=insecure, has_keys=config.keys is not None)
        if config.keys is not None:
            keys = ServerKeys.load(config.keys)
            self._guard, self._allowed = keys.guard(self._socket, self._context), AllowList(keys.allowed)

    def _bind(self, last_port: int | None) -> str:
        wanted = self._config.address or _ANY
        host, port = check_address(wanted)
        socket = self._socket
        socket.setsockopt(zmq.MAXMSGSIZE, self.sizes.limits.max_bytes)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        socket.setsockopt(zmq.LINGER, 2000)
        # A client that reconnects comes under its old identity and must not be taken for a rival.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        shown = _shown(host)
        for candidate in [port] if port or last_port is None else [last_port, port]:
            try:
                socket.bind(f"tcp://{shown}:{candidate or '*'}")
                break
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE and candidate != port:
                    continue
                raise AddressError(
                    f"can't bind queue.address {wanted}: {error.strerror}; is another queue running there? Stop it, or "
                    f"choose another address"
                ) from error
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        bound_port = bound.decode().rsplit(":", 1)[1]
        if self._config.advertise is None:
            return f"tcp://{'127.0.0.1' if host in ('*', '0.0.0.0') else shown}:{bound_port}"
        advertised_host, advertised_port = check_address(self._config.advertise)
        return f"tcp://{_shown(advertised_host)}:{advertised_port or bound_port}"


_ANY = "tcp://127.0.0.1:0"


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
