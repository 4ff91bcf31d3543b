"""The admission rule: how many leases there are, how old their samples may be, and what refuses them.

Only this file states the rule's numbers. By default: 2 groups a step, 2 rollouts a group, bound 1. One part plays whole
runs: with generators ten times too fast, everything that is trained is as old as it may be. Nothing there
depends on time: generators act whenever the learner has acted, and stop when they get no lease.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from msgspec.structs import replace

from async_rl.errors import ConfigError
from async_rl.net.codec import decode_group, encode_group
from async_rl.queue.core import generator_requests, persistence
from async_rl.queue.core.admission import QueueSettings
from async_rl.queue.core.diagnosis import notes
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import NotReady
from async_rl.records import BYTES_PER_TOKEN, Rollout, Span, TokenSequence
from async_rl.routes import RoutingShape
from tests.config.made import a_config
from tests.queue.builders import (
    LINEAGE,
    SAMPLING,
    ack,
    fill_and_take,
    group,
    leases,
    make_config,
    make_state,
    put,
    settings,
    take,
)

NUM_GENERATORS = 10


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


def test_each_lease_names_the_oldest_version_that_its_batch_can_still_train():
    # v = 3, eta = 1: the first batch trains at 3 (oldest 2), the second at 4 (oldest 3).
    s = settings()
    oldest = [s.oldest_for_lease(version=3, outstanding=n) for n in range(4)]
    assert oldest == [2, 2, 3, 3]


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


# What leases say about sampling: the temperature of their version, and the room that sampling masks may take.


COOLING = {"temperature_end": 0.6, "temperature_steps": 4}


def temperatures(state: QueueState, version: int) -> list[float]:
    return [lease.sampling.temperature for lease in leases(state, 2, version)]


def test_temperature_goes_down_on_a_line_over_the_versions_and_stays():
    # From 1.0 to 0.6 over 4 versions: 0.1 a version.
    cooling = settings(**COOLING)
    found = [cooling.sampling_at(version).temperature for version in range(7)]
    assert found == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.6, 0.6])
    assert found[4] == 0.6
    assert replace(cooling.sampling_at(3), temperature=1.0) == SAMPLING
    assert settings().sampling_at(3) is settings().sampling


def test_a_lease_has_the_temperature_of_the_version_that_samples_it():
    state = make_state(max_staleness=1, **COOLING)
    first = leases(state, 2)
    assert [lease.sampling.temperature for lease in first] == [1.0, 1.0]
    for lease in first:
        assert put(state, group(lease)) == "queued"
    take(state)
    ack(state)
    # The learner is at version 1, the generator still at 0 or already at 1.
    assert temperatures(state, 0) == [1.0, 1.0]
    assert temperatures(state, 1) == pytest.approx([0.9, 0.9])


def test_a_restarted_queue_gives_its_leases_the_temperature_they_had():
    state = make_state(max_staleness=1, **COOLING)
    for lease in leases(state, 2):
        put(state, group(lease))
    take(state)
    ack(state)
    for lease in leases(state, 1, version=0) + leases(state, 1, version=1):
        held = state.leases.get(lease.lease_id)
        assert held is not None
        assert persistence.build_active_lease(state, lease.lease_id, held.record()).lease == lease


# 2 rollouts a group, 8 + 8 tokens each, 1024 bytes a rollout and 4096 a group.
PLAIN_BYTES = 2 * (16 * BYTES_PER_TOKEN + 1024) + 4096


@pytest.mark.parametrize(
    ("top_p", "top_k", "vocab_size", "words"),
    [
        (1.0, 0, None, None),  # nothing is left out
        (1.0, 50, None, 50),  # 50 ids
        (0.9, 50, None, 50),
        (0.9, 0, 1000, 32),  # 1000 bits
        (0.9, 20, 1000, 20),
        (1.0, 50, 1000, 32),
    ],
)
def test_a_lease_reserves_what_its_sampling_masks_may_take(
    top_p: float, top_k: int, vocab_size: int | None, words: int | None
):
    found = settings(sampling=replace(SAMPLING, top_p=top_p, top_k=top_k), vocab_size=vocab_size).worst_case_bytes
    # For each of 2 * 8 sampled tokens a size and the words, 4 bytes each.
    assert found == PLAIN_BYTES + (0 if words is None else 2 * 8 * 4 * (1 + words))


def test_a_lease_reserves_what_its_routes_take():
    # 3 layers, 2 of 8 experts: 6 bytes for each token of prompt and answer, of 2 rollouts.
    tokens = 2 * (SAMPLING.max_prompt_tokens + SAMPLING.max_new_tokens)
    assert settings(routing=RoutingShape(3, 8, 2)).worst_case_bytes == PLAIN_BYTES + 6 * tokens
    assert leases(make_state(routing=RoutingShape(3, 8, 2)), 1)[0].wants_routes
    with pytest.raises(ConfigError, match=r"model\.routing_replay = false: routes take 1200 bytes a token$"):
        settings(routing=RoutingShape(60, 512, 10), max_bytes=PLAIN_BYTES)


def reserved_by(**sections: dict[str, Any]) -> int:
    """What a lease of two rollouts reserves, of a config with these sections."""
    return QueueSettings.from_config(a_config(**sections), vocab_size=None).worst_case_bytes


def test_an_agents_lease_reserves_its_own_limit_instead_of_turns_times_length():
    sampling = {"group_size": 2, "max_prompt_tokens": 1000, "max_new_tokens": 100}
    agent = {"name": "mine.py:run"}
    # Two rollouts of 100,000 tokens or of 1,100, each with up to 100 answers.
    for limit, tokens in (({"max_rollout_tokens": 100_000}, 100_000), ({}, 1100)):
        found = reserved_by(environment=agent | limit, generator={"serve": True}, sampling=sampling)
        assert found == 2 * (tokens * BYTES_PER_TOKEN + 100 * 64 + 1024) + 4096


def test_a_lease_reserves_what_spans_may_take_if_a_reward_can_make_them():
    sampling = {"group_size": 2, "max_prompt_tokens": 1, "max_new_tokens": 2000}
    none = reserved_by(sampling=sampling)
    # Each of 2 * 2000 sampled tokens may end a span of 15 bytes.
    for reward in ({"type": "mine.py:reward"}, {"extra": {"mine.py:reward": 0.5}}):
        assert reserved_by(sampling=sampling, reward=reward) - none == 2 * 2000 * 15
    ids = np.arange(2001, dtype=np.int32)
    one = TokenSequence(ids, ids > 0, np.zeros(2001, np.float32), np.zeros(2001, np.int32))
    spans = tuple(Span(end, 0.125) for end in range(1, 2001))
    full = group(leases(make_state(), 1)[0])
    full = structs.replace(full, rollouts=(Rollout((one,), {"process": 1.0}, 1.0, "stop", spans=spans),) * 2)
    assert none < len(encode_group(full)) < none + 2 * 2000 * 15


def test_sampling_masks_that_nothing_bounds_or_that_make_a_step_too_large_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"sampling\.top_p: 0\.9 alone may keep .*; set sampling\.top_k"):
        settings(sampling=replace(SAMPLING, top_p=0.9))
    with pytest.raises(ConfigError, match=r"queue\.max_bytes: .*or lower \(or set\) sampling\.top_k"):
        settings(sampling=replace(SAMPLING, top_p=0.9), vocab_size=1 << 21)  # 256 KiB a token, of 1 MiB
    with pytest.raises(ConfigError, match=r"sampling\.max_new_tokens$"):
        settings(max_bytes=100)


def test_settings_come_from_the_config():
    config = make_config("r", sampling={"temperature": 1.2, "temperature_end": 0.8, "top_p": 0.9, "group_size": 2})
    found = QueueSettings.from_config(config, vocab_size=100)
    assert (found.sampling.top_p, found.vocab_size) == (0.9, 100)
    # 3 steps of one update each.
    assert [found.sampling_at(v).temperature for v in (0, 3, 4)] == pytest.approx([1.2, 0.8, 0.8])
