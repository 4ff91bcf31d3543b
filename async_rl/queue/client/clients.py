"""The two clients of the queue: ``LearnerQueue`` for rank 0 of the learner, ``GeneratorQueue`` for a generator.

The methods of ``LearnerQueue`` wait for the reply. ``GeneratorQueue`` sends requests without waiting: only ``poll`` and
``hello`` wait, and ``poll`` returns every reply as an event. Both repeat a request until the reply comes, also after a
restart of the server.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from async_rl.errors import AddressError, IdInUseError, QueueError, RunStoppedError, WireError
from async_rl.net.codec import decode_group, encode_group, read_as
from async_rl.net.keys import ClientKeys
from async_rl.net.wire import SAME_VERSION, Frame, Message
from async_rl.queue import messages
from async_rl.queue.client.connection import Connection, Outstanding, raise_error
from async_rl.queue.messages import (
    WIRE_TYPES,
    Acked,
    Announced,
    Announcement,
    Batch,
    BatchPart,
    Cancelled,
    EvalResult,
    Evaluated,
    FailedRollouts,
    Failure,
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
_LONG_WAIT_S = 5.0
"""Seconds. The loss of a connection is logged only if the request may wait at least this much longer."""
_MAX_RESTARTS = 5
"""Maximum number of restarts of the server for one request. The request itself may crash the server."""
_HELLO_WAIT_S = 5.0
_ID_IN_USE_S = 0.5
"""Seconds between two tries to get an id that another generator still has."""
_HELLO_MARGIN_S = 0.5
"""The server must answer this many seconds before the client stops waiting, so that the client still gets the
reason."""
_RETURN_BYTES = 1 << 20
_RETURN_GROUPS = 16
"""Limits on the bytes and the number of groups that are returned in one message. For a small group, most of the cost is
its message, so groups that finish between two polls share one."""


# The learner.


class _KeepAlive:
    """A thread with its own socket that tells the queue that the learner is alive, even while the learner trains.

    ``trouble`` returns what is wrong.
    """

    def __init__(self, address: str, lineage: str, keys: ClientKeys | None, trouble: Callable[[], str]) -> None:
        self._address, self._lineage, self._keys, self._trouble = address, lineage, keys, trouble
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="queue-keep-alive", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connection = Connection(self._address, "learner-alive", self._keys)
        try:
            while not self._end.wait(ALIVE_EVERY_S):
                connection.send_once(messages.Alive(self._lineage, self._trouble()))
        finally:
            connection.close()

    def close(self) -> None:
        self._end.set()
        self._thread.join()


class LearnerQueue:
    """The client with which the learner's rank 0 uses the queue. Methods wait for the reply.

    Args:
        timeout_s: longest wait for a reply, in addition to the wait that a method requests.
        revive: called repeatedly while there is no connection to the server. It may restart a dead server, and returns
            True if it did.
        while_waiting: called repeatedly while a method waits.
        check_lock: raises LineageError if another process has taken over the run directory. A ``launch`` that took it
            over has another queue server, so this one can't know of it.

    Attributes:
        trouble: returns what is wrong with the learner or its weights, for the status. Any thread may call it.

    Raises:
        LineageError: (all methods) a newer learner owns the queue.
        QueueError: (all methods) the server refuses the request, or does not answer in time.
    """

    def __init__(
        self, address: str, timeout_s: float = 60.0, keys: ClientKeys | None = None, *,
        revive: Callable[[], bool] | None = None, while_waiting: Callable[[], None] = lambda: None,
        check_lock: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._check_lock = check_lock
        self.address, self._keys, self._revive, self._while_waiting = address, keys, revive, while_waiting
        self._num_restarts = 0
        self._timeout_s = timeout_s
        self._connection = Connection(address, "learner", keys)
        self._keep_alive: _KeepAlive | None = None
        self.trouble: Callable[[], str] = lambda: ""
        self._lineage: str | None = None
        self._begun_take: tuple[Take, str] | None = None
        self._answers: dict[str, Message] = {}
        self._arrived: dict[str, list[TakenGroup]] = {}
        self._unawaited: dict[str, int] = {}
        self._announced: int | None = None
        """The newest version whose announcement the queue has confirmed."""

    def attach(
        self, run_id: str, lineage: str, parent_lineage: str, fork_version: int, step: int, num_steps: int,
        config_toml: str, files: Mapping[str, bytes], snapshot: bytes | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Take over the queue. Its state is restored from ``snapshot``, or is empty if ``snapshot`` is None.

        ``files`` maps file names to bytes that the queue gives to generators. Returns the server's values of the config
        keys on which it and the learner must agree, for ``check_shared``.
        """
        names = tuple(sorted(files))
        parts = [files[name] for name in names]
        if snapshot is not None:
            parts.append(snapshot)
        attach = messages.Attach(
            run_id, lineage, parent_lineage, fork_version, step, num_steps, config_toml, names, snapshot is not None
        )
        attached = read_as(self._call(attach, parts).fields, messages.Attached)
        self._lineage = lineage
        if self._keep_alive is not None:
            self._keep_alive.close()
        self._keep_alive = _KeepAlive(self.address, lineage, self._keys, lambda: self.trouble())
        return attached.shared

    def confirm(self, lineage: str) -> None:
        """Check that this learner still owns the queue. Call it right before writing files of the run."""
        self._check_lock()
        self._call(messages.ConfirmLineage(lineage))

    def confirm_awaited(self, lineage: str, evaluations: Iterable[tuple[str, int]]) -> None:
        """Check that the queue knows the newest version that this learner announced, and ``evaluations``.

        ``evaluations`` are the pairs (dataset, step) whose results the learner waits for. A queue server that was
        restarted with a damaged journal may have lost the version or an evaluation.

        Raises:
            QueueError: the queue has lost the version or an evaluation. The message says how to go on.
        """
        self._check_lock()
        self._call(messages.ConfirmLineage(lineage, self._announced, tuple(evaluations)))

    def announce(self, announcement: Announcement) -> None:
        """Send the announcement of a published version, without waiting for the reply.

        If the queue refuses it, the next method that waits raises the error.
        """
        self._unawaited[self._connection.post(announcement)] = announcement.version

    def parity_answers(self, lineage: str, since: int) -> dict[str, Answer]:
        """Return each generator's log-probabilities for the tokens of an ``Announcement.probe``, by generator id.

        Only the newest answer counts, and only if it is of version ``since`` or later.
        """
        reply = self._call(messages.GetProbeAnswers(lineage, since))
        names = read_as(reply.fields, messages.ProbeAnswers).generators
        if len(names) != len(reply.parts):
            raise WireError(
                f"malformed 'parity_answers': expected {len(names)} parts, one answer for each generator, got "
                f"{len(reply.parts)}; {SAME_VERSION}"
            )
        return {name: decode_answer(bytes(part)) for name, part in zip(names, reply.parts, strict=True)}

    def quarantine(self, lineage: str, generator_id: str, reason: str) -> None:
        """Make the queue give no more leases to this generator, and drop its groups that the learner has not taken.

        If ``reason`` is empty, lift its quarantine.

        Raises:
            QueueError: a quarantine that is to be lifted is not there.
        """
        self._call(messages.Quarantine(lineage, generator_id, reason))

    def evaluate(self, lineage: str, dataset: str, step: int, min_version: int, exclusive: bool) -> None:
        """Start an evaluation of a set of ``data.eval``.

        If ``exclusive``, training leases wait until the evaluation is done.
        """
        self._call(messages.Evaluate(lineage, dataset, step, min_version, exclusive))

    def eval_results(self, lineage: str, received: Sequence[tuple[str, int]] = ()) -> list[EvalResult]:
        """Return all finished evaluations. Each is returned again by later calls until ``received`` names it.

        A row that could not be sampled has a group without rollouts.
        """
        reply = self._call(messages.GetEvalResults(lineage, tuple(received)))
        payloads = iter(reply.parts)
        results = read_as(reply.fields, messages.EvalResults).results
        return [_eval_result(header, payloads, lineage) for header in results]

    def await_eval(self, lineage: str, wait_s: float) -> messages.EvalWait:
        """Wait up to ``wait_s`` for a finished evaluation that was not returned yet.

        The reason of the result is empty if there is one or if no evaluation runs.

        Raises:
            RunStoppedError: the run's reward or environment fails for every answer.
        """
        reply = read_as(self._call(messages.AwaitEval(lineage), wait_s=wait_s).fields, messages.EvalWait)
        if reply.stop:
            raise RunStoppedError(reply.stop)
        return reply

    def begin_take(self, lineage: str, step: int, version: int, wait_s: float) -> None:
        """Request the groups of the next step, without waiting for them.

        The next call of ``take`` returns these groups. It must have the same step and version.
        """
        request = Take(lineage, step, version)
        self._begun_take = (request, self._connection.post(request, wait_s=wait_s))

    @property
    def is_take_answered(self) -> bool:
        """Whether the answer to the take that was begun has arrived, so that ``take`` returns it without a wait."""
        if self._begun_take is None:
            return False
        _, request_id = self._begun_take
        if request_id not in self._answers:
            self._receive(0.0)
        return request_id in self._answers

    def take(self, lineage: str, step: int, version: int, wait_s: float) -> Batch | NotReady:
        """Return the groups of the learner's next step, or ``NotReady`` with the reason after ``wait_s`` seconds.

        ``step`` is the number of steps that the learner has done, and ``version`` its version before the next step.
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
        """Report a trained step.

        With ``next_take_s``, also request the groups of the next step, and wait up to that long for them. The next
        ``take`` returns these groups.
        """
        request_id = self._connection.post(ack)
        if next_take_s is not None:
            self.begin_take(ack.lineage, ack.step + 1, ack.version, next_take_s)
        return _acked(self._await(request_id, "ack", 0.0))

    def checkpoint_committed(self, lineage: str, step: int) -> None:
        """Report that the checkpoint after ``step`` steps is complete. The queue may then delete older snapshots."""
        self._call(messages.CheckpointCommitted(lineage, step))

    def snapshot(self, lineage: str) -> bytes:
        """Return the queue's state between two steps as bytes, for a checkpoint."""
        payload = _acked(self._call(messages.TakeSnapshot(lineage))).snapshot
        if payload is None:
            raise WireError(f"malformed 'acked': expected a snapshot of the queue, got none; {SAME_VERSION}")
        return payload

    def finish(self, lineage: str) -> None:
        """Report that the run is over. The queue notifies the generators."""
        self._call(messages.Finish(lineage))

    def status(self) -> dict[str, Any]:
        """Return the full status of the queue, as plain data for people."""
        return read_as(self._call(messages.GetStatus()).fields, messages.Status).status

    def ping(self) -> str:
        """Return the id of the run that the server serves.

        The id is empty if the server was started without one and no learner has attached yet.
        """
        return self.pong().run_id

    def pong(self) -> messages.Pong:
        """Ask the server who it is: its run, its package versions and its clock."""
        return read_as(self._call(messages.Ping()).fields, messages.Pong)

    def close(self) -> None:
        """Tell the queue that its learner leaves.

        If the run is not finished, the server waits ``queue.linger_s`` seconds for another learner, then ends.
        """
        if self._keep_alive is not None:
            self._keep_alive.close()
        if self._lineage is not None:
            self._connection.send_once(messages.LearnerGoodbye(self._lineage))
        self._connection.close()

    def _call(self, request: msgspec.Struct, parts: Sequence[bytes] = (), *, wait_s: float = 0.0) -> Message:
        request_id = self._connection.post(request, parts, wait_s=wait_s)
        return self._await(request_id, WIRE_TYPES[type(request)], wait_s)

    def _await(self, request_id: str, type_: str, wait_s: float) -> Message:
        """Wait for the reply to one request. Keep the replies to other requests that arrive meanwhile."""
        deadline = time.monotonic() + self._timeout_s + wait_s
        while (message := self._answers.pop(request_id, None)) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._connection.forget(request_id)
                raise QueueError(
                    f"the queue at {self.address} did not answer request {type_!r} within "
                    f"{self._timeout_s + wait_s:g} s: {self._connection.why_silent}"
                )
            if self._receive(min(left_s, _LOOK_EVERY_S)):
                # Parts of an answer are on their way, or it comes when the queue's disk has room again.
                deadline = time.monotonic() + self._timeout_s + wait_s
            if request_id in self._answers:
                continue
            self._while_waiting()
            if self._watch_connection(type_, left_s):
                deadline = time.monotonic() + self._timeout_s + wait_s
        self._connection.log_trouble("")
        self._num_restarts = 0
        raise_error(message)
        return message

    def _receive(self, timeout_s: float) -> bool:
        """Keep the replies that arrive within ``timeout_s``. Return whether more follows: groups of a batch have come,
        or the queue says that its disk is full.
        """
        goes_on = False
        for request, answer in self._connection.poll(timeout_s):
            if request is not None and request.request_id in self._unawaited:
                version = self._unawaited.pop(request.request_id)
                raise_error(answer)
                self._announced = version if self._announced is None else max(version, self._announced)
            elif request is not None:
                self._note(request.request_id, answer)
                goes_on |= answer.type == "batch"
            elif answer.fields.get("storage_full"):
                goes_on = True
        return goes_on

    def _note(self, request_id: str, answer: Message) -> None:
        """Keep a reply until it is awaited.

        Groups of a batch are decoded at once, while the next ones are being sent.
        """
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
                pairs = zip(part.groups, answer.parts, strict=True)
                arrived += [header.with_group(decode_group(payload)) for header, payload in pairs]
            if part.more:
                return
        self._answers[request_id] = answer

    def _watch_connection(self, type_: str, left_s: float) -> bool:
        """If the connection is lost, log why and call ``revive``. Return whether the server was restarted."""
        if self._connection.link.is_connected:
            return False
        if left_s >= _LONG_WAIT_S:  # a request that ends soon raises an error, which says the same
            self._connection.log_trouble(f"The request {type_!r} waits up to {left_s:.0f} s more")
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


