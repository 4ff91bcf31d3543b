"""Find in a run's metrics that the training goes wrong: the policy collapses, leaves its samples or learns nothing.

Pure: rows of steps and evaluations go in, notes come out. ``Health`` gives one note for each cause, with the course of
the metrics that show it and the settings to change. The learner, ``launch`` and its summary each give the same rows of
``metrics.jsonl`` to a ``Health`` of their own, so all of them say the same, also after a resume.

``CAUSES`` is the table of what is checked. A cause is noted when two of the last ``WINDOW`` steps show it, the newest
among them: one bad step is no collapse. Of log-probabilities that differ with the same weights, one step suffices, and
without a gradient it takes three. Whether answers have become worse takes more steps, or evaluations (``decline.py``).
Most limits are relative to the run's own beginning, which is the median of its first ``BEGINNING`` steps. While these
steps are among those to be judged, only the limits apply that need no beginning. The limits were set on half of the
healthy runs in ``tests/data/health_runs.json``, and judged on the other half.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from async_rl.run.figures.decline import Decline, Fall
from async_rl.run.figures.progress import is_step_row
from async_rl.run.records.step_log import Row, eval_figures

WINDOW = 3
"""Number of newest steps that are judged together."""
BEGINNING = 5
"""Number of the run's first steps whose medians are its beginning."""
_COURSE_STEPS = 10
"""Longest course of a metric in a note, in steps."""

_ROUNDING = 1e-6
"""Values below this are printed as 0."""
_NO_GRADIENT = 1e-9
"""Norm below which a gradient counts as zero."""

_READY = 2.0
"""About how many versions data ages in the queue if sampling is paced (``queue.run_ahead``)."""

Figures = Mapping[str, float]
"""Finite figures of one step, or their medians over the beginning, by the names of the metrics."""


@dataclass(frozen=True, slots=True)
class Note:
    """A finding about a run's training.

    Attributes:
        cause: short name of the cause. A run has at most one note for each cause.
        step: the step after which the cause was found.
        finding: what the metrics show, with their course.
        remedy: which settings to change.
        is_collapse: whether ``run.stop_on_collapse`` stops the run for it.
    """

    cause: str
    step: int
    finding: str
    remedy: str
    is_collapse: bool

    @property
    def text(self) -> str:
        """The whole note, as it is printed after ``note: ``."""
        return f"step {self.step}: {self.finding}. {self.remedy}"


@dataclass(frozen=True, slots=True)
class _Sign:
    """A metric that shows a cause if it is above a limit, or below it with ``is_low``.

    ``limit`` gets the step's figures and those of the run's beginning, which are empty if it is not known yet. It
    returns None if the metric shows nothing at this step.
    """

    key: str
    label: str
    unit: str
    limit: Callable[[Figures, Figures], float | None]
    is_low: bool = False

    def is_bad(self, step: Figures, beginning: Figures) -> bool:
        limit = self.limit(step, beginning) if self.key in step else None
        return limit is not None and self.distance(step) > (-limit if self.is_low else limit)

    def distance(self, step: Figures) -> float:
        """Return the metric, with the sign that makes higher values worse."""
        return -step[self.key] if self.is_low else step[self.key]

    def text(self, value: float) -> str:
        shown = f"{100 * value:.3g} %" if self.unit == "%" else f"{value:.3g}"
        return shown if abs(value) >= _ROUNDING else "0"


@dataclass(frozen=True, slots=True)
class _Cause:
    """Something that goes wrong, with its signs, of which one suffices. ``remedy`` gets the figures of the step.

    ``num_bad`` of the last ``WINDOW`` steps must show it, the newest among them. Without signs, ``decline`` judges.
    """

    name: str
    finding: str
    signs: tuple[_Sign, ...]
    remedy: Callable[[Figures], str]
    num_bad: int = 2
    is_collapse: bool = True

    def signs_of(self, step: Figures, beginning: Figures) -> list[_Sign]:
        return [sign for sign in self.signs if sign.is_bad(step, beginning)]


