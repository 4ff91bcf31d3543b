"""The queue server's loop: one thread that receives requests, changes the queue's state, commits it and sends replies.

Requests that can't be answered yet wait, and are tried again after every change. Changes are committed to the journal
before the replies are sent, so a crash can't undo an answered request. Malformed requests are counted and answered with
an error.

A request changes the state completely or not at all. After a bug in a generator's request, the server goes back to the
last commit and disconnects that generator. After a bug in another request, or without a journal, the run stops with the
cause. While the disk is full, the server does not answer returned groups, so generators send them again, and it sends
no reply before its commit succeeds.

``queue.json`` has the server's address and process, ``ledger.json`` what became of every group. The server ends when
the run is finished and its generators know it, when its learner has been gone for ``queue.linger_s``, when its
parent dies, or on SIGTERM.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from msgspec.structs import asdict

from async_rl.config.config import Config
from async_rl.errors import (
    AsyncRLError,
    ConfigError,
    IdInUseError,
    LineageError,
    QueueError,
    StorageError,
    StorageFullError,
    UserError,
    WireError,
)
from async_rl.net.codec import read_as
from async_rl.net.wire import Frame, Message, decode, encode
from async_rl.queue.core import generator_requests, persistence
from async_rl.queue.core.prompts import Row
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import (
    GENERATOR_REQUESTS,
    LEARNER_REQUESTS,
    WIRE_TYPES,
    Announcement,
    Envelope,
    ErrorReply,
    HeartbeatReply,
    ReturnReply,
    Status,
)
from async_rl.queue.server.durable import LOG_EVERY_S, DurableState, FullDisk, QueueData
from async_rl.queue.server.handlers import Deferred, Handlers, Reply
from async_rl.queue.server.lifetime import Lifetime
from async_rl.queue.server.pending import HeldMessages, PendingRequests, Request
from async_rl.queue.server.settings import settings_of
from async_rl.queue.server.sockets import Endpoint
from async_rl.queue.storage.journal import Journal
from async_rl.queue.storage.payloads import is_out_of_room
from async_rl.run.queue_files import LEDGER_EVERY_S, RunFiles, last_port
from async_rl.run.records.prometheus import Endpoint as MetricsEndpoint

logger = logging.getLogger(__name__)

_MAX_DRAIN = 64
"""Maximum number of messages that are handled before their replies are sent. If it were higher, the learner would wait
for generators' groups to be handled. If it were 1, each message would need its own commit."""
_LOOK_AGAIN_S = 0.5
"""Seconds between two tries of a commit on a full disk."""
_LATE_S = 2.0
"""If a wait takes longer than it should by this many seconds, the server was suspended."""
_OTHER_CLIENTS = 8
"""Connections of the learner, of scorers, and of people who look at the status."""
_NOT_AWAITED = ("alive", "bye_learner")
"""Types of the learner's messages that get no reply, or a reply that the learner does not read."""


