"""The queue server: one ROUTER socket around the queue's state, one thread, one loop.

Requests that can't be answered yet wait and are retried after every change. Changes are committed before replies go
out, so a crash can't undo an answered request. Malformed requests are counted and answered with an error.
``queue.json`` has the server's address and process, ``ledger.json`` the outcome of every group. The server ends when
the run is finished and its generators know it, when its learner is gone for ``experimental.linger_s``, when its parent
dies (the parent watch), or on SIGTERM.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from msgspec.structs import asdict

from async_rl.config.config import Config
from async_rl.data.chat import vocabulary_size
from async_rl.errors import AsyncRLError, ConfigError, LineageError, QueueError, UserError, WireError
from async_rl.net.codec import read_as
from async_rl.net.wire import Message, decode, encode, pack_plain
from async_rl.process.fault_points import fault_point
from async_rl.queue.core import persistence
from async_rl.queue.core.admission import QueueSettings, eval_sampling
from async_rl.queue.core.prompts import PromptStream, Row
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import (
    LEARNER_REQUESTS,
    WIRE_TYPES,
    Announcement,
    BatchPart,
    Envelope,
    ErrorReply,
    HeartbeatReply,
    Status,
)
from async_rl.queue.server.handlers import MAX_GENERATORS, Deferred, Handlers, Reply, WelcomePack
from async_rl.queue.server.sockets import Endpoint
from async_rl.queue.storage.journal import Changes, Journal, unpack
from async_rl.queue.storage.payloads import MemoryPayloads, RecentPayloads
from async_rl.run.queue_files import LEDGER_EVERY_S, RunFiles, last_port

logger = logging.getLogger(__name__)

LEARNER_SILENCE_S = 20.0
"""A learner that sent nothing for this long, not even ``Alive``, counts as gone."""
FINISH_GRACE_S = 10.0
"""Time after the end of the run in which generators are notified."""
_DRAIN_S = 0.003
"""Messages are handled for this long before their replies are sent. If it were longer, the learner would wait behind
generators' returns; if shorter, each message would need its own commit."""
_MAX_DRAIN = 256
_RECENT_BYTES = 256 << 20
"""Size limit of the groups that are kept in memory in addition to the journal."""

_MAX_PENDING = 2 * MAX_GENERATORS + 64
"""A hello and a lease request of every generator. Above this number, requests are answered at once."""