class Health:
    """Judges the steps of a run one after the other. ``notes`` has all notes so far."""

    def __init__(self, history: Iterable[Row] = ()) -> None:
        """Take the rows of ``metrics.jsonl`` that were written before, such as those before a resume."""
        self.notes: list[Note] = []
        self._first: list[tuple[int, Figures]] = []
        self._recent: deque[tuple[int, Figures]] = deque(maxlen=_COURSE_STEPS)
        self._decline = Decline()
        for row in history:
            self.add(row)

    def add(self, row: Row) -> list[Note]:
        """Take the next row of ``metrics.jsonl``, and return the notes that are new.

        After a rollback the same steps come again. They replace the ones before, whose notes are forgotten.
        """
        found = self._of_step(row) if is_step_row(row) else self._of_evaluations(row)
        known = {note.cause for note in self.notes}
        new = [note for note in found if note.cause not in known]
        # What follows a collapse has the same remedy.
        collapse = next((note for note in (*self.notes, *new) if note.is_collapse), None)
        if collapse is not None:
            see = f"The note of step {collapse.step} has the remedy"
            new = [note if note is collapse else replace(note, remedy=see) for note in new]
        self.notes += new
        return new

    def _of_step(self, row: Row) -> list[Note]:
        step = row["step"]
        while self._recent and self._recent[-1][0] >= step:
            self._recent.pop()
        self._first = [pair for pair in self._first if pair[0] < step]
        self.notes = [note for note in self.notes if note.step < step]
        self._decline.forget_from(step)
        figures = _figures_of(row)
        self._recent.append((step, figures))
        if len(self._first) < BEGINNING:
            self._first.append((step, figures))
        found = [self._note(cause) for cause in self._shown(after=-1)]
        accuracy = figures.get("accuracy/received")
        fall = None if accuracy is None else self._decline.add_step(step, accuracy)
        return found if fall is None else [*found, self._note_of(fall)]

    def _of_evaluations(self, row: Row) -> list[Note]:
        falls: list[Fall | None] = []
        for name, figures in eval_figures(row, "accuracy").items():
            error, unanswered, rows = (figures.get(key, 0) for key in ("accuracy_se", "unanswered", "rows"))
            missing = unanswered / rows if rows else 0.0
            falls.append(self._decline.add_evaluation(name, row["step"], figures["accuracy"], error, missing=missing))
        return [self._note_of(fall) for fall in falls if fall is not None][:1]

    def _note_of(self, fall: Fall) -> Note:
        figures = self._recent[-1][1] if self._recent else {}
        finding = f"{_WORSE.finding}: {fall.text}"
        return Note(_WORSE.name, fall.step, finding, _WORSE.remedy(figures), _WORSE.is_collapse)

    def collapse_after(self, step: int) -> Note | None:
        """Return the note of a collapse that the newest steps show, judged by steps after ``step`` alone.

        None if they show none. A run that resumes after a collapse is so given new steps before it counts again.
        """
        causes = [cause for cause in self._shown(after=step) if cause.is_collapse]
        return self._note(causes[0]) if causes else None

    def _shown(self, *, after: int) -> list[_Cause]:
        """Return the causes that the newest steps show, of which only those after the step ``after`` count."""
        window = [figures for step, figures in self._window() if step > after]
        if not window:
            return []
        beginning = self._beginning()
        found: list[_Cause] = []
        for cause in CAUSES:
            bad = [bool(cause.signs_of(figures, beginning)) for figures in window]
            if bad[-1] and sum(bad) >= cause.num_bad:
                found.append(cause)
        return found

    def _window(self) -> Sequence[tuple[int, Figures]]:
        return list(self._recent)[-WINDOW:]

    def _beginning(self) -> Figures:
        """Return the medians of the run's first steps, without those that are judged now."""
        judged = self._window()[0][0]
        rows = [figures for step, figures in self._first if step < judged]
        keys = dict.fromkeys(key for figures in rows for key in figures)
        return {key: median(figures[key] for figures in rows if key in figures) for key in keys}

    def _note(self, cause: _Cause) -> Note:
        step, figures = self._recent[-1]
        beginning = self._beginning()
        courses = [self._course(sign) for sign in cause.signs_of(figures, beginning)]
        finding = f"{cause.finding}: {', '.join(courses)}"
        return Note(cause.name, step, finding, cause.remedy(figures), cause.is_collapse)

    def _course(self, sign: _Sign) -> str:
        """Return how the metric of ``sign`` came to its newest value, from the best of the steps before."""
        *before, (step, figures) = self._recent
        now = f"{sign.text(figures[sign.key])}{sign.unit if sign.unit != '%' else ''}"
        known = [(sign.distance(past), -at, past) for at, past in before if sign.key in past]
        if not known:
            return f"{sign.label} {now}"
        _, at, past = min(known, key=lambda entry: entry[:2])
        if sign.text(past[sign.key]) == sign.text(figures[sign.key]):
            return f"{sign.label} {now}"
        steps = f"{step + at} steps" if step + at > 1 else "one step"
        return f"{sign.label} {sign.text(past[sign.key])} -> {now} within {steps}"


