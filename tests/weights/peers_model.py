"""How long a version takes to reach many generators that pass it on: in simulated time, with the real ``PeerTree``.

Every machine has one full-duplex link. What a link carries at a time, its transfers share equally. A generator passes
on units of 64 MiB that have arrived whole; the real ones are 4 MiB, so the model is a little slower. Loopback costs
nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from async_rl.weights.scheduler import Member
from async_rl.weights.tcp.peers import PeerPull, PeerTree

UNIT_BYTES = 64 << 20
_STEPS_PER_UNIT = 4


@dataclass(frozen=True, slots=True)
class Spread:
    """The result of ``spread``.

    Attributes:
        transfers: time until the last generator had the version, in units of one transfer over an idle link.
        learner_versions: bytes sent by the learner, in units of the version.
    """

    transfers: float
    learner_versions: float


def spread(num_machines: int, *, generators_per_machine: int = 1, size_bytes: int = 15_000_000_000) -> Spread:
    """Give one version to generators on this many machines, each with one link, and return what it took.

    The machines lie in networks of 32.
    """
    members: dict[bytes, Member] = {}
    for machine in range(num_machines):
        for index in range(generators_per_machine):
            member_id = b"%d-%d" % (machine, index)
            host = f"10.0.{machine // 32}.{machine % 32}"
            members[member_id] = Member(member_id, ("", str(member_id)), 0.0, False, host=host, peer_port=1)
    tree = PeerTree(members)
    tree.publish("v")
    arrived = dict.fromkeys(members, 0.0)
    pulls: dict[bytes, PeerPull] = {}
    waiting, done, sent, steps = set(members), set[bytes](), 0.0, 0
    step = UNIT_BYTES / _STEPS_PER_UNIT
    while len(done) < len(members):
        for member_id in sorted(waiting):
            if (pull := tree.assign(members[member_id], "v")) is not None:
                pulls[member_id] = pull
        waiting -= set(pulls)
        for member_id, got in _step_bytes(pulls, arrived, size_bytes, step).items():
            arrived[member_id] = min(size_bytes, arrived[member_id] + got)
            sent += got if pulls[member_id].source is None else 0.0
            if arrived[member_id] >= size_bytes:
                tree.end(pulls.pop(member_id), is_complete=True)
                done.add(member_id)
        steps += 1
    return Spread(steps * step / size_bytes, sent / size_bytes)


def _step_bytes(
    pulls: dict[bytes, PeerPull], arrived: dict[bytes, float], size_bytes: int, step: float
) -> dict[bytes, float]:
    """Return the bytes that each pull gets in the time in which an idle link carries ``step`` bytes."""
    sources = {member_id: "learner" if p.source is None else p.source.host for member_id, p in pulls.items()}
    away = [member_id for member_id, pull in pulls.items() if sources[member_id] != pull.member.host]
    up, down = Counter(sources[one] for one in away), Counter(pulls[one].member.host for one in away)
    got: dict[bytes, float] = {}
    for member_id, pull in pulls.items():
        share = max(up[sources[member_id]], down[pull.member.host]) if member_id in away else 0.1
        available = float(size_bytes)
        if pull.source is not None and arrived[pull.source.member_id] < size_bytes:
            available = arrived[pull.source.member_id] // UNIT_BYTES * UNIT_BYTES
        got[member_id] = max(0.0, min(step / share, available - arrived[member_id], size_bytes - arrived[member_id]))
    return got
