"""The two clients of the queue: ``LearnerQueue`` for rank 0 of the learner, ``GeneratorQueue`` for a generator.

``LearnerQueue`` is synchronous. ``GeneratorQueue`` pipelines its requests: only ``poll`` and ``hello`` block, and every
answer is an event of ``poll``. Both repeat a request until it is answered, also after a restart of the server.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from async_rl.errors import AddressError, IdInUseError, QueueError, WireError
from async_rl.net.codec import decode_group, encode_group, read_as
from async_rl.net.keys import ClientKeys
from async_rl.net.wire import Frame, Message
from async_rl.queue import messages
from async_rl.queue.client.connection import Connection, Outstanding, raise_error
from async_rl.queue.messages import (
    SAME_VERSION,
    WIRE_TYPES,
    Acked,
    Announced,
    Announcement,
    Batch,
    BatchPart,
    Cancelled,
    EvalResult,
    FailureCause,
    Finished,
    GeneratorEvent,
    GeneratorStats,
    LeasesGranted,
    NotReady,
    Returned,
    StepAck,
    Take,
    TakenGroup,
    Welcome,
)
from async_rl.queue.parity import Answer, decode_answer, encode_answer
from async_rl.records import Group, Prompt

logger = logging.getLogger(__name__)

ALIVE_EVERY_S = 5.0
_LOOK_EVERY_S = 0.25
_LOST_AFTER_S = 1.0
"""A connection that is lost for this long is logged."""
_MAX_RESTARTS = 5
"""Restarts of the server for one request. The request itself may crash the server."""
_HELLO_WAIT_S = 5.0
_ID_IN_USE_S = 0.5
"""Interval of the tries to get an id that another generator has."""
_HELLO_MARGIN_S = 0.5
"""Time before the end of the wait at which the server must answer, so that its reason still arrives."""
_RETURN_BYTES = 1 << 20
_RETURN_GROUPS = 16
"""Groups that finish between two polls share a message, up to these limits in bytes and groups. For a small group, most
of the cost is its message."""


# The learner.


class _KeepAlive:
    """Reports from a separate thread and socket that the learner is alive, even while the main thread trains."""

    def __init__(self, address: str, lineage: str, keys: ClientKeys | None) -> None:
        self._address, self._lineage, self._keys = address, lineage, keys
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="queue-keep-alive", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connection = Connection(self._address, "learner-alive", self._keys)
        try:
            while not self._end.wait(ALIVE_EVERY_S):
                connection.send_once(messages.Alive(self._lineage))
        finally:
            connection.close()

    def close(self) -> None:
        self._end.set()
        self._thread.join()


class LearnerQueue:
    """The queue as the learner's rank 0 uses it. Methods block until answered.

    ``revive`` is called repeatedly while there is no connection to the server. It may restart a dead server; it returns
    True if it did. ``while_waiting`` is called repeatedly while an answer is awaited. ``check_lock`` raises
    LineageError if another process has taken over the run directory: a ``launch`` that did so has another queue server,
    and this queue does not know it.

    Raises (all methods): ``LineageError`` if a newer learner owns the queue. ``QueueError`` if the server refuses, or
    does not answer within ``timeout_s`` (plus the requested wait).
    """

    def __init__(
        self, address: str, timeout_s: float = 60.0, keys: ClientKeys | None = None, *,
        revive: Callable[[], bool] | None = None, while_waiting: Callable[[], None] = lambda: None,
        check_lock: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._check_lock = check_lock
        self.address, self._keys, self._revive, self._while_waiting = address, keys, revive, while_waiting
        self._lost_at: float | None = None
        self._is_lost_logged = False
        self._num_restarts = 0
        self._timeout_s = timeout_s
        self._connection = Connection(address, "learner", keys)
        self._keep_alive: _KeepAlive | None = None
        self._lineage: str | None = None
        self._begun_take: tuple[Take, str] | None = None
        self._answers: dict[str, Message] = {}
        self._arrived: dict[str, list[TakenGroup]] = {}
        self._unawaited: set[str] = set()

    def attach(
        self, run_id: str, lineage: str, parent_lineage: str, fork_version: int, step: int, num_steps: int,
        config_toml: str, files: Mapping[str, bytes], snapshot: bytes | None,
    ) -> None:  # fmt: skip
        """Take over the queue. Its state is restored from ``snapshot``; if None, it is empty."""
        names = tuple(sorted(files))
        parts = [files[name] for name in names]
        if snapshot is not None:
            parts.append(snapshot)
        attach = messages.Attach(
            run_id, lineage, parent_lineage, fork_version, step, num_steps, config_toml, names, snapshot is not None
        )
        self._call(attach, parts)
        self._lineage = lineage
        if self._keep_alive is not None:
            self._keep_alive.close()
        self._keep_alive = _KeepAlive(self.address, lineage, self._keys)

    def confirm(self, lineage: str) -> None:
        """Check that this learner still owns the queue. Call it right before writing files of the run."""
        self._check_lock()
        self._call(messages.ConfirmLineage(lineage))

    def announce(self, announcement: Announcement) -> None:
        """Announce a published version. Return at once; if the queue refuses it, the next method that blocks raises."""
        self._unawaited.add(self._connection.post(announcement))

    def parity_answers(self, lineage: str, since: int) -> dict[str, Answer]:
        """Request every generator's newest probe answer, of version ``since`` or later, by generator."""
        reply = self._call(messages.GetProbeAnswers(lineage, since))
        names = read_as(reply.fields, messages.ProbeAnswers).generators
        if len(names) != len(reply.parts):
            raise WireError(
                f"malformed 'parity_answers': expected {len(names)} parts, one answer for each generator, got "
                f"{len(reply.parts)}; {SAME_VERSION}"
            )
        return {name: decode_answer(bytes(part)) for name, part in zip(names, reply.parts, strict=True)}

    def quarantine(self, lineage: str, generator_id: str, reason: str) -> None:
        """Give this generator no more leases, and drop its groups that are not taken."""
        self._call(messages.Quarantine(lineage, generator_id, reason))

    def evaluate(self, lineage: str, dataset: str, step: int, min_version: int, exclusive: bool) -> None:
        """Start an evaluation of a set of ``data.eval``. If ``exclusive``, training leases wait until it is done."""
        self._call(messages.Evaluate(lineage, dataset, step, min_version, exclusive))

    def eval_results(self, lineage: str, received: Sequence[tuple[str, int]] = ()) -> list[EvalResult]:
        """Request the finished evaluations. Each is sent again until ``received`` names it.

        A row that could not be sampled has a group without rollouts.
        """
        reply = self._call(messages.GetEvalResults(lineage, tuple(received)))
        payloads = iter(reply.parts)
        results = read_as(reply.fields, messages.EvalResults).results
        return [_eval_result(entry, payloads, lineage) for entry in results]

    def await_eval(self, lineage: str, wait_s: float) -> str:
        """Wait for a finished evaluation that was not delivered yet. Return the reason if there is none, else empty."""
        return read_as(self._call(messages.AwaitEval(lineage), wait_s=wait_s).fields, messages.EvalWait).reason

    def begin_take(self, lineage: str, step: int, version: int, wait_s: float) -> None:
        """Send the request of the next ``take``, which must name the same step and version. Return at once."""
        request = Take(lineage, step, version)
        self._begun_take = (request, self._connection.post(request, wait_s=wait_s))

    def take(self, lineage: str, step: int, version: int, wait_s: float) -> Batch | NotReady:
        """Take the groups of the next step. Wait up to ``wait_s``.

        The learner has done ``step`` steps, and trains the groups first at ``version``.
        """
        begun, self._begun_take = self._begun_take, None
        request = Take(lineage, step, version)
        if begun is not None and begun[0] == request:
            request_id = begun[1]
        else:
            request_id = self._connection.post(request, wait_s=wait_s)
        while (reply := self._await(request_id, "take", wait_s)).type != "not_ready":
            groups = self._arrived.pop(request_id)
            if len(groups) == read_as(reply.fields, BatchPart).num_groups:
                return Batch(tuple(groups))
            # A part was lost with its connection. The queue sends the same batch again.
            request_id = self._connection.post(request, wait_s=wait_s)
        return read_as(reply.fields, NotReady)

    def ack(self, ack: StepAck, *, next_take_s: float | None = None) -> Acked:
        """Report a trained step. With ``next_take_s``, also begin the next step's take, which waits up to that long."""
        request_id = self._connection.post(ack, with_next=next_take_s is not None)
        if next_take_s is not None:
            self.begin_take(ack.lineage, ack.step + 1, ack.version, next_take_s)
        return _acked(self._await(request_id, "ack", 0.0))

    def checkpoint_committed(self, lineage: str, step: int) -> None:
        """Report that the checkpoint after ``step`` steps is complete. The queue may delete older snapshots."""
        self._call(messages.CheckpointCommitted(lineage, step))

    def snapshot(self, lineage: str) -> bytes:
        """Request the queue's state between two steps, for a checkpoint."""
        payload = _acked(self._call(messages.TakeSnapshot(lineage))).snapshot
        if payload is None:
            raise WireError(f"malformed 'acked': expected a snapshot of the queue, got none; {SAME_VERSION}")
        return payload

    def finish(self, lineage: str) -> None:
        """End the run. The queue notifies the generators."""
        self._call(messages.Finish(lineage))

    def status(self) -> dict[str, Any]:
        """The full status of the queue for people, as plain data."""
        return read_as(self._call(messages.GetStatus()).fields, messages.Status).status

    def ping(self) -> str:
        """The run id that the server serves; empty before its first learner if none was given."""
        return read_as(self._call(messages.Ping()).fields, messages.Pong).run_id

    def versions(self) -> dict[str, str]:
        """The packages that are installed where the server runs, name -> version."""
        return read_as(self._call(messages.Ping()).fields, messages.Pong).versions

    def close(self) -> None:
        """Leave the queue. Unless the run is finished, the server ends ``experimental.linger_s`` later."""
        if self._keep_alive is not None:
            self._keep_alive.close()
        if self._lineage is not None:
            self._connection.send_once(messages.LearnerGoodbye(self._lineage))
        self._connection.close()

    def _call(self, request: msgspec.Struct, parts: Sequence[bytes] = (), *, wait_s: float = 0.0) -> Message:
        request_id = self._connection.post(request, parts, wait_s=wait_s)
        return self._await(request_id, WIRE_TYPES[type(request)], wait_s)

    def _await(self, request_id: str, type_: str, wait_s: float) -> Message:
        """Wait for the answer to this request. Keep the answers to other requests that arrive meanwhile."""
        deadline = time.monotonic() + self._timeout_s + wait_s
        while (message := self._answers.pop(request_id, None)) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._connection.forget(request_id)
                raise QueueError(
                    f"the queue at {self.address} did not answer request {type_!r} within "
                    f"{self._timeout_s + wait_s:.0f} s; "
                    f"see logs/queue.log in the run directory; {self._connection.keys_hint}"
                )
            for request, answer in self._connection.poll(min(left_s, _LOOK_EVERY_S)):
                if request is not None and request.request_id in self._unawaited:
                    self._unawaited.remove(request.request_id)
                    raise_error(answer)
                elif request is not None:
                    self._note(request.request_id, answer)
                elif answer.fields.get("storage_full"):
                    # The answer comes when the queue's disk has room again.
                    deadline = time.monotonic() + self._timeout_s + wait_s
            if request_id in self._answers:
                continue
            self._while_waiting()
            if self._watch_connection(type_, left_s):
                deadline = time.monotonic() + self._timeout_s + wait_s
        if self._is_lost_logged and self._lost_at is not None:
            logger.info("the queue at %s is back after %.0f s", self.address, time.monotonic() - self._lost_at)
        self._lost_at, self._is_lost_logged, self._num_restarts = None, False, 0
        raise_error(message)
        return message

    def _note(self, request_id: str, answer: Message) -> None:
        """Keep an answer. A part of a batch is decoded at once, while the next part is being sent."""
        if answer.type == "batch":
            part = read_as(answer.fields, BatchPart)
            if len(part.groups) != len(answer.parts):
                raise WireError(
                    f"malformed 'batch': expected {len(part.groups)} parts, one for each group, got "
                    f"{len(answer.parts)}; {SAME_VERSION}"
                )
            arrived = self._arrived.setdefault(request_id, [])
            # A batch that was requested twice may arrive twice. Both copies are equal.
            del arrived[part.first :]
            if part.first == len(arrived):
                arrived += [
                    TakenGroup(decode_group(payload), entry.prompt, entry.queued_s, entry.arrival_version, entry.masked)
                    for entry, payload in zip(part.groups, answer.parts, strict=True)
                ]
            if part.more:
                return
        self._answers[request_id] = answer

    def _watch_connection(self, type_: str, left_s: float) -> bool:
        """Log once that the connection is lost, and call ``revive``. Return whether it restarted the server."""
        if self._connection.is_connected:
            return False
        now = time.monotonic()
        self._lost_at = self._lost_at or now
        if now - self._lost_at >= _LOST_AFTER_S and not self._is_lost_logged:
            self._is_lost_logged = True
            logger.warning(
                "no connection to the queue at %s; request %r waits for it up to %.0f s more",
                self.address,
                type_,
                left_s,
            )
        if self._revive is None or not self._revive():
            return False
        self._num_restarts += 1
        if self._num_restarts > _MAX_RESTARTS:
            raise QueueError(
                f"the queue server died {self._num_restarts} times before it had answered request {type_!r}; see "
                f"logs/queue.log in the run directory for the first cause"
            )
        return True


