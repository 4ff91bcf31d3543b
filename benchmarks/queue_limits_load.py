"""The load of ``queue_limits``: a learner that trains nothing, and many generators in one process that sample nothing.

The learner uses the real client. A real generator's client has threads of its own, so a thousand of them don't fit one
machine. A ``Fleet`` therefore gives each generator a socket with an identity and a connection of its own, and sends the
same messages at the same intervals, encoded by the project's codec: hello, lease requests that may wait, a heartbeat a
second, returned groups, goodbye. Like the real client, it repeats a request that gets no reply.
"""

from __future__ import annotations

import heapq
import itertools
import random
import secrets
import select
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import zmq
from msgspec.structs import asdict

from async_rl.generator.loop import HEARTBEAT_S, LEASE_WAIT_S
from async_rl.net.codec import encode_group, read_as
from async_rl.net.wire import Message, decode, encode
from async_rl.process.child import reuse_freed_memory
from async_rl.queue.client.clients import LearnerQueue
from async_rl.queue.client.connection import RESEND_S
from async_rl.queue.messages import (
    WIRE_TYPES,
    Announcement,
    GeneratorStats,
    Goodbye,
    Heartbeat,
    Hello,
    LeaseRequest,
    LeasesGranted,
    NotReady,
    ReturnGroups,
    ReturnReply,
    StepAck,
    TrainedCounts,
)
from async_rl.records import Lease, Rollout
from benchmarks.queue_product import DIGEST, make_group, rollouts

LINEAGE = "0123456789abcdef"
RUN_ID = "limits"
GROUP_SIZE, NUM_TOKENS = 2, 2
_PAUSE_S = 0.05
"""As a generator's after an answer without leases."""
_ABRUPT = 0.1
"""The share of leaving generators that say no goodbye, as if they were killed."""
_WAIT_S = 60.0


