"""Requests that can't be answered yet. The server adds them, and tries them again after every change of the queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from async_rl.net.wire import Message
from async_rl.queue.server.handlers import MAX_GENERATORS, Deferred, Reply

_MAX_PENDING = 2 * MAX_GENERATORS + 64
"""Enough for a hello and a lease request of every generator. Above this number, requests are answered at once."""


@dataclass(frozen=True, slots=True)
class Request:
    """The sender and type of a request. ``generator_id`` is None for messages that no generator sent.

    ``key`` is the sender's public key; empty on a server without keys.
    """

    peer: bytes
    request_id: str | None
    generator_id: str | None
    type: str
    key: str = ""


@dataclass(slots=True)
class _Pending:
    request: Request
    message: Message
    deferred: Deferred
    deadline: float
    since: float
    tried_at_revision: int = -1


class PendingRequests:
    """Deferred requests.

    ``revision`` grows with every change of the queue. ``send`` sends a reply. ``attempt`` calls the given function,
    which returns the reply to this request or None, and turns refusals into replies.
    """

    def __init__(
        self, revision: Callable[[], int], send: Callable[[Request, Reply], None],
        attempt: Callable[[Request, Callable[[], Reply | None], float], Reply | Deferred | None],
    ) -> None:  # fmt: skip
        self._revision, self._send, self._attempt = revision, send, attempt
        self._pending: list[_Pending] = []

    def add(self, request: Request, message: Message, deferred: Deferred, now: float) -> None:
        """Add a request and try all. It replaces an earlier request of the same type and peer."""
        same = (request.peer, request.type)
        self._pending = [p for p in self._pending if (p.request.peer, p.request.type) != same]
        deadline = now + (deferred.wait_s if len(self._pending) < _MAX_PENDING else 0.0)
        self._pending.append(_Pending(request, message, deferred, deadline, since=now))
        self.answer(now)

    def answer(self, now: float) -> None:
        """Try all requests in order of arrival. Repeat until no answer changes the queue."""
        revision = None
        while revision != self._revision():
            revision = self._revision()
            self._pending = [pending for pending in self._pending if not self._is_answered(pending, now)]

    def answer_only(self, type_: str) -> None:
        """Try the requests of this type once."""
        for pending in self._pending[:]:
            is_due = pending.request.type == type_ and pending.tried_at_revision != self._revision()
            if is_due and self._is_answered(pending, time.monotonic()):
                self._pending.remove(pending)

    def pop_all(self) -> list[tuple[Request, Message]]:
        """Remove all requests. Return each with its message."""
        popped, self._pending = self._pending, []
        return [(pending.request, pending.message) for pending in popped]

    def deadlines(self) -> Iterator[float]:
        """The deadline of every request."""
        return (pending.deadline for pending in self._pending)

    def waits(self, now: float) -> list[dict[str, Any]]:
        """The pending requests with their peers and waiting times, as plain data for ``async-rl status``."""
        return [
            {"who": p.request.generator_id or "learner", "for": p.request.type, "since_s": now - p.since}
            for p in self._pending
        ]

    def _is_answered(self, pending: _Pending, now: float) -> bool:
        last = now >= pending.deadline
        if pending.tried_at_revision == self._revision() and not last:
            return False
        reply = self._attempt(pending.request, lambda: pending.deferred.attempt(now, last), now)
        pending.tried_at_revision = self._revision()
        if not isinstance(reply, Reply):
            return False
        self._send(pending.request, reply)
        return True
