"""Means over the runs of one staleness bound, with their standard errors. Pure.

How much two runs of one config differ is only known from several runs. Three runs of one bound may agree by chance, so
the spread of a bound is taken to be at least the median over the bounds. With fewer than ``ENOUGH`` degrees of freedom
the error of a run's steps/s is at least ``ONE_RUN``, because a single run can't show what else the machine did.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from async_rl.extensions.insight.comparison.summary import Evaluation, RunSummary

CLEARLY = 2.0
"""Number of standard errors above which a difference is more than noise."""
ONE_RUN = 0.1
"""Standard error of the steps/s of one run, as a share of them, if too few runs show the real one."""
ENOUGH = 4
"""Degrees of freedom (runs minus bounds) from which the spread of the runs is a good estimate."""


@dataclass(frozen=True, slots=True)
class Point:
    """The runs of one staleness bound.

    Attributes:
        bound: the bound, in versions.
        steps_per_s: mean over the runs.
        speed_error: standard error of ``steps_per_s``; infinite if nothing is known about it.
        accuracy: mean of the runs' last accuracies on ``judged_set``. None without evaluations.
        error: standard error of ``accuracy``.
        ess: mean effective sample size.
        staleness: mean staleness of trained tokens, in versions.
        first: mean of the runs' first accuracies on the same dataset. None with fewer than two evaluations.
        reached_s: mean seconds of training until a run reached the accuracy that all runs of all bounds reached. None
            without evaluations.
    """

    bound: int
    steps_per_s: float
    speed_error: float
    accuracy: float | None
    error: float
    ess: float | None
    staleness: float | None
    first: float | None = None
    reached_s: float | None = None

    @property
    def has_risen(self) -> bool:
        """Whether the accuracy is clearly above the first one, whose error is taken to be the same."""
        if self.accuracy is None or self.first is None:
            return False
        return self.accuracy - self.first > CLEARLY * math.sqrt(2) * self.error

    def is_clearly_faster(self, other: Point) -> bool:
        """Return whether the difference of steps/s is above ``CLEARLY`` standard errors."""
        error = math.hypot(self.speed_error, other.speed_error)
        return self.steps_per_s - other.steps_per_s > CLEARLY * error

    def is_clearly_below(self, other: Point) -> bool:
        """Return whether the accuracy at the end is clearly lower. An accuracy that is not known never is."""
        if self.accuracy is None or other.accuracy is None:
            return False
        return other.accuracy - self.accuracy > CLEARLY * math.hypot(self.error, other.error)


def points_of(summaries: Sequence[RunSummary]) -> list[Point]:
    """Return a point for each bound, in the order of the bounds."""
    groups = by_bound(summaries)
    dataset = judged_set(summaries)
    target = common_target(summaries, dataset) if dataset else 0.0
    is_enough = has_enough(summaries)
    speeds = [[run.steps_per_s for run in runs] for runs in groups]
    spreads = _spreads([[speed / fmean(of_bound) for speed in of_bound] for of_bound in speeds])
    of_bounds = [[run.evaluations[dataset] for run in runs if dataset in run.evaluations] for runs in groups]
    accuracy_spreads = _spreads([[history[-1].accuracy for history in histories] for histories in of_bounds])
    return [
        Point(
            bound=runs[0].bound,
            steps_per_s=fmean(speeds[number]),
            speed_error=fmean(speeds[number]) * _speed_error(runs, spreads[number], is_enough=is_enough),
            accuracy=mean_of_known(history[-1].accuracy for history in of_bounds[number]),
            error=_accuracy_error(
                [history[-1] for history in of_bounds[number]], accuracy_spreads[number], is_enough=is_enough
            ),
            ess=mean_of_known(run.means["ratio/ess"] for run in runs),
            staleness=mean_of_known(run.means["staleness/mean"] for run in runs),
            first=mean_of_known(history[0].accuracy for history in of_bounds[number] if len(history) > 1),
            reached_s=mean_of_known(one.time_s for history in of_bounds[number] if (one := reached(history, target))),
        )
        for number, runs in enumerate(groups)
    ]


def judged_set(summaries: Sequence[RunSummary]) -> str:
    """Return the dataset that all runs answered most often, of several the first by name; empty without evaluations.

    A set that is evaluated rarely, or only at a run's beginning and end, says little of runs that go on.
    """
    names = sorted({dataset for summary in summaries for dataset in summary.evaluations})
    return max(names, key=lambda name: min(len(run.evaluations.get(name, ())) for run in summaries), default="")


def by_bound(summaries: Sequence[RunSummary]) -> list[list[RunSummary]]:
    """Return the runs of each bound, in the order of the bounds."""
    bounds = sorted({summary.bound for summary in summaries})
    return [[summary for summary in summaries if summary.bound == bound] for bound in bounds]


def has_enough(summaries: Sequence[RunSummary]) -> bool:
    """Return whether there are enough runs of each bound to know how much runs of one config differ."""
    return len(summaries) - len(by_bound(summaries)) >= ENOUGH


def reached(evaluations: Sequence[Evaluation], target: float) -> Evaluation | None:
    """Return the first evaluation with an accuracy of at least ``target``. None if there is none."""
    return next((evaluation for evaluation in evaluations if evaluation.accuracy >= target), None)


def common_target(summaries: Iterable[RunSummary], dataset: str) -> float:
    """Return the highest accuracy that every run with evaluations on ``dataset`` has reached."""
    return min(max(e.accuracy for e in evaluations) for s in summaries if (evaluations := s.evaluations.get(dataset)))


def _speed_error(runs: Sequence[RunSummary], spread: float | None, *, is_enough: bool) -> float:
    """Return the standard error of the mean steps/s of ``runs``, as a share of it."""
    if spread is not None:
        return (spread if is_enough else max(spread, ONE_RUN)) / math.sqrt(len(runs))
    (run,) = runs
    return math.inf if run.speed_error is None else max(run.speed_error / run.steps_per_s, ONE_RUN)


def _accuracy_error(last: Sequence[Evaluation], spread: float | None, *, is_enough: bool) -> float:
    """Return the standard error of the mean accuracy. With few runs it is at least that of the rows."""
    if not last:
        return 0.0
    of_rows = 0.0 if is_enough else fmean(evaluation.error for evaluation in last)
    return max(spread or 0.0, of_rows) / math.sqrt(len(last))


def _spreads(groups: Sequence[Sequence[float]]) -> list[float | None]:
    """Return the standard deviation in each group, but at least the median of all. None if no group has two values."""
    deviations = [stdev(group) for group in groups if len(group) > 1]
    if not deviations:
        return [None] * len(groups)
    return [max(median(deviations), stdev(group) if len(group) > 1 else 0.0) for group in groups]


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None. None if there are none."""
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None
