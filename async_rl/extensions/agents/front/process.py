"""The generator's side of its HTTP front: starts the process, exchanges messages with it, replaces it if it dies.

The socket that listens belongs to the generator and outlives the front, so the address stays, and clients that connect
while the front is replaced wait for the new one.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import to_builtins

from async_rl.extensions.agents.front.messages import (
    Accept,
    Claimed,
    Close,
    ClosedFor,
    Join,
    Offered,
    Open,
    Piece,
    Refuse,
    Reply,
    ToFront,
    ToGenerator,
    pack,
    take_for_generator,
)
from async_rl.extensions.agents.front.requests import RequestRules
from async_rl.extensions.agents.relay.loopback import BACKLOG, require_packages
from async_rl.net.keys import ClientKeys
from async_rl.process.helper import Channel, Helper

logger = logging.getLogger(__name__)

_CALLS_OF_FRONT = 1 << 40
"""Each front numbers its calls from a multiple of this on, so that no number occurs twice."""


@dataclass(frozen=True, slots=True)
class FrontLost:
    """The front has died with all its connections: no answer that is on its way, or awaited, reaches an agent."""


class Front:
    """The HTTP front of one generator. No method waits.

    Args:
        rules: how requests are taken.
        tokenizer: a directory with the files of a tokenizer, for chats. None: there are none.
        template_arguments: further variables of the chat template.
        max_model_len: the longest sequence, in tokens.

    Raises:
        ConfigError: the packages of the extra ``agents`` are missing.
    """

    def __init__(
        self, rules: RequestRules, max_model_len: int, tokenizer: Path | None = None,
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        require_packages("generator.serve")
        self._settings: dict[str, Any] = {
            "rules": to_builtins(rules), "max_model_len": max_model_len,
            "tokenizer": "" if tokenizer is None else str(tokenizer), "template_arguments": dict(template_arguments),
        }  # fmt: skip
        self._keys: set[str] = set()
        self._join: Join | None = None
        self._offered: dict[str, bytes] = {}
        self._claimed: set[str] = set()
        self._num_started = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self._start()

    @property
    def url(self) -> str:
        """The endpoint's address, without a path."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def pid(self) -> int:
        return self._helper.pid

    def open(self, keys: Iterable[str]) -> None:
        """Take calls with these keys from now on."""
        new = list(keys)
        self._keys.update(new)
        self._send(Open(new))

    def join(self, address: str, keys: ClientKeys | None) -> None:
        """Connect to the relay at ``address``, by which programs on other machines reach this front."""
        self._join = (
            Join(address, b"", b"", b"") if keys is None else Join(address, keys.public, keys.secret, keys.server)
        )
        self._send(self._join)

    def offer(self, key: str, task: bytes) -> None:
        """Let a program on another machine take an open session."""
        self._offered[key] = task
        self._send(Offered(key, task))

    def close_session(self, key: str, reason: ClosedFor) -> None:
        """Take no more calls with this key, and answer those that run with the reason."""
        self._keys.discard(key)
        self._offered.pop(key, None)
        self._claimed.discard(key)
        self._send(Close(key, reason))

    def reply(self, message: Reply | Piece | Accept | Refuse) -> None:
        """Answer a call, or begin to. Nothing happens if its client has gone."""
        self._send(message)

    def poll(self) -> list[ToGenerator | FrontLost]:
        """Return what has happened since the last call. A front that died is replaced."""
        events: list[ToGenerator | FrontLost] = []
        self._channel.send()
        is_alive = self._channel.receive()
        while (message := take_for_generator(self._channel.incoming)) is not None:
            events.append(message)
            if isinstance(message, Claimed) and message.key in self._offered:
                (self._claimed.add if message.is_taken else self._claimed.discard)(message.key)
        if not is_alive:
            logger.warning("the HTTP front (process %d) has ended; another one is started", self.pid)
            self._replace()
            events.append(FrontLost())
        return events

    def _replace(self) -> None:
        """Start another front. Sessions that programs elsewhere have taken are not offered again."""
        self._helper.stop()
        self._start()
        self._send(Open(sorted(self._keys)))
        if self._join is not None:
            self._send(self._join)
        for key in self._offered.keys() - self._claimed:
            self._send(Offered(key, self._offered[key]))

    def close(self) -> None:
        """End the front, and close the address."""
        self._helper.stop()
        self._listener.close()

    def _start(self) -> None:
        fd = self._listener.fileno()
        settings = json.dumps({**self._settings, "first_call": self._num_started * _CALLS_OF_FRONT})
        self._helper = Helper("async_rl.extensions.agents.front.server", str(fd), settings, pass_fds=(fd,))
        self._channel = Channel(self._helper.socket)
        self._num_started += 1

    def _send(self, message: ToFront) -> None:
        self._channel.send(pack(message))
