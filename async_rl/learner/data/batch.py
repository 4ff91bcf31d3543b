"""Turns the groups of a step into sequences to train on, with masks and their causes. The trainer calls it on rank 0.

A sequence is a set of plain arrays. If several causes mask a rollout, the first in the order of ``MASK_CAUSES``
counts. ``with_scores`` adds the log-probabilities that the loss needs, which the engine computes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from async_rl.config.distill import DistillConfig
from async_rl.config.loss import LossConfig
from async_rl.learner.interface import Engine, PolicyScores
from async_rl.learner.sequences import CARRIED, TrainSequence
from async_rl.queue.messages import TakenGroup
from async_rl.records import WITHOUT_REWARD, Group, Rollout, TeacherScores, TokenSequence, column_of, why_parts_misfit
from async_rl.routes import RoutingShape, why_misfit
from async_rl.sampling_mask import SamplingMask, contains, largest_id, select

logger = logging.getLogger(__name__)

MASK_CAUSES = (
    "invalid", "unknown_weights", "quarantined", "failed", "unjudged", "filter", "truncated", "too_long", "best_k",
    "policy_frozen", "stale", "skip_threshold", "loss_function", "step_skipped",
)  # fmt: skip
"""Why a rollout, or some of its tokens, are left out of the loss. The first cause that applies counts:

