"""The requests of generators: hello, leases, heartbeats, returned groups, failures, goodbye.

Each public function handles one request: it changes ``state`` and returns the answer. ``now`` is the time in seconds. A
repeated request has no further effect, except for ``lease``, whose answers the server itself repeats.

A generator's id belongs to the client that used it first (``Owner``), until the generator says goodbye, is replaced, or
is removed after a long silence. The server calls ``claim`` before each request, so the other functions need only the
id.

Leases are granted for evaluations first, then for training, as far as the staleness bound and ``queue.max_bytes`` allow
(``admission``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from async_rl.errors import IdInUseError, QueueError
from async_rl.queue.core.admission import LearnerSide, lease_seed
from async_rl.queue.core.evaluations import Answer, Evaluation
from async_rl.queue.core.failures import Attempts, one_line
from async_rl.queue.core.generators import QUARANTINE_OF, GeneratorEntry, Owner
from async_rl.queue.core.groups import GroupRecord, GroupSummary, StoredGroup, fits_filter, refusal_cause, why_unfit
from async_rl.queue.core.learning_signal import flaw_of
from async_rl.queue.core.leases import ActiveLease
from async_rl.queue.core.pace import Window
from async_rl.queue.core.state import QueueState, stop_reason
from async_rl.queue.messages import DropCause, FailedRollouts, Failure, GeneratorStats, LeasesGranted, Verdict
from async_rl.queue.storage.payloads import Payload, in_blocks
from async_rl.records import Lease, LeaseKind

_RETURNED = "returned"
"""Status of an ended lease whose group has arrived. A second group for the lease is a duplicate."""
_MAX_QUARANTINES = 16


def claim(state: QueueState, generator_id: str, owner: Owner, now: float) -> GeneratorEntry:
    """Check that ``owner`` may use this generator id, and return the generator.

    An id that is new, or whose generator is dead, now belongs to ``owner``.

    Raises:
        QueueError: the id belongs to another owner, or there are too many generators.
    """
    state.set_clock(now)
    entry = state.generators.get(generator_id)
    if entry is not None and entry.owner != owner:
        _check_owner(state, entry, owner, "choose another --id")
        # A generator of this id is dead, and another one takes its place.
        lose_generator(state, generator_id, now)
        entry = None
    if entry is None:
        entry = state.generators.seen(generator_id, state.now)
        entry.owner = owner
        state.generators.save(entry)
    return entry


def note_seen(state: QueueState, generator_id: str, now: float) -> GeneratorEntry:
    """Return a generator that has sent a message at the time ``now``."""
    state.set_clock(now)
    return state.generators.seen(generator_id, state.now)


def _check_owner(state: QueueState, entry: GeneratorEntry, owner: Owner, remedy: str) -> None:
    if state.generators.belongs_to(entry, owner, state.now):
        return
    entry.num_foreign += 1
    if entry.owner.has_key:
        raise QueueError(f"generator id {entry.generator_id!r} belongs to another client key; {remedy}")
    raise IdInUseError(
        f"generator id {entry.generator_id!r} belongs to another generator, which was alive "
        f"{state.now - entry.seen_at:.0f} s ago; {remedy}, or wait until it was silent for "
        f"{state.settings.generator_timeout_s:.0f} s"
    )


def hello(
    state: QueueState, generator_id: str, host: str, backend: str, now: float, *, replaces: str | None = None
) -> None:
    """Register a generator that starts, which ends its quarantine. If ``replaces`` names a dead one, remove that and
    expire its leases.

    Raises:
        QueueError: the generator to replace belongs to another owner, and is alive or has a key.
    """
    entry = note_seen(state, generator_id, now)
    if replaces is not None and replaces != generator_id:
        replaced = state.generators.get(replaces)
        if replaced is not None:
            _check_owner(state, replaced, entry.owner, "start without --replaces")
        lose_generator(state, replaces, now)
    if entry.quarantined:  # a new process of it: what was wrong may be mended
        lift_quarantine(state, generator_id)
    entry.host, entry.backend = host, backend


def lose_generator(state: QueueState, generator_id: str, now: float) -> None:
    """Remove a generator that is dead or disconnected, and expire its leases."""
    state.set_clock(now)
    for active in [active for active in state.leases if active.generator_id == generator_id]:
        state.lose_lease(active, "expired", stop_sampling=False, counts=state.retries.counts(active))
    state.generators.remove(generator_id)
    state.revision += 1


def lease(state: QueueState, generator_id: str, active: tuple[str, int], max_leases: int, now: float) -> LeasesGranted:
    """Grant up to ``max_leases`` leases to a generator whose weights are ``active``, a pair (lineage, version).

    If none is granted, the answer's ``reason`` says why, and its ``activate`` may name a version that the generator
    must activate first.
    """
    entry = note_seen(state, generator_id, now)
    entry.active = active
    state.expire(now)
    if entry.quarantined:
        return LeasesGranted((), f"this generator is quarantined: {entry.quarantined}")
    failing = entry.failing
    if failing.retry_at is not None:
        if not failing.may_try(state.now, is_trial_open=state.leases.get(failing.trial) is not None):
            return LeasesGranted((), f"this generator is quarantined: {failing.describe(state.now)}")
        max_leases = min(max_leases, 1)
    learner = state.learner
    if learner is None:
        return LeasesGranted((), "waits for a learner to attach")
    if learner.finished:
        return LeasesGranted((), "the run is finished")
    version = _version_in_lineage(learner, active)
    if version is None:
        if learner.announced_version is None:
            return LeasesGranted((), "waits for the learner's first version")
        return LeasesGranted((), f"needs weights of lineage {learner.lineage}", activate=learner.announced_version)
    if version > learner.version:
        return LeasesGranted((), f"version {version} is newer than the learner's version {learner.version}")
    leases, answer = _grant_evals(state, learner, generator_id, version, max_leases)
    blocker = state.evals.exclusive
    if blocker is not None:
        answer = answer or LeasesGranted((), f"training waits for the evaluation of {blocker.progress_line}")
    elif len(leases) < max_leases:
        more, answer_train = _grant_training(state, learner, generator_id, version, max_leases - len(leases))
        leases += more
        # An evaluation may wait for a future version while training continues with an available one.
        if answer is None or (answer_train is not None and answer_train.activate is not None):
            answer = answer_train
    if leases:
        if failing.retry_at is not None:
            failing.trial = leases[0].lease_id
        state.revision += 1
        return LeasesGranted(tuple(leases))
    return answer or LeasesGranted((), "no lease was requested")


def may_have_leases(state: QueueState, generator_id: str) -> bool:
    """Return whether this generator gets leases as any other: it is known, not quarantined for any reason, and was not
    too slow at its last request.
    """
    entry = state.generators.get(generator_id)
    if entry is None or entry.quarantined or entry.failing.retry_at is not None:
        return False
    pace = state.generators.paces.pace_of(generator_id)
    return not pace.why and not pace.is_on_trial


def heartbeat(
    state: QueueState, generator_id: str, progress: Mapping[str, int], stats: GeneratorStats, now: float,
    trouble: str = "",
) -> tuple[str, ...]:  # fmt: skip
    """Record how many tokens a generator has sampled for each lease, and ``trouble``, why it gets no weights.

    Return the ids of the leases that it must stop sampling.
    """
    entry = note_seen(state, generator_id, now)
    entry.stats, entry.trouble = stats, one_line(trouble)
    void = state.generators.pop_cancelled(generator_id)
    for lease_id, tokens in progress.items():
        active = state.leases.get(lease_id)
        if active is None or active.generator_id != generator_id:
            void.add(lease_id)
        else:
            state.leases.grow(lease_id, tokens, state.now)
    state.expire(now)
    return tuple(sorted(void | state.generators.pop_cancelled(generator_id)))


def receive(
    state: QueueState, generator_id: str, group: GroupSummary, payload: Payload, now: float,
    failed: Sequence[FailedRollouts] = (),
) -> tuple[Verdict, str]:  # fmt: skip
    """Receive a group from a generator. Return the verdict, and the reason if the group was refused.

    ``group`` is the summary of the group's bytes, ``payload``. ``failed`` are its rollouts that failed.

    Raises:
        QueueError: the payload can't be stored. The generator may return the group again.
    """
    entry = note_seen(state, generator_id, now)
    active, learner = state.leases.get(group.lease_id), state.learner
    if active is None or learner is None:
        return _receive_late(state, group), ""
    if active.generator_id != generator_id:
        return "refused", _refuse_foreign(state, generator_id, group.lease_id)
    # The learner publishes a version after its step is acknowledged, and announces it after that. A generator may
    # sample with it before the announcement, and without one if the learner dies in between.
    unfit = why_unfit(
        group, active.lease, newest_version=learner.version, digests=learner.digests,
        vocab_size=state.vocab_size, max_abs_reward=state.settings.max_abs_reward, routing=state.settings.routing,
    )  # fmt: skip
    if not unfit and group.generator_id != generator_id:
        unfit = f"expected a group of generator {generator_id!r}, which sent it, got one of {group.generator_id!r}"
    free = state.settings.queue.max_bytes - state.group_bytes - state.leases.reserved + active.reserved
    # A larger group could forever leave too little room for the rest of its step.
    room = min(free, state.settings.queue.max_bytes // state.settings.groups_per_step)
    if not unfit and active.evaluation is None and in_blocks(len(payload)) > max(active.reserved, room):
        unfit = f"expected at most {max(active.reserved, room)} bytes (queue.max_bytes), got {len(payload)}"
    if unfit:
        if group.every_rollout_failed:
            failure = failed[0].failure if failed else Failure("environment_error", unfit, unfit)
            counts = _note_failed(state, active, failure)
            _lose_returned(state, active, "failed", group.num_tokens, counts=counts)
        else:
            _lose_returned(state, active, "refused", group.num_tokens, counts=state.retries.counts(active))
            _note_refused(state, generator_id, refusal_cause(unfit))
        return "refused", f"group {group.lease_id}: {unfit}"
    num_uncounted = group.num_failed
    for rollouts in failed[:num_uncounted]:
        if count := min(rollouts.count, num_uncounted):
            state.retries.note_failed_rollouts(active, rollouts.failure, count)
            num_uncounted -= count
    if active.evaluation is not None:
        verdict = _receive_answer(state, active, group, payload)
    else:
        verdict = _receive_training(state, learner, active, group, payload)
    entry.returned.append(False)
    state.retries.note_good(active)
    return verdict, ""


def _note_failed(state: QueueState, active: ActiveLease, failure: Failure) -> bool:
    """Record that a lease failed. Return whether the failure counts against its prompt."""
    state.retries.note_failed_rollouts(active, failure, active.lease.group_size)
    return state.retries.note_failed_lease(active, failure)


def _note_refused(state: QueueState, generator_id: str, cause: str) -> None:
    """Count a refused group under ``cause``. Quarantine its generator if too many of its last groups were refused."""
    entry = state.generators.seen(generator_id, state.now)
    entry.refused[cause] += 1
    entry.returned.append(True)
    state.generators.save(entry)
    # The journal must get the new counts even if nothing else has changed.
    state.revision += 1
    num_refused = sum(entry.returned)
    if num_refused > state.settings.queue.max_refused_share * QUARANTINE_OF:
        quarantine(
            state, generator_id,
            f"{num_refused} of its last {QUARANTINE_OF} groups were refused ({entry.causes}); limit: "
            f"queue.max_refused_share = {state.settings.queue.max_refused_share:g}",
        )  # fmt: skip


def quarantine(state: QueueState, generator_id: str, reason: str) -> None:
    """Stop giving leases to a generator. Its leases expire, and its groups that the learner has not taken are dropped.

    None of this counts against their prompts, and what counted since its last good group is taken back. Nothing changes
    if the generator is unknown, or quarantined already.
    """
    entry = state.generators.get(generator_id)
    if entry is None or entry.quarantined:
        return
    entry.quarantined = reason
    state.generators.save(entry)
    state.revision += 1
    step = 0 if state.learner is None else state.learner.step
    state.quarantines[generator_id] = (
        f"generator {generator_id!r} was quarantined after step {step}, it gets no more leases: {reason}; it gets some "
        f"again once it is started anew, or by async-rl status --lift-quarantine"
    )
    state.news.append(state.quarantines[generator_id])
    for oldest in list(state.quarantines)[:-_MAX_QUARANTINES]:
        del state.quarantines[oldest]
    state.retries.forgive(entry)
    for active in [active for active in state.leases if active.generator_id == generator_id]:
        state.lose_lease(active, "expired", counts=None)
    for group in [group for group in state.queued if group.generator_id == generator_id]:
        state.queued.remove(group.lease_id)
        state.drop_group(group, "queued", "refused", requeue=True, counts=False)


def lift_quarantine(state: QueueState, generator_id: str) -> None:
    """Give leases to a generator again. Its refused groups count anew.

    Raises:
        QueueError: it is not quarantined.
    """
    entry = state.generators.get(generator_id)
    if entry is None or not entry.quarantined:
        raise QueueError(
            f"expected the id of a quarantined generator, got {generator_id!r}; async-rl status names them"
        )
    entry.quarantined = ""
    entry.returned.clear()
    state.generators.save(entry)
    state.quarantines.pop(generator_id, None)
    state.news.append(f"the quarantine of generator {generator_id!r} is lifted")
    state.revision += 1


def _refuse_foreign(state: QueueState, generator_id: str, lease_id: str) -> str:
    """Count a request for another generator's lease as a refused group. Return the reason for the refusal."""
    _note_refused(state, generator_id, "not its lease")
    return f"lease {lease_id} belongs to another generator"


