"""The publisher's state machine, driven by hand and by hypothesis. Deadline 12 s, ready 3 s, silence 6 s."""

from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from async_rl.weights.scheduler import (
    Action,
    DropAction,
    FinishAction,
    PrepareAction,
    PullAction,
    StartAction,
    SyncScheduler,
)
from tests.examples import examples

_T = TypeVar("_T")
A, B, C = b"a", b"b", b"c"


def rounds_with(*members: bytes, has_collective: bool = True) -> SyncScheduler:
    """Members that hold version -1; with a collective they are in it for the next."""
    scheduler = SyncScheduler(deadline_s=12, ready_s=3, silent_s=6)
    scheduler.publish(-1)
    for member in members:
        scheduler.join(member, ("", member.decode()), 0.0, can_collect=has_collective)
    pull_all(scheduler, 0.0)
    return scheduler


def pull_all(scheduler: SyncScheduler, now: float) -> list[bytes]:
    """Let everybody who is offered a pull succeed with it; who they were."""
    pulls = [action for action in scheduler.advance(now) if isinstance(action, PullAction)]
    for pull in pulls:
        scheduler.ack(pull.member_id, pull.attempt, pull.version)
    return [pull.member_id for pull in pulls]


def only(actions: Sequence[Action], kind: type[_T]) -> _T:
    """The one action, which is of this kind."""
    [action] = actions
    assert isinstance(action, kind)
    return action


def deliver(scheduler: SyncScheduler, version: int, *members: bytes, now: float = 0.0) -> StartAction:
    scheduler.publish(version)
    enter = only(scheduler.advance(now), PrepareAction)
    assert set(enter.member_ids) == set(members)
    for member in members:
        scheduler.mark_ready(member, enter.attempt)
    go = only(scheduler.advance(now), StartAction)
    scheduler.mark_sent(go.attempt, ok=True)
    for member in members:
        scheduler.ack(member, go.attempt, version)
    finish = only(scheduler.advance(now), FinishAction)
    assert finish == FinishAction(go.attempt, version, True)
    return go


def test_a_newcomer_pulls_and_is_in_the_collective_from_the_next_version_on():
    scheduler = rounds_with(A, B)
    assert [deliver(scheduler, version, A, B).build for version in range(3)] == [True, False, False]
    scheduler.join(C, ("", "c"), 0.0, can_collect=True)
    pull = only(scheduler.advance(0.0), PullAction)
    assert (pull.member_id, pull.version, pull.deadline) == (C, 2, 12.0)
    # While it pulls, the collective goes on without it.
    assert deliver(scheduler, 3, A, B).build is False
    # What it missed it pulls as well: nobody builds an epoch for one.
    scheduler.ack(C, pull.attempt, 2)
    assert pull_all(scheduler, 1.0) == [C]
    scheduler.publish(4)
    enter = only(scheduler.advance(1.0), PrepareAction)
    assert enter.member_ids == (A, B, C)


def test_members_beyond_the_limit_of_a_collective_pull_every_version():
    scheduler = SyncScheduler(deadline_s=12, ready_s=3, silent_s=6, max_ranks=3)
    scheduler.publish(-1)
    for member in (A, B, C):
        scheduler.join(member, ("", member.decode()), 0.0, can_collect=True, num_ranks=2 if member == B else 1)
    assert pull_all(scheduler, 0.0) == [A, B, C]  # newcomers do
    for version in range(2):
        scheduler.publish(version)
        # A has 1 rank and B 2; with C there would be 4.
        enter, pull = scheduler.advance(0.0)
        assert isinstance(enter, PrepareAction)
        assert enter.member_ids == (A, B)
        assert isinstance(pull, PullAction)
        assert pull.member_id == C
        scheduler.ack(C, pull.attempt, version)
        for member in (A, B):
            scheduler.mark_ready(member, enter.attempt)
        go = only(scheduler.advance(0.0), StartAction)
        assert (go.participants, go.build) == ((A, B), version == 0)
        scheduler.mark_sent(go.attempt, ok=True)
        for member in (A, B):
            scheduler.ack(member, go.attempt, version)
        only(scheduler.advance(0.0), FinishAction)
    # The place of a member that left is taken.
    scheduler.leave(B)
    scheduler.publish(2)
    assert only(scheduler.advance(0.0), PrepareAction).member_ids == (A, C)


