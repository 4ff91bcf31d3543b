"""The queue's state with its journal. The server loads it at its start, commits changes, and reverts it after a bug.

``commit`` writes all changes since the last commit, together or not at all. Without a journal nothing is saved, and
there is nothing to go back to. ``FullDisk`` reports a disk without room, on which no commit succeeds.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from async_rl.config.config import Config
from async_rl.errors import DamagedJournalError
from async_rl.net.wire import pack_plain
from async_rl.process.fault_points import fault_point
from async_rl.queue.core import persistence
from async_rl.queue.core.admission import LearnerSide, QueueSettings, eval_sampling
from async_rl.queue.core.prompts import PromptStream, Row
from async_rl.queue.core.state import QueueState, encode_state
from async_rl.queue.server.handlers import Handlers, WelcomePack
from async_rl.queue.storage.journal import Change, Changes, Journal, unpack
from async_rl.queue.storage.payloads import MemoryPayloads
from async_rl.registry import load, our_offers

logger = logging.getLogger(__name__)

LOG_EVERY_S = 30.0
"""Seconds between two log messages about a full disk."""
_NOTIFY_EVERY_S = 5.0
"""Seconds between two notices to the clients that the disk is full. Without them the clients would give up."""


@dataclass(frozen=True, slots=True)
class QueueData:
    """The rows that generators sample: for training, and for evaluations by name of the set.

    ``digest`` is the digest of the training rows.
    """

    train: Sequence[Row]
    evals: Mapping[str, Sequence[Row]]
    digest: str = ""


def build_stream(config: Config, rows: Sequence[Row]) -> PromptStream:
    """Return the stream of the training rows, or what an extension makes of ``data.source``."""
    if config.data.source is None:
        return PromptStream.of_config(config, rows)
    return load(our_offers("async_rl.streams")["own"])(config)


class DurableState:
    """The queue's state, and the handlers that change it. It begins empty; ``load`` restores what the journal has.

    Args:
        journal: the journal to which changes are committed. If None, nothing is saved.
        run_id: the run to serve. If empty, the first learner sets it.

    Attributes:
        state: the queue's state. ``load`` and ``revert`` replace it.
        handlers: the handlers of requests, for ``state``.
    """

    def __init__(
        self, config: Config, settings: QueueSettings, data: QueueData, journal: Journal | None, run_id: str
    ) -> None:
        self._config, self._settings, self._journal = config, settings, journal
        self._data = QueueData(
            data.train, {name: rows[: config.eval.of(name).max_rows] for name, rows in data.evals.items()}, data.digest
        )
        self._start_empty(run_id)

    def load(self) -> None:
        """Restore the state of the last commit. If the journal is damaged, move it aside and begin with an empty state.

        Raises:
            QueueError: the journal belongs to another run, or can't be read.
        """
        journal = self._journal
        if journal is None:
            return
        try:
            self._load_records(journal)
        except DamagedJournalError as error:
            journal.move_aside(str(error))
            self._start_empty(self.handlers.run_id)
        if journal.damage:
            logger.warning("%s", journal.damage)

    def commit(self) -> None:
        """Commit the changes since the last commit to the journal.

        Raises:
            StorageFullError: the disk is full. The next call tries to commit the same changes again.
            QueueError: the journal can't be written.
        """
        if self._journal is None:
            return
        if self._unsaved is None:
            if self._committed == self.state.revision:
                return
            self._unsaved = self._changes.drain(), self._records()
        self._journal.commit(*self._unsaved)
        self._unsaved = None
        self._committed = self.state.revision
        fault_point("queue.journaled")  # the turn's changes are committed, its replies are not sent

    def revert(self) -> None:
        """Go back to the last commit. Only a queue with a journal can."""
        assert self._journal is not None
        revision = self.state.revision
        self._journal.revert()
        self._start_empty(self.handlers.run_id)
        self.load()
        # ``revision`` must grow, because files and pending requests compare it.
        self.state.revision += revision + 1
        if self._committed >= 0:
            self._committed = self.state.revision

    def _start_empty(self, run_id: str) -> None:
        """Replace the state by one without groups."""
        config, data, journal = self._config, self._data, self._journal
        stream = build_stream(config, data.train)
        self._changes = Changes(is_wanted=journal is not None)
        self.state = QueueState(
            self._settings, data.train, stream, data_digest=data.digest, instance=secrets.token_hex(16),
            payloads=MemoryPayloads() if journal is None else journal,
            changes=self._changes,
        )  # fmt: skip
        self.handlers = Handlers(self.state, config, data.evals, run_id)
        self._committed = -1
        self._unsaved: tuple[Sequence[Change], Mapping[str, bytes]] | None = None
        self._saved_welcome: WelcomePack | None = None

    def _records(self) -> dict[str, bytes]:
        """Return the records of queue and handlers. The welcome, which is large, is left out if it has not changed."""
        records = {"queue": encode_state(self.state), "handlers": pack_plain(self.handlers.save())}
        if self.handlers.welcome is not self._saved_welcome:
            self._saved_welcome = self.handlers.welcome
            records["welcome"] = pack_plain(self.handlers.welcome)
        return records

    def _goes_on(self, learner: LearnerSide) -> bool:
        """Return whether the config gives a run that was finished further steps, or further data for its steps."""
        has_data = bool(learner.steps_left) and not self.state.stream.exhausted
        return self._config.learner.steps > learner.num_steps or has_data

    def _load_records(self, journal: Journal) -> None:
        journaled = journal.load()
        if journaled is None:
            return
        if not {"queue", "handlers"} <= journaled.state.keys():
            raise DamagedJournalError(f"expected records of queue and handlers, got {sorted(journaled.state)}")
        welcome = unpack(journaled.state["welcome"]) if "welcome" in journaled.state else None
        rows, now = self.handlers.eval_rows, time.monotonic()
        samplings = {name: eval_sampling(self._config, name) for name in rows}
        refs = persistence.load(self.state, journaled.entries, journaled.state["queue"], rows, samplings, now)
        learner = self.state.learner
        if learner is not None and learner.finished and self._goes_on(learner):
            learner.finished = False
        try:
            self.state.check()
        except AssertionError as error:
            raise DamagedJournalError(f"its records are of different commits: {error}") from error
        if lost := journal.adopt(refs):
            logger.warning("%d payloads are lost: their files are missing or too short, first %s", len(lost), lost[0])
        self.handlers.load(unpack(journaled.state["handlers"]), journaled.entries["granted"], welcome)
        self._saved_welcome = self.handlers.welcome
        # Loading must not count as a change.
        self._changes.drain()
        self._committed = self.state.revision
        stats = self.state.stats()
        logger.info("the journal is loaded: %d groups queued, %d in flight", stats.depth, stats.in_flight)


@dataclass(slots=True)
class FullDisk:
    """Remembers whether the queue's disk is full. ``reason`` says why the disk has no room; empty if it has room.

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

        If it returns True, the caller must send the notice. The next notice is due ``_NOTIFY_EVERY_S`` later.
        """
        is_due = now - self._notified_at >= _NOTIFY_EVERY_S
        if is_due:
            self._notified_at = now
        return is_due

    def status(self, now: float) -> str:
        """Return the text about the full disk that ``async-rl status`` shows; empty if the disk has room."""
        return self.reason and f"for {now - self._since:.0f} s: {self.reason}"
