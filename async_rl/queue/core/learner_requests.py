"""The requests of the learner: attach, announce a version, evaluate, take a batch, report a step, checkpoint, finish.

Each public function handles one request: it changes ``state`` and returns the answer. A repeated request changes
nothing. ``now`` is the time in seconds. All functions but ``evaluate`` and ``attach`` raise LineageError if another
learner owns the queue.

A take returns groups within the staleness bound, in the order of (named version, stream position). When the data has
ended, the last take returns the groups that are left, if they are fewer than a step needs. Under ``on_stale = "wait"``
a take first waits for the leases whose groups would be too old after its step. If the stored bytes of a group
or of an evaluation's answer are damaged, it is dropped as ``rolled_back``, and its prompt is sampled again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from async_rl.errors import DamagedPayloadError, LineageError, QueueError
from async_rl.queue.core import diagnosis, persistence
from async_rl.queue.core.admission import LearnerSide
from async_rl.queue.core.evaluations import Evaluation, EvaluationRecord
from async_rl.queue.core.failures import EvalKey
from async_rl.queue.core.groups import StoredGroup, snapshot_key
from async_rl.queue.core.prompts import Row
from async_rl.queue.core.state import QueueState, outage_reason, stop_reason
from async_rl.queue.messages import (
    Acked,
    Announcement,
    DropCause,
    Evaluated,
    EvalWait,
    NotReady,
    StepAck,
    Taken,
    TrainedCounts,
)
from async_rl.queue.storage.payloads import Payload
from async_rl.records import Prompt, Sampling

_RESTART = (
    "if the queue server was restarted, its journal has lost its end (index.sqlite-wal in queue.journal_dir): start "
    "the run again with the same command, it goes on from its last checkpoint"
)


def attach(
    state: QueueState, lineage: str, parent: str, fork_version: int, step: int, num_steps: int,
    snapshot: bytes | None, now: float,
) -> None:  # fmt: skip
    """Make ``lineage`` the learner that owns the queue: end all leases, and restore the queue from ``snapshot``.

    If ``snapshot`` is None, the queue is emptied. ``parent`` is the lineage that the learner continues. It then no
    longer owns the queue.

    Raises:
        LineageError: this lineage was already replaced by a newer one.
        QueueError: the snapshot is damaged, or of another step, version or data set.
    """
    state.set_clock(now)
    if state.learner is not None and lineage == state.learner.lineage:
        return
    if lineage in state.old_lineages:
        raise LineageError(
            f"lineage {lineage} no longer owns the queue: a newer learner has taken over; stop this learner"
        )
    restored = None
    if snapshot is not None:
        restored = persistence.read_snapshot(state, snapshot, step=step, version=fork_version)
    state.old_lineages |= {parent} if parent else set()
    state.old_lineages |= {state.learner.lineage} if state.learner is not None else set()
    for active in state.leases:
        # ``restore`` counts them in the ledger.
        state.generators.cancel(active)
        state.leases.close(active.lease.lease_id, "rolled_back")
    persistence.restore(state, restored)
    before = None if restored is None else restored.state.learner
    state.learner = LearnerSide.continued(before, lineage, step, num_steps, fork_version)
    state.waits_since = None
    state.run_ahead.attach()
    _drop_too_old(state, state.learner)
    state.revision += 1


def confirm(
    state: QueueState, lineage: str, announced: int | None = None, evaluations: Collection[EvalKey] = ()
) -> None:
    """Check that ``lineage`` owns the queue, and that the queue knows what this learner waits for.

    That is a version as new as ``announced`` (None if there is none), and ``evaluations`` as pairs (dataset, step).

    Raises:
        LineageError: another learner owns the queue.
        QueueError: the queue does not know the version or an evaluation.
    """
    newest = state.attached(lineage).announced_version
    if announced is not None and (newest is None or newest < announced):
        shown = "none" if newest is None else f"version {newest}"
        raise QueueError(
            f"expected version {announced} as the newest that the queue knows, because this learner has announced it, "
            f"got {shown}; {_RESTART}"
        )
    for key in evaluations:
        if key not in state.evals and key not in state.received_evals:
            raise QueueError(f"the queue does not know the evaluation of {key[0]} at step {key[1]}; {_RESTART}")


def announce(state: QueueState, announcement: Announcement) -> None:
    """Record that the learner has published a version. Ignore a version older than the newest published one.

    Raises:
        QueueError: the learner has not reported the step that made this version.
    """
    learner = state.attached(announcement.lineage)
    if announcement.version > learner.version:
        raise QueueError(
            f"expected an announcement of version {learner.version} (the last acked) or older, got version "
            f"{announcement.version}; this is a bug in async-rl, please report it"
        )
    newest = learner.announced_version
    if newest is None or announcement.version >= newest:
        learner.announcement = announcement
        oldest = _oldest_in_use(state, learner)
        kept = {version: digest for version, digest in learner.digests.items() if version >= oldest}
        learner.digests = {**kept, announcement.version: announcement.digest}
        state.revision += 1


def _oldest_in_use(state: QueueState, learner: LearnerSide) -> int:
    """Return the oldest version that a group may have and still be accepted."""
    of_leases = (active.version for active in state.leases)
    of_evals = (evaluation.request.min_version for evaluation in state.evals.unfinished)
    return min((state.settings.oldest_trainable(learner.version), *of_leases, *of_evals))


def evaluate(
    state: QueueState, dataset: str, step: int, rows: Sequence[Row], num_samples: int, sampling: Sampling,
    min_version: int, exclusive: bool,
) -> None:  # fmt: skip
    """Start an evaluation of ``rows``. If ``exclusive``, no training lease is granted until it is done."""
    record = EvaluationRecord(dataset, step, num_samples, min_version, exclusive)
    evaluation = Evaluation(record, rows, sampling)
    if evaluation.key not in state.received_evals and state.evals.add(evaluation):
        state.revision += 1


def eval_results(
    state: QueueState, lineage: str, received: Collection[EvalKey] = ()
) -> list[Evaluated[Payload | None]]:
    """Return the finished evaluations. Delete those in ``received`` first.

    An evaluation with a damaged answer is not returned; its damaged rows are sampled again.
    """
    state.attached(lineage)
    for key in received:
        evaluation = state.evals.confirm(key)
        if evaluation is None:
            continue
        state.received_evals.add(key)
        for answer in evaluation.answers.values():
            if answer.ref is not None:
                state.eval_ledger.move("queued", "done", answer.rollouts, answer.tokens)
        state.revision += 1
    results = [result for e in state.evals.finished if (result := _result(state, e)) is not None]
    for evaluation in state.evals.finished:
        evaluation.delivered = True
    return results


def eval_wait(state: QueueState, lineage: str) -> EvalWait:
    """Return for which evaluations the learner waits, why, and how far they are.

    The reason is empty if one has finished, or if none is running. ``stop`` is that of the run.
    """
    state.attached(lineage)
    running = list(state.evals.unfinished)
    answered, rows = sum(len(e.answers) for e in running), sum(len(e.rows) for e in running)
    reason = ""
    if running and all(e.delivered for e in state.evals.finished):
        awaited = ", ".join(e.progress_line for e in running)
        reason = _with_causes(f"the evaluation of {awaited}", _why_nobody_samples(state))
    return EvalWait(reason, answered, rows, outage_reason(state))


def take(state: QueueState, lineage: str, step: int, version: int, now: float) -> tuple[Taken[Payload], ...] | NotReady:
    """Return the groups of the learner's next step, or why they are not ready.

    They are exactly ``groups_per_step``, or fewer in the last step of data that has ended. The learner has done
    ``step`` steps, and trains the groups first at ``version``. Until the learner reports the step, a repeated take
    returns the same groups.

    Raises:
        QueueError: ``step`` or ``version`` is not the one that the learner reported last, or the groups were taken
            before and can't be read again.
    """
    state.expire(now)
    learner = state.attached(lineage)
    if state.taken and step == learner.step + 1:
        # The take arrived before the ack that was sent first. The client repeats the take.
        return NotReady(f"the ack of step {learner.step}", state.stats())
    if (step, version) != (learner.step, learner.version):
        raise QueueError(
            f"expected a take of step {learner.step} at version {learner.version}, which the learner reported last, "
            f"got step {step} at version {version}; {_RESTART}"
        )
    if state.taken:
        payloads = _read_again(state)
    else:
        _drop_too_old(state, learner)
        num_groups = _num_ready(state)
        is_over = learner.finished or not learner.steps_left
        if is_over or not num_groups or _must_wait(state, learner):
            return _not_ready(state, learner)
        groups, payloads = _pop_batch(state, num_groups)
        if not groups:
            return _not_ready(state, learner)
        state.set_taken(groups)
        state.run_ahead.took(state.now)
        for group in groups:
            state.ledger.move("queued", "taken", group.num_rollouts, group.num_tokens)
        state.waits_since = None
        state.revision += 1
        state.cancel_left_behind(learner)
    return tuple(
        Taken(payload, state.prompt(g.position), state.now - g.arrived_at, g.arrival_version, g.masked)
        for g, payload in zip(state.taken, payloads, strict=True)
    )


def lacks_groups(state: QueueState, lineage: str, step: int) -> bool:
    """Return whether too few groups are ready for a take of this step, while others may come.

    This function is much cheaper than ``take``, which also builds statistics.
    """
    learner = state.learner
    if learner is None or (learner.lineage, learner.step) != (lineage, step) or state.taken:
        return False
    is_over = learner.finished or not learner.steps_left or state.stream.exhausted or stop_reason(state)
    return len(state.queued) < state.settings.groups_per_step and not is_over


def ack(state: QueueState, ack: StepAck, now: float) -> Acked:
    """Record the learner's report that the taken groups were trained, or that the optimizer step was skipped.

    Raises:
        QueueError: the step is not the taken one, the version or bound is out of range, or the counts don't add up.
    """
    state.set_clock(now)
    learner, settings = state.attached(ack.lineage), state.settings
    if learner.acked is not None and learner.acked[0] == ack.step:
        return Acked(state.stats(), learner.acked[1])
    if not state.taken:
        raise QueueError(
            f"expected a take of step {learner.step} before the report that it was trained, got the report of step "
            f"{ack.step}; {_RESTART}"
        )
    learner.check(ack, settings)
    state.run_ahead.trained(state.now)
    _settle(state, learner, ack.trained)
    learner.advance(ack)
    state.filtered_since_step = state.filtered_right_since_step = state.filtered_own_since_step = 0
    _drop_too_old(state, learner)
    if not learner.steps_left:
        _end_training(state)
    state.revision += 1
    # An error here stops the run, because the counts of the ledger are wrong.
    state.check_totals()
    learner.acked = (ack.step, persistence.snapshot(state, learner) if ack.snapshot else None)
    return Acked(state.stats(), learner.acked[1])


def checkpoint_committed(state: QueueState, lineage: str, step: int) -> None:
    """Delete the snapshots that are older than ``step``, because the checkpoint after ``step`` steps is complete."""
    state.attached(lineage)
    key = snapshot_key(lineage, step)
    if state.snapshot_refs.has_snapshot(key):
        state.release_refs(state.snapshot_refs.release_all_but(key))
        state.revision += 1


def finish(state: QueueState, lineage: str, now: float) -> None:
    """End the run: drop the remaining groups as unused, and notify the generators."""
    state.set_clock(now)
    learner = state.attached(lineage)
    if learner.finished:
        return
    for group in state.set_taken(()):
        state.drop_group(group, "taken", "unused_at_end")
        state.retries.forget(group.position)
    _end_training(state)
    for active in state.leases:
        state.lose_lease(active, "unused_at_end", requeue=False)
    persistence.drop_undelivered(state, "unused_at_end")
    learner.finished = True
    state.revision += 1


def snapshot(state: QueueState, lineage: str, now: float) -> bytes:
    """Return the queue's state as bytes for a checkpoint. Taken groups count as queued."""
    state.set_clock(now)
    learner = state.attached(lineage)
    state.revision += 1
    return persistence.snapshot(state, learner)


