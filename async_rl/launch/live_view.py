"""Show the progress of a run while ``launch`` runs it: a live table on a terminal, otherwise one line per step.

The figures come from new rows of ``metrics.jsonl``, and from a thread that asks the queue server for its status.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from async_rl.errors import AsyncRLError
from async_rl.launch.hints import Hints, LedgerNotes
from async_rl.launch.status import ask_status, awaited_by, by_trouble, generator_troubles
from async_rl.launch.supervisor import ProcessStatus
from async_rl.net.keys import ClientKeys
from async_rl.run.directory import RunDir
from async_rl.run.figures.progress import (
    RunProgress,
    duration,
    eval_lines,
    is_step_row,
    step_figures,
    step_line,
    who_waits,
)
from async_rl.run.notes import NotesTail
from async_rl.run.records.step_log import Row, StepLogTail
from async_rl.terminal import visible, visible_values

POLL_S = 1.0
STATUS_TIMEOUT_S = 2.0
REFRESH_S = 0.5
SHOWN_WAIT_S = 2.0
LINE_EVERY_S = 10.0
"""Seconds between two lines of ``PlainView`` while no step is trained."""
_MAX_TROUBLES = 3
_LOG_BYTES = 8 << 10
_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d \S+ (?:INFO|WARNING) [\w.]+: (.+)$")


class StatusPoller:
    """A thread that asks the queue server for its status every ``POLL_S`` seconds.

    Attributes:
        latest: the newest answer; empty before the first one.
        error: the message of the last request if it failed, else empty.
    """

    def __init__(self, ask: Callable[[], Mapping[str, Any]]) -> None:
        self._ask = ask
        self._stop = threading.Event()
        self.latest: Mapping[str, Any] = {}
        self.error = ""
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                self.latest = self._ask()
                self.error = ""
            except AsyncRLError as error:  # shown, and asked again: the supervisor decides whether the queue is dead
                self.error = str(error)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(STATUS_TIMEOUT_S + POLL_S)


def newest_messages(logs: Path) -> dict[str, str]:
    """Return the newest log message of the first learner rank and of the first generator, if they have logged one.

    The messages say what these processes are doing. ``logs`` is the directory of the logs.
    """
    messages = {name: newest_message(logs / f"{name}.log") for name in ("learner-0", "generator-0")}
    return {name: message for name, message in messages.items() if message}


def newest_message(log: Path) -> str:
    """Return the newest message that a process has logged to the file ``log`` since its last start; empty if none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            lines = file.read().decode("utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    for line in reversed(lines[:-1]):
        if line.startswith("--- "):  # the supervisor's line about the start
            return ""
        if match := _LOG_LINE.match(line):
            return match[1]
    return ""


class _View:
    """What both views of a run's progress share: they show new notes and evaluations as lines of text."""

    def __init__(self, console: Console, metrics: Path, num_steps: int) -> None:
        self._console, self._tail, run_dir = console, StepLogTail(metrics), RunDir(metrics.parent)
        self._progress = RunProgress(num_steps, self._tail.history)
        self._hints = Hints(self._tail.history)
        self._logs, self._notes, self._ledger_notes = run_dir.logs, NotesTail(run_dir.notes), LedgerNotes(run_dir)
        self._started_at = time.monotonic()

    def note(self, line: str) -> None:
        self._console.print(visible(line), markup=False, highlight=False, soft_wrap=True)

    def watch_queue(self, address: str) -> None:
        self.note(f"queue server at {address}")

    def _show_news(self, *, has_steps: bool) -> None:
        """Show what was written since the last call; a line for each step only if ``has_steps``, with all its figures
        if there is a note about it.
        """
        for line in self._notes.poll():
            self.note(line)
        for row in self._tail.poll():
            self._progress.add(row)
            lines, notes = eval_lines(row), self._hints.add(row)
            if has_steps and is_step_row(row):
                lines.append(step_line(self._progress, has_all=bool(notes)))
            for line in [*lines, *notes]:
                self.note(line)
        for line in self._ledger_notes.poll():
            self.note(line)


class PlainView(_View):
    """Shows a run's progress as lines of text, for logs and pipes: one line per step, evaluation or event.

    Before the first step and after the last one, a line every few seconds says what the processes are doing.
    """

    def __init__(self, console: Console, metrics: Path, num_steps: int) -> None:
        super().__init__(console, metrics, num_steps)
        self._noted_at = self._started_at

    def refresh(self, processes: Sequence[ProcessStatus]) -> None:
        self._show_news(has_steps=True)
        now = time.monotonic()
        if processes and not self._progress.is_training and now - self._noted_at >= LINE_EVERY_S:
            doing = "; ".join(f"{name}: {message}" for name, message in newest_messages(self._logs).items())
            self.note(f"{duration(now - self._started_at)} so far; {doing or 'starting'}")

    def note(self, line: str) -> None:
        self._noted_at = time.monotonic()
        super().note(line)

    def close(self) -> None:
        """Print the lines for the rows of ``metrics.jsonl`` that were written since the last refresh."""
        self.refresh([])


class LiveView(_View):
    """Shows a run's progress on a terminal as a table that is redrawn twice a second. Events scroll above the table.

    ``keys`` are the keys for requests to the queue server; None if the run uses no keys.
    """

    def __init__(self, console: Console, metrics: Path, num_steps: int, keys: ClientKeys | None = None) -> None:
        super().__init__(console, metrics, num_steps)
        self._keys = keys
        self._poller: StatusPoller | None = None
        self._has_queue_ended = False
        self._drawn_at = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def refresh(self, processes: Sequence[ProcessStatus]) -> None:
        now = time.monotonic()
        if now - self._drawn_at < REFRESH_S:
            return
        self._drawn_at = now
        # At the end of a run the queue server ends before the learner: that it answers no more is no problem then.
        self._has_queue_ended = ("queue", "done") in ((process.name, process.state) for process in processes)
        self._show_news(has_steps=False)
        self._live.update(self._draw(processes), refresh=True)

    def watch_queue(self, address: str) -> None:
        super().watch_queue(address)
        self._poller = StatusPoller(lambda: visible_values(ask_status(address, STATUS_TIMEOUT_S, self._keys)))

    def close(self) -> None:
        """Draw the table a last time, and leave it on the screen."""
        if self._poller is not None:
            self._poller.close()
            self._has_queue_ended = True
        self._show_news(has_steps=False)
        self._live.update(self._draw([]), refresh=True)
        self._live.stop()

    def _draw(self, processes: Sequence[ProcessStatus]) -> RenderableType:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="bold")
        table.add_column()
        for label, text in self._rows(processes):
            # As Text: what stands in square brackets, as a section of a config, is no markup.
            table.add_row(Text(visible(label)), Text(visible(text)))
        return Group(table, _processes_text(processes)) if processes else table

    def _rows(self, processes: Sequence[ProcessStatus]) -> Iterator[tuple[str, str]]:
        progress, row = self._progress, self._progress.step_row
        step = row.get("step", 0)
        eta = f", ETA {duration(progress.eta_s)}" if progress.eta_s else ""
        so_far = duration(time.monotonic() - self._started_at)
        yield "step", f"{step}/{progress.num_steps}, {so_far} so far{eta}"
        if processes and not progress.is_training:
            yield from newest_messages(self._logs).items()
        status = self._poller.latest if self._poller is not None and not self._has_queue_ended else {}
        if evaluations := status.get("evaluations", ()):
            yield "evaluating", ", ".join(evaluations)
        for figures in step_figures(row | self._queue_figures()):
            labels, texts = zip(*figures, strict=True)
            yield ", ".join(labels), ", ".join(texts)
        if self._poller is not None and self._poller.error and not self._has_queue_ended:
            yield "queue server", f"no answer: {self._poller.error.splitlines()[0]}"
        if row and (text := who_waits(progress.rows)):
            yield "who waits for whom", text
        troubles = by_trouble(generator_troubles(status.get("generators", ())))
        for generator_ids, trouble in list(troubles.items())[:_MAX_TROUBLES]:
            yield "problem", f"generator {generator_ids}: {trouble}"
        if trouble := status.get("learner_trouble"):
            yield "problem", trouble
        for note in self._hints.health.notes if processes else ():  # at the end the lines above have them
            yield "problem", f"step {note.step}: {note.finding}"
        if waits := _waits_text(status.get("waits", ())):
            yield "waiting", waits
        for dataset, points in progress.evals.items():
            shown = points if len(points) <= 5 else [points[0], *points[-4:]]
            yield f"eval {dataset}", "  ".join(f"{accuracy:.3f} @{at}" for at, accuracy in shown)

    def _queue_figures(self) -> Row:
        """Return what the queue server says now about figures that the row of a step has, too."""
        if self._poller is None or not (status := self._poller.latest):
            return {}
        return {"queue/depth": status.get("depth"), "queue/in_flight": status["ledger"]["groups"]["in_flight"]}


def _processes_text(processes: Sequence[ProcessStatus]) -> RenderableType:
    """Return text for the terminal that lists all processes with their states."""
    return Columns([_process_text(process) for process in processes], padding=(0, 3, 0, 0))


def _process_text(process: ProcessStatus) -> Text:
    number = process.num_restarts
    restarts = f", {number} restart{'s' if number > 1 else ''}" if number else ""
    style = "green" if process.state in ("running", "done") else "yellow"
    return Text(f"{process.name}: {process.state}{restarts}", style=style)


def _waits_text(waits: Sequence[Mapping[str, Any]]) -> str:
    """Return text that names up to three processes that wait for something, what each waits for, and how long.

    ``waits`` come from the queue server's status. Waits shorter than ``SHOWN_WAIT_S`` seconds are left out.
    """
    shown = [
        f"{wait['who']} for {awaited_by(wait)} ({duration(wait['since_s'])})"
        for wait in waits
        if wait["since_s"] >= SHOWN_WAIT_S
    ]
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return ", ".join(shown[:3]) + more
