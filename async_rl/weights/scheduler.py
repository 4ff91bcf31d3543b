"""Who receives which version, when, how, and with whom: a pure state machine (no sockets, no threads, no clock).

The publisher feeds it what happened and does what ``advance`` returns. A member takes one of two ways to the wanted
version. *Collective*: one attempt at a time; the members that lack it are told to *enter*; when all are ready (or
after ``ready_s``, without the others) it *goes*; it is *finished* when the sender is done and every participant has
answered or is lost. A communicator (an epoch) is kept while attempts succeed with the same participants. By its
acknowledgement each of them is ready for the next: where all are heard of, that *goes* at once. *Stream*: a
*pull* for each member by itself, as long as it takes it.

With a collective a member still begins by the stream: whoever is new, was late, or was in an attempt that failed pulls
what it lacks, and is in the collective again for the next version. Without one everybody pulls everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

MAX_FAILURES = 3
_REST_VERSIONS = 32


@dataclass(frozen=True, slots=True)
class EnterAction:
    """Tell ``member_ids`` to make room for ``version``."""

    attempt: int
    version: int
    member_ids: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class GoAction:
    """Send ``version`` to ``participants`` (rank 1, 2, ...) until ``deadline``; ``build`` a communicator first?

    ``is_first``: they were told of nothing yet.
    """

    attempt: int
    version: int
    epoch: int
    build: bool
    participants: tuple[bytes, ...]
    deadline: float
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class FinishAction:
    """The attempt at ``version`` is over. ``intact``: the communicator, if there is one, can be used again."""

    attempt: int
    version: int
    intact: bool


@dataclass(frozen=True, slots=True)
class PullAction:
    """Let this member pull ``version`` until ``deadline``; it is over when the member has no such pull any more."""

    attempt: int
    version: int
    member_id: bytes
    deadline: float


@dataclass(frozen=True, slots=True)
class DropAction:
    """This member is none any more."""

    member_id: bytes
    reason: str


Action = EnterAction | GoAction | FinishAction | PullAction | DropAction


@dataclass(slots=True)
class Member:
    """One receiver. ``version`` is what it proved to hold; ``entered`` when it was first told of one it still lacks.

    ``digest`` is of the newest weights that it is known to hold, perhaps of no version of ours. ``collects``: it can
    take part in collectives. ``pulls``: it gets the next version by the stream; ``pull`` is the one under way.
    """

    member_id: bytes
    generator_id: str
    heard: float
    collects: bool
    digest: str = ""
    version: int | None = None
    entered: float | None = None
    pulls: bool = True
    pull: PullAction | None = None
    num_failures: int = 0
    num_broken: int = 0
    rests_until: int = 0
    last_failure: str = ""


def _always(_: Member) -> bool:
    return True


class Rounds:
    """Membership, attempts and pulls. Times are seconds of one monotonic clock.

    Args:
        deadline_s: a member that has not got a version so long after it was first told of one is dropped.
        ready_s: how long an attempt waits for members to be ready.
        silent_s: a member that was not heard of for so long is dropped.
        fresh_s: one that was heard of so shortly ago is as ready as it last said; None: ask every time.
    """

    def __init__(self, *, deadline_s: float, ready_s: float, silent_s: float, fresh_s: float | None = None) -> None:
        self._deadline_s = deadline_s
        self._ready_s = ready_s
        self._silent_s = silent_s
        self._fresh_s = fresh_s
        self.members: dict[bytes, Member] = {}
        self.wanted: int | None = None
        self._num_wanted = 0
        self._phase: Literal["idle", "entering", "sending"] = "idle"
        self._last_attempt = 0
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
        self._num_wanted += version is not None

    def join(self, member_id: bytes, generator_id: str, now: float, *, collects: bool, digest: str = "") -> None:
        """A receiver came (again). An older connection of the same generator is dropped."""
        for other in [m for m in self.members.values() if m.generator_id == generator_id]:
            if other.member_id != member_id:
                self._drop(other.member_id, "joined again over another connection")
        if member_id in self.members:
            self.leave(member_id)
        self.members[member_id] = Member(member_id, generator_id, now, collects, digest)

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
        """The member made room."""
        if self._phase == "entering" and attempt == self._attempt and member_id in self._invited:
            self._ready.add(member_id)

    def ack(self, member_id: bytes, attempt: int, version: int, digest: str = "") -> None:
        """The member proved that it holds ``version``."""
        member = self.members.get(member_id)
        if member is None:
            return
        member.version, member.digest = version, digest
        member.num_failures = 0
        if member.pull is not None and member.pull.attempt == attempt:
            member.pull = None
            # In the collective from the next version on. Who has not caught up with this one pulls again.
            caught_up = version == self.wanted and self._num_wanted >= member.rests_until
            member.pulls = not (member.collects and caught_up)
        elif attempt == self._attempt:
            member.num_broken = 0
            self._answered(member_id)
        if member_id not in self._invited | self._outstanding:
            member.entered = None

    def failed(self, member_id: bytes, attempt: int, reason: str) -> None:
        """The member did not get what was sent in this attempt, or what it pulled."""
        member = self.members.get(member_id)
        if member is None:
            return
        member.last_failure = reason
        if member.pull is not None and member.pull.attempt == attempt:
            member.pull = None
            member.num_failures += 1
            if member.num_failures >= MAX_FAILURES:
                self._drop(member_id, f"failed {member.num_failures} times in a row, at last: {reason}")
        elif attempt == self._attempt:
            self._answered(member_id)
            self._communicator = None
            self._by_stream(member)

    def void(self, member_id: bytes) -> None:
        """The pull that was asked for could not be offered; it counts as none."""
        if member_id in self.members:
            member = self.members[member_id]
            member.pull = member.entered = None

    def withdraw(self, attempt: int) -> None:
        """What was to go at once can't be sent; nobody was told of it."""
        if attempt == self._attempt:
            self._outstanding.clear()
            self._sender_done = True

    def sent(self, attempt: int, *, ok: bool) -> None:
        """The sender is done with this attempt, well or not."""
        if attempt == self._attempt and self._phase == "sending":
            self._sender_done = True
            if not ok:
                self._communicator = None

    def advance(self, now: float, may_pull: Callable[[Member], bool] = _always) -> list[Action]:
        """What to do now, in order. ``may_pull``: whether a pull of the wanted version can be offered at once."""
        self._drop_silent_and_overdue(now)
        actions: list[Action] = [*self._drops]
        self._drops.clear()
        if self._phase == "sending" and self._sender_done and not self._outstanding:
            actions.append(self._finish())
        if self._phase == "entering":
            actions += self._advance_entering(now)
        if self._phase == "idle":
            actions += self._begin(now)
        return actions + self._offer_pulls(now, may_pull)

    def lacking(self) -> list[Member]:
        """Members without the wanted version."""
        return [m for m in self.members.values() if self.wanted is not None and m.version != self.wanted]

    def collecting(self) -> list[Member]:
        """Members that lack the wanted version and get it by the collective."""
        return [m for m in self.lacking() if not m.pulls]

    @property
    def sending(self) -> bool:
        """Whether an attempt is between its go and its finish."""
        return self._phase == "sending"

    @property
    def awaited(self) -> set[bytes]:
        """Members whose answer is waited for now."""
        pulling = {m.member_id for m in self.members.values() if m.pull is not None}
        return pulling | (self._outstanding if self._phase == "sending" else self._invited - self._ready)

    def _offer_pulls(self, now: float, may_pull: Callable[[Member], bool]) -> list[Action]:
        actions: list[Action] = []
        for member in self.lacking():
            # Whoever is still in an attempt answers that first.
            busy = member.pull is not None or member.member_id in self._invited | self._outstanding
            if not member.pulls or busy or not may_pull(member):
                continue
            assert self.wanted is not None
            self._last_attempt += 1
            # A member that came here by a broken attempt keeps the deadline that began with it.
            member.entered = now if member.entered is None else member.entered
            member.pull = PullAction(self._last_attempt, self.wanted, member.member_id, self._overdue_at(member))
            actions.append(member.pull)
        return actions

    def _begin(self, now: float) -> list[Action]:
        invited = self.collecting()
        if not invited or self.wanted is None:
            return []
        self._last_attempt += 1
        self._attempt = self._last_attempt
        self._version = self.wanted
        self._phase = "entering"
        self._told_at = now
        self._ready.clear()
        self._invited = {member.member_id for member in invited}
        for member in invited:
            if member.entered is None:
                member.entered = now
        if self._are_ready(invited, now):
            self._ready |= self._invited
            return [replace(self._go(now), is_first=True)]
        return [EnterAction(self._attempt, self._version, tuple(m.member_id for m in invited))]

    def _are_ready(self, members: Sequence[Member], now: float) -> bool:
        """Whether all have said so already: their communicator is as they left it, and they were heard of since."""
        if self._fresh_s is None or self._communicator != tuple(sorted(m.member_id for m in members)):
            return False
        return all(now - member.heard <= self._fresh_s for member in members)

    def _advance_entering(self, now: float) -> list[Action]:
        if self.wanted != self._version or not self._invited:
            return [self._finish()]
        waiting = self._invited - self._ready
        if waiting and now < self._told_at + self._ready_s:
            return []
        for member_id in waiting:
            self._invited.discard(member_id)
            self._by_stream(self.members[member_id])
        return [self._go(now) if self._ready else self._finish()]

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

    def _by_stream(self, member: Member) -> None:
        """It pulls this version; one that the collective fails again and again stays with the stream for a while."""
        member.pulls = True
        member.num_broken += 1
        if member.num_broken >= MAX_FAILURES:
            member.num_broken = 0
            member.rests_until = self._num_wanted + _REST_VERSIONS

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