def _drop_too_old(state: QueueState, learner: LearnerSide) -> None:
    """Drop the queued groups that are too old to train on at the learner's version.

    Unless ``on_stale`` is "mask", also end the leases whose groups will be too old. The prompts are requeued, or
    excluded after too many late attempts.
    """
    oldest = state.settings.oldest_trainable(learner.version)
    for group in state.queued.pop_older_than(oldest):
        state.drop_group(group, "queued", "stale", requeue=True)
    # Under "mask" a lease can always be trained: its newer tokens will be within the bound.
    if state.settings.queue.on_stale != "mask":
        for active in state.leases.training_older_than(oldest):
            state.lose_lease(active, "cancelled")


def _end_training(state: QueueState) -> None:
    """Drop all queued groups and training leases as unused, because the last step is done."""
    for group in state.queued.pop_all():
        state.drop_group(group, "queued", "unused_at_end")
        state.retries.forget(group.position)
    for active in state.leases:
        if active.evaluation is None:
            state.retries.forget(active.lease.prompt.position)
            state.generators.cancel(active)
            state.leases.close(active.lease.lease_id, "unused_at_end")
            state.ledger.drop("in_flight", "unused_at_end", active.lease.group_size, 0)
            state.revision += 1


# Helpers of ``take``, ``ack`` and ``eval_results``.


