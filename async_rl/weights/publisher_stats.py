"""What a publisher says of itself to other threads: counters, who still lacks what is wanted, and why it failed."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

from async_rl.errors import WeightsError


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Cumulative, except ``members``, ``lacking`` and ``last_transfer_s``.

    ``transfer_s`` is the time spent in collectives, ``sent_bytes`` counts a broadcast once, whatever its audience.
    ``pulled_bytes`` went through the stream where full copies would have been ``pulled_full_bytes``; ``delta_bytes``
    and ``delta_s`` are of the newest delta. ``last_transfer_s`` is of the last collective, or of the last pull from
    its offer to its end. ``superseded`` versions were replaced by a newer one before every member had them. What was
    ``lost`` went out to a member that stood, found nobody, and was offered again.
    """

    members: int = 0
    lacking: int = 0
    wanted: int | None = None
    transfer_s: float = 0.0
    last_transfer_s: float = 0.0
    sent_bytes: int = 0
    attempts: int = 0
    pulls: int = 0
    pulled_bytes: int = 0
    pulled_full_bytes: int = 0
    delta_bytes: int = 0
    delta_s: float = 0.0
    server_starts: int = 0
    failures: int = 0
    corrupt: int = 0
    joined: int = 0
    dropped: int = 0
    superseded: int = 0
    malformed: int = 0
    lost: int = 0
    last_drop: str = ""


COUNTED = (
    "sent_bytes", "attempts", "pulls", "pulled_bytes", "pulled_full_bytes", "failures", "corrupt", "joined", "dropped",
    "superseded", "lost",
)  # fmt: skip
"""Those that the publisher counts one by one."""


class Holders(NamedTuple):
    """Who has the newest version, ``wanted``: all ``members`` but those ``lacking`` it."""

    wanted: int | None
    members: int
    lacking: int


class Noted:
    """Who has what, written by the publisher after every change; other threads may wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._holders = Holders(None, 0, 0)

    def note(self, holders: Holders) -> None:
        if holders != self._holders:
            with self._changed:
                self._holders = holders
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The publisher can't go on."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def check(self) -> None:
        """
        Raises:
            WeightsError: the publisher has failed.
        """
        if self._error is not None:
            raise WeightsError(f"the weights publisher has failed: {self._error!r}") from self._error

    def wait(self, version: int, timeout_s: float, *, num_members: int) -> bool:
        """Whether, within ``timeout_s``, every member held ``version`` or a newer one, and at least ``num_members``.

        Raises:
            WeightsError: the publisher has failed.
        """

        def arrived() -> bool:
            wanted, members, lacking = self._holders
            held = wanted is not None and wanted >= version and not lacking
            return self._error is not None or (held and members >= num_members)

        with self._changed:
            done = self._changed.wait_for(arrived, timeout_s)
        self.check()
        return done
