"""Programs elsewhere that take sessions by themselves, in place of the processes of an ``EnvironmentPool``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from async_rl.environments.pool import Event
from async_rl.extensions.agents.front.process import Front
from async_rl.extensions.agents.relay.messages import MAX_BODY_BYTES


class OutsidePrograms:
    """Offers sessions, which wait for a program as long as it takes. It has those methods of a pool that agents need.

    Args:
        front: the HTTP front, which knows the way to the programs.

    Attributes:
        problem: why no program takes sessions; empty if nothing is wrong.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._waiting: set[str] = set()
        self._failed_at_start: list[Event] = []
        self.problem = ""

    @property
    def num_waiting(self) -> int:
        """The number of sessions that no program has taken."""
        return len(self._waiting)

    @property
    def trouble(self) -> str:
        """Why sessions wait; empty if none does, or if all programs are only busy."""
        return (
            f"{self.num_waiting} sessions wait for programs: {self.problem}" if self.problem and self._waiting else ""
        )

    def start(self, key: str, start: Mapping[str, Any]) -> None:
        """Offer the rollout ``key``. ``start`` is as for an ``EnvironmentPool``."""
        try:
            task = json.dumps(start).encode()
            if len(task) > MAX_BODY_BYTES:
                raise ValueError(f"it has {len(task)} bytes, the limit is {MAX_BODY_BYTES}")
        except (TypeError, ValueError, RecursionError) as error:
            text = f"can't send the rollout's task as JSON: {error}; use only text, numbers, lists and dicts"
            self._failed_at_start.append(Event(key, {"type": "failed", "error": text}))
            return
        self._waiting.add(key)
        self._front.offer(start["endpoint"]["api_key"], task)

    def note(self, key: str, *, is_taken: bool) -> None:
        """Note that a program has taken a session, or has given it back."""
        (self._waiting.discard if is_taken else self._waiting.add)(key)

    def cancel(self, key: str) -> None:
        """End the rollout ``key``. Its program hears of it when its session is closed."""
        self._waiting.discard(key)

    def poll(self) -> list[Event]:
        """Return the failures since the last call. Other events come over the front."""
        failed, self._failed_at_start = self._failed_at_start, []
        return failed

    def close(self) -> None:
        """Nothing is held."""
