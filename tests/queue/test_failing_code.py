"""Failed leases: what counts against a prompt, who is quarantined, when the run pauses, and when it stops."""

from __future__ import annotations

import pytest
from msgspec import structs

from async_rl.net.codec import encode_group, read_as
from async_rl.queue import messages
from async_rl.queue.core import diagnosis, generator_requests, learner_requests, persistence
from async_rl.queue.core.failures import LONGEST_PAUSE_S
from async_rl.queue.core.groups import read_summary
from async_rl.queue.core.retries import TRANSIENT_WAIT_S
from async_rl.queue.core.state import QueueState, encode_state, stop_reason
from async_rl.queue.messages import FailedRollouts, Failure, LeasesGranted, NotReady
from async_rl.records import Lease
from tests.queue.builders import (
    LINEAGE,
    SAMPLING,
    ack,
    all_trained,
    fail,
    fail_until_excluded,
    group,
    leases,
    make_state,
    put,
    rows,
    take,
)
from tests.queue.direct import Run

DOWN = {"is_transient": True, "place": "ConnectionError at /tool.py:7", "detail": "ConnectionRefusedError: tool:80"}


def fail_many(state: QueueState, count: int, *, generator: str = "g0", now: float = 0.0, **failure: object) -> None:
    for lease in leases(state, count, generator=generator, now=now):
        fail(state, lease, "reward_error", generator=generator, now=now, **failure)  # type: ignore[arg-type]


def waits(state: QueueState, now: float = 0.0) -> NotReady:
    answer = learner_requests.take(state, LINEAGE, 0, 0, now)
    assert isinstance(answer, NotReady)
    return answer


def one_lease(state: QueueState, *, generator: str = "g0", now: float = 0.0) -> Lease:
    (lease,) = leases(state, 1, generator=generator, now=now)
    return lease


def succeed(state: QueueState, *, generator: str = "g0", now: float = 0.0) -> int:
    """Return a good group of the next prompt, and the prompt's position."""
    lease = one_lease(state, generator=generator, now=now)
    assert put(state, group(lease, generator=generator), now=now) == "queued"
    return lease.prompt.position


def wide_state(**changes: object) -> QueueState:
    return make_state(**{"groups_per_step": 200, "max_bytes": 1 << 24, "generator_timeout_s": 1e9, **changes})  # type: ignore[arg-type]


# A mistake in the code.


def test_eight_equal_failures_before_the_first_good_group_stop_the_run_with_the_last_error():
    state = wide_state()
    for number in range(8):
        assert waits(state).stop == ""
        fail_many(state, 1, detail=f"TypeError: {number} (/r.py, line 3, in score)")
    said = waits(state).stop
    assert "the reward failed 8 times in a row with the same error, and never succeeded" in said
    assert "TypeError: 7 (/r.py, line 3, in score)" in said
    assert "the log of generator 'g0' has the traceback" in said
    # A run begins with an evaluation, so the learner may wait there.
    assert learner_requests.eval_wait(state, LINEAGE).stop == said


def test_failures_at_different_places_or_of_a_tool_that_starts_late_do_not_stop_the_run():
    for failures in ([{"place": str(number)} for number in range(8)], [DOWN] * 8):
        state = wide_state()
        for failure in failures:
            fail_many(state, 1, **failure)  # type: ignore[arg-type]
        assert waits(state).stop == ""
        assert "the run is paused because every lease fails" in waits(state).reason


def test_a_good_group_proves_the_code_until_it_changes():
    state = wide_state()
    succeed(state)
    fail_many(state, 8)
    assert waits(state).stop == ""
    state.code = "another digest"
    assert "never succeeded" in waits(state).stop


def test_two_generators_that_both_fail_eight_times_stop_the_run_and_one_does_not():
    state = wide_state()
    generator_requests.hello(state, "g1", "host", "fake", 0.0)
    fail_many(state, 8)
    assert waits(state).stop == ""
    fail_many(state, 8, generator="g1")
    assert "never succeeded" in waits(state).stop


