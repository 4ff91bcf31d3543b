"""Tells whether a process of the run died because memory ran out, and what to do against it. Called by the supervisor.

The kernel kills such a process with SIGKILL, so its log says nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from async_rl.process.cgroup import MemoryKills, limit_text

MEMORY_REMEDIES: Mapping[str, str] = {
    "learner": "raise the limit; or lower learner.max_tokens, set model.gradient_checkpointing, optimizer.name = "
    '"adamw_bf16", lora.rank or checkpoint.asynchronous = false, or start fewer generators (generator.count)',
    "generator": "raise the limit; or lower generator.batch_size, or start fewer generators (generator.count)",
    "queue": "raise the limit; or lower queue.max_bytes",
    "scorer": "raise the limit; or start fewer processes on this machine",
    "relay": "raise the limit; or start fewer processes on this machine",
}
"""What to do if a process of this role was killed because memory ran out."""
RECENT_S = 10.0
"""Seconds. A process with much memory ends that long after the kernel has counted its kill."""
_NOTE_EVERY_S = 60.0
_OTHERS = "other processes"


class MemoryDeaths:
    """Compares deaths by SIGKILL with the kernel's counts of kills for lack of memory."""

    def __init__(self, kills: MemoryKills | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._kills, self._clock = kills or MemoryKills(), clock
        self._anywhere_at: float | None = None
        self._num_open, self._open_since = 0, 0.0
        self._noted_at: float | None = None
        self._counts: Counter[str] = Counter()

    def cause(self, name: str) -> str:
        """Return words about the memory that ran out, if SIGKILL has just ended ``name`` for it; else empty text."""
        self._poll()
        own, anywhere = self._num_open > 0, self._is_recent(self._anywhere_at)
        if own:
            self._num_open -= 1
        if not own and not anywhere:
            return ""
        self._counts[name] += 1
        return f"{'' if own else 'probably '}because memory ran out ({limit_text()})"

    def note(self) -> str:
        """Return a line if the kernel has killed processes of this cgroup that are none of the run's roles; else empty.

        They are children of roles, such as environments, programs and verifiers, or strangers in the same container.
        """
        self._poll()
        now = self._clock()
        if not self._num_open or now - self._open_since < RECENT_S:
            return ""
        if self._noted_at is not None and now - self._noted_at < _NOTE_EVERY_S:
            return ""
        number, self._num_open, self._noted_at = self._num_open, 0, now
        self._counts[_OTHERS] += number
        return (
            f"memory ran out ({limit_text()}): the kernel killed {number} process{'es' if number > 1 else ''} beside "
            f"the run's roles: perhaps an environment, a program or a verifier. What they did is tried again or counts "
            f"as failed; raise the limit, or let fewer run at a time"
        )

    def summary(self) -> list[str]:
        """Return a line about all kills since this object was made; no line if there were none."""
        if not self._counts:
            return []
        killed = ", ".join(f"{name} {number} time{'s' if number > 1 else ''}" for name, number in self._counts.items())
        return [f"note: memory ran out ({limit_text()}): the kernel killed {killed}; raise the limit"]

    def _poll(self) -> None:
        own, anywhere = self._kills.poll()
        now = self._clock()
        if own > 0:
            self._open_since = self._open_since if self._num_open else now
            self._num_open += own
        if anywhere > 0:
            self._anywhere_at = now

    def _is_recent(self, at: float | None) -> bool:
        return at is not None and self._clock() - at < RECENT_S
