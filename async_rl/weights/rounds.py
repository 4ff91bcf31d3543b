"""Who receives which version, when, and with whom: a pure state machine (no sockets, no threads, no clock).

The publisher feeds it what happened and does what ``advance`` returns. One attempt at a time: the members that lack
the wanted version are told to *enter*; when all are ready (or after ``ready_s``, without the others) it *goes*; it is
*finished* when the sender is done and every participant has answered or is lost. Whoever lacks the version after that
is in the next attempt. A communicator (an epoch) is kept while attempts succeed with the same participants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MAX_FAILURES = 3


@dataclass(frozen=True, slots=True)
class EnterAction:
    """Tell ``member_ids`` to make room for ``version``. ``first`` is False for those who come late to an attempt."""

    attempt: int
    version: int
    member_ids: tuple[bytes, ...]
    first: bool


@dataclass(frozen=True, slots=True)
class GoAction:
    """Send ``version`` to ``participants`` (rank 1, 2, ...) until ``deadline``; ``build`` a communicator first?"""

    attempt: int
    version: int
    epoch: int
    build: bool
    participants: tuple[bytes, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class FinishAction:
    """The attempt at ``version`` is over. ``intact``: the communicator, if there is one, can be used again."""

    attempt: int
    version: int
    intact: bool


@dataclass(frozen=True, slots=True)
class DropAction:
    """This member is none any more."""

    member_id: bytes
    reason: str


Action = EnterAction | GoAction | FinishAction | DropAction


@dataclass(slots=True)
class Member:
    """One receiver. ``version`` is what it proved to hold; ``entered`` when it was first told of one it still lacks.

    An unresponsive member did not get ready in time: attempts go on without it until it does, or is overdue.
    """

    member_id: bytes
    generator_id: str
    heard: float
    version: int | None = None
    entered: float | None = None
    responsive: bool = True
    num_failures: int = 0
    last_failure: str = ""


class Rounds:
    """Membership and attempts. Times are seconds of one monotonic clock.

    Args:
        deadline_s: a member that has not got a version so long after it was first told of one is dropped.
        ready_s: how long an attempt waits for members to be ready.
        silent_s: a member that was not heard of for so long is dropped.
    """

    def __init__(self, *, deadline_s: float, ready_s: float, silent_s: float) -> None:
        self._deadline_s = deadline_s
        self._ready_s = ready_s
        self._silent_s = silent_s
        self.members: dict[bytes, Member] = {}
        self.wanted: int | None = None
        self._phase: Literal["idle", "entering", "sending"] = "idle"
        self._attempt = 0
        self._version = -1
        self._invited: set[bytes] = set()
        self._ready: set[bytes] = set()
        self._told_at = 0.0
        self._epoch = 0
        self._communicator: tuple[bytes, ...] | None = None
        self._outstanding: set[bytes] = set()
        self._sender_done = True
        self._drops: list[DropAction] = []

    def publish(self, version: int | None) -> None:
        """From now on every member shall have this version (None: no version can be sent at present)."""
        self.wanted = version

    def join(self, member_id: bytes, generator_id: str, now: float) -> None:
        """A receiver came (again). An older connection of the same generator is dropped."""
        for other in [m for m in self.members.values() if m.generator_id == generator_id]:
            if other.member_id != member_id:
                self._drop(other.member_id, "joined again over another connection")
        if member_id in self.members:
            self.leave(member_id)
        self.members[member_id] = Member(member_id, generator_id, now)

    def leave(self, member_id: bytes) -> None:
        """A member said good-bye, or its connection is gone."""
        if self.members.pop(member_id, None) is None:
            return
        self._answered(member_id)
        if self._communicator is not None and member_id in self._communicator:
            self._communicator = None

    def heard(self, member_id: bytes, now: float) -> bool:
        """A sign of life; whether it is from a member."""
        member = self.members.get(member_id)
        if member is not None:
            member.heard = now
        return member is not None

    def ready(self, member_id: bytes, attempt: int) -> None:
        """The member made room. One that was late before is asked again."""
        member = self.members.get(member_id)
        if member is None:
            return
        member.responsive = True
        if self._phase == "entering" and attempt == self._attempt and member_id in self._invited:
            self._ready.add(member_id)

    def ack(self, member_id: bytes, attempt: int, version: int) -> None:
        """The member proved that it holds ``version``."""
        member = self.members.get(member_id)
        if member is None:
            return
        member.version = version
        member.responsive = True
        member.num_failures = 0
        if attempt == self._attempt:
            self._answered(member_id)
        if member_id not in self._invited | self._outstanding:
            member.entered = None

    def failed(self, member_id: bytes, attempt: int, reason: str) -> None:
        """The member did not get what was sent in this attempt."""
        member = self.members.get(member_id)
        if member is None:
            return
        member.num_failures += 1
        member.last_failure = reason
        if attempt == self._attempt:
            self._answered(member_id)
            self._communicator = None
        if member.num_failures >= MAX_FAILURES:
            self._drop(member_id, f"failed {member.num_failures} times in a row, at last: {reason}")

    def sent(self, attempt: int, *, ok: bool) -> None:
        """The sender is done with this attempt, well or not."""
        if attempt == self._attempt and self._phase == "sending":
            self._sender_done = True
            if not ok:
                self._communicator = None

    def advance(self, now: float) -> list[Action]:
        """What to do now, in order."""
        self._drop_silent_and_overdue(now)
        actions: list[Action] = [*self._drops]
        self._drops.clear()
        if self._phase == "sending" and self._sender_done and not self._outstanding:
            actions.append(self._finish())
        if self._phase == "entering":
            actions += self._advance_entering(now)
        if self._phase == "idle":
            actions += self._begin(now)
        return actions

    def lacking(self) -> list[Member]:
        """Members without the wanted version."""
        return [m for m in self.members.values() if self.wanted is not None and m.version != self.wanted]

    @property
    def sending(self) -> bool:
        """Whether an attempt is between its go and its finish."""
        return self._phase == "sending"

    @property
    def awaited(self) -> set[bytes]:
        """Members whose answer the attempt waits for now."""
        return set(self._outstanding) if self._phase == "sending" else self._invited - self._ready

    def _begin(self, now: float) -> list[Action]:
        invited = [m for m in self.lacking() if m.responsive]
        if not invited or self.wanted is None:
            return []
        self._attempt += 1
        self._version = self.wanted
        self._phase = "entering"
        self._told_at = now
        self._ready.clear()
        self._invited.clear()
        return [self._invite(invited, now, first=True)]

    def _invite(self, members: Sequence[Member], now: float, *, first: bool) -> EnterAction:
        for member in members:
            self._invited.add(member.member_id)
            if member.entered is None:
                member.entered = now
        return EnterAction(self._attempt, self._version, tuple(m.member_id for m in members), first)

    def _advance_entering(self, now: float) -> list[Action]:
        if self.wanted != self._version or not self._invited:
            return [self._finish()]
        actions: list[Action] = []
        late = [m for m in self.lacking() if m.responsive and m.member_id not in self._invited]
        untried = [m for m in late if m.num_failures == 0]
        if untried:
            actions.append(self._invite(untried, now, first=False))
        waiting = self._invited - self._ready
        if waiting and now < self._told_at + self._ready_s:
            return actions
        for member_id in waiting:
            self.members[member_id].responsive = False
        return [*actions, self._go(now) if self._ready else self._finish()]

    def _go(self, now: float) -> GoAction:
        participants = tuple(sorted(self._ready))
        build = self._communicator != participants
        if build:
            self._epoch += 1
            self._communicator = participants
        self._phase = "sending"
        self._invited.clear()
        self._outstanding = set(participants)
        self._sender_done = False
        # The newest participant's: one that is nearly overdue must not cut the attempt short for the others.
        deadline = max(self._overdue_at(self.members[member_id]) for member_id in participants)
        return GoAction(self._attempt, self._version, self._epoch, build, participants, deadline)

    def _finish(self) -> FinishAction:
        self._phase = "idle"
        self._invited.clear()
        self._ready.clear()
        return FinishAction(self._attempt, self._version, self._communicator is not None)

    def _answered(self, member_id: bytes) -> None:
        self._invited.discard(member_id)
        self._ready.discard(member_id)
        self._outstanding.discard(member_id)

    def _overdue_at(self, member: Member) -> float:
        return float("inf") if member.entered is None else member.entered + self._deadline_s

    def _drop_silent_and_overdue(self, now: float) -> None:
        for member in list(self.members.values()):
            if now - member.heard > self._silent_s:
                self._drop(member.member_id, f"silent for {now - member.heard:.1f} s")
            elif now >= self._overdue_at(member):
                why = f", at last: {member.last_failure}" if member.last_failure else ""
                self._drop(member.member_id, f"no version within {self._deadline_s:.1f} s (weights.deadline_s){why}")

    def _drop(self, member_id: bytes, reason: str) -> None:
        if member_id in self.members:
            self.leave(member_id)
            self._drops.append(DropAction(member_id, reason))