# An outage.


def test_an_outage_pauses_the_run_and_makes_no_prompt_poison():
    state = wide_state()
    succeed(state)
    fail_many(state, 8, now=10.0, **DOWN)
    assert leases(state, 4, now=10.5) == []
    now, pauses, revision = 11.0, list[float](), state.revision
    assert state.next_deadline == now
    state.expire(now)
    assert state.revision > revision, "requests that wait are tried again"
    while now < 600.0:
        (lease,) = leases(state, 4, now=now)
        assert leases(state, 4, now=now) == []
        fail(state, lease, "reward_error", now=now, **DOWN)  # type: ignore[arg-type]
        retry_at = state.generators.seen("g0", now).failing.retry_at
        assert retry_at is not None
        pauses.append(retry_at - now)
        now = retry_at
    assert pauses[:7] == [2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert state.excluded.total() == 0
    assert "(generator 'g0'; tried again in 0 s; the run stops after queue.max_outage_s" in waits(state, now).reason
    succeed(state, now=now)
    assert len(leases(state, 4, now=now)) == 4
    assert "the run is paused" not in waits(state, now).reason


def test_outages_that_come_one_after_the_other_make_no_prompt_poison():
    # Between two of them, eight leases at a time, only the same first prompts can have failed and failed again.
    state = wide_state(max_attempts=3)
    now = 0.0
    for _ in range(10):
        held = leases(state, 9, now=now)
        good = held[-1]
        assert put(state, group(good), now=now) == "queued"
        for lease in held[:-1]:
            fail(state, lease, now=now, **DOWN)  # type: ignore[arg-type]
        now += 1.0
        succeed(state, now=now)
    assert state.excluded.total() == 0
    assert max(attempts.failed for attempts in state.attempts.values()) <= 1


def test_groups_that_began_before_an_outage_and_end_in_it_make_no_prompt_poison():
    state = wide_state(max_attempts=2)
    succeed(state)
    early, failing = leases(state, 4), one_lease(state)
    fail(state, failing, **DOWN)  # type: ignore[arg-type]
    for lease in early:
        # Its tool answered before the outage.
        assert put(state, group(lease)) == "queued"
        for again in leases(state, 2):
            fail(state, again, **DOWN)  # type: ignore[arg-type]
    assert state.excluded.total() == 0
    assert state.attempts[failing.prompt.position].failed == 1


def test_a_prompt_that_fails_at_once_is_excluded_although_other_groups_take_long():
    state = wide_state(max_attempts=2)
    succeed(state)
    early, bad = leases(state, 3), one_lease(state)
    fail(state, bad)
    later = leases(state, 2)
    for lease in (*early, later[0]):
        assert state.excluded.total() == 0
        put(state, group(lease))
        again = one_lease(state)
        assert again.prompt.position == bad.prompt.position
        fail(state, again)
    assert state.excluded.total() == 1


def test_an_outage_longer_than_the_limit_stops_the_run():
    state = wide_state(max_outage_s=100.0)
    succeed(state)
    fail_many(state, 8, now=10.0, **DOWN)
    assert waits(state, 109.0).stop == ""
    assert "every lease failed for 100 s (queue.max_outage_s): the reward failed: Connec" in waits(state, 110.0).stop


def test_all_generators_try_again_at_once_when_one_succeeds_after_an_outage():
    state = wide_state()
    for name in ("g0", "g1"):
        succeed(state, generator=name)
        fail_many(state, 8, generator=name, **DOWN)
    fail(state, one_lease(state, generator="g1", now=1.0), generator="g1", now=1.0, **DOWN)  # type: ignore[arg-type]
    assert leases(state, 1, generator="g1", now=2.0) == []
    succeed(state, generator="g0", now=2.0)
    assert len(leases(state, 4, generator="g1", now=2.0)) == 1


# A broken generator.


def test_a_generator_that_fails_where_others_succeed_is_quarantined_and_taken_back():
    state = wide_state()
    succeed(state, generator="good")
    fail_many(state, 8, generator="bad", **DOWN)
    assert stop_reason(state) == ""
    assert "the run is paused" not in waits(state).reason
    shown = {entry["id"]: entry["quarantined"] for entry in persistence.status(state, 0.0)["generators"]}
    assert shown["good"] == ""
    assert shown["bad"].startswith("its last 8 leases failed, in the end because the reward failed: ConnectionRefused")
    assert "tried again in 1 s" in shown["bad"]
    assert any("generator 'bad' is quarantined, while others succeed" in line for line in state.news)
    answer = generator_requests.lease(state, "bad", (LINEAGE, 0), 1, 0.5)
    assert "this generator is quarantined: its last 8 leases failed" in answer.reason
    # The prompts that failed there are sampled by the other one.
    assert [succeed(state, generator="good", now=0.5) for _ in range(9)] == [9, *range(1, 9)]
    succeed(state, generator="bad", now=1.0)
    assert len(leases(state, 4, generator="bad", now=1.0)) == 4


# Leases that expire.


def stall(state: QueueState, generator: str, count: int, now: float) -> float:
    """Give leases to a generator that is alive and makes no progress. Return the time at which they have expired."""
    assert len(leases(state, count, generator=generator, now=now)) == count
    state.expire(now + 10.0)
    return now + 10.0


def test_a_generator_that_stalls_where_others_succeed_is_quarantined_and_excludes_no_prompt():
    state = wide_state(lease_timeout_s=10.0, max_attempts=2)
    succeed(state, generator="good")
    succeed(state, generator="stalled")
    now = stall(state, "stalled", 8, now=0.0)
    assert "no progress for 10 s (queue.lease_timeout_s)" in diagnosis.notes(state)["quarantined: stalled"]
    for _ in range(20):
        assert leases(state, 1, generator="stalled", now=now) == []
        now = stall(state, "stalled", 1, now + 60.0)
    assert state.excluded.total() == 0
    assert {succeed(state, generator="good", now=now) for _ in range(40)} >= set(range(2, 10))


def test_a_pause_of_all_machines_excludes_no_prompt():
    state, now = wide_state(lease_timeout_s=10.0, max_attempts=2), 0.0
    for _ in range(20):
        for generator in ("g0", "g1"):
            for _ in range(3):
                succeed(state, generator=generator, now=now)
        for generator in ("g0", "g1"):
            assert len(leases(state, 8, generator=generator, now=now)) == 8
        state.expire(now + 10.0)
        now += 100.0
    assert state.excluded.total() == 0


def test_a_prompt_that_stalls_while_others_succeed_is_poison():
    state, now, num_attempts = wide_state(lease_timeout_s=10.0, max_attempts=3), 0.0, 0
    while not state.excluded:
        lease = one_lease(state, now=now)
        if lease.prompt.position == 0:
            num_attempts, now = num_attempts + 1, now + 10.0
            state.expire(now)
        else:
            assert put(state, group(lease), now=now) == "queued"
    assert (num_attempts, state.last_excluded) == (4, {0: "poison"})  # the first was before any good group


def test_a_prompt_that_kills_its_generators_is_poison():
    state, now = wide_state(lease_timeout_s=10.0, max_attempts=3, generator_timeout_s=5.0, num_rows=40, epochs=1), 0.0
    poison, num_deaths = 5, 0
    while not state.excluded and num_deaths < 20:
        generator = f"g{num_deaths}"
        held = leases(state, 4, generator=generator, now=now)
        if any(lease.prompt.position == poison for lease in held):
            num_deaths, now = num_deaths + 1, now + 10.0
            state.expire(now)
        else:
            for lease in held:
                put(state, group(lease, generator=generator), now=now)
    assert state.last_excluded[poison] == "poison"
    assert num_deaths == 3


# Raising rows.


def test_a_row_that_raises_while_others_succeed_is_poison():
    state = wide_state(max_attempts=3)
    succeed(state)
    assert fail_until_excluded(state, 1) == 3
    assert persistence.ledger_file(state)["excluded"][0]["cause"] == "poison"


@pytest.mark.parametrize("generator", ["g0", "g1"], ids=["as before", "after a restart, when nobody has succeeded"])
def test_the_last_rows_of_the_data_that_raise_are_poison_and_no_outage(generator: str):
    state = wide_state(num_rows=4, epochs=1, max_attempts=3)
    succeed(state)
    if generator == "g1":
        generator_requests.goodbye(state, "g0", 0.0)
    now = 0.0
    # Without this rule the run would wait for queue.max_outage_s, and then stop.
    while len(state.last_excluded) < 3 and now < 600.0:
        for lease in leases(state, 1, generator=generator, now=now):
            fail(state, lease, generator=generator, now=now)
        now += 1.0
    assert sorted(state.last_excluded) == [1, 2, 3]


def test_a_row_that_always_fails_does_not_keep_others_from_their_turn():
    # Row 1 raises, row 2 failed only because the tool was away. No other row is left to be tried.
    state = wide_state(num_rows=3, epochs=1, max_attempts=9)
    succeed(state)
    generator_requests.goodbye(state, "g0", 0.0)
    for lease in leases(state, 2, generator="g1"):
        fail(state, lease, generator="g1", is_transient=True)
    for _ in range(2):
        (lease,) = leases(state, 1, generator="g1")
        if lease.prompt.position == 2:
            return
        fail(state, lease, generator="g1", is_transient=True)
    raise AssertionError("row 2 was never tried again")


def test_a_last_row_whose_tool_never_answers_is_given_up_in_minutes():
    state = wide_state(num_rows=2, epochs=1, max_attempts=3, max_outage_s=1e6)
    succeed(state)
    now = 0.0
    while not state.last_excluded:
        now += 1.0
        for lease in leases(state, 1, now=now):
            fail(state, lease, now=now, **DOWN)  # type: ignore[arg-type]
    assert 2 * TRANSIENT_WAIT_S <= now <= 2 * (TRANSIENT_WAIT_S + LONGEST_PAUSE_S) + 10


def test_an_evaluation_counts_its_raising_rows_as_unanswered_and_goes_on():
    state = make_state(max_attempts=3)
    learner_requests.evaluate(state, "test", 0, rows(5), 2, SAMPLING, 0, True)
    now, num_failed = 0.0, 0
    while not learner_requests.eval_results(state, LINEAGE):
        now += 1.0
        for lease in leases(state, 1, now=now):
            if lease.prompt.row in (1, 4):
                fail(state, lease, now=now)
                num_failed += 1
            else:
                assert put(state, group(lease), now=now) == "eval_done"
    assert num_failed == 6
    assert waits(state, now).stop == ""
    (place,) = persistence.ledger_file(state)["failures"]
    assert place["eval_rows"] == ["test:1", "test:4"]
    assert any(line.startswith("on row 1 of test the engine failed") for line in state.news)


def test_failed_places_are_counted_with_their_rows_and_said_once():
    state = wide_state(max_attempts=9)
    succeed(state)
    for _ in range(3):
        fail_many(state, 2)
        succeed(state)
    (place,) = persistence.ledger_file(state)["failures"]
    assert (place["cause"], place["rollouts"], place["rows"]) == ("reward_error", 12, [1, 2])
    assert place["detail"] == "KeyError: 'x' (/r.py, line 3, in score)"
    assert persistence.status(state, 0.0)["ledger"]["failures"] == [place]
    (said,) = [line for line in state.news if "KeyError" in line]
    assert said.startswith("on row 1 of data.train the reward failed: KeyError: 'x' (/r.py, line 3, in score)")


def test_single_failed_rollouts_of_a_good_group_are_counted_too():
    state = make_state()
    lease = one_lease(state)
    good = group(lease)
    first, *others = good.rollouts
    returned = structs.replace(good, rollouts=(structs.replace(first, finish_reason="error"), *others))
    payload = encode_group(returned)
    failed = [FailedRollouts(lease.lease_id, Failure("reward_error", "KeyError: 'x'", "place"), 1)]
    # Only one rollout has failed, whatever its generator says.
    failed += [FailedRollouts(lease.lease_id, Failure("reward_error", "a lie", str(number)), 9) for number in range(99)]
    assert generator_requests.receive(state, "g0", read_summary(payload), payload, 0.0, failed)[0] == "filtered"
    (place,) = persistence.ledger_file(state)["failures"]
    assert (place["detail"], place["rollouts"], place["rows"]) == ("KeyError: 'x'", 1, [0])


def test_many_places_and_long_texts_do_not_fill_the_journal():
    # Each commit writes what is known of all places: of twenty by themselves, of the others together.
    state = wide_state(max_attempts=99)
    before = len(encode_state(state))
    for number in range(30):
        fail(state, one_lease(state), place=f"{number:02}".ljust(2000, "p"), detail="d" * 2000)
        succeed(state)
    assert len(encode_state(state)) - before < 30_000
    places = persistence.ledger_file(state)["failures"]
    assert (len(places), sum(place["rollouts"] for place in places)) == (21, 60)


def test_what_is_known_of_failures_survives_a_return_to_a_checkpoint():
    state = make_state()
    for _ in range(2):
        succeed(state)
    take(state)
    snapshot = ack(state, all_trained(), snapshot=True)
    fail(state, leases(state, 1, version=1)[0])
    learner_requests.attach(state, "line-b", "line-a", 1, 1, 100, snapshot, 0.0)
    assert (state.num_good, state.num_outcomes) == (2, 3)
    assert state.proven_code == state.code
    assert [place["rollouts"] for place in persistence.ledger_file(state)["failures"]] == [2]


# Prompts that were given up.


POISON = {"position": 0, "row": 0, "epoch": 0, "cause": "poison"}


def poisoned_queue() -> QueueState:
    """The prompt at position 0 has failed ``max_attempts`` times."""
    state = make_state(max_attempts=2)
    fail_until_excluded(state, 0)
    return state


def test_they_are_named_with_row_and_cause_and_a_return_to_a_snapshot_forgets_later_ones():
    state = poisoned_queue()
    for lease in leases(state, 2):
        put(state, group(lease))
    take(state)
    snapshot = ack(state, all_trained(), snapshot=True)
    (lease,) = leases(state, 1, version=1)
    fail(state, lease, "prompt_too_long")
    too_long = {"position": lease.prompt.position, "row": lease.prompt.row, "epoch": 0, "cause": "too_long"}
    for shown in (persistence.ledger_file(state), persistence.status(state, 0.0)):
        assert shown["excluded"] == [POISON, too_long]
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


def test_a_restart_forgets_who_failed_and_the_pause(run: Run):
    def granted() -> LeasesGranted:
        return read_as(run.call(b"g0", messages.LeaseRequest("g0", LINEAGE, 0, 4)).fields, LeasesGranted)

    def reason() -> str:
        return run.learner(messages.Take(LINEAGE, 0, 0)).fields["reason"]

    failure = Failure("reward_error", "ConnectionRefusedError: tool:80", "/tool.py:7", is_transient=True)
    run.call(b"g0", messages.Hello("g0", "host", "fake"))
    while leases := granted().leases:
        for lease in leases:
            run.call(b"g0", messages.FailLease("g0", lease.lease_id, failure))
    assert "quarantined: its last 8 leases failed" in granted().reason
    assert "the run is paused" in reason()
    run.server._durable.revert()
    assert len(granted().leases) == 4
    assert "the run is paused" not in reason()