def renew(state: QueueState, generator_id: str, lease_ids: Sequence[str], now: float) -> None:
    """Restart the timeout of leases whose groups have arrived, but can't be stored because the disk is full."""
    state.set_clock(now)
    for lease_id in lease_ids:
        active = state.leases.get(lease_id)
        if active is not None and active.generator_id == generator_id:
            active.grown_at = state.now


def fail(state: QueueState, generator_id: str, lease_id: str, failure: Failure, now: float) -> Verdict:
    """End a lease that a generator returned without a group, because of ``failure``."""
    note_seen(state, generator_id, now)
    active = state.leases.get(lease_id)
    if active is None:
        return "duplicate" if state.leases.status_of(lease_id) is not None else "unknown_lease"
    if active.generator_id != generator_id:
        _refuse_foreign(state, generator_id, lease_id)
        return "refused"
    if failure.cause == "prompt_too_long":
        _note_too_long(state, active)
    else:
        state.lose_lease(active, "failed", stop_sampling=False, counts=_note_failed(state, active, failure))
    return "refused"


def _note_too_long(state: QueueState, active: ActiveLease) -> None:
    """End a lease whose generator said that the prompt is too long.

    The prompt is excluded when this is said for the second time, or if no other generator samples. In between it goes
    to another generator, unless nothing else is left for this one. Else one broken generator, with another tokenizer
    for example, could exclude every prompt.
    """
    attempts = state.retries.attempts_at(active)
    is_confirmed = attempts is not None and attempts.too_long_for
    if not is_confirmed and state.generators.has_another(active.generator_id, state.now):
        state.lose_lease(active, "refused", stop_sampling=False, counts=False)
        attempts = state.retries.attempts_at(active)
        assert attempts is not None
        attempts.too_long_for = active.generator_id
    elif active.evaluation is not None:
        state.lose_lease(active, "refused", stop_sampling=False, requeue=False)
    else:
        state.leases.close(active.lease.lease_id, "refused")
        state.ledger.drop("in_flight", "refused", active.lease.group_size, 0)
        state.retries.exclude_too_long(active.lease.prompt.position)
        state.revision += 1


