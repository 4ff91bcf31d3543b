"""How the commands write: the result to standard output; progress and messages to standard error.

``Progress`` shows what a command is doing. On a terminal it redraws one line. Otherwise, and on a terminal that can't
move its cursor, it writes plain lines: the first after two seconds, then one every ten seconds. Functions that take
long have an argument of the type ``Report``, which they call when they begin with something else. Processes that keep a
log, such as the learner, use ``logged`` instead. ``print_json`` and ``size_text`` write values. While a command runs
the user's code, ``prints_to_stderr`` keeps what that prints out of the result.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

from async_rl.terminal import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

FIRST_LINE_S = 2.0
LINE_EVERY_S = 10.0
_LOOK_S = 0.2


class Report(Protocol):
    """Takes what a function is doing, such as ``loading the model``, and how much of it is done, if that is known."""

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None: ...


def ignore(what: str, done: int = 0, total: int = 0) -> None:
    """Show nothing. This is the ``Report`` of callers that show no progress."""


def can_redraw(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal on which a line can be drawn again."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def new_console(*, quiet: bool = False) -> Console:
    """Return a console that prints plain lines to standard output, also in a notebook, or nothing if ``quiet``."""
    from rich.console import Console

    return Console(markup=False, emoji=False, quiet=quiet, force_jupyter=False)


def print_json(value: Any) -> None:
    """Print ``value``, which is plain data, as one JSON object. Numbers that are not finite become null."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Let all that this process and its children print to standard output go to standard error inside the block."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def size_text(num_bytes: float) -> str:
    """Return a size with its unit and three digits, such as ``8.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 999.5:  # three digits of more would be 1e+03
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} PiB"


class Progress:
    """Shows on standard error what a command is doing. Use it as a context manager, and ``show`` as a ``Report``."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        write: Callable[[str], None] | None = None,
        first_s: float = FIRST_LINE_S,
        every_s: float = LINE_EVERY_S,
    ) -> None:
        """Prepare the display. It begins with the ``with`` block.

        Args:
            quiet: show nothing, neither progress nor messages.
            stream: where to show it; standard error if None.
            write: takes the plain lines instead of ``stream``.
            first_s: seconds after which the first plain line about an activity is written.
            every_s: seconds between two plain lines about an activity.
        """
        self._quiet, self._stream = quiet, sys.stderr if stream is None else stream
        self._write = write
        self._first_s, self._every_s = first_s, every_s
        self._what, self._done, self._total = "", 0, 0
        self._since = self._next = 0.0
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._bar: RichProgress | None = None

    def __enter__(self) -> Self:
        if self._quiet:
            return self
        if self._write is None and can_redraw(self._stream):
            self._bar = _bar(self._stream)
        else:
            self._thread = threading.Thread(target=self._write_lines, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._thread is not None:
            self._stop.set()
            self._thread.join()

    def show(self, what: str, done: int = 0, total: int = 0) -> None:
        """Show that the command is now doing ``what``; ``done`` of ``total`` parts are done, if ``total`` is not 0.

        If ``what`` is empty, show nothing, for example while a library shows a progress bar of its own.
        """
        with self._lock:
            if what != self._what:
                self._since = time.monotonic()
                self._next = self._since + self._first_s
                self._begin_bar(what)
            self._what, self._done, self._total = what, done, total
            if self._bar is not None and total:
                count = f"{done:,} of {total:,}"
                self._bar.update(self._bar.task_ids[0], completed=done, total=total, count=count)

    def note(self, line: str) -> None:
        """Write a line of text for the user, unless ``quiet``."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(visible(line), markup=False, highlight=False, soft_wrap=True)
            return
        if self._write is not None:
            self._write(line)
            return
        self._stream.write(visible(line) + "\n")
        self._stream.flush()

    def _begin_bar(self, what: str) -> None:
        if self._bar is None:
            return
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        if what:
            self._bar.add_task(visible(what), total=None, count="")
            self._bar.start()
        else:
            self._bar.stop()

    def _write_lines(self) -> None:
        while not self._stop.wait(min(_LOOK_S, self._first_s)):
            with self._lock:
                now = time.monotonic()
                if not self._what or now < self._next:
                    continue
                self._next = now + self._every_s
                count = f", {self._done:,} of {self._total:,}" if self._total else ""
                self.note(f"{self._what}{count} ({now - self._since:.0f} s so far)")


@contextmanager
def logged(logger: logging.Logger, what: str) -> Iterator[None]:
    """Log ``what``, once more every ten seconds while the block runs, and at its end how long it took.

    The last line is left out if that is less than two seconds.
    """
    started = time.monotonic()
    logger.info("%s", what)
    with Progress(write=lambda line: logger.info("%s", line), first_s=LINE_EVERY_S) as progress:
        progress.show(what)
        yield
    took_s = time.monotonic() - started
    if took_s >= FIRST_LINE_S:
        logger.info("%s: done in %.1f s", what, took_s)


def _bar(stream: TextIO) -> RichProgress:
    """Return a display of one line: what is done, a bar and a count if there is one, and the seconds.

    It leaves nothing on the screen.
    """
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class BarOfCount(BarColumn):
        def render(self, task: Task) -> Any:  # rich's bar without a total moves to and fro
            return super().render(task) if task.total else Text("")

    return RichProgress(
        SpinnerColumn("line"), TextColumn("{task.description}", markup=False), BarOfCount(bar_width=20),
        TextColumn("{task.fields[count]}", markup=False), TimeElapsedColumn(),
        console=Console(file=stream), transient=True, refresh_per_second=4, redirect_stdout=False,
    )  # fmt: skip


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
