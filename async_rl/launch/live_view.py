"""Show the progress of a run while ``launch`` runs it: a live table on a terminal, otherwise one line per step.

The figures come from new rows of ``metrics.jsonl``, and from a thread that asks the queue server for its status.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from async_rl.errors import AsyncRLError
from async_rl.launch.hints import Hints
from async_rl.launch.status import ask_status, awaited_by, generator_troubles
from async_rl.launch.supervisor import ProcessStatus
from async_rl.net.keys import ClientKeys
from async_rl.run.directory import RunDir
from async_rl.run.step_log import Row, StepLogTail
from async_rl.terminal import visible, visible_values

POLL_S = 1.0
STATUS_TIMEOUT_S = 2.0
REFRESH_S = 0.5
ETA_STEPS = 20
SHOWN_WAIT_S = 2.0
MAX_NAMED_PROCESSES = 8
LINE_EVERY_S = 10.0
"""Seconds between two lines of ``PlainView`` while no step is trained."""
_MAX_TROUBLES = 3
_LOG_BYTES = 8 << 10
_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d \S+ (?:INFO|WARNING) [\w.]+: (.+)$")
_GENERATOR_KEYS = ("throughput/generated_tokens_per_s", "idle/generators")


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


class RunProgress:
    """Collects the figures to show from the rows of ``metrics.jsonl``.

    Attributes:
        num_steps: the number of steps of the whole run.
        step_row: the row of the newest step; empty before the first step.
        evals: for each evaluation set, pairs (step, accuracy) in the order of the evaluations.
    """

    def __init__(self, num_steps: int, history: Sequence[Row]) -> None:
        self.num_steps = num_steps
        self.step_row: Row = {}
        self.evals: dict[str, list[tuple[int, float]]] = {}
        self._times: deque[tuple[int, float]] = deque(maxlen=ETA_STEPS)
        for row in history:
            self.add(row)
        self._times.clear()
        for key in _GENERATOR_KEYS:  # of generators that have ended
            self.step_row.pop(key, None)

    @property
    def is_training(self) -> bool:
        """Whether this launch has trained a step, and has further steps to train."""
        return bool(self._times) and self.step_row["step"] < self.num_steps

    def add(self, row: Row) -> None:
        """Take the figures from ``row``, the next row of ``metrics.jsonl``."""
        for dataset, accuracy in eval_accuracies(row).items():
            self.evals.setdefault(dataset, []).append((row["step"], accuracy))
        if is_step_row(row):
            if self._times and row["step"] <= self._times[-1][0]:
                self._times.clear()  # rolled back: measure the pace again
            # Generators report less often than the learner steps: show their figures until the next ones.
            kept = {key: self.step_row[key] for key in _GENERATOR_KEYS if key in self.step_row}
            self.step_row = kept | row
            self._times.append((row["step"], row["time_s"]))

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds until the run's last step, at the pace of the last ``ETA_STEPS`` steps.

        None if this launch has seen fewer than two steps.
        """
        if len(self._times) < 2:
            return None
        (first_step, first_s), (last_step, last_s) = self._times[0], self._times[-1]
        return (last_s - first_s) / (last_step - first_step) * max(0, self.num_steps - last_step)


def newest_messages(logs: Path) -> dict[str, str]:
    """Return the newest log message of the first learner rank and of the first generator, if they have logged one.

    The messages say what these processes are doing. ``logs`` is the directory of the logs.
    """
    found = {name: newest_message(logs / f"{name}.log") for name in ("learner-0", "generator-0")}
    return {name: message for name, message in found.items() if message}


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
        if found := _LOG_LINE.match(line):
            return found[1]
    return ""


def is_step_row(row: Row) -> bool:
    """Return whether ``row`` of ``metrics.jsonl`` is about an optimizer step. All other rows are about evaluations."""
    return "version" in row and "tokens/trained" in row


def eval_accuracies(row: Row) -> dict[str, float]:
    """Return the accuracy of each evaluation set in ``row`` of ``metrics.jsonl``, by name; empty if it has none."""
    names = [key.split("/") for key in row if key.startswith("eval/") and key.endswith("/accuracy")]
    return {"/".join(parts[1:-1]): row["/".join(parts)] for parts in names if row["/".join(parts)] is not None}


