"""Snapshots whose groups must stay readable until a newer checkpoint is committed. Pure.

A snapshot names its groups; their bodies stay in the body store while it is pinned, also after they were trained. So
a checkpoint needs no copy of them, and a learner that goes back to it finds them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from async_rl.queue.core.changes import Changes
from async_rl.queue.core.stored_group import HeldGroup


def snapshot_key(lineage: str, step: int) -> str:
    """The name of the snapshot after ``step`` steps of ``lineage``."""
    return f"{lineage}/{step}"


class Pin(msgspec.Struct, frozen=True, gc=False):
    """The groups of one snapshot."""

    lease_ids: tuple[str, ...]

    def facts(self) -> Pin:
        return self


class Pins:
    """Snapshots by name. The caller lets go of the groups that ``release`` gives back."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._pins: dict[str, Pin] = {}
        self._groups: dict[str, HeldGroup] = {}
        self._counts: Counter[str] = Counter()

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._groups

    def __iter__(self) -> Iterator[tuple[str, Pin]]:
        return iter(self._pins.items())

    @property
    def groups(self) -> list[HeldGroup]:
        """Every pinned group once."""
        return list(self._groups.values())

    def has_snapshot(self, key: str) -> bool:
        return key in self._pins

    def get(self, lease_id: str) -> HeldGroup | None:
        """A pinned group."""
        return self._groups.get(lease_id)

    def add(self, key: str, groups: Iterable[HeldGroup]) -> list[HeldGroup]:
        """Pin a snapshot's groups; those that an older pin of the same name held and that nothing pins any more."""
        before, found = self._pins.get(key), list(groups)
        self._pins[key] = pin = Pin(tuple(group.lease_id for group in found))
        self._groups |= {group.lease_id: group for group in found}
        self._counts.update(pin.lease_ids)
        self._changes.put("pin", key, pin)
        return [] if before is None else self._uncount(before)

    def release_all_but(self, key: str | None) -> list[HeldGroup]:
        """Unpin every other snapshot; the groups that nothing pins any more."""
        released: list[HeldGroup] = []
        for name in [name for name in self._pins if name != key]:
            self._changes.delete("pin", name)
            released += self._uncount(self._pins.pop(name))
        return released

    def _uncount(self, pin: Pin) -> list[HeldGroup]:
        self._counts.subtract(pin.lease_ids)
        gone = [lease_id for lease_id in pin.lease_ids if not self._counts[lease_id]]
        for lease_id in gone:
            del self._counts[lease_id]
        return [self._groups.pop(lease_id) for lease_id in gone]
