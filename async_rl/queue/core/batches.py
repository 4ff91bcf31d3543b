"""Take and acknowledge batches: exactly the groups of one step, checked against the staleness bound. Pure.

A take returns groups in the order of (named version, stream position), none above its bound. A repeated take returns
the same groups. Under ``on_stale = "wait"`` a take first waits for the leases that its step would make stale.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.errors import QueueError
from async_rl.queue.core import persistence, report
from async_rl.queue.core.state import LearnerSide, QueueState
from async_rl.queue.messages import NotReady, StepAck, TrainedCounts
from async_rl.queue.storage.payloads import Payload
from async_rl.records import Prompt


@dataclass(frozen=True, slots=True)
class TakenPayload:
    """One taken group, still encoded."""

    prompt: Prompt
    queued_s: float
    arrival_version: int
    masked: bool
    payload: Payload


def take(
    state: QueueState, lineage: str, step: int, version: int, num_groups: int
) -> tuple[TakenPayload, ...] | NotReady:
    """As ``Buffer.take``."""
    learner = state.attached(lineage)
    if state.taken and step == learner.step + 1:
        # The take overtook the ack that precedes it. The client repeats it.
        return NotReady(f"waits for the ack of step {learner.step}", report.stats(state))
    if (step, version) != (learner.step, learner.version):
        raise QueueError(
            f"expected a take of step {learner.step} at version {learner.version}, as acked, got step {step} at "
            f"version {version}"
        )
    if not state.taken:
        state.drop_too_old(learner)
        if len(state.queued) < num_groups or learner.finished or not learner.steps_left:
            return report.not_ready(state, learner, num_groups)
        if _must_wait(state, learner):
            return report.not_ready(state, learner, num_groups)
        state.set_taken(state.queued.pop_first(num_groups))
        for group in state.taken:
            state.ledger.take(group.num_rollouts, group.num_tokens)
        state.waits_since = None
        state.revision += 1
        _cancel_left_behind(state, learner)
    return tuple(
        TakenPayload(
            state.prompt(g.position), state.now - g.arrived_at, g.arrival_version, g.masked, state.payloads.read(g.ref)
        )
        for g in state.taken
    )


def lacks_groups(state: QueueState, lineage: str, step: int, num_groups: int) -> bool:
    """As ``Buffer.lacks_groups``."""
    learner = state.learner
    if learner is None or (learner.lineage, learner.step) != (lineage, step) or state.taken:
        return False
    is_over = learner.finished or not learner.steps_left or state.stream.exhausted or state.stop_diagnosis()
    return len(state.queued) < num_groups and not is_over


def ack(state: QueueState, ack: StepAck) -> bytes | None:
    """As ``Buffer.ack``. Return the snapshot if the ack requested one."""
    learner, settings = state.attached(ack.lineage), state.settings
    if learner.acked is not None and learner.acked[0] == ack.step:
        return learner.acked[1]
    if not state.taken:
        raise QueueError(f"expected a take of step {learner.step} first, got an ack of step {ack.step}")
    learner.check(ack, settings)
    _settle(state, learner, ack.trained)
    learner.advance(ack, settings)
    state.filtered_since_step = state.filtered_right_since_step = 0
    state.drop_too_old(learner)
    if not learner.steps_left:
        state.end_training()
    state.revision += 1
    learner.acked = (ack.step, persistence.snapshot(state, learner) if ack.snapshot else None)
    return learner.acked[1]


def wait_deadline(state: QueueState) -> float | None:
    """The time at which a waiting step stops waiting for leases; None if no step waits."""
    learner = state.learner
    if learner is None or state.waits_since is None:
        return None
    return state.waits_since + state.settings.wait_s


def stop_waiting(state: QueueState) -> None:
    """Cancel the leases that a step has waited for long enough; the step would make them stale."""
    deadline, learner = wait_deadline(state), state.learner
    if learner is None or deadline is None or state.now < deadline:
        return
    _cancel_left_behind(state, learner)
    # Leases given out since a batch is complete are young enough: it is taken next, and waits for nothing again.
    state.waits_since = None


def _cancel_left_behind(state: QueueState, learner: LearnerSide) -> None:
    """Cancel the leases that the step at the learner's version makes stale and that are not in its batch.

    Once the batch is taken, these leases can't be trained. If they were sampled further, they would occupy slots and
    count in admission: at a bound of 1 this cost a tenth of the steps/s (``benchmarks/on_stale.py``). If the optimizer
    step is then skipped, the leases were cancelled needlessly; their prompts are requeued.
    """
    if state.settings.on_stale != "mask":
        for active in state.leases.training_older_than(state.settings.oldest_after_step(learner.version)):
            state.lose_lease(active, "cancelled")


def _must_wait(state: QueueState, learner: LearnerSide) -> bool:
    """Whether a complete batch must wait for leases that its step would make stale."""
    if state.settings.on_stale != "wait":
        return False
    if not state.leases.training_older_than(state.settings.oldest_after_step(learner.version)):
        return False
    if state.waits_since is None:
        state.waits_since = state.now
    return True


def _settle(state: QueueState, learner: LearnerSide, counts: TrainedCounts) -> None:
    """Record the taken groups in the ledger: trained by ``counts``, or dropped if the optimizer step was skipped."""
    taken = state.taken
    if counts.stepped:
        rollouts, tokens = sum(g.num_rollouts for g in taken), sum(g.num_tokens for g in taken)
        state.ledger.train(len(taken), rollouts, tokens, counts)
    state.set_taken(())
    for group in taken:
        state.attempts.pop(group.position, None)
        if counts.stepped:
            state.count_outcome("trained", group)
            state.forget_group(group)
        else:
            state.drop_group(group, "taken", "step_skipped")
