"""What the queue server does while its disk is full: report it, and keep messages until a commit succeeds."""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

LOG_EVERY_S = 30.0
_NOTIFY_EVERY_S = 5.0
"""Seconds between two notices to the clients that the disk is full. Without them the clients would give up."""
_MAX_BYTES = 256 << 20
_MAX_MESSAGES = 10_000


@dataclass(slots=True)
class FullDisk:
    """Whether the queue's disk is full. ``reason`` says why it has no room; empty if it has.

    All times are in seconds.
    """

    reason: str = ""
    _since: float = 0.0
    _logged_at: float = float("-inf")
    _is_logged: bool = False
    _notified_at: float = float("-inf")

    def note(self, reason: str, now: float) -> None:
        """Record that a write found no room. Log it at once, then every ``LOG_EVERY_S``."""
        if not self.reason:
            self._since = now
        self.reason = reason
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at, self._is_logged = now, True
            logger.warning("the queue waits for room on its disk, %.0f s so far: %s", now - self._since, reason)

    def end(self, now: float) -> None:
        """Record that the disk has room again."""
        if self._is_logged:
            logger.info("the queue's disk has room again, after %.0f s", now - self._since)
        self.reason, self._is_logged = "", False

    def must_notify(self, now: float) -> bool:
        """Return whether it is time to send the notice that the disk is full.

        If so, the time until the next one starts.
        """
        is_due = now - self._notified_at >= _NOTIFY_EVERY_S
        if is_due:
            self._notified_at = now
        return is_due

    def status(self, now: float) -> str:
        """Return the text about the full disk that ``async-rl status`` shows; empty if the disk has room."""
        return self.reason and f"for {now - self._since:.0f} s: {self.reason}"


class HeldMessages:
    """Messages that arrived while the disk was full, so that no change could be committed.

    A repeated request is kept once.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[bytes, str, str, str | None], list[memoryview]] = {}
        self._num_bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether to receive more messages. Messages that are not received stay in the sockets."""
        return self._num_bytes < _MAX_BYTES and len(self._held) < _MAX_MESSAGES

    def add(self, peer: bytes, key: str, type_: str, request_id: str | None, frames: list[memoryview]) -> None:
        """Keep one message. ``key`` is the public key of its sender."""
        if (peer, key, type_, request_id) not in self._held:
            self._num_bytes += sum(map(len, frames))
            self._held[peer, key, type_, request_id] = frames

    def pop_all(self) -> list[tuple[bytes, str, list[memoryview]]]:
        """Remove and return all messages as (peer, key, frames), in the order of their arrival."""
        held, self._held, self._num_bytes = self._held, {}, 0
        return [(peer, key, frames) for (peer, key, _, _), frames in held.items()]
