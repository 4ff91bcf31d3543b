"""A generator whose collectives break again and again pulls its versions for a while, as docs/architecture.md says."""

from __future__ import annotations

from async_rl.weights.scheduler import FinishAction, PrepareAction, PullAction, StartAction
from tests.weights.test_scheduler import A, only, pull_all, rounds_with


def test_after_three_broken_collectives_in_a_row_the_next_32_versions_are_pulled():
    scheduler = rounds_with(A)
    for version in range(3):
        scheduler.publish(version)
        enter = only(scheduler.advance(0.0), PrepareAction)
        scheduler.mark_ready(A, enter.attempt)
        go = only(scheduler.advance(0.0), StartAction)
        scheduler.mark_failed(A, go.attempt, "unreachable")
        scheduler.mark_sent(go.attempt, ok=False)
        finish, pull = scheduler.advance(0.0)
        assert isinstance(finish, FinishAction)
        assert isinstance(pull, PullAction)
        scheduler.ack(A, pull.attempt, version)
    for version in range(3, 35):
        scheduler.publish(version)
        assert pull_all(scheduler, 0.0) == [A]
    scheduler.publish(35)
    only(scheduler.advance(0.0), PrepareAction)
