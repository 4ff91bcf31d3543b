"""Draw runs side by side: learning over steps and over seconds, idle shares and overlap, mismatch by lag.

The runs of a sweep that differ only in their seed have one color. Each has a line of its own, and a bar shows their
mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rl.errors import RunError
from async_rl.extensions.insight.comparison.points import judged_set, mean_of_known
from async_rl.extensions.insight.comparison.summary import RunSummary
from async_rl.extensions.insight.comparison.table import short_names
from async_rl.extensions.insight.pictures.curve import COLORS, new_figure, plain_label, running_mean, save_picture
from async_rl.run.records.metric_table import columns

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROUNDING = 1e-7
"""KL in nats below which the difference of two policies is that of float32 rounding. It is not drawn."""
_SEED = re.compile(r"-seed=\d+$")
_COLORS = (*COLORS, "#000000", "#999999")
_MARKERS = "os^Dv<>p"
_LEGEND_WIDTH = 125
"""Width of the legend in letters."""


def write_picture(summaries: Sequence[RunSummary], path: Path, recommended: int | None = None) -> None:
    """Draw the runs and write the picture to ``path`` as PNG. A reader never sees half a file.

    Args:
        summaries: the runs.
        path: the file, which is replaced if it exists.
        recommended: the bound that the legend marks as recommended.

    Raises:
        RunError: the file can't be written.
    """
    try:
        save_picture(draw(summaries, recommended), path)
    except OSError as error:
        raise RunError(
            f"can't write the picture {path}: {error.strerror or error}; choose another file or directory"
        ) from error


def draw(summaries: Sequence[RunSummary], recommended: int | None = None) -> Figure:
    """Return the picture.

    The learning curves are the accuracies on ``judged_set``, or the mean rewards if no run has evaluations.
    """
    dataset = judged_set(summaries)
    figure = new_figure(11, 8.5)
    (per_step, per_second), (shares, mismatch) = figure.subplots(2, 2)
    groups = by_setting(summaries, recommended)
    handles: dict[str, Artist] = {}
    for number, (name, group) in enumerate(groups.items()):
        style = _style(number, is_single=len(group) == 1)
        for summary in group:
            handles[name] = _draw_learning(per_step, per_second, summary, dataset, style)
            _draw_mismatch(mismatch, summary, style)
    columns = max(1, min(len(groups), _LEGEND_WIDTH // max(len(name) for name in groups)))
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns, fontsize=9, frameon=False)
    label = f"accuracy on {dataset}" if dataset else "reward (mean over a twentieth of the steps)"
    per_step.set(xlabel="optimizer step", ylabel=label)
    per_second.set(xlabel="seconds of training, without start-up", ylabel=label)
    mismatch.set_yscale("log")
    mismatch.set(xlabel="age of a token (versions)", ylabel="KL(behavior policy || policy), nats")
    mismatch.set_ylim(bottom=_ROUNDING)
    mismatch.locator_params(axis="x", integer=True)
    if missing := [name for name, group in groups.items() if not any(_lags(summary) for summary in group)]:
        mismatch.set_title(f"no line (no difference beyond rounding): {', '.join(missing)}", fontsize=8, loc="left")
    _draw_shares(shares, groups)
    return figure


def by_setting(summaries: Sequence[RunSummary], recommended: int | None = None) -> dict[str, list[RunSummary]]:
    """Return the runs by the name that the picture shows for them. Runs that differ only in their seed share a name."""
    groups: dict[str, list[RunSummary]] = {}
    for name, summary in zip(short_names([summary.name for summary in summaries]), summaries, strict=True):
        setting = plain_label(_SEED.sub("", name))
        # The name of a sweep's run may have the bound already.
        is_named = f"max_staleness={summary.bound}" in setting
        label = setting if is_named else f"{setting} (bound {summary.bound})"
        if summary.origin is not None:
            label += f", a fork: 0 s is step {summary.origin.step}"
        groups.setdefault(f"{label}, recommended" if summary.bound == recommended else label, []).append(summary)
    return groups


def _style(number: int, *, is_single: bool) -> dict[str, Any]:
    """Return the color and the hollow marker of a setting, so that points at the same place remain visible."""
    return {
        "color": _COLORS[number % len(_COLORS)], "marker": _MARKERS[number % len(_MARKERS)],
        "markerfacecolor": "none", "linewidth": 1.8 if is_single else 1.0,
        "markersize": (8 if is_single else 6) + number % 3,
    }  # fmt: skip


def _draw_learning(
    per_step: Axes, per_second: Axes, summary: RunSummary, dataset: str, style: Mapping[str, Any]
) -> Artist:
    """Draw the accuracies on ``dataset``, or the mean rewards if it is empty. Return the line for the legend."""
    if dataset:
        evaluations = summary.evaluations.get(dataset, ())
        steps, times, values = (
            [e.step for e in evaluations],
            [e.time_s for e in evaluations],
            [e.accuracy for e in evaluations],
        )
    else:
        steps, times, values = _smooth(summary)
        style = {**style, "markevery": max(1, len(values) // 8)}
    per_second.plot(times, values, **style)
    return per_step.plot(steps, values, **style)[0]


def _smooth(summary: RunSummary) -> tuple[list[int], list[float], list[float]]:
    """Return steps, seconds, and the running mean of the reward over a twentieth of the run."""
    means = running_mean([value for _, _, value in summary.curve])
    ends = summary.curve[len(summary.curve) - len(means) :]
    return [step for step, _, _ in ends], [time_s for _, time_s, _ in ends], means


def _draw_shares(axes: Axes, groups: Mapping[str, Sequence[RunSummary]]) -> None:
    places = np.arange(len(groups))
    bars = {key: column for key, column in columns("time/step_s").items() if key.startswith(("overlap/", "idle/"))}
    for number, (key, (heading, _)) in enumerate(bars.items()):
        means = [mean_of_known(summary.means[key] for summary in group) for group in groups.values()]
        heights = np.array(means, dtype=float)  # None becomes NaN, which is not drawn
        offset = 0.8 / len(bars) * (number - (len(bars) - 1) / 2)
        axes.bar(places + offset, heights, 0.75 / len(bars), color=_COLORS[number % len(_COLORS)], label=heading)
    speeds = [fmean(summary.steps_per_s for summary in group) for group in groups.values()]
    names = [re.sub(r"/| (?=\(bound)|(?<=,) ", lambda gap: f"{gap[0].strip()}\n", name) for name in groups]
    labels = [f"{name}\n{speed:.3g} steps/s" for name, speed in zip(names, speeds, strict=True)]
    axes.set_xticks(places, labels, fontsize=8)
    axes.set_ylabel("share of the time")
    axes.set_ylim(0, 1.05)


def _draw_mismatch(axes: Axes, summary: RunSummary, style: Mapping[str, Any]) -> None:
    lags = _lags(summary)
    axes.plot(lags, [summary.mismatch_by_lag[lag] for lag in lags], **style)


def _lags(summary: RunSummary) -> list[int]:
    """Return the ages of tokens for which the two policies differ by more than rounding."""
    return [lag for lag, value in summary.mismatch_by_lag.items() if value > _ROUNDING]