def eval_lines(row: Row) -> list[str]:
    """Return one line of text with the accuracy for each evaluation set in ``row``, a row of ``metrics.jsonl``.

    ``step`` is the step that requested the evaluation. Training goes on meanwhile, so the line may come after those of
    later steps, and several versions of the weights may have answered: the line then names the first and the last.
    A line also gives the number of dataset rows without an answer if there are any, because they count as wrong.
    """
    lines: list[str] = []
    for dataset, accuracy in eval_accuracies(row).items():
        missing, rows, first, last = (
            row.get(f"eval/{dataset}/{key}") for key in ("unanswered", "rows", "version_min", "version_max")
        )
        versions = f" (versions {first} to {last})" if first != last else ""
        without = f" ({missing} of {rows} rows without an answer)" if missing else ""
        lines.append(f"eval {dataset} of step {row['step']}{versions}: accuracy {accuracy:.3f}{without}")
    return lines


def step_line(row: Row, num_steps: int, eta_s: float | None) -> str:
    """Return one line of text with the figures of an optimizer step.

    Args:
        row: the step's row of ``metrics.jsonl``.
        num_steps: the number of steps of the whole run.
        eta_s: estimated seconds until the run's last step; None if there is no estimate yet.
    """
    parts = [f"step {row['step']}/{num_steps}"]
    parts += [
        f"{label} {_number(row.get(key))}{unit}"
        for label, key, unit in (
            ("reward", "reward/mean", ""),
            ("accuracy", "accuracy/mean", ""),
            ("staleness", "staleness/mean", f" (max {_number(row.get('staleness/max'))})"),
            ("queue", "queue/depth", f" + {_number(row.get('queue/in_flight'))} in flight"),
            ("trained", "throughput/trained_tokens_per_s", " tok/s"),
            ("generated", "throughput/generated_tokens_per_s", " tok/s"),
        )
        if row.get(key) is not None
    ]
    idle = [
        f"{who} {row[f'idle/{who}']:.0%}" for who in ("learner", "generators") if row.get(f"idle/{who}") is not None
    ]
    parts += [f"idle {', '.join(idle)}"] if idle else []
    parts += [f"ETA {duration(eta_s)}"] if eta_s is not None else []
    return " | ".join(parts)


class PlainView:
    """Shows a run's progress as lines of text, for logs and pipes: one line per step, evaluation or event.

    Before the first step and after the last one, a line every few seconds says what the processes are doing.
    """

    def __init__(self, console: Console, metrics: Path, num_steps: int) -> None:
        self._console, self._tail = console, StepLogTail(metrics)
        self._progress, self._hints = RunProgress(num_steps, self._tail.history), Hints()
        self._logs = RunDir(metrics.parent).logs
        self._started_at = self._noted_at = time.monotonic()

    def refresh(self, processes: Sequence[ProcessStatus]) -> None:
        for row in self._tail.poll():
            self._progress.add(row)
            for line in eval_lines(row):
                self.note(line)
            if is_step_row(row):
                self.note(step_line(self._progress.step_row, self._progress.num_steps, self._progress.eta_s))
                for line in self._hints.add(row):
                    self.note(line)
        now = time.monotonic()
        if processes and not self._progress.is_training and now - self._noted_at >= LINE_EVERY_S:
            doing = "; ".join(f"{name}: {message}" for name, message in newest_messages(self._logs).items())
            self.note(f"{duration(now - self._started_at)} so far; {doing or 'starting'}")

    def note(self, line: str) -> None:
        self._noted_at = time.monotonic()
        self._console.print(visible(line), markup=False, highlight=False, soft_wrap=True)

    def watch_queue(self, address: str) -> None:
        self.note(f"queue server at {address}")

    def close(self) -> None:
        """Print the lines for the rows of ``metrics.jsonl`` that were written since the last refresh."""
        self.refresh([])


