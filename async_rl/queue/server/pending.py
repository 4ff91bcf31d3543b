"""Requests that wait for their answer: tried again after every change of the buffer, until their time is over.

Used by ``service`` alone, from its one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from async_rl.queue.server.registry import MAX_GENERATORS
from async_rl.queue.server.replies import Reply, Waiting

_MAX_PARKED = 2 * MAX_GENERATORS + 64
"""A hello and a lease request of every generator; beyond, requests are answered at once."""


@dataclass(frozen=True, slots=True)
class Request:
    """Who asked for what. ``generator_id`` is None for messages of others."""

    identity: bytes
    request_id: str | None
    generator_id: str | None
    type: str


@dataclass(slots=True)
class _Parked:
    request: Request
    waiting: Waiting
    deadline: float
    since: float
    tried: int = -1


class Parking:
    """``revision`` grows with every change, ``send`` takes an answer, ``failed`` is the answer to an error."""

    def __init__(
        self, revision: Callable[[], int], send: Callable[[Request, Reply], None],
        failed: Callable[[bytes, Exception], Reply],
    ) -> None:  # fmt: skip
        self._revision, self._send, self._failed = revision, send, failed
        self._parked: list[_Parked] = []

    def park(self, request: Request, waiting: Waiting, now: float) -> None:
        """One waiting request of a type a client: a newer one, or the same sent again, replaces it."""
        same = (request.identity, request.type)
        self._parked = [p for p in self._parked if (p.request.identity, p.request.type) != same]
        deadline = now + (waiting.wait_s if len(self._parked) < _MAX_PARKED else 0.0)
        self._parked.append(_Parked(request, waiting, deadline, since=now))
        self.answer(now)

    def answer(self, now: float) -> None:
        """Try all, in order of arrival, until an answer to one no longer changes what another gets."""
        revision = None
        while revision != self._revision():
            revision = self._revision()
            self._parked = [parked for parked in self._parked if not self._is_answered(parked, now)]

    def answer_only(self, type_: str) -> None:
        """Try those of this type, once."""
        for parked in [p for p in self._parked if p.request.type == type_ and p.tried != self._revision()]:
            if self._is_answered(parked, time.monotonic()):
                self._parked.remove(parked)

    def deadlines(self) -> Iterator[float]:
        """Until when each may wait."""
        return (parked.deadline for parked in self._parked)

    def waits(self, now: float) -> list[dict[str, Any]]:
        """Who waits for what, and since when: plain data for a person to see."""
        return [
            {"who": p.request.generator_id or "learner", "for": p.request.type, "since_s": now - p.since}
            for p in self._parked
        ]

    def _is_answered(self, parked: _Parked, now: float) -> bool:
        last, revision = now >= parked.deadline, self._revision()
        if parked.tried == revision and not last:
            return False
        try:
            reply = parked.waiting.attempt(now, last)
        except Exception as error:
            reply = self._failed(parked.request.identity, error)
        parked.tried = self._revision()
        if reply is None:
            return False
        self._send(parked.request, reply)
        return True