def refuse(state: QueueState, generator_id: str, lease_id: str, now: float) -> Verdict:
    """Refuse a returned group whose bytes can't be decoded. Its prompt is sampled again."""
    state.set_clock(now)
    active = state.leases.get(lease_id)
    if active is not None and active.generator_id == generator_id:
        state.lose_lease(active, "refused", stop_sampling=False, counts=state.retries.counts(active))
        _note_refused(state, generator_id, "malformed")
    return "refused"


def goodbye(state: QueueState, generator_id: str, now: float) -> None:
    """Remove a generator that shuts down. The prompts of its leases are sampled again."""
    state.set_clock(now)
    for active in state.leases:
        if active.generator_id == generator_id:
            _give_back(state, active)
    state.generators.remove(generator_id)
    state.revision += 1


def _give_back(state: QueueState, active: ActiveLease) -> None:
    """End a lease of a generator that shuts down. Its prompt is sampled again, and no failed attempt is counted."""
    rollouts = active.lease.group_size
    state.leases.close(active.lease.lease_id, "cancelled")
    if active.evaluation is not None:
        state.eval_ledger.drop("in_flight", "cancelled", rollouts, 0)
        evaluation = state.evals.get(active.evaluation)
        if evaluation is not None:
            evaluation.give_back(active.lease.prompt.row)
    else:
        state.ledger.drop("in_flight", "cancelled", rollouts, 0)
        state.stream.requeue(active.lease.prompt.position)
    state.revision += 1


