"""Requests and messages that wait.

``PendingRequests`` has the requests that can't be answered yet. The server tries them again after every change of the
queue. ``HeldMessages`` has what arrives while the disk is full. The server handles it when a commit has succeeded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from async_rl.net.wire import Message
from async_rl.queue.core.generators import MAX_GENERATORS
from async_rl.queue.server.handlers import Deferred, Reply

_Key = tuple[bytes, str]
"""Peer and type of a request. A peer has at most one of each type."""
_MAX_PENDING = 2 * MAX_GENERATORS + 64
"""Maximum number of requests that wait: enough for a hello and a lease request of every generator. Further requests are
answered at once."""
_SAME_WAIT_S = 5.0
"""A request that was answered in vain and is repeated within this time belongs to the same wait."""
_MAX_HELD_BYTES = 256 << 20
_MAX_HELD = 10_000
"""Limits on what is kept while the disk is full."""


@dataclass(frozen=True, slots=True)
class Request:
    """The sender and the type of a request.

    Attributes:
        peer: the routing id of the sender's connection.
        request_id: the id that the reply repeats; None if the sender wants no reply.
        generator_id: the generator that sent the request; None if no generator sent it.
        type: the type name of the message.
        key: the sender's public key; empty on a server without keys.
    """

    peer: bytes
    request_id: str | None
    generator_id: str | None
    type: str
    key: str = ""


@dataclass(slots=True)
class _Pending:
    """A request that waits. ``since`` is when the wait of its sender began, maybe with an earlier request."""

    request: Request
    message: Message
    deferred: Deferred
    deadline: float
    since: float
    tried_at_revision: int = -1

    def must_wait(self, now: float) -> bool:
        return now < self.deadline and self.deferred.is_in_vain()


class PendingRequests:
    """The requests that wait for their replies.

    Args:
        revision: returns a number that grows with every change of the queue.
        send: sends a reply.
        attempt: calls the given function, which returns the reply to the request, or None if it must still wait. A
            refusal becomes an error reply.
    """

    def __init__(
        self, revision: Callable[[], int], send: Callable[[Request, Reply], None],
        attempt: Callable[[Request, Callable[[], Reply | None], float], Reply | Deferred | None],
    ) -> None:  # fmt: skip
        self._revision, self._send, self._attempt = revision, send, attempt
        self._pending: dict[_Key, _Pending] = {}
        self._all_tried_at: int | None = None
        """The revision at which all requests were tried."""
        self.due_at = math.inf
        """When ``answer`` must be called next, even if nothing changes: the end of a request's time, or earlier."""
        """No request's time is over before this."""
        self._in_vain: dict[tuple[bytes, str], tuple[float, float]] = {}
        """For the requests of each (peer, type) that waited in vain: since when, and when the last was answered; the
        oldest answer first."""

    def add(self, request: Request, message: Message, deferred: Deferred, now: float) -> None:
        """Add a request and try all requests. It replaces an earlier request of the same type from the same peer."""
        same = (request.peer, request.type)
        self._pending.pop(same, None)
        deadline = now + (deferred.wait_s if len(self._pending) < _MAX_PENDING else 0.0)
        since, answered_at = self._in_vain.pop(same, (now, now))
        is_same_wait = now - answered_at <= _SAME_WAIT_S
        self._pending[same] = _Pending(request, message, deferred, deadline, since if is_same_wait else now)
        self.due_at = min(self.due_at, deadline)
        if self._all_tried_at == self._revision() and self._is_answered(self._pending[same], now):
            del self._pending[same]
        if self._all_tried_at != self._revision():
            self.answer(now)

    def answer(self, now: float) -> None:
        """Try all requests in the order of their arrival, and again until no reply changes the queue."""
        if self._all_tried_at == self._revision() and now < self.due_at:
            return
        revision = None
        while revision != self._revision():
            revision = self._revision()
            tried = (key for key, pending in self._pending.items() if not pending.must_wait(now))
            for key in [key for key in tried if self._is_answered(self._pending[key], now)]:
                del self._pending[key]
        self._all_tried_at = revision
        self.due_at = min((pending.deadline for pending in self._pending.values()), default=math.inf)

    def pop_all(self) -> list[tuple[Request, Message]]:
        """Remove all requests. Return each with its message."""
        popped, self._pending = self._pending, {}
        return [(pending.request, pending.message) for pending in popped.values()]

    def waits(self, now: float) -> list[dict[str, Any]]:
        """Return who waits for what, and for how long, as plain data for ``async-rl status``.

        A client repeats a request that was answered in vain. Its wait counts from the first one.
        """
        return [
            {"who": p.request.generator_id or "learner", "for": p.request.type, "since_s": now - p.since}
            for p in self._pending.values()
        ]

    def _is_answered(self, pending: _Pending, now: float) -> bool:
        reply = None
        if pending.tried_at_revision != self._revision() and not pending.deferred.is_in_vain():
            reply = self._try(pending, now, last=False)
        if reply is None and now >= pending.deadline:
            reply = self._try(pending, now, last=True)
            if reply is not None:
                self._note_in_vain(pending, now)
        if reply is None:
            return False
        self._send(pending.request, reply)
        return True

    def _try(self, pending: _Pending, now: float, *, last: bool) -> Reply | None:
        reply = self._attempt(pending.request, lambda: pending.deferred.attempt(now, last), now)
        pending.tried_at_revision = self._revision()
        return reply if isinstance(reply, Reply) else None

    def _note_in_vain(self, pending: _Pending, now: float) -> None:
        """Remember since when the sender waits, and forget senders that have not repeated their requests."""
        self._in_vain.pop(key := (pending.request.peer, pending.request.type), None)
        self._in_vain[key] = pending.since, now
        while self._in_vain:
            oldest = next(iter(self._in_vain))
            if now - self._in_vain[oldest][1] <= _SAME_WAIT_S:
                return
            del self._in_vain[oldest]


class HeldMessages:
    """Messages that arrived while the disk was full, so that no change could be committed.

    A repeated request is kept once.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[bytes, str, str, str | None], list[memoryview]] = {}
        self._num_bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether to receive more messages. Messages that are not received stay in the sockets."""
        return self._num_bytes < _MAX_HELD_BYTES and len(self._held) < _MAX_HELD

    def add(self, peer: bytes, key: str, type_: str, request_id: str | None, frames: list[memoryview]) -> None:
        """Keep one message. ``key`` is the public key of its sender."""
        if (peer, key, type_, request_id) not in self._held:
            self._num_bytes += sum(map(len, frames))
            self._held[peer, key, type_, request_id] = frames

    def pop_all(self) -> list[tuple[bytes, str, list[memoryview]]]:
        """Remove and return all messages as (peer, key, frames), in the order of their arrival."""
        held, self._held, self._num_bytes = self._held, {}, 0
        return [(peer, key, frames) for (peer, key, _, _), frames in held.items()]
