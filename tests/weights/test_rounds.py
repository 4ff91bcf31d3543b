"""The publisher's state machine, driven by hand and by hypothesis. Deadline 12 s, ready 3 s, silence 6 s."""

from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from async_rl.weights.rounds import Action, DropAction, EnterAction, FinishAction, GoAction, Rounds

_T = TypeVar("_T")
A, B, C = b"a", b"b", b"c"


def rounds_with(*members: bytes) -> Rounds:
    rounds = Rounds(deadline_s=12, ready_s=3, silent_s=6)
    for member in members:
        rounds.join(member, member.decode(), 0.0)
    return rounds


def only(actions: Sequence[Action], kind: type[_T]) -> _T:
    """The one action, which is of this kind."""
    [action] = actions
    assert isinstance(action, kind)
    return action


def deliver(rounds: Rounds, version: int, *members: bytes, now: float = 0.0) -> GoAction:
    rounds.publish(version)
    enter = only(rounds.advance(now), EnterAction)
    assert set(enter.member_ids) == set(members)
    for member in members:
        rounds.ready(member, enter.attempt)
    go = only(rounds.advance(now), GoAction)
    rounds.sent(go.attempt, ok=True)
    for member in members:
        rounds.ack(member, go.attempt, version)
    finish = only(rounds.advance(now), FinishAction)
    assert finish == FinishAction(go.attempt, version, True)
    return go


def test_the_communicator_is_kept_while_membership_stays_and_rebuilt_when_one_joins():
    rounds = rounds_with(A, B)
    assert [deliver(rounds, version, A, B).build for version in range(3)] == [True, False, False]
    rounds.join(C, "c", 0.0)
    catch_up = deliver(rounds, 2, C)
    assert (catch_up.epoch, catch_up.participants) == (2, (C,))
    assert deliver(rounds, 3, A, B, C).epoch == 3


def test_a_member_that_is_not_ready_in_time_is_left_out_and_asked_again_when_it_is():
    rounds = rounds_with(A, B)
    rounds.publish(0)
    enter = only(rounds.advance(0.0), EnterAction)
    rounds.ready(A, enter.attempt)
    assert rounds.advance(2.9) == []
    go = only(rounds.advance(3.0), GoAction)
    assert go.participants == (A,)
    rounds.sent(go.attempt, ok=True)
    rounds.ack(A, go.attempt, 0)
    finish = only(rounds.advance(3.1), FinishAction)
    assert finish.intact
    assert rounds.advance(3.2) == []
    rounds.ready(B, enter.attempt)
    again = only(rounds.advance(3.3), EnterAction)
    assert again.member_ids == (B,)


def test_survivors_that_got_everything_are_done_and_only_the_others_enter_again():
    rounds = rounds_with(A, B, C)
    rounds.publish(0)
    enter = only(rounds.advance(0.0), EnterAction)
    for member in (A, B, C):
        rounds.ready(member, enter.attempt)
    go = only(rounds.advance(0.0), GoAction)
    rounds.ack(A, go.attempt, 0)
    rounds.failed(B, go.attempt, "connection closed")
    rounds.leave(C)
    rounds.sent(go.attempt, ok=False)
    finish, again = rounds.advance(1.0)
    assert finish == FinishAction(go.attempt, 0, False)
    assert again == EnterAction(go.attempt + 1, 0, (B,), True)


def test_a_silent_member_is_dropped_and_waited_for_no_longer():
    rounds = rounds_with(A, B)
    rounds.publish(0)
    enter = only(rounds.advance(0.0), EnterAction)
    rounds.ready(A, enter.attempt)
    rounds.ready(B, enter.attempt)
    go = only(rounds.advance(0.0), GoAction)
    rounds.sent(go.attempt, ok=True)
    rounds.ack(A, go.attempt, 0)
    rounds.heard(A, 6.0)
    assert rounds.advance(6.0) == []
    assert rounds.advance(6.1) == [DropAction(B, "silent for 6.1 s"), FinishAction(go.attempt, 0, False)]
    assert list(rounds.members) == [A]


def test_a_member_without_a_version_by_the_deadline_is_dropped_although_it_lives():
    rounds = rounds_with(A)
    rounds.publish(0)
    rounds.advance(0.0)
    for now in (3.0, 6.0, 9.0, 11.9):
        rounds.heard(A, now)
        assert not any(isinstance(action, DropAction) for action in rounds.advance(now))
    drop = only(rounds.advance(12.0), DropAction)
    assert "weights.deadline_s" in drop.reason


