"""The generators that the server answers: on which connection, and what each was told last. Bounded.

Ids come from peers, so everything that is kept by one is kept here, under one cap. Pure; time is ``now``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from async_rl.errors import QueueError, WireError
from async_rl.queue.messages import LeasesGranted

MAX_GENERATORS = 4096
FORGET_S = 300.0
"""A generator that was silent for so long, or has left, makes room for another."""


@dataclass(slots=True)
class Member:
    """``granted`` is the last lease request's id with its answer; ``told`` what that generator was to activate."""

    seen_at: float
    identity: bytes | None = None
    has_left: bool = False
    granted: tuple[str, LeasesGranted] | None = None
    told: tuple[Any, ...] | None = None


class Roster:
    """Members by generator id."""

    def __init__(self, max_members: int = MAX_GENERATORS) -> None:
        self._max_members = max_members
        self._members: dict[str, Member] = {}
        self._by_peer: dict[bytes, str] = {}
        self.num_changes = 0
        """Of what ``granted`` says."""

    def __len__(self) -> int:
        return len(self._members)

    def seen(self, generator_id: str, now: float, identity: bytes | None = None) -> Member:
        """The member that this message is of, a new one if need be; ``identity`` is where its answers go.

        Raises:
            WireError: that connection has spoken for another generator. QueueError: there is no room for one more.
        """
        if identity is not None and (known := self._by_peer.get(identity, generator_id)) != generator_id:
            # Or one peer could fill the roster, and have every piece of news sent to it once for each name.
            raise WireError(f"this connection is that of generator {known!r}, expected no other, got {generator_id!r}")
        member = self._members.get(generator_id)
        if member is None:
            self._make_room(now)
            member = self._members[generator_id] = Member(now)
        member.seen_at = max(now, member.seen_at)
        if identity is not None and member.identity != identity:
            self._unbind(member)
            member.identity = identity
            self._by_peer[identity] = generator_id
        return member

    def identity(self, generator_id: str) -> bytes | None:
        """The connection that this generator was last heard on."""
        member = self._members.get(generator_id)
        return None if member is None else member.identity

    def grant(self, member: Member, request_id: str, answer: LeasesGranted) -> None:
        """This answers the member's last lease request."""
        member.granted = (request_id, answer)
        self.num_changes += 1

    def granted(self) -> dict[str, tuple[str, LeasesGranted]]:
        """The last lease request of each, with its answer."""
        return {name: m.granted for name, m in self._members.items() if m.granted is not None}

    def leave(self, generator_id: str) -> None:
        member = self._members.get(generator_id)
        if member is not None:
            self._unbind(member)
            member.has_left, member.granted, member.told = True, None, None
            self.num_changes += 1

    def has_left(self, generator_id: str) -> bool:
        member = self._members.get(generator_id)
        return member is not None and member.has_left

    def forget_answers(self) -> None:
        """Another learner came: what was said in its predecessor's time is not repeated."""
        for member in self._members.values():
            member.granted = member.told = None
        self.num_changes += 1

    def _unbind(self, member: Member) -> None:
        if member.identity is not None:
            self._by_peer.pop(member.identity, None)
        member.identity = None

    def _make_room(self, now: float) -> None:
        if len(self._members) < self._max_members:
            return
        for name, member in list(self._members.items()):
            if member.has_left or now - member.seen_at > FORGET_S:
                self._unbind(self._members.pop(name))
                self.num_changes += 1
        if len(self._members) >= self._max_members:
            raise QueueError(
                f"expected at most {self._max_members} generators, and so many are known here; those that were silent "
                f"for {FORGET_S:.0f} s make room: try again later, and see `async-rl status` for who they are"
            )