# Granting leases.


def _version_in_lineage(learner: LearnerSide, active: tuple[str, int]) -> int | None:
    lineage, version = active
    return version if lineage == learner.lineage and version >= 0 else None


def _grant_evals(
    state: QueueState, learner: LearnerSide, generator_id: str, version: int, max_leases: int
) -> tuple[list[Lease], LeasesGranted | None]:
    leases: list[Lease] = []
    answer: LeasesGranted | None = None
    for evaluation in state.evals.unfinished:
        if not evaluation.todo:
            continue
        needed = evaluation.request.min_version
        if version < needed:
            reason = f"the evaluation of {evaluation.progress_line} needs version {needed}, not {version}"
            announced = learner.announced_version
            can_activate = announced is not None and announced >= needed
            answer = answer or LeasesGranted((), reason, activate=announced if can_activate else None)
            continue
        while evaluation.todo and len(leases) < max_leases:
            leases.append(_issue_eval(state, learner, generator_id, version, evaluation))
    return leases, answer


def _grant_training(
    state: QueueState, learner: LearnerSide, generator_id: str, version: int, max_leases: int
) -> tuple[list[Lease], LeasesGranted | None]:
    stop = stop_reason(state)
    if stop:
        return [], LeasesGranted((), f"the run has stopped: {stop}")
    if not learner.steps_left:
        return [], LeasesGranted((), f"all {learner.num_steps} steps are trained")
    if why := _why_too_slow(state, learner, generator_id):
        return [], LeasesGranted((), f"this generator is {why}")
    if state.generators.paces.pace_of(generator_id).is_on_trial:
        max_leases = min(max_leases, 1 - state.leases.num_held[generator_id])
        if max_leases <= 0:
            return [], LeasesGranted((), "this generator was too slow, and has its one lease to show that it is not")
    leases, answer = _grant_from_stream(state, learner, generator_id, version, max_leases)
    if leases:
        state.generators.paces.granted(generator_id, state.leases.num_held[generator_id])
    return leases, answer