def test_a_member_that_fails_three_times_in_a_row_is_dropped_with_the_last_reason():
    rounds = rounds_with(A)
    rounds.publish(0)
    for time in range(3):
        enter = rounds.advance(time)[-1]
        assert isinstance(enter, EnterAction)
        rounds.ready(A, enter.attempt)
        go = only(rounds.advance(time), GoAction)
        rounds.failed(A, go.attempt, f"reason {time}")
        rounds.sent(go.attempt, ok=False)
    drop, finish = rounds.advance(3.0)
    assert drop == DropAction(A, "failed 3 times in a row, at last: reason 2")
    assert isinstance(finish, FinishAction)


def test_a_newer_version_replaces_one_that_has_not_gone_out():
    rounds = rounds_with(A)
    rounds.publish(0)
    first = only(rounds.advance(0.0), EnterAction)
    rounds.publish(1)
    finish, second = rounds.advance(0.1)
    assert finish == FinishAction(first.attempt, 0, False)
    assert second == EnterAction(first.attempt + 1, 1, (A,), True)
    rounds.ready(A, first.attempt)
    assert rounds.advance(0.2) == []


def test_one_that_joins_while_others_get_ready_is_taken_along():
    rounds = rounds_with(A)
    rounds.publish(0)
    first = only(rounds.advance(0.0), EnterAction)
    rounds.join(B, "b", 0.1)
    assert rounds.advance(0.1) == [EnterAction(first.attempt, 0, (B,), False)]


def test_a_generator_that_comes_back_over_a_new_connection_replaces_its_old_self():
    rounds = rounds_with(A)
    rounds.join(B, "a", 1.0)
    assert rounds.advance(1.0) == [DropAction(A, "joined again over another connection")]
    assert list(rounds.members) == [B]


class Chaos(RuleBasedStateMachine):
    """Members join, leave, answer, fail or fall silent in any order; one simulated sender."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = Rounds(deadline_s=12, ready_s=3, silent_s=6)
        self.now = 0.0
        self.version = -1
        self.going: GoAction | None = None
        self.entered_at: dict[bytes, float] = {}
        self.invited: dict[bytes, EnterAction] = {}

    def act(self) -> None:
        for _ in range(20):
            actions = self.rounds.advance(self.now)
            for action in actions:
                if isinstance(action, EnterAction):
                    assert self.going is None, "one attempt at a time"
                    for member in action.member_ids:
                        self.invited[member] = action
                elif isinstance(action, GoAction):
                    assert self.going is None
                    assert action.participants
                    assert self.now < action.deadline <= self.now + 12
                    self.going = action
                elif isinstance(action, FinishAction):
                    self.going = None
            if not actions:
                return
        pytest.fail("it never comes to rest")

    @rule()
    def publish(self):
        self.version += 1
        self.rounds.publish(self.version)
        self.act()

    @rule(member=st.sampled_from([A, B, C]))
    def join(self, member: bytes):
        self.rounds.join(member, member.decode(), self.now)
        self.act()

    @rule(member=st.sampled_from([A, B, C]), event=st.sampled_from(["ready", "ack", "fail", "leave", "hear"]))
    def member_event(self, member: bytes, event: str):
        told = self.invited.get(member)
        if event == "leave":
            self.rounds.leave(member)
        elif event == "hear":
            self.rounds.heard(member, self.now)
        elif told is not None and event == "ready":
            self.rounds.ready(member, told.attempt)
        elif told is not None and event == "ack":
            self.rounds.ack(member, told.attempt, told.version)
        elif told is not None:
            self.rounds.failed(member, told.attempt, "x")
        self.act()

    @precondition(lambda self: self.going is not None)
    @rule(ok=st.booleans())
    def sent(self, ok: bool):
        assert self.going is not None
        self.rounds.sent(self.going.attempt, ok=ok)
        self.act()

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.0]))
    def pass_time(self, seconds: float):
        self.now += seconds
        if self.going is not None and self.now > self.going.deadline:
            self.rounds.sent(self.going.attempt, ok=False)
        self.act()

    @invariant()
    def nobody_silent_or_overdue_is_waited_for(self):
        for member in self.rounds.awaited:
            state = self.rounds.members[member]
            assert self.now - state.heard <= 6
            assert state.entered is not None
            assert self.now < state.entered + 12


Chaos.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestChaos = Chaos.TestCase
