"""Draw ``curve.png``, a picture of a run's metrics. It is drawn when the learner or ``launch`` ends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rl.run.directory import RunDir
from async_rl.run.metrics import Row
from async_rl.run.step_log import read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"reward": "#0072b2", "accuracy": "#009e73", "staleness": "#d55e00", "speed": "#000000", "ess": "#e69f00"}
_IDLE = {"idle/learner": ("learner", "#0072b2"), "idle/generators": ("generators", "#cc79a7")}
_EVAL_COLORS = ("#cc79a7", "#e69f00", "#56b4e9", "#000000")


def write_curve(run_dir: RunDir) -> bool:
    """Draw what a run learns, how fast it is and how old its data is, and write the picture to ``curve.png``.

    Return whether the picture was written. It is not if the run has no metrics yet. A reader never sees half a file.
    """
    rows = read_rows(run_dir.metrics)
    if not rows:
        return False
    figure = new_figure(13, 8)
    panels = figure.subplots(3, 2, sharex=True)
    (accuracy, speed), (reward, idle), (staleness, ess) = panels
    figure.suptitle(run_dir.path.resolve().name, fontsize=13)
    _draw_accuracy(accuracy, rows)
    _draw_mean(reward, rows, "reward/mean", _COLORS["reward"], "mean of the step's rollouts")
    reward.set_ylabel("reward")
    _draw_staleness(staleness, rows)
    _draw_mean(speed, rows, "time/step_s", _COLORS["speed"], "of each step")
    speed.set_ylabel("seconds per step")
    speed.set_ylim(bottom=0)
    for key, (label, color) in _IDLE.items():
        _draw_mean(idle, rows, key, color, label)
    idle.set(ylabel="idle share of the time", ylim=(-0.02, 1.08))
    _draw_mean(ess, rows, "ratio/ess", _COLORS["ess"], "of the step's tokens")
    ess.set_ylabel("effective sample size")
    for axes in panels[-1]:
        axes.set_xlabel("optimizer step")
    save_picture(figure, run_dir.curve)
    return True


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches. It needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_picture(figure: Figure, path: Path) -> None:
    """Give all panels of ``figure`` a grid and a legend, and write it to ``path`` as PNG.

    A reader never sees half a file.

    Raises:
        OSError: the file can't be written.
    """
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best", fontsize=9, edgecolor="none", framealpha=0.85)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    figure.savefig(partial, dpi=120, format="png")
    os.replace(partial, path)


def running_mean(values: Sequence[float]) -> list[float]:
    """Return the means over a twentieth of ``values``, each ending at one value. The first values have none."""
    window = max(1, len(values) // 20)
    return np.convolve(values, np.ones(window) / window, mode="valid").tolist() if values else []


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
