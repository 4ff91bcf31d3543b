"""Taken groups to trainable sequences: advantages, masks with their causes, and the staleness of every token.

Called by the trainer on rank 0, once a step; leaves plain arrays for the engine and the facts for the ledger. The
first cause that applies, in the order of ``MASK_CAUSES``, is the one counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from async_rl.errors import StaleRolloutError
from async_rl.learner.packing import TrainSequence
from async_rl.queue.messages import TakenGroup, TrainedFacts
from async_rl.records import Group, Rollout

MASK_CAUSES = ("unknown_weights", "failed", "filter", "truncated", "skip_threshold", "step_skipped")
"""Why a rollout leaves the loss: sampled by weights this run did not publish; its engine failed; its group's accuracy
is outside ``queue.filter_range`` with ``queue.refill = false``; cut at ``max_new_tokens``; ratio over the threshold;
its optimizer step was skipped (the whole batch's, or one of ``learner.updates_per_batch``)."""

Advantages = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch:
    """One step's sequences, split into ``updates_per_batch`` parts, and where each came from.

    ``rollout_of`` and ``sequence_tokens`` map a sequence id to its rollout's index in the step and to its sampled
    tokens; ``masked`` maps a rollout's index to its cause. ``update_of`` gives every group its part.
    """

    updates: tuple[tuple[TrainSequence, ...], ...]
    rollout_of: Mapping[int, int]
    sequence_tokens: Mapping[int, int]
    rollout_tokens: tuple[int, ...]
    masked: Mapping[int, str]
    update_of: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StalenessSummary:
    """Of the tokens that are trained on, in versions: at training, and its parts before and after arrival."""

    mean: float = 0.0
    max: int = 0
    in_flight_mean: float = 0.0
    in_queue_mean: float = 0.0


@dataclass(slots=True)
class _Builder:
    next_id: int = 0
    rollout_of: dict[int, int] = field(default_factory=dict)
    sequence_tokens: dict[int, int] = field(default_factory=dict)
    rollout_tokens: list[int] = field(default_factory=list)
    masked: dict[int, str] = field(default_factory=dict)


def prepare_batch(
    taken: Sequence[TakenGroup],
    *,
    advantages: Advantages,
    mask_truncated: bool,
    num_updates: int,
    known_weights: Callable[[Group], bool],
) -> PreparedBatch:
    """Sequences of ``taken``, in order, in ``num_updates`` equal parts. Masked rollouts still count in baselines."""
    builder = _Builder()
    per_update = max(1, len(taken) // num_updates)
    updates: list[tuple[TrainSequence, ...]] = []
    for start in range(0, len(taken), per_update):
        sequences: list[TrainSequence] = []
        for item in taken[start : start + per_update]:
            rewards = np.array([r.reward for r in item.group.rollouts], dtype=np.float64)
            trusted = known_weights(item.group)
            for rollout, advantage in zip(item.group.rollouts, advantages(rewards), strict=True):
                cause = _mask_cause(rollout, item, trusted=trusted, mask_truncated=mask_truncated)
                sequences += _sequences(builder, item.group, rollout, float(advantage), cause)
        updates.append(tuple(sequences))
    return PreparedBatch(
        updates=tuple(updates),
        rollout_of=builder.rollout_of,
        sequence_tokens=builder.sequence_tokens,
        rollout_tokens=tuple(builder.rollout_tokens),
        masked=builder.masked,
        update_of=tuple(index // per_update for index in range(len(taken))),
    )


def _mask_cause(rollout: Rollout, item: TakenGroup, *, trusted: bool, mask_truncated: bool) -> str | None:
    if not trusted:
        return "unknown_weights"
    if rollout.finish_reason == "error":
        return "failed"
    if item.masked:
        return "filter"
    if mask_truncated and rollout.finish_reason == "length":
        return "truncated"
    return None


def _sequences(
    builder: _Builder, group: Group, rollout: Rollout, advantage: float, cause: str | None
) -> list[TrainSequence]:
    index = len(builder.rollout_tokens)
    builder.rollout_tokens.append(rollout.num_sampled)
    if cause is not None:
        builder.masked[index] = cause
        return []
    sequences: list[TrainSequence] = []
    for sequence in rollout.sequences:
        builder.rollout_of[builder.next_id] = index
        builder.sequence_tokens[builder.next_id] = int(sequence.loss_mask.sum())
        sequences.append(
            TrainSequence(
                sequence_id=builder.next_id,
                token_ids=sequence.token_ids,
                loss_mask=sequence.loss_mask,
                behavior_logprobs=sequence.behavior_logprobs,
                versions=sequence.versions,
                advantages=np.full(len(sequence.token_ids), advantage, dtype=np.float32),
                temperature=group.temperature,
            )
        )
        builder.next_id += 1
    return sequences


def check_staleness(taken: Sequence[TakenGroup], *, version: int, max_staleness: int) -> None:
    """The learner's own check of what the queue handed over; ``version`` is the one that trains last on the batch.

    Raises:
        StaleRolloutError: a group is above the bound (a bug of ours, never trained on).
    """
    for item in taken:
        staleness = version - item.group.oldest_version
        if staleness > max_staleness:
            raise StaleRolloutError(
                f"group {item.group.lease_id} is {staleness} versions old, limit {max_staleness} (sampled at "
                f"{item.group.oldest_version}, learner at {version})"
            )


def sampling_versions(group: Group) -> set[int]:
    """Every version that sampled a token of the group."""
    masked = (s.versions[s.loss_mask] for r in group.rollouts for s in r.sequences)
    return {int(version) for versions in masked for version in np.unique(versions)}


def staleness_summary(
    taken: Sequence[TakenGroup], prepared: PreparedBatch, *, versions: Sequence[int]
) -> StalenessSummary:
    """Token-weighted staleness of what ``prepared`` trains on, each update at its own of ``versions``."""
    index, ages, waits = 0, [], []
    for item, update in zip(taken, prepared.update_of, strict=True):
        version = versions[update]
        for rollout in item.group.rollouts:
            if index not in prepared.masked:
                for sequence in rollout.sequences:
                    sampled = sequence.versions[sequence.loss_mask]
                    ages.append(version - sampled)
                    waits.append(np.full(len(sampled), version - item.arrival_version))
            index += 1
    if not ages:
        return StalenessSummary()
    age, wait = np.concatenate(ages), np.concatenate(waits)
    if not len(age):
        return StalenessSummary()
    # A token sampled with a version announced while its group was on the way is not older in flight than 0.
    in_flight = np.maximum(age - wait, 0)
    return StalenessSummary(float(age.mean()), int(age.max()), float(in_flight.mean()), float((age - in_flight).mean()))


def trained_facts(
    prepared: PreparedBatch, skipped_sequence_ids: Sequence[int], *, stepped: Sequence[bool]
) -> TrainedFacts:
    """What became of every rollout and token of the step. A rollout is skipped when all its sequences were.

    ``stepped`` says of every update whether the optimizer stepped; without, nothing of that part was trained.
    """
    causes = dict.fromkeys(
        (s.sequence_id for update, did in zip(prepared.updates, stepped, strict=True) if not did for s in update),
        "step_skipped",
    )
    causes |= dict.fromkeys(skipped_sequence_ids, "skip_threshold")
    rollouts_masked = Counter(prepared.masked.values())
    tokens_masked: Counter[str] = Counter()
    for rollout, cause in prepared.masked.items():
        tokens_masked[cause] += prepared.rollout_tokens[rollout]
    for sequence, cause in causes.items():
        tokens_masked[cause] += prepared.sequence_tokens[sequence]
    fates: dict[int, set[str]] = {}
    for sequence, rollout in prepared.rollout_of.items():
        fates.setdefault(rollout, set()).add(causes.get(sequence, ""))
    rollouts_masked.update(min(fate, key=MASK_CAUSES.index) for fate in fates.values() if "" not in fate)
    return TrainedFacts(
        stepped=any(stepped),
        rollouts_trained=len(prepared.rollout_tokens) - sum(rollouts_masked.values()),
        rollouts_masked=dict(rollouts_masked),
        tokens_trained=sum(prepared.rollout_tokens) - sum(tokens_masked.values()),
        tokens_masked=dict(tokens_masked),
    )
