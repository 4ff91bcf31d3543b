"""The server's state about its clients: the known generators, and the requests that wait for a reply.

Generator ids come from peers, so everything that is stored by id is stored in ``GeneratorRegistry``, with one limit on
their number. A handler returns a ``Reply``, or a ``Deferred`` where the answer has to wait (a long poll);
``PendingRequests`` tries deferred requests again after every change of the queue, until their time is up. No sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from async_rl.errors import QueueError, WireError
from async_rl.net.wire import Frame
from async_rl.queue.messages import LeasesGranted

MAX_GENERATORS = 4096
FORGET_S = 300.0
"""A generator that was silent for this long, or that left, is removed when another needs its place."""
MAX_ANSWER_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """A generator's answer to the probe of one version, still encoded (``parity.encode_answer``)."""

    lineage: str
    version: int
    data: bytes


@dataclass(slots=True)
class Generator:
    """The server's state about one generator.

    Attributes:
        peer: the routing id of its connection; None if unknown.
        granted: the id of its last lease request, and the answer.
        told: its active version, and the version that the last reply asked it to activate.
        answer: its newest probe answer. Not journaled: after a restart the learner asks again at a later version.
    """

    seen_at: float
    peer: bytes | None = None
    has_left: bool = False
    granted: tuple[str, LeasesGranted] | None = None
    told: tuple[Any, ...] | None = None
    answer: ProbeAnswer | None = None


class GeneratorRegistry:
    """Generators by id, at most ``max_generators``."""

    def __init__(self, max_generators: int = MAX_GENERATORS) -> None:
        self._max_generators = max_generators
        self._generators: dict[str, Generator] = {}
        self._by_peer: dict[bytes, str] = {}
        self.num_changes = 0
        """Counts changes of ``granted``."""

    def __len__(self) -> int:
        return len(self._generators)

    def seen(self, generator_id: str, now: float, peer: bytes | None = None) -> Generator:
        """Return the generator that sent a message. Register a new one. With ``peer``, its answers are sent there.

        Raises:
            WireError: the connection belongs to another generator. QueueError: the registry is full.
        """
        if peer is not None and (known := self._by_peer.get(peer, generator_id)) != generator_id:
            # Otherwise one peer could fill the registry, and get every notice once for each of its ids.
            raise WireError(f"expected messages of generator {known!r} on this connection, got one of {generator_id!r}")
        generator = self._generators.get(generator_id)
        if generator is None:
            self._make_room(now)
            generator = self._generators[generator_id] = Generator(now)
        generator.seen_at = max(now, generator.seen_at)
        if peer is not None and generator.peer != peer:
            self._unbind(generator)
            generator.peer = peer
            self._by_peer[peer] = generator_id
        return generator

    def peer_of(self, generator_id: str) -> bytes | None:
        """The connection of this generator's last message."""
        generator = self._generators.get(generator_id)
        return None if generator is None else generator.peer

    def grant(self, generator: Generator, request_id: str, answer: LeasesGranted) -> None:
        """Keep the answer to the generator's last lease request, in case the request is repeated."""
        generator.granted = (request_id, answer)
        self.num_changes += 1

    def granted(self) -> dict[str, tuple[str, LeasesGranted]]:
        """The last lease request of every generator, with its answer."""
        return {name: g.granted for name, g in self._generators.items() if g.granted is not None}

    def answers_since(self, lineage: str, version: int) -> dict[str, bytes]:
        """The probe answers of ``version`` or later, by generator."""
        answers = {name: g.answer for name, g in self._generators.items() if g.answer is not None}
        return {name: a.data for name, a in answers.items() if a.lineage == lineage and a.version >= version}

    def leave(self, generator_id: str) -> None:
        """Mark a generator as gone: it sent ``Goodbye``, or is replaced."""
        generator = self._generators.get(generator_id)
        if generator is not None:
            self._unbind(generator)
            generator.has_left, generator.granted, generator.told = True, None, None
            self.num_changes += 1

    def has_left(self, generator_id: str) -> bool:
        generator = self._generators.get(generator_id)
        return generator is not None and generator.has_left

    def forget_answers(self) -> None:
        """Delete the kept lease answers, because a new learner attached."""
        for generator in self._generators.values():
            generator.granted = generator.told = None
        self.num_changes += 1

    def _unbind(self, generator: Generator) -> None:
        if generator.peer is not None:
            self._by_peer.pop(generator.peer, None)
        generator.peer = None

    def _make_room(self, now: float) -> None:
        if len(self._generators) < self._max_generators:
            return
        for name, generator in list(self._generators.items()):
            if generator.has_left or now - generator.seen_at > FORGET_S:
                self._unbind(self._generators.pop(name))
                self.num_changes += 1
        if len(self._generators) >= self._max_generators:
            raise QueueError(
                f"expected at most {self._max_generators} generators, and as many are registered. One that is silent "
                f"for {FORGET_S:.0f} s loses its place: try again later, and see `async-rl status` for the list"
            )


_MAX_PENDING = 2 * MAX_GENERATORS + 64
"""A hello and a lease request of every generator. Above this number, requests are answered at once."""


@dataclass(frozen=True, slots=True)
class Request:
    """The sender and type of a request. ``generator_id`` is None for messages that no generator sent."""

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
        try:
            reply = pending.deferred.attempt(now, last)
        except Exception as error:
            reply = self._failed(pending.request.peer, error)
        pending.tried_at_revision = self._revision()
        if reply is None:
            return False
        self._send(pending.request, reply)
        return True
