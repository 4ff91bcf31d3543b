"""Groups that the queue holds: where their body lies, and the few facts that were read at arrival."""

from __future__ import annotations

import msgspec

from async_rl.queue.storage.payloads import Place


class HeldGroup(msgspec.Struct, frozen=True, gc=False):
    """One queued, taken or pinned group.

    ``named_version`` is the version its lease was asked with: with ``position`` the order of delivery.
    ``oldest_version`` and ``newest_version`` are those that sampled a token of it; ``bound_version`` is the one of the
    two that ``queue.on_stale`` holds against the staleness bound. ``reward`` and ``accuracy`` are sums over rollouts.
    """

    lease_id: str
    position: int
    named_version: int
    oldest_version: int
    newest_version: int
    bound_version: int
    num_rollouts: int
    num_tokens: int
    reward: float
    accuracy: float
    arrived_at: float
    arrival_version: int
    masked: bool
    place: Place

    @property
    def order(self) -> tuple[int, int]:
        return self.named_version, self.position


class GroupEntry(msgspec.Struct, frozen=True, gc=False):
    """A group as it is written down. ``is_held`` False: it left, and only a snapshot still needs it."""

    group: HeldGroup
    is_held: bool = True

    def facts(self) -> GroupEntry:
        return self
