"""A queue server without sockets or threads: a history of requests runs the same way every time.

``Run`` is the server with its clients, which repeat a request until it is answered. ``Faults`` lets the calls of chosen
functions fail by their numbers, which a first run without faults counts.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict

from async_rl.net.codec import decode_group, encode_group, read_as
from async_rl.net.wire import Message, decode, encode
from async_rl.queue import messages
from async_rl.queue.messages import WIRE_TYPES, Announcement, BatchPart, LeasesGranted, TrainedCounts
from async_rl.queue.server import server as server_module
from async_rl.queue.server.server import QueueServer
from async_rl.queue.server.sockets import MessageLimits
from async_rl.queue.storage.journal import Journal
from async_rl.records import Lease
from tests.queue.builders import group, make_config, rows

LINEAGE = "line-a"
NUM_STEPS = 3
_MAX_REPEATS = 30
LEASES_END_S = 3600.0


class RefusedError(Exception):
    """The server answered with an error."""


class FakeEndpoint:
    """``sockets.Endpoint`` in memory."""

    check_within_s = 1.0

    def __init__(self, max_bytes: int) -> None:
        self.limits = MessageLimits(max_bytes)
        self.arrived: deque[tuple[bytes, list[memoryview]]] = deque()
        self.sent: list[tuple[bytes, Message]] = []
        self.blocked: set[bytes] = set()
        self.num_receives = 0
        self._outgoing: list[tuple[bytes, Message]] = []

    def receive(self, most: int, now: float) -> Iterator[tuple[bytes, str, list[memoryview]]]:
        self.num_receives += 1
        if self.num_receives > 20:
            # Whoever waits for the learner hears of it in the end.
            take = {**asdict(messages.Take(LINEAGE, 0, 0)), "request_id": "late", "wait_s": 0.0}
            yield b"learner", "", [memoryview(encode("take", take))]
        while self.arrived:
            peer, frames = self.arrived.popleft()
            yield peer, "", frames

    def send(self, peer: bytes, frames: Sequence[Any]) -> None:
        self._outgoing.append((peer, _message(frames)))

    def send_now(self, peer: bytes, frames: Sequence[Any]) -> None:
        self.sent.append((peer, _message(frames)))

    def flush(self) -> None:
        self.sent += self._outgoing
        self._outgoing.clear()

    def discard(self) -> None:
        self._outgoing.clear()

    def block(self, peer: bytes, now: float) -> None:
        self.blocked.add(peer)

    def note_malformed(self, peer: bytes, now: float) -> None: ...

    def require_learner_key(self, type_: str, key: str) -> None: ...

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


def _message(frames: Sequence[Any]) -> Message:
    return decode(bytes(frames[0])).with_parts(memoryview(bytes(frame)) for frame in frames[1:])


class FakePoller:
    """Never waits."""

    def poll(self, timeout_ms: int) -> list[tuple[int, int]]:
        return []


class Run:
    """A queue server of 2 groups a step and 2 rollouts a group, and its clients."""

    def __init__(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, *, has_journal: bool = True, num_steps: int = NUM_STEPS,
        lineage: str = LINEAGE,
    ) -> None:  # fmt: skip
        config = make_config(str(directory / "run"), learner={"groups_per_step": 2, "steps": num_steps})
        self.num_steps, self.lineage = num_steps, lineage
        open_journal = partial(Journal, directory / "journal") if has_journal else None
        monkeypatch.setattr(server_module, "_LOOK_AGAIN_S", 0.0)
        self.server = QueueServer(config, rows(20), {"test": rows(2)}, open_journal=open_journal)
        self.server._endpoint.close()
        self.endpoint = FakeEndpoint(config.queue.max_bytes)
        self.server._endpoint = self.endpoint  # type: ignore[assignment]
        self.server._poller = FakePoller()  # type: ignore[assignment]
        self.trained: list[int] = []
        self.num_answers = 0
        self.evaluations: tuple[tuple[str, int], ...] = ()
        """Those that the learner has requested."""
        self._numbers = itertools.count()
        self._generators = itertools.count()
        self._generator = ""

    def close(self) -> None:
        self.server._close()

    @property
    def ledger(self) -> dict[str, Any]:
        self.server._state.check()
        return self.server._state.ledger_dict()

    def turn(self) -> None:
        self.endpoint.num_receives = 0
        self.server._take_turn()

    def post(self, peer: bytes, request: Any, parts: Sequence[bytes] = (), request_id: str = "x") -> None:
        fields = {**asdict(request), "request_id": request_id, "wait_s": 0.0}
        frame = encode(WIRE_TYPES[type(request)], fields, num_parts=len(parts))
        self.endpoint.arrived.append((peer, [memoryview(frame), *map(memoryview, parts)]))

    def call(self, peer: bytes, request: Any, parts: Sequence[bytes] = ()) -> Message:
        """Repeat a request until its reply is complete, as clients do."""
        request_id = f"r-{next(self._numbers)}"
        for _ in range(_MAX_REPEATS):
            self.post(peer, request, parts, request_id)
            self.turn()
            sent, self.endpoint.sent = self.endpoint.sent, []
            replies = [m for to, m in sent if to == peer and m.fields.get("request_id") == request_id]
            if replies and replies[0].type == "error":
                raise RefusedError(replies[0].fields["message"])
            if replies:
                return replies[-1]
        raise AssertionError(f"no reply to {request}")

    # The history.

    def live(self) -> None:
        """An evaluation, and every step to the end. A generator that is refused is replaced by another."""
        self.attach()
        self.announce(0)
        self.evaluate()
        for step in range(self.num_steps):
            self.trained += self.take(step)
            self.ack(step)
        self.end()

    def attach(self, *, parent: str = "", step: int = 0, snapshot: bytes | None = None) -> None:
        """Attach a learner whose checkpoint has ``step`` steps, none of them skipped."""
        attach = messages.Attach(
            "run", self.lineage, parent, step, step, self.num_steps, "[run]", (), has_snapshot=snapshot is not None
        )
        self.call(b"learner", attach, [] if snapshot is None else [snapshot])

    def evaluate(self) -> None:
        self.learner(messages.Evaluate(self.lineage, "test", 0, 0, exclusive=False))
        self.evaluations = (("test", 0),)

    def ack(self, step: int) -> bytes:
        """Acknowledge the taken step, and commit its checkpoint. Return the queue's snapshot."""
        counts = TrainedCounts(True, 4, {}, 12, {})
        acked = self.learner(messages.StepAck(self.lineage, step, step + 1, counts, snapshot=True))
        self.learner(messages.CheckpointCommitted(self.lineage, step + 1))
        self.announce(step + 1)
        return bytes(acked.parts[0])

    def end(self) -> None:
        self._collect_answers()
        self.learner(messages.Finish(self.lineage))

    def learner(self, request: Any) -> Message:
        return self.call(b"learner", request)

    def announce(self, version: int) -> None:
        self._generator = self._generator or f"g{next(self._generators)}"
        self.learner(Announcement(self.lineage, version, f"digest-{version}", "tcp://127.0.0.1:1"))

    def take(self, step: int) -> list[int]:
        for repeat in range(_MAX_REPEATS):
            if repeat == _MAX_REPEATS // 2:
                # Leases expire of which their generator knows nothing any more.
                self.server._state.clock_ahead_s += LEASES_END_S
            self.sample(step)
            reply = self.learner(messages.Take(self.lineage, step, step))
            self.learner(messages.ConfirmLineage(self.lineage, step, self.evaluations))
            if reply.type == "batch":
                assert read_as(reply.fields, BatchPart).num_groups == len(reply.parts) == 2
                return [decode_group(bytes(part)).position for part in reply.parts]
        raise AssertionError(f"step {step} got no batch")

    def sample(self, version: int) -> None:
        """One round of a generator: ask for leases and return their groups, two in one message."""
        name = self._generator
        peer = name.encode()
        try:
            self.call(peer, messages.Hello(name, "host", "fake"))
            reply = self.call(peer, messages.LeaseRequest(name, self.lineage, version, 4))
            leases = read_as(reply.fields, LeasesGranted).leases
            for pair in _pairs(leases):
                groups = [
                    group(lease, version, generator=name, accuracies=(1.0, 0.0)[: lease.group_size]) for lease in pair
                ]
                parts = [encode_group(returned) for returned in groups]
                request = messages.ReturnGroups(name, tuple(lease.lease_id for lease in pair))
                reply = self.call(peer, request, parts)
                verdicts = set(reply.fields["verdicts"].values())
                assert verdicts <= {"queued", "eval_done", "duplicate"}, reply.fields
        except RefusedError:
            self._generator = f"g{next(self._generators)}"

    def _collect_answers(self) -> None:
        for _ in range(_MAX_REPEATS):
            reply = self.learner(messages.GetEvalResults(self.lineage, ()))
            if results := read_as(reply.fields, messages.EvalResults).results:
                self.num_answers = sum(is_answered for result in results for _, is_answered in result.groups)
                self.learner(messages.GetEvalResults(self.lineage, (("test", 0),)))
                return
            self.sample(self.num_steps)
        raise AssertionError("the evaluation does not end")


def _pairs(leases: Sequence[Lease]) -> list[Sequence[Lease]]:
    return [leases[start : start + 2] for start in range(0, len(leases), 2)]


class Faults:
    """Counts the calls of the wrapped functions. The calls with numbers ``failing`` raise what ``error`` makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Callable[[str], Exception]) -> None:
        self._monkeypatch, self._error = monkeypatch, error
        self.failing: range = range(0)
        self.num_calls = 0
        self.failed: list[str] = []

    def wrap(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.meet(name)
            return original(*args, **kwargs)

        self._monkeypatch.setattr(owner, name, wrapped)

    def meet(self, name: str) -> None:
        """Count one call, which may fail."""
        self.num_calls += 1
        if self.num_calls in self.failing:
            self.failed.append(name)
            raise self._error(name)


class FaultyIndex:
    """An SQLite connection whose calls count as well."""

    def __init__(self, index: Any, faults: Faults) -> None:
        self._index, self._faults = index, faults

    def execute(self, statement: str, *args: Any) -> Any:
        if statement != "ROLLBACK":
            self._faults.meet("sqlite")
        return self._index.execute(statement, *args)

    def executemany(self, *args: Any) -> Any:
        self._faults.meet("sqlite")
        return self._index.executemany(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)
