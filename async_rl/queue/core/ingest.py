"""Take in a returned group: read its summary, check it, filter it, then store it or drop it. Pure.

A frame enters with its ``GroupSummary``; a verdict leaves. ``read_summary`` reads the summary without decoding the
frame. It treats the tokens as four flat columns, so the number of numpy calls does not depend on that of rollouts.
"""

from __future__ import annotations

import math
from itertools import islice

import msgspec
import numpy as np

from async_rl.net.codec import FlatGroup, decode_flat_group
from async_rl.net.wire import DEFAULT_LIMITS, Limits
from async_rl.queue.core.evals import Answer
from async_rl.queue.core.leases import ActiveLease
from async_rl.queue.core.state import LearnerSide, QueueState
from async_rl.queue.core.stored_groups import StoredGroup
from async_rl.queue.messages import DropCause, FailureCause, Verdict
from async_rl.queue.storage.payloads import Bytes, Payload
from async_rl.records import NO_VERSION, Lease, LeaseKind
from async_rl.sampling_mask import contains

_RETURNED = "returned"
"""Status of a closed lease whose group arrived. A second group for it is a duplicate."""


class GroupSummary(msgspec.Struct, frozen=True, gc=False):
    """One returned group.

    ``num_tokens`` counts the tokens under the mask. ``oldest_version`` and ``newest_version`` are of these tokens:
    ``NO_VERSION`` if there is none, and meaningless if versions and mask disagree. ``reward`` and ``accuracy`` are sums
    over rollouts. ``unfit`` is the reason why the group can't be trained whatever its lease and version; empty if it
    can be. ``has_sampling_mask``: the group lists the tokens that top-p and top-k left to be sampled.
    """

    lease_id: str
    kind: LeaseKind
    position: int
    generator_id: str
    lineage: str
    num_rollouts: int
    num_tokens: int
    oldest_version: int
    newest_version: int
    reward: float
    accuracy: float
    every_rollout_failed: bool
    unfit: str
    temperature: float
    has_sampling_mask: bool


def read_summary(payload: Bytes, limits: Limits = DEFAULT_LIMITS) -> GroupSummary:
    """The summary of an encoded group.

    Raises:
        WireError: where ``decode_group`` does.
    """
    group = decode_flat_group(payload, limits)
    fields = group.fields
    num_tokens = int(np.count_nonzero(group.loss_mask))
    oldest_version, newest_version = _version_range(group) if num_tokens else (NO_VERSION, NO_VERSION)
    every_rollout_failed = fields.finish_reason.count("error") == group.num_rollouts
    reward = float(sum(sum(filter(None, values)) for values in fields.reward_parts.values()))
    accuracy = float(sum(fields.accuracy))
    return GroupSummary(
        lease_id=fields.lease_id,
        kind=fields.kind,
        position=fields.position,
        generator_id=fields.generator_id,
        lineage=fields.lineage,
        num_rollouts=group.num_rollouts,
        num_tokens=num_tokens,
        oldest_version=oldest_version,
        newest_version=newest_version,
        reward=reward,
        accuracy=accuracy,
        every_rollout_failed=every_rollout_failed,
        unfit="every rollout failed" if every_rollout_failed else _first_fault(group, reward + accuracy),
        temperature=fields.temperature,
        has_sampling_mask=group.sampling_mask is not None,
    )


def _version_range(group: FlatGroup) -> tuple[int, int]:
    """The oldest and the newest version of a group with a sampled token."""
    versions, sampled = group.versions, group.loss_mask.tobytes()
    first = int(versions[sampled.find(1)])
    # Most groups have only one version. This comparison costs a third of two reductions.
    if np.equal(versions, first).tobytes() == sampled:
        return first, first
    # NO_VERSION, off the mask, is the largest of unsigned numbers and the smallest of signed ones.
    return int(np.minimum.reduce(versions.view(np.uint32)).view(np.int32)), int(np.maximum.reduce(versions))


def _first_fault(group: FlatGroup, sum_of_scores: float) -> str:
    """The first fault in the rewards or else in the rollouts; empty if there is none."""
    # A sum is finite only if all its terms are. A sum that overflows is refused, too.
    if not math.isfinite(sum_of_scores):
        return "a reward is not finite, or too large"
    fields, accuracy = group.fields, group.fields.accuracy
    if group.num_rollouts and not 0.0 <= min(accuracy) <= max(accuracy) <= 1.0:
        return f"expected accuracies in 0..1, got {min(accuracy)} to {max(accuracy)}"
    # Searching byte strings runs in C; a numpy call for each rollout costs ten times as much.
    sampled = group.loss_mask.tobytes()
    if np.greater_equal(group.versions, 0).tobytes() != sampled:
        return f"expected a version from 0 on for every sampled token, and {NO_VERSION} for all others"
    not_finite = np.less(np.isfinite(group.behavior_logprobs), group.loss_mask).tobytes().find(1)
    end = 0
    for index, (length, finish_reason) in enumerate(zip(_rollout_lengths(group), fields.finish_reason, strict=True)):
        start, end = end, end + length
        if sampled.find(1, start, end) < 0 and finish_reason != "error":
            return f"rollout {index} has no sampled token"
        if start <= not_finite < end:
            return f"rollout {index} has a behavior logprob that is not finite"
    if group.sampling_mask is not None and not contains(group.sampling_mask, group.token_ids[group.loss_mask]).all():
        return "a sampled token is not among those that top-p and top-k kept"
    return ""