def _has_sampled_all(state: QueueState) -> bool:
    """Return whether the data has ended: no prompt is left to sample, and no training lease is in flight."""
    return state.stream.exhausted and not state.leases.num_training


def _num_ready(state: QueueState) -> int:
    """Return the number of groups of the next step, 0 if too few are ready.

    If no prompt and no lease is left, no other group will come, and the groups that are ready are the last step.
    """
    num_queued, num_groups = len(state.queued), state.settings.groups_per_step
    return min(num_queued, num_groups) if num_queued >= num_groups or _has_sampled_all(state) else 0


def _pop_batch(state: QueueState, num_groups: int) -> tuple[tuple[StoredGroup, ...], list[Payload]]:
    """Remove the next ``num_groups`` ready groups, and return them with their bytes. Drop damaged groups.

    If too few groups are left, return none, and leave them ready: the prompts of damaged groups are sampled again.
    """
    groups: list[StoredGroup] = []
    payloads: list[Payload] = []
    while len(groups) < num_groups:
        if not len(state.queued):
            for group in groups:
                state.queued.add(group)
            return (), []
        (group,) = state.queued.pop_first(1)
        try:
            payloads.append(state.payloads.read(group.ref))
        except DamagedPayloadError as error:
            _drop_damaged(state, group, error)
        else:
            groups.append(group)
    return tuple(groups), payloads


