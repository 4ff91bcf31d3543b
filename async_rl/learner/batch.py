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
from async_rl.records import Group, Rollout, TokenSequence

MASK_CAUSES = ("unknown_weights", "failed", "filter", "truncated", "stale", "skip_threshold", "step_skipped")
"""Why a rollout, or some of its tokens, leave the loss: sampled by weights this run did not publish; its engine failed;
its group's accuracy is outside ``queue.filter_range`` with ``queue.refill = false``; cut at ``max_new_tokens``; tokens
above the staleness bound under ``queue.on_stale = "mask"``; ratio over the threshold; its optimizer step was skipped
(the whole batch's, or one of ``learner.updates_per_batch``)."""

Advantages = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch:
    """One step's sequences, split into ``updates_per_batch`` parts, and where each came from.

    ``rollout_of``, ``sequence_tokens`` and ``arrival_versions`` map a sequence id to its rollout's index in the step,
    to its tokens under the loss mask, and to the newest announced version when its group arrived. ``rollout_tokens``
    are all sampled ones; ``stale_tokens`` of them were masked in rollouts that are trained on. ``masked`` maps a
    rollout's index to its cause.
    """

    updates: tuple[tuple[TrainSequence, ...], ...]
    rollout_of: Mapping[int, int]
    sequence_tokens: Mapping[int, int]
    arrival_versions: Mapping[int, int]
    rollout_tokens: tuple[int, ...]
    stale_tokens: int
    masked: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class StalenessSummary:
    """Of the tokens that are trained on, in versions: at training, and its parts before and after arrival."""

    mean: float = 0.0
    max: int = 0
    in_flight_mean: float = 0.0
    in_queue_mean: float = 0.0


@dataclass(slots=True)
class _Builder:
    oldest_version: int | None
    next_id: int = 0
    rollout_of: dict[int, int] = field(default_factory=dict)
    sequence_tokens: dict[int, int] = field(default_factory=dict)
    arrival_versions: dict[int, int] = field(default_factory=dict)
    rollout_tokens: list[int] = field(default_factory=list)
    stale_tokens: int = 0
    masked: dict[int, str] = field(default_factory=dict)


def prepare_batch(
    taken: Sequence[TakenGroup],
    *,
    advantages: Advantages,
    mask_truncated: bool,
    num_updates: int,
    known_weights: Callable[[Group], bool],
    oldest_version: int | None = None,
) -> PreparedBatch:
    """Sequences of ``taken``, in order, in ``num_updates`` equal parts. Masked rollouts still count in baselines.

    Tokens that a version before ``oldest_version`` sampled leave the loss (none: all stay).
    """
    builder = _Builder(oldest_version)
    per_update = max(1, len(taken) // num_updates)
    updates: list[tuple[TrainSequence, ...]] = []
    for start in range(0, len(taken), per_update):
        sequences: list[TrainSequence] = []
        for item in taken[start : start + per_update]:
            rewards = np.array([r.reward for r in item.group.rollouts], dtype=np.float64)
            trusted = known_weights(item.group)
            for rollout, advantage in zip(item.group.rollouts, advantages(rewards), strict=True):
                cause = _mask_cause(rollout, item, trusted=trusted, mask_truncated=mask_truncated)
                sequences += _sequences(builder, item, rollout, float(advantage), cause)
        updates.append(tuple(sequences))
    return PreparedBatch(
        updates=tuple(updates),
        rollout_of=builder.rollout_of,
        sequence_tokens=builder.sequence_tokens,
        arrival_versions=builder.arrival_versions,
        rollout_tokens=tuple(builder.rollout_tokens),
        stale_tokens=builder.stale_tokens,
        masked=builder.masked,
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
    builder: _Builder, item: TakenGroup, rollout: Rollout, advantage: float, cause: str | None
) -> list[TrainSequence]:
    index, sampled = len(builder.rollout_tokens), rollout.num_sampled
    builder.rollout_tokens.append(sampled)
    masks = [_young_enough(sequence, builder.oldest_version) for sequence in rollout.sequences]
    counts = [int(np.count_nonzero(mask)) for mask in masks]
    if cause is None and sampled and not sum(counts):
        cause = "stale"
    if cause is not None:
        builder.masked[index] = cause
        return []
    builder.stale_tokens += sampled - sum(counts)
    sequences: list[TrainSequence] = []
    for sequence, mask, count in zip(rollout.sequences, masks, counts, strict=True):
        builder.rollout_of[builder.next_id] = index
        builder.sequence_tokens[builder.next_id] = count
        builder.arrival_versions[builder.next_id] = item.arrival_version
        sequences.append(
            TrainSequence(
                sequence_id=builder.next_id,
                token_ids=sequence.token_ids,
                loss_mask=mask,
                behavior_logprobs=sequence.behavior_logprobs,
                versions=sequence.versions,
                advantages=np.full(len(sequence.token_ids), advantage, dtype=np.float32),
                temperature=item.group.temperature,
            )
        )
        builder.next_id += 1
    return sequences


def _young_enough(sequence: TokenSequence, oldest_version: int | None) -> np.ndarray:
    mask = sequence.loss_mask
    return mask if oldest_version is None else mask & (sequence.versions >= oldest_version)


def check_staleness(prepared: PreparedBatch, *, version: int, max_staleness: int) -> None:
    """The learner's own check of what it is about to train on; ``version`` is the one that trains last on the batch.

    Raises:
        StaleRolloutError: a token is above the bound (a bug of ours, never trained on).
    """
    sequences = [s for update in prepared.updates for s in update if prepared.sequence_tokens[s.sequence_id]]
    if not sequences:
        return
    oldest = int(np.concatenate([s.versions[s.loss_mask] for s in sequences]).min())
    if version - oldest > max_staleness:
        raise StaleRolloutError(
            f"the queue handed over a token that is {version - oldest} versions old, limit {max_staleness} (sampled at "
            f"{oldest}, learner at {version})"
        )


def sampling_versions(group: Group) -> set[int]:
    """Every version that sampled a token of the group."""
    masked = [s.versions[s.loss_mask] for r in group.rollouts for s in r.sequences]
    return set(np.unique(np.concatenate(masked)).tolist()) if masked else set()


def staleness_summary(prepared: PreparedBatch, *, versions: Sequence[int]) -> StalenessSummary:
    """Token-weighted staleness of what ``prepared`` trains on, each update at its own of ``versions``."""
    ages, waits = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for sequences, version in zip(prepared.updates, versions, strict=True):
        counts = [prepared.sequence_tokens[s.sequence_id] for s in sequences]
        arrivals = [prepared.arrival_versions[s.sequence_id] for s in sequences]
        ages += [version - s.versions[s.loss_mask] for s in sequences]
        waits.append(version - np.repeat(np.array(arrivals, dtype=np.int64), counts))
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
    if prepared.stale_tokens:
        tokens_masked["stale"] += prepared.stale_tokens
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
