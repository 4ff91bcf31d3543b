"""The learner's client of the queue. It is synchronous, and repeats every request until it is answered.

It also exports the generators' client, ``GeneratorQueue``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from async_rl.errors import QueueError, WireError
from async_rl.net.codec import decode_group, read_as
from async_rl.net.keys import ClientKeys
from async_rl.net.wire import Frame, Message
from async_rl.queue import messages
from async_rl.queue.client.connection import Connection, raise_error
from async_rl.queue.client.generator_client import GeneratorQueue
from async_rl.queue.messages import (
    WIRE_TYPES,
    Acked,
    Announcement,
    Batch,
    BatchPart,
    EvalResult,
    NotReady,
    StepAck,
    Take,
    TakenGroup,
)
from async_rl.queue.parity import Answer, decode_answer
from async_rl.records import Group, Prompt

__all__ = ["GeneratorQueue", "LearnerQueue"]

logger = logging.getLogger(__name__)

ALIVE_EVERY_S = 5.0
_LOOK_EVERY_S = 0.25
_LOST_AFTER_S = 1.0
"""A connection that is lost for this long is logged."""
_MAX_RESTARTS = 5
"""Restarts of the server for one request. The request itself may crash the server."""


class _KeepAlive:
    """Reports on its own socket that the learner is alive, even while the main thread trains."""

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
    True if it did. ``while_waiting`` is called repeatedly while an answer is awaited.

    Raises (all methods): ``LineageError`` if a newer learner owns the queue. ``QueueError`` if the server refuses, or
    does not answer within ``timeout_s`` (plus the requested wait).
    """

    def __init__(
        self, address: str, timeout_s: float = 60.0, keys: ClientKeys | None = None, *,
        revive: Callable[[], bool] | None = None, while_waiting: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
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

    def announce(self, announcement: Announcement) -> None:
        """Announce a published version. Return at once; if the queue refuses it, the next method that blocks raises."""
        self._unawaited.add(self._connection.post(announcement))

    def parity_answers(self, lineage: str, since: int) -> dict[str, Answer]:
        """Request every generator's newest probe answer, of version ``since`` or later, by generator."""
        reply = self._call(messages.GetProbeAnswers(lineage, since))
        names = read_as(reply.fields, messages.ProbeAnswers).generators
        if len(names) != len(reply.parts):
            raise WireError(f"expected the answers of {len(names)} generators, got {len(reply.parts)}")
        return {name: decode_answer(bytes(part)) for name, part in zip(names, reply.parts, strict=True)}

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
        """Send the request of the next ``take`` of the same step and version ahead. Return at once."""
        request = Take(lineage, step, version)
        self._begun_take = (request, self._connection.post(request, wait_s=wait_s))

    def take(self, lineage: str, step: int, version: int, wait_s: float) -> Batch | NotReady:
        """Take the groups of the next step. Wait up to ``wait_s``.

        ``step`` steps are done; the groups are trained first at ``version``.
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
            raise WireError("expected a snapshot, got none")
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
                    f"the queue at {self.address} did not answer {type_!r} within {self._timeout_s + wait_s:.0f} s; "
                    f"see logs/queue.log in the run directory; {self._connection.keys_hint}"
                )
            for request, answer in self._connection.poll(min(left_s, _LOOK_EVERY_S)):
                if request is not None and request.request_id in self._unawaited:
                    self._unawaited.remove(request.request_id)
                    raise_error(answer)
                elif request is not None:
                    self._note(request.request_id, answer)
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
                raise WireError(f"expected {len(part.groups)} encoded groups of a batch, got {len(answer.parts)}")
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
                "no connection to the queue at %s; %r waits for it up to %.0f s more", self.address, type_, left_s
            )
        if self._revive is None or not self._revive():
            return False
        self._num_restarts += 1
        if self._num_restarts > _MAX_RESTARTS:
            raise QueueError(
                f"the queue server died {self._num_restarts} times before it had answered {type_!r}; see "
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
