"""Feeds the sinks of ``log.to`` from the files of a run: rows of ``metrics.jsonl``, and tables of ``rollouts/``.

What a sink has is in ``follow/NAME.jsonl`` of the run directory. So a process that follows may be killed and started
again, and a run may be logged when it has ended. ``launch/follow.py`` is that process.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from async_rl.config.config import Config
from async_rl.errors import ConfigError
from async_rl.run.directory import RunDir, write_atomically
from async_rl.run.following.sinks import MAX_TABLE_ROWS, Settings, Sink, samples_table, sink_factory
from async_rl.run.records.step_log import Row, StepLog, iter_rows, parse_row

logger = logging.getLogger(__name__)

LOAD_S = 120.0
"""Longest wait for the import of a sink's package, in seconds, on a busy machine too."""
SERVER_S = 20.0
"""Longest wait for a sink's server at the start."""
FINISH_S = 10.0
"""Longest wait for a sink's server at the end."""
MARGIN_S = 10.0
"""Time for a sink to notice that one of the last two limits has passed."""
LOOK_S = 1.0
"""Seconds between two looks at the files of a run."""
_MAX_PAUSE_S = 600.0
"""Longest pause between two attempts to open a sink whose server is away. Each may leave a folder of the sink."""
ONLY_FILE = "metrics.jsonl has all rows"


class Sinks:
    """The sinks of a run, each fed by a thread, so that none waits for another."""

    def __init__(
        self, config: Config, run_dir: RunDir, note: Callable[[str], None], *, refuses: bool, stats_pid: int
    ) -> None:
        """Open the sinks of ``log.to``, and begin to feed them.

        Args:
            note: tells the user a line of text. Any thread calls it.
            refuses: whether a sink that can't be opened is an error, because the run has not begun.
            stats_pid: the process whose load is measured.

        Raises:
            ConfigError: ``refuses``, and a sink or its server does.
        """
        self._run_dir, self._note = run_dir, note
        self._feeds: list[Feed] = []
        if config.log.to:
            settings = _settings(config, run_dir, stats_pid)
            self._feeds = [Feed(name, settings, note) for name in config.log.to]
        deadline = time.monotonic() + LOAD_S + SERVER_S + MARGIN_S
        for feed in self._feeds:
            feed.is_tried.wait(max(0.0, deadline - time.monotonic()))
            if feed.refusal and refuses:
                raise ConfigError(
                    f"log.to: {feed.name} did not start: {feed.refusal}; correct the cause, or take "
                    f"{json.dumps(feed.name)} out of log.to"
                )
            if feed.refusal:
                note(f"{feed.name} did not start: {feed.refusal}; the run goes on without it, and {ONLY_FILE}")

    @property
    def places(self) -> dict[str, str]:
        """Where each sink has the run, by the sink's name: a directory, or an address; empty if it is not open."""
        return {feed.name: feed.place for feed in self._feeds}

    def finish(self, *, is_failed: bool) -> bool:
        """Feed what is left, and finish the run everywhere, within the limits. Return whether nothing is missing."""
        for feed in self._feeds:
            feed.end(is_failed=is_failed)
        deadline, is_complete = time.monotonic() + FINISH_S + MARGIN_S, True
        for feed in self._feeds:
            feed.join(max(0.0, deadline - time.monotonic()))
            remedy = f"{ONLY_FILE}, and async-rl follow {self._run_dir.path} sends what is left"
            if feed.is_unsent or (feed.is_alive() and feed.place):
                own = f"to send what is left: {feed.remedy}" if feed.remedy else remedy
                self._note(f"{feed.name} did not send everything within {FINISH_S:g} s at the end of the run; {own}")
                is_complete = False
            if steps := feed.missing_steps():
                span = f"{min(steps)} to {max(steps)}" if len(steps) > 1 else f"{steps[0]}"
                self._note(f"{len(steps)} rows are missing in {feed.name} (steps {span}); {remedy}")
                is_complete = False
        return is_complete


