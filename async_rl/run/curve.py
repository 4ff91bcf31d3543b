"""Draw ``curve.png``, a picture of a run's metrics.

``launch`` draws it again and again while the run goes (``CurveUpdater``), and once more when the run ends. The learner
draws it only at the end of the run. Only then does the learner import matplotlib.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rl.run.directory import RunDir
from async_rl.run.lock import RunLock
from async_rl.run.metrics import Row
from async_rl.run.step_log import read_rows
from async_rl.terminal import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"reward": "#0072b2", "accuracy": "#009e73", "staleness": "#d55e00", "speed": "#000000", "ess": "#e69f00"}
_IDLE = {"idle/learner": ("learner", "#0072b2"), "idle/generators": ("generators", "#cc79a7")}
_EVAL_COLORS = ("#cc79a7", "#e69f00", "#56b4e9", "#000000")


LOOK_S = 1.0
"""Seconds between two looks at the size of ``metrics.jsonl``."""
FIRST_DRAWING_S = 10.0
MIN_PAUSE_S = 10.0
PAUSE_PER_DRAWING = 50.0
"""Seconds without drawing after a drawing that took one second, so that drawing takes at most 2 % of the time."""


class CurveUpdater:
    """A thread of ``launch`` that draws ``curve.png`` again when ``metrics.jsonl`` has changed.

    The first drawing begins ``FIRST_DRAWING_S`` seconds after the start of the thread. No two drawings run at the same
    time. The first picture is announced, unless the last step is trained by then. A drawing that fails is reported
    once, and is tried again after the usual pause.
    """

    def __init__(
        self,
        run_dir: RunDir,
        lock: RunLock,
        note: Callable[[str], None],
        num_steps: int,
        *,
        look_s: float = LOOK_S,
        first_s: float = FIRST_DRAWING_S,
    ) -> None:
        """Start the thread.

        Args:
            lock: the lock of the run directory. Nothing is written after another process has taken the directory over.
            note: shows a line of text to the user. The thread calls it.
            num_steps: the number of steps of the whole run.
            look_s: seconds between two looks at ``metrics.jsonl``.
            first_s: seconds before the first drawing.
        """
        self._run_dir, self._lock, self._note, self._look_s = run_dir, lock, note, look_s
        self._num_steps = num_steps
        self._drawn: tuple[int, int] | None = None
        self._is_announced = False
        self._draw_at = time.monotonic() + first_s
        self._reported = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="curve", daemon=True)
        self._thread.start()

    def draw(self) -> None:
        """Draw the curve now. Call this only after ``close``."""
        problem = draw_curve(self._run_dir, self._lock)
        if problem and not self._reported:
            self._note(problem)
        self._reported = bool(problem)

    def close(self) -> None:
        """End the thread. Wait until it has finished a drawing that it has begun."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._look_s):
            found = _size_of(self._run_dir.metrics)
            started = time.monotonic()
            if found == self._drawn or started < self._draw_at or not self._lock.is_current:
                continue
            self._drawn = found
            self.draw()
            ended = time.monotonic()
            self._draw_at = ended + pause_after(ended - started)
            if not self._is_announced and not self._reported and self._is_training():
                self._note(f"curve: {self._run_dir.curve}, drawn again while the run goes")
                self._is_announced = True

    def _is_training(self) -> bool:
        """Return whether the run has metrics, so that there is a picture, and has further steps to train."""
        rows = read_rows(self._run_dir.metrics)
        return bool(rows) and max(row["step"] for row in rows) < self._num_steps


def pause_after(drawing_s: float) -> float:
    """Return how many seconds to wait after a drawing that took ``drawing_s`` seconds."""
    return max(MIN_PAUSE_S, PAUSE_PER_DRAWING * drawing_s)


def draw_curve(run_dir: RunDir, lock: RunLock | None = None) -> str:
    """Draw ``curve.png`` if the run has metrics. Return why it could not be drawn; an empty text if nothing failed.

    A missing picture must not end a run, so this function raises no exception.
    """
    try:
        write_curve(run_dir, lock)
    except Exception as error:  # whatever fails in the drawing: the caller reports it
        return f"can't draw {run_dir.curve}: {type(error).__name__}: {error}; the run does not need it and goes on"
    return ""