- ``invalid``: the learner can't train on its data. The queue refuses such groups, so this is a second check.
- ``unknown_weights``: it was sampled with weights that this run did not publish.
- ``quarantined``: its generator's log-probabilities are far from the learner's (``loop.parity``).
- ``failed``: its inference engine, its environment or its reward failed.
- ``unjudged``: the reward says nothing of it (``RewardOutput.is_judged``).
- ``filter``: its group's accuracy is outside ``queue.filter_range``, and ``queue.refill`` is false.
- ``truncated``: it was cut at a token limit (``records.CutLimit``), and ``loss.mask_truncated`` is set.
- ``too_long``: one of its sequences has more than ``Config.longest_sequence`` tokens, so no micro-batch can hold it.
- ``best_k``: it is not among the best ``loss.best_k`` of its group.
- ``policy_frozen``: its step trains only the critic (``critic.freeze_steps``).
- ``stale``: some of its tokens exceed the staleness bound, and ``queue.on_stale`` is "mask". Only these are left out.
- ``skip_threshold``: its ratios are beyond ``loss.skip_threshold``, or a rule of ``loss.rules`` masks all its tokens.
- ``loss_function``: the user's own loss (``loss.function``) masks it, or a behavior logprob of it is not finite.
- ``step_skipped``: its optimizer step (one of ``learner.updates_per_batch``) was skipped.
"""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch:
    """The sequences of one step, divided into mini-batches, and the rollout that each comes from.

    Attributes:
        mini_batches: the sequences to train on, for each optimizer step of an epoch. Advantages are 0 until
            ``with_advantages``.
        rollout_of: for each sequence id, the index of its rollout in the step.
        sequence_tokens: for each sequence id, the number of its tokens under the loss mask.
        arrival_versions: for each sequence id, the newest announced version when its group arrived at the queue.
        group_sizes: number of rollouts of each group. Rollouts are numbered in the step's order, group after group.
        rewards: float64 [R], one per rollout, masked ones included.
        accuracies: float64 [R], one per rollout, masked ones included.
        rollout_tokens: number of sampled tokens of each rollout.
        stale_tokens: number of tokens that are masked as stale, in rollouts that are trained on.
        masked: for each masked rollout, its index and the cause.
        groups: the groups of the step, as the queue sent them.
        reference_kl: mean over trained tokens of the estimated KL(loss.kl_policy || reference), nats. None unless the
            KL is part of the reward or the advantage.
        policy_scores: for each sequence id, what the policy says of it before the batch's first update. Empty if
            nothing needs it (``with_scores``).
        values: for each sequence id, the critic's values before the batch's first update, float32 [its trained tokens].
            Empty without a critic.
        value_targets: for each sequence id, what they should be, float64 [its trained tokens] (``with_advantages``).
    """

    mini_batches: tuple[tuple[TrainSequence, ...], ...]
    rollout_of: Mapping[int, int]
    sequence_tokens: Mapping[int, int]
    arrival_versions: Mapping[int, int]
    group_sizes: tuple[int, ...]
    rewards: np.ndarray
    accuracies: np.ndarray
    rollout_tokens: tuple[int, ...]
    stale_tokens: int
    masked: Mapping[int, str]
    groups: tuple[TakenGroup, ...]
    reference_kl: float | None = None
    policy_scores: Mapping[int, PolicyScores] = field(default_factory=dict)
    values: Mapping[int, np.ndarray] = field(default_factory=dict)
    value_targets: Mapping[int, np.ndarray] = field(default_factory=dict)

    @property
    def sequences(self) -> list[TrainSequence]:
        """The sequences of all mini-batches, in order."""
        return [sequence for mini_batch in self.mini_batches for sequence in mini_batch]

    def with_sequences(self, sequences: Iterable[TrainSequence]) -> PreparedBatch:
        """Return a batch that has only ``sequences``, each in the place of the sequence with the same id."""
        new = {s.sequence_id: s for s in sequences}
        kept = (tuple(new[s.sequence_id] for s in each if s.sequence_id in new) for each in self.mini_batches)
        return replace(self, mini_batches=tuple(kept))


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
    mask_truncated: bool,
    num_updates: int,
    known_weights: Callable[[Group], bool],
    oldest_version: int | None = None,
    vocab_size: int | None = None,
    max_tokens: int | None = None,
    routing: RoutingShape | None = None,
    distill: DistillConfig | None = None,
) -> PreparedBatch:
    """Turn the groups of a step into sequences, in order, in ``num_updates`` mini-batches. Advantages are still 0.

    Their numbers of groups differ by at most one. Masked rollouts give no sequences.

    Args:
        taken: the groups of the step.
        mask_truncated: the value of ``loss.mask_truncated``.
        num_updates: the number of mini-batches, at most the number of groups (``LearnerConfig.num_updates``).
        known_weights: returns whether this run published the weights with which a group was sampled.
        oldest_version: tokens sampled with an earlier version are left out of the loss. None: all tokens stay.
        vocab_size: token ids must be below it. None: no limit.
        max_tokens: ``Config.longest_sequence``; rollouts with a longer sequence are masked. None: no limit.
        routing: the shape of the routes to replay. None: the model's routers choose, and routes are left out.
        distill: the section ``[distill]``. None: there is no teacher, and a teacher's scores are left out.
    """
    builder = _Builder(oldest_version)
    bounds = [-(-len(taken) * number // num_updates) for number in range(num_updates + 1)]
    mini_batches: list[tuple[TrainSequence, ...]] = []
    for start, end in pairwise(bounds):
        sequences: list[TrainSequence] = []
        for item in taken[start:end]:
            trusted = known_weights(item.group)
            for rollout in item.group.rollouts:
                fault = _fault(rollout, item.group.temperature, vocab_size, routing)
                if fault := fault or _teacher_fault(rollout, vocab_size, distill):
                    logger.warning("a group of generator %s can't be trained: %s", item.group.generator_id, fault)
                    cause = "invalid"
                else:
                    cause = _mask_cause(
                        rollout, item, trusted=trusted, mask_truncated=mask_truncated, max_tokens=max_tokens
                    )
                sequences += _sequences(builder, item, rollout, cause, routing=routing, distill=distill)
        mini_batches.append(tuple(sequences))
    rollouts = [rollout for item in taken for rollout in item.group.rollouts]
    _warn_of_too_long([rollouts[index] for index, cause in builder.masked.items() if cause == "too_long"], max_tokens)
    return PreparedBatch(
        mini_batches=tuple(mini_batches),
        rollout_of=builder.rollout_of,
        sequence_tokens=builder.sequence_tokens,
        arrival_versions=builder.arrival_versions,
        group_sizes=tuple(len(item.group.rollouts) for item in taken),
        rewards=_numbers(builder, [r.reward for r in rollouts]),
        accuracies=_numbers(builder, [r.accuracy for r in rollouts]),
        rollout_tokens=tuple(builder.rollout_tokens),
        stale_tokens=builder.stale_tokens,
        masked=builder.masked,
        groups=tuple(taken),
    )


def _numbers(builder: _Builder, values: Sequence[float]) -> np.ndarray:
    """Return float64 [R]: one value for each rollout, 0 for those whose data is invalid."""
    return np.array([0.0 if builder.masked.get(i) == "invalid" else v for i, v in enumerate(values)], dtype=np.float64)


def _fault(rollout: Rollout, temperature: float, vocab_size: int | None, routing: RoutingShape | None) -> str:
    """Return why a rollout can't be trained on, empty if it can. Bad logprobs don't count: the loss leaves them out."""
    if not all(map(math.isfinite, (rollout.reward, rollout.accuracy, temperature))):
        return "its reward, accuracy or temperature is not finite"
    turn_tokens, span_ends = [turn.num_tokens for turn in rollout.turns], [span.end for span in rollout.spans]
    if misfit := why_parts_misfit(rollout.num_sampled, turn_tokens, span_ends):
        return misfit
    for sequence in rollout.sequences:
        ids, mask = sequence.token_ids, sequence.loss_mask
        if not len(ids) or mask[0]:
            return "a sequence is empty, or trains its first token"
        kept = sequence.sampling_mask
        largest = int(ids.max()) if kept is None else max(int(ids.max()), largest_id(kept))
        if ids.min() < 0 or (vocab_size is not None and largest >= vocab_size):
            return f"expected token ids from 0 on and below {vocab_size}, got {int(ids.min())} to {largest}"
        if kept is not None and not contains(kept, ids[mask]).all():
            return "a sampled token is not among those that top-p and top-k kept"
        last = len(mask) - 1 - int(mask[::-1].argmax()) if mask.any() else 0
        if misfit := why_misfit(sequence.routes, routing, last):
            return misfit
    return ""


def _teacher_fault(rollout: Rollout, vocab_size: int | None, distill: DistillConfig | None) -> str:
    """Return why a rollout can't be learned from its teacher, empty if it can or if there is none."""
    if distill is None:
        return ""
    for sequence in rollout.sequences:
        teacher = sequence.teacher
        if teacher is None or teacher.top_k != distill.top_k:
            got = "none" if teacher is None else f"those of {teacher.top_k}"
            return f"expected a teacher's scores with distill.top_k = {distill.top_k}, got {got}"
        if not np.isfinite(teacher.logprobs).all():
            return "a teacher's log-probability is not finite"
        if teacher.top_ids.size and not 0 <= teacher.top_ids.min() <= teacher.top_ids.max() < (vocab_size or 1 << 31):
            return f"expected token ids of a teacher below {vocab_size}"
    return ""


