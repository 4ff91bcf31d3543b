"""Decide when the queue server ends: the run is finished, its learner is gone, or a signal asked for it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from async_rl.net.wake import Wake
from async_rl.queue.core.generators import GeneratorEntry
from async_rl.queue.core.state import QueueState

LEARNER_SILENCE_S = 20.0
"""A learner counts as gone when it sent nothing, not even ``Alive``, for this many seconds."""
FINISHED = "the run is finished"
FINISH_GRACE_S = 10.0
"""Longest time, in seconds after the end of the run, that the server waits until all generators know of the end."""


class Lifetime:
    """Decides when the queue server ends.

    Args:
        linger_s: seconds for which the server waits for another learner after its learner is gone.
        orphan_s: seconds after its start in which a learner must attach. None for no limit.
    """

    def __init__(self, *, linger_s: float, orphan_s: float | None, grace_s: float) -> None:
        self._linger_s, self._orphan_s, self._grace_s = linger_s, orphan_s, grace_s
        self._wake = Wake()
        self._stop_reason = ""
        self._stop_at = float("inf")
        self._started = self._learner_seen = time.monotonic()
        self._finished_at: float | None = None

    @property
    def fd(self) -> int:
        """The descriptor that becomes readable when the server must end. It is polled together with the socket."""
        return self._wake.fileno()

    def wait(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds, or until the server must end."""
        self._wake.wait(timeout_s)

    def stop(self, reason: str) -> None:
        """Make the server end, for ``reason``. This is safe from a signal handler or another thread."""
        self._stop_reason, self._stop_at = reason, time.monotonic()
        self._wake.set()

    def stop_after_learner(self, reason: str) -> None:
        """As ``stop``, but wait until the learner has left, because it saves its last step with the queue's help.

        The server waits ``grace_s`` at most. A second call ends it at once.
        """
        is_second = bool(self._stop_reason)
        self._stop_reason = reason
        self._stop_at = time.monotonic() + (0.0 if is_second else self._grace_s)
        self._wake.set()

    def note_learner(self, now: float) -> None:
        """Record that the learner sent a message at ``now``, or that its messages could not be received until then."""
        self._learner_seen = now

    def is_learner_alive(self, state: QueueState, now: float, *, learner_left: bool) -> bool:
        """Return whether a learner is attached, has not said that it ends, and is not silent."""
        return state.learner is not None and not learner_left and now - self._learner_seen < LEARNER_SILENCE_S

    def reason_to_end(
        self, state: QueueState, unaware: Iterable[GeneratorEntry], now: float, *, learner_left: bool
    ) -> str:
        """Return why the server must end now; empty if it must not.

        Args:
            unaware: the generators that do not know yet that the run is finished.
            learner_left: whether the learner has said that it ends (``LearnerGoodbye``).
        """
        is_learner_gone = learner_left or now - self._learner_seen >= LEARNER_SILENCE_S
        if self._stop_reason:
            if now >= self._stop_at or state.learner is None or state.finished or is_learner_gone:
                return self._stop_reason
            self._wake.clear()  # the waits for messages must not return at once
        if state.finished:
            self._finished_at = self._finished_at or now
            return FINISHED if not any(unaware) or now - self._finished_at >= FINISH_GRACE_S else ""
        if state.learner is None:
            if self._orphan_s is not None and now - self._started >= self._orphan_s:
                return f"no learner attached for {self._orphan_s:.0f} s"
            return ""
        silence_s = 0.0 if learner_left else LEARNER_SILENCE_S
        silent_s = now - self._learner_seen
        if silent_s >= silence_s + self._linger_s:
            return f"the learner has been gone for {silent_s:.0f} s (queue.linger_s = {self._linger_s:.0f})"
        return ""

    def close(self) -> None:
        self._wake.close()
