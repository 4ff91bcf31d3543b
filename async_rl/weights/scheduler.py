"""Decides which members receive which version of the weights, when, and by which transport.

A member is a generator that joined the weights channel. The publisher reports events to ``SyncScheduler`` (``join``,
``ack``, ...) and carries out the actions that ``advance`` returns. The code here is pure: it has no sockets, threads
or clock. A member gets the wanted version in one of two ways:

- *Collective.* The learner broadcasts the version to several members at once. There is one attempt at a time.
  ``PrepareAction`` asks the members that need the version to prepare. ``StartAction`` starts the broadcast when all are
  ready, or after ``ready_s`` with those that are. ``FinishAction`` ends the attempt when the sender has finished and
  every participant has answered or is gone. The communicator (its number is the *epoch*) is kept while attempts succeed
  with the same participants. An acknowledgement also means that the member is ready for the next attempt, so that
  attempt starts without ``PrepareAction``.
- *Pull.* ``PullAction`` offers the version to one member, which fetches it independently of the others.

In a run with a collective, a member pulls its first version. It also pulls a version that it was too slow for, or whose
attempt failed. From the next version on it takes part in the collective again. In a run without a collective, members
pull every version.

A pull keeps its version as long as bytes are sent, until another member needs the room: beside the newest version, only
``num_old`` older ones may be pulled when it is offered. Then the pulls of the others end, and their members are offered
the newest version, too. Those that have got most bytes stay, weighted with their rate: a fast pull that began lately
stays before one that began early and hardly moves. So no pull keeps the newest version from any other member.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

MAX_FAILURES = 3
PULLED_VERSIONS = 32
"""Versions that a member pulls after ``MAX_FAILURES`` broken collectives in a row."""
SLOW_S = 5.0
"""A member that has waited longer for a version, while newer ones came, is slow."""
_YOUNG_S = 0.5
"""A pull without bytes counts as fast for so long: it may be too short to be measured."""


@dataclass(frozen=True, slots=True)
class PrepareAction:
    """Instructs the publisher to ask ``member_ids`` to allocate memory for ``version``, because a collective will bring
    it.
    """

    attempt: int
    version: int
    member_ids: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StartAction:
    """Instructs the publisher to broadcast ``version`` to ``participants``.

    Attributes:
        attempt: number of the attempt.
        version: number of the version.
        epoch: number of the communicator.
        build: create the communicator first.
        participants: member ids. Their ranks are 1, 2, ...
        deadline: when the attempt must have ended, in seconds of the scheduler's clock.
    """

    attempt: int
    version: int
    epoch: int
    build: bool
    participants: tuple[bytes, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class FinishAction:
    """Tells the publisher that the attempt to broadcast ``version`` is over.

    ``intact`` is true if there is a communicator that can be used again.
    """

    attempt: int
    version: int
    intact: bool


@dataclass(frozen=True, slots=True)
class PullAction:
    """Instructs the publisher to offer ``version`` to one member, which may pull it until ``deadline``.

    The pull is in progress as long as the member's ``Member.pull`` is this object.
    """

    attempt: int
    version: int
    member_id: bytes
    deadline: float


@dataclass(frozen=True, slots=True)
class DropAction:
    """Instructs the publisher to tell a generator that it is no longer a member, and for what ``reason``."""

    member_id: bytes
    reason: str


Action = PrepareAction | StartAction | FinishAction | PullAction | DropAction


@dataclass(slots=True)
class Member:
    """A generator that joined the weights channel.

    Attributes:
        member_id: identity of its connection to the publisher's socket.
        generator: the generator's client key and its id at the queue. Without keys the key is empty.
        last_seen: time of its last message.
        can_collect: whether it can take part in collectives.
        num_ranks: number of its ranks in collectives.
        devices: ids of the CUDA devices of its ranks.
        host: the address at which other generators reach it.
        peer_port: the port at which it serves weights to other generators. 0: it serves none.
        digest: digest of the newest weights that it is known to hold, perhaps from an earlier learner. Empty if
            unknown.
        version: the version that it has acknowledged last. None before that.
        offered_at: when it was first offered a version that it still needs, or when its pull last made progress. None
            if no offer is open.
        pulls: whether it gets its next version by a pull.
        pull: the pull in progress. None if there is none.
        pull_began: when that pull was offered.
        pulled_bytes: bytes of it that were sent to the member.
        lacks: the version that it was first offered by a pull since it got one, and when. None if it was not.
        lost_bytes: bytes of its earlier pulls since then.
        num_failures: failed pulls in a row, without progress between them.
        num_broken_collectives: failed collectives in a row.
        pulls_until: the member only pulls until this many versions have been published.
        last_failure: why its last transfer failed. Empty if none failed.
    """

    member_id: bytes
    generator: tuple[str, str]
    last_seen: float
    can_collect: bool
    num_ranks: int = 1
    devices: tuple[str, ...] = ()
    host: str = ""
    peer_port: int = 0
    digest: str = ""
    version: int | None = None
    offered_at: float | None = None
    pulls: bool = True
    pull: PullAction | None = None
    pull_began: float = 0.0
    pulled_bytes: int = 0
    lacks: tuple[int, float] | None = None
    lost_bytes: int = 0
    num_failures: int = 0
    num_broken_collectives: int = 0
    pulls_until: int = 0
    last_failure: str = ""

    def weight(self, now: float) -> float:
        """Return how much its pull deserves to go on: the bytes that it has got, times their rate."""
        if not self.pulled_bytes:
            return math.inf if now - self.pull_began < _YOUNG_S else 0.0
        return self.pulled_bytes**2 / max(now - self.pull_began, 1e-3)


def _always(_: Member) -> bool:
    return True


class SyncScheduler:
    """Keeps the members, the collective attempt and the pulls in progress. Times are seconds of one monotonic clock.

    Args:
        deadline_s: drop a member that has not got a version this long after the first offer, or after the last progress
            of its pull.
        ready_s: how long an attempt waits for members to be ready.
        silent_s: drop a member that has sent nothing for this long.
        max_ranks: most ranks of members in one collective. The members that joined last pull instead. None: no limit.
    """

    def __init__(self, *, deadline_s: float, ready_s: float, silent_s: float, max_ranks: int | None = None) -> None:
        self._deadline_s = deadline_s
        self._ready_s = ready_s
        self._silent_s = silent_s
        self._max_ranks = max_ranks
        self.members: dict[bytes, Member] = {}
        self.wanted: int | None = None
        self._num_old = 1
        self._num_published = 0
        self._phase: Literal["idle", "preparing", "sending"] = "idle"
        self._last_attempt = 0
        self._attempt = 0
        self._version = -1
        self._invited: set[bytes] = set()
        self._ready: set[bytes] = set()
        self._prepared_at = 0.0
        self._epoch = 0
        self._communicator: tuple[bytes, ...] | None = None
        self._unanswered: set[bytes] = set()
        self._is_sent = True
        self._drops: list[DropAction] = []

    def publish(self, version: int | None, *, num_old: int = 1) -> None:
        """Make ``version`` the one that every member wants. None: no version can be sent at present.

        ``num_old`` is the number of older versions that members may go on pulling while others pull this one.
        """
        self.wanted, self._num_old = version, num_old
        self._num_published += version is not None

    def join(
        self,
        member_id: bytes,
        generator: tuple[str, str],
        now: float,
        *,
        can_collect: bool,
        num_ranks: int = 1,
        devices: Sequence[str] = (),
        digest: str = "",
        host: str = "",
        peer_port: int = 0,
    ) -> None:
        """Add a member, or replace the entry of a member that joins again. Drop an older connection of the same
        generator. With keys, one that joins under another generator's id drops nobody.
        """
        for other in [m for m in self.members.values() if m.generator == generator]:
            if other.member_id != member_id:
                self.drop(other.member_id, "joined again over another connection")
        if member_id in self.members:
            self.leave(member_id)
        self.members[member_id] = Member(
            member_id, generator, now, can_collect, num_ranks, tuple(devices), host, peer_port, digest
        )

    def leave(self, member_id: bytes) -> None:
        """Remove a member that left, or whose connection is gone."""
        if self.members.pop(member_id, None) is None:
            return
        self._mark_answered(member_id)
        if self._communicator is not None and member_id in self._communicator:
            self._communicator = None

    def drop(self, member_id: bytes, reason: str) -> None:
        """Remove a member, and tell it why (``DropAction``). Its pull ends, and no later collective includes it."""
        if member_id in self.members:
            self.leave(member_id)
            self._drops.append(DropAction(member_id, reason))

    def mark_seen(self, member_id: bytes, now: float) -> bool:
        """Record that this sender's message came at ``now``. Return whether the sender is a member."""
        member = self.members.get(member_id)
        if member is not None:
            member.last_seen = now
        return member is not None

    def mark_pulled(self, member_id: bytes, attempt: int, pulled_bytes: int, now: float) -> None:
        """Record how many bytes of a pull were sent to its member. Progress moves the member's deadline.

        A slow network then delays a large version, and does not shut the member out. Other members and ``publish`` do
        not wait for a pull; it only keeps its version in memory, unless others need the room.
        """
        member = self.members.get(member_id)
        if member is None or member.pull is None or member.pull.attempt != attempt:
            return
        if pulled_bytes > member.pulled_bytes:
            member.pulled_bytes = pulled_bytes
            member.offered_at, member.num_failures = now, 0

    def mark_ready(self, member_id: bytes, attempt: int) -> None:
        """Record that the member has allocated memory for the attempt."""
        if self._phase == "preparing" and attempt == self._attempt and member_id in self._invited:
            self._ready.add(member_id)

    def ack(self, member_id: bytes, attempt: int, version: int, digest: str = "") -> None:
        """Record that the member holds ``version``, as the digest in its answer proved. ``digest`` is that of the
        weights.
        """
        member = self.members.get(member_id)
        if member is None:
            return
        member.version, member.digest = version, digest
        member.num_failures = member.lost_bytes = member.pulled_bytes = 0
        member.lacks = None
        if member.pull is not None and member.pull.attempt == attempt:
            member.pull = None
            # It takes part in the collective from the next version on, unless a newer version came meanwhile.
            is_current = version == self.wanted and self._num_published >= member.pulls_until
            member.pulls = not (member.can_collect and is_current)
        elif attempt == self._attempt:
            member.num_broken_collectives = 0
            self._mark_answered(member_id)
        if member_id not in self._invited | self._unanswered and member.pull is None:
            member.offered_at = None

    def mark_failed(self, member_id: bytes, attempt: int, reason: str) -> bool:
        """Record that an attempt to send the new version to the member has failed. ``attempt`` names a collective or a
        pull. Return whether the member has missed so many collectives that it now pulls ``PULLED_VERSIONS``.
        """
        member = self.members.get(member_id)
        if member is None:
            return False
        member.last_failure = reason
        if member.pull is not None and member.pull.attempt == attempt:
            member.pull = None
            member.num_failures += 1
            if member.num_failures >= MAX_FAILURES:
                self.drop(member_id, f"failed {member.num_failures} times in a row, at last: {reason}")
        elif attempt == self._attempt:
            self._mark_answered(member_id)
            self._communicator = None
            return self._use_pull(member)
        return False

    def cancel_pull(self, member_id: bytes) -> None:
        """Withdraw a ``PullAction`` that the publisher could not carry out. The member does not know of the pull."""
        if member_id in self.members:
            member = self.members[member_id]
            member.pull = member.offered_at = None

    def mark_sent(self, attempt: int, *, ok: bool) -> None:
        """Record that the learner's own part of this attempt has ended. ``ok`` is false if the broadcast failed."""
        if attempt == self._attempt and self._phase == "sending":
            self._is_sent = True
            if not ok:
                self._communicator = None

    def advance(
        self, now: float, can_pull: Callable[[Member], bool] = _always, *, can_collect: bool = True
    ) -> list[Action]:
        """Return the actions that the publisher must carry out now, in this order.

        ``can_pull`` tells whether a member can be offered the wanted version by a pull now. ``can_collect`` tells
        whether a collective can begin now. If not, members that do not take part in one yet pull the wanted version.
        """
        self._drop_silent_and_overdue(now)
        if not can_collect and self._phase == "idle":
            for member in self.awaiting_collective():
                member.pulls = True
        actions: list[Action] = [*self._drops]
        self._drops.clear()
        if self._phase == "sending" and self._is_sent and not self._unanswered:
            actions.append(self._finish())
        if self._phase == "preparing":
            actions += self._advance_preparing(now)
        if self._phase == "idle":
            actions += self._begin(now)
        return actions + self._offer_pulls(now, can_pull)

    def outdated(self) -> list[Member]:
        """Return the members that do not hold the wanted version."""
        return [m for m in self.members.values() if self.wanted is not None and m.version != self.wanted]

    def slow(self, now: float) -> list[tuple[Member, float]]:
        """Return the members that pull more slowly than versions come, and how long they have got none, in seconds."""
        lacking = [(m, *m.lacks) for m in self.members.values() if m.lacks is not None]
        return [(m, now - since) for m, first, since in lacking if first != self.wanted and now - since >= SLOW_S]

    def awaiting_collective(self) -> list[Member]:
        """Return the members that do not hold the wanted version and will get it by a collective."""
        return [m for m in self.outdated() if not m.pulls]

    @property
    def is_sending(self) -> bool:
        """Whether a broadcast has started and not all its participants have answered."""
        return self._phase == "sending"

    @property
    def awaited(self) -> set[bytes]:
        """Ids of the members that must still answer a pull, or a message of the present attempt."""
        pulling = {m.member_id for m in self.members.values() if m.pull is not None}
        return pulling | (self._unanswered if self._phase == "sending" else self._invited - self._ready)

    def _offer_pulls(self, now: float, can_pull: Callable[[Member], bool]) -> list[Action]:
        actions: list[Action] = []
        for member in self.outdated():
            # A member that is in an attempt answers that first.
            busy = member.pull is not None or member.member_id in self._invited | self._unanswered
            if not member.pulls or busy or not can_pull(member):
                continue
            assert self.wanted is not None
            self._last_attempt += 1
            # A member whose attempt failed keeps the deadline of that attempt.
            member.offered_at = now if member.offered_at is None else member.offered_at
            member.pull = PullAction(self._last_attempt, self.wanted, member.member_id, self._overdue_at(member))
            member.lost_bytes, member.pulled_bytes = member.lost_bytes + member.pulled_bytes, 0
            member.pull_began = now
            member.lacks = member.lacks or (self.wanted, now)
            actions.append(member.pull)
        if actions:
            self._move_slowest(now)
        return actions

    def _move_slowest(self, now: float) -> None:
        """End the pulls of all older versions but ``num_old``. ``advance`` then offers the newest to their members."""
        pulls = [(m.pull.version, m) for m in self.members.values() if m.pull and m.pull.version != self.wanted]
        kept: set[int] = set()
        for version, member in sorted(pulls, key=lambda one: (one[1].weight(now), one[0]), reverse=True):
            if len(kept) < self._num_old:
                kept.add(version)
            if version not in kept:
                member.pull = None

    def _begin(self, now: float) -> list[Action]:
        invited = self._within_limit(self.awaiting_collective())
        if not invited or self.wanted is None:
            return []
        self._last_attempt += 1
        self._attempt = self._last_attempt
        self._version = self.wanted
        self._phase = "preparing"
        self._prepared_at = now
        self._ready.clear()
        self._invited = {member.member_id for member in invited}
        for member in invited:
            if member.offered_at is None:
                member.offered_at = now
        return [PrepareAction(self._attempt, self._version, tuple(m.member_id for m in invited))]

    def _within_limit(self, members: Sequence[Member]) -> list[Member]:
        """Return the members that one collective can take, in order. The others pull the wanted version."""
        within: list[Member] = []
        left = float("inf") if self._max_ranks is None else self._max_ranks
        for member in members:
            left -= member.num_ranks
            if left < 0:
                member.pulls = True
            else:
                within.append(member)
        return within

    def _advance_preparing(self, now: float) -> list[Action]:
        if self.wanted != self._version or not self._invited:
            return [self._finish()]
        waiting = self._invited - self._ready
        if waiting and now < self._prepared_at + self._ready_s:
            return []
        for member_id in waiting:
            self._invited.discard(member_id)
            self._use_pull(self.members[member_id])
        return [self._start(now) if self._ready else self._finish()]

    def _start(self, now: float) -> StartAction:
        participants = tuple(sorted(self._ready))
        build = self._communicator != participants
        if build:
            self._epoch += 1
            self._communicator = participants
        self._phase = "sending"
        self._invited.clear()
        self._unanswered = set(participants)
        self._is_sent = False
        # The latest of all: a member that is nearly overdue must not cut the attempt short for the others.
        deadline = max(self._overdue_at(self.members[member_id]) for member_id in participants)
        return StartAction(self._attempt, self._version, self._epoch, build, participants, deadline)

    def _finish(self) -> FinishAction:
        self._phase = "idle"
        self._invited.clear()
        self._ready.clear()
        return FinishAction(self._attempt, self._version, self._communicator is not None)

    def _use_pull(self, member: Member) -> bool:
        """Let the member get its version by a pull, because the collective failed for it.

        After ``MAX_FAILURES`` failed collectives in a row, it pulls the next ``PULLED_VERSIONS`` versions as well.
        Return whether this happened now.
        """
        member.pulls = True
        member.num_broken_collectives += 1
        if member.num_broken_collectives < MAX_FAILURES:
            return False
        member.num_broken_collectives = 0
        member.pulls_until = self._num_published + PULLED_VERSIONS
        return True

    def _mark_answered(self, member_id: bytes) -> None:
        self._invited.discard(member_id)
        self._ready.discard(member_id)
        self._unanswered.discard(member_id)

    def _overdue_at(self, member: Member) -> float:
        return float("inf") if member.offered_at is None else member.offered_at + self._deadline_s

    def _drop_silent_and_overdue(self, now: float) -> None:
        for member in list(self.members.values()):
            if now - member.last_seen > self._silent_s:
                self.drop(member.member_id, f"silent for {now - member.last_seen:.1f} s")
            elif now >= self._overdue_at(member):
                why = f", at last: {member.last_failure}" if member.last_failure else ""
                self.drop(member.member_id, f"no version within {self._deadline_s:.1f} s (weights.deadline_s){why}")
