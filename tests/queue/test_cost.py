"""What a group costs does not depend on how many are queued: counted in calls, not in seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from async_rl.queue.core import generator_requests, persistence
from async_rl.queue.messages import GeneratorStats
from async_rl.queue.storage.payloads import MemoryPayloads
from tests.queue.builders import ack, fill_and_take, group, leases, make_state, put

NUM_FEW, NUM_MANY = 100, 3_000


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


@pytest.mark.parametrize("on_stale", ["wait", "mask"])
def test_a_group_costs_the_same_whatever_is_queued(on_stale: str):
    costs = list[int]()
    for num_queued in (NUM_FEW, NUM_MANY):
        state = make_state(max_staleness=num_queued, num_steps=10**6, max_bytes=1 << 40, on_stale=on_stale)
        for lease in leases(state, num_queued):
            assert put(state, group(lease)) == "queued"

        def work(state=state) -> None:
            for version in range(8):
                fill_and_take(state, version)
                ack(state)
                generator_requests.heartbeat(state, "g0", {}, GeneratorStats(), 0.0)
                persistence.ledger_file(state)

        costs.append(calls_of(work))
        assert state.stats().depth == num_queued
    assert costs[1] <= 1.5 * costs[0]


def test_a_payload_in_memory_keeps_no_larger_message():
    store, message = MemoryPayloads(), bytearray(100_000)
    for payload in (memoryview(message)[:99_999], memoryview(message)[1:], memoryview(bytearray(1000))):
        kept = store.read(store.keep(payload))
        assert isinstance(kept, bytes)
        assert kept == bytes(payload)
