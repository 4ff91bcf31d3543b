"""The bound on staleness is kept and used: with generators ten times too quick, everything trained is as old as it may.

Nothing here depends on time: generators act whenever the learner has acted, and stop when they get no lease.
"""

from collections.abc import Iterator
from itertools import islice

import pytest

from async_rl.net.codec import decode_group
from async_rl.queue.core import generator_requests, report
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import NotReady
from tests.queue.builders import LINEAGE, ack, group, make_state, put, take

NUM_GENERATORS = 10


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
        yield [learner.version - decode_group(bytes(item.payload)).oldest_version for item in answer]
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
    assert report.stats(state).ledger["groups"]["dropped"]["stale"] == 0
    report.check(state)