class RequestError(Exception):
    """A request failed because of a bug, and may have changed the state partly.

    ``__cause__`` is the bug's exception.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request.type)
        self.request = request


class QueueServer:
    """The queue server. The constructor binds the socket and loads the journal; ``run`` serves.

    Args:
        data_digest: a digest of the training rows.
        open_journal: opens the journal. None for a server without a journal.
        run_id: the run to serve. If empty, the first learner sets it.
        orphan_s: the server ends if no learner attaches within this many seconds. None for no limit.
        on_ready: called with the address when the server is ready.

    Raises:
        AddressError: the address is busy, malformed, or open to the network without keys and without ``insecure``.
        KeyFileError: the keys of ``queue.keys`` are missing or malformed.
        ConfigError: the queue can't hold the groups of one step.
        ModelError: the size of these groups depends on the model, which is missing.
    """

    def __init__(
        self, config: Config, train_rows: Sequence[Row], eval_rows: Mapping[str, Sequence[Row]], *,
        data_digest: str = "", open_journal: Callable[[], Journal] | None = None, run_id: str = "",
        insecure: bool = False, orphan_s: float | None = None,
        on_ready: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        if not train_rows and not config.data.source:
            raise ConfigError(
                f"data.train: expected at least one row, got none in {config.data.train!r}; add rows to it"
            )
        settings = settings_of(config)
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
        self._config, self._on_ready = config, on_ready
        data = QueueData(train_rows, eval_rows, data_digest)
        self._durable = DurableState(config, settings, data, self._journal, run_id)
        self._pending = PendingRequests(lambda: self._state.revision, self._send, self._attempt)
        self._full_disk, self._held, self._is_stalled = FullDisk(), HeldMessages(), False
        self._learner_peer: bytes | None = None
        self._files_logged_at = float("-inf")
        self._last_news: tuple[Announcement | None, bool] = None, False
        self._lifetime = Lifetime(linger_s=config.queue.linger_s, orphan_s=orphan_s, grace_s=config.checkpoint.grace_s)
        self._files = RunFiles(run_dir, self.address)
        self._metrics, self._metrics_at = MetricsEndpoint("queue", config.log.prometheus_port, config), float("-inf")
        self._poller = zmq.Poller()
        self._endpoint.register(self._poller)
        self._poller.register(self._lifetime.fd, zmq.POLLIN)
        try:
            self._durable.load()
        except QueueError:
            self._close()
            raise

    @property
    def _state(self) -> QueueState:
        return self._durable.state

    @property
    def _handlers(self) -> Handlers:
        return self._durable.handlers

    def stop(self, reason: str) -> None:
        """Make the loop end soon, for ``reason``. This is safe from a signal handler or another thread."""
        self._lifetime.stop(reason)

    def stop_after_learner(self, reason: str) -> None:
        """Make the loop end when the learner has left, but at most ``checkpoint.grace_s`` seconds after this call.

        A second call ends the loop at once.
        """
        self._lifetime.stop_after_learner(reason)

    def run(self) -> str:
        """Serve until the end. Return the reason for the end.

        Raises:
            QueueError: the run can't continue, or the journal can't be written. The last commit stays valid.
        """
        self._files.record(self._handlers.run_id)
        if self._on_ready is not None:
            self._on_ready(self.address)
        # The rows are never freed, so the garbage collector need not scan them.
        gc.freeze()
        logger.info("the queue serves %s", self.address)
        most, expected = self._endpoint.most_connections, self._config.generator.count + _OTHER_CLIENTS
        if most < expected:
            logger.warning(
                "expected room for %d connections (generator.count and %d others), got %d, as the limit on "
                "open files allows; raise it (ulimit -Hn, or LimitNOFILE in systemd)", expected, _OTHER_CLIENTS, most,
            )  # fmt: skip
        try:
            while not (reason := self._why_end(time.monotonic())):
                self._wait()
                self._take_turn()
            logger.info("the queue ends: %s", reason)
            self._commit()
            self._files.write_last(self._handlers.run_id, persistence.ledger_file(self._state))
            return reason
        finally:
            self._close()

    def _close(self) -> None:
        self._endpoint.close()
        self._metrics.close()
        if self._journal is not None:
            self._journal.close()
        self._lifetime.close()

    # The loop's parts.

    def _wait(self) -> None:
        now = time.monotonic()
        deadlines = [now + min(LEDGER_EVERY_S, self._endpoint.check_within_s), self._pending.due_at]
        if self._state.next_deadline is not None:
            deadlines.append(self._state.next_deadline)
        wait_s = max(0.0, min(deadlines) - now)
        self._poller.poll(int(wait_s * 1000) + 1)
        if (late_s := time.monotonic() - now - wait_s) > _LATE_S:  # this process was suspended
            self._excuse(late_s)

    def _take_turn(self) -> None:
        """Run one turn of the loop.

        Raises:
            QueueError: the run can't continue. The learner has received the cause, or is gone.
        """
        try:
            self._serve()
        except RequestError as error:
            self._recover(error)
        except StorageError as error:
            self._tell_learner(f"the queue stops the run: {error}")
            raise

    def _serve(self) -> None:
        """Handle the messages that have arrived and the requests that waited, commit the changes, send the replies."""
        now = time.monotonic()
        for peer, key, frames in self._held.pop_all():
            self._receive(peer, key, frames)
        for peer, key, frames in self._endpoint.receive(_MAX_DRAIN, now):
            self._receive(peer, key, frames)
        now = time.monotonic()
        self._state.expire(now)
        self._pending.answer(now)
        self._log_damage()
        self._log_failures()
        self._push_notices()
        self._commit()
        self._endpoint.flush()
        self._write_files(now)
        if self._metrics.port is not None and now >= self._metrics_at + LEDGER_EVERY_S:
            self._metrics_at = now
            self._metrics.update(self._state.stats())

    def _receive(self, peer: bytes, key: str, frames: list[memoryview]) -> None:
        """Handle one message: its frame, followed by its parts."""
        request_id: str | None = None
        try:
            if not frames:
                raise WireError("expected a message of at least one frame, got none")
            limits = self._endpoint.limits
            message = decode(frames[0], limits.wire)
            request_id = _request_id(message)
            message = message.with_parts(frames[1:])
            limits.check(message, sum(map(len, frames)))
            if message.type in LEARNER_REQUESTS:
                self._endpoint.require_learner_key(message.type, key)
        except Exception as error:
            # The state is untouched, whatever the error is.
            self._send(Request(peer, request_id, None, "malformed"), self._refusal(peer, error))
            return
        if self._is_stalled:
            self._hold(peer, key, request_id, message, frames)
        else:
            self._handle(Request(peer, request_id, None, message.type, key), message)

    def _refusal(self, peer: bytes, error: Exception) -> Reply:
        """Return the error reply for an exception that has changed nothing. A bug is logged with a traceback."""
        if isinstance(error, WireError):
            self._endpoint.note_malformed(peer, time.monotonic())
        if not isinstance(error, AsyncRLError):
            logger.error("a request failed because of a bug in async-rl; please report it", exc_info=error)
        return _error(error)

    def _handle(self, request: Request, message: Message) -> None:
        """Handle one message: send the reply, or keep the request until it can be answered.

        Raises:
            RequestError: there is a bug, which may have changed the state partly.
        """
        now = time.monotonic()
        generator_id: str | None = None

        def identify() -> None:
            nonlocal generator_id
            generator_id = self._handlers.generator_of(message, request.peer, request.key, now)

        def handle() -> Reply | Deferred | None:
            self._note_learner(request.peer, message, now)
            return self._handlers.handle(message, now)

        # Separately, because a new owner of an id expires leases, even if its request is refused afterwards.
        answer = self._attempt(request, identify, now) or self._attempt(request, handle, now)
        if not (isinstance(answer, Reply) and isinstance(answer.record, ErrorReply)):
            request = replace(request, generator_id=generator_id)
        if isinstance(answer, Reply):
            self._send(request, answer)
        elif isinstance(answer, Deferred):
            self._pending.add(request, message, answer, now)

    def _attempt(
        self, request: Request, answer: Callable[[], Reply | Deferred | None], now: float
    ) -> Reply | Deferred | None:
        """Call ``answer`` and return its reply.

        A request that is refused before it changed the state gets an error reply. On a full disk return None: then the
        client gets no reply and repeats its request.

        Raises:
            RequestError: ``answer`` failed because of a bug: with an unexpected exception, or after it had changed the
                state.
        """
        # Expire leases first, so that this change of the state does not count as one of the request.
        self._state.expire(now)
        before = self._state.revision
        try:
            reply = answer()
        except StorageFullError as error:
            self._full_disk.note(str(error), now)
            return None
        except StorageError:
            raise
        except AsyncRLError as error:
            if self._state.revision != before:
                raise RequestError(request) from error
            return self._refusal(request.peer, error)
        except Exception as error:
            raise RequestError(request) from error
        if self._full_disk.reason and isinstance(reply, Reply) and _has_kept(reply):
            self._full_disk.end(now)
        return reply

    def _note_learner(self, peer: bytes, message: Message, now: float) -> None:
        learner = self._state.learner
        lineage = message.fields.get("lineage")
        is_attached = learner is not None and lineage == learner.lineage and message.type in LEARNER_REQUESTS
        if message.type == "attach" or is_attached:
            self._lifetime.note_learner(now)
            if message.type not in (*_NOT_AWAITED, "quarantine"):  # another client may lift a quarantine
                self._learner_peer = peer

    def _send(self, request: Request, reply: Reply) -> None:
        if isinstance(reply.record, Status):
            reply = Reply(self._whole_status(reply.record))
        notice = {} if request.generator_id is None else self._notice(request.generator_id, reply)
        for message in (reply, *reply.further):
            self._endpoint.send(request.peer, _frames(request, message, notice))

    def _whole_status(self, status: Status) -> Status:
        """Return the status of the queue with that of the server added."""
        now = time.monotonic()
        is_alive = self._lifetime.is_learner_alive(self._state, now, learner_left=self._handlers.learner_gone)
        extra = {
            "learner_alive": is_alive, "learner_trouble": self._handlers.learner_trouble if is_alive else "",
            "address": self.address, "relay": self._config.environment.relay, "pid": os.getpid(),
            "waits": self._pending.waits(now),
            "storage_full": self._full_disk.status(now), **self._endpoint.counters(),
            "journal_damage": "" if self._journal is None else self._journal.damage,
        }  # fmt: skip
        return Status({**status.status, **extra})

    def _notice(self, generator_id: str, reply: Reply) -> dict[str, Any]:
        notice = self._handlers.notice(generator_id)
        if isinstance(reply.record, HeartbeatReply) and reply.record.cancelled:
            notice["cancelled"] = [*reply.record.cancelled, *notice.get("cancelled", [])]
        return notice

    # Durability.

    def _commit(self) -> None:
        """Commit the changes since the last commit to the journal. On a full disk, wait until there is room."""
        while not self._has_committed():
            self._wait_for_room()

    def _has_committed(self) -> bool:
        """Try to commit. Return False if the disk is full.

        Raises:
            QueueError: the disk is full, and the server must end.
        """
        now = time.monotonic()
        try:
            self._durable.commit()
        except StorageFullError as error:
            self._full_disk.note(str(error), now)
            if not self._is_stalled:
                self._is_stalled, self._stalled_at = True, now
            if reason := self._why_end(now):
                raise QueueError(f"the queue ends ({reason}) with changes that it could not save: {error}") from error
            return False
        if self._is_stalled:
            self._is_stalled = False
            self._full_disk.end(now)
            self._excuse(now - self._stalled_at)
        return True

    def _excuse(self, unserved_s: float) -> None:
        """Let the time in which no request was served count for no timeout."""
        self._state.clock_ahead_s -= unserved_s
        self._lifetime.note_learner(time.monotonic())

    def _wait_for_room(self) -> None:
        """Wait before the next try of a commit on a full disk.

        Meanwhile, status and ping are answered. Other messages are kept until a commit succeeds.
        """
        now = time.monotonic()
        if self._full_disk.must_notify(now):
            frame = encode("notice", {"storage_full": self._full_disk.reason})
            for peer in {*self._state.generators.peers, *filter(None, [self._learner_peer])}:
                self._endpoint.send_now(peer, [frame])
        self._lifetime.wait(_LOOK_AGAIN_S)
        # With 0, too, because that closes the connections of removed keys.
        for peer, key, frames in self._endpoint.receive(_MAX_DRAIN if self._held.has_room else 0, now):
            self._receive(peer, key, frames)

    def _hold(self, peer: bytes, key: str, request_id: str | None, message: Message, frames: list[memoryview]) -> None:
        """Answer a status request or a ping at once, and keep any other message until a commit succeeds."""
        now = time.monotonic()
        self._note_learner(peer, message, now)
        if message.type not in ("status", "ping"):
            self._held.add(peer, key, message.type, request_id, frames)
            return
        request = Request(peer, request_id, None, message.type)
        reply = self._attempt_read(request, message, now)
        self._endpoint.send_now(peer, _frames(request, reply, {}))

    def _attempt_read(self, request: Request, message: Message, now: float) -> Reply:
        """Return the reply to a request that does not change the state."""
        try:
            reply = self._handlers.handle(message, now)
        except AsyncRLError as error:
            return self._refusal(request.peer, error)
        assert isinstance(reply, Reply)
        return Reply(self._whole_status(reply.record)) if isinstance(reply.record, Status) else reply

    # After a bug.

    def _recover(self, error: RequestError) -> None:
        """After a bug, go back to the last commit, and disconnect the generator whose request failed.

        Raises:
            QueueError: the run can't continue, because the request was the learner's, or there is no journal.
        """
        request, cause = error.request, error.__cause__
        logger.error("a %r request failed because of a bug in async-rl; please report it", request.type, exc_info=cause)
        # The collected replies report changes that are undone here. The clients repeat their requests.
        self._endpoint.discard()
        text = (
            f"a {request.type!r} request failed because of a bug in async-rl, please report it: "
            f"{type(cause).__name__}: {cause}"
        )
        if request.type not in GENERATOR_REQUESTS or self._journal is None:
            self._tell_learner(f"the queue stops the run: {text}; see logs/queue.log in the run directory", request)
            raise QueueError(f"the queue stops the run: {text}") from cause
        entry = self._state.generators.using(request.peer)
        generator_id = None if entry is None else entry.generator_id
        waiting = self._pending.pop_all()
        self._durable.revert()
        logger.warning("the queue went back to its last commit and disconnected generator %r", generator_id)
        self._endpoint.send_now(request.peer, _frames(request, Reply(ErrorReply("internal", text)), {}))
        self._endpoint.block(request.peer, time.monotonic())
        if generator_id is not None:
            generator_requests.lose_generator(self._state, generator_id, time.monotonic())
        for other, message in waiting:
            if other.peer != request.peer:
                self._handle(replace(other, generator_id=None), message)

    def _tell_learner(self, cause: str, failed: Request | None = None) -> None:
        """Answer the learner's requests with the error ``cause``, until one answer is sent or the learner is gone."""
        reply = Reply(ErrorReply("queue", cause))
        waiting = [request for request, _ in self._pending.pop_all()]
        is_told = False
        for request in (failed, *waiting):
            if request is not None and request.type in LEARNER_REQUESTS and request.type not in _NOT_AWAITED:
                self._endpoint.send_now(request.peer, _frames(request, reply, {}))
                is_told = True
        while not is_told and self._state.learner is not None and not self._why_end(time.monotonic()):
            self._poller.poll(1000)
            for peer, _, frames in self._endpoint.receive(_MAX_DRAIN, time.monotonic()):
                try:
                    message = decode(frames[0], self._endpoint.limits.wire)
                    request = Request(peer, _request_id(message), None, message.type)
                except WireError:
                    continue
                self._note_learner(peer, message, time.monotonic())
                if request.type in LEARNER_REQUESTS and request.type not in _NOT_AWAITED:
                    self._endpoint.send_now(peer, _frames(request, reply, {}))
                    is_told = True

    # Files and notices.

    def _log_damage(self) -> None:
        for file, count in self._state.damage.items():
            logger.warning(
                "%s: %d groups are damaged; they count as rolled_back, and their prompts are sampled again", file, count
            )
        self._state.damage.clear()

    def _log_failures(self) -> None:
        for line in self._state.news:
            logger.warning("%s", line)
        self._state.news.clear()

    def _push_notices(self) -> None:
        """Send generators notices about a new version, the end of the run, and cancelled leases."""
        news = self._handlers.news
        everyone = news != self._last_news and news != (None, False)
        self._last_news = news
        state = self._state
        for entry in state.generators.alive_clients(state.now) if everyone else state.generators.to_notify():
            if entry.peer is not None:
                self._endpoint.send(entry.peer, [encode("notice", self._handlers.notice(entry.generator_id))])

    def _write_files(self, now: float) -> None:
        state = self._state
        step = -1 if state.learner is None else state.learner.step
        ledger = partial(persistence.ledger_file, state)
        try:
            self._files.write(self._handlers.run_id, ledger, now, revision=state.revision, step=step)
        except OSError as error:
            if not is_out_of_room(error, Path(self._config.run.dir)):
                raise
            if now - self._files_logged_at >= LOG_EVERY_S:
                self._files_logged_at = now
                logger.warning(
                    "ledger.json in %s is out of date, because the disk has no room: %s; free disk space there",
                    self._config.run.dir,
                    error,
                )

    def _why_end(self, now: float) -> str:
        self._state.set_clock(now)
        # A generator that knows of the end has left.
        unaware = self._state.generators.alive_clients(self._state.now)
        return self._lifetime.reason_to_end(self._state, unaware, now, learner_left=self._handlers.learner_gone)


def _request_id(message: Message) -> str | None:
    return read_as(message.fields, Envelope).request_id


def _has_kept(reply: Reply) -> bool:
    """Return whether a reply says that a group's bytes were stored."""
    verdicts = reply.record.verdicts.values() if isinstance(reply.record, ReturnReply) else ()
    return any(verdict in ("queued", "eval_done") for verdict in verdicts)


def _frames(request: Request, reply: Reply, notice: Mapping[str, Any]) -> list[Frame]:
    """Return the frames of one message of a reply: the encoded record with the notice, then the parts."""
    fields = {**asdict(reply.record), "request_id": request.request_id, **notice}
    return [encode(WIRE_TYPES[type(reply.record)], fields, num_parts=len(reply.parts)), *reply.parts]


def _error(error: Exception) -> Reply:
    kinds = {LineageError: "lineage", WireError: "wire", IdInUseError: "id_in_use"}
    kind = kinds.get(type(error), "queue" if isinstance(error, AsyncRLError) else "internal")
    return Reply(ErrorReply(kind, str(error) or type(error).__name__))