def _rollout_lengths(group: FlatGroup) -> list[int]:
    """Tokens of each rollout, in all its sequences."""
    counts, lengths = group.fields.num_sequences, group.fields.lengths
    if counts.count(1) == len(counts):
        return lengths
    left = iter(lengths)
    return [sum(islice(left, count)) for count in counts]


def why_unfit(group: GroupSummary, lease: Lease, *, newest_version: int) -> str:
    """The reason why a returned group does not fit its lease; empty if it does.

    ``newest_version`` is the learner's. A group in which no rollout has a sampled token, or every rollout failed, is
    unfit too.
    """
    if (group.kind, group.position, group.lineage) != (lease.kind, lease.prompt.position, lease.lineage):
        return (
            f"expected {lease.kind} position {lease.prompt.position} of lineage {lease.lineage}, got {group.kind} "
            f"{group.position} of {group.lineage}"
        )
    if group.num_rollouts != lease.group_size:
        return f"expected {lease.group_size} rollouts, got {group.num_rollouts}"
    if group.unfit:
        return group.unfit
    sampling = lease.sampling
    if group.temperature != sampling.temperature:
        return f"expected samples at temperature {sampling.temperature}, got {group.temperature}"
    # Log-probabilities after top-p or top-k are meaningless without the set of tokens that was left.
    if group.num_tokens and group.has_sampling_mask != lease.wants_sampling_mask:
        wanted = "" if lease.wants_sampling_mask else "no "
        return (
            f"expected {wanted}sampling masks under top_p = {sampling.top_p} and top_k = "
            f"{sampling.top_k}{'' if lease.kind == 'train' else ', in an evaluation'}, got "
            f"{'some' if group.has_sampling_mask else 'none'}"
        )
    if group.num_tokens and not 0 <= group.oldest_version <= group.newest_version <= newest_version:
        return (
            f"the group was sampled by versions {group.oldest_version}..{group.newest_version}, known are "
            f"0..{newest_version}"
        )
    return ""


def receive(state: QueueState, generator_id: str, group: GroupSummary, payload: Payload) -> tuple[Verdict, str]:
    """Take in a group: its summary and its ``payload``. Return the verdict, and the reason if it was refused."""
    active, learner = state.leases.get(group.lease_id), state.learner
    if active is None or learner is None or active.generator_id != generator_id:
        return _receive_late(state, group), ""
    unfit = why_unfit(group, active.lease, newest_version=learner.version)
    free = state.settings.max_bytes - state.group_bytes - state.leases.reserved + active.reserved
    # A larger group could forever leave too little room for the rest of its step.
    room = min(free, state.settings.max_bytes // state.settings.groups_per_step)
    if not unfit and active.evaluation is None and len(payload) > max(active.reserved, room):
        unfit = f"{len(payload)} bytes are more than the {active.reserved} reserved, and queue.max_bytes has no room"
    if unfit:
        _lose_returned(state, active, "failed" if group.every_rollout_failed else "refused", group.num_tokens)
        return "refused", f"group {group.lease_id}: {unfit}"
    if active.evaluation is not None:
        return _receive_answer(state, active, group, payload), ""
    return _receive_training(state, learner, active, group, payload), ""


def fail(state: QueueState, generator_id: str, lease_id: str, cause: FailureCause) -> Verdict:
    """Close a lease that a generator returned unsampled."""
    active = state.leases.get(lease_id)
    if active is None or active.generator_id != generator_id:
        return "duplicate" if state.leases.status_of(lease_id) is not None else "unknown_lease"
    if cause == "prompt_too_long":
        state.refuse_prompt(active)
    else:
        state.lose_lease(active, "failed", stop_sampling=False)
    return "refused"


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


def _lose_returned(state: QueueState, active: ActiveLease, cause: DropCause, tokens: int) -> None:
    state.lose_lease(active, cause, tokens=tokens, stop_sampling=False)
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
    state.leases.close(active.lease.lease_id, _RETURNED)
    answer = Answer(state.payloads.keep(payload), group.num_rollouts, group.num_tokens)
    state.evals.answer(evaluation, active.lease.prompt.row, answer)
    state.eval_ledger.arrive("queued", group.num_rollouts, group.num_tokens)
    state.revision += 1
    return "eval_done"


def _receive_training(
    state: QueueState, learner: LearnerSide, active: ActiveLease, group: GroupSummary, payload: Payload
) -> Verdict:
    settings = state.settings
    accuracy = group.accuracy / group.num_rollouts
    fits_filter = _inside(settings.filter_range, accuracy)
    bound_version = group.newest_version if settings.on_stale == "mask" else group.oldest_version
    state.count_outcome("received", group)
    if bound_version < settings.oldest_trainable(learner.version):
        state.count_outcome("dropped", group)
        _lose_returned(state, active, "stale", group.num_tokens)
        return "stale"
    state.leases.close(active.lease.lease_id, _RETURNED)
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
    state.add_group(
        StoredGroup(
            lease_id=group.lease_id,
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
            masked=not fits_filter,
            ref=state.payloads.keep(payload),
        )
    )
    return "queued"


def _inside(filter_range: tuple[float, float] | None, accuracy: float) -> bool:
    return filter_range is None or filter_range[0] < accuracy < filter_range[1]