def _acked(reply: Message) -> Acked:
    acked = read_as(reply.fields, Acked)
    return Acked(acked.stats, bytes(reply.parts[0]) if reply.parts else None)


def _eval_result(entry: messages.EvalEntry, payloads: Iterator[Frame], lineage: str) -> EvalResult:
    groups: list[tuple[Prompt, Group]] = []
    for row in entry.prompts:
        if row.answered:
            group = decode_group(next(payloads))
        else:
            group = Group("", "eval", row.prompt.position, "", lineage, 0.0, ())
        groups.append((row.prompt, group))
    return EvalResult(entry.dataset, entry.step, tuple(groups))


# Generators.


class GeneratorQueue:
    """The queue as a generator uses it. One thread owns it.

    Only the owner of ``keys`` may use ``generator_id``, or on a server without keys whoever knows ``secret``. If
    ``secret`` is unset, it is random, so only this process may.

    Raises:
        AddressError: the address is malformed.
    """

    def __init__(
        self, address: str, generator_id: str, keys: ClientKeys | None = None, *, secret: str | None = None
    ) -> None:
        self.address, self.generator_id = address, generator_id
        self._connection = Connection(address, generator_id, keys, secret=secret or secrets.token_hex(16))
        self._announcement: Announcement | None = None
        self._finished = False
        self._is_known = False
        self._early: list[GeneratorEvent] = []
        self._returning: dict[str, bytes] = {}
        self._num_unanswered = 0

    def hello(self, wait_s: float, backend: str, host: str = "", *, replaces: str | None = None) -> Welcome:
        """Register this generator. Wait up to ``wait_s`` for a queue, and for a learner attached to it.

        It also waits while another generator has this id: after a restart that may be this one, killed a moment ago.
        ``replaces`` names a dead generator, whose leases are requeued at once.

        Raises:
            AddressError: no queue answered. QueueError: a queue answered, but no learner has attached.
            IdInUseError: another generator had this id all the time.
        """
        deadline, is_waiting = time.monotonic() + wait_s, False
        reason = ""
        hello = messages.Hello(self.generator_id, host or socket.gethostname(), backend, replaces)
        while (left_s := deadline - time.monotonic()) > (_HELLO_MARGIN_S if reason else 0):
            held_s = max(0.0, min(_HELLO_WAIT_S, left_s - _HELLO_MARGIN_S))
            request_id = self._connection.post(hello, wait_s=held_s)
            try:
                message = self._answer_to(request_id, min(deadline, time.monotonic() + 2 * _HELLO_WAIT_S))
            except IdInUseError as error:
                if time.monotonic() + _ID_IN_USE_S >= deadline:
                    raise
                if not is_waiting:
                    is_waiting = True
                    logger.warning("waiting, because %s", error)
                time.sleep(_ID_IN_USE_S)
                continue
            if message is not None and message.type == "welcome":
                self._is_known = True
                return _welcome(message)
            if message is not None:
                reason = read_as(message.fields, messages.NotYet).reason
        if reason:
            raise QueueError(
                f"the queue at {self.address} answered, but no learner attached in {wait_s:.0f} s ({reason}); start "
                f"the learner, or wait longer with --wait"
            )
        raise AddressError(
            f"no queue answered at {self.address} within {wait_s:.0f} s; check that it runs there and that this "
            f"machine can reach it; {self._connection.keys_hint}"
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
        """Seconds since the last reply if a reply is overdue; 0 otherwise."""
        return self._connection.silent_s

    @property
    def finished(self) -> bool:
        """Whether the queue has announced that the run is over."""
        return self._finished

    @property
    def announcement(self) -> Announcement | None:
        """The newest version that the queue announced."""
        return self._announcement

    def request_leases(self, lineage: str, version: int, max_leases: int, wait_s: float) -> None:
        """Request leases to sample with ``version`` of ``lineage``. Do nothing while a request is outstanding."""
        if not self.lease_request_outstanding:
            request = messages.LeaseRequest(self.generator_id, lineage, version, max_leases)
            self._connection.post(request, wait_s=wait_s)

    def heartbeat(self, progress: Mapping[str, int], stats: GeneratorStats) -> None:
        """Report progress by lease, as numbers that must grow. Do nothing while a heartbeat is outstanding."""
        if not self.heartbeat_outstanding:
            self._connection.post(messages.Heartbeat(self.generator_id, dict(progress), stats))

    def return_group(self, group: Group) -> None:
        """Send a finished group, at the latest with the next ``poll``. A ``Returned`` event has its outcome."""
        self._returning[group.lease_id] = encode_group(group)
        self._num_unanswered += 1
        num_bytes = sum(map(len, self._returning.values()))
        if num_bytes >= _RETURN_BYTES or len(self._returning) >= _RETURN_GROUPS:
            self._send_returns()

    def fail(self, lease_id: str, cause: FailureCause, detail: str = "") -> None:
        """Return a lease without a group. A ``Returned`` event has the outcome."""
        self._num_unanswered += 1
        self._connection.post(messages.FailLease(self.generator_id, lease_id, cause, detail[:2000]))

    def answer_probe(self, lineage: str, answer: Answer) -> None:
        """Send the answer to a probe. The learner requests it from the queue. It is repeated until answered."""
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

    def leave(self) -> None:
        """Leave the queue: it requeues the remaining leases at once. Only ``close`` may follow."""
        if self._is_known:
            self._connection.send_once(messages.Goodbye(self.generator_id))
            self._is_known = False

    def close(self) -> None:
        """Leave the queue, and close the connection."""
        self.leave()
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
    reply = read_as(message.fields, messages.ReturnReply)
    return [Returned(lease_id, verdict, reply.why.get(lease_id, "")) for lease_id, verdict in reply.verdicts.items()]


def _welcome(message: Message) -> Welcome:
    reply = read_as(message.fields, messages.WelcomeReply)
    if len(reply.files) != len(message.parts):
        raise WireError(
            f"malformed 'welcome': expected {len(reply.files)} parts, one for each file, got {len(message.parts)}; "
            f"{SAME_VERSION}"
        )
    files = {name: bytes(part) for name, part in zip(reply.files, message.parts, strict=True)}
    return Welcome(reply.run_id, reply.config_toml, files)
