"""A reward or environment that fails for every answer stops the run, with the user's own error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import RunStoppedError
from async_rl.queue.client.clients import Returned
from async_rl.queue.core import generator_requests, learner_requests
from async_rl.queue.core.leases import FailureStreak
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import NotReady
from tests.queue.builders import LINEAGE, group, leases, make_config, make_state, put
from tests.queue.conftest import Servers, attach
from tests.queue.test_server import events_until, get_leases


def fail(state: QueueState, count: int, *, detail: str = "TypeError: bad", **changes: Any) -> None:
    report = {"cause": "reward_error", "place": "TypeError at /r.py:3", **changes}
    for _ in range(count):
        (lease,) = leases(state, 1)
        generator_requests.fail(state, "g0", lease.lease_id, now=0.0, detail=detail, **report)


def stop(state: QueueState) -> str:
    answer = learner_requests.take(state, LINEAGE, 0, 0, 0.0)
    assert isinstance(answer, NotReady)
    return answer.stop


def test_eight_leases_in_a_row_that_fail_at_one_place_stop_the_run_with_the_last_error():
    state = make_state()
    for number in range(8):
        assert stop(state) == ""
        fail(state, 1, detail=f"TypeError: {number} (/r.py, line 3, in score)")
    said = stop(state)
    assert "the reward failed 8 times in a row with the same error: TypeError: 7 (/r.py, line 3, in score)" in said
    assert "the log of generator 'g0' has the traceback" in said


def test_a_good_group_or_another_error_in_between_begins_the_count_again():
    for other in ("good", "place", "cause"):
        state = make_state()
        fail(state, 7)
        if other == "good":
            (lease,) = leases(state, 1)
            assert put(state, group(lease)) == "queued"
        else:
            fail(state, 1, **({"place": "elsewhere"} if other == "place" else {"cause": "environment_error"}))
        fail(state, 7)
        assert stop(state) == "", other
        fail(state, 1)
        assert "failed 8 times" in stop(state)


def test_failures_that_are_not_the_users_code_do_not_count():
    state = make_state(max_attempts=99)
    for _ in range(20):
        fail(state, 1, cause="engine_error")
    assert stop(state) == ""


def test_an_evaluation_whose_reward_always_fails_stops_the_wait_for_it(servers: Servers, tmp_path: Path):
    # A run begins with an evaluation, so the learner finds it there.
    server = servers.start(make_config(str(tmp_path / "run"), queue={"max_attempts": 99}))
    learner, generator = servers.learner(server.address), servers.generator(server.address)
    attach(learner)
    learner.evaluate("line-a", "test", 0, 0, True)
    generator.hello(10.0, "fake")
    for number in range(8):
        assert "0 of 2 rows" in learner.await_eval("line-a", wait_s=0.0)
        (lease,) = get_leases(generator, count=1)
        generator.fail(lease.lease_id, "reward_error", f"TypeError: {number}", "TypeError at /r.py:3")
        events_until(generator, Returned)
    with pytest.raises(RunStoppedError, match="the reward failed 8 times in a row with the same error: TypeError: 7"):
        learner.await_eval("line-a", wait_s=60.0)


def test_failures_after_the_eighth_do_not_change_why_the_run_stops():
    streak = FailureStreak()
    for _ in range(8):
        streak = streak.after("reward_error", "a.py:2", "KeyError: 'x'", "g")
    assert "failed 8 times in a row with the same error: KeyError: 'x'" in streak.diagnosis
    assert streak.after("reward_error", "a.py:2", "KeyError: 'x'", "g") == streak
    assert streak.after("reward_error", "b.py:9", "another", "h") == streak
