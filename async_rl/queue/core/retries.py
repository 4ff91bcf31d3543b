"""Which attempts count against their prompts, which prompts are sampled again, and which are excluded.

A lease that gave no usable group was an attempt at its prompt. The rules:

- A *prompt* is charged a failed attempt only if its generator began and finished a good group of another prompt since
  the last attempt that was charged, and if the generator is not quarantined then, or by the failures that follow. A
  group that began earlier does not prove that a tool is there: it may have used the tool before. So neither an outage
  nor a broken machine excludes a prompt, with two exceptions: the first failure of an outage counts, which excludes the
  prompt if ``queue.max_attempts`` is 1; and where only prompts are left that failed before (suspects), a transient
  failure counts every ``TRANSIENT_WAIT_S``, so that the last rows can't hold a run up.
- A prompt whose lease failed, was refused, was late or expired goes to *another generator* first, if one samples. It is
  excluded as too long when this is said for the second time, or by the only generator that samples.
- Leases of a generator that died put no generator into quarantine, because one of their prompts may have killed it.
  They count against their prompts by the first rule alone.

A restarted queue server knows the attempts, and forgets which generators fail.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from async_rl.queue.core.admission import QueueSettings
from async_rl.queue.core.evaluations import Answer, EvalBook, Evaluation
from async_rl.queue.core.failures import Attempts, EvalKey, FailedPlace, Failing, Outage, add_failed, describe
from async_rl.queue.core.generators import GeneratorEntry, GeneratorTable
from async_rl.queue.core.leases import ActiveLease, LeaseTable
from async_rl.queue.core.prompts import PromptStream
from async_rl.queue.messages import DropCause, Failure

TRANSIENT_WAIT_S = 300.0
"""Where only prompts are left that failed while others succeeded, a transient failure of one of them counts as a failed
attempt if the last one that counts is so long ago. Else the last prompt of a data set, whose tool never answers, would
stop the run."""
_NAMED = 100
"""Maximum number of excluded prompts that are listed. All excluded prompts are counted."""


@dataclass(slots=True, kw_only=True)
class PersistedAttempts:
    """The fields of ``PersistedState`` that ``Retries`` changes.

    Attributes:
        now: the queue's clock, in seconds.
        attempts: failed and late attempts by prompt position.
        excluded: the number of excluded prompts by epoch.
        last_excluded: the positions that were excluded last, each with the cause.
        prompts_too_long: the number of prompts that were excluded as too long.
        num_good: the number of good groups, of training and evaluations.
        num_outcomes: the number of good groups and of failed attempts, of training and evaluations. It orders them and
            the grants of leases.
        code: the digest of the user's code that the learner told.
        proven_code: the digest of the code with which the last good group was scored; None if there is none.
        failed_places: the rollouts that failed, by the place of the failure.
    """

    now: float = 0.0
    attempts: dict[int, Attempts] = field(default_factory=dict)
    excluded: Counter[int] = field(default_factory=Counter)
    last_excluded: dict[int, str] = field(default_factory=dict)
    prompts_too_long: int = 0
    num_good: int = 0
    num_outcomes: int = 0
    code: str = ""
    proven_code: str | None = None
    failed_places: dict[str, FailedPlace] = field(default_factory=dict)


class Retries:
    """The attempts at the prompts of training and evaluations, kept in ``data``. ``news`` gets lines for the log."""

    def __init__(
        self, data: PersistedAttempts, settings: QueueSettings, stream: PromptStream, leases: LeaseTable,
        generators: GeneratorTable, evals: EvalBook, news: list[str],
    ) -> None:  # fmt: skip
        self._data, self._settings, self._news = data, settings, news
        self._stream, self._leases, self._generators, self._evals = stream, leases, generators, evals

    @property
    def outage(self) -> Outage | None:
        """The outage because of which the run is paused; None if there is none."""
        return self._generators.outage(self._data.now)

    @property
    def is_code_proven(self) -> bool:
        """Whether a group was good since the user's code changed."""
        return self._data.proven_code == self._data.code

    def attempts_at(self, active: ActiveLease) -> Attempts | None:
        """Return the attempts at the prompt of a lease; None if it has none yet."""
        return self._attempts_at(*active.key)

    # What is sampled next.

    def draw(self, generator_id: str) -> int | None:
        """Return the next position to sample for this generator, as ``PromptStream.draw``."""
        attempts = self._data.attempts
        return self._stream.draw(
            lambda position: self._comes_last(attempts.get(position), generator_id),
            lambda position: attempts[position].tries if position in attempts else 0,
        )

    def take_row(self, evaluation: Evaluation, generator_id: str) -> int:
        """Return the next row of an evaluation to sample for this generator, as ``Evaluation.take_row``."""
        return evaluation.take_row(lambda row: self._comes_last(evaluation.request.attempts.get(row), generator_id))

    def _comes_last(self, attempts: Attempts | None, generator_id: str) -> bool:
        """Return whether a generator gets a prompt with these attempts only if no other prompt is left.

        That is so if no group was good since the prompt failed, or if its last attempt was by this generator, and
        another one may take it.
        """
        if attempts is None:
            return False
        is_own = attempts.by == generator_id and self._generators.has_another(generator_id, self._data.now)
        return is_own or attempts.num_good == self._data.num_good

    # What succeeded, and what failed.

    def note_good(self, active: ActiveLease) -> None:
        """Record a good group. It ends the quarantine of its generator, and an outage for all."""
        data, entry = self._data, self._holder_of(active)
        if (outage := self.outage) is not None:
            self._news.append(f"the run goes on after {data.now - outage.since:.0f} s in which every lease failed")
            for other in self._generators.alive(data.now):
                other.failing.try_now(data.now)
        elif entry.failing.retry_at is not None:
            away_s = data.now - entry.failing.since
            self._news.append(f"generator {entry.generator_id!r} takes part again, after {away_s:.0f} s of failures")
        data.num_good, data.num_outcomes = data.num_good + 1, data.num_outcomes + 1
        entry.good_since = max(entry.good_since, active.since)
        entry.failing, data.proven_code = Failing(), data.code

    def note_failed_rollouts(self, active: ActiveLease, failure: Failure, num_rollouts: int) -> None:
        """Count rollouts that failed, by the place of the failure."""
        row = active.lease.prompt.row
        where = f"row {row} of data.train" if active.evaluation is None else f"row {row} of {active.evaluation[0]}"
        name = row if active.evaluation is None else f"{active.evaluation[0]}:{row}"
        if add_failed(self._data.failed_places, failure, num_rollouts, name):
            self._news.append(
                f"on {where} {describe(failure)}. Such rollouts are never trained on; `async-rl status` and "
                f"ledger.json count them"
            )

    def note_failed_lease(self, active: ActiveLease, failure: Failure) -> bool:
        """Record that a lease failed, which may quarantine its generator. Return whether it counts as ``counts`` does.

        The caller ends the lease.
        """
        now, entry = self._data.now, self._holder_of(active)
        had_outage, only_suspects = self.outage is not None, self._has_only_suspects(active)
        if entry.failing.add(failure, active.lease.lease_id, now):
            self._generators.note_failing(entry.generator_id)
            if not had_outage:
                outage = self.outage
                paused = outage and outage.describe(now, self._settings.queue.max_outage_s)
                self._news.append(paused or entry.why_failing(now))
            if not only_suspects:
                self.forgive(entry)
            entry.failing.charged.clear()
        return self._counts(active, is_transient=failure.is_transient, only_suspects=only_suspects)

    def counts(self, active: ActiveLease) -> bool:
        """Return whether a lease without a group, which did not fail, counts as a failed attempt of its prompt."""
        return self._counts(active, is_transient=False, only_suspects=self._has_only_suspects(active))

    def _counts(self, active: ActiveLease, *, is_transient: bool, only_suspects: bool) -> bool:
        """Return whether a lease counts as a failed attempt of its prompt. Remember the prompt if it does.

        It does if its generator is not quarantined and had a good group whose lease was granted since the last attempt
        that counts, or since the first one. If ``only_suspects``, no other group can be good, so it counts as well; a
        transient failure only if the last one that counts is ``TRANSIENT_WAIT_S`` ago.
        """
        entry, attempts = self._holder_of(active), self.attempts_at(active) or Attempts()
        is_proven = entry.failing.retry_at is None and entry.good_since >= attempts.outcome
        is_due = not is_transient or self._data.now - attempts.failed_at >= TRANSIENT_WAIT_S
        counts = is_proven or (only_suspects and is_due)
        if counts and entry.failing.retry_at is None:
            entry.failing.charged.append(active.key)
        return counts

    def forgive(self, entry: GeneratorEntry) -> None:
        """Take back the failed attempts that this generator's leases were charged since its last good group."""
        for evaluation, number in entry.failing.charged:
            attempts = self._attempts_at(evaluation, number)
            if attempts is not None and attempts.failed:
                attempts.failed -= 1
        entry.failing.charged.clear()

    def _has_only_suspects(self, active: ActiveLease) -> bool:
        """Return whether each prompt of this lease's kind that is left to sample has a failed attempt that counts.

        While the run is paused, and if the code is proven, a failed attempt that does not count is enough: after a
        restart no generator has succeeded, and none can if only prompts are left that raise.
        """
        if active.evaluation is None and not self._stream.is_at_end:
            return False
        held = [other.key[1] for other in self._leases if other.evaluation == active.evaluation]
        if active.evaluation is not None:
            evaluation = self._evals.get(active.evaluation)
            if evaluation is None:
                return False
            attempts, left = evaluation.request.attempts, [*evaluation.todo, *held]
        else:
            attempts, left = self._data.attempts, [*self._stream.cursor.requeued, *held]
        is_paused = self.is_code_proven and self.outage is not None
        return all(
            number in attempts and (attempts[number].failed or (is_paused and attempts[number].tries))
            for number in left
        )  # fmt: skip

    # What becomes of a prompt.

    def lose_prompt(
        self, position: int, cause: DropCause, generator_id: str, *, counts: bool | None = True
    ) -> DropCause:
        """Requeue a training prompt, or exclude it if it has no attempt left.

        Args:
            generator_id: who made the attempt.
            counts: as for ``QueueState.lose_lease``.

        Returns:
            The cause under which to count its group.
        """
        attempts = self._data.attempts.setdefault(position, Attempts())
        if cause in ("stale", "cancelled"):
            attempts.stale, attempts.by = attempts.stale + 1, generator_id
            final: DropCause = "too_slow" if attempts.stale >= self._settings.queue.max_attempts else cause
        else:
            self._note_attempt(attempts, cause, generator_id, counts=counts)
            final = "poison" if attempts.failed >= self._settings.queue.max_attempts else cause
        if final == cause:
            self._stream.requeue(position)
        else:
            self._exclude(position, final)
        return final

    def lose_row(
        self, evaluation: Evaluation, row: int, cause: DropCause, generator_id: str, *, counts: bool | None,
        requeue: bool,
    ) -> bool:  # fmt: skip
        """Put a row of an evaluation back, or give it up if it has no attempt left. Return whether it is given up.

        The arguments are as for ``lose_prompt``; without ``requeue`` the row is given up at once.
        """
        attempts = evaluation.attempts(row)
        self._note_attempt(attempts, cause, generator_id, counts=counts)
        is_given_up = not requeue or attempts.failed >= self._settings.queue.max_attempts
        self._evals.note(evaluation)
        if is_given_up:
            self._evals.answer(evaluation, row, Answer(None))
        else:
            evaluation.give_back(row)
        return is_given_up

    def exclude_too_long(self, position: int) -> None:
        """Exclude a training prompt that is longer than ``sampling.max_prompt_tokens``."""
        self._data.prompts_too_long += 1
        self._exclude(position, "too_long")

    def forget(self, position: int) -> None:
        """Forget the attempts at a training prompt that has ended and was not excluded, and its place."""
        self._data.attempts.pop(position, None)
        self._stream.curriculum.close_place(position)

    def _note_attempt(self, attempts: Attempts, cause: DropCause, generator_id: str, *, counts: bool | None) -> None:
        data, attempts.by = self._data, generator_id
        if cause in ("failed", "refused", "expired") and counts is not None:
            data.num_outcomes += 1
            attempts.note(data.num_good, data.num_outcomes, data.now, counts=counts)
        elif counts:
            attempts.failed, attempts.failed_at = attempts.failed + 1, data.now

    def _exclude(self, position: int, cause: str) -> None:
        data = self._data
        data.attempts.pop(position, None)
        data.excluded[position // self._stream.num_rows] += 1
        data.last_excluded[position] = cause
        while len(data.last_excluded) > _NAMED:
            oldest = next(iter(data.last_excluded))
            del data.last_excluded[oldest]
            self._stream.curriculum.close_place(oldest)

    def _attempts_at(self, key: EvalKey | None, number: int) -> Attempts | None:
        """Return the attempts at a position, or at a row of an evaluation; None if there are none yet."""
        if key is None:
            return self._data.attempts.get(number)
        evaluation = self._evals.get(key)
        return None if evaluation is None else evaluation.request.attempts.get(number)

    def _holder_of(self, active: ActiveLease) -> GeneratorEntry:
        """Return the generator that has a lease. One that was forgotten after a long silence has no good groups."""
        return self._generators.get(active.generator_id) or GeneratorEntry(active.generator_id, seen_at=-math.inf)