def _eval_result(header: Evaluated[bool], payloads: Iterator[Frame], lineage: str) -> EvalResult:
    groups: list[tuple[Prompt, Group]] = []
    for prompt, is_answered in header.groups:
        no_group = Group("", "eval", prompt.position, "", lineage, 0.0, ())
        groups.append((prompt, decode_group(next(payloads)) if is_answered else no_group))
    return EvalResult(header.dataset, header.step, tuple(groups))


# Generators.


class GeneratorQueue:
    """The client with which a generator uses the queue. Only one thread may use it.

    On a server with keys, only the owner of ``keys`` may use ``generator_id``. On a server without keys, only a client
    with the same ``secret`` may. If ``secret`` is None, it is random, so only this process may.

    Raises:
        AddressError: the address is malformed.
    """

    def __init__(
        self, address: str, generator_id: str, keys: ClientKeys | None = None, *, secret: str | None = None
    ) -> None:
        self.address, self.generator_id = address, generator_id
        self._connection = Connection(address, generator_id, keys, secret=secret or secrets.token_hex(16))
        self.announcement: Announcement | None = None
        """The newest version that the queue announced; None before the first."""
        self.finished = False
        """Whether the queue has sent the notice that the run is over."""
        self._is_known = False
        self._early: list[GeneratorEvent] = []
        self._returning: dict[str, bytes] = {}
        self._failed: list[FailedRollouts] = []
        self.num_unanswered_returns = 0
        """The number of returned groups and failures to which the queue has not replied yet."""

    def hello(self, wait_s: float, backend: str, host: str = "", *, replaces: str | None = None) -> Welcome:
        """Register this generator and return the data that it needs.

        Wait up to ``wait_s`` for a queue with an attached learner. The method also waits while another generator has
        this id, which may be a killed process of this generator. ``replaces`` names a dead generator, whose leases are
        requeued at once.

        Raises:
            AddressError: no queue answered.
            QueueError: a queue answered, but no learner has attached.
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
        raise AddressError(f"no queue answered at {self.address} within {wait_s:g} s: {self._connection.why_silent}")

    @property
    def lease_request_outstanding(self) -> bool:
        return self._connection.has_outstanding("lease")

    @property
    def heartbeat_outstanding(self) -> bool:
        return self._connection.has_outstanding("heartbeat")

    @property
    def silent_s(self) -> float:
        """Seconds since the queue's last reply if a reply is overdue; 0 if none is."""
        return self._connection.silent_s

    @property
    def trouble(self) -> str:
        """Why there is no connection to the queue, and what to do about it; empty if there is one."""
        return self._connection.link.trouble

    def request_leases(self, lineage: str, version: int, max_leases: int, wait_s: float) -> None:
        """Request leases for weights of ``version`` of ``lineage``.

        Do nothing if the last lease request has no reply yet.
        """
        if not self.lease_request_outstanding:
            request = messages.LeaseRequest(self.generator_id, lineage, version, max_leases)
            self._connection.post(request, wait_s=wait_s)

    def heartbeat(self, progress: Mapping[str, int], stats: GeneratorStats, trouble: str = "") -> None:
        """Report the number of sampled tokens by lease id, and in ``trouble`` why no weights arrive, if so.

        Do nothing if the last heartbeat has no reply yet.
        """
        if not self.heartbeat_outstanding:
            shown = trouble[: messages.MAX_TROUBLE]
            self._connection.post(messages.Heartbeat(self.generator_id, dict(progress), stats, shown))

    def return_group(self, group: Group, failed: Mapping[Failure, int] = MappingProxyType({})) -> None:
        """Send a finished group, at the latest in the next ``poll``. A ``Returned`` event says what became of it.

        ``failed`` has the number of its failed rollouts by the reason.
        """
        self._returning[group.lease_id] = encode_group(group)
        self._failed += [FailedRollouts(group.lease_id, why.shortened(), count) for why, count in failed.items()]
        self.num_unanswered_returns += 1
        num_bytes = sum(map(len, self._returning.values()))
        if num_bytes >= _RETURN_BYTES or len(self._returning) >= _RETURN_GROUPS:
            self._send_returns()

    def fail(self, lease_id: str, failure: Failure) -> None:
        """Return a lease without a group. A ``Returned`` event has the queue's reply."""
        self.num_unanswered_returns += 1
        self._connection.post(messages.FailLease(self.generator_id, lease_id, failure.shortened()))

    def answer_probe(self, lineage: str, answer: Answer) -> None:
        """Send this generator's log-probabilities for the tokens of an ``Announcement.probe``. The queue keeps them."""
        data = encode_answer(answer)
        self._connection.post(messages.AnswerProbe(self.generator_id, lineage, answer.version, data))

    def poll(self, timeout_s: float) -> list[GeneratorEvent]:
        """Return the messages that the queue has sent, as events.

        If there are none, wait up to ``timeout_s`` for the first.

        Raises:
            QueueError: the server refused a request.
        """
        self._send_returns()
        events, self._early = self._early, []
        for request, message in self._connection.poll(0.0 if events else timeout_s):
            events += self._events(request, message)
        self._connection.log_trouble("This generator goes on with the leases that it has")
        return events

    def leave(self) -> None:
        """Leave the queue. The prompts of the remaining leases are requeued at once. Only ``close`` may follow."""
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
        failed, self._failed = tuple(self._failed), []
        request = messages.ReturnGroups(self.generator_id, tuple(returning), failed)
        self._connection.post(request, list(returning.values()))

    def _answer_to(self, request_id: str, deadline: float) -> Message | None:
        while (left_s := deadline - time.monotonic()) > 0:
            for request, message in self._connection.poll(min(left_s, _LOOK_EVERY_S)):
                if request is not None and request.request_id == request_id:
                    self._connection.log_trouble("")
                    self._early += self._notice(message)
                    raise_error(message)
                    return message
                self._early += self._events(request, message)
            self._connection.log_trouble("This generator goes on trying")
        self._connection.forget(request_id)
        return None

    def _events(self, request: Outstanding | None, message: Message) -> list[GeneratorEvent]:
        raise_error(message)
        events = self._notice(message)
        if message.type == "leases":
            events.append(read_as(message.fields, LeasesGranted))
        elif message.type == "returned":
            returned = _returned(message)
            self.num_unanswered_returns -= len(returned)
            events += returned
        return events

    def _notice(self, message: Message) -> list[GeneratorEvent]:
        """Return the events in a message's notice: a new version, cancelled leases, the end of the run."""
        events: list[GeneratorEvent] = []
        announced = message.fields.get("announcement")
        if announced is not None:
            announcement = read_as(announced, Announcement)
            if announcement != self.announcement:
                self.announcement = announcement
                events.append(Announced(announcement))
        cancelled = read_as(message.fields.get("cancelled", ()), tuple[str, ...])
        if cancelled:
            events.append(Cancelled(cancelled))
        if message.fields.get("finished") and not self.finished:
            self.finished = True
            events.append(Finished())
        return events


def _returned(message: Message) -> list[Returned]:
    reply = read_as(message.fields, messages.ReturnReply)
    return [Returned(lease_id, verdict, reply.why.get(lease_id, "")) for lease_id, verdict in reply.verdicts.items()]


def _welcome(message: Message) -> Welcome:
    reply = read_as(message.fields, messages.WelcomeReply)
    if len(reply.files) != len(message.parts):
        raise WireError(
            f"the queue server's 'welcome' names {len(reply.files)} tokenizer files: expected the content of each, got "
            f"{len(message.parts)}; {SAME_VERSION}"
        )
    files = {name: bytes(part) for name, part in zip(reply.files, message.parts, strict=True)}
    return Welcome(reply.run_id, reply.config_toml, files)