def _why_too_slow(state: QueueState, learner: LearnerSide, generator_id: str) -> str:
    """Return why the generator is too slow for the learner's staleness bound (``pace``); empty if it is not."""
    settings, paces = state.settings, state.generators.paces
    bound = settings.queue.max_staleness
    batches = max(1, (bound + 1) // settings.updates_per_batch)
    before = paces.why(generator_id)
    window = Window(batches, settings.groups_per_step, state.run_ahead.step_s, bound)
    why = paces.check(generator_id, window, state.now, lambda: state.generators.has_another(generator_id, state.now))
    if why and not before:
        state.news.append(f"generator {generator_id!r} gets no training leases, because it is {why}")
    return why


def _grant_from_stream(
    state: QueueState, learner: LearnerSide, generator_id: str, version: int, max_leases: int
) -> tuple[list[Lease], LeasesGranted | None]:
    settings = state.settings
    limit = learner.group_limit(state.settings, version)
    pace = state.run_ahead.limit(state.now)
    leases: list[Lease] = []
    while len(leases) < max_leases:
        if state.ledger.groups.outstanding >= limit:
            return leases, _full(state, learner, version, limit)
        if state.ledger.groups.outstanding >= pace:
            state.run_ahead.hold(pace, state.now)
            return leases, LeasesGranted((), f"sampling is far enough ahead: {_groups_line(state, pace)}")
        used = state.group_bytes + state.leases.reserved
        if used + settings.reserved_bytes > settings.queue.max_bytes:
            state.is_short_of_bytes = True
            return leases, LeasesGranted(
                (), f"queue.max_bytes = {settings.queue.max_bytes}: {used} bytes are in use or reserved"
            )
        num_passed = state.stream.num_passed
        position = state.retries.draw(generator_id)
        if position is None:
            state.revision += num_passed != state.stream.num_passed
            why = state.stream.why_starved() or state.stream.why_stopped() or "the data has ended (data.epochs)"
            return leases, LeasesGranted((), why)
        leases.append(_issue_training(state, learner, generator_id, version, position))
    return leases, None


def _full(state: QueueState, learner: LearnerSide, version: int, limit: int) -> LeasesGranted:
    line = (
        f"{_groups_line(state, limit)} (learner at version {learner.version}, generator at {version}, "
        f"{learner.steps_left} steps left)"
    )
    announced = learner.announced_version
    if (
        announced is not None
        and announced > version
        and state.ledger.groups.outstanding < learner.group_limit(state.settings, announced)
    ):
        return LeasesGranted((), line, activate=announced)
    return LeasesGranted((), line)


def _groups_line(state: QueueState, limit: float) -> str:
    groups = state.ledger.groups
    return f"limit {limit:g} groups: {groups.taken} taken, {groups.in_flight} in flight, {groups.queued} queued"


def _issue_training(state: QueueState, learner: LearnerSide, generator_id: str, version: int, position: int) -> Lease:
    settings = state.settings
    attempts = state.attempts.get(position, Attempts())
    lease = build_lease(
        state, None, position, lease_id=_new_id(state, learner, "train", position), lineage=learner.lineage,
        min_version=settings.oldest_for_lease(version=learner.version, outstanding=state.ledger.groups.outstanding),
        attempt=attempts.failed + attempts.stale + 1, version=version,
    )  # fmt: skip
    reserved, now = settings.reserved_bytes, state.now
    state.leases.add(ActiveLease(lease, generator_id, version, reserved, now, now, since=state.num_outcomes))
    state.ledger.issue(settings.group_size)
    return lease


def _issue_eval(
    state: QueueState, learner: LearnerSide, generator_id: str, version: int, evaluation: Evaluation
) -> Lease:
    request = evaluation.request
    row = state.retries.take_row(evaluation, generator_id)
    lease = build_lease(
        state, evaluation, row, lease_id=_new_id(state, learner, "eval", row), lineage=learner.lineage,
        min_version=request.min_version, attempt=evaluation.attempts(row).failed + 1, version=version,
    )  # fmt: skip
    now, since = state.now, state.num_outcomes
    state.leases.add(ActiveLease(lease, generator_id, version, 0, now, now, evaluation=evaluation.key, since=since))
    state.eval_ledger.issue(request.num_samples)
    return lease


def _new_id(state: QueueState, learner: LearnerSide, kind: LeaseKind, position: int) -> str:
    state.num_leases += 1
    # Without the server's secret, 64 bits of it can't be guessed. With it, every id can be computed again.
    digest = hashlib.blake2b(b"%d" % state.num_leases, key=state.instance.encode(), digest_size=8)
    return f"{learner.lineage[:8]}-{kind}{position}-{state.num_leases}-{digest.hexdigest()}"


def build_lease(
    state: QueueState, evaluation: Evaluation | None, position: int, *, lease_id: str, lineage: str, min_version: int,
    attempt: int, version: int,
) -> Lease:  # fmt: skip
    """Build the lease of the training prompt at ``position``, or of row ``position`` of an evaluation.

    ``version`` was the generator's active version when it requested the lease. The temperature of a training lease is
    that of the oldest version that may sample the lease.
    """
    settings = state.settings
    kind: LeaseKind = "train" if evaluation is None else "eval"
    return Lease(
        lease_id=lease_id,
        kind=kind,
        prompt=state.prompt(position) if evaluation is None else evaluation.prompt(position),
        group_size=settings.group_size if evaluation is None else evaluation.request.num_samples,
        sampling=settings.sampling_at(max(version, min_version)) if evaluation is None else evaluation.sampling,
        lineage=lineage,
        min_version=min_version,
        max_staleness=settings.queue.max_staleness,
        attempt=attempt,
        seed=lease_seed(settings.seed, kind, "" if evaluation is None else evaluation.key[0], position),
        wants_routes=evaluation is None and settings.routing is not None,
    )


# Returned groups.


def _receive_late(state: QueueState, group: GroupSummary) -> Verdict:
    status = state.leases.status_of(group.lease_id)
    if status is None:
        return "unknown_lease"
    if status == _RETURNED:
        return "duplicate"
    # Tokens that can't be trained are counted once, under the cause that closed their lease.
    ledger = state.ledger if group.kind == "train" else state.eval_ledger
    ledger.late(status, group.num_tokens)
    state.leases.set_status(group.lease_id, _RETURNED)
    state.revision += 1
    return "old_lineage" if status == "rolled_back" else "unknown_lease"


def _lose_returned(
    state: QueueState, active: ActiveLease, cause: DropCause, tokens: int, *, counts: bool = True
) -> None:
    state.lose_lease(active, cause, tokens=tokens, stop_sampling=False, counts=counts)
    state.leases.set_status(active.lease.lease_id, _RETURNED)


def _receive_answer(state: QueueState, active: ActiveLease, group: GroupSummary, payload: Payload) -> Verdict:
    assert active.evaluation is not None
    evaluation = state.evals.get(active.evaluation)
    if evaluation is None:
        _lose_returned(state, active, "refused", group.num_tokens)
        return "unknown_lease"
    if group.num_tokens and group.oldest_version < evaluation.request.min_version:
        _lose_returned(state, active, "stale", group.num_tokens)
        return "stale"
    # Store the payload before any change. If the disk has no room, the generator returns the group again.
    answer = Answer(state.payloads.keep(payload), group.num_rollouts, group.num_tokens)
    state.leases.close(active.lease.lease_id, _RETURNED)
    state.evals.answer(evaluation, active.lease.prompt.row, answer)
    state.eval_ledger.move("in_flight", "queued", group.num_rollouts, group.num_tokens)
    state.revision += 1
    return "eval_done"


def _receive_training(
    state: QueueState, learner: LearnerSide, active: ActiveLease, group: GroupSummary, payload: Payload
) -> Verdict:
    settings = state.settings
    accuracy = group.accuracy / max(1, group.num_graded)  # the others say nothing
    is_in_range = fits_filter(settings.queue.filter_range, accuracy, group.rewards_differ)
    is_kept = is_in_range and group.kept
    flaw = flaw_of(group, settings, fits_filter=is_in_range)
    bound_version = group.newest_version if settings.queue.on_stale == "mask" else group.oldest_version
    if bound_version < settings.oldest_trainable(learner.version):
        state.count_outcome("received", group)
        state.count_outcome("dropped", group)
        _lose_returned(state, active, "stale", group.num_tokens)
        return "stale"
    state.generators.note_pace(active, group.num_tokens, state.now, is_returned=True)
    is_filtered = not is_kept and settings.queue.refill
    state.run_ahead.returned(state.now - active.issued_at, is_filtered=is_filtered)
    if is_filtered:
        state.leases.close(active.lease.lease_id, _RETURNED)
        state.revision += 1
        state.signal.observe(flaw, group, settings, learner.step)
        state.count_outcome("received", group)
        state.stream.observe(group.position, min(1.0, max(0.0, accuracy)))
        state.ledger.move("in_flight", "filtered", group.num_rollouts, group.num_tokens)
        state.count_outcome("filtered", group)
        state.retries.forget(group.position)
        state.filtered_since_step += 1
        if is_in_range:
            state.filtered_own_since_step += 1
        elif (bounds := settings.queue.filter_range) is not None:
            state.filtered_right_since_step += accuracy >= bounds[1]
        return "filtered"
    # Store the payload before any change. If the disk has no room, the generator returns the group again.
    ref = state.payloads.keep(payload)
    state.signal.observe(flaw, group, settings, learner.step)
    state.stream.observe(group.position, min(1.0, max(0.0, accuracy)))
    state.leases.close(active.lease.lease_id, _RETURNED)
    state.count_outcome("received", group)
    state.ledger.move("in_flight", "queued", group.num_rollouts, group.num_tokens)
    announced = learner.announced_version
    stored = StoredGroup(
        lease_id=group.lease_id,
        generator_id=group.generator_id,
        position=group.position,
        named_version=active.version,
        oldest_version=group.oldest_version,
        newest_version=group.newest_version,
        bound_version=bound_version,
        num_rollouts=group.num_rollouts,
        num_tokens=group.num_tokens,
        reward=group.reward,
        accuracy=group.accuracy,
        arrived_at=state.now,
        arrival_version=learner.version if announced is None else announced,
        masked=not is_kept,
        ref=ref,
    )
    state.queued.add(stored)
    state.changes.put("group", stored.lease_id, GroupRecord(stored))
    state.revision += 1
    return "queued"