def _drop_damaged(state: QueueState, group: StoredGroup, error: DamagedPayloadError) -> None:
    """Drop a group whose stored bytes are damaged. Its prompt is sampled again, and no failed attempt is counted."""
    state.ledger.drop("queued", "rolled_back", group.num_rollouts, group.num_tokens)
    state.stream.requeue(group.position)
    state.count_outcome("dropped", group)
    state.forget_group(group)
    _note_damage(state, error)


def _note_damage(state: QueueState, error: DamagedPayloadError) -> None:
    """Count a group whose stored bytes are damaged, under the file in ``error``."""
    state.damage[error.file] += 1
    state.num_damaged += 1
    state.revision += 1


def _read_again(state: QueueState) -> list[Payload]:
    """Return the bytes of the groups that the learner has taken and now requests again.

    These groups can't be replaced by others, because the learner may have received them already, and train on them.

    Raises:
        QueueError: the bytes of a group are damaged.
    """
    try:
        return [state.payloads.read(group.ref) for group in state.taken]
    except DamagedPayloadError as error:
        raise QueueError(
            f"the batch of this step can't be read again: {error}; start the run again with the same command: it goes "
            f"on from its last checkpoint, where damaged groups are sampled again"
        ) from error


def _not_ready(state: QueueState, learner: LearnerSide) -> NotReady:
    """Return the answer to a take for which too few groups are ready, with the reason in words."""
    # If the ledger counts groups that do not exist, a take may wait for them forever.
    state.check_totals()
    if learner.finished or not learner.steps_left:
        return NotReady(f"all {learner.num_steps} steps are trained", state.stats(), exhausted=True)
    stop = stop_reason(state)
    if stop:
        return NotReady(stop, state.stats(), stop=stop)
    if _has_sampled_all(state):
        return NotReady(diagnosis.why_ended(state), state.stats(), exhausted=True)
    if state.waits_since is not None:
        late = state.leases.training_older_than(state.settings.oldest_after_step(learner.version))
        waited_s = state.now - state.waits_since
        line = f"{len(late)} groups that this step would make stale, {waited_s:.0f} s so far (queue.wait_s)"
        return NotReady(line, state.stats())
    return NotReady(_with_causes(_awaited_groups(state), *_why_too_few(state, learner)), state.stats())