def test_a_pull_goes_on_while_it_makes_progress():
    scheduler = rounds_with(A, has_collective=False)
    scheduler.publish(0)
    pull = only(scheduler.advance(0.0), PullAction)
    for now, pulled in ((5.0, 100), (16.0, 200), (27.0, 201)):
        scheduler.mark_seen(A, now)
        scheduler.mark_pulled(A, pull.attempt, pulled, now)
        assert scheduler.advance(now) == []
    # It breaks off, and is offered again at once, with the time that is left.
    scheduler.mark_failed(A, pull.attempt, "connection closed")
    again = only(scheduler.advance(30.0), PullAction)
    assert again.deadline == 39.0
    # No bytes are no progress, and neither are those of the pull before.
    for now, attempt, pulled in ((33.0, again.attempt, 0), (38.0, pull.attempt, 300)):
        scheduler.mark_seen(A, now)
        scheduler.mark_pulled(A, attempt, pulled, now)
        assert scheduler.advance(now) == []
    drop = only(scheduler.advance(39.0), DropAction)
    assert "weights.deadline_s" in drop.reason


def test_survivors_of_a_broken_epoch_pull_and_build_a_new_one_for_the_next_version():
    scheduler = rounds_with(A, B, C)
    scheduler.publish(0)
    enter = only(scheduler.advance(0.0), PrepareAction)
    for member in (A, B, C):
        scheduler.mark_ready(member, enter.attempt)
    go = only(scheduler.advance(0.0), StartAction)
    scheduler.ack(A, go.attempt, 0)
    scheduler.mark_failed(B, go.attempt, "connection closed")
    # B is fed at once, although the attempt is not over: C has not answered yet.
    pull = only(scheduler.advance(0.5), PullAction)
    assert (pull.member_id, pull.version) == (B, 0)
    scheduler.leave(C)
    scheduler.mark_sent(go.attempt, ok=False)
    assert only(scheduler.advance(1.0), FinishAction) == FinishAction(go.attempt, 0, False)
    scheduler.ack(B, pull.attempt, 0)
    again = deliver(scheduler, 1, A, B, now=1.0)
    assert (again.build, again.epoch) == (True, go.epoch + 1)


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


@pytest.mark.parametrize(
    ("of_a", "of_b", "num_old", "moved"),
    [
        # At 10 s A has pulled version 0 for 10 s, and B version 1 for 4 s. C asks for version 2.
        (100, 300, 1, [A]),  # 100 * 100 / 10 < 300 * 300 / 4
        (400, 50, 1, [B]),  # 400 * 400 / 10 > 50 * 50 / 4
        (100, 90, 1, [A]),  # 100 * 100 / 10 < 90 * 90 / 4: A has more, but it hardly moves
        (0, 1, 1, [A]),
        (0, 0, 1, [A]),  # the older one
        (400, 300, 0, [A, B]),
        (0, 0, 2, []),
    ],
)
def test_pulls_make_room_for_the_newest_version(of_a: int, of_b: int, num_old: int, moved: list[bytes]):
    scheduler = rounds_with(A, B, C, has_collective=False)
    scheduler._silent_s = scheduler._deadline_s = 60.0
    scheduler.publish(0)
    pulls = {one.member_id: one for one in scheduler.advance(0.0) if isinstance(one, PullAction)}
    for member in (B, C):
        scheduler.ack(member, pulls[member].attempt, 0)
    scheduler.publish(1)
    pulls |= {one.member_id: one for one in scheduler.advance(6.0) if isinstance(one, PullAction)}
    scheduler.ack(C, pulls[C].attempt, 1)
    for member, pulled in ((A, of_a), (B, of_b)):
        scheduler.mark_pulled(member, pulls[member].attempt, pulled, 9.0)
    # Nobody has to move while nobody asks for the version.
    scheduler.publish(2, num_old=num_old)
    assert scheduler.advance(10.0, lambda member: member.member_id != C) == []
    assert only(scheduler.advance(10.0), PullAction).member_id == C
    again = scheduler.advance(10.0)
    assert [(one.member_id, one.version) for one in again if isinstance(one, PullAction)] == [(m, 2) for m in moved]
    assert scheduler.advance(10.0) == []
    # Both have waited since their first offer, over all pulls. Only a newer version makes a pull slow.
    assert [(member.member_id, seconds) for member, seconds in scheduler.slow(10.5)] == [(A, 10.5)]
    assert [(member.member_id, seconds) for member, seconds in scheduler.slow(11.0)] == [(A, 11.0), (B, 5.0)]
    # The version that was moved may still be completed: its bytes were on their way.
    scheduler.ack(A, pulls[A].attempt, 0)
    assert [member.member_id for member, _ in scheduler.slow(11.0)] == [B]
    assert (scheduler.members[A].pull is None) == (A not in moved)
    assert (scheduler.members[A].offered_at is None) == (A not in moved)


def test_a_generator_that_comes_back_over_a_new_connection_replaces_its_old_self():
    scheduler = rounds_with(A)
    scheduler.join(B, ("", "a"), 1.0, can_collect=True)
    assert scheduler.advance(1.0)[0] == DropAction(A, "joined again over another connection")
    assert list(scheduler.members) == [B]


