"""Draw ``curve.png``, a picture of a run's metrics.

``async-rl follow`` draws it again and again while the run goes (``CurveUpdater``), and once more when the run ends, for
whatever reason. Of a long run, each point stands for several steps (``thinning``).
"""

from __future__ import annotations

import gc
import io
import itertools
import logging
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from async_rl.config.loading import load_run_config
from async_rl.extensions.insight.pictures.thinning import thinned
from async_rl.run.config_changes import read_changes
from async_rl.run.directory import RunDir, replaced
from async_rl.run.lock import RunLock
from async_rl.run.records.metric_table import PANELS, SHOWN, curves, unit_of
from async_rl.run.records.starts import first_steps
from async_rl.run.records.step_log import Row, eval_figures, iter_metrics
from async_rl.terminal import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_COLUMNS, _FIRST_ROW = 3, 1.6
"""Panels side by side; height of those that say whether the run learns, who waits and how old its data is."""
_KEYS = ("version", *(key for key, shown in SHOWN.items() if shown.panel))
"""The metrics that are drawn. Steps without them have no row, but every step has a version."""
_LOG_KEYS = tuple(key for title, panel in PANELS.items() if panel.is_log for key in curves(title))
_SLOWEST = "time/step_s/max"


_HIGH = 98.0
"""Percentile of a curve. Values of more than twice as much are above a panel that begins at 0."""
_LOW = 1e-6
"""Lowest value of a panel with a logarithmic scale. Values below are rounding errors."""
_FAR = 3.0
"""The bound is drawn if it is at most this many times the highest staleness."""
_MAX_MARKS = 200
"""Evaluations are marked only if they are at most so many. More lines would fill the panel."""
FIRST_DRAWING_S = 10.0
MIN_PAUSE_S = 10.0
PAUSE_PER_DRAWING = 50.0
"""Seconds without drawing after a drawing that took one second, so that drawing takes at most 2 % of the time."""


class CurveUpdater:
    """Draws ``curve.png`` again when ``metrics.jsonl`` has changed.

    The first drawing begins ``FIRST_DRAWING_S`` seconds after the start. A drawing that fails is reported once, and is
    tried again after the usual pause.
    """

    def __init__(self, run_dir: RunDir, lock: RunLock, note: Callable[[str], None]) -> None:
        """Prepare the drawing.

        Args:
            lock: the lock of the run directory. Nothing is written after another process has taken the directory over.
            note: shows a line of text to the user.
        """
        self._run_dir, self._lock, self._note = run_dir, lock, note
        self._drawn: tuple[int, int] | None = None
        self._draw_at = time.monotonic() + FIRST_DRAWING_S
        self._reported = False

    def look(self) -> None:
        """Draw the curve if it is time. Call this every second."""
        size, started = _size_of(self._run_dir.metrics), time.monotonic()
        if size == self._drawn or started < self._draw_at or not self._lock.is_current:
            return
        self._drawn = size
        self.draw()
        ended = time.monotonic()
        self._draw_at = ended + max(MIN_PAUSE_S, PAUSE_PER_DRAWING * (ended - started))

    def draw(self) -> None:
        """Draw the curve now, if the run has metrics. A missing picture must not end a run, so this never raises."""
        problem = ""
        try:
            write_curve(self._run_dir, self._lock)
        except Exception as error:  # whatever fails in the drawing
            problem = f"can't draw {self._run_dir.curve}: {type(error).__name__}: {error}"
            if not self._reported:
                self._note(f"{problem}; the run does not need it and goes on")
        self._reported = bool(problem)
        # Figures are cycles of objects. In a process as quiet as this one, a hundred may wait for the next collection.
        gc.collect()


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
    rows = (_drawable(row, row["step"] in starts) for row in iter_metrics(run_dir.metrics))
    return thinned(rows, {*_KEYS, _SLOWEST, *map(_zeros_of, _LOG_KEYS)})


def _zeros_of(key: str) -> str:
    """Return the key, in rows that are drawn, that is 1 where a metric with a logarithmic axis is 0."""
    return f"{key}/zero/max"


