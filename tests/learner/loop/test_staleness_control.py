"""The adaptive bound: every rule with its numbers by hand, and limits that hold whatever the steps show."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.loss import LossConfig
from async_rl.learner.checkpoints.files import BoundState
from async_rl.learner.loop.adaptive_bound import (
    HEALTHY_STEPS,
    OVERLOADED_STEPS,
    BoundLimits,
    Reading,
    reading_of,
    update_bound,
)
from async_rl.learner.losses.objective import PolicyObjective, update_stats
from async_rl.net.codec import decode_group
from async_rl.queue.messages import NotReady
from tests.learner.losses.test_objective import STEPPED, sums_of
from tests.queue.builders import ack, groups_of, make_state, take
from tests.queue.test_admission import fill

pytestmark = pytest.mark.usefixtures("fixed_admission")

LIMITS = BoundLimits(lowest=0, highest=16, min_ess=0.9, max_kl=0.02)
HEALTHY = Reading(ess=0.99, kl=0.001, oldest=16)
OVERLOADED = Reading(ess=0.5, kl=0.001, oldest=16)
BETWEEN = Reading(ess=0.92, kl=0.001, oldest=16)


def bounds(state: BoundState, readings: Iterable[Reading | None], limits: BoundLimits = LIMITS) -> list[int]:
    found: list[int] = []
    for reading in readings:
        state = update_bound(state, reading, limits)
        found.append(state.bound)
    return found


def test_two_overloaded_steps_in_a_row_halve_the_bound():
    assert bounds(BoundState(16), [OVERLOADED, OVERLOADED]) == [16, 8]
    assert bounds(BoundState(16), [OVERLOADED, BETWEEN, OVERLOADED, HEALTHY, OVERLOADED, OVERLOADED]) == [16] * 5 + [8]


def test_it_is_the_age_that_is_halved_where_samples_are_younger_than_the_bound():
    # The oldest token was 6 versions old though 16 were allowed; with 5 // 2 = 2 the next are at most that.
    assert bounds(BoundState(16), [Reading(0.5, 0.0, 6)] * 2) == [16, 3]
    assert bounds(BoundState(5), [OVERLOADED] * 2) == [5, 2]


def test_after_a_change_nothing_is_decided_until_its_first_leases_are_trained():
    # 16 steps are queued and in flight, and one is being taken: 17 steps settle. Then two more overloaded ones count.
    state = BoundState(16)
    found = bounds(state, [OVERLOADED] * (2 + 17 + 2))
    assert found == [16, 8] + [8] * 17 + [8, 4]
    # From 16 to 0: 2 + (17 + 2) + (9 + 2) + (5 + 2) + (3 + 2) = 44 overloaded steps.
    assert bounds(state, [OVERLOADED] * 44)[-2:] == [1, 0]


def test_ten_calm_steps_in_a_row_raise_the_bound_by_one():
    assert bounds(BoundState(3), [HEALTHY] * 10) == [3] * 9 + [4]
    # 3 + 1 = 4 steps settle, then ten more.
    assert bounds(BoundState(3), [HEALTHY] * 24)[-2:] == [4, 5]
    assert bounds(BoundState(3), [*[HEALTHY] * 9, BETWEEN, *[HEALTHY] * 9]) == [3] * 19


@pytest.mark.parametrize(
    ("ess", "kl", "verdict"),
    [
        (0.9, 0.02, 0),  # at both limits: within them
        (0.899, 0.0, -1),
        (1.0, 0.0201, -1),
        (1.0, math.inf, -1),
        (0.9501, 0.0099, 1),  # half of the way to each: 1 - 0.1 / 2, 0.02 / 2
        (0.9499, 0.0099, 0),
        (0.9501, 0.0101, 0),
        (math.nan, 0.0, 0),
        (1.0, math.nan, 0),
    ],
)
def test_a_step_is_overloaded_past_a_limit_and_calm_within_half_of_both(ess: float, kl: float, verdict: int):
    assert update_bound(BoundState(8), Reading(ess, kl, 8), LIMITS).streak == verdict


def test_a_step_that_trained_on_nothing_says_nothing():
    assert update_bound(BoundState(8, streak=-1), None, LIMITS) == BoundState(8)


def test_samples_as_young_as_they_can_be_are_not_blamed_on_the_bound():
    # Engines that disagree about the same weights: no bound helps, so overlap is not given up for it.
    assert bounds(BoundState(16), [Reading(0.1, 9.0, 0)] * 30) == [16] * 30
    with_sync = BoundLimits(lowest=3, highest=16, min_ess=0.9, max_kl=0.02)
    assert bounds(BoundState(16), [Reading(0.1, 9.0, 3)] * 30, with_sync) == [16] * 30


def test_the_limits_are_reached_and_not_passed():
    with_sync = BoundLimits(lowest=3, highest=5, min_ess=0.9, max_kl=0.02)
    assert bounds(BoundState(5), [OVERLOADED] * 60, with_sync)[-1] == 3
    assert bounds(BoundState(3), [HEALTHY] * 60, with_sync)[-1] == 5


def test_at_a_limit_the_next_step_of_the_other_kind_still_counts():
    lowest = update_bound(update_bound(BoundState(0), OVERLOADED, LIMITS), OVERLOADED, LIMITS)
    assert bounds(lowest, [HEALTHY] * HEALTHY_STEPS)[-1] == 1
    highest = BoundState(16)
    for _ in range(30):
        highest = update_bound(highest, HEALTHY, LIMITS)
    assert bounds(highest, [OVERLOADED] * OVERLOADED_STEPS)[-1] == 8


@pytest.mark.parametrize("sync_every", [1, 3])
def test_over_a_real_queue_the_bound_ends_where_the_strain_is_bearable(sync_every: int):
    # KL = 0.001 age^2: past 0.02 from an age of 5 on; healthy up to 3 (0.009); 4 (0.016) is neither.
    queue_state = make_state(max_staleness=16, num_rows=3000, num_steps=1000, sync_every=sync_every)
    limits = replace(LIMITS, lowest=sync_every - 1)
    state, ages = BoundState(16), list[int]()
    for _ in range(100):
        fill(queue_state)
        learner = queue_state.learner
        assert learner is not None
        answer = take(queue_state)
        assert not isinstance(answer, NotReady), answer.reason
        fill(queue_state)
        ages.append(max(learner.version - decode_group(bytes(item.payload)).oldest_version for item in answer))
        state = update_bound(state, Reading(1.0, 0.001 * ages[-1] ** 2, ages[-1]), limits)
        ack(queue_state, lease_bound=state.bound, announced=not (learner.version + 1) % sync_every)
    # The first steps are ever older. Those at 5 and 6 strain, and 6 // 2 = 3; there it is healthy, and 3 + 1 = 4.
    assert max(ages) > 4
    assert state.bound == 4
    assert max(ages[-30:]) == 4
    assert groups_of(queue_state)["dropped"]["stale"] == 0


def test_the_worst_of_a_batch_s_updates_is_read():
    # Ratios 1, 2, 1/2 and then 1, 1, 1: ESS 3.5^2 / (3 * 5.25); k3 = ((1 - ln 2) + (ln 2 - 1/2)) / 3 = 1/6.
    objective = PolicyObjective(LossConfig(), 2, 8)
    updates = [
        update_stats(sums_of(ratios, LossConfig(), versions=[3, 2, 2]), max(ratios), [4], STEPPED, objective=objective)
        for ratios in ([1.0, 2.0, 0.5], [1.0, 1.0, 1.0])
    ]
    reading = reading_of([None, *updates], oldest=1)
    assert reading is not None
    assert (reading.ess, reading.kl) == pytest.approx((3.5**2 / (3 * 5.25), 1 / 6), rel=1e-5)
    assert reading.oldest == 1
    assert reading_of([None], oldest=0) is None


NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
READINGS = st.lists(st.none() | st.builds(Reading, NUMBERS, NUMBERS, st.integers(0, 40)), max_size=200)


@given(st.integers(0, 4), st.integers(1, 16), st.integers(0, 16), READINGS)
def test_whatever_the_steps_show_the_bound_stays_within_its_limits(low: int, room: int, start: int, readings):
    limits = BoundLimits(low, low + room, 0.9, 0.02)
    before = BoundState(low + min(start, room))
    for reading in readings:
        after = update_bound(before, reading, limits)
        assert limits.lowest <= after.bound <= limits.highest
        if after.bound != before.bound:
            assert reading is not None
            assert before.settling == 0
            assert after.bound == before.bound + 1 or after.bound <= max(limits.lowest, before.bound // 2)
        before = after
