"""Faults at every call of a whole run, found by counting: it ends as without them, or stops with the cause."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import QueueError, StorageError
from async_rl.queue import messages
from async_rl.queue.core.evaluations import EvalBook
from async_rl.queue.core.groups import ReadyGroups
from async_rl.queue.core.leases import LeaseTable
from async_rl.queue.core.ledger import Ledger
from async_rl.queue.storage.journal import Changes
from async_rl.queue.storage.payloads import Payload, PayloadRef
from tests.examples import some
from tests.queue.direct import LINEAGE, NUM_STEPS, Faults, FaultyIndex, Run
from tests.queue.witness import Knobs
from tests.queue.world import World

STORAGE_CALLS = ((os, "pwritev"), (os, "open"), (os, "fstat"), (Path, "rename"), (Path, "unlink"))
STATE_CALLS = (
    (LeaseTable, "add"), (LeaseTable, "close"), (LeaseTable, "set_status"), (Ledger, "issue"), (Ledger, "move"),
    (ReadyGroups, "add"), (EvalBook, "answer"), (Changes, "put"), (Changes, "delete"),
)  # fmt: skip
LEARNER_CALLS = ((Ledger, "train"), (ReadyGroups, "pop_first"))


def no_room(code: int) -> Callable[[str], Exception]:
    def error(name: str) -> Exception:
        if name != "sqlite":
            return OSError(code, os.strerror(code))
        full = sqlite3.OperationalError("database or disk is full")
        full.sqlite_errorcode = sqlite3.SQLITE_FULL if code == errno.ENOSPC else sqlite3.SQLITE_IOERR
        return full

    return error


def storage_run(
    directory: Path, monkeypatch: pytest.MonkeyPatch, code: int, failing: range = range(0)
) -> tuple[Run, Faults]:
    """A run whose storage calls with these numbers fail."""
    directory.mkdir()
    run = Run(directory, monkeypatch)
    faults = Faults(monkeypatch, no_room(code))
    faults.failing = failing
    with monkeypatch.context() as patched:
        faults._monkeypatch = patched
        for owner, name in STORAGE_CALLS:
            faults.wrap(owner, name)
        assert run.server._journal is not None
        run.server._journal._index = FaultyIndex(run.server._journal._index, faults)  # type: ignore[assignment]
        try:
            run.live()
        finally:
            run.close()
    return run, faults


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EMFILE])
def test_a_disk_without_room_at_any_call_is_waited_out(tmp_path: Path, monkeypatch, code):
    # A missing descriptor shows in SQLite as an I/O error, which the probe explains.
    monkeypatch.setattr("async_rl.queue.storage.payloads._has_room", lambda directory: False)
    plain, counted = storage_run(tmp_path / "plain", monkeypatch, code)
    assert len(plain.trained) == 2 * NUM_STEPS
    assert counted.num_calls > 100
    for number in some(range(1, counted.num_calls + 1)):
        run, faults = storage_run(tmp_path / str(number), monkeypatch, code, range(number, number + 3))
        assert faults.failed
        assert (run.trained, run.num_answers) == (plain.trained, plain.num_answers), faults.failed
        assert run.ledger == plain.ledger, faults.failed


def test_a_failing_disk_at_any_call_stops_the_run_with_the_cause(tmp_path: Path, monkeypatch):
    _, counted = storage_run(tmp_path / "plain", monkeypatch, errno.EIO)
    for number in some(range(1, counted.num_calls + 1)):
        directory = tmp_path / str(number)
        with pytest.raises(StorageError, match=f"journal in {directory}/journal can't be read or written"):
            storage_run(directory, monkeypatch, errno.EIO, range(number, number + 1))


def buggy_run(
    directory: Path, monkeypatch: pytest.MonkeyPatch, calls: Any, number: int, *, has_journal: bool = True
) -> tuple[Run, Faults]:
    """A run in which one of these calls meets a bug."""
    directory.mkdir()
    run = Run(directory, monkeypatch, has_journal=has_journal)
    faults = Faults(monkeypatch, lambda name: RuntimeError(f"bug in {name}"))
    faults.failing = range(number, number + 1)
    with monkeypatch.context() as patched:
        faults._monkeypatch = patched
        for owner, name in calls:
            faults.wrap(owner, name)
        try:
            run.live()
        finally:
            run.close()
    return run, faults


def test_a_bug_at_any_change_of_state_leaves_no_half_change(tmp_path: Path, monkeypatch):
    plain, counted = buggy_run(tmp_path / "plain", monkeypatch, STATE_CALLS, 0)
    assert counted.num_calls > 80
    num_finished, stops = 0, list[QueueError]()
    for number in some(range(1, counted.num_calls + 1)):
        try:
            run, faults = buggy_run(tmp_path / str(number), monkeypatch, STATE_CALLS, number)
        except QueueError as error:
            stops.append(error)
            continue
        num_finished += 1
        assert faults.failed
        assert sorted(run.trained) == sorted(set(run.trained))
        assert len(run.trained) == len(plain.trained)
        assert run.num_answers == plain.num_answers
        groups = run.ledger["groups"]
        assert groups["trained"] == len(plain.trained)
        assert groups["in_flight"] == groups["queued"] == groups["taken"] == 0
        assert len(run.endpoint.blocked) == 1
    assert all("the queue stops the run" in str(e) and isinstance(e.__cause__, RuntimeError) for e in stops)
    # The others are requests of the learner.
    assert num_finished > (num_finished + len(stops)) // 3


def test_a_bug_in_a_request_of_the_learner_stops_the_run_with_the_cause(tmp_path: Path, monkeypatch):
    _, counted = buggy_run(tmp_path / "plain", monkeypatch, LEARNER_CALLS, 0)
    for number in some(range(1, counted.num_calls + 1)):
        with pytest.raises(QueueError, match="bug in ") as caught:
            buggy_run(tmp_path / str(number), monkeypatch, LEARNER_CALLS, number)
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_bug_without_a_journal_stops_the_run_with_the_cause(tmp_path: Path, monkeypatch):
    with pytest.raises(QueueError, match=r"'lease' request failed because of a bug.*bug in add"):
        buggy_run(tmp_path / "run", monkeypatch, [(LeaseTable, "add")], 1, has_journal=False)


def test_a_ledger_that_does_not_add_up_stops_the_run_and_the_learner_is_told(run):
    assert len(run.take(0)) == 2
    run.server._state.ledger.groups.queued += 1
    run.post(b"learner", messages.StepAck(LINEAGE, 0, 1, messages.TrainedCounts(True, 4, {}, 12, {})))
    with pytest.raises(QueueError, match="ledger of groups does not add up"):
        run.turn()
    ((peer, reply),) = [(peer, m) for peer, m in run.endpoint.sent if m.type == "error"]
    assert peer == b"learner"
    assert "ledger of groups does not add up" in reply.fields["message"]


def test_status_is_answered_while_a_commit_waits_for_room(run, monkeypatch, caplog):
    faults = Faults(monkeypatch, no_room(errno.ENOSPC))
    faults.failing = range(1, 6)
    assert run.server._journal is not None
    run.server._journal._index = FaultyIndex(run.server._journal._index, faults)  # type: ignore[assignment]
    run.post(b"g0", messages.Hello("g0", "host", "fake"), request_id="first")
    run.post(b"learner", messages.Announcement(LINEAGE, 0, "digest-0", "tcp://127.0.0.1:1"))
    arrived: list[int] = []

    def receive(most: int, now: float):
        arrived.append(len(arrived))
        if len(arrived) == 2:
            run.post(b"anyone", messages.GetStatus(), request_id="status")
            run.post(b"learner", messages.Take(LINEAGE, 0, 0), request_id="take")
        while run.endpoint.arrived:
            peer, frames = run.endpoint.arrived.popleft()
            yield peer, "", frames

    monkeypatch.setattr(run.endpoint, "receive", receive)
    run.turn()
    types = [(peer, message.type) for peer, message in run.endpoint.sent]
    # Status and notices come before the replies of the turn, whose commit had to wait.
    assert types.index((b"anyone", "status")) < types.index((b"learner", "ok"))
    assert types.index((b"g0", "notice")) < types.index((b"anyone", "status"))
    (status,) = [m.fields["status"] for peer, m in run.endpoint.sent if peer == b"anyone"]
    assert "has no room" in status["storage_full"]
    assert sum("waits for room" in record.getMessage() for record in caplog.records) == 1
    assert (b"learner", "not_ready") not in types
    run.turn()
    assert run.endpoint.sent[-1][1].type == "not_ready"


# A payload that can't be kept changes nothing: the return is repeated, and the run ends as if nothing was.


class Refuser:
    """The store's ``keep``: it refuses the calls whose numbers are in ``refused``."""

    def __init__(self, world: World, refused: frozenset[int]) -> None:
        self._keep, self._refused = world.payloads.keep, refused
        self.num_calls = 0

    def keep(self, payload: Payload) -> PayloadRef:
        self.num_calls += 1
        if self.num_calls in self._refused:
            raise QueueError("the disk is full")
        return self._keep(payload)


