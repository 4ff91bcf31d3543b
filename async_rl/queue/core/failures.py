"""What failed, which generators get no leases because theirs fail, and when the run pauses or stops.

A lease fails if the reward, the environment or the engine raises, or if the lease expires although its generator is
alive. The fault may lie with the prompt, with the generator's machine, with the user's code, or with a tool that is
away for a while. What succeeded meanwhile tells them apart. What a failure means for its prompt is in ``retries``.

- A *generator* whose last ``MAX_FAILED_IN_A_ROW`` leases failed is quarantined. It gets one lease to try again after
  ``FIRST_PAUSE_S``, and each trial that fails doubles the pause, up to ``LONGEST_PAUSE_S``. A good group ends it.
- If all generators are quarantined in this way, the *run is paused* (``Outage``). The first good group ends the pause
  for all of them. A pause of ``queue.max_outage_s`` stops the run.
- Before the first good group since the user's code changed, the same failure of all generators is a mistake in the
  code or the config, and stops the run at once. A *transient* failure (``process.transient``: a connection, a
  time-out) does not, because a tool may start later than the run.

All times are in seconds of the queue's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from async_rl.queue.messages import Failure, FailureCause

EvalKey = tuple[str, int]
"""What identifies an evaluation: the name of its dataset, and the learner's step that requested it."""

MAX_FAILED_IN_A_ROW = 8
"""A generator is quarantined after this many failed leases without a good group in between."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""The first and the longest time between two trials of a quarantined generator."""
_MAX_TEXT = 400
"""Maximum number of characters of a place and of a detail that are counted, because each commit of the journal writes
all of them."""
_MAX_PLACES = 20
_SHOWN_DETAIL = 400
_MAX_ROWS = 100
_WHAT: Mapping[FailureCause, str] = {
    "reward_error": "the reward", "environment_error": "the environment", "engine_error": "the engine",
    "prompt_too_long": "the prompt", "no_progress": "the generator", "filter_error": "queue.filter_function",
}  # fmt: skip


def describe(failure: Failure) -> str:
    """Return what failed and why, as a part of a sentence: "the reward failed: KeyError: 'x' (r.py, line 3, in f)"."""
    return f"{_WHAT[failure.cause]} failed: {one_line(failure.detail)}"


def one_line(text: str) -> str:
    """Return a generator's text without line breaks, with which it could forge lines of the queue's log."""
    return " ".join(text.split())


class Attempts(msgspec.Struct):
    """The numbers of failed and of late attempts to sample a prompt.

    A prompt with ``queue.max_attempts`` failed attempts is excluded under the cause ``poison``. A prompt with as many
    late attempts is excluded under the cause ``too_slow``.

    Attributes:
        failed: the failed attempts that count.
        stale: the late attempts.
        num_good: the queue's number of good groups when the last attempt failed; -1 if none failed.
        failed_at: the time of the last failed attempt that counts; if none counts, of the first failed one.
        outcome: that attempt's number among all outcomes (``QueueState.num_outcomes``); 0 if none failed.
        tries: the number of all failed attempts.
        by: the generator of the last attempt that failed or was late; empty if there is none.
        too_long_for: the generator that said first that the prompt is too long; empty if none did.
    """

    failed: int = 0
    stale: int = 0
    num_good: int = -1
    failed_at: float = 0.0
    outcome: int = 0
    tries: int = 0
    by: str = ""
    too_long_for: str = ""

    def note(self, num_good: int, outcome: int, now: float, *, counts: bool) -> None:
        """Note an attempt that failed as outcome number ``outcome``, after the queue had received ``num_good`` good
        groups.
        """
        if counts or not self.tries:
            self.failed_at, self.outcome = now, outcome
        self.failed, self.tries, self.num_good = self.failed + counts, self.tries + 1, num_good


@dataclass(slots=True)
class Failing:
    """The leases of one generator that failed since its last good group.

    Attributes:
        count: their number.
        num_equal: the number of the last ones that failed at the same place.
        since: the time at which the first of them failed.
        last: why the last one failed.
        retry_at: the time from which the generator may try a lease; None if it is not quarantined.
        trial: the id of the lease that it tries; empty if none.
        pause_s: the pause before the next trial.
        is_due: whether ``retry_at`` has passed, so that waiting requests were tried again.
        charged: the prompts that were charged an attempt: the evaluation, or None, and the row or position.
    """

    count: int = 0
    num_equal: int = 0
    since: float = 0.0
    last: Failure | None = None
    retry_at: float | None = None
    trial: str = ""
    pause_s: float = FIRST_PAUSE_S
    is_due: bool = False
    charged: list[tuple[EvalKey | None, int]] = field(default_factory=list)

    def add(self, failure: Failure, lease_id: str, now: float) -> bool:
        """Add a failed lease. Return whether it puts the generator into quarantine."""
        is_equal = self.last is not None and (self.last.cause, self.last.place) == (failure.cause, failure.place)
        self.num_equal = self.num_equal + 1 if is_equal else 1
        self.since = self.since if self.count else now
        self.count, self.last = self.count + 1, failure
        if self.retry_at is None:
            if self.count < MAX_FAILED_IN_A_ROW:
                return False
            self.retry_at, self.is_due = now + self.pause_s, False
            return True
        if lease_id == self.trial:
            self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
            self.retry_at, self.trial, self.is_due = now + self.pause_s, "", False
        return False

    def may_try(self, now: float, *, is_trial_open: bool) -> bool:
        """Return whether a quarantined generator may have a lease. ``is_trial_open``: ``trial`` has not ended."""
        if self.trial and not is_trial_open:
            self.trial = ""  # it ended without a result: expired, or its learner is gone
        return self.retry_at is not None and now >= self.retry_at and not self.trial

    def try_now(self, now: float) -> None:
        """Let a quarantined generator try a lease at once, because another one that had failed has succeeded."""
        if self.retry_at is not None and not self.trial:
            self.retry_at, self.is_due = min(self.retry_at, now), False

    @property
    def is_mistake(self) -> bool:
        """Whether all ``MAX_FAILED_IN_A_ROW`` last leases failed at the same place, and not by a transient failure."""
        return self.num_equal >= MAX_FAILED_IN_A_ROW and self.last is not None and not self.last.is_transient

    def describe(self, now: float) -> str:
        """Return why the generator is quarantined and when it tries again, as text; empty if it is not."""
        if self.retry_at is None or self.last is None:
            return ""
        again = "a lease is being tried" if self.trial else f"tried again in {max(0.0, self.retry_at - now):.0f} s"
        return f"its last {self.count} leases failed, in the end because {describe(self.last)}; {again}"