def leave_out(prepared: PreparedBatch, rollouts: Collection[int], cause: str) -> PreparedBatch:
    """Return ``prepared`` with the unmasked rollouts of indices ``rollouts`` masked for ``cause``.

    All their tokens count under ``cause``, even stale ones, so ``cause`` must be before ``stale`` in ``MASK_CAUSES``.
    """
    if not rollouts:
        return prepared
    gone = {sequence for sequence, rollout in prepared.rollout_of.items() if rollout in rollouts}
    sampled = sum(prepared.rollout_tokens[rollout] for rollout in rollouts)
    return replace(
        prepared.with_sequences(s for s in prepared.sequences if s.sequence_id not in gone),
        rollout_of={s: rollout for s, rollout in prepared.rollout_of.items() if s not in gone},
        stale_tokens=prepared.stale_tokens - (sampled - sum(prepared.sequence_tokens[s] for s in gone)),
        masked={**prepared.masked, **dict.fromkeys(rollouts, cause)},
    )


def _warn_of_too_long(rollouts: Sequence[Rollout], max_tokens: int | None) -> None:
    if rollouts:
        longest = max(len(sequence.token_ids) for rollout in rollouts for sequence in rollout.sequences)
        logger.warning(
            "%d answers of this step are left out of the loss (masked/too_long in metrics.jsonl): expected at most "
            "learner.max_tokens x parallel.sequence = %s tokens, got up to %d; raise one of these, or lower "
            "sampling.max_new_tokens",
            len(rollouts),
            max_tokens,
            longest,
        )


