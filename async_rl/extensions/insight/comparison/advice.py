"""Say in words which staleness bound to set, from the summaries of runs that differ in ``queue.max_staleness``.

Pure. The rule: a higher bound pays if its steps are faster, by more than ``PAYS`` and by more than ``CLEARLY`` standard
errors, and if it reached the accuracy that all runs reached sooner by as much (where the accuracy has clearly risen).
The lowest bound above which no bound pays is recommended, because it has the freshest data: in doubt, the lower one.
Bounds whose accuracy at the end is clearly below the best one are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from async_rl.extensions.insight.comparison.comparable import differing_keys, why_incomparable
from async_rl.extensions.insight.comparison.points import CLEARLY, ONE_RUN, Point, has_enough, points_of
from async_rl.extensions.insight.comparison.summary import RunSummary

PAYS = 1.05
"""A bound that is less than this factor faster than a lower bound does not pay."""
_LOW_ESS = 0.9
MUCH_LOST = 0.02
"""Share of the data from which on its loss is worth a word."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation.

    Attributes:
        sentence: what to do.
        reasons: one sentence each.
        bound: the recommended value of ``queue.max_staleness``. None if the runs do not tell.
        is_certain: whether the runs tell that no higher bound that was tried pays.
    """

    sentence: str
    reasons: tuple[str, ...]
    bound: int | None = None
    is_certain: bool = True


def advise(summaries: Sequence[RunSummary]) -> Advice:
    """Return what the runs say about ``queue.max_staleness``."""
    if other_keys := differing_keys(summaries):
        return Advice(
            "No advice on queue.max_staleness: compare runs that differ in nothing else but run.seed.",
            (f"The runs also differ in {', '.join(other_keys)}.",),
        )
    if len({summary.bound for summary in summaries}) == 1:
        return _of_one_bound(summaries[0].bound)
    if (obstacle := why_incomparable(summaries)) is not None:
        remedy, reason = obstacle
        return Advice(f"No advice on queue.max_staleness: {remedy}", (reason,))
    return recommend(points_of(summaries), has_enough=has_enough(summaries))


def recommend(points: Sequence[Point], *, has_enough: bool) -> Advice:
    """Return the recommendation for the runs of several bounds.

    Args:
        points: in the order of their bounds.
        has_enough: whether there are enough runs to know how much runs of one bound differ.
    """
    measured = [point for point in points if point.accuracy is not None]
    best = max(measured, key=lambda point: point.accuracy or 0.0, default=None)
    fair = [point for point in points if best is None or not point.is_clearly_below(best)]
    has_risen = bool(measured) and all(point.has_risen for point in measured)
    better = [
        next((high for high in fair[number + 1 :] if _pays(high, low, has_risen=has_risen)), None)
        for number, low in enumerate(fair)
    ]
    chosen = fair[better.index(None)]
    higher = [point for point in fair if point.bound > chosen.bound and point.steps_per_s > PAYS * chosen.steps_per_s]
    doubtful = [point for point in higher if not point.is_clearly_faster(chosen)]
    reasons = [_speeds(points), *_too_low(fair, better, has_risen=has_risen)]
    reasons.append(_where_it_ends(points, chosen, [point for point in higher if point not in doubtful]))
    if best is not None and best.first is not None and not has_risen:
        reasons.append(
            f"The accuracy does not tell yet: it began at {best.first:.3f} and has not clearly risen at every bound "
            f"({_accuracies(measured)}). Run more steps before you rely on this recommendation."
        )
    elif best is not None:
        reasons += _learning(measured, best, has_risen=has_risen)
    if doubtful:
        reasons.append(_doubt(doubtful, chosen, has_enough=has_enough))
    reasons += _age(chosen)
    doubt = f" for now: these runs can't tell whether {_either(doubtful)} pays" if doubtful else ""
    return Advice(f"Set queue.max_staleness = {chosen.bound}{doubt}.", tuple(reasons), chosen.bound, not doubtful)


def _pays(high: Point, low: Point, *, has_risen: bool) -> bool:
    """Return whether ``high`` is clearly faster, and reached the common accuracy sooner if the evaluations tell."""
    if high.steps_per_s <= PAYS * low.steps_per_s or not high.is_clearly_faster(low):
        return False
    if not has_risen or high.reached_s is None or low.reached_s is None:
        return True
    return low.reached_s > PAYS * high.reached_s


def _speeds(points: Sequence[Point]) -> str:
    """Return the speed at each bound, and its gain over the bound before."""
    gains = [""] + [
        f" ({high.steps_per_s / low.steps_per_s:.2f} times that at {low.bound})"
        for low, high in itertools.pairwise(points)
    ]
    shown = [f"{_speed(point)} at {point.bound}{gain}" for point, gain in zip(points, gains, strict=True)]
    return f"Steps/s: {', '.join(shown)}."


def _too_low(fair: Sequence[Point], better: Sequence[Point | None], *, has_risen: bool) -> Iterable[str]:
    """Return why the bounds below the recommended one are too low: ``better`` has a bound that pays for each."""
    sooner = ", and the accuracy that every run reached came sooner" if has_risen else ""
    lower = list(zip(fair, better, strict=True))[: better.index(None)]
    for high, group in itertools.groupby(lower, key=lambda pair: pair[1]):
        assert high is not None
        bounds = " and ".join(str(low.bound) for low, _ in group)
        yield f"Above {bounds} a higher bound pays: at {high.bound} the steps are clearly faster{sooner}."


def _where_it_ends(points: Sequence[Point], chosen: Point, late: Sequence[Point]) -> str:
    """Return why no bound above ``chosen`` pays. ``late`` are those with clearly faster steps."""
    if chosen is points[-1]:
        return f"{chosen.bound} is the highest bound that was tried, so a higher one may pay too."
    if late:
        return (
            f"The steps at {_either(late)} are faster than at {chosen.bound}, but the accuracy that every run reached "
            f"came no sooner."
        )
    return (
        f"No higher bound is faster than {chosen.bound} by more than {PAYS - 1:.0%} and {CLEARLY:.0f} standard errors."
    )


def _learning(measured: Sequence[Point], best: Point, *, has_risen: bool) -> Iterable[str]:
    times = [f"{point.reached_s:.1f} s at {point.bound}" for point in measured if point.reached_s is not None]
    if has_risen:
        yield f"The accuracy that every run reached came after {', '.join(times)}."
    lost = [point for point in measured if point.is_clearly_below(best)]
    if lost:
        yield (
            f"The accuracy at the end is clearly lower than {_shown(best)} at {best.bound}: {_accuracies(lost)}. So "
            f"{_either(lost)} is not recommended."
        )
    else:
        yield f"The accuracy at the end does not suffer: {_accuracies(measured)}."


def _doubt(doubtful: Sequence[Point], chosen: Point, *, has_enough: bool) -> str:
    """Return what the runs can't tell, and how to find out."""
    gains = [f"{point.bound} made {point.steps_per_s / chosen.steps_per_s:.2f} times the steps/s" for point in doubtful]
    bounds = ",".join(str(point.bound) for point in (chosen, *doubtful))
    why = (
        f"the difference is below {CLEARLY:.0f} standard errors"
        if has_enough
        else f"with so few seeds that may be noise, since two runs of one bound may differ by {ONE_RUN:.0%} and more"
    )
    seeds = "9" if has_enough else "3"
    return (
        f"{' and '.join(gains)} of {chosen.bound}, but {why}. To find out: async-rl sweep CONFIG --over "
        f"queue.max_staleness={bounds} --seeds {seeds}"
    )


def _age(chosen: Point) -> Iterable[str]:
    if chosen.staleness is not None and chosen.ess is not None:
        warning = ", which is low: consider a lower bound or optimizer.lr" if chosen.ess < _LOW_ESS else ""
        yield (
            f"At {chosen.bound} a trained token is {chosen.staleness:.1f} versions old on average, and the effective "
            f"sample size is {chosen.ess:.3f}{warning}."
        )


def _of_one_bound(bound: int) -> Advice:
    values = ",".join(str(value) for value in (bound, max(1, 2 * bound), max(4, 4 * bound)))
    return Advice(
        f"No advice on queue.max_staleness: all runs have {bound}.",
        (f"Whether a higher bound pays: async-rl sweep CONFIG --over queue.max_staleness={values}.",),
    )


def _speed(point: Point) -> str:
    return f"{point.steps_per_s:.3g} ± {point.speed_error:.2g}"


def _shown(point: Point) -> str:
    return f"{point.accuracy:.3f} ± {point.error:.3f}"


def _accuracies(points: Iterable[Point]) -> str:
    return ", ".join(f"{_shown(point)} at {point.bound}" for point in points)


def _either(points: Sequence[Point]) -> str:
    return " or ".join(str(point.bound) for point in points)
