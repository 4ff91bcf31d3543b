"""The publisher's state machine, driven by hand and by hypothesis. Deadline 12 s, ready 3 s, silence 6 s."""

from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from async_rl.weights.scheduler import (
    Action,
    DropAction,
    EnterAction,
    FinishAction,
    GoAction,
    Member,
    PullAction,
    Rounds,
)

_T = TypeVar("_T")
A, B, C = b"a", b"b", b"c"


def rounds_with(*members: bytes, has_collective: bool = True) -> Rounds:
    """Members that hold version -1; with a collective they are in it for the next."""
    rounds = Rounds(deadline_s=12, ready_s=3, silent_s=6)
    rounds.publish(-1)
    for member in members:
        rounds.join(member, member.decode(), 0.0, collects=has_collective)
    pull_all(rounds, 0.0)
    return rounds


def pull_all(rounds: Rounds, now: float) -> list[bytes]:
    """Let everybody who is offered a pull succeed with it; who they were."""
    pulls = [action for action in rounds.advance(now) if isinstance(action, PullAction)]
    for pull in pulls:
        rounds.ack(pull.member_id, pull.attempt, pull.version)
    return [pull.member_id for pull in pulls]


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


def test_a_newcomer_is_fed_by_the_stream_and_in_the_collective_from_the_next_version_on():
    rounds = rounds_with(A, B)
    assert [deliver(rounds, version, A, B).build for version in range(3)] == [True, False, False]
    rounds.join(C, "c", 0.0, collects=True)
    pull = only(rounds.advance(0.0), PullAction)
    assert (pull.member_id, pull.version, pull.deadline) == (C, 2, 12.0)
    # While it pulls, the collective goes on without it.
    assert deliver(rounds, 3, A, B).build is False
    # What it missed it pulls as well: nobody builds an epoch for one.
    rounds.ack(C, pull.attempt, 2)
    assert pull_all(rounds, 1.0) == [C]
    rounds.publish(4)
    enter = only(rounds.advance(1.0), EnterAction)
    assert enter.member_ids == (A, B, C)


def test_a_member_that_is_not_ready_in_time_is_left_out_and_pulls():
    rounds = rounds_with(A, B)
    rounds.publish(0)
    enter = only(rounds.advance(0.0), EnterAction)
    rounds.ready(A, enter.attempt)
    assert rounds.advance(2.9) == []
    go, pull = rounds.advance(3.0)
    assert isinstance(go, GoAction)
    assert go.participants == (A,)
    assert isinstance(pull, PullAction)
    # It was told of the version at 0: that is when its deadline began.
    assert (pull.member_id, pull.deadline) == (B, 12.0)
    rounds.sent(go.attempt, ok=True)
    rounds.ack(A, go.attempt, 0)
    assert only(rounds.advance(3.1), FinishAction).intact


def test_survivors_of_a_broken_epoch_pull_and_build_a_new_one_for_the_next_version():
    rounds = rounds_with(A, B, C)
    rounds.publish(0)
    enter = only(rounds.advance(0.0), EnterAction)
    for member in (A, B, C):
        rounds.ready(member, enter.attempt)
    go = only(rounds.advance(0.0), GoAction)
    rounds.ack(A, go.attempt, 0)
    rounds.failed(B, go.attempt, "connection closed")
    # B is fed at once, although the attempt is not over: C has not answered yet.
    pull = only(rounds.advance(0.5), PullAction)
    assert (pull.member_id, pull.version) == (B, 0)
    rounds.leave(C)
    rounds.sent(go.attempt, ok=False)
    assert only(rounds.advance(1.0), FinishAction) == FinishAction(go.attempt, 0, False)
    rounds.ack(B, pull.attempt, 0)
    again = deliver(rounds, 1, A, B, now=1.0)
    assert (again.build, again.epoch) == (True, go.epoch + 1)


def test_a_member_whose_collectives_break_again_and_again_stays_with_the_stream_for_a_while():
    rounds = rounds_with(A)
    for version in range(3):
        rounds.publish(version)
        enter = only(rounds.advance(0.0), EnterAction)
        rounds.ready(A, enter.attempt)
        go = only(rounds.advance(0.0), GoAction)
        rounds.failed(A, go.attempt, "unreachable")
        rounds.sent(go.attempt, ok=False)
        finish, pull = rounds.advance(0.0)
        assert isinstance(finish, FinishAction)
        assert isinstance(pull, PullAction)
        rounds.ack(A, pull.attempt, version)
    for version in range(3, 35):
        rounds.publish(version)
        assert pull_all(rounds, 0.0) == [A]
    rounds.publish(35)
    only(rounds.advance(0.0), EnterAction)


def test_without_a_collective_everybody_pulls_everything_at_a_pace_of_its_own():
    rounds = rounds_with(A, B, has_collective=False)
    rounds.publish(0)
    slow, fast = rounds.advance(0.0)
    assert isinstance(slow, PullAction)
    assert isinstance(fast, PullAction)
    rounds.ack(B, fast.attempt, 0)
    rounds.publish(1)
    assert pull_all(rounds, 1.0) == [B]
    # A goes on with version 0 and skips what came meanwhile.
    rounds.publish(2)
    rounds.ack(A, slow.attempt, 0)
    assert pull_all(rounds, 2.0) == [A, B]
    assert {member.version for member in rounds.members.values()} == {2}


def test_a_pull_that_can_not_be_offered_yet_is_offered_when_it_can():
    rounds = rounds_with(A, has_collective=False)
    rounds.publish(0)

    def never(_: Member) -> bool:
        return False

    assert rounds.advance(0.0, never) == []
    # Nor does its deadline begin: it was told of nothing.
    assert only(rounds.advance(5.0), PullAction).deadline == 17.0


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