def _awaited_groups(state: QueueState) -> str:
    filtered = f", {state.filtered_since_step} filtered since the last step" if state.filtered_since_step else ""
    queued = f"{len(state.queued)} of {state.settings.groups_per_step} are queued"
    return f"groups ({queued}, {state.ledger.groups.in_flight} in flight{filtered})"


def _why_too_few(state: QueueState, learner: LearnerSide) -> Iterator[str]:
    """Yield the causes that are known, other than that sampling takes time."""
    yield _why_nobody_samples(state)
    yield state.stream.why_starved()
    if (blocker := state.evals.exclusive) is not None:
        yield f"the evaluation of {blocker.progress_line} comes first"
    if learner.announcement is None:
        yield "no version is announced yet"


def _why_nobody_samples(state: QueueState) -> str:
    """Return why no generator samples, "" if one does.

    If all generators report that they get no weights, return the report of the first.
    """
    alive = state.generators.alive(state.now)
    if not alive:
        return "no generator is connected"
    if (outage := state.retries.outage) is not None:
        return outage.describe(state.now, state.settings.queue.max_outage_s)
    if all(entry.trouble for entry in alive):
        further = f" (problems of other generators: {len(alive) - 1})" if len(alive) > 1 else ""
        return f"generator {alive[0].generator_id} reports: {alive[0].trouble}{further}"
    return ""


def _with_causes(awaited: str, *causes: str) -> str:
    """Return the text of a wait: what is awaited, and the causes that are not empty."""
    listed = "; ".join(cause for cause in causes if cause)
    return f"{awaited}: {listed}" if listed else awaited


def _must_wait(state: QueueState, learner: LearnerSide) -> bool:
    """Return whether the take of a batch that is ready must wait for leases that would be too old after its step."""
    if state.settings.queue.on_stale != "wait":
        return False
    if not state.leases.training_older_than(state.settings.oldest_after_step(learner.version)):
        return False
    if state.waits_since is None:
        state.waits_since = state.now
    return True


def _settle(state: QueueState, learner: LearnerSide, counts: TrainedCounts) -> None:
    """Record in the ledger what became of the groups that the learner took.

    They were trained, with the rollouts and tokens in ``counts``, or dropped: the optimizer step was skipped, or the
    step trained only the critic.
    """
    taken = state.taken
    unused: DropCause = "policy_frozen" if "policy_frozen" in counts.rollouts_masked else "step_skipped"
    if counts.stepped:
        rollouts, tokens = sum(g.num_rollouts for g in taken), sum(g.num_tokens for g in taken)
        state.ledger.train(len(taken), rollouts, tokens, counts)
    state.set_taken(())
    for group in taken:
        state.retries.forget(group.position)
        if counts.stepped:
            state.count_outcome("trained", group)
            state.forget_group(group)
        else:
            state.drop_group(group, "taken", unused)


def _result(state: QueueState, evaluation: Evaluation) -> Evaluated[Payload | None] | None:
    """Return the evaluation's prompts and answers. If answers are damaged, drop these and return None.

    The evaluation is then no longer finished.
    """
    pairs: list[tuple[Prompt, Payload | None]] = []
    for row in range(len(evaluation.rows)):
        ref = evaluation.answers[row].ref
        try:
            pairs.append((evaluation.prompt(row), None if ref is None else state.payloads.read(ref)))
        except DamagedPayloadError as error:
            lost = state.evals.lose_answer(evaluation, row)
            state.eval_ledger.drop("queued", "rolled_back", lost.rollouts, lost.tokens)
            _note_damage(state, error)
    return Evaluated(*evaluation.key, tuple(pairs)) if evaluation.done else None
