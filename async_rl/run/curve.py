"""Draw ``curve.png``, a picture of a run's metrics.

``launch`` draws it again and again while the run goes (``CurveUpdater``), and once more when it exits, for whatever
reason. A learner that was started by hand draws it only when it exits. Only then does it import matplotlib. Of a long
run, each point stands for several steps (``run.thinning``).
"""

from __future__ import annotations

import gc
import io
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rl.config.loading import load_run_config
from async_rl.run.config_changes import read_changes
from async_rl.run.directory import RunDir, replaced
from async_rl.run.lock import RunLock
from async_rl.run.starts import first_steps
from async_rl.run.step_log import Row, eval_figures, iter_metrics, last_step
from async_rl.run.thinning import thinned
from async_rl.terminal import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"reward": "#0072b2", "accuracy": "#009e73", "staleness": "#d55e00", "speed": "#000000", "ess": "#e69f00"}
_POLICY = {
    "entropy": ("entropy (nats)", "#56b4e9"),
    "grad_norm": ("gradient norm", "#0072b2"),
    "ratio/kl": ("KL to the sampling\npolicy (nats)", "#d55e00"),
    "ratio/clip_fraction": ("clipped share\nof the tokens", "#cc79a7"),
}
"""Metric -> label and colour of a panel of its own."""
_IDLE = {"idle/learner": ("learner", "#0072b2"), "idle/generators": ("generators", "#cc79a7")}
_WAITS = {"idle/grading": ("generators, for grading", "#e69f00"), "idle/environment": ("for environments", "#009e73")}
_SHOWN_WAIT = 0.05
_MEANS = ("reward/mean", "accuracy/mean", "staleness/mean", "ratio/ess", "time/step_s")
_SLOWEST = "time/step_s/max"
_NO_GRADIENT = "no_gradient/max"
"""1 if the step's gradient was 0. Such a step has no norm in the picture: it would hide the scale of the others."""
_KEYS = ("version", "staleness/max", _SLOWEST, _NO_GRADIENT, *_MEANS, *_POLICY, *_IDLE, *_WAITS)
"""The figures that are drawn, besides those of evaluations."""
_EVAL_COLORS = ("#cc79a7", "#e69f00", "#56b4e9", "#000000")


_HIGH = 98.0
"""Percentile of the seconds per step. Steps of more than twice as long are above the panel."""
_LOW = 1e-6
"""Lowest value of a panel with a logarithmic scale. Values below are rounding errors."""
_FAR = 3.0
"""The bound is drawn if it is at most this many times the highest staleness."""
_MAX_MARKS = 200
"""Evaluations are marked only if they are at most so many. More lines would fill the panel."""
_LEGEND_WIDTH = 80
"""Width of a panel's legend, in letters; the line before a label is as wide as six."""
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
        # Figures are cycles of objects. In a process as quiet as this one, a hundred may wait for the next collection.
        gc.collect()

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
        has_rows = next(iter_metrics(self._run_dir.metrics), None) is not None
        return has_rows and last_step(self._run_dir.metrics) < self._num_steps


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
    rows = picture_rows(run_dir)
    if not rows:
        return False
    return save_picture(draw_figure(run_dir, rows), run_dir.curve, lock)


def picture_rows(run_dir: RunDir) -> list[Row]:
    """Return the figures of ``metrics.jsonl`` that are drawn, in no more rows than a picture can show."""
    starts = set(first_steps(run_dir))
    return thinned((_timed(row, row["step"] in starts) for row in iter_metrics(run_dir.metrics)), _KEYS)


def _timed(row: Row, is_start: bool) -> Row:
    """Return ``row`` with its seconds as those of the slowest step; without any if it waited for the start-up."""
    seconds, norm = None if is_start else row.get("time/step_s"), row.get("grad_norm")
    no_gradient = {} if norm is None else {"grad_norm": norm or None, _NO_GRADIENT: int(norm == 0)}
    return row | {"time/step_s": seconds, _SLOWEST: seconds, **no_gradient}