def _figures_of(row: Row) -> Figures:
    found = {key: row.get(key) for key in KEYS}
    return {key: float(value) for key, value in found.items() if value is not None and math.isfinite(value)}


def _ess_limit(_: Figures, beginning: Figures) -> float:
    return 0.5 * beginning["ratio/ess"] if "ratio/ess" in beginning else 0.25


def _kl_limit(step: Figures, beginning: Figures) -> float:
    """Return half of the entropy: a policy that is further away has moved by as much as it is uncertain.

    Below the floor, and near the KL of the beginning, the rounding of the engines may be all of it.
    """
    entropy = beginning.get("entropy", step.get("entropy", 0.0))
    return max(0.03, 0.5 * entropy, 5 * beginning.get("ratio/kl", 0.0))


def _clip_limit(_: Figures, beginning: Figures) -> float:
    return max(0.3, 5 * beginning["ratio/clip_fraction"]) if "ratio/clip_fraction" in beginning else 0.5


def _engine_limit(step: Figures, _: Figures) -> float | None:
    """Return 0.1 nats if most tokens were sampled with the weights that the learner holds, as in the first step.

    If they are few, they end answers that began with older weights, whose cached keys and values may be the cause.
    """
    return 0.1 if step.get("lag_0/tokens", 0.0) > 0.5 * step.get("tokens/trained", 0.0) else None


def _high_entropy(step: Figures, beginning: Figures) -> float | None:
    """Return twice the beginning's. None for better answers: who learns to think about a task may try more."""
    if "entropy" not in beginning or _is_better(step, beginning) or "distill/kl" in step:
        return None
    return max(0.05, 2 * beginning["entropy"])


def _low_entropy(step: Figures, beginning: Figures) -> float | None:
    """Return a twentieth of the beginning's. None for better answers: who has learned is certain, too."""
    if "entropy" not in beginning or _is_better(step, beginning) or "distill/kl" in step:
        return None
    return 0.05 * beginning["entropy"]


def _high_gradient(step: Figures, beginning: Figures) -> float | None:
    """Return 20 times the beginning's. None for better answers: more groups of which some answers are right give more
    gradient.
    """
    if not beginning.get("grad_norm") or _is_better(step, beginning):
        return None
    return 20 * beginning["grad_norm"]


def _no_gradient(step: Figures, beginning: Figures) -> float | None:
    """Return nearly zero. None for better answers after a beginning with gradients: nothing is left to learn."""
    had_gradient = beginning.get("grad_norm", 0.0) > _NO_GRADIENT
    if not step.get("tokens/trained") or (had_gradient and _is_better(step, beginning)):
        return None
    return _NO_GRADIENT


def _unused_limit(_: Figures, beginning: Figures) -> float | None:
    """Return a twentieth of all experts more than at the beginning: a task may need few, but not fewer and fewer."""
    return beginning["routing/unused"] + 0.05 if "routing/unused" in beginning else None


def _low_agreement(step: Figures, _: Figures) -> float | None:
    """Return that three of four pairs are the wrong way around. None with a teacher, who does not ask for accuracy."""
    return None if "distill/kl" in step else -0.5


def _is_better(step: Figures, beginning: Figures) -> bool:
    """Return whether nearly all of the step's answers are right, or clearly more than at the run's beginning."""
    now, before = step.get("accuracy/mean", 0.0), beginning.get("accuracy/mean", 0.0)
    return now > min(0.9, before + 0.05)


