"""The admission rule: how many leases there are, how old their samples may be, and what refuses them.

Only this file states the rule's numbers. By default: 2 groups a step, 2 rollouts a group, bound 1. The last part plays
whole runs: with generators ten times too fast, everything that is trained is as old as it may be. Nothing there
depends on time: generators act whenever the learner has acted, and stop when they get no lease.
"""

from collections.abc import Iterator
from itertools import islice

import pytest

from async_rl.errors import ConfigError
from async_rl.net.codec import decode_group
from async_rl.queue.core import generator_requests
from async_rl.queue.core.diagnosis import notes
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import NotReady
from async_rl.records import BYTES_PER_TOKEN
from tests.queue.builders import (
    LINEAGE,
    ack,
    fill_and_take,
    group,
    leases,
    make_state,
    put,
    settings,
    take,
)

NUM_GENERATORS = 10


def test_leases_stop_at_the_limit_of_steps_within_the_bound():
    # (eta + 1 - (v - m)) // k * G = (1 + 1 - 0) // 1 * 2 = 4.
    state = make_state()
    assert len(leases(state, 4)) == 4
    granted = generator_requests.lease(state, "g0", (LINEAGE, 0), 1, 0.0)
    assert granted.leases == ()
    assert granted.activate is None
    assert "limit 4 groups: 0 taken, 4 in flight, 0 queued" in granted.reason


@pytest.mark.parametrize(
    ("updates", "staleness", "behind", "limit"),
    [
        (1, 0, 0, 2),  # (0 + 1 - 0) // 1 * 2
        (1, 4, 0, 10),  # (4 + 1 - 0) // 1 * 2
        (1, 4, 4, 2),  # (4 + 1 - 4) // 1 * 2
        (1, 4, 5, 0),
        (2, 4, 0, 4),  # (4 + 1 - 0) // 2 * 2
        (2, 4, 3, 2),  # (4 + 1 - 3) // 2 * 2
        (2, 4, 4, 0),  # (4 + 1 - 4) // 2 = 0
    ],
)
def test_the_limit_counts_whole_batches_of_updates(updates, staleness, behind, limit):
    s = settings(updates_per_batch=updates, max_staleness=staleness)
    assert s.group_limit(version=10, active_version=10 - behind, steps_left=99) == limit


def test_no_more_groups_are_leased_than_the_steps_left_need():
    state = make_state(num_steps=1, max_staleness=4)
    assert len(leases(state, 20)) == 2


def test_an_old_generator_is_told_the_version_that_lets_it_go_on():
    state = make_state(max_staleness=1)
    fill_and_take(state)
    ack(state)
    held = leases(state, 9, version=0)
    # v = 1, m = 0: (2 - 1) * 2 = 2 groups; with m = 1 it would be 4.
    assert len(held) == 2
    granted = generator_requests.lease(state, "g0", (LINEAGE, 0), 1, 0.0)
    assert granted.activate == 1
    assert len(leases(state, 9, version=1)) == 2
    assert generator_requests.lease(state, "g0", (LINEAGE, 1), 1, 0.0).activate is None


def test_a_generator_of_another_lineage_activates_first():
    state = make_state()
    granted = generator_requests.lease(state, "g0", ("other", 7), 4, 0.0)
    assert (granted.leases, granted.activate) == ((), 0)


def test_each_lease_names_the_oldest_version_that_its_batch_can_still_train():
    # v = 3, eta = 1: the first batch trains at 3 (oldest 2), the second at 4 (oldest 3).
    s = settings()
    oldest = [s.oldest_for_lease(version=3, outstanding=n) for n in range(4)]
    assert oldest == [2, 2, 3, 3]


def test_a_lease_is_not_given_when_its_worst_case_does_not_fit():
    # Two rollouts of 8 + 8 tokens: two blocks of a disk.
    worst_case = 2 * ((8 + 8) * BYTES_PER_TOKEN + 1024) + 4096
    assert (settings().worst_case_bytes, settings().reserved_bytes) == (worst_case, 8192)
    state = make_state(max_staleness=9, max_bytes=3 * 8192)
    assert len(leases(state, 9)) == 3
    assert "queue.max_bytes" in generator_requests.lease(state, "g0", (LINEAGE, 0), 1, 0.0).reason


def test_a_generator_that_waits_for_room_is_a_note_of_the_run():
    state = make_state(max_staleness=9, max_bytes=3 * 8192)
    assert len(leases(state, 3)) == 3
    assert notes(state) == {}  # nobody has waited yet
    generator_requests.lease(state, "g0", (LINEAGE, 0), 1, 0.0)
    # The bound allows (9 + 1) steps of 2 groups: 20 * 8192 bytes.
    assert "queue.max_bytes = 24576, and each group in flight reserves its largest size, 8192" in notes(state)["bytes"]
    assert "raise queue.max_bytes to 163840" in notes(state)["bytes"]
    enough = make_state(max_staleness=9, max_bytes=20 * 8192)
    assert len(leases(enough, 20)) == 20
    assert "limit 20 groups" in generator_requests.lease(enough, "g0", (LINEAGE, 0), 1, 0.0).reason
    assert notes(enough) == {}


def test_a_queue_that_cannot_hold_one_step_is_refused():
    settings(max_bytes=2 * 8192)
    with pytest.raises(ConfigError, match=r"queue\.max_bytes"):
        settings(max_bytes=2 * 8192 - 1)


def test_versions_too_rare_for_the_bound_are_refused():
    settings(max_staleness=2, sync_every=2, updates_per_batch=2)
    with pytest.raises(ConfigError, match="sync_every"):
        settings(max_staleness=2, sync_every=3, updates_per_batch=2)


# Whole runs.


def fill(state: QueueState) -> None:
    """Ten generators, each as quick as the learner: all activate what they are told, and sample until refused."""
    waiting = [f"g{i}" for i in range(NUM_GENERATORS)]
    active = dict.fromkeys(waiting, 0)
    while waiting:
        name = waiting.pop(0)
        granted = generator_requests.lease(state, name, (LINEAGE, active[name]), 2, 0.0)
        if granted.activate is not None:
            active[name] = granted.activate
        if granted.leases or granted.activate is not None:
            waiting.append(name)
        for lease in granted.leases:
            put(state, group(lease, active[name], generator=name))


def staleness_of_steps(state: QueueState) -> Iterator[list[int]]:
    """Of the groups of one step after another; generators go on while the learner trains, and after its ack."""
    while True:
        fill(state)
        answer = take(state)
        assert not isinstance(answer, NotReady), answer.reason
        learner = state.learner
        assert learner is not None
        fill(state)
        yield [learner.version - decode_group(bytes(item.group)).oldest_version for item in answer]
        ack(state)


@pytest.mark.parametrize("on_stale", ["drop", "wait", "mask"])
@pytest.mark.parametrize("bound", [0, 1, 4, 16])
def test_quick_generators_are_held_exactly_at_the_bound(bound, on_stale):
    state = make_state(max_staleness=bound, on_stale=on_stale, num_rows=1000)
    steps = list(islice(staleness_of_steps(state), 3 * bound + 8))
    assert max(max(step) for step in steps) == bound
    # Once what was sampled before the first step is trained, the queue holds `bound` steps at every instant.
    steady = [staleness for step in steps[bound + 1 :] for staleness in step]
    assert sum(steady) / len(steady) >= bound - 1
    assert state.stats().ledger["groups"]["dropped"]["stale"] == 0
    state.check()
