"""How many sequences an engine with a paged KV cache can hold at once. Pure.

The engine says how many run, how many wait, and which share of its cache the running ones hold. More sequences than
fit would wait inside the engine, or be preempted and computed anew: leases that only grow old there.
"""

from __future__ import annotations

_FILL = 0.9
"""Share of the cache to plan with: sequences grow."""
_FORGET = 0.995
"""What remains, from one step to the next, of the largest need of a sequence that was seen."""


class KvCacheCapacity:
    """At most ``most`` sequences; fewer as soon as the cache would not hold so many of what runs."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._need = 0.0

    @property
    def max_running(self) -> int:
        """At least 1."""
        if self._need * self._most <= _FILL:
            return self._most
        return max(1, int(_FILL / self._need))

    def observe(self, num_running: int, kv_usage: float) -> None:
        """One step's figures. ``kv_usage`` is the share, 0 to 1, of the cache that ``num_running`` sequences hold."""
        if num_running > 0:
            self._need = max(self._need * _FORGET, kv_usage / num_running)
