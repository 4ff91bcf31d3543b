"""Decides from whom a generator pulls a version: from the learner, or from a generator that has or receives it. Pure.

The first generators pull from the learner, ``LEARNER_PULLS`` at a time. Every generator that has a version, or receives
it, serves it to ``PEER_PULLS`` others, the nearest first: those on its machine, then those in its network. So a version
spreads over a tree. A generator passes on what it has verified while it receives the rest: if every link has the
bandwidth B, all of them receive at B / ``PEER_PULLS``, however many there are.

A generator that sent wrong bytes, was too slow or could not be reached serves nobody for ``EXCLUDED_VERSIONS``.
Meanwhile it pulls from the learner and takes none of its places, so that slow generators don't keep others waiting.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from async_rl.weights.scheduler import Member

LEARNER_PULLS = 2
"""Generators that pull from the learner at a time, apart from those that can't serve."""
PEER_PULLS = 2
"""Pulls that a generator serves at a time. All generators of a machine serve as many to other machines together."""
EXCLUDED_VERSIONS = 32
"""A generator that failed as a peer serves nobody until this many versions have been published."""


@dataclass(slots=True, eq=False)
class PeerPull:
    """A pull of one version that has not ended.

    Attributes:
        member: the generator that pulls.
        digest: digest of the version.
        source: the generator from which it pulls. None: the learner.
        depth: number of pulls from the learner to this member. 0: it gets deltas from the learner.
    """

    member: Member
    digest: str
    source: Member | None
    depth: int


class PeerTree:
    """Keeps who pulls which version from whom, and who has it. ``members`` are the members at present, by id."""

    def __init__(self, members: Mapping[bytes, Member]) -> None:
        self._members = members
        self._pulls: dict[bytes, PeerPull] = {}
        self._complete: dict[str, list[Member]] = {}
        self._excluded_until: dict[tuple[str, str], int] = {}
        self._num_published = 0

    def publish(self, digest: str) -> None:
        """Record that the version with this digest is the newest one."""
        self._num_published += 1
        pulled = {pull.digest for pull in self._live()} | {digest}
        self._complete = {one: members for one, members in self._complete.items() if one in pulled}

    def assign(self, member: Member, digest: str) -> PeerPull | None:
        """Choose from whom ``member`` pulls the version with this digest. None: all are busy, so it must wait.

        The pull counts from now until ``end``, or until the member is assigned another one.
        """
        self._pulls.pop(member.member_id, None)
        live = list(self._live())
        pull = None if self._is_excluded(member) else self._from_peer(member, digest, live)
        if pull is None:
            is_free = sum(one.source is None and self._can_serve(one.member) for one in live) < LEARNER_PULLS
            if is_free or not self._can_serve(member):
                pull = PeerPull(member, digest, None, 1)
        if pull is not None:
            self._pulls[member.member_id] = pull
        return pull

    def end(self, pull: PeerPull, *, is_complete: bool) -> None:
        """Record that this pull is over, and whether its member has the whole version."""
        if self._pulls.get(pull.member.member_id) is pull:
            del self._pulls[pull.member.member_id]
        complete = self._complete.setdefault(pull.digest, [])
        if is_complete and not any(one is pull.member for one in complete):
            complete.append(pull.member)

    def leave_source(self, pull: PeerPull, *, is_faulty: bool) -> Member | None:
        """Record that the member of this pull goes on with the learner. Exclude the generator that it left if that is
        faulty.

        Return that generator. None if the member pulls from the learner already.
        """
        source, pull.source, pull.depth = pull.source, None, 1
        if source is not None and is_faulty:
            self._excluded_until[source.generator] = self._num_published + EXCLUDED_VERSIONS
        return source

    def _from_peer(self, member: Member, digest: str, live: list[PeerPull]) -> PeerPull | None:
        loads = Counter(pull.source.member_id for pull in live if pull.source is not None)
        uplinks = Counter(p.source.host for p in live if p.source is not None and p.source.host != p.member.host)
        holders = [(one, 0) for one in self._complete.get(digest, ()) if self._is_live(one)]
        held = {one.member_id for one, _ in holders}
        holders += [
            (pull.member, pull.depth)
            for pull in live
            if pull.digest == digest and pull.member.member_id not in held and not self._waits_for(pull, member)
        ]
        best: tuple[tuple[int, int, int], Member] | None = None
        for holder, depth in holders:
            load, away = loads[holder.member_id], distance(member.host, holder.host)
            if holder is member or not self._can_serve(holder) or load >= PEER_PULLS:
                continue
            if away and uplinks[holder.host] >= PEER_PULLS:
                continue
            if best is None or (away, depth, load) < best[0]:
                best = (away, depth, load), holder
        if best is None:
            return None
        (_, depth, _), source = best
        return PeerPull(member, digest, source, depth + 1)

    def _waits_for(self, pull: PeerPull, member: Member) -> bool:
        """Return whether ``pull`` gets its bytes from ``member``, also by way of others. Two must not wait for each
        other.
        """
        source = pull.source
        while source is not None and source is not member:
            above = self._pulls.get(source.member_id)
            source = above.source if above is not None and above.digest == pull.digest else None
        return source is not None

    def _live(self) -> Iterator[PeerPull]:
        return (pull for pull in self._pulls.values() if self._is_live(pull.member))

    def _is_live(self, member: Member) -> bool:
        return self._members.get(member.member_id) is member

    def _is_excluded(self, member: Member) -> bool:
        return self._excluded_until.get(member.generator, 0) > self._num_published

    def _can_serve(self, member: Member) -> bool:
        return member.peer_port > 0 and not self._is_excluded(member)


@lru_cache(maxsize=1 << 16)
def distance(host: str, other: str) -> int:
    """Return how far two addresses are from each other: 0 the same machine, 1 the same network, 2 elsewhere.

    A network has the first 24 bits of an IPv4 address in common, or the first 64 of an IPv6 address.
    """
    if host == other:
        return 0
    try:
        bits = 24 if ipaddress.ip_address(host).version == 4 else 64
        network = ipaddress.ip_network(f"{host}/{bits}", strict=False)
        return 1 if ipaddress.ip_address(other) in network else 2
    except ValueError:
        return 2