class QueueServer:
    """Binds at once; ``run`` serves until the end. It ends if no learner attaches within ``orphan_s``.

    Raises:
        AddressError: the address is busy, malformed, or open to the network without keys and without ``insecure``.
        KeyFileError: the keys of ``queue.keys`` are missing or unfit.
        ConfigError: the queue can't hold one step.
        ModelError: the size of a step depends on the model, which is not there.
    """

    def __init__(
        self, config: Config, train_rows: Sequence[Row], eval_rows: Mapping[str, Sequence[Row]], *,
        data_digest: str = "", open_journal: Callable[[], Journal] | None = None, run_id: str = "",
        insecure: bool = False,
        parent_watch_fd: int | None = None, orphan_s: float | None = None,
        on_ready: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        if not train_rows:
            raise ConfigError(f"data.train: expected at least one row, got none in {config.data.train!r}")
        stream = PromptStream(
            len(train_rows), seed=config.run.seed, shuffle=config.data.shuffle, epochs=config.data.epochs
        )
        settings = QueueSettings.from_config(config, vocab_size=_vocabulary_size(config))
        run_dir = Path(config.run.dir)
        # Bind first: a server that can't bind its address must not create a journal.
        self._endpoint = Endpoint(
            config.queue, config.experimental, insecure=insecure, last_port=last_port(run_dir, run_id)
        )
        self.address = self._endpoint.address
        try:
            self._journal = open_journal() if open_journal is not None else None
        except UserError:
            self._endpoint.close()
            raise
        self._changes = Changes(is_wanted=self._journal is not None)
        state = QueueState(
            settings, train_rows, stream, data_digest=data_digest, instance=secrets.token_hex(2),
            payloads=MemoryPayloads() if self._journal is None else RecentPayloads(self._journal, _RECENT_BYTES),
            changes=self._changes,
        )  # fmt: skip
        limited = {name: rows[: config.eval.of(name).max_rows] for name, rows in eval_rows.items()}
        self._handlers = Handlers(state, config, limited, run_id)
        self._state, self._config, self._on_ready = state, config, on_ready
        self._parent_watch_fd, self._orphan_s = parent_watch_fd, orphan_s
        self._pending = PendingRequests(lambda: state.revision, self._send, self._failed)
        self._has_batch = False
        self._committed = -1
        self._last_news: tuple[Announcement | None, bool] = None, False
        self._saved_welcome: WelcomePack | None = None
        self._saved_handlers: tuple[Any, ...] = ()
        self._wake_read, self._wake_write = os.pipe()
        self._stop_reason = ""
        self._started = self._learner_seen = time.monotonic()
        self._finished_at: float | None = None
        self._files = RunFiles(run_dir, self.address)
        self._poller = zmq.Poller()
        self._endpoint.register(self._poller)
        for fd in (self._wake_read, parent_watch_fd):
            if fd is not None:
                self._poller.register(fd, zmq.POLLIN)
        if self._journal is not None:
            try:
                self._load(self._journal)
            except QueueError:
                self._close()
                raise

    def stop(self, reason: str) -> None:
        """End the loop soon; safe from a signal handler or another thread."""
        self._stop_reason = reason
        os.write(self._wake_write, b"x")

    def run(self) -> str:
        """Serve until the end. Return the reason for it."""
        self._files.record(self._handlers.run_id)
        if self._on_ready is not None:
            self._on_ready(self.address)
        # The rows are never freed, so the garbage collector need not scan them.
        gc.freeze()
        logger.info("the queue serves %s", self.address)
        try:
            while not (reason := self._why_end(time.monotonic())):
                self._wait()
                self._drain()
                if self._has_batch:
                    # The learner waits for the batch, and answering the other requests takes a while.
                    self._commit()
                    self._flush()
                now = time.monotonic()
                self._state.expire(now)
                self._pending.answer(now)
                self._push_notices()
                self._commit()
                self._flush()
                self._write_files(now)
            logger.info("the queue ends: %s", reason)
            self._commit()
            self._files.write_last(self._handlers.run_id, persistence.ledger_file(self._state))
            return reason
        finally:
            self._close()

    def _close(self) -> None:
        self._endpoint.close()
        if self._journal is not None:
            self._journal.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # The loop's parts.

    def _wait(self) -> None:
        now = time.monotonic()
        deadlines = [now + LEDGER_EVERY_S, *self._pending.deadlines()]
        if self._state.next_deadline is not None:
            deadlines.append(self._state.next_deadline)
        self._poller.poll(int(max(0.0, min(deadlines) - now) * 1000) + 1)

    def _drain(self) -> None:
        now = time.monotonic()
        for peer, frames in self._endpoint.receive(_MAX_DRAIN, now):
            self._receive(peer, frames)
            self._pending.answer_only("take")
            if self._has_batch or time.monotonic() - now >= _DRAIN_S:
                break
        self._endpoint.note_refused(now)

    def _receive(self, peer: bytes, frames: list[memoryview]) -> None:
        """Handle one multipart message: one or several messages, each followed by its parts."""
        left = self._receive_first(peer, frames)
        while left and self._endpoint.admits_another(peer, time.monotonic()):
            left = self._receive_first(peer, left)

    def _receive_first(self, peer: bytes, frames: list[memoryview]) -> list[memoryview]:
        """Handle the first message. Return the frames after it; none if its number of parts is unknown."""
        request_id: str | None = None
        left: list[memoryview] = []
        try:
            if not frames:
                raise WireError("expected a frame, got none")
            limits = self._endpoint.limits
            message = decode(frames[0], limits.wire)
            request_id = _request_id(message)
            end = 1 + message.num_parts
            message = message.with_parts(frames[1:end])
            left = frames[end:]
            limits.check(message, sum(map(len, frames[:end])))
            self._handle(peer, request_id, message)
        except Exception as error:
            self._send(Request(peer, request_id, None, "malformed"), self._failed(peer, error))
        return left

    def _failed(self, peer: bytes, error: Exception) -> Reply:
        """Return the error reply for an exception. The server continues; its own bugs are logged with a traceback."""
        if isinstance(error, WireError):
            self._endpoint.note_malformed(peer, time.monotonic())
        if not isinstance(error, AsyncRLError):
            logger.error("a request failed by a bug", exc_info=error)
        return _error(error)

    def _handle(self, peer: bytes, request_id: str | None, message: Message) -> None:
        now = time.monotonic()
        if message.type in LEARNER_REQUESTS:
            self._endpoint.require_learner_key(message.type)
        generator_id = self._handlers.generator_of(message, peer, now)
        self._note_learner(message, now)
        answer = self._handlers.handle(message, now)
        request = Request(peer, request_id, generator_id, message.type)
        if isinstance(answer, Reply):
            self._send(request, answer)
        elif isinstance(answer, Deferred):
            self._pending.add(request, answer, now)

    def _note_learner(self, message: Message, now: float) -> None:
        learner = self._state.learner
        lineage = message.fields.get("lineage")
        if message.type == "attach" or (learner is not None and lineage == learner.lineage and message.type != "lease"):
            self._learner_seen = now

    def _send(self, request: Request, reply: Reply) -> None:
        if isinstance(reply.record, BatchPart):
            self._has_batch = True
        elif isinstance(reply.record, Status):
            reply = Reply(self._whole_status(reply.record))
        notice = {} if request.generator_id is None else self._notice(request.generator_id, reply)
        for message in (reply, *reply.further):
            fields = {**asdict(message.record), "request_id": request.request_id, **notice}
            frame = encode(WIRE_TYPES[type(message.record)], fields, num_parts=len(message.parts))
            self._endpoint.send(request.peer, [frame, *message.parts])

    def _whole_status(self, status: Status) -> Status:
        """The queue's status, extended by the server's own."""
        waits = self._pending.waits(time.monotonic())
        extra = {"address": self.address, "pid": os.getpid(), "waits": waits, **self._endpoint.counters()}
        return Status({**status.status, **extra})

    def _notice(self, generator_id: str, reply: Reply) -> dict[str, Any]:
        notice = self._handlers.notice(generator_id)
        if isinstance(reply.record, HeartbeatReply) and reply.record.cancelled:
            notice["cancelled"] = [*reply.record.cancelled, *notice.get("cancelled", [])]
        return notice

    def _flush(self) -> None:
        self._has_batch = False
        self._endpoint.flush()

    # Durability.

    def _commit(self) -> None:
        """Commit the changes since the last turn to the journal."""
        if self._journal is None or self._committed == self._state.revision:
            return
        blobs = {"queue": persistence.save(self._state)}
        if (key := self._handlers.saved_key) != self._saved_handlers:
            self._saved_handlers = key
            blobs["handlers"] = pack_plain(self._handlers.save())
        if self._handlers.welcome is not self._saved_welcome:
            self._saved_welcome = self._handlers.welcome
            blobs["welcome"] = pack_plain(self._handlers.welcome)
        self._journal.commit(self._changes.drain(), blobs)
        self._committed = self._state.revision
        fault_point("queue.journaled")

    def _load(self, journal: Journal) -> None:
        """Restore the state that the last server of this journal committed."""
        found = journal.load()
        if found is None:
            return
        welcome = unpack(found.state["welcome"]) if "welcome" in found.state else None
        rows, now = self._handlers.eval_rows, time.monotonic()
        samplings = {name: eval_sampling(self._config, name) for name in rows}
        journal.adopt(persistence.load(self._state, found.entries, found.state["queue"], rows, samplings, now))
        self._handlers.load(unpack(found.state["handlers"]), welcome, now)
        self._saved_welcome = self._handlers.welcome
        # Loading must not count as a change.
        self._changes.drain()
        self._committed = self._state.revision
        stats = self._state.stats()
        logger.info("the journal is loaded: %d groups queued, %d in flight", stats.depth, stats.in_flight)

    def _push_notices(self) -> None:
        """Notify generators of a new version, the end of the run, and cancelled leases."""
        news = self._handlers.news
        everyone = news != self._last_news and news != (None, False)
        self._last_news = news
        state = self._state
        to_notify = state.alive_generators(time.monotonic()) if everyone else state.generators.to_notify()
        for generator_id in to_notify:
            peer = self._handlers.registry.peer_of(generator_id)
            if peer is not None:
                self._endpoint.send(peer, [encode("notice", self._handlers.notice(generator_id))])

    def _write_files(self, now: float) -> None:
        state = self._state
        step = -1 if state.learner is None else state.learner.step
        ledger = partial(persistence.ledger_file, state)
        self._files.write(self._handlers.run_id, ledger, now, revision=state.revision, step=step)

    # Life.

    def _why_end(self, now: float) -> str:
        if self._stop_reason:
            return self._stop_reason
        if self._parent_watch_fd is not None and _is_broken(self._parent_watch_fd):
            return "the process that started it is gone"
        if self._state.finished:
            self._finished_at = self._finished_at or now
            unaware = [g for g in self._state.alive_generators(now) if not self._handlers.registry.has_left(g)]
            if not unaware or now - self._finished_at >= FINISH_GRACE_S:
                return "the run is finished"
            return ""
        linger_s = self._config.experimental.linger_s
        if self._state.learner is None:
            if self._orphan_s is not None and now - self._started >= self._orphan_s:
                return f"no learner attached for {self._orphan_s:.0f} s"
            return ""
        silence_s = 0.0 if self._handlers.learner_gone else LEARNER_SILENCE_S
        if now - self._learner_seen >= silence_s + linger_s:
            return f"the learner is gone for {now - self._learner_seen:.0f} s (experimental.linger_s = {linger_s:.0f})"
        return ""


# Requests and long polls.


@dataclass(frozen=True, slots=True)
class Request:
    """The sender and type of a request. ``generator_id`` is None for messages that no generator sent."""

    peer: bytes
    request_id: str | None
    generator_id: str | None
    type: str


@dataclass(slots=True)
class _Pending:
    request: Request
    deferred: Deferred
    deadline: float
    since: float
    tried_at_revision: int = -1


class PendingRequests:
    """Deferred requests.

    ``revision`` grows with every change of the queue. ``send`` sends a reply. ``failed`` builds the reply to an
    exception.
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


def _request_id(message: Message) -> str | None:
    return read_as(message.fields, Envelope).request_id


def _is_broken(fd: int) -> bool:
    """Whether the parent closed its end of the parent watch, a pipe to which nothing is ever written."""
    readable, _, _ = select.select([fd], [], [], 0)
    return bool(readable) and not os.read(fd, 1)


def _error(error: Exception) -> Reply:
    kinds = {LineageError: "lineage", WireError: "wire"}
    kind = kinds.get(type(error), "queue" if isinstance(error, AsyncRLError) else "internal")
    return Reply(ErrorReply(kind, str(error) or type(error).__name__))


def _vocabulary_size(config: Config) -> int | None:
    """The size of the model's vocabulary, if the memory to reserve depends on it: top-p without top-k. Else None."""
    if config.sampling.top_p == 1 or config.sampling.top_k:
        return None
    return config.own_vocab_size or vocabulary_size(config.model.path)
