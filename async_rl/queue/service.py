"""The queue server: one ROUTER socket around the buffer, one thread, one loop.

It waits for nobody. Requests that can't be answered yet are parked and tried again after every change; malformed ones
are counted and answered. ``queue.json`` says where it is, ``ledger.json`` what became of everything. It ends when the
run is finished and its generators were told, when its learner is gone for ``queue.linger_s``, when the lifeline of
whoever started it breaks, or on SIGTERM.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from async_rl.address import check_address, refuse_open_bind
from async_rl.codec import field
from async_rl.config import Config
from async_rl.errors import AddressError, AsyncRLError, ConfigError, LineageError, WireError
from async_rl.queue.admission import BufferSettings
from async_rl.queue.buffer import Buffer
from async_rl.queue.evals import Row
from async_rl.queue.files import QueueRecord, read_record, write_json
from async_rl.queue.handlers import Handlers, Reply, Waiting
from async_rl.queue.protocol import EXTRA_MESSAGE_BYTES, RECEIVE_HIGH_WATER_MARK
from async_rl.queue.stream import PromptStream
from async_rl.wire import Limits, Message, decode, encode

logger = logging.getLogger(__name__)

LEARNER_SILENCE_S = 20.0
"""A learner that said nothing for so long, not even that it is alive, is gone."""
FINISH_GRACE_S = 10.0
"""After the end, generators have so long to hear of it."""
LEDGER_EVERY_S = 1.0
_COPY_BELOW_BYTES = 1 << 16
_DRAIN = 256
"""Messages handled before parked requests are tried again."""


@dataclass(slots=True)
class _Parked:
    identity: bytes
    request_id: Any
    generator_id: str | None
    type: str
    waiting: Waiting
    deadline: float
    since: float
    tried: int = -1


class QueueServer:
    """Binds at once; ``run`` serves until the end. ``orphan_s``: ends if no learner attaches for so long.

    Raises:
        AddressError: the address is busy, malformed, or open to the network without ``insecure``.
        ConfigError: the queue can't hold one step.
    """

    def __init__(
        self, config: Config, train_rows: Sequence[Row], eval_rows: Mapping[str, Sequence[Row]], *,
        run_id: str = "", insecure: bool = False, lifeline_fd: int | None = None, orphan_s: float | None = None,
        on_ready: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        if not train_rows:
            raise ConfigError(f"data.train: expected at least one row, got none in {config.data.train!r}")
        stream = PromptStream(
            len(train_rows), seed=config.run.seed, shuffle=config.data.shuffle, epochs=config.data.epochs
        )
        buffer = Buffer(BufferSettings.from_config(config), train_rows, stream, instance=secrets.token_hex(2))
        limited = {name: rows[: config.eval.max_rows] for name, rows in eval_rows.items()}
        self._handlers = Handlers(buffer, config, limited, run_id)
        self._buffer, self._config, self._on_ready = buffer, config, on_ready
        self._run_dir = Path(config.run.dir)
        self._lifeline_fd, self._orphan_s = lifeline_fd, orphan_s
        self._limits = Limits(max_bytes=config.queue.max_bytes + EXTRA_MESSAGE_BYTES)
        self._parked: list[_Parked] = []
        self._identities: dict[str, bytes] = {}
        self._told: tuple[Any, ...] = ()
        self._wake_read, self._wake_write = os.pipe()
        self._stop_reason = ""
        self._started = self._learner_seen = time.monotonic()
        self._finished_at: float | None = None
        self._ledger_written, self._ledger_step = (-1, 0.0), -1
        self._recorded_run_id = ""
        self.num_malformed = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self.address = self._bind(insecure=insecure)
        except AddressError:
            self._close()
            raise

    def stop(self, reason: str) -> None:
        """End the loop soon; safe from a signal handler or another thread."""
        self._stop_reason = reason
        os.write(self._wake_write, b"x")

    def run(self) -> str:
        """Serve; the reason why it ended."""
        self._write_record()
        if self._on_ready is not None:
            self._on_ready(self.address)
        logger.info("the queue serves %s", self.address)
        try:
            while not (reason := self._why_end(time.monotonic())):
                self._wait()
                self._drain()
                now = time.monotonic()
                self._buffer.expire(now)
                self._answer_parked(now)
                self._push_notices()
                self._write_ledger(now)
            logger.info("the queue ends: %s", reason)
            self._write_ledger(time.monotonic(), force=True)
            return reason
        finally:
            self._close()

    # Socket.

    def _bind(self, *, insecure: bool) -> str:
        wanted = self._config.queue.address or "tcp://127.0.0.1:0"
        refuse_open_bind(wanted, insecure=insecure)
        host, port = check_address(wanted)
        socket = self._socket
        socket.setsockopt(zmq.MAXMSGSIZE, self._limits.max_bytes)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        socket.setsockopt(zmq.LINGER, 2000)
        # A client that reconnects comes under its old identity and must not be taken for a rival.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        shown = f"[{host}]" if ":" in host else host
        for candidate in self._ports(port):
            try:
                socket.bind(f"tcp://{shown}:{candidate or '*'}")
                break
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE and candidate != port:
                    continue
                raise AddressError(
                    f"can't bind queue.address {wanted}: {error.strerror}; is another queue running there? Stop it, or "
                    f"choose another address"
                ) from error
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        bound_port = bound.decode().rsplit(":", 1)[1]
        return self._advertised("127.0.0.1" if host in ("*", "0.0.0.0") else shown, bound_port)

    def _ports(self, port: int) -> list[int]:
        """Ports to try. Any free one: first that of this run's last server, which generators still know."""
        record = read_record(self._run_dir)
        if port or record is None or (self._handlers.run_id and record.run_id != self._handlers.run_id):
            return [port]
        return [check_address(record.address)[1], port]

    def _advertised(self, host: str, port: str) -> str:
        if self._config.queue.advertise is None:
            return f"tcp://{host}:{port}"
        advertised_host, advertised_port = check_address(self._config.queue.advertise)
        shown = f"[{advertised_host}]" if ":" in advertised_host else advertised_host
        return f"tcp://{shown}:{advertised_port or port}"

    def _close(self) -> None:
        self._socket.close()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # The loop's parts.

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        if self._lifeline_fd is not None:
            poller.register(self._lifeline_fd, zmq.POLLIN)
        now = time.monotonic()
        deadlines = [now + LEDGER_EVERY_S, *(p.deadline for p in self._parked)]
        if self._buffer.next_deadline is not None:
            deadlines.append(self._buffer.next_deadline)
        poller.poll(int(max(0.0, min(deadlines) - now) * 1000) + 1)

    def _drain(self) -> None:
        for _ in range(_DRAIN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._receive(bytes(frames[0].buffer), [memoryview(f.buffer) for f in frames[1:]])

    def _receive(self, identity: bytes, frames: list[memoryview]) -> None:
        request_id: Any = None
        try:
            if len(frames) != 1:
                raise WireError(f"expected one frame, got {len(frames)}")
            message = decode(frames[0], self._limits)
            request_id = message.fields.get("request_id")
            self._handle(identity, request_id, message)
        except Exception as error:
            self._send(identity, request_id, None, self._failed(error))

    def _failed(self, error: Exception) -> Reply:
        """The server outlives bad requests, and its own bugs: the request is refused, and the log has the place."""
        if isinstance(error, WireError):
            self.num_malformed += 1
        if not isinstance(error, AsyncRLError):
            logger.error("a request failed by a bug", exc_info=error)
        return _error(error)

    def _handle(self, identity: bytes, request_id: Any, message: Message) -> None:
        now = time.monotonic()
        generator_id = message.fields.get("generator_id")
        if generator_id is not None:
            generator_id = field(message.fields, "generator_id", str)
            self._identities[generator_id] = identity
        self._note_learner(message, now)
        answer = self._handlers.handle(message, now)
        if isinstance(answer, Reply):
            self._send(identity, request_id, generator_id, answer)
        elif isinstance(answer, Waiting):
            # One waiting request of a type a client: a newer one, or the same sent again, replaces it.
            self._parked = [p for p in self._parked if (p.identity, p.type) != (identity, message.type)]
            deadline = now + answer.wait_s
            self._parked.append(_Parked(identity, request_id, generator_id, message.type, answer, deadline, since=now))
            self._answer_parked(now)

    def _note_learner(self, message: Message, now: float) -> None:
        learner = self._buffer.learner
        lineage = message.fields.get("lineage")
        if message.type == "attach" or (learner is not None and lineage == learner.lineage and message.type != "lease"):
            self._learner_seen = now

    def _answer_parked(self, now: float) -> None:
        """Try parked requests, in order of arrival, until an answer to one no longer changes what another gets."""
        revision = None
        while revision != self._buffer.revision:
            revision = self._buffer.revision
            self._try_parked(now)

    def _try_parked(self, now: float) -> None:
        still: list[_Parked] = []
        parked, self._parked = self._parked, []
        for item in parked:
            last = now >= item.deadline
            if item.tried == self._buffer.revision and not last:
                still.append(item)
                continue
            try:
                reply = item.waiting.attempt(now, last)
            except Exception as error:
                reply = self._failed(error)
            item.tried = self._buffer.revision
            if reply is None:
                still.append(item)
            else:
                self._send(item.identity, item.request_id, item.generator_id, reply)
        self._parked = still

    def _send(self, identity: bytes, request_id: Any, generator_id: str | None, reply: Reply) -> None:
        fields = {**reply.fields, "request_id": request_id, **self._notice(generator_id, reply)}
        if reply.type == "status":
            now = time.monotonic()
            waits = [
                {"who": p.generator_id or "learner", "for": p.type, "since_s": now - p.since} for p in self._parked
            ]
            extra = {"address": self.address, "pid": os.getpid(), "malformed": self.num_malformed, "waits": waits}
            fields["status"] = {**fields["status"], **extra}
        self._send_frame(identity, encode(reply.type, fields, reply.arrays))

    def _notice(self, generator_id: str | None, reply: Reply) -> dict[str, Any]:
        notice = self._handlers.notice(generator_id)
        own = reply.fields.get("cancelled", [])
        return {**notice, "cancelled": [*own, *notice.get("cancelled", [])]}

    def _send_frame(self, identity: bytes, frame: bytes) -> None:
        try:
            # Sharing memory with the socket's thread costs more than copying a small frame.
            self._socket.send_multipart([identity, frame], zmq.NOBLOCK, copy=len(frame) < _COPY_BELOW_BYTES)
        except zmq.Again:
            # The peer does not read; it asks again under the same id once it does.
            logger.warning("a reply of %d bytes to %r was not taken", len(frame), identity)

    def _push_notices(self) -> None:
        """Tell generators unasked of a new version, the end, and leases to stop."""
        news = self._handlers.notice(None)
        key = (repr(news.get("announcement")), news.get("finished"))
        everyone = key != self._told and bool(news)
        self._told = key
        alive = set(self._buffer.alive_generators(time.monotonic()))
        for generator_id in alive if everyone else set(self._buffer.generators_to_tell()):
            identity = self._identities.get(generator_id)
            if identity is not None:
                self._send_frame(identity, encode("notice", self._handlers.notice(generator_id)))
        if len(self._identities) > 4 * len(alive) + 64:
            self._identities = {g: i for g, i in self._identities.items() if g in alive}

    # Life and files.

    def _why_end(self, now: float) -> str:
        if self._stop_reason:
            return self._stop_reason
        if self._lifeline_fd is not None and _is_broken(self._lifeline_fd):
            return "whoever started it is gone"
        if self._buffer.finished:
            self._finished_at = self._finished_at or now
            untold = set(self._buffer.alive_generators(now)) - self._handlers.left
            if not untold or now - self._finished_at >= FINISH_GRACE_S:
                return "the run is finished"
            return ""
        linger_s = self._config.queue.linger_s
        if self._buffer.learner is None:
            if self._orphan_s is not None and now - self._started >= self._orphan_s:
                return f"no learner attached for {self._orphan_s:.0f} s"
            return ""
        silence_s = 0.0 if self._handlers.learner_gone else LEARNER_SILENCE_S
        if now - self._learner_seen >= silence_s + linger_s:
            return f"the learner is gone for {now - self._learner_seen:.0f} s (queue.linger_s = {linger_s:.0f})"
        return ""

    def _write_record(self) -> None:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        record = QueueRecord(self._handlers.run_id, os.getpid(), self.address)
        write_json(self._run_dir / "queue.json", record.as_dict())
        self._recorded_run_id = self._handlers.run_id

    def _write_ledger(self, now: float, *, force: bool = False) -> None:
        if self._recorded_run_id != self._handlers.run_id:
            self._write_record()
        revision, written_at = self._ledger_written
        acked = self._buffer.learner.step if self._buffer.learner is not None else -1
        is_due = acked != self._ledger_step or now - written_at >= LEDGER_EVERY_S
        if not force and (revision == self._buffer.revision or not is_due):
            return
        self._ledger_written, self._ledger_step = (self._buffer.revision, now), acked
        write_json(self._run_dir / "ledger.json", {"run_id": self._handlers.run_id, **self._buffer.ledger_file()})


def _is_broken(fd: int) -> bool:
    """Whether the other end of a lifeline pipe was closed; nothing is ever written to it."""
    readable, _, _ = select.select([fd], [], [], 0)
    return bool(readable) and not os.read(fd, 1)


def _error(error: Exception) -> Reply:
    kinds = {LineageError: "lineage", WireError: "wire"}
    kind = kinds.get(type(error), "queue" if isinstance(error, AsyncRLError) else "internal")
    return Reply("error", {"kind": kind, "message": str(error) or type(error).__name__})