class LiveView:
    """Shows a run's progress on a terminal, as a table that is redrawn twice a second. Events scroll above the table.

    ``keys`` are the keys for requests to the queue server; None if the run uses no keys.
    """

    def __init__(self, console: Console, metrics: Path, num_steps: int, keys: ClientKeys | None = None) -> None:
        self._console, self._tail, self._keys = console, StepLogTail(metrics), keys
        self._progress, self._hints = RunProgress(num_steps, self._tail.history), Hints()
        self._logs = RunDir(metrics.parent).logs
        self._poller: StatusPoller | None = None
        self._has_queue_ended = False
        self._drawn_at, self._started_at = 0.0, time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def refresh(self, processes: Sequence[ProcessStatus]) -> None:
        now = time.monotonic()
        if now - self._drawn_at < REFRESH_S:
            return
        self._drawn_at = now
        # At the end of a run the queue server ends before the learner: that it answers no more is no problem then.
        self._has_queue_ended = ("queue", "done") in ((process.name, process.state) for process in processes)
        self._show_rows()
        self._live.update(self._draw(processes), refresh=True)

    def note(self, line: str) -> None:
        self._console.print(visible(line), markup=False, highlight=False, soft_wrap=True)

    def watch_queue(self, address: str) -> None:
        self.note(f"queue server at {address}")
        self._poller = StatusPoller(lambda: visible_values(ask_status(address, STATUS_TIMEOUT_S, self._keys)))

    def close(self) -> None:
        """Draw the table a last time, and leave it on the screen."""
        if self._poller is not None:
            self._poller.close()
            self._has_queue_ended = True
        self._show_rows()
        self._live.update(self._draw([]), refresh=True)
        self._live.stop()

    def _show_rows(self) -> None:
        for row in self._tail.poll():
            self._progress.add(row)
            for line in [*eval_lines(row), *(self._hints.add(row) if is_step_row(row) else [])]:
                self.note(line)

    def _draw(self, processes: Sequence[ProcessStatus]) -> RenderableType:
        progress, row = self._progress, self._progress.step_row
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="bold")
        table.add_column()
        step = row.get("step", 0)
        eta = f", ETA {duration(progress.eta_s)}" if progress.eta_s else ""
        so_far = duration(time.monotonic() - self._started_at)
        table.add_row("step", f"{step}/{progress.num_steps}, {so_far} so far{eta}")
        if processes and not progress.is_training:
            for name, message in newest_messages(self._logs).items():
                table.add_row(name, visible(message))
        status = self._poller.latest if self._poller is not None and not self._has_queue_ended else {}
        if evaluations := status.get("evaluations", ()):
            table.add_row("evaluating", ", ".join(evaluations))
        if row:
            self._add_figures(table, row)
        else:
            table.add_row("queue", self._queue_text(row))
        for generator_id, trouble in list(generator_troubles(status.get("generators", ())).items())[:_MAX_TROUBLES]:
            table.add_row("problem", f"generator {generator_id}: {trouble}")
        if waits := _waits_text(status.get("waits", ())):
            table.add_row("waiting", waits)
        for dataset, points in progress.evals.items():
            shown = points if len(points) <= 5 else [points[0], *points[-4:]]
            table.add_row(f"eval {dataset}", "  ".join(f"{accuracy:.3f} @{at}" for at, accuracy in shown))
        return Group(table, _processes_text(processes)) if processes else table

    def _add_figures(self, table: Table, row: Row) -> None:
        table.add_row("reward, accuracy", f"{_number(row.get('reward/mean'))}, {_number(row.get('accuracy/mean'))}")
        table.add_row("staleness", f"{_number(row.get('staleness/mean'))} (max {_number(row.get('staleness/max'))})")
        table.add_row("queue", self._queue_text(row))
        trained, generated = (row.get(f"throughput/{side}_tokens_per_s") for side in ("trained", "generated"))
        table.add_row("tokens/s", f"trained {_number(trained)}, generated {_number(generated)}")
        table.add_row(
            "idle", f"learner {_share(row.get('idle/learner'))}, generators {_share(row.get('idle/generators'))}"
        )

    def _queue_text(self, row: Row) -> str:
        status = self._poller.latest if self._poller is not None else {}
        depth = status.get("depth", row.get("queue/depth"))
        in_flight = status["ledger"]["groups"]["in_flight"] if status else row.get("queue/in_flight")
        text = f"{_number(depth)} groups ready, {_number(in_flight)} in flight"
        error = self._poller.error if self._poller is not None and not self._has_queue_ended else ""
        return f"{text} (no answer: {error.splitlines()[0]})" if error else text


def _processes_text(processes: Sequence[ProcessStatus]) -> RenderableType:
    """Return text for the terminal that lists all processes with their states.

    If there are more than ``MAX_NAMED_PROCESSES``, the text gives only their number by kind and state.
    """
    if len(processes) <= MAX_NAMED_PROCESSES:
        texts = [Text(_process_line(m.name, m.state, m.num_restarts), style=_style(m.state)) for m in processes]
    else:
        kinds: dict[tuple[str, str], list[ProcessStatus]] = {}
        for process in processes:
            kinds.setdefault((process.name.partition("-")[0], process.state), []).append(process)
        texts = [
            Text(_process_line(kind, f"{len(same)} {state}", sum(m.num_restarts for m in same)), style=_style(state))
            for (kind, state), same in kinds.items()
        ]
    return Columns(texts, padding=(0, 3, 0, 0))


def _process_line(name: str, state: str, num_restarts: int) -> str:
    restarts = f", {num_restarts} restart{'s' if num_restarts > 1 else ''}" if num_restarts else ""
    return f"{name}: {state}{restarts}"


def _style(state: str) -> str:
    return "green" if state in ("running", "done") else "yellow"


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


def duration(seconds: float) -> str:
    """Return a number of seconds as text, such as ``1h02m``, ``3m05s`` or ``12s``."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
