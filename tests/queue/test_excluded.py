"""Prompts that were given up are named, and the names go where the state goes: into the journal and into snapshots."""

from __future__ import annotations

import pytest

from async_rl.queue.core import learner_requests, persistence
from async_rl.queue.core.state import QueueState
from tests.queue.builders import ack, all_trained, fail, fail_until_excluded, group, leases, make_state, put, take

pytestmark = pytest.mark.usefixtures("fixed_admission")

POISON = {"position": 0, "row": 0, "epoch": 0, "cause": "poison"}


def poisoned_queue() -> QueueState:
    """The prompt at position 0 has failed ``max_attempts`` times."""
    state = make_state(max_attempts=2)
    fail_until_excluded(state, 0)
    return state


def test_prompts_that_were_set_aside_are_named_with_row_and_cause():
    state = poisoned_queue()
    (lease,) = leases(state, 1)
    fail(state, lease, "prompt_too_long")
    assert persistence.ledger_file(state)["excluded"] == [
        POISON,
        {"position": lease.prompt.position, "row": lease.prompt.row, "epoch": 0, "cause": "too_long"},
    ]
    assert persistence.status(state, 0.0)["excluded"] == persistence.ledger_file(state)["excluded"]


def test_a_second_epoch_names_the_row_again():
    state = make_state(num_rows=2, epochs=2, max_attempts=1)
    for _ in range(3):
        (lease,) = leases(state, 1)
        cause = "engine_error" if lease.prompt.position == 2 else None
        if cause is not None:
            fail(state, lease, cause)
        else:
            put(state, group(lease))
    assert persistence.ledger_file(state)["excluded"] == [{"position": 2, "row": 0, "epoch": 1, "cause": "poison"}]


def test_going_back_to_a_snapshot_keeps_those_before_it_and_forgets_those_after():
    state = poisoned_queue()
    for lease in leases(state, 2):
        put(state, group(lease))
    take(state)
    snapshot = ack(state, all_trained(), snapshot=True)
    (lease,) = leases(state, 1, version=1)
    fail(state, lease, "prompt_too_long")
    assert [entry["position"] for entry in persistence.ledger_file(state)["excluded"]] == [0, lease.prompt.position]
    learner_requests.attach(state, "line-b", "line-a", 1, 1, 100, snapshot, 0.0)
    assert persistence.ledger_file(state)["excluded"] == [POISON]
    learner_requests.attach(state, "line-c", "line-b", 0, 0, 100, None, 0.0)
    assert persistence.ledger_file(state)["excluded"] == []


def test_a_hundred_are_named_and_all_are_counted():
    state = make_state(num_rows=200, groups_per_step=200, max_bytes=1 << 24)
    for lease in leases(state, 150):
        fail(state, lease, "prompt_too_long")
    named = [entry["position"] for entry in persistence.ledger_file(state)["excluded"]]
    assert named == list(range(50, 150))
    assert persistence.status(state, 0.0)["prompts_too_long"] == 150