class Chaos(RuleBasedStateMachine):
    """Members join, leave, answer, fail or fall silent in any order; one simulated sender."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = SyncScheduler(deadline_s=12, ready_s=3, silent_s=6)
        self.now = 0.0
        self.version = -1
        self.started: StartAction | None = None
        self.entered_at: dict[bytes, float] = {}
        self.invited: dict[bytes, PrepareAction] = {}
        self.pulls: dict[bytes, PullAction] = {}
        self.can_pull, self.num_old = True, 1

    def act(self) -> None:
        for _ in range(20):
            actions = self.scheduler.advance(self.now, lambda _: self.can_pull)
            for action in actions:
                if isinstance(action, PullAction):
                    member = self.scheduler.members[action.member_id]
                    assert member.pull is action, "one pull at a time"
                    assert action.version == self.version
                    assert self.now < action.deadline <= self.now + 12
                    self.pulls[action.member_id] = action
                elif isinstance(action, PrepareAction):
                    assert self.started is None, "one attempt at a time"
                    for member in action.member_ids:
                        self.invited[member] = action
                elif isinstance(action, StartAction):
                    assert self.started is None
                    assert action.participants
                    assert self.now < action.deadline <= self.now + 12
                    self.started = action
                elif isinstance(action, FinishAction):
                    self.started = None
            if not actions:
                return
        pytest.fail("it never comes to rest")

    @rule(num_old=st.sampled_from([0, 1, 1, 2]))
    def publish(self, num_old: int):
        self.version += 1
        self.num_old = num_old
        self.scheduler.publish(self.version, num_old=num_old)
        self.act()

    @rule(member=st.sampled_from([A, B, C]), can_collect=st.sampled_from([True, True, False]))
    def join(self, member: bytes, can_collect: bool):
        self.scheduler.join(member, ("", member.decode()), self.now, can_collect=can_collect)
        self.act()

    @rule(can_pull=st.booleans())
    def stream(self, can_pull: bool):
        self.can_pull = can_pull
        self.act()

    @rule(
        member=st.sampled_from([A, B, C]),
        event=st.sampled_from(["ready", "ack", "fail", "pulled", "pulled", "broken", "leave", "heartbeat"]),
    )
    def member_event(self, member: bytes, event: str):
        invitation, pull = self.invited.get(member), self.pulls.get(member)
        if event == "leave":
            self.scheduler.leave(member)
        elif event == "heartbeat":
            self.scheduler.mark_seen(member, self.now)
        elif event in ("pulled", "broken"):
            if pull is not None and event == "pulled":
                self.scheduler.ack(member, pull.attempt, pull.version)
            elif pull is not None:
                self.scheduler.mark_failed(member, pull.attempt, "y")
        elif invitation is not None and event == "ready":
            self.scheduler.mark_ready(member, invitation.attempt)
        elif invitation is not None and event == "ack":
            self.scheduler.ack(member, invitation.attempt, invitation.version)
        elif invitation is not None:
            self.scheduler.mark_failed(member, invitation.attempt, "x")
        self.act()

    @rule(member=st.sampled_from([A, B, C]), num_bytes=st.sampled_from([0, 1, 100, 10**12]))
    def bytes_were_sent(self, member: bytes, num_bytes: int):
        if member in self.pulls:
            self.scheduler.mark_pulled(member, self.pulls[member].attempt, num_bytes, self.now)

    @precondition(lambda self: self.started is not None)
    @rule(ok=st.booleans())
    def sent(self, ok: bool):
        assert self.started is not None
        self.scheduler.mark_sent(self.started.attempt, ok=ok)
        self.act()

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.0]))
    def pass_time(self, seconds: float):
        self.now += seconds
        if self.started is not None and self.now > self.started.deadline:
            self.scheduler.mark_sent(self.started.attempt, ok=False)
        self.act()

    @invariant()
    def nobody_silent_or_overdue_is_waited_for(self):
        for member in self.scheduler.awaited:
            state = self.scheduler.members[member]
            assert self.now - state.last_seen <= 6
            assert state.offered_at is not None
            assert self.now < state.offered_at + 12

    @invariant()
    def whoever_lacks_the_version_is_on_its_way_to_it(self):
        for member in self.scheduler.outdated():
            by_collective = not member.pulls and (self.started is not None or member.member_id in self.invited)
            assert by_collective or member.pulls, "nobody is forgotten"
            if member.pulls and self.can_pull and self.started is None:
                assert member.pull is not None or member.member_id in self.scheduler.awaited

    @invariant()
    def no_pull_keeps_the_newest_version_from_anybody(self):
        """Whoever asks is offered it (``act``, and above), and older versions leave it the room."""
        pulled = {m.pull.version for m in self.scheduler.members.values() if m.pull is not None}
        if self.version in pulled:
            assert len(pulled) <= 1 + self.num_old


Chaos.TestCase.settings = examples(150, stateful_step_count=40)
TestChaos = Chaos.TestCase
