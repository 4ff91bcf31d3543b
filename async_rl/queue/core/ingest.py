"""What becomes of a returned group: checked, filtered, queued, or kept as an evaluation's answer. Pure."""

from __future__ import annotations

from async_rl.queue.core.evals import Answer
from async_rl.queue.core.group_summary import GroupFacts, why_unfit
from async_rl.queue.core.leases import HeldLease
from async_rl.queue.core.state import LearnerSide, QueueState
from async_rl.queue.core.stored_group import HeldGroup
from async_rl.queue.messages import DropCause, FailureCause, Verdict
from async_rl.queue.storage.payloads import Body

_RETURNED = "returned"
"""Fate of a lease whose group came; a second one is a duplicate."""


def receive(state: QueueState, generator_id: str, group: GroupFacts, body: Body) -> tuple[Verdict, str]:
    """Take a group in, ``body`` with its facts. The verdict, and a line when it is refused."""
    held, learner = state.leases.get(group.lease_id), state.learner
    if held is None or learner is None or held.generator_id != generator_id:
        return _receive_late(state, group), ""
    unfit = why_unfit(group, held.lease, newest_version=learner.version)
    free = state.settings.max_bytes - state.group_bytes - state.leases.reserved + held.reserved
    # A larger one could leave no room for the rest of its step, for ever.
    room = min(free, state.settings.max_bytes // state.settings.groups_per_step)
    if not unfit and held.evaluation is None and len(body) > max(held.reserved, room):
        unfit = f"{len(body)} bytes are more than the {held.reserved} reserved, and queue.max_bytes has no room"
    if unfit:
        _lose_returned(state, held, "failed" if group.every_rollout_failed else "refused", group.num_tokens)
        return "refused", f"group {group.lease_id}: {unfit}"
    if held.evaluation is not None:
        return _receive_answer(state, held, group, body), ""
    return _receive_training(state, learner, held, group, body), ""


def fail(state: QueueState, generator_id: str, lease_id: str, cause: FailureCause) -> Verdict:
    """A generator gives a lease back unsampled."""
    held = state.leases.get(lease_id)
    if held is None or held.generator_id != generator_id:
        return "duplicate" if state.leases.fate(lease_id) is not None else "unknown_lease"
    if cause == "prompt_too_long":
        state.refuse_prompt(held)
    else:
        state.lose_lease(held, "failed", stop_sampling=False)
    return "refused"


def _receive_late(state: QueueState, group: GroupFacts) -> Verdict:
    fate = state.leases.fate(group.lease_id)
    if fate is None:
        return "unknown_lease"
    if fate == _RETURNED:
        return "duplicate"
    # Tokens that were sampled for nothing are counted once, under the cause that closed their lease.
    ledger = state.ledger if group.kind == "train" else state.eval_ledger
    ledger.late(fate, group.num_tokens)
    state.leases.set_fate(group.lease_id, _RETURNED)
    state.revision += 1
    return "old_lineage" if fate == "rolled_back" else "unknown_lease"


def _lose_returned(state: QueueState, held: HeldLease, cause: DropCause, tokens: int) -> None:
    state.lose_lease(held, cause, tokens=tokens, stop_sampling=False)
    state.leases.set_fate(held.lease.lease_id, _RETURNED)


def _receive_answer(state: QueueState, held: HeldLease, group: GroupFacts, body: Body) -> Verdict:
    assert held.evaluation is not None
    evaluation = state.evals.get(held.evaluation)
    if evaluation is None:
        _lose_returned(state, held, "refused", group.num_tokens)
        return "unknown_lease"
    if group.num_tokens and group.oldest_version < evaluation.record.min_version:
        _lose_returned(state, held, "stale", group.num_tokens)
        return "stale"
    state.leases.close(held.lease.lease_id, _RETURNED)
    answer = Answer(state.bodies.keep(body), group.num_rollouts, group.num_tokens)
    state.evals.answer(evaluation, held.lease.prompt.row, answer)
    state.eval_ledger.arrive("queued", group.num_rollouts, group.num_tokens)
    state.revision += 1
    return "eval_done"


def _receive_training(
    state: QueueState, learner: LearnerSide, held: HeldLease, group: GroupFacts, body: Body
) -> Verdict:
    settings = state.settings
    accuracy = group.accuracy / group.num_rollouts
    fits_filter = _inside(settings.filter_range, accuracy)
    bound_version = group.newest_version if settings.on_stale == "mask" else group.oldest_version
    state.count_outcome("received", group)
    if bound_version < settings.oldest_trainable(learner.version):
        state.count_outcome("dropped", group)
        _lose_returned(state, held, "stale", group.num_tokens)
        return "stale"
    state.leases.close(held.lease.lease_id, _RETURNED)
    state.revision += 1
    if not fits_filter and settings.refill:
        state.ledger.arrive("filtered", group.num_rollouts, group.num_tokens)
        state.count_outcome("filtered", group)
        state.attempts.pop(group.position, None)
        state.filtered_since_step += 1
        assert settings.filter_range is not None
        state.filtered_right_since_step += accuracy >= settings.filter_range[1]
        return "filtered"
    state.ledger.arrive("queued", group.num_rollouts, group.num_tokens)
    announced = learner.announced_version
    state.keep_group(
        HeldGroup(
            lease_id=group.lease_id,
            position=group.position,
            named_version=held.version,
            oldest_version=group.oldest_version,
            newest_version=group.newest_version,
            bound_version=bound_version,
            num_rollouts=group.num_rollouts,
            num_tokens=group.num_tokens,
            reward=group.reward,
            accuracy=group.accuracy,
            arrived_at=state.now,
            arrival_version=learner.version if announced is None else announced,
            masked=not fits_filter,
            place=state.bodies.keep(body),
        )
    )
    return "queued"


def _inside(filter_range: tuple[float, float] | None, accuracy: float) -> bool:
    return filter_range is None or filter_range[0] < accuracy < filter_range[1]