def test_a_member_whose_pulls_fail_three_times_in_a_row_is_dropped_with_the_last_reason():
    rounds = rounds_with(A)
    rounds.join(A, "a", 0.0, collects=True)
    for time in range(3):
        pull = only(rounds.advance(time), PullAction)
        rounds.failed(A, pull.attempt, f"reason {time}")
    assert rounds.advance(3.0) == [DropAction(A, "failed 3 times in a row, at last: reason 2")]


def test_who_was_in_the_collective_before_and_was_heard_of_is_not_asked_again():
    rounds = rounds_with(A, B)
    rounds._fresh_s = 1.5
    first = deliver(rounds, 0, A, B)
    assert (first.build, first.is_first) == (True, False)
    rounds.heard(A, 1.0)
    rounds.publish(1)
    go = only(rounds.advance(1.5), GoAction)
    assert (go.build, go.is_first, go.participants, go.deadline) == (False, True, (A, B), 13.5)
    assert rounds.awaited == {A, B}
    rounds.sent(go.attempt, ok=True)
    for member in (A, B):
        rounds.ack(member, go.attempt, 1)
    assert only(rounds.advance(1.5), FinishAction).intact
    # B was last heard of at 0: frozen, perhaps, and must say that it is ready.
    rounds.publish(2)
    assert set(only(rounds.advance(1.6), EnterAction).member_ids) == {A, B}


def test_what_was_to_go_at_once_and_is_gone_leaves_the_epoch_as_it_was():
    rounds = rounds_with(A)
    rounds._fresh_s = 1.5
    deliver(rounds, 0, A)
    rounds.publish(1)
    go = only(rounds.advance(0.0), GoAction)
    rounds.publish(None)
    rounds.withdraw(go.attempt)
    assert only(rounds.advance(0.0), FinishAction) == FinishAction(go.attempt, 1, True)
    rounds.publish(2)
    again = only(rounds.advance(0.0), GoAction)
    assert (again.build, again.epoch) == (False, go.epoch)


def test_a_newer_version_replaces_one_that_has_not_gone_out():
    rounds = rounds_with(A)
    rounds.publish(0)
    first = only(rounds.advance(0.0), EnterAction)
    rounds.publish(1)
    finish, second = rounds.advance(0.1)
    assert finish == FinishAction(first.attempt, 0, False)
    assert second == EnterAction(first.attempt + 1, 1, (A,))
    rounds.ready(A, first.attempt)
    assert rounds.advance(0.2) == []


def test_a_generator_that_comes_back_over_a_new_connection_replaces_its_old_self():
    rounds = rounds_with(A)
    rounds.join(B, "a", 1.0, collects=True)
    assert rounds.advance(1.0)[0] == DropAction(A, "joined again over another connection")
    assert list(rounds.members) == [B]


class Chaos(RuleBasedStateMachine):
    """Members join, leave, answer, fail or fall silent in any order; one simulated sender."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = Rounds(deadline_s=12, ready_s=3, silent_s=6, fresh_s=1)
        self.now = 0.0
        self.version = -1
        self.going: GoAction | None = None
        self.entered_at: dict[bytes, float] = {}
        self.invited: dict[bytes, EnterAction | GoAction] = {}
        self.pulls: dict[bytes, PullAction] = {}
        self.may_pull = True

    def act(self) -> None:
        for _ in range(20):
            actions = self.rounds.advance(self.now, lambda _: self.may_pull)
            for action in actions:
                if isinstance(action, PullAction):
                    member = self.rounds.members[action.member_id]
                    assert member.pull is action, "one pull at a time"
                    assert action.version == self.version
                    assert self.now < action.deadline <= self.now + 12
                    self.pulls[action.member_id] = action
                elif isinstance(action, EnterAction):
                    assert self.going is None, "one attempt at a time"
                    for member in action.member_ids:
                        self.invited[member] = action
                elif isinstance(action, GoAction):
                    assert self.going is None
                    assert action.participants
                    assert self.now < action.deadline <= self.now + 12
                    self.going = action
                    for member in action.participants if action.is_first else ():
                        self.invited[member] = action
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

    @rule(member=st.sampled_from([A, B, C]), collects=st.sampled_from([True, True, False]))
    def join(self, member: bytes, collects: bool):
        self.rounds.join(member, member.decode(), self.now, collects=collects)
        self.act()

    @rule(may_pull=st.booleans())
    def stream(self, may_pull: bool):
        self.may_pull = may_pull
        self.act()

    @rule(
        member=st.sampled_from([A, B, C]),
        event=st.sampled_from(["ready", "ack", "fail", "pulled", "pulled", "broken", "leave", "hear"]),
    )
    def member_event(self, member: bytes, event: str):
        told, pull = self.invited.get(member), self.pulls.get(member)
        if event == "leave":
            self.rounds.leave(member)
        elif event == "hear":
            self.rounds.heard(member, self.now)
        elif event in ("pulled", "broken"):
            if pull is not None and event == "pulled":
                self.rounds.ack(member, pull.attempt, pull.version)
            elif pull is not None:
                self.rounds.failed(member, pull.attempt, "y")
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

    @invariant()
    def whoever_lacks_the_version_is_on_its_way_to_it(self):
        for member in self.rounds.lacking():
            by_collective = not member.pulls and (self.going is not None or member.member_id in self.invited)
            assert by_collective or member.pulls, "nobody is forgotten"
            if member.pulls and self.may_pull and self.going is None:
                assert member.pull is not None or member.member_id in self.rounds.awaited


Chaos.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestChaos = Chaos.TestCase