@dataclass(frozen=True, slots=True)
class Outage:
    """The state of a run in which every generator is quarantined because its leases fail.

    Attributes:
        since: the time since which all of them fail.
        retry_at: the time of the next trial.
        last: why the newest of their leases failed.
        generator_id: the generator of that lease.
        is_mistake: whether all fail as a mistake in the user's code fails.
    """

    since: float
    retry_at: float
    last: Failure
    generator_id: str
    is_mistake: bool

    def describe(self, now: float, max_s: float) -> str:
        """Return what the run waits for, as text."""
        again = max(0.0, self.retry_at - now)
        return (
            f"the run is paused because every lease fails, for {now - self.since:.0f} s so far: {describe(self.last)} "
            f"(generator {self.generator_id!r}; tried again in {again:.0f} s; the run stops after "
            f"queue.max_outage_s = {max_s:g} s)"
        )

    def diagnosis(self, now: float, max_s: float, *, is_proven: bool) -> str:
        """Return the reason why the run stops; empty if it goes on.

        ``is_proven`` says whether a group was good since the user's code changed.
        """
        log = f"the log of generator {self.generator_id!r} has the traceback"
        remedy = f"Correct the cause, then run the same command again; {log}"
        if self.is_mistake and not is_proven:
            what = _WHAT[self.last.cause]
            return (
                f"{what} failed {MAX_FAILED_IN_A_ROW} times in a row with the same error, and never succeeded: "
                f"{one_line(self.last.detail)}. {remedy}"
            )
        if now - self.since < max_s:
            return ""
        return f"every lease failed for {now - self.since:.0f} s (queue.max_outage_s): {describe(self.last)}. {remedy}"


def outage_of(failing: Mapping[str, Failing]) -> Outage | None:
    """Return the outage if all generators that may sample are quarantined because their leases fail, else None.

    ``failing`` has the failures of these generators by id.
    """
    if not failing or any(failures.retry_at is None for failures in failing.values()):
        return None
    newest = max(failing, key=lambda generator_id: failing[generator_id].since)
    last = failing[newest].last
    assert last is not None
    return Outage(
        since=failing[newest].since,
        retry_at=min(f.retry_at for f in failing.values() if f.retry_at is not None),
        last=last,
        generator_id=newest,
        is_mistake=all(failures.is_mistake for failures in failing.values()),
    )


class FailedPlace(msgspec.Struct):
    """The rollouts that failed at one place of the code.

    Attributes:
        cause: what failed.
        detail: the last exception as text, with its place.
        rollouts: their number.
        rows: the rows of the training data whose rollouts they were, at most 100.
        eval_rows: the same for the rows of evaluations, as "<set>:<row>".
    """

    cause: FailureCause
    detail: str
    rollouts: int = 0
    rows: list[int] = []
    eval_rows: list[str] = []


def add_failed(places: dict[str, FailedPlace], failure: Failure, rollouts: int, row: int | str) -> bool:
    """Count failed rollouts in ``places``, by the place of the failure. Return whether the place is new.

    Of more than 20 places, the last one has the rest.

    Args:
        row: their row of the training data, or "<set>:<row>" of an evaluation.
    """
    key, detail = one_line(failure.place)[:_MAX_TEXT], one_line(failure.detail)[:_MAX_TEXT]
    if key not in places and len(places) >= _MAX_PLACES:
        key = "other places"
    is_new = key not in places
    place = places.setdefault(key, FailedPlace(failure.cause, detail))
    place.cause, place.detail = failure.cause, detail
    place.rollouts += rollouts
    rows: list[Any] = place.rows if isinstance(row, int) else place.eval_rows
    if row not in rows and len(rows) < _MAX_ROWS:
        rows.append(row)
    return is_new


def failed_line(place: FailedPlace) -> str:
    """Return how many rollouts failed at a place, on which rows, and why, as text."""
    rows = [*(f"row {row} of data.train" for row in place.rows), *place.eval_rows]
    further = f" and {len(rows) - 1} other row{'s' if len(rows) > 2 else ''}" if rows[1:] else ""
    return (
        f"{place.rollouts} rollout{'s' if place.rollouts > 1 else ''} of {rows[0]}{further} failed, and what fails is "
        f"not trained on: {_WHAT[place.cause]} failed: "
        f"{place.detail[:_SHOWN_DETAIL]}"
    )


def failures_dict(places: Iterable[FailedPlace]) -> list[dict[str, Any]]:
    """Return failed places for ``ledger.json`` and ``async-rl status``, the most frequent first, as plain data."""
    return [msgspec.structs.asdict(place) for place in sorted(places, key=lambda place: -place.rollouts)]
