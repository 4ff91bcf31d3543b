"""A client's side of memory that it shares with the queue server, if both are on one machine; see ``arena``.

``Connection`` asks for it anew whenever it is connected, for a server that was started again has other memory. Until
the server has agreed, and on other machines for good, bodies travel in the messages themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from async_rl.errors import WireError
from async_rl.net.codec import field
from async_rl.net.wire import Message, Piece
from async_rl.queue.arena import Arena, ArenaReader, Reference, make_arena
from async_rl.queue.neighbours import address_fields, address_from_fields
from async_rl.queue.storage.payloads import Body, Bytes, as_sent

logger = logging.getLogger(__name__)

Post = Callable[[str, dict[str, Any]], object]


class MemoryLink:
    """``own_bytes``: room for bodies that this client sends and that are not answered yet; 0 if it sends none."""

    def __init__(self, post: Post, own_bytes: int) -> None:
        self._post, self._own_bytes = post, own_bytes
        self._arena: Arena | None = None
        self._reader: ArenaReader | None = None
        self._from_bytes = 0
        self.is_shared = False

    def ask(self) -> None:
        """There is a new connection: forget what was agreed on the last one, and ask for memory again."""
        self._drop_reader()
        self._post("arena", {})

    def note(self, message: Message) -> None:
        """The server's answer to what this link has posted; an error is a no."""
        if message.type == "arena" and message.fields.get("pid") is not None:
            self._share(message)
        elif message.type == "shared":
            self.is_shared = message.fields.get("is_shared") is True
            if not self.is_shared:
                self._drop_reader()
            logger.debug("groups pass through %s", "shared memory" if self.is_shared else "the socket")

    def body_of(self, pieces: Sequence[Piece]) -> Body:
        """A body to be sent, of these pieces: in the arena if it can go as a reference and there is room."""
        if self.is_shared and self._arena is not None:
            length = sum(map(len, pieces))
            if length >= self._from_bytes and (block := self._arena.write(pieces, length)) is not None:
                return block
        return b"".join(pieces)

    def outgoing(self, bodies: Iterable[Body]) -> list[Bytes]:
        """What is sent for these bodies."""
        return as_sent(bodies, by_reference=self.is_shared)

    def incoming(self, frames: Iterable[memoryview]) -> list[memoryview] | None:
        """The bodies that came as these frames, or that they refer to. None if one is there no more: the message was
        for an earlier connection, or is a late repeat.

        Raises:
            WireError: a reference is impossible.
        """
        bodies: list[memoryview] = []
        for frame in frames:
            reference = Reference.read(frame)
            body = frame if reference is None else None if self._reader is None else self._reader.read(reference)
            if body is None:
                return None
            bodies.append(body)
        return bodies

    def close(self) -> None:
        self._drop_reader()
        if self._arena is not None:
            self._arena.close()

    def _share(self, message: Message) -> None:
        self._drop_reader()
        try:
            self._from_bytes = field(message.fields, "from_bytes", int)
            self._reader = ArenaReader(address_from_fields(message.fields))
        except (OSError, WireError) as error:
            logger.debug("the queue server's memory can't be read from here: %s", error)
            return
        own: dict[str, Any] = {}
        if self._own_bytes and self._arena is None:
            self._arena = make_arena(self._own_bytes)
        if self._arena is not None:
            own = {**address_fields(self._arena.address), "token": self._arena.token}
        self._post("share", {"proof": self._reader.token, **own})

    def _drop_reader(self) -> None:
        self.is_shared = False
        if self._reader is not None:
            self._reader.close()
            self._reader = None