class FaultyWorld(World):
    """Its generators repeat what was refused, as clients do. ``settle`` finds half-done changes."""

    refuser: Refuser | None = None
    num_repeated = 0

    def put(self, lease_id: str):
        try:
            return super().put(lease_id)
        except QueueError:
            self.settle()
            self.num_repeated += 1
            return self.put(lease_id)


def live(refused: frozenset[int], monkeypatch: pytest.MonkeyPatch) -> tuple[FaultyWorld, int]:
    """One history: 3 steps, an evaluation and a checkpoint, with these calls of ``keep`` refused."""
    world = FaultyWorld(Knobs(num_steps=3))
    refuser = Refuser(world, refused)
    monkeypatch.setattr(world.payloads, "keep", refuser.keep)
    world.evaluate(exclusive=False)
    world.run_to_the_end()
    return world, refuser.num_calls


def test_every_refused_keep_leaves_the_same_end(monkeypatch):
    plain, num_calls = live(frozenset(), monkeypatch)
    # 3 steps of 2 groups, and 2 rows of the evaluation.
    assert num_calls >= 8
    for number in range(1, num_calls + 1):
        world, _ = live(frozenset({number}), monkeypatch)
        assert world.num_repeated == 1
        assert world.books.trained == plain.books.trained
        assert world.ledger == plain.ledger
