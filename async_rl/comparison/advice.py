"""Say in words which staleness bound to set, from the summaries of runs that differ in ``queue.max_staleness``.

Pure. The rule: a higher bound pays as long as it makes steps noticeably faster (``PAYS``). Of the bounds that are about
as fast as the fastest one, the lowest has the freshest data, so it is recommended. If its runs ended with an accuracy
that is clearly below that of another bound (more than ``CLEARLY`` standard errors), the fastest bound whose accuracy is
not clearly below is recommended instead. For runs of one bound, the figures of the runs say what to change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from async_rl.comparison.comparable import differing_keys, why_incomparable
from async_rl.comparison.summary import RunSummary

PAYS = 1.05
"""A bound that makes steps less than this factor faster than a lower bound does not pay."""
CLEARLY = 2.0
"""Number of standard errors above which a difference of accuracies is more than noise."""
_LOW_ESS = 0.9
_LOW_OVERLAP = 0.9
_IDLE = 0.1
_LOST = 0.02


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation.

    Attributes:
        sentence: what to do.
        reasons: one sentence each.
        bound: the recommended value of ``queue.max_staleness``. None if the runs do not tell.
    """

    sentence: str
    reasons: tuple[str, ...]
    bound: int | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """The runs of one staleness bound.

    Attributes:
        bound: the bound, in versions.
        steps_per_s: mean over the runs.
        accuracy: mean of the runs' last accuracies on the first dataset. None without evaluations.
        error: standard error of ``accuracy``: from the spread of the runs, or of the rows if there is one run.
        ess: mean effective sample size.
        staleness: mean staleness of trained tokens, in versions.
        first: mean of the runs' first accuracies on the same dataset. None with fewer than two evaluations.
    """

    bound: int
    steps_per_s: float
    accuracy: float | None
    error: float
    ess: float | None
    staleness: float | None
    first: float | None = None


def advise(summaries: Sequence[RunSummary]) -> Advice:
    """Return what the runs say about ``queue.max_staleness``."""
    if others := differing_keys(summaries):
        return Advice(
            "No advice on queue.max_staleness: compare runs that differ in nothing else but run.seed.",
            (f"The runs also differ in {', '.join(others)}.",),
        )
    bounds = sorted({summary.bound for summary in summaries})
    if len(bounds) == 1:
        return _of_one_bound(summaries)
    if (found := why_incomparable(summaries)) is not None:
        remedy, reason = found
        return Advice(f"No advice on queue.max_staleness: {remedy}", (reason,))
    return recommend([_point([summary for summary in summaries if summary.bound == bound]) for bound in bounds])


def recommend(points: Sequence[Point]) -> Advice:
    """Return the recommendation for the runs of several bounds.

    Args:
        points: in the order of their bounds.
    """
    fastest = max(point.steps_per_s for point in points)
    paying = next(point for point in points if point.steps_per_s * PAYS >= fastest)
    chosen, reasons = paying, [_speeds(points, paying)]
    measured = [point for point in points if point.accuracy is not None]
    if measured and paying.accuracy is not None:
        best = max(measured, key=lambda point: point.accuracy or 0.0)
        if _is_below(paying, best):
            fair = [point for point in measured if not _is_below(point, best)]
            chosen = max(fair, key=lambda point: point.steps_per_s)
            reasons.append(
                f"But the accuracy at the end is clearly lower there: {_shown(paying)} at {paying.bound}, "
                f"{_shown(best)} at {best.bound}. {chosen.bound} is the fastest bound without such a loss."
            )
        elif best.first is not None and not _has_risen(best):
            reasons.append(
                f"The accuracy does not tell yet: it began at {best.first:.3f} and has not clearly risen at any bound "
                f"({_accuracies(measured)}). Run more steps before you rely on this recommendation."
            )
        else:
            reasons.append(f"The accuracy at the end does not suffer: {_accuracies(measured)}.")
    if chosen.staleness is not None and chosen.ess is not None:
        warning = ", which is low: consider a lower bound or optimizer.lr" if chosen.ess < _LOW_ESS else ""
        reasons.append(
            f"At {chosen.bound} a trained token is {chosen.staleness:.1f} versions old on average, and the effective "
            f"sample size is {chosen.ess:.3f}{warning}."
        )
    return Advice(f"Set queue.max_staleness = {chosen.bound}.", tuple(reasons), chosen.bound)


