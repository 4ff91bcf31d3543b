"""Carries out what ``SyncScheduler`` decides: tells the transports which version to send to which members.

Only the publisher's thread uses this module. An attempt is one collective, or one pull. Every attempt pins its version
in the staging memory from its first message to its end.
"""

from __future__ import annotations

import time
from collections import Counter

from msgspec.structs import asdict

from async_rl.weights import control
from async_rl.weights.manifest import Manifest
from async_rl.weights.scheduler import (
    DropAction,
    FinishAction,
    Member,
    PrepareAction,
    PullAction,
    StartAction,
    SyncScheduler,
)
from async_rl.weights.staging import StagedVersion
from async_rl.weights.transport import BroadcastSender, Delivery, PullSender, Send

_RETRY_S = 2.0


class LastTransfer:
    """Figures of the newest version whose transfer has ended."""

    def __init__(self) -> None:
        self.transfer_s = self.verify_s = 0.0
        self.size_bytes = 0
        self._version = -1

    def end(self, manifest: Manifest, transfer_s: float) -> None:
        """Record the end of a collective, or of one pull."""
        self.transfer_s, self.size_bytes = transfer_s, manifest.size_bytes

    def verified(self, ack: control.Ack) -> None:
        """Record how long a generator verified. The slowest of a version counts."""
        self.verify_s = max(self.verify_s, ack.verify_s) if ack.version == self._version else ack.verify_s
        self._version = ack.version


class TransferManager:
    """Carries out the scheduler's actions and keeps the attempts in progress.

    Args:
        scheduler: decides what to do.
        collective: the transport that sends to all members at once. None if members pull every version.
        pull: the transport for members that pull.
        send: sends a message to a member.
        counts: the publisher's counters, which are increased here.
    """

    def __init__(
        self,
        scheduler: SyncScheduler,
        *,
        collective: BroadcastSender | None,
        pull: PullSender,
        send: Send,
        counts: Counter[str],
    ) -> None:
        self._scheduler = scheduler
        self._collective = collective
        self._pull = pull
        self._send = send
        self._counts = counts
        self._newest: StagedVersion | None = None
        self._pinned: dict[int, StagedVersion] = {}
        self._pulls: dict[int, tuple[PullAction, float]] = {}
        self.last_drop = ""

    def publish(self, staged: StagedVersion) -> None:
        """Send ``staged`` to every member from now on. The memory of the previous version may be reused after its
        transfers.
        """
        if self._newest is not None:
            self._counts["superseded"] += bool(self._scheduler.outdated())
            self._newest.retire()
        self._newest = staged
        # One version is pulled, and one is staged, beside the older ones.
        self._scheduler.publish(staged.manifest.version, num_old=max(0, staged.num_buffers - 2))
        if self._collective is None:
            # In a run with a collective a pull is the exception; it needs no preparation.
            self._pull.publish(staged, has_members=bool(self._scheduler.members))

    def act(self) -> None:
        """Carry out the scheduler's actions until none are due."""
        while actions := self._scheduler.advance(time.monotonic(), self._can_pull, can_collect=self.can_collect):
            for action in actions:
                match action:
                    case PrepareAction():
                        self._prepare(action)
                    case StartAction():
                        self._start(action)
                    case FinishAction():
                        self._finish(action)
                    case PullAction():
                        self._offer_pull(action)
                    case DropAction(member_id, reason):
                        self._counts["dropped"] += 1
                        self.last_drop = reason
                        self._send(member_id, control.Dropped(reason, _RETRY_S))
            self._end_pulls()
        self._end_pulls()
        if self._newest is not None:
            # A member that pulls keeps its version by a pin; staging waits for the others only.
            self._newest.mark_delivered(not self._scheduler.awaiting_collective())

    @property
    def can_collect(self) -> bool:
        """Whether a collective can begin now."""
        return self._collective is not None and self._collective.is_up

    def version_of(self, attempt: int) -> StagedVersion | None:
        """Return the version that this attempt sends. If the attempt is over, return the newest version, or None before
        any.
        """
        return self._pinned.get(attempt, self._newest)

    def pulled_for(self, attempt: int) -> float | None:
        """Return the seconds since this pull was offered. None if ``attempt`` is not a pull, or is over."""
        pull = self._pulls.get(attempt)
        return None if pull is None else time.monotonic() - pull[1]

    def close(self, timeout_s: float) -> None:
        """Abandon the attempts in progress and close both transports. Memory that a running collective reads stays
        pinned.
        """
        for attempt in [a for a in self._pinned if a in self._pulls or not self._scheduler.is_sending]:
            self._pinned.pop(attempt).unpin()
        if self._collective is not None:
            self._collective.close(timeout_s)
        self._pull.close(timeout_s)

    def _can_pull(self, member: Member) -> bool:
        return self._newest is not None and self._pull.can_offer(self._newest, member)

    def _pin(self, attempt: int) -> StagedVersion | None:
        """Pin the newest version for this attempt, and return it. Return None if its memory has already been
        overwritten.
        """
        staged = self._newest
        assert staged is not None
        if not staged.pin():
            # Its buffer went to a newer version, which is published in a moment.
            self._scheduler.publish(None)
            return None
        self._pinned[attempt] = staged
        return staged

    def _prepare(self, action: PrepareAction) -> None:
        staged = self._pin(action.attempt)
        if staged is None:
            return
        message = control.PrepareCollective(action.attempt, asdict(staged.manifest))
        for member_id in action.member_ids:
            self._send(member_id, message)

    def _start(self, action: StartAction) -> None:
        assert self._collective is not None
        members = tuple(self._scheduler.members[member_id] for member_id in action.participants)
        self._counts["attempts"] += 1
        delivery = Delivery(
            attempt=action.attempt,
            staged=self._pinned[action.attempt],
            members=members,
            deadline=action.deadline,
            epoch=action.epoch,
            build=action.build,
        )
        self._collective.deliver(delivery, self._send)

    def _finish(self, action: FinishAction) -> None:
        assert self._collective is not None
        self._collective.end(action.attempt, intact=action.intact)
        if (staged := self._pinned.pop(action.attempt, None)) is not None:
            staged.unpin()

    def _offer_pull(self, action: PullAction) -> None:
        member = self._scheduler.members.get(action.member_id)
        if member is None:
            return
        staged = self._pin(action.attempt)
        if staged is None:
            self._scheduler.cancel_pull(action.member_id)
            return
        self._counts["pulls"] += 1
        self._pulls[action.attempt] = (action, time.monotonic())
        self._pull.deliver(Delivery(action.attempt, staged, (member,), action.deadline), self._send)

    def _end_pulls(self) -> None:
        """End the pulls that are over: tell the transport, and unpin their versions."""
        for attempt, (action, _) in list(self._pulls.items()):
            member = self._scheduler.members.get(action.member_id)
            if member is None or member.pull is not action:
                del self._pulls[attempt]
                self._pull.end(attempt, intact=True)
                self._pinned.pop(attempt).unpin()
