"""Prompts that were given up are named, and the names go where the state goes: into the journal and into snapshots."""

from __future__ import annotations

from async_rl.queue.core.buffer import Buffer
from tests.queue.builders import ack, all_trained, group, leases, make_buffer, put, take

POISON = {"position": 0, "row": 0, "epoch": 0, "cause": "poison"}


def poisoned_buffer() -> Buffer:
    """The prompt at position 0 has failed ``max_attempts`` times."""
    buffer = make_buffer(max_attempts=2)
    for _ in range(2):
        (lease,) = leases(buffer, 1)
        assert lease.prompt.position == 0
        buffer.fail("g0", lease.lease_id, "engine_error", 0.0)
    return buffer


def test_prompts_that_were_set_aside_are_named_with_row_and_cause():
    buffer = poisoned_buffer()
    (lease,) = leases(buffer, 1)
    buffer.fail("g0", lease.lease_id, "prompt_too_long", 0.0)
    assert buffer.ledger_file()["excluded"] == [POISON, {"position": 1, "row": 1, "epoch": 0, "cause": "too_long"}]
    assert buffer.status(0.0)["excluded"] == buffer.ledger_file()["excluded"]


def test_a_second_epoch_names_the_row_again():
    buffer = make_buffer(num_rows=2, epochs=2, max_attempts=1)
    for _ in range(3):
        (lease,) = leases(buffer, 1)
        cause = "engine_error" if lease.prompt.position == 2 else None
        if cause is not None:
            buffer.fail("g0", lease.lease_id, cause, 0.0)
        else:
            put(buffer, group(lease))
    assert buffer.ledger_file()["excluded"] == [{"position": 2, "row": 0, "epoch": 1, "cause": "poison"}]


def test_going_back_to_a_snapshot_keeps_those_before_it_and_forgets_those_after():
    buffer = poisoned_buffer()
    for lease in leases(buffer, 2):
        put(buffer, group(lease))
    take(buffer)
    snapshot = ack(buffer, all_trained(), snapshot=True)
    (lease,) = leases(buffer, 1, version=1)
    buffer.fail("g0", lease.lease_id, "prompt_too_long", 0.0)
    assert [entry["position"] for entry in buffer.ledger_file()["excluded"]] == [0, 3]
    buffer.attach("line-b", "line-a", 1, 1, 100, snapshot, 0.0)
    assert buffer.ledger_file()["excluded"] == [POISON]
    buffer.attach("line-c", "line-b", 0, 0, 100, None, 0.0)
    assert buffer.ledger_file()["excluded"] == []


def test_a_hundred_are_named_and_all_are_counted():
    buffer = make_buffer(num_rows=200, groups_per_step=200, max_bytes=1 << 24)
    for lease in leases(buffer, 150):
        buffer.fail("g0", lease.lease_id, "prompt_too_long", 0.0)
    named = [entry["position"] for entry in buffer.ledger_file()["excluded"]]
    assert named == list(range(50, 150))
    assert buffer.status(0.0)["prompts_too_long"] == 150