def _speeds(points: Sequence[Point], paying: Point) -> str:
    """Return the gain in speed from each bound to the next, and why ``paying`` is where a higher bound stops paying."""
    gains = [
        f"{high.steps_per_s / low.steps_per_s:.2f} times from {low.bound} to {high.bound}"
        for low, high in itertools.pairwise(points)
    ]
    end = (
        f"{paying.bound} is the highest bound that was tried, so a higher one may pay too"
        if paying is points[-1]
        else f"above {paying.bound} a higher bound stops paying: less than {PAYS - 1:.0%} more"
    )
    return f"Steps/s: {', '.join(gains)}; {end}."


def _of_one_bound(summaries: Sequence[RunSummary]) -> Advice:
    bound = summaries[0].bound
    overlap, learner, generators = (
        _mean(getattr(summary, name) for summary in summaries)
        for name in ("overlap", "idle_learner", "idle_generators")
    )
    staleness, ess, dropped, masked = (
        _mean(getattr(summary, name) for summary in summaries)
        for name in ("staleness_mean", "ess", "dropped", "masked")
    )
    lost = (dropped or 0.0) + (masked or 0.0)
    if lost > _LOST:
        return Advice(
            f"Raise queue.max_staleness above {bound}.", (f"{lost:.1%} of the data was lost because it was too old.",)
        )
    if ess is not None and ess < _LOW_ESS:
        return Advice(
            f"Lower queue.max_staleness below {bound}, or lower optimizer.lr.",
            (f"The effective sample size is only {ess:.3f}: the data is too old for this learning rate.",),
        )
    if overlap is not None and overlap < _LOW_OVERLAP:
        return Advice(
            f"Try a queue.max_staleness above {bound}.",
            (
                f"Overlap is {overlap:.2f} of 1: learner and generators wait for each other, or share processors.",
                f"Whether a higher bound pays: async-rl sweep CONFIG --over queue.max_staleness={_higher(bound)}.",
            ),
        )
    if generators is not None and generators > _IDLE and staleness is not None and staleness > 0.8 * bound:
        return Advice(
            f"Lower queue.max_staleness below {bound}: this costs no speed.",
            (
                f"Generators idle {generators:.0%} of the time, and data is {staleness:.1f} versions old on average: "
                f"the queue is full.",
            ),
        )
    if learner is not None and learner > _IDLE:
        return Advice(
            "Add generators, or raise generator.batch_size.", (f"The learner waits {learner:.0%} of the time.",)
        )
    return Advice(
        f"Nothing speaks against queue.max_staleness = {bound}.",
        ("Compare it with other bounds: only that shows whether another one is faster.",),
    )


def _higher(bound: int) -> str:
    """Return the values for a sweep from ``bound`` upwards."""
    return ",".join(str(value) for value in (bound, max(1, 2 * bound), max(4, 4 * bound)))


def _point(runs: Sequence[RunSummary]) -> Point:
    series = [next(iter(run.evaluations.values())) for run in runs if run.evaluations]
    last = [evaluations[-1] for evaluations in series]
    accuracies = [evaluation.accuracy for evaluation in last]
    of_rows = last[0].error if last else 0.0
    error = stdev(accuracies) / math.sqrt(len(accuracies)) if len(accuracies) > 1 else of_rows
    return Point(
        bound=runs[0].bound,
        steps_per_s=fmean(run.steps_per_s for run in runs),
        accuracy=fmean(accuracies) if accuracies else None,
        error=error,
        ess=_mean(run.ess for run in runs),
        staleness=_mean(run.staleness_mean for run in runs),
        first=_mean(evaluations[0].accuracy for evaluations in series if len(evaluations) > 1),
    )


def _is_below(point: Point, best: Point) -> bool:
    return (best.accuracy or 0.0) - (point.accuracy or 0.0) > CLEARLY * math.hypot(point.error, best.error)


def _has_risen(point: Point) -> bool:
    """Return whether the accuracy at the end is clearly above the first one, whose error is taken to be the same."""
    return (point.accuracy or 0.0) - (point.first or 0.0) > CLEARLY * math.sqrt(2) * point.error


def _shown(point: Point) -> str:
    return f"{point.accuracy:.3f} ± {point.error:.3f}"


def _accuracies(points: Iterable[Point]) -> str:
    return ", ".join(f"{_shown(point)} at {point.bound}" for point in points)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