def write_curve(run_dir: RunDir, lock: RunLock | None = None) -> bool:
    """Draw what a run learns, how fast it is and how old its data is, and write the picture to ``curve.png``.

    Return whether the picture was written. It is not if the run has no metrics yet, or if ``lock`` is no longer valid.
    A reader never sees half a file.
    """
    rows = read_rows(run_dir.metrics)
    if not rows:
        return False
    figure = new_figure(13, 8)
    panels = figure.subplots(3, 2, sharex=True)
    (accuracy, speed), (reward, idle), (staleness, ess) = panels
    figure.suptitle(plain_label(run_dir.path.resolve().name), fontsize=13)
    _draw_accuracy(accuracy, rows)
    _draw_mean(reward, rows, "reward/mean", _COLORS["reward"], "mean of the step's rollouts")
    reward.set_ylabel("reward")
    _draw_staleness(staleness, rows)
    _draw_mean(speed, rows, "time/step_s", _COLORS["speed"], "of each step")
    speed.set_ylabel("seconds per step")
    speed.set_ylim(bottom=0)
    _mark_evaluations(speed, rows)
    for key, (label, color) in _IDLE.items():
        _draw_mean(idle, rows, key, color, label)
    idle.set(ylabel="idle share of the time", ylim=(-0.02, 1.08))
    _draw_mean(ess, rows, "ratio/ess", _COLORS["ess"], "of the step's tokens")
    # The range begins at 0.98 or below, so that rounding errors of a healthy run don't look like changes.
    ess.set(ylabel="effective sample size", ylim=(min(0.98, ess.get_ylim()[0]), 1.002))
    for axes in panels[-1]:
        axes.set_xlabel("optimizer step")
    return save_picture(figure, run_dir.curve, lock)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches. It needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain_label(name: str) -> str:
    """Return ``name`` as a label that matplotlib draws as it is. Text between dollar signs would be a formula."""
    return visible(name).replace("$", r"\$")


def save_picture(figure: Figure, path: Path, lock: RunLock | None = None) -> bool:
    """Give all panels of ``figure`` a grid and a legend, and write it to ``path`` as PNG.

    The legends are above the panels, where they cover no data. A reader never sees half a file. If ``lock`` is given
    and no longer valid, write nothing and return False.

    Raises:
        OSError: the file can't be written.
    """
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(
                loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=9, frameon=False, borderpad=0,
                columnspacing=1.2, handlelength=1.5,
            )  # fmt: skip
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    if lock is not None and not lock.is_current:  # drawing takes a second: check as late as possible
        return False
    try:
        partial.write_bytes(picture.getbuffer())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return True


def running_mean(values: Sequence[float]) -> list[float]:
    """Return the means over a twentieth of ``values``, each ending at one value. The first values have none."""
    window = max(1, len(values) // 20)
    return np.convolve(values, np.ones(window) / window, mode="valid").tolist() if values else []


def _size_of(path: Path) -> tuple[int, int] | None:
    """Return the inode and the size of a file; None if it does not exist."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size


def _series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _draw_accuracy(axes: Axes, rows: Sequence[Row]) -> None:
    _draw_mean(axes, rows, "accuracy/mean", _COLORS["accuracy"], "rollouts trained on")
    keys = sorted({key for row in rows for key in row if key.startswith("eval/") and key.endswith("/accuracy")})
    for number, key in enumerate(keys):
        steps, values = _series(rows, key)
        name = key.removeprefix("eval/").removesuffix("/accuracy")
        color = _EVAL_COLORS[number % len(_EVAL_COLORS)]
        axes.plot(steps, values, "o-", color=color, markersize=6, linewidth=2, label=f"evaluation: {name}")
        for at in {0, len(values) - 1}:
            axes.annotate(
                f"{values[at]:.3f}", (steps[at], values[at]), textcoords="offset points", xytext=(0, 7), ha="center",
                fontsize=9, color=color,
            )  # fmt: skip
    axes.set_ylabel("accuracy")
    axes.set_ylim(-0.02, 1.08)


def _mark_evaluations(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a thin line at each step with an evaluation: generators sample its answers, so the next step is slower."""
    steps = sorted({row["step"] for row in rows if any(key.startswith("eval/") for key in row)})
    for number, step in enumerate(steps):
        label = "evaluation, sampled by the same generators" if number == 0 else None
        axes.axvline(step, color="0.6", linewidth=0.8, linestyle=":", label=label)


def _draw_mean(axes: Axes, rows: Sequence[Row], key: str, color: str, label: str) -> None:
    """Draw the metric ``key`` in a pale colour, and its running mean over a twentieth of the run in full colour."""
    steps, values = _series(rows, key)
    if not values:
        return
    smooth = running_mean(values)
    window = len(values) - len(smooth) + 1
    style: dict[str, Any] = {"color": color, "linewidth": 1.8}
    if window == 1:
        axes.plot(steps, values, label=label, **style)
        return
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
    axes.plot(steps[window - 1 :], smooth, label=f"{label} (mean over {window} steps)", **style)


def _draw_staleness(axes: Axes, rows: Sequence[Row]) -> None:
    for key, style in (("staleness/mean", "-"), ("staleness/max", ":")):
        steps, values = _series(rows, key)
        if values:
            axes.plot(steps, values, style, color=_COLORS["staleness"], linewidth=1.5, label=key.split("/")[1])
    axes.set_ylabel("staleness (versions)")
    axes.set_ylim(bottom=0)