def draw_figure(run_dir: RunDir, rows: Sequence[Row]) -> Figure:
    """Return the picture of a run with these rows of metrics."""
    figure = new_figure(13, 12)
    panels = figure.subplots(5, 2, sharex=True)
    (accuracy, speed), (reward, idle), (staleness, ess), *others = panels
    figure.suptitle(plain_label(run_dir.path.resolve().name), fontsize=13)
    _draw_accuracy(accuracy, rows)
    _draw_mean(reward, rows, "reward/mean", _COLORS["reward"], "mean of the step's rollouts")
    reward.set_ylabel("reward")
    _draw_staleness(staleness, rows, run_dir)
    starts = first_steps(run_dir)
    _draw_speed(speed, rows, starts)
    _mark_evaluations(speed, rows)
    for step in starts[1:]:
        for axes in panels.flat:
            axes.axvline(step - 0.5, color="0.4", linewidth=0.8, linestyle="--")
    if starts[1:]:
        speed.plot([], [], color="0.4", linewidth=0.8, linestyle="--", label="restart")
    for key, (label, color) in _IDLE.items():
        _draw_mean(idle, rows, key, color, label)
    for key, (label, color) in _WAITS.items():
        if max((row.get(key) or 0.0 for row in rows), default=0.0) >= _SHOWN_WAIT:
            _draw_mean(idle, rows, key, color, label)
    idle.set(ylabel="idle share of the time", ylim=(-0.02, 1.08))
    _draw_mean(ess, rows, "ratio/ess", _COLORS["ess"], "of each step")
    # The range begins at 0.98 or below, so that rounding errors of a healthy run don't look like changes.
    ess.set(ylabel="effective sample size\n(share of the tokens)", ylim=(min(0.98, ess.get_ylim()[0]), 1.002))
    for axes, (key, (label, color)) in zip(np.ravel(others), _POLICY.items(), strict=True):
        _draw_mean(axes, rows, key, color, "of each step")
        axes.set_ylabel(label)
    others[1][1].set_ylim(0, max(0.01, others[1][1].get_ylim()[1]))
    for axes, key in ((others[0][1], "grad_norm"), (others[1][0], "ratio/kl")):
        if max(_series(rows, key)[1], default=0.0) > _LOW:
            axes.set_yscale("log")
            axes.set_ylim(bottom=max(_LOW, axes.get_ylim()[0]))
    if steps := [row["step"] for row in rows if row.get(_NO_GRADIENT)]:
        norms = others[0][1]
        at_the_bottom = norms.get_xaxis_transform()  # x in steps, y as a share of the panel
        norms.plot(steps, [0.02] * len(steps), "|", color="#d55e00", transform=at_the_bottom, label="no gradient")
    for axes in panels[-1]:
        axes.set_xlabel("optimizer step")
    return figure


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches. It needs no display, and no home that can be written."""
    # Without such a home, as in a container, matplotlib uses a temporary directory, and would advise at length to set a
    # variable.
    matplotlib_logger = logging.getLogger("matplotlib")
    level = matplotlib_logger.level
    matplotlib_logger.setLevel(logging.ERROR)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    finally:
        matplotlib_logger.setLevel(level)

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
        if labels := axes.get_legend_handles_labels()[1]:
            axes.legend(
                loc="lower left", bbox_to_anchor=(0, 1), ncols=_num_columns(labels), fontsize=9, frameon=False,
                borderpad=0, columnspacing=1.2, handlelength=1.5,
            )  # fmt: skip
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    if lock is not None and not lock.is_current:  # drawing takes a second: check as late as possible
        return False
    with replaced(path) as partial:
        partial.write_bytes(picture.getbuffer())
    return True


def _num_columns(labels: Sequence[str]) -> int:
    """Return how many columns of ``labels`` fit above a panel. A wider legend would make the panel narrow."""
    fitting = (
        columns
        for columns in range(len(labels), 1, -1)
        # matplotlib fills column after column.
        if sum(max(map(len, part)) + 6 for part in np.array_split(labels, columns)) <= _LEGEND_WIDTH
    )
    return next(fitting, 1)


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
    names = sorted({name for row in rows for name in eval_figures(row, "accuracy")})
    for number, name in enumerate(names):
        steps, values = _series(rows, f"eval/{name}/accuracy")
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
    steps = sorted({row["step"] for row in rows if eval_figures(row)})
    for number, step in enumerate(steps if len(steps) <= _MAX_MARKS else ()):
        label = "evaluation by the generators" if number == 0 else None
        axes.axvline(step, color="0.6", linewidth=0.8, linestyle=":", label=label)


def _draw_mean(axes: Axes, rows: Sequence[Row], key: str, color: str, label: str) -> None:
    """Draw the metric ``key`` in a pale colour, and its running mean over a twentieth of the run in full colour."""
    steps, values = _series(rows, key)
    if not values:
        return
    smooth = running_mean(values)
    window = len(values) - len(smooth) + 1
    # A point of a long run stands for several steps.
    num_steps = round(window * (steps[-1] - steps[0]) / max(1, len(steps) - 1))
    style: dict[str, Any] = {"color": color, "linewidth": 1.8}
    if window == 1:
        axes.plot(steps, values, label=label, **style)
        return
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
    axes.plot(steps[window - 1 :], smooth, label=f"{label} (mean over {num_steps} steps)", **style)


def _draw_speed(axes: Axes, rows: Sequence[Row], starts: Sequence[int]) -> None:
    """Draw the seconds of each step. The first step of a start is left out, because it waits for the start-up.

    A few very slow steps may be above the panel, so that the others can be seen. The legend then has the slowest one.
    """
    rows = [row for row in rows if row["step"] not in starts]
    times = _series(rows, "time/step_s")[1]
    high = float(np.percentile(times, _HIGH)) if times else 0.0
    slowest = max((*times, *_series(rows, _SLOWEST)[1]), default=0.0)
    is_cut = slowest > 2 * high
    note = f"of each step; slowest {slowest:.3g} s" if is_cut else "of each step"
    _draw_mean(axes, rows, "time/step_s", _COLORS["speed"], note)
    axes.set_ylabel("seconds per step")
    axes.set_ylim(0, 2 * high if is_cut else None)


def _draw_staleness(axes: Axes, rows: Sequence[Row], run_dir: RunDir) -> None:
    highest = 0.0
    for key, style in (("staleness/mean", "-"), ("staleness/max", ":")):
        steps, values = _series(rows, key)
        if values:
            highest = max(highest, *values)
            axes.plot(steps, values, style, color=_COLORS["staleness"], linewidth=1.5, label=key.split("/")[1])
    steps = sorted({row["step"] for row in rows if "version" in row})
    bounds = _bounds(run_dir, steps)
    if bounds and max(bounds) <= max(1.0, _FAR * highest):
        axes.plot(steps, bounds, color="0.4", linewidth=1.2, drawstyle="steps-pre", zorder=1, label="bound")
    elif bounds:
        axes.plot([], [], color="0.4", linewidth=1.2, label=f"bound: {max(bounds)}, above the panel")
    axes.set_ylabel("staleness (versions)")
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def _bounds(run_dir: RunDir, steps: Sequence[int]) -> list[int]:
    """Return ``queue.max_staleness`` at each of ``steps``; an empty list if the directory has no config."""
    if not run_dir.config.is_file():
        return []
    bounds = [load_run_config(run_dir.config).queue.max_staleness] * len(steps)
    for change in reversed(read_changes(run_dir)):
        if (values := change.changed.get("queue.max_staleness")) is not None:
            bounds = [values[0] if step <= change.step else bound for step, bound in zip(steps, bounds, strict=True)]
    return bounds
