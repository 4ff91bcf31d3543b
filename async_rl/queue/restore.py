"""From live state to a snapshot and back. Pure, and a part of the buffer.

The checkpoint wins: what the queue did after the snapshot is rolled back, its leases are void, and its prompts come
again in stream order. Only the ledger remembers it, as ``rolled_back``.
"""

from __future__ import annotations

from collections import Counter

from async_rl.errors import QueueError
from async_rl.queue.ledger import Ledger
from async_rl.queue.messages import DropCause
from async_rl.queue.snapshot import Snapshot
from async_rl.queue.state import Attempts, LearnerSide, QueueState


def save(state: QueueState, learner: LearnerSide) -> bytes:
    """The state after the last ack. What is taken counts as queued, what is in flight as not yet drawn."""
    in_flight = [held.lease.prompt.position for held in state.leases if held.evaluation is None]
    return Snapshot(
        lineage=learner.lineage,
        step=learner.step,
        version=learner.version,
        num_rows=state.stream.num_rows,
        position=state.stream.position,
        again=tuple(sorted([*state.stream.again, *in_flight])),
        attempts={p: (a.failed, a.stale) for p, a in state.attempts.items()},
        set_aside=dict(state.set_aside),
        filtered_since_step=state.filtered_since_step,
        prompts_too_long=state.prompts_too_long,
        ledger=state.ledger.as_dict(),
        eval_ledger=state.eval_ledger.as_dict(),
        groups=sorted([*learner.taken, *state.queued.values()], key=lambda g: g.order),
    ).encode(state.now)


def read(state: QueueState, data: bytes, *, step: int, version: int) -> Snapshot:
    """The snapshot in ``data``.

    Raises:
        QueueError: it is damaged, or of another step, version or data set than the learner says.
    """
    snapshot = Snapshot.decode(data, state.now)
    got = (snapshot.step, snapshot.version, snapshot.num_rows)
    expected = (step, version, state.stream.num_rows)
    if got != expected:
        raise QueueError(
            f"expected a snapshot of (step, version, training rows) {expected}, got {got}; the checkpoint and "
            f"data.train belong to different runs"
        )
    return snapshot


def void_leases(state: QueueState) -> None:
    """Every lease ends here; the ledger is the caller's."""
    for held in state.leases:
        state.generators.cancel(held)
        state.leases.close(held.lease.lease_id, "rolled_back")


def restore(state: QueueState, snapshot: Snapshot | None) -> None:
    """Make the state what ``snapshot`` says; none: empty."""
    ledger = Ledger() if snapshot is None else Ledger.from_dict(snapshot.ledger)
    eval_ledger = Ledger("delivered") if snapshot is None else Ledger.from_dict(snapshot.eval_ledger, "delivered")
    state.ledger = ledger.restored_over(state.ledger)
    state.eval_ledger = eval_ledger.restored_over(state.eval_ledger)
    drop_undelivered(state, "rolled_back")
    groups = () if snapshot is None else snapshot.groups
    state.queued = {g.lease_id: g for g in groups}
    state.group_bytes = sum(len(g.body) for g in groups)
    state.attempts = {}
    state.set_aside = Counter()
    state.filtered_since_step = state.filtered_right_since_step = state.prompts_too_long = 0
    if snapshot is None:
        state.stream.restore(0, ())
        return
    state.stream.restore(snapshot.position, snapshot.again)
    state.attempts = {p: Attempts(failed, stale) for p, (failed, stale) in snapshot.attempts.items()}
    state.set_aside = Counter(snapshot.set_aside)
    state.filtered_since_step = snapshot.filtered_since_step
    state.prompts_too_long = snapshot.prompts_too_long


def drop_undelivered(state: QueueState, cause: DropCause) -> None:
    """Answers that no learner received are dropped; the evaluations are forgotten."""
    state.evals.clear()
    for account in (state.eval_ledger.groups, state.eval_ledger.rollouts, state.eval_ledger.tokens):
        account.dropped[cause] += account.queued
        account.queued = 0