@dataclass(slots=True)
class Report:
    """What a fleet counted since its last report. ``lease_s``: seconds to each reply that granted a lease."""

    replies: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    lease_s: list[float] = field(default_factory=list)
    heartbeat_s: list[float] = field(default_factory=list)
    granted: int = 0
    unread: int = 0
    given_back: int = 0
    abandoned: int = 0
    repeated: int = 0
    errors: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Add the counts of another fleet, or of a later time."""
        for name in ("replies", "verdicts"):
            getattr(self, name).update(getattr(other, name))
        for name in ("lease_s", "heartbeat_s", "granted", "unread", "given_back", "abandoned", "repeated", "errors"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class _Sent:
    type: str
    frames: Sequence[bytes]
    sent_at: float
    wait_s: float
    due_at: float


@dataclass(slots=True, eq=False)
class FakeGenerator:
    """One generator: its socket, the requests without a reply, and the leases that it holds."""

    name: str
    socket: zmq.Socket[bytes]
    secret: str = field(default_factory=lambda: secrets.token_hex(8))
    outstanding: dict[str, _Sent] = field(default_factory=dict)
    held: dict[str, Lease] = field(default_factory=dict)
    version: int = -1
    is_welcome: bool = False
    has_left: bool = False

    def has(self, type_: str) -> bool:
        return any(sent.type == type_ for sent in self.outstanding.values())


class Fleet:
    """The generators of one process. ``pipe`` brings commands as (method, arguments), and takes the answers.

    ``group_s`` is the mean time from a lease to its group, drawn evenly from half of it to one and a half.
    """

    def __init__(self, address: str, process: int, most: int, pipe: Connection) -> None:
        self._address, self._process, self._name, self._pipe = address, process, f"g{process}", pipe
        self._context = zmq.Context()
        # libzmq's default of 1,023 sockets is for one context. The server needs one socket for all its connections.
        self._context.set(zmq.MAX_SOCKETS, 2 * most + 64)
        self._epoll = select.epoll()
        self._epoll.register(pipe.fileno(), select.EPOLLIN)
        self._by_fd: dict[int, FakeGenerator] = {}
        self._numbers, self._order = itertools.count(), itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._group_s, self._most_leases, self._churn_s = 10.0, 1, 0.0
        self._report, self._is_done = Report(), False
        self._random = random.Random(process)

    def run(self) -> None:
        self._after(1.0, self._repeat)
        while not self._is_done:
            now = time.monotonic()
            while self._events and self._events[0][0] <= now:
                heapq.heappop(self._events)[2]()
            wait_s = self._events[0][0] - time.monotonic() if self._events else 1.0
            for fd, _ in self._epoll.poll(max(0.0, wait_s)):
                if fd == self._pipe.fileno():
                    method, *arguments = self._pipe.recv()
                    self._pipe.send(getattr(self, method)(*arguments))
                elif fd in self._by_fd:
                    self._drain(self._by_fd[fd])
        self._context.destroy(linger=1000)

    # Commands.

    def join(self, num: int) -> int:
        """Connect so many more generators. Return the number of all."""
        for _ in range(num):
            number = next(self._numbers)
            name = f"{self._name}-{number}"
            socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, f"{name}-{secrets.token_hex(16)}".encode())
            # Eight of an address, as if of one host: the server limits the new connections of each address.
            host, place = divmod(number // 8, 250)
            source = f"127.{self._process + 1}.{host % 250}.{place + 1}"
            socket.connect(self._address.replace("tcp://", f"tcp://{source}:0;"))
            generator = FakeGenerator(name, socket)
            fd = int(socket.get(zmq.FD))
            self._by_fd[fd] = generator
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)
            self._post(generator, Hello(name, "benchmark", "fake", None), wait_s=5.0)
            self._after(self._random.random() * HEARTBEAT_S, partial(self._heartbeat, generator))
        return len(self._by_fd)

    def pace(self, group_s: float, most_leases: int, churn_per_s: float) -> None:
        """Set the seconds that a group takes, the leases that each generator holds, and joins a second."""
        had_churn = self._churn_s > 0
        self._group_s, self._most_leases = group_s, most_leases
        self._churn_s = 1 / churn_per_s if churn_per_s else 0.0
        if churn_per_s and not had_churn:
            self._after(self._churn_s, self._churn)
        for generator in list(self._by_fd.values()):
            self._ask(generator)

    def report(self) -> Report:
        """Return what was counted since the last report."""
        report, self._report = self._report, Report()
        return report

    def num_connected(self) -> int:
        return len(self._by_fd)

    def num_welcome(self) -> int:
        return sum(generator.is_welcome for generator in self._by_fd.values())

    def leave(self) -> Report:
        """Let all generators say goodbye, and end."""
        for generator in list(self._by_fd.values()):
            self._leave(generator, is_abrupt=False)
        self._is_done = True
        return self.report()

    # A generator's life.

    def _churn(self) -> None:
        if not self._churn_s:
            return
        self._after(self._churn_s, self._churn)
        leaver = self._random.choice(list(self._by_fd.values()))
        self._leave(leaver, is_abrupt=self._random.random() < _ABRUPT)
        self.join(1)

    def _leave(self, generator: FakeGenerator, *, is_abrupt: bool) -> None:
        fd = int(generator.socket.get(zmq.FD))
        self._epoll.unregister(fd)
        del self._by_fd[fd]
        generator.has_left = True
        if is_abrupt:
            self._report.abandoned += len(generator.held)
        else:
            self._report.given_back += len(generator.held)
            fields = {**asdict(Goodbye(generator.name)), "secret": generator.secret}
            generator.socket.send(encode(WIRE_TYPES[Goodbye], fields), zmq.NOBLOCK)
        # The replies to these may have granted leases, or taken groups, that nobody counts here.
        self._report.unread += sum(sent.type in ("lease", "return") for sent in generator.outstanding.values())
        generator.socket.close(linger=0 if is_abrupt else 1000)

    def _heartbeat(self, generator: FakeGenerator) -> None:
        if generator.has_left:
            return
        self._after(HEARTBEAT_S, partial(self._heartbeat, generator))
        if generator.is_welcome and not generator.has("heartbeat"):
            # The tokens of a lease grow, or it would expire.
            progress = dict.fromkeys(generator.held, int(100 * time.monotonic()))
            self._post(generator, Heartbeat(generator.name, progress, GeneratorStats(max_running=1), ""))

    def _ask(self, generator: FakeGenerator) -> None:
        wanted = self._most_leases - len(generator.held)
        if generator.version < 0 or generator.has_left or wanted <= 0 or generator.has("lease"):
            return
        request = LeaseRequest(generator.name, LINEAGE, generator.version, wanted)
        self._post(generator, request, wait_s=LEASE_WAIT_S)

    def _finish(self, generator: FakeGenerator, lease: Lease, version: int) -> None:
        if generator.has_left or lease.lease_id not in generator.held:
            return
        del generator.held[lease.lease_id]
        made = _rollouts(version)
        group = make_group(lease.lease_id, lease.prompt.position, lease.lineage, made, generator.name)
        self._post(generator, ReturnGroups(generator.name, (lease.lease_id,), ()), [encode_group(group)])
        self._ask(generator)

    # Messages.

    def _on_welcome(self, generator: FakeGenerator, message: Message, sent: _Sent, now: float) -> None:
        generator.is_welcome = True
        self._ask(generator)

    def _on_leases(self, generator: FakeGenerator, message: Message, sent: _Sent, now: float) -> None:
        granted = read_as(message.fields, LeasesGranted)
        if granted.leases:
            self._report.lease_s.append(now - sent.sent_at)
        for lease in granted.leases:
            self._report.granted += 1
            generator.held[lease.lease_id] = lease
            version = max(generator.version, lease.min_version)
            after_s = self._group_s * (0.5 + self._random.random())
            self._after(after_s, partial(self._finish, generator, lease, version))
        if granted.activate is not None:
            generator.version = max(generator.version, granted.activate)
        if granted.leases or granted.activate is not None:
            self._ask(generator)
        else:
            self._after(_PAUSE_S, partial(self._ask, generator))

    def _on_returned(self, generator: FakeGenerator, message: Message, sent: _Sent, now: float) -> None:
        reply = read_as(message.fields, ReturnReply)
        self._report.verdicts.update(reply.verdicts.values())
        self._report.errors += reply.why.values()

    def _on_heartbeat(self, generator: FakeGenerator, message: Message, sent: _Sent, now: float) -> None:
        self._report.heartbeat_s.append(now - sent.sent_at)

    def _note(self, generator: FakeGenerator, fields: Mapping[str, Any]) -> None:
        if (announced := fields.get("announcement")) is not None:
            version = int(announced["version"])
            if version > generator.version:
                generator.version = version
                self._ask(generator)
        for lease_id in fields.get("cancelled", ()):
            generator.held.pop(lease_id, None)
        if fields.get("cancelled"):
            self._ask(generator)

    def _drain(self, generator: FakeGenerator) -> None:
        while not generator.has_left and int(generator.socket.get(zmq.EVENTS)) & int(zmq.POLLIN):
            frames = generator.socket.recv_multipart(zmq.NOBLOCK)
            now = time.monotonic()
            while frames:
                message = decode(frames[0])
                frames = frames[1 + message.num_parts :]
                self._take_in(generator, message, now)

    def _take_in(self, generator: FakeGenerator, message: Message, now: float) -> None:
        self._note(generator, message.fields)
        sent = generator.outstanding.pop(str(message.fields.get("request_id")), None)
        if sent is None:
            return
        self._report.replies[sent.type] += 1
        if message.type == "error":
            self._report.errors.append(str(message.fields.get("message")))
        elif message.type == "not_yet":
            self._post(generator, Hello(generator.name, "benchmark", "fake", None), wait_s=5.0)
        else:
            getattr(self, f"_on_{message.type}")(generator, message, sent, now)

    def _post(
        self, generator: FakeGenerator, request: msgspec.Struct, parts: Sequence[bytes] = (), *, wait_s: float = 0.0
    ) -> None:
        now, type_, request_id = time.monotonic(), WIRE_TYPES[type(request)], f"r{next(self._order)}"
        fields = {**asdict(request), "request_id": request_id, "wait_s": wait_s, "secret": generator.secret}
        frames = [encode(type_, fields, num_parts=len(parts)), *parts]
        generator.outstanding[request_id] = _Sent(type_, frames, now, wait_s, now + RESEND_S + wait_s)
        self._send(generator, frames)

    def _send(self, generator: FakeGenerator, frames: Sequence[bytes]) -> None:
        generator.socket.send_multipart(frames, zmq.NOBLOCK)
        # Sending may use up the event by which epoll would report a message that came meanwhile.
        self._after(0.0, partial(self._drain, generator))

    def _repeat(self) -> None:
        """Send each request again whose reply is overdue."""
        self._after(1.0, self._repeat)
        now = time.monotonic()
        for generator in list(self._by_fd.values()):
            for sent in list(generator.outstanding.values()):
                if now >= sent.due_at:
                    sent.due_at = now + RESEND_S + sent.wait_s
                    self._report.repeated += 1
                    self._send(generator, sent.frames)

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time.monotonic() + seconds, next(self._order), call))


@lru_cache(maxsize=64)
def _rollouts(version: int) -> tuple[Rollout, ...]:
    return rollouts(NUM_TOKENS, version)[:GROUP_SIZE]


def run_fleet(address: str, process: int, most: int, pipe: Connection) -> None:
    """Run up to ``most`` generators until the command ``leave``. ``process`` is the number of this process."""
    Fleet(address, process, most, pipe).run()


def run_learner(address: str, is_training: bool, step_s: float, pipe: Connection) -> None:
    """Take and acknowledge steps, at most one in ``step_s`` seconds, until ``pipe`` has a message; then end the run.

    Without ``is_training`` no step is taken. The last message into ``pipe`` is the queue's status before the end.
    """
    reuse_freed_memory()
    queue = LearnerQueue(address, _WAIT_S)
    queue.attach(RUN_ID, LINEAGE, "", 0, 0, 10_000_000, "", {}, None)
    queue.announce(Announcement(LINEAGE, 0, DIGEST, "tcp://127.0.0.1:1"))
    queue.confirm(LINEAGE)
    pipe.send("attached")
    step, due_at = 0, 0.0
    while not pipe.poll(max(0.0, due_at - time.monotonic()) if is_training else 1.0):
        if not is_training:
            continue
        batch = queue.take(LINEAGE, step, step, 1.0)
        if isinstance(batch, NotReady):
            if batch.stop:
                raise RuntimeError(batch.reason)
            continue
        num_rollouts = sum(len(taken.group.rollouts) for taken in batch.groups)
        queue.ack(
            StepAck(LINEAGE, step, step + 1, TrainedCounts(True, num_rollouts, {}, NUM_TOKENS * num_rollouts, {}))
        )
        step, due_at = step + 1, time.monotonic() + step_s
        queue.announce(Announcement(LINEAGE, step, DIGEST, "tcp://127.0.0.1:1"))
    pipe.send(queue.status())
    queue.finish(LINEAGE)
    queue.close()
