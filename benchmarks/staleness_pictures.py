"""A picture for each question of the staleness study: every run's accuracy at its end, readable in grey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from async_rl.run.records.step_log import Row
from benchmarks.staleness_grid import Cell, Question

_MARKERS = "o^sDv"
"""By seed."""


def draw_all(questions: Sequence[Question], rows: Mapping[Cell, Row], directory: Path) -> list[Path]:
    """Draw the questions that compare at least two arms; those of one title share a picture, ``staleness_NAME.png``.

    A panel has the arms of a task at a rate, one below the other. Each run is a mark at its accuracy, whose form is its
    seed; the stroke is their mean, and the dotted line that of the first arm.
    """
    drawn: list[Path] = []
    for _, titled in groupby(questions, key=lambda question: question.title):
        same = list(titled)
        name = same[0].name
        panels = [
            (task, rate, arms)
            for question in same
            for task, rate in product(question.tasks, question.rates)
            if len(arms := _found(question, task, rate, rows)) > 1
        ]
        if panels:
            heights = [len(arms) for _, _, arms in panels]
            figure = Figure(figsize=(7, 0.6 * len(panels) + 0.24 * sum(heights)), layout="constrained")
            axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
            for ax, panel in zip(axes, panels, strict=True):
                _draw_panel(ax, *panel)
            axes[-1].set_xlabel("accuracy on held-out rows at the end")
            drawn.append(directory / f"staleness_{name.partition('-')[0]}.png")
            figure.savefig(drawn[-1], dpi=110)
    return drawn


def _found(question: Question, task: str, rate: float, rows: Mapping[Cell, Row]) -> dict[str, dict[int, float]]:
    """The accuracy of each seed of each arm that has a run, in the order of the arms."""
    found: dict[str, dict[int, float]] = {}
    for arm, seed in product(question.arms, range(question.seeds)):
        if (cell := Cell(task, arm, rate, seed)) in rows:
            found.setdefault(arm, {})[seed] = rows[cell]["accuracy"]
    return found


def _draw_panel(ax: Axes, task: str, rate: float, arms: Mapping[str, Mapping[int, float]]) -> None:
    for place, accuracies in enumerate(arms.values()):
        for seed, accuracy in accuracies.items():
            ax.plot(accuracy, place, _MARKERS[seed], color="0.25", markerfacecolor="none", markersize=6)
        center = mean(accuracies.values())
        ax.plot([center, center], [place - 0.35, place + 0.35], color="black", linewidth=2)
        if place == 0:
            ax.axvline(center, color="0.5", linestyle=":", linewidth=1)
    ax.set_yticks(range(len(arms)), list(arms), fontsize=8)
    ax.set_ylim(len(arms) - 0.4, -0.6)
    ax.set_title(f"{task}, {rate:g} times the config's learning rate", fontsize=9, loc="left")
    ax.grid(axis="x", color="0.9")
