"""A generator's client of the queue. Only ``poll`` and ``hello`` block; all requests are pipelined.

Returns and failures are repeated until they are answered, also after a restart of the server. Every answer is an event
of ``poll``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from async_rl.errors import AddressError, QueueError, WireError
from async_rl.net.codec import encode_group, read_as
from async_rl.net.keys import ClientKeys
from async_rl.net.wire import Message
from async_rl.queue import messages
from async_rl.queue.client.connection import Connection, Outstanding, raise_error
from async_rl.queue.messages import (
    Announced,
    Announcement,
    Cancelled,
    FailureCause,
    Finished,
    GeneratorEvent,
    GeneratorStats,
    LeasesGranted,
    Returned,
    Welcome,
)
from async_rl.queue.parity import Answer, encode_answer
from async_rl.records import Group

_HELLO_WAIT_S = 5.0
_HELLO_MARGIN_S = 0.5
"""Time before the end of the wait at which the server must answer, so that its reason still arrives."""
_RETURN_BYTES = 1 << 20
_RETURN_GROUPS = 16
"""Groups that finish between two polls share a message, up to these limits in bytes and groups. For a small group, most
of the cost is its message."""


class GeneratorQueue:
    """The queue as a generator uses it. One thread owns it.

    Raises:
        AddressError: the address is malformed.
    """

    def __init__(self, address: str, generator_id: str, keys: ClientKeys | None = None) -> None:
        self.address, self.generator_id = address, generator_id
        self._connection = Connection(address, generator_id, keys)
        self._announcement: Announcement | None = None
        self._finished = False
        self._is_known = False
        self._early: list[GeneratorEvent] = []
        self._returning: dict[str, bytes] = {}
        self._num_unanswered = 0

    def hello(self, wait_s: float, backend: str, host: str = "", *, replaces: str | None = None) -> Welcome:
        """Register this generator. Wait up to ``wait_s`` for a queue, and for a learner attached to it.

        ``replaces`` names a dead generator, whose leases are requeued at once.

        Raises:
            AddressError: no queue answered. QueueError: a queue answered, but no learner has attached.
        """
        deadline = time.monotonic() + wait_s
        reason = ""
        hello = messages.Hello(self.generator_id, host or socket.gethostname(), backend, replaces)
        while (left_s := deadline - time.monotonic()) > (_HELLO_MARGIN_S if reason else 0):
            held_s = max(0.0, min(_HELLO_WAIT_S, left_s - _HELLO_MARGIN_S))
            request_id = self._connection.post(hello, wait_s=held_s)
            message = self._answer_to(request_id, min(deadline, time.monotonic() + 2 * _HELLO_WAIT_S))
            if message is not None and message.type == "welcome":
                self._is_known = True
                return _welcome(message)
            if message is not None:
                reason = read_as(message.fields, messages.NotYet).reason
        if reason:
            raise QueueError(
                f"the queue at {self.address} answered, but no learner attached in {wait_s:.0f} s: {reason}"
            )
        raise AddressError(
            f"no queue answered at {self.address} within {wait_s:.0f} s; is it running, and reachable? Also, "
            f"{self._connection.keys_hint}"
        )

    @property
    def lease_request_outstanding(self) -> bool:
        return self._connection.has_outstanding("lease")

    @property
    def heartbeat_outstanding(self) -> bool:
        return self._connection.has_outstanding("heartbeat")

    @property
    def num_unanswered_returns(self) -> int:
        """Number of returned groups and failures that the queue has not answered yet."""
        return self._num_unanswered

    @property
    def silent_s(self) -> float:
        """Seconds since the last reply, while one is overdue; 0 otherwise."""
        return self._connection.silent_s

    @property
    def finished(self) -> bool:
        """Whether the queue said that the run is over."""
        return self._finished

    @property
    def announcement(self) -> Announcement | None:
        """The newest version that the queue announced."""
        return self._announcement

    def request_leases(self, lineage: str, version: int, max_leases: int, wait_s: float) -> None:
        """Ask for leases, sampling with ``version`` of ``lineage``. Does nothing while one request is outstanding."""
        if not self.lease_request_outstanding:
            request = messages.LeaseRequest(self.generator_id, lineage, version, max_leases)
            self._connection.post(request, wait_s=wait_s)

    def heartbeat(self, progress: Mapping[str, int], stats: GeneratorStats) -> None:
        """Report progress by lease, as numbers that must grow. Does nothing while one heartbeat is outstanding."""
        if not self.heartbeat_outstanding:
            self._connection.post(messages.Heartbeat(self.generator_id, dict(progress), stats))

    def return_group(self, group: Group) -> None:
        """Send a finished group with the next ``poll``. A ``Returned`` event has its outcome."""
        self._returning[group.lease_id] = encode_group(group)
        self._num_unanswered += 1
        num_bytes = sum(map(len, self._returning.values()))
        if num_bytes >= _RETURN_BYTES or len(self._returning) >= _RETURN_GROUPS:
            self._send_returns()

    def fail(self, lease_id: str, cause: FailureCause, detail: str = "") -> None:
        """Return a lease unsampled. A ``Returned`` event answers."""
        self._num_unanswered += 1
        self._connection.post(messages.FailLease(self.generator_id, lease_id, cause, detail[:2000]))

    def answer_probe(self, lineage: str, answer: Answer) -> None:
        """Send the answer to a probe. The learner requests it from the queue. It is repeated until the queue has it."""
        data = encode_answer(answer)
        self._connection.post(messages.AnswerProbe(self.generator_id, lineage, answer.version, data))

    def poll(self, timeout_s: float) -> list[GeneratorEvent]:
        """Receive the queue's messages as events. Return with the first, or after ``timeout_s``.

        Raises:
            QueueError: the server refused a request.
        """
        self._send_returns()
        events, self._early = self._early, []
        for request, message in self._connection.poll(0.0 if events else timeout_s):
            events += self._events(request, message)
        return events

    def close(self) -> None:
        """Leave the queue. It requeues the remaining leases at once."""
        if self._is_known:
            self._connection.send_once(messages.Goodbye(self.generator_id))
        self._connection.close()

    def _send_returns(self) -> None:
        if not self._returning:
            return
        returning, self._returning = self._returning, {}
        request = messages.ReturnGroups(self.generator_id, tuple(returning))
        self._connection.post(request, list(returning.values()))

    def _answer_to(self, request_id: str, deadline: float) -> Message | None:
        while (left_s := deadline - time.monotonic()) > 0:
            for request, message in self._connection.poll(left_s):
                if request is not None and request.request_id == request_id:
                    self._early += self._notice(message)
                    raise_error(message)
                    return message
                self._early += self._events(request, message)
        self._connection.forget(request_id)
        return None

    def _events(self, request: Outstanding | None, message: Message) -> list[GeneratorEvent]:
        raise_error(message)
        events = self._notice(message)
        if message.type == "leases":
            events.append(read_as(message.fields, LeasesGranted))
        elif message.type == "returned":
            returned = _returned(message)
            self._num_unanswered -= len(returned)
            events += returned
        return events

    def _notice(self, message: Message) -> list[GeneratorEvent]:
        """The events in a message's notice, which any message may carry."""
        events: list[GeneratorEvent] = []
        announced = message.fields.get("announcement")
        if announced is not None:
            announcement = read_as(announced, Announcement)
            if announcement != self._announcement:
                self._announcement = announcement
                events.append(Announced(announcement))
        cancelled = read_as(message.fields.get("cancelled", ()), tuple[str, ...])
        if cancelled:
            events.append(Cancelled(cancelled))
        if message.fields.get("finished") and not self._finished:
            self._finished = True
            events.append(Finished())
        return events


def _returned(message: Message) -> list[Returned]:
    verdicts = read_as(message.fields, messages.ReturnReply).verdicts
    return [Returned(lease_id, verdict) for lease_id, verdict in verdicts.items()]


def _welcome(message: Message) -> Welcome:
    reply = read_as(message.fields, messages.WelcomeReply)
    if len(reply.files) != len(message.parts):
        raise WireError(f"expected the {len(reply.files)} files of a welcome, got {len(message.parts)}")
    files = {name: bytes(part) for name, part in zip(reply.files, message.parts, strict=True)}
    return Welcome(reply.run_id, reply.config_toml, files)