def _slower(step: Figures) -> str:
    """Return how to keep the policy near its samples, and how to go back."""
    rate = f" (now {step['lr']:.3g})" if "lr" in step else ""
    age, queued = step.get("staleness/mean", 0.0), step.get("staleness/in_queue_mean")
    parts = "" if queued is None else f": {age - queued:.1f} from sampling answers, {queued:.1f} from running ahead"
    is_bound = (queued or 0.0) > _READY and "queue/run_ahead_limit" not in step
    pace = ', set queue.run_ahead = "auto"' if is_bound else ""
    stale = (
        f" or queue.max_staleness (the data is {age:.1f} versions old{parts}){pace}, or choose a loss.preset that "
        f"corrects more"
        if age >= 0.5
        else " or learner.epochs_per_batch"
    )
    return f"Lower optimizer.lr{rate}{stale}; launch --from RUN@STEP goes on from an earlier checkpoint"


_LAG_0 = _Sign("mismatch_kl/lag_0", "KL at lag 0", " nats", _engine_limit)
_ESS = _Sign("ratio/ess", "effective sample size", "", _ess_limit, is_low=True)
_KL = _Sign("ratio/kl", "KL to the sampling policy", " nats", _kl_limit)
_CLIPPED = _Sign("ratio/clip_fraction", "clipped tokens", "%", _clip_limit)
_CERTAIN = _Sign("entropy", "entropy", " nats", _low_entropy, is_low=True)
_RANDOM = _Sign("entropy", "entropy", " nats", _high_entropy)
_EXPLODES = _Sign("grad_norm", "gradient norm", "", _high_gradient)
_ZERO = _Sign("grad_norm", "gradient norm", "", _no_gradient, is_low=True)
_UNUSED = _Sign("routing/unused", "unused experts", "%", _unused_limit)
_AGREEMENT = _Sign("advantage/agreement", "agreement of accuracies and advantages", "", _low_agreement, is_low=True)

_WORSE = _Cause(
    "worse",
    "the answers have become worse",
    (),
    lambda step: f"If the data has not become harder, the reward may be at odds with the accuracy. {_slower(step)}",
    is_collapse=False,
)

CAUSES: tuple[_Cause, ...] = (
    _Cause(
        "engines",
        "generators and learner compute different log-probabilities with the same weights",
        (_LAG_0,),
        lambda _: 'Compare temperature, dtype and engine of both; weights.parity = "stop" names the generator',
        num_bad=1,
    ),
    _Cause("samples", "the policy has left the samples that it trains on", (_ESS, _KL, _CLIPPED), _slower),
    _Cause(
        "certain",
        "the policy has become certain of answers that are no better",
        (_CERTAIN,),
        lambda step: f"{_slower(step)}; loss.entropy_coef and loss.clip_high keep the entropy up",
    ),
    _Cause(
        "random",
        "the policy becomes random",
        (_RANDOM,),
        lambda step: f"{_slower(step)}; if loss.entropy_coef is set, lower it",
    ),
    _Cause("gradient", "the gradient explodes", (_EXPLODES,), _slower),
    _Cause(
        "reversed",
        "right answers get lower advantages than wrong ones",
        (_AGREEMENT,),
        lambda _: "Check the signs of the reward (reward.type) and of the advantages (loss.advantage_function)",
        is_collapse=False,
    ),
    _WORSE,
    _Cause(
        "experts",
        "experts are chosen no more",
        (_UNUSED,),
        lambda _: "Raise loss.load_balancing_coef, such as to 0.001, or lower optimizer.lr",
        is_collapse=False,
    ),
    _Cause(
        "no_gradient",
        "nothing is learned, because all answers of a group get the same advantage",
        (_ZERO,),
        lambda _: "Check the reward: it must tell answers to one prompt apart; or choose easier or harder prompts",
        num_bad=WINDOW,
        is_collapse=False,
    ),
)
"""What may go wrong, in the order in which it is noted."""

KEYS = (
    "mismatch_kl/lag_0", "ratio/ess", "ratio/kl", "ratio/clip_fraction", "entropy", "grad_norm", "accuracy/mean", "lr",
    "staleness/mean", "lag_0/tokens", "tokens/trained", "distill/kl", "advantage/agreement", "accuracy/received",
    "staleness/in_queue_mean", "queue/run_ahead_limit", "routing/unused",
)  # fmt: skip
"""The metrics that are read."""
