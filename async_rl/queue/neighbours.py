"""The queue server's side of memory that it shares with clients on its machine; see ``arena``.

A client asks for the server's arena ("arena"), and proves that it can read it by the token in it ("share"); one that
sends bodies says where its own arena is. From then on bodies of some size travel between the two as references. Each
is copied once, out of the client's arena into the server's: what was checked on arrival is what the learner gets.

Used by ``service`` alone, from its one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.errors import WireError
from async_rl.net.codec import field
from async_rl.net.wire import Message
from async_rl.queue.arena import Arena, ArenaAddress, ArenaReader, Block, Reference
from async_rl.queue.server.replies import Reply
from async_rl.queue.storage.payloads import Body, Bytes, as_sent

TYPES = frozenset({"arena", "share"})
"""Of the messages that this answers."""
_MOST_NEIGHBOURS = 256
_LOOK_EVERY_S = 5.0


class NotSharedError(Exception):
    """A reference came from a peer whose memory is not known here; it has to send the body itself."""


class OutdatedError(Exception):
    """A body is no longer where its reference says. Its message was answered, so this one is a late repeat of it."""


@dataclass(slots=True)
class _Neighbour:
    """A peer that reads the server's arena; ``reader`` reads its own, if it has one."""

    reader: ArenaReader | None


class Neighbours:
    """Peers that share memory with the server. Without an ``arena`` there are none.

    ``from_bytes``: smaller bodies are sent, which is cheaper.
    """

    def __init__(self, arena: Arena | None, from_bytes: int) -> None:
        self._arena, self._from_bytes = arena, from_bytes
        self._peers: OrderedDict[bytes, _Neighbour] = OrderedDict()
        self._looked_at = 0.0

    def __len__(self) -> int:
        return len(self._peers)

    def status(self) -> dict[str, int]:
        """How many clients share memory, and how much of the server's is in use, of how much."""
        arena = self._arena
        if arena is None:
            return {}
        return {"clients": len(self._peers), "bytes": arena.used_bytes, "max_bytes": arena.max_bytes}

    def answer(self, peer: bytes, message: Message) -> Reply | None:
        """The reply to what concerns shared memory; None to everything else.

        Raises:
            WireError: it is malformed.
        """
        if message.type == "arena":
            arena = self._arena
            # It asks again after its connection broke, and can read nothing until it has.
            self._forget(peer)
            own = {} if arena is None else {**address_fields(arena.address), "from_bytes": self._from_bytes}
            return Reply("arena", own)
        if message.type == "share":
            return Reply("shared", {"is_shared": self._accept(peer, message.fields)})
        return None

    def fetch(self, peer: bytes, frames: Sequence[memoryview], max_bytes: int) -> list[Body]:
        """The bodies that came as these frames, or that they refer to.

        Blocks among them are the caller's: it keeps or frees them (``free_unkept``).

        Raises:
            WireError: there would be more than ``max_bytes`` of them. NotSharedError, OutdatedError: see there.
        """
        references = [Reference.read(frame) for frame in frames]
        if not any(references):
            return list(frames)
        if sum(r.length for r in references if r is not None) > max_bytes:
            raise WireError(f"expected references to at most {max_bytes} bytes")
        neighbour = self._peers.get(peer)
        if neighbour is None or neighbour.reader is None:
            raise NotSharedError
        bodies: list[Body] = []
        try:
            for frame, reference in zip(frames, references, strict=True):
                bodies.append(frame if reference is None else self._copied(neighbour.reader, reference))
        except OutdatedError:
            free_unkept(bodies)
            raise
        return bodies

    def outgoing(self, peer: bytes, bodies: Iterable[Body]) -> list[Bytes]:
        """What is sent to this peer for these bodies."""
        return as_sent(bodies, by_reference=peer in self._peers)

    def look(self, now: float) -> None:
        """Now and then: let go of the memory of processes that have ended."""
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        for peer, neighbour in list(self._peers.items()):
            if neighbour.reader is not None and not neighbour.reader.has_owner:
                self._forget(peer)

    def close(self) -> None:
        for peer in list(self._peers):
            self._forget(peer)
        if self._arena is not None:
            self._arena.close()

    def _accept(self, peer: bytes, fields: Any) -> bool:
        if self._arena is None or field(fields, "proof", bytes) != self._arena.token:
            return False
        reader: ArenaReader | None = None
        if "pid" in fields:
            token = field(fields, "token", bytes)
            try:
                reader = ArenaReader(address_from_fields(fields))
            except OSError:
                return False
            if reader.token != token:
                reader.close()
                return False
        self._forget(peer)
        self._peers[peer] = _Neighbour(reader)
        if len(self._peers) > _MOST_NEIGHBOURS:
            self._forget(next(iter(self._peers)))
        return True

    def _forget(self, peer: bytes) -> None:
        neighbour = self._peers.pop(peer, None)
        if neighbour is not None and neighbour.reader is not None:
            neighbour.reader.close()

    def _copied(self, reader: ArenaReader, reference: Reference) -> Body:
        block = None if self._arena is None else self._arena.allocate(reference.length)
        if block is None:
            # A full arena is no reason to refuse: other memory does as well, and only sending it on costs more.
            room = bytearray(reference.length)
            if not reader.read_into(reference, memoryview(room)):
                raise OutdatedError
            return room
        if not reader.read_into(reference, block.view):
            block.free()
            raise OutdatedError
        return block


def free_unkept(bodies: Iterable[Body]) -> None:
    """Free the blocks that nobody has kept."""
    for body in bodies:
        if isinstance(body, Block) and not body.is_kept:
            body.free()


def address_fields(address: ArenaAddress) -> dict[str, Any]:
    return {"pid": address.pid, "fd": address.fd}


def address_from_fields(fields: Any) -> ArenaAddress:
    """The inverse of ``address_fields``.

    Raises:
        WireError: something is missing or of the wrong kind.
    """
    address = ArenaAddress(field(fields, "pid", int), field(fields, "fd", int))
    if address.pid < 1 or address.fd < 0:
        raise WireError(f"expected a process and a descriptor, got {address.pid} and {address.fd}")
    return address
