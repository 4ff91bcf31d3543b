"""Find out whether a run's answers have become worse than they were: a fall that is no chance, and not a small one.

Pure. ``Decline`` takes the accuracies of steps and of evaluations as they come, and returns a ``Fall``. The newest ones
are compared with the best earlier ones, because a run may first learn and then lose what it has learned. A fall has

- lost a quarter of the accuracy (``KEPT``), so that it matters;
- more than ``ERRORS`` standard errors. That is a strict limit, because the newest steps are compared after every step,
  and the best of many earlier ones are better than their expectation by chance. In 1,500 simulated runs of 3,000 steps
  whose policy never changes (five kinds of data, 2 or 8 groups of 8 answers a step), 0.4 % had a fall by chance.

The standard error of steps comes from the differences of successive steps. So it contains the differences between
prompts and between answers to one prompt, and learning hardly changes it. Counting answers would make it too small,
because answers to one prompt are much alike. Steps can be compared only if their prompts are drawn at random from the
same rows. The caller must leave out others (a curriculum, rows in the order of a file, groups chosen by accuracy).
Evaluations always ask the same rows, so they can be compared with any order of the training rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

KEPT = 0.75
"""An accuracy below this share of the best earlier one has fallen."""
ERRORS = 6.0
"""Standard errors that a fall has at least."""
WINDOWS = (8, 16, 32)
"""Numbers of steps whose mean is compared with that of as many earlier ones. Slow falls need the longer ones."""


@dataclass(frozen=True, slots=True)
class Fall:
    """The best accuracy before, and the newest. ``step`` is that of the newest, ``where`` says what they are."""

    step: int
    before: float
    now: float
    where: str

    @property
    def text(self) -> str:
        return f"accuracy {100 * self.before:.3g} % -> {100 * self.now:.3g} % ({self.where})"


def has_fallen(before: float, now: float, error: float) -> bool:
    """Return whether an accuracy has fallen. ``error`` is the standard error of the difference."""
    return now < KEPT * before and before - now > ERRORS * error


@dataclass(slots=True)
class _Steps:
    """Accuracies of successive steps. ``sums`` and ``squares`` are running sums, with a 0 in front: of the accuracies,
    and of half the squared differences of successive ones. ``best`` has the first index of the best window by its
    number of steps, of the windows that end before the newest one begins.
    """

    steps: list[int] = field(default_factory=list)
    sums: list[float] = field(default_factory=lambda: [0.0])
    squares: list[float] = field(default_factory=lambda: [0.0])
    best: dict[int, int] = field(default_factory=dict)

    def mean(self, first: int, count: int) -> float:
        return (self.sums[first + count] - self.sums[first]) / count

    def forget_from(self, step: int) -> None:
        """Forget ``step`` and later ones."""
        if not self.steps or self.steps[-1] < step:
            return
        kept = [self.mean(at, 1) for at, past in enumerate(self.steps) if past < step]
        steps = self.steps[: len(kept)]
        self.steps, self.sums, self.squares, self.best = [], [0.0], [0.0], {}
        for past, accuracy in zip(steps, kept, strict=True):
            self.add(past, accuracy)

    def add(self, step: int, accuracy: float) -> Fall | None:
        change = accuracy - self.mean(len(self.steps) - 1, 1) if self.steps else 0.0
        self.steps.append(step)
        self.sums.append(self.sums[-1] + accuracy)
        self.squares.append(self.squares[-1] + change**2 / 2)
        falls = [self._fall_of(count) for count in WINDOWS if len(self.steps) >= 2 * count]
        return next((fall for fall in falls if fall is not None), None)

    def _fall_of(self, count: int) -> Fall | None:
        number = len(self.steps)
        newest_past = number - 2 * count
        best = self.best.get(count, newest_past)
        if self.mean(newest_past, count) > self.mean(best, count):
            best = newest_past
        self.best[count] = best
        before, now = self.mean(best, count), self.mean(number - count, count)
        variance = self.squares[-1] / (number - 1)
        if not has_fallen(before, now, math.sqrt(2 * variance / count)):
            return None
        of_best, of_now = ((self.steps[at], self.steps[at + count - 1]) for at in (best, number - count))
        return Fall(
            of_now[1], before, now, f"means of steps {of_best[0]} to {of_best[1]} and {of_now[0]} to {of_now[1]}"
        )


class Decline:
    """Judges a run's accuracies as they come. Steps and evaluations that come again replace those of the first time."""

    def __init__(self) -> None:
        self._steps = _Steps()
        self._evaluations: dict[str, dict[int, tuple[float, float]]] = {}

    def forget_from(self, step: int) -> None:
        """Forget the steps from ``step`` on: the run has gone back. Evaluations that were made again come again."""
        self._steps.forget_from(step)

    def add_step(self, step: int, accuracy: float) -> Fall | None:
        """Take the mean accuracy of the answers that were received at ``step``, and return a fall that it shows."""
        return self._steps.add(step, accuracy)

    def add_evaluation(
        self, dataset: str, step: int, accuracy: float, error: float, *, missing: float = 0.0
    ) -> Fall | None:
        """Take an evaluation with its standard error, and return a fall that it shows.

        The rows are the same, so the error of the difference is smaller than the one that is assumed here. ``missing``
        is the share of rows without an answer, which count as wrong. A fall is none if right answers could explain it.
        """
        points = self._evaluations.setdefault(dataset, {})
        points[step] = (accuracy, error)
        best = max((past for past in points if past < step), key=lambda past: points[past][0], default=None)
        if best is None or not has_fallen(points[best][0], accuracy + missing, math.hypot(points[best][1], error)):
            return None
        return Fall(step, points[best][0], accuracy, f"evaluations on {dataset} at steps {best} and {step}")
