"""Grant leases: for evaluations first, then for training while the staleness bound and the memory have room. Pure.

A generator's request enters through ``Buffer.lease``; leases leave, or the reason why there is none. The rule is in
``admission``.
"""

from __future__ import annotations

import heapq

from async_rl.queue.core.evals import Evaluation
from async_rl.queue.core.leases import ActiveLease
from async_rl.queue.core.state import LearnerSide, QueueState
from async_rl.queue.messages import LeasesGranted
from async_rl.records import Lease, LeaseKind


def grant(state: QueueState, generator_id: str, active: tuple[str, int], max_leases: int) -> LeasesGranted:
    """Grant up to ``max_leases`` to a generator whose active weights are ``active`` (lineage, version).

    Without a lease, ``reason`` is the reason. ``activate`` names a version if the generator must activate it first.
    """
    learner = state.learner
    if learner is None:
        return LeasesGranted((), "waits for a learner to attach")
    if learner.finished:
        return LeasesGranted((), "the run is finished")
    version = _version_in_lineage(learner, active)
    if version is None:
        if learner.announced_version is None:
            return LeasesGranted((), "waits for the learner's first version")
        return LeasesGranted((), f"the learner is at lineage {learner.lineage}", activate=learner.announced_version)
    if version > learner.version:
        return LeasesGranted((), f"version {version} is unknown here: the learner is at {learner.version}")
    leases, answer = _grant_evals(state, learner, generator_id, version, max_leases)
    blocker = state.evals.exclusive
    if blocker is not None:
        answer = answer or LeasesGranted((), f"no training lease before evaluation {blocker.progress_line}")
    elif len(leases) < max_leases:
        more, answer_train = _grant_training(state, learner, generator_id, version, max_leases - len(leases))
        leases += more
        # An evaluation may wait for a future version while training continues with an available one.
        if answer is None or (answer_train is not None and answer_train.activate is not None):
            answer = answer_train
    if leases:
        state.revision += 1
        return LeasesGranted(tuple(leases))
    return answer or LeasesGranted((), "no lease is wanted")


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
        wanted = evaluation.request.min_version
        if version < wanted:
            reason = f"evaluation {evaluation.progress_line} wants version {wanted}, active is {version}"
            announced = learner.announced_version
            can_activate = announced is not None and announced >= wanted
            answer = answer or LeasesGranted((), reason, activate=announced if can_activate else None)
            continue
        while evaluation.todo and len(leases) < max_leases:
            leases.append(_issue_eval(state, learner, generator_id, version, evaluation))
    return leases, answer


def _grant_training(
    state: QueueState, learner: LearnerSide, generator_id: str, version: int, max_leases: int
) -> tuple[list[Lease], LeasesGranted | None]:
    stop = state.stop_diagnosis()
    if stop:
        return [], LeasesGranted((), f"the run has stopped: {stop}")
    if not learner.steps_left:
        return [], LeasesGranted((), f"all {learner.num_steps} steps are trained")
    settings = state.settings
    limit = _limit(state, learner, version)
    leases: list[Lease] = []
    while len(leases) < max_leases:
        if state.outstanding >= limit:
            return leases, _full(state, learner, version, limit)
        used = state.group_bytes + state.leases.reserved
        if used + settings.worst_case_bytes > settings.max_bytes:
            return leases, LeasesGranted(
                (), f"queue.max_bytes = {settings.max_bytes}: {used} bytes are in use or reserved"
            )
        position = state.stream.draw()
        if position is None:
            return leases, LeasesGranted((), "the data has ended")
        leases.append(_issue_training(state, learner, generator_id, version, position))
    return leases, None


def _limit(state: QueueState, learner: LearnerSide, version: int) -> int:
    return learner.group_limit(state.settings, version)


def _full(state: QueueState, learner: LearnerSide, version: int, limit: int) -> LeasesGranted:
    groups = state.ledger.groups
    line = (
        f"limit {limit} groups: {groups.taken} taken, {groups.in_flight} in flight, {groups.queued} queued "
        f"(learner at version {learner.version}, generator at {version}, {learner.steps_left} steps left)"
    )
    announced = learner.announced_version
    if announced is not None and announced > version and state.outstanding < _limit(state, learner, announced):
        return LeasesGranted((), line, activate=announced)
    return LeasesGranted((), line)


def _issue_training(state: QueueState, learner: LearnerSide, generator_id: str, version: int, position: int) -> Lease:
    settings = state.settings
    attempts = state.attempts_of(position)
    lease = build_lease(
        state, None, position, lease_id=_new_id(state, learner, "train", position), lineage=learner.lineage,
        min_version=learner.oldest_for_lease(settings, state.outstanding),
        attempt=attempts.failed + attempts.stale + 1, version=version,
    )  # fmt: skip
    state.leases.add(ActiveLease(lease, generator_id, version, settings.worst_case_bytes, state.now, state.now))
    state.ledger.issue(settings.group_size)
    return lease


def _issue_eval(
    state: QueueState, learner: LearnerSide, generator_id: str, version: int, evaluation: Evaluation
) -> Lease:
    row, wanted = heapq.heappop(evaluation.todo), evaluation.request
    lease = build_lease(
        state, evaluation, row, lease_id=_new_id(state, learner, "eval", row), lineage=learner.lineage,
        min_version=wanted.min_version, attempt=wanted.attempts.get(row, 0) + 1, version=version,
    )  # fmt: skip
    state.leases.add(ActiveLease(lease, generator_id, version, 0, state.now, state.now, evaluation=evaluation.key))
    state.eval_ledger.issue(wanted.num_samples)
    return lease


def _new_id(state: QueueState, learner: LearnerSide, kind: LeaseKind, position: int) -> str:
    state.num_leases += 1
    return f"{learner.lineage[:8]}-{state.instance}-{kind}{position}-{state.num_leases}"


def build_lease(
    state: QueueState, evaluation: Evaluation | None, position: int, *, lease_id: str, lineage: str, min_version: int,
    attempt: int, version: int,
) -> Lease:  # fmt: skip
    """Build a lease of the training prompt at ``position``, or of an evaluation's row.

    ``version`` is the one that the generator had active at its request. The temperature is that of the oldest version
    that may sample the lease, so it does not depend on the generator or on the time.
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
        max_staleness=settings.max_staleness,
        attempt=attempt,
        seed=settings.lease_seed(kind, "" if evaluation is None else evaluation.key[0], position),
    )
