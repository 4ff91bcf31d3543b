"""Requests and replies inside the server: who asked for what, what is answered, and what waits for its answer.

A handler returns a ``Reply``, or a ``Deferred`` where the answer has to wait (a long poll). ``PendingRequests`` tries
deferred requests again after every change of the queue, until their time is up. The server's loop owns it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from async_rl.net.wire import Frame
from async_rl.queue.server.registry import MAX_GENERATORS

_MAX_PENDING = 2 * MAX_GENERATORS + 64
"""A hello and a lease request of every generator. Beyond, requests are answered at once."""


@dataclass(frozen=True, slots=True)
class Request:
    """Who asked for what. ``generator_id`` is None for messages that no generator sent."""

    peer: bytes
    request_id: str | None
    generator_id: str | None
    type: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply's record and parts; the server adds ``request_id`` and the notice.

    ``further`` are more messages of the same reply; all but the last have ``more`` set.
    """

    record: msgspec.Struct
    parts: Sequence[Frame] = ()
    further: Sequence[Reply] = ()


@dataclass(frozen=True, slots=True)
class Deferred:
    """A reply that can't be given yet. ``attempt(now, last)`` returns it, or None; with ``last`` it must return one."""

    wait_s: float
    attempt: Callable[[float, bool], Reply | None]


@dataclass(slots=True)
class _Pending:
    request: Request
    deferred: Deferred
    deadline: float
    since: float
    tried_at_revision: int = -1


class PendingRequests:
    """Deferred requests. ``revision`` grows with every change of the queue, ``send`` sends a reply, ``failed`` makes
    the reply to an exception.
    """

    def __init__(
        self, revision: Callable[[], int], send: Callable[[Request, Reply], None],
        failed: Callable[[bytes, Exception], Reply],
    ) -> None:  # fmt: skip
        self._revision, self._send, self._failed = revision, send, failed
        self._pending: list[_Pending] = []

    def add(self, request: Request, deferred: Deferred, now: float) -> None:
        """Add a request and try all. It replaces an earlier request of the same type and peer."""
        same = (request.peer, request.type)
        self._pending = [p for p in self._pending if (p.request.peer, p.request.type) != same]
        deadline = now + (deferred.wait_s if len(self._pending) < _MAX_PENDING else 0.0)
        self._pending.append(_Pending(request, deferred, deadline, since=now))
        self.answer(now)

    def answer(self, now: float) -> None:
        """Try all in order of arrival, again and again until no answer changes the queue any more."""
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

    def deadlines(self) -> Iterator[float]:
        """The deadline of every request."""
        return (pending.deadline for pending in self._pending)

    def waits(self, now: float) -> list[dict[str, Any]]:
        """Who waits for what, and for how long, as plain data for ``async-rl status``."""
        return [
            {"who": p.request.generator_id or "learner", "for": p.request.type, "since_s": now - p.since}
            for p in self._pending
        ]

    def _is_answered(self, pending: _Pending, now: float) -> bool:
        last = now >= pending.deadline
        if pending.tried_at_revision == self._revision() and not last:
            return False
        try:
            reply = pending.deferred.attempt(now, last)
        except Exception as error:
            reply = self._failed(pending.request.peer, error)
        pending.tried_at_revision = self._revision()
        if reply is None:
            return False
        self._send(pending.request, reply)
        return True