class Feed(threading.Thread):
    """Feeds one sink until ``end`` is called.

    Attributes:
        place, remedy: those of the sink; empty before it is open.
        refusal: why the sink can't be opened although its server answers; empty if there is no such cause.
        is_tried: set after the first attempt to open the sink.
        is_unsent: the sink's server did not take the last rows in time, which the sink's own files have.
    """

    def __init__(self, name: str, settings: Settings, note: Callable[[str], None]) -> None:
        """Start the thread. It calls ``note`` with text for the user."""
        super().__init__(name=name, daemon=True)
        self.place, self.remedy, self.refusal = "", "", ""
        self.is_tried, self.is_unsent = threading.Event(), False
        self._settings, self._note = settings, note
        self._run_dir = RunDir(Path(settings["directory"]))
        self._taken, self._refused, self._last_step = set[str](), set[str](), -1
        path = self._run_dir.follow / f"{name}.jsonl"
        for record in iter_rows(path, is_whole=lambda record: record.keys() >= {"digest", "is_step", "is_taken"}):
            self._keep(record)
        self._log = StepLog(path)
        self._inode, self._offset = 0, 0
        self._samples_step = -1
        self._told: set[str] = set()
        self._ending, self._is_failed = threading.Event(), False
        self.start()

    def end(self, *, is_failed: bool) -> None:
        """Feed what is left, and finish the run in the sink. The thread ends then."""
        self._is_failed = is_failed
        self._ending.set()

    def missing_steps(self) -> list[int]:
        """Return the steps of the rows that the sink has not."""
        return [row["step"] for row in iter_rows(self._run_dir.metrics) if _digest(row) not in self._taken]

    def run(self) -> None:
        sink, has_ended = self._open(), False
        while sink is not None and not has_ended:
            has_ended = self._ending.is_set()
            try:
                self._feed(sink)
            except Exception as error:  # its server is away
                self._tell("fails", error)
            self._ending.wait(LOOK_S)
        try:
            if sink is not None:
                sink.finish(is_failed=self._is_failed)
        except TimeoutError:
            self.is_unsent = True
        except Exception as error:
            self._tell("fails", error)
        self._log.close()

    def _open(self) -> Sink | None:
        """Open the sink; while its server is away, again and again until the run has ended. None if that failed."""
        pause_s, is_last = LOOK_S, False
        while not is_last:
            is_last, began = self._ending.is_set(), float("inf")
            try:
                factory = sink_factory(self.name)
                began = time.monotonic()
                sink = factory(self._settings)
                self.place, self.remedy = sink.place, sink.remedy
                return sink
            except Exception as error:  # of the sink or of the network
                is_away = _is_of_network(error) or time.monotonic() - began >= 0.9 * SERVER_S
                if not is_away and not self.is_tried.is_set():
                    logger.warning("%s did not start", self.name, exc_info=True)
                    self.refusal = _describe(error)
                    return None
                self._tell("did not start", error)
            finally:
                self.is_tried.set()
            self._ending.wait(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        return None

    def _feed(self, sink: Sink) -> None:
        """Send what the sink has not, up to the end of the files. Raises what a server that is away raises."""
        for row in self._new_rows():
            self._feed_samples(sink)
            is_step = any(not key.startswith("eval/") for key in row.keys() - {"step", "time_s"})
            self._samples_step = row["step"] if is_step else self._samples_step
            if (digest := _digest(row)) not in self._taken:
                went_back = is_step and row["step"] <= self._last_step and digest not in self._refused
                self._send(partial(_write, sink, row, went_back=went_back), row["step"], digest, is_step=is_step)
        self._feed_samples(sink)

    def _feed_samples(self, sink: Sink) -> None:
        """Send the rollouts of the newest step, which are written after its row, if it has any."""
        step = self._samples_step
        path = self._run_dir.rollouts / f"step-{step:06d}.jsonl"
        if path.exists():
            with path.open(encoding="utf-8") as file:
                lines = list(islice(file, MAX_TABLE_ROWS))
            if (digest := _digest([path.name, *lines])) not in self._taken:
                self._send(partial(_write_samples, sink, step, lines), step, digest, is_step=False)
            self._samples_step = -1

    def _send(self, send: Callable[[], None], step: int, digest: str, *, is_step: bool) -> None:
        """Send one row or table. Raises what a server that is away raises."""
        try:
            send()
            is_taken = True
        except Exception as error:
            if _is_of_network(error):
                raise
            self._tell("did not take a row", error)
            is_taken = False
        record = {"step": step, "digest": digest, "is_step": is_step, "is_taken": is_taken}
        self._log.write(record)
        self._keep(record)

    def _keep(self, record: Row) -> None:
        (self._taken if record["is_taken"] else self._refused).add(record["digest"])
        self._last_step = record["step"] if record["is_step"] else self._last_step

    def _tell(self, what: str, error: Exception) -> None:
        """Log an error of the sink, and tell the user, if it is the first of its kind."""
        if what not in self._told:
            self._told.add(what)
            logger.warning("%s %s", self.name, what, exc_info=error)
            again = "" if what == "did not take a row" else ", it is tried again"
            self._note(f"{self.name} {what}: {_describe(error)}; the run goes on{again}, and {ONLY_FILE}")

    def _new_rows(self) -> Iterator[Row]:
        """Yield the rows of ``metrics.jsonl`` that were not read yet; all of them if it is another file now."""
        with suppress(FileNotFoundError), self._run_dir.metrics.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            self._inode, self._offset = inode, self._offset if inode == self._inode else 0
            file.seek(self._offset)
            for line in file:
                if line.endswith(b"\n"):
                    if (row := parse_row(line.decode(errors="replace"))) is not None:
                        yield row
                    self._offset += len(line)


def _write(sink: Sink, row: Row, *, went_back: bool) -> None:
    if went_back:
        sink.rewind(row["step"] - 1)
    sink.write({key: value for key, value in row.items() if value is not None})


def _write_samples(sink: Sink, step: int, lines: Sequence[str]) -> None:
    sink.table(step, *samples_table(step, [json.loads(line) for line in lines]))


def _settings(config: Config, run_dir: RunDir, stats_pid: int) -> Settings:
    """Return what sinks are opened with. The run's id in them is in the file ``logger_id``, for a resume."""
    id_file = run_dir.path / "logger_id"
    if not id_file.exists():
        write_atomically(id_file, uuid.uuid4().hex[:12])
    return {
        "project": config.log.project, "name": config.run.name or run_dir.path.name,
        "id": id_file.read_text(encoding="utf-8"), "directory": str(run_dir.path), "mode": config.log.wandb_mode,
        "config": config.model_dump(mode="json"), "limit_s": SERVER_S, "finish_s": FINISH_S, "stats_pid": stats_pid,
    }  # fmt: skip


def _describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _is_of_network(error: BaseException | None) -> bool:
    """Return whether a server could not be reached, which packages hide behind errors of their own."""
    while error is not None:
        packages = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
        if isinstance(error, ConnectionError | TimeoutError) or packages & {"requests", "urllib3", "httpx"}:
            return True
        error = error.__cause__ or error.__context__
    return False


def _digest(data: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(data).encode())
