"""From live state to a snapshot and back. Pure, and a part of the buffer.

The checkpoint wins: what the queue did after the snapshot is rolled back, its leases are void, and its prompts come
again in stream order. Only the ledger remembers it, as ``rolled_back``.
"""

from __future__ import annotations

from collections import Counter

from async_rl.errors import QueueError
from async_rl.queue.core.ledger import Ledger
from async_rl.queue.core.ready_groups import Shelf
from async_rl.queue.core.snapshot import Snapshot
from async_rl.queue.core.snapshot_refs import snapshot_key
from async_rl.queue.core.state import Attempts, LearnerSide, QueueState
from async_rl.queue.core.stored_group import GroupEntry
from async_rl.queue.messages import DropCause


def save(state: QueueState, learner: LearnerSide) -> bytes:
    """The state after the last ack, its groups pinned. What is taken counts as queued, in flight as not yet drawn."""
    in_flight = [held.lease.prompt.position for held in state.leases if held.evaluation is None]
    groups = sorted([*learner.taken, *state.queued], key=lambda g: g.order)
    state.unpin(state.pins.add(snapshot_key(learner.lineage, learner.step), groups))
    return Snapshot(
        lineage=learner.lineage,
        step=learner.step,
        version=learner.version,
        lease_bound=learner.lease_bound,
        data_digest=state.data_digest,
        position=state.stream.position,
        again=tuple(sorted([*state.stream.again, *in_flight])),
        attempts={p: (a.failed, a.stale) for p, a in state.attempts.items()},
        set_aside=dict(state.set_aside),
        set_aside_last=state.set_aside_last,
        filtered_since_step=state.filtered_since_step,
        filtered_right_since_step=state.filtered_right_since_step,
        prompts_too_long=state.prompts_too_long,
        ledger=state.ledger.as_dict(),
        eval_ledger=state.eval_ledger.as_dict(),
        groups=groups,
    ).encode(state.now)


def read(state: QueueState, data: bytes, *, step: int, version: int) -> Snapshot:
    """The snapshot in ``data``.

    Raises:
        QueueError: it is damaged, or of another step or version than the learner says, or of other training rows.
    """
    snapshot = Snapshot.decode(data, state.now)
    if (snapshot.step, snapshot.version) != (step, version):
        raise QueueError(
            f"expected a snapshot of step {step} at version {version}, got one of step {snapshot.step} at version "
            f"{snapshot.version}; the checkpoint's parts belong to different steps"
        )
    if snapshot.data_digest != state.data_digest and not state.settings.accepts_changed_data:
        raise QueueError(
            f"data.train has changed since the checkpoint: expected rows with digest {snapshot.data_digest}, got "
            f"{state.data_digest}; put the old file back, or accept the new one with data.on_change = 'accept' "
            f"(stream positions then name other prompts than before)"
        )
    return snapshot


def void_leases(state: QueueState) -> None:
    """Every lease ends here; the ledger is the caller's."""
    for held in state.leases:
        state.generators.cancel(held)
        state.leases.close(held.lease.lease_id, "rolled_back")


def restore(state: QueueState, snapshot: Snapshot | None) -> None:
    """Make the state what ``snapshot`` says; none: empty. Prompts whose group's body is gone come again."""
    ledger = Ledger() if snapshot is None else Ledger.from_dict(snapshot.ledger)
    eval_ledger = Ledger("delivered") if snapshot is None else Ledger.from_dict(snapshot.eval_ledger, "delivered")
    state.ledger = ledger.restored_over(state.ledger)
    state.eval_ledger = eval_ledger.restored_over(state.eval_ledger)
    drop_undelivered(state, "rolled_back")
    state.attempts = {}
    state.set_aside, state.set_aside_last = Counter(), {}
    state.filtered_since_step = state.filtered_right_since_step = state.prompts_too_long = 0
    _restore_groups(state, snapshot)
    if snapshot is None:
        return
    state.attempts = {p: Attempts(failed, stale) for p, (failed, stale) in snapshot.attempts.items()}
    state.set_aside = Counter(snapshot.set_aside)
    state.set_aside_last = dict(snapshot.set_aside_last)
    state.filtered_since_step = snapshot.filtered_since_step
    state.filtered_right_since_step = snapshot.filtered_right_since_step
    state.prompts_too_long = snapshot.prompts_too_long


def _restore_groups(state: QueueState, snapshot: Snapshot | None) -> None:
    """Queue the snapshot's groups that are still here, pin them for another return to it, let go of all others."""
    here = {group.lease_id: group for group in (*state.queued, *state.taken)}
    wanted = () if snapshot is None else snapshot.groups
    found = [here.get(group.lease_id) or state.pins.get(group.lease_id) for group in wanted]
    kept = [group for group in found if group is not None]
    key = None if snapshot is None else snapshot_key(snapshot.lineage, snapshot.step)
    state.queued = Shelf(kept)
    if state.learner is not None:
        state.learner.hold(())
    for group in kept:
        state.changes.put("group", group.lease_id, GroupEntry(group))
    released = state.pins.add(key, kept) if key is not None else []
    released += state.pins.release_all_but(key)
    state.unpin(released)
    pinned = {group.lease_id for group in released}
    for group in here.values():
        if group.lease_id not in state.queued and group.lease_id not in pinned:
            state.let_go(group)
    state.stream.restore(0 if snapshot is None else snapshot.position, () if snapshot is None else snapshot.again)
    for group, there in zip(wanted, found, strict=True):
        if there is None:
            state.ledger.drop("queued", "rolled_back", group.num_rollouts, group.num_tokens)
            state.stream.put_back(group.position)


def drop_undelivered(state: QueueState, cause: DropCause) -> None:
    """Answers that no learner received are dropped; the evaluations are forgotten."""
    state.evals.clear()
    for account in (state.eval_ledger.groups, state.eval_ledger.rollouts, state.eval_ledger.tokens):
        account.dropped[cause] += account.queued
        account.queued = 0