def _drawable(row: Row, is_start: bool) -> Row:
    """Return ``row`` with its seconds as those of the slowest step, without any if it waited for the start-up.

    A 0 has no place on a logarithmic axis, and would hide the scale of the others. It becomes a mark.
    """
    seconds = None if is_start else row.get("time/step_s")
    drawn = row | {"time/step_s": seconds, _SLOWEST: seconds}
    for key in _LOG_KEYS:
        if (value := row.get(key)) is not None:
            drawn |= {key: value or None, _zeros_of(key): int(value == 0)}
    return drawn


def draw_figure(run_dir: RunDir, rows: Sequence[Row]) -> Figure:
    """Return the picture of a run with these rows of metrics: the panels of ``PANELS`` that have a curve."""
    titles = [title for title in PANELS if _curves(rows, title)]
    heights = [_FIRST_ROW, *[1.0] * (-(-len(titles) // _COLUMNS) - 1)]
    figure = new_figure(18, 0.5 + 2.6 * sum(heights))
    name = plain_label(run_dir.path.resolve().name)
    figure.suptitle(f"{name} (thick lines are means over a twentieth of the run)", fontsize=13)
    grid = figure.subplots(len(heights), _COLUMNS, sharex=True, squeeze=False, height_ratios=heights).ravel()
    starts = first_steps(run_dir)
    for title, axes in zip(titles, grid, strict=False):
        _draw_panel(axes, title, rows)
        if title == "Staleness":
            _draw_bound(axes, rows, run_dir)
        for step in starts[1:]:
            axes.axvline(step - 0.5, color="0.4", linewidth=0.8, linestyle="--")
        if title == "Seconds per step":
            _mark_evaluations(axes, rows)
            if starts[1:]:
                axes.plot([], [], color="0.4", linewidth=0.8, linestyle="--", label="restart")
    for axes in grid[len(titles) :]:
        axes.remove()
    for axes in figure.axes[-_COLUMNS:]:
        axes.tick_params(labelbottom=True)
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
        if axes.get_legend_handles_labels()[1]:
            axes.legend(
                loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=9, frameon=False,
                borderpad=0, columnspacing=1.2, handlelength=1.5,
            )  # fmt: skip
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    if lock is not None and not lock.is_current:  # drawing takes a second: check as late as possible
        return False
    with replaced(path) as partial:
        partial.write_bytes(picture.getbuffer())
    return True


def running_mean(values: Sequence[float]) -> list[float]:
    """Return the means over a twentieth of ``values``, each ending at one value. The first values have none."""
    window = max(1, len(values) // 20)
    return np.convolve(values, np.ones(window) / window, mode="valid").tolist() if values else []


def _size_of(path: Path) -> tuple[int, int] | None:
    """Return the inode and the size of a file; None if it does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size


def _series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _curves(rows: Sequence[Row], title: str) -> dict[str, str]:
    """Return the metrics that have a curve in the panel of this title, with their labels."""
    sets = sorted({name for row in rows for name in eval_figures(row, "accuracy")})
    labels: dict[str, str] = {}
    for key, shown in curves(title).items():
        for name in sets if "<dataset>" in key else [""]:
            own_key, label = (text.replace("<dataset>", name) for text in (key, shown.label))
            values = _series(rows, own_key)[1]
            if values and max(values) >= (-np.inf if shown.least is None else shown.least):
                labels[own_key] = label
    return labels


def _draw_panel(axes: Axes, title: str, rows: Sequence[Row]) -> None:
    """Draw the curves of a panel.

    A few values that are far above the others may be above a panel that begins at 0, so that the others can be seen.
    The legend then has the highest one.
    """
    panel, top = PANELS[title], 0.0
    unit = textwrap.fill(unit_of(title), 28)
    axes.set_ylabel(f"{textwrap.fill(title, 20)}\n({unit})" if unit else title)
    for (key, label), color in zip(_curves(rows, title).items(), itertools.cycle(COLORS)):
        values = _series(rows, key)[1]
        peak, limit = max(*values, *_series(rows, f"{key}/max")[1], 0.0), 2 * float(np.percentile(values, _HIGH))
        is_cut = panel.low is not None and panel.high is None and peak > limit > 0
        top = max(top, limit if is_cut else 1.05 * peak)
        if key.startswith("eval/"):
            _draw_evaluations(axes, rows, key, color, label)
        else:
            _draw_mean(axes, rows, key, color, f"{label}; highest {peak:.3g}" if is_cut else label)
        if steps := [row["step"] for row in rows if row.get(_zeros_of(key))]:
            at_the_bottom = axes.get_xaxis_transform()  # x in steps, y as a share of the panel
            axes.plot(steps, [0.02] * len(steps), "|", color="#d55e00", transform=at_the_bottom, label="0")
    bottom = axes.get_ylim()[0]
    if panel.is_log and top > _LOW:
        axes.set_yscale("log")
        axes.set_ylim(bottom=max(_LOW, bottom))
    elif panel.low is not None:
        axes.set_ylim(panel.low, (panel.high or top or 1.0) * 1.02)
    elif panel.high is not None:  # rounding errors of a healthy run must not look like changes
        axes.set_ylim(min(0.98 * panel.high, bottom), 1.002 * panel.high)


def _draw_evaluations(axes: Axes, rows: Sequence[Row], key: str, color: str, label: str) -> None:
    steps, values = _series(rows, key)
    axes.plot(steps, values, "o-", color=color, markersize=6, linewidth=2, label=label)
    for at in {0, len(values) - 1}:
        axes.annotate(
            f"{values[at]:.3f}", (steps[at], values[at]), textcoords="offset points", xytext=(0, 7), ha="center",
            fontsize=9, color=color,
        )  # fmt: skip


def _mark_evaluations(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a thin line at each step with an evaluation: generators sample its answers, so the next step is slower."""
    steps = sorted({row["step"] for row in rows if eval_figures(row)})
    for number, step in enumerate(steps if len(steps) <= _MAX_MARKS else ()):
        label = "evaluation by the generators" if number == 0 else None
        axes.axvline(step, color="0.6", linewidth=0.8, linestyle=":", label=label)


def _draw_mean(axes: Axes, rows: Sequence[Row], key: str, color: str, label: str) -> None:
    """Draw the metric ``key`` in a pale colour, and its running mean over a twentieth of the run in full colour."""
    steps, values = _series(rows, key)
    smooth = running_mean(values)
    if len(smooth) < len(values):
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
    axes.plot(steps[-len(smooth) :], smooth, color=color, linewidth=1.8, label=label)


def _draw_bound(axes: Axes, rows: Sequence[Row], run_dir: RunDir) -> None:
    """Draw ``queue.max_staleness``, unless it is so high that it would flatten the curves."""
    steps = sorted({row["step"] for row in rows if "version" in row})
    highest = max(_series(rows, "staleness/max")[1], default=0.0)
    bounds = _bounds(run_dir, steps)
    if bounds and max(bounds) <= max(1.0, _FAR * highest):
        axes.plot(steps, bounds, color="0.4", linewidth=1.2, drawstyle="steps-pre", zorder=1, label="bound")
        axes.set_ylim(top=1.05 * max(highest, *bounds))
    elif bounds:
        axes.plot([], [], color="0.4", linewidth=1.2, label=f"bound: {max(bounds)}, above the panel")


def _bounds(run_dir: RunDir, steps: Sequence[int]) -> list[int]:
    """Return ``queue.max_staleness`` at each of ``steps``; an empty list if the directory has no config."""
    if not run_dir.config.is_file():
        return []
    bounds = [load_run_config(run_dir.config).queue.max_staleness] * len(steps)
    for change in reversed(read_changes(run_dir)):
        if (values := change.changed.get("queue.max_staleness")) is not None:
            bounds = [values[0] if step <= change.step else bound for step, bound in zip(steps, bounds, strict=True)]
    return bounds
