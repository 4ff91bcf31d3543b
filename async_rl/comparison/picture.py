"""Draw runs side by side: learning over steps and over seconds, idle shares and overlap, mismatch by lag."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from async_rl.comparison.summary import RunSummary
from async_rl.comparison.table import short_names
from async_rl.errors import RunError
from async_rl.run.curve import new_figure, plain_label, running_mean, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROUNDING = 1e-7
"""KL in nats below which the difference of two policies is that of float32 rounding."""
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")


def write_picture(summaries: Sequence[RunSummary], path: Path) -> None:
    """Draw the runs and write the picture to ``path`` as PNG. A reader never sees half a file.

    The learning curves are the accuracies on the first dataset, or the mean rewards if no run has evaluations.

    Raises:
        RunError: the file can't be written.
    """
    figure = new_figure(11, 8)
    (per_step, per_second), (shares, mismatch) = figure.subplots(2, 2)
    names = [_label(name, run.bound) for name, run in zip(_names(summaries), summaries, strict=True)]
    _draw_learning(per_step, per_second, names, summaries)
    _draw_shares(shares, summaries)
    _draw_mismatch(mismatch, names, summaries)
    try:
        save_picture(figure, path)
    except OSError as error:
        raise RunError(
            f"can't write the picture {path}: {error.strerror or error}; choose another file or directory"
        ) from error


def _label(name: str, bound: int) -> str:
    """Return the name of a run with its bound, which the name of a sweep's run may already have."""
    return name if f"max_staleness={bound}" in name else f"{name} (bound {bound})"


def _names(summaries: Sequence[RunSummary]) -> list[str]:
    return [plain_label(name) for name in short_names([summary.name for summary in summaries])]


def _draw_learning(per_step: Axes, per_second: Axes, names: Sequence[str], summaries: Sequence[RunSummary]) -> None:
    datasets = sorted({dataset for summary in summaries for dataset in summary.evaluations})
    label = f"accuracy on {datasets[0]}" if datasets else "reward (mean over a twentieth of the steps)"
    for number, (name, summary) in enumerate(zip(names, summaries, strict=True)):
        style = {"color": _COLORS[number % len(_COLORS)], "linewidth": 1.8, "label": name}
        if datasets:
            found = summary.evaluations.get(datasets[0], ())
            steps, times = [e.step for e in found], [e.time_s for e in found]
            values, marker = [e.accuracy for e in found], "o-"
        else:
            steps, times, values = _smooth(summary)
            marker = "-"
        per_step.plot(steps, values, marker, **style)
        per_second.plot(times, values, marker, **style)
    per_step.set(xlabel="optimizer step", ylabel=label)
    per_second.set(xlabel="seconds", ylabel=label)


def _smooth(summary: RunSummary) -> tuple[list[int], list[float], list[float]]:
    """Return steps, seconds, and the running mean of the reward over a twentieth of the run."""
    means = running_mean([value for _, _, value in summary.curve])
    ends = summary.curve[len(summary.curve) - len(means) :]
    return [step for step, _, _ in ends], [time_s for _, time_s, _ in ends], means


def _draw_shares(axes: Axes, summaries: Sequence[RunSummary]) -> None:
    places = np.arange(len(summaries))
    for number, (label, name) in enumerate(
        (("overlap", "overlap"), ("learner idle", "idle_learner"), ("generators idle", "idle_generators"))
    ):
        values = [getattr(summary, name) for summary in summaries]
        heights = [np.nan if value is None else value for value in values]
        axes.bar(places + 0.27 * (number - 1), heights, 0.25, color=_COLORS[number], label=label)
    labels = [f"{name}\n{run.steps_per_s:.3g} steps/s" for name, run in zip(_names(summaries), summaries, strict=True)]
    axes.set_xticks(places, labels, fontsize=8)
    axes.set_ylabel("share of the time")
    axes.set_ylim(0, 1.05)


def _draw_mismatch(axes: Axes, names: Sequence[str], summaries: Sequence[RunSummary]) -> None:
    for number, (name, summary) in enumerate(zip(names, summaries, strict=True)):
        lags = [lag for lag, value in summary.mismatch_by_lag.items() if value > 0]
        values = [summary.mismatch_by_lag[lag] for lag in lags]
        axes.plot(lags, values, "o-", color=_COLORS[number % len(_COLORS)], label=name)
    axes.set_yscale("log")
    axes.set_ylim(bottom=_ROUNDING)
    axes.set(xlabel="age of a token (versions)", ylabel="KL(behavior policy || policy), nats")
