"""What a group costs does not depend on how many are queued: counted in calls and in memory, not in seconds."""

import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest

from async_rl.net.wire import pack_plain
from async_rl.queue.core import generator_requests, learner_requests, persistence
from async_rl.queue.core.groups import GroupRecord, GroupSummary, StoredGroup
from async_rl.queue.core.leases import ActiveLease, LeaseTable
from async_rl.queue.core.prompts import PromptStream
from async_rl.queue.core.state import QueueState, decode_state, encode_state
from async_rl.queue.messages import GeneratorStats, NotReady, StepAck, TrainedCounts
from async_rl.queue.storage.journal import Changes, Kind
from async_rl.queue.storage.payloads import MemoryPayloads
from async_rl.records import Lease
from tests.queue.builders import LINEAGE, announce, leases, make_state, rows, settings
from tests.queue.witness import written

pytestmark = pytest.mark.usefixtures("fixed_admission")

NUM_FEW, NUM_MANY = 100, 100_000
NUM_CYCLES = 8


def put(state: QueueState, lease: Lease, version: int) -> None:
    position, lease_id = lease.prompt.position, lease.lease_id
    facts = GroupSummary(
        lease_id, "train", position, "g0", lease.lineage, 2, 6, version, version, 1.0, 1.0, False, "", 1.0, False
    )
    assert generator_requests.receive(state, "g0", facts, b"body", 0.0)[0] == "queued"


def make_full_queue(num_queued: int, on_stale: str) -> QueueState:
    """Loaded as after a restart. Bound and bytes leave room for all that is queued and one step more."""
    plain: dict[str, Any] = {"max_staleness": num_queued // 2 + 1, "max_bytes": 1 << 50, "on_stale": on_stale}
    saved, payloads = decode_state(encode_state(make_state(num_steps=NUM_MANY, **plain))), MemoryPayloads()
    saved.cursor.position = num_queued
    # 2 rollouts a group, 3 tokens a rollout.
    ledger = saved.ledger
    for account, each in ((ledger.groups, 1), (ledger.rollouts, 2), (ledger.tokens, 6)):
        account.entered = account.queued = each * num_queued
    groups = {}
    for i in range(num_queued):
        held = StoredGroup(f"lease-{i}", "g0", i, 0, 0, 0, 0, 2, 6, 1.0, 1.0, 0.0, 0, False, payloads.keep(b"body"))
        groups[held.lease_id] = written(GroupRecord(held))
    state = QueueState(settings(**plain), rows(100), PromptStream(100, seed=0), payloads=payloads)
    entries: dict[Kind, dict[str, Any]] = {kind: {} for kind in get_args(Kind)}
    persistence.load(state, {**entries, "group": groups}, pack_plain(saved), {}, {}, 0.0)
    return state


def cycles(state: QueueState, count: int) -> None:
    for _ in range(count):
        cycle(state)


def cycle(state: QueueState) -> None:
    """Two groups come in, two are trained."""
    learner = state.learner
    assert learner is not None
    step, version = learner.step, learner.version
    for lease in leases(state, 2, version):
        put(state, lease, version)
    assert not isinstance(learner_requests.take(state, LINEAGE, step, version, 0.0), NotReady)
    learner_requests.ack(state, StepAck(LINEAGE, step, version + 1, TrainedCounts(True, 4, {}, 12, {})), 0.0)
    announce(state, version + 1)
    generator_requests.heartbeat(state, "g0", {}, state.stats().generators, 0.0)
    persistence.ledger_file(state)


def calls_of(work: Callable[[], None]) -> int:
    """Function calls, those into C included."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def peak_bytes_of(work: Callable[[], None]) -> int:
    """The most that was allocated at once; a copy of what is queued would show here and not among the calls."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("on_stale", ["wait", pytest.param("mask", marks=pytest.mark.slow)])
def test_a_group_costs_the_same_whatever_is_queued(on_stale):
    few, many = make_full_queue(NUM_FEW, on_stale), make_full_queue(NUM_MANY, on_stale)
    for state in (few, many):
        cycles(state, 1)  # what happens once
    for measure in (calls_of, peak_bytes_of):
        cost_few, cost_many = (measure(partial(cycles, b, NUM_CYCLES)) for b in (few, many))
        assert cost_many <= 2 * cost_few, measure.__name__
    assert many.stats().depth == NUM_MANY


class CountedEntries(dict[str, Any]):
    """The table of generators; counts how many of them were looked at."""

    num_seen = 0

    def values(self) -> Any:
        for value in super().values():
            self.num_seen += 1
            yield value


def test_a_lease_and_its_group_look_at_few_of_a_thousand_generators():
    state = make_state(max_staleness=8)
    for number in range(1000):
        generator_requests.heartbeat(state, f"g{number}", {}, GeneratorStats(), 0.0)
    state.generators._entries = entries = CountedEntries(state.generators._entries)
    for lease in leases(state, 4, 0):
        put(state, lease, 0)
        generator_requests.heartbeat(state, "g0", {}, GeneratorStats(), 0.0)
        state.expire(0.0)
        assert state.next_deadline is not None
    # A lease request and a returned group each look for one generator that is not quarantined.
    assert entries.num_seen <= 20


def test_a_lease_that_ended_leaves_nothing_behind_but_its_fate():
    table = LeaseTable(10.0, Changes(is_wanted=False))
    lease = leases(make_state(), 1)[0]
    for _ in range(3):
        table.add(ActiveLease(lease, "g0", 0, 10, 0.0, 0.0))
        table.close(lease.lease_id, "returned")
    assert table._by_version == []
