"""Carries out what ``Rounds`` decides: keeps the bytes of what is being sent, and gives it to the right transport.

Part of the publisher, used by its thread alone. Every attempt, a collective's or a pull, pins its version from its
first message to its end.
"""

from __future__ import annotations

import time
from collections import Counter

from async_rl.weights import control
from async_rl.weights.collective.sender import CollectiveSender
from async_rl.weights.manifest import manifest_fields
from async_rl.weights.scheduler import DropAction, EnterAction, FinishAction, GoAction, PullAction, Rounds
from async_rl.weights.staging import StagedVersion
from async_rl.weights.tcp.sender import StreamSender
from async_rl.weights.transport import Delivery, Outlet, Tell

_RETRY_S = 2.0


class Deliveries:
    """Attempts under way. ``tell`` sends to a member; what happens is counted in ``counts``."""

    def __init__(
        self,
        rounds: Rounds,
        *,
        collective: CollectiveSender | None,
        stream: StreamSender,
        tell: Tell,
        counts: Counter[str],
    ) -> None:
        self._rounds = rounds
        self._collective = collective
        self._stream = stream
        self._tell = tell
        self._counts = counts
        self._newest: StagedVersion | None = None
        self._pinned: dict[int, StagedVersion] = {}
        self._pulls: dict[int, tuple[PullAction, float]] = {}
        self.last_drop = ""

    def publish(self, staged: StagedVersion) -> None:
        """Everybody shall have this version; the one before is retired."""
        if self._newest is not None:
            self._counts["superseded"] += bool(self._rounds.lacking())
            self._newest.retire()
        self._newest = staged
        self._rounds.publish(staged.manifest.version)
        self._stream.publish(staged, has_members=bool(self._rounds.members))

    def act(self) -> None:
        """Until there is nothing to do for now."""
        while actions := self._rounds.advance(time.monotonic(), self._stream.may_pull):
            for action in actions:
                match action:
                    case EnterAction():
                        self._enter(action)
                    case GoAction():
                        self._go(action)
                    case FinishAction():
                        self._finish(action)
                    case PullAction():
                        self._offer(action)
                    case DropAction(member_id, reason):
                        self._counts["dropped"] += 1
                        self.last_drop = reason
                        self._tell(member_id, control.Dropped(reason, _RETRY_S))
            self._end_pulls()
        self._end_pulls()
        if self._newest is not None:
            # Who pulls keeps its version by a pin; staging waits for the others only.
            self._newest.mark_delivered(not self._rounds.collecting())

    def version_of(self, attempt: int) -> StagedVersion | None:
        """What is sent in this attempt; the newest version, if it is over."""
        return self._pinned.get(attempt, self._newest)

    def pulled_for(self, attempt: int) -> float | None:
        """Seconds since this pull was offered; None if it is none, or is over."""
        pull = self._pulls.get(attempt)
        return None if pull is None else time.monotonic() - pull[1]

    def close(self, timeout_s: float) -> None:
        """Give up what is under way. Bytes that a collective still reads stay pinned."""
        for attempt in [a for a in self._pinned if a in self._pulls or not self._rounds.sending]:
            self._pinned.pop(attempt).unpin()
        outlets: list[Outlet] = [self._stream] if self._collective is None else [self._collective, self._stream]
        for outlet in outlets:
            outlet.close(timeout_s)

    def _pin(self, attempt: int) -> StagedVersion | None:
        """Keep the newest version's bytes for this attempt."""
        staged = self._newest
        assert staged is not None
        if not staged.pin():
            # Its buffer went to a newer version, which is published in a moment.
            self._rounds.publish(None)
            return None
        self._pinned[attempt] = staged
        return staged

    def _enter(self, action: EnterAction) -> None:
        staged = self._pin(action.attempt)
        if staged is None:
            return
        message = control.Enter(action.attempt, manifest_fields(staged.manifest))
        for member_id in action.member_ids:
            self._tell(member_id, message)

    def _go(self, action: GoAction) -> None:
        assert self._collective is not None
        if action.is_first and self._pin(action.attempt) is None:
            self._rounds.withdraw(action.attempt)
            return
        members = tuple(self._rounds.members[member_id] for member_id in action.participants)
        delivery = Delivery(
            action.attempt, self._pinned[action.attempt], members, action.deadline, action.epoch, action.build,
            action.is_first,
        )  # fmt: skip
        self._counts["attempts"] += 1
        self._collective.deliver(delivery, self._tell)

    def _finish(self, action: FinishAction) -> None:
        assert self._collective is not None
        self._collective.end(action.attempt, intact=action.intact)
        if (staged := self._pinned.pop(action.attempt, None)) is not None:
            staged.unpin()

    def _offer(self, action: PullAction) -> None:
        member = self._rounds.members.get(action.member_id)
        if member is None:
            return
        staged = self._pin(action.attempt)
        if staged is None:
            self._rounds.void(action.member_id)
            return
        self._counts["pulls"] += 1
        self._pulls[action.attempt] = (action, time.monotonic())
        delivery = Delivery(action.attempt, staged, (member,), action.deadline)
        self._stream.deliver(delivery, self._tell)

    def _end_pulls(self) -> None:
        """Let go of what the pulls that are over have kept."""
        for attempt, (action, _) in list(self._pulls.items()):
            member = self._rounds.members.get(action.member_id)
            if member is None or member.pull is not action:
                del self._pulls[attempt]
                self._stream.end(attempt, intact=True)
                self._pinned.pop(attempt).unpin()