def _mask_cause(
    rollout: Rollout, item: TakenGroup, *, trusted: bool, mask_truncated: bool, max_tokens: int | None
) -> str | None:
    if not trusted:
        return "unknown_weights"
    if rollout.finish_reason in WITHOUT_REWARD:
        return "failed" if rollout.finish_reason == "error" else "unjudged"
    if item.masked:
        return "filter"
    if mask_truncated and rollout.finish_reason == "length":
        return "truncated"
    if max_tokens is not None and any(len(sequence.token_ids) > max_tokens for sequence in rollout.sequences):
        return "too_long"
    return None


def _sequences(
    builder: _Builder, item: TakenGroup, rollout: Rollout, cause: str | None, *, routing: RoutingShape | None,
    distill: DistillConfig | None,
) -> list[TrainSequence]:  # fmt: skip
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
                advantages=np.zeros(len(sequence.token_ids), dtype=np.float32),
                temperature=item.group.temperature,
                sampling_mask=_sampling_mask(sequence, mask),
                routes=None if routing is None else sequence.routes,
                **{name: values for name in CARRIED for values in column_of([sequence], name)},
                **({} if distill is None or sequence.teacher is None else _taught(sequence, sequence.teacher, distill)),
            )
        )
        builder.next_id += 1
    return sequences


def _taught(sequence: TokenSequence, teacher: TeacherScores, distill: DistillConfig) -> dict[str, Any]:
    """Return the teacher's scores along the tokens, as fields of ``TrainSequence``."""
    mask, num_tokens = sequence.loss_mask, len(sequence.token_ids)
    logprobs = np.zeros((num_tokens, 1 + distill.top_k), np.float32)
    logprobs[mask] = teacher.logprobs
    fields = {"teacher_logprobs": logprobs[:, 0]}
    if distill.top_k:
        ids = np.zeros((num_tokens, distill.top_k), np.int32)
        ids[mask] = teacher.top_ids
        fields |= {"teacher_top_ids": ids, "teacher_top_logprobs": logprobs[:, 1:]}
    return fields


def _young_enough(sequence: TokenSequence, oldest_version: int | None) -> np.ndarray:
    mask = sequence.loss_mask
    return mask if oldest_version is None else mask & (sequence.versions >= oldest_version)


def _sampling_mask(sequence: TokenSequence, mask: np.ndarray) -> SamplingMask | None:
    if sequence.sampling_mask is None or mask is sequence.loss_mask:
        return sequence.sampling_mask
    return select(sequence.sampling_mask, mask[sequence.loss_mask])


def with_scores(
    prepared: PreparedBatch, engine: Engine, loss: LossConfig, *, num_epochs: int = 1, needs_policy: bool = False
) -> PreparedBatch:
    """Return the batch with the log-probabilities of the reference model and of the policy, if ``loss`` needs them.

    The sequences of all mini-batches are scored at once, because the proximal policy is the one before the *batch's*
    first update. If there is only that update, nothing is scored for it: the proximal policy is the trained one
    (``PolicyInputs``). One forward pass of the policy serves all settings that need one. ``num_epochs`` is the value of
    ``learner.epochs_per_batch``. ``needs_policy`` says that something else needs the policy's.
    """
    if not prepared.sequences:
        return prepared
    if loss.needs_reference:
        reference = engine.score(prepared.sequences, of="reference")
        prepared = prepared.with_sequences(
            replace(s, reference_logprobs=along_tokens(s, reference[s.sequence_id])) for s in prepared.sequences
        )
    needs_proximal = loss.needs_proximal and len(prepared.mini_batches) * num_epochs > 1
    if not needs_proximal and not loss.scores_policy and not needs_policy:
        return prepared
    prepared = replace(prepared, policy_scores=engine.score_policy(prepared.sequences))
    if not needs_proximal:
        return prepared
    return prepared.with_sequences(
        replace(s, proximal_logprobs=along_tokens(s, prepared.policy_scores[s.sequence_id].logprobs))
        for s in prepared.sequences
    )


def along_tokens(sequence: TrainSequence, values: np.ndarray | float) -> np.ndarray:
    """Return float32 [T]: ``values`` (one for all, or one each) at the trained tokens of ``sequence``, 0 elsewhere."""
    along = np.zeros(len(sequence.token_ids), dtype=np.float32)
    along[sequence.loss_mask] = values
    return along
