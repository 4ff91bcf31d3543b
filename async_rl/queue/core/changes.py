"""What the buffer changed since it was last asked: small records by kind and key, to be written down in one go.

The buffer notes them as it works; the server drains them once a turn and commits them to the journal before any reply
of that turn is sent. A record that came and went in between is never written. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Kind = Literal["group", "pin", "lease", "fate", "evaluation", "answer"]
"""``group``: a queued, taken or pinned group by lease id. ``pin``: the groups a snapshot needs, by snapshot. ``lease``:
one in flight. ``fate``: of a closed lease. ``evaluation`` and its ``answer``s."""


class Change(NamedTuple):
    """A record as it is now; ``fields`` None: it is gone."""

    kind: Kind
    key: str
    fields: Mapping[str, Any] | None


class Changes:
    """Notes the last state of every record that changed. ``is_wanted`` False notes nothing (no journal)."""

    def __init__(self, *, is_wanted: bool = True) -> None:
        self._is_wanted = is_wanted
        self._noted: dict[tuple[Kind, str], Any] = {}
        self._fresh: set[tuple[Kind, str]] = set()

    def put(self, kind: Kind, key: str, record: Any, *, is_new: bool = False) -> None:
        """``record`` is there now; its ``facts()`` are read at the drain. ``is_new``: it never was before."""
        if self._is_wanted:
            if is_new:
                self._fresh.add((kind, key))
            self._noted[kind, key] = record

    def delete(self, kind: Kind, key: str) -> None:
        """The record is gone."""
        if not self._is_wanted:
            return
        if (kind, key) in self._fresh:
            self._fresh.discard((kind, key))
            del self._noted[kind, key]
        else:
            self._noted[kind, key] = None

    def drain(self) -> list[Change]:
        """What changed since the last drain."""
        noted, self._noted = self._noted, {}
        self._fresh.clear()
        return [Change(kind, key, None if r is None else r.facts()) for (kind, key), r in noted.items()]
