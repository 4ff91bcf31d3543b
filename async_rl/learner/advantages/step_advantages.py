"""Turn the step's rewards into advantages of its tokens, as ``[loss]`` says. Numpy only.

The trainer calls ``with_advantages`` on rank 0, after the reference model has scored the step (if it is needed) and
before the first update. The order is fixed:

1. Length bonus and KL change the *reward*.
2. The estimator makes advantages of rewards.
3. ``best_k`` chooses among the rollouts of a group.
4. KL changes the *advantage*, token by token.
5. Some estimators (``whitens_tokens``) normalise over all trained tokens.

The formulas are in ``estimators.py``. Shape letter: R = rollouts of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from async_rl.config.loss import ADVANTAGES, LossConfig
from async_rl.config.section import look_up
from async_rl.errors import TrainingError
from async_rl.learner.advantages.estimators import FUNCTIONS, best, kl_estimates, length_bonuses, whitened
from async_rl.learner.batch import PreparedBatch, leave_out
from async_rl.learner.packing import TrainSequence

_NOT_SAMPLED = ("unknown_weights", "failed")
"""Rollouts masked for these causes are not samples of the policy; their rewards enter no baseline."""

TokenKl = Mapping[int, np.ndarray]
"""Sequence id to float64 [its trained tokens], nats: estimates of KL(mu || reference)."""


def with_advantages(
    prepared: PreparedBatch, loss: LossConfig, reference_logprobs: Mapping[int, np.ndarray] | None = None
) -> PreparedBatch:
    """``prepared`` with the advantages that ``loss`` asks for, without the rollouts that ``loss.best_k`` leaves out.

    Baselines are over all rollouts that the policy sampled, masked ones included. The KL is that of the *behavior*
    policy to the reference, over trained tokens. In the reward it is the sum over a rollout (arXiv:1909.08593 section
    2, arXiv:2203.02155), in the advantage each token's own. A rollout that is masked, or whose behavior logprobs are
    not all finite (the loss skips it), has no KL of its own. It counts with its group's mean, so it moves no baseline.

    Args:
        prepared: from ``prepare_batch``.
        loss: of it ``advantage, best_k, length_bonus, kl_coef, kl_estimator, kl_placement``.
        reference_logprobs: sequence id to float32 [its trained tokens], nats; needed where ``kl_coef`` is not 0
            and ``kl_placement`` is reward or advantage.

    Raises:
        ValueError: a reward is not finite; the reference's logprobs are missing, or of another length.
        TrainingError: the reference's logprobs are not finite.
    """
    kl = _token_kl(prepared, loss, reference_logprobs) if loss.is_kl_in_advantages else {}
    groups = _sampled_rollouts(prepared)
    rewards = prepared.rewards.copy()
    if loss.length_bonus:
        num_tokens = np.array(prepared.rollout_tokens)
        for members in groups:
            rewards[members] += length_bonuses(prepared.accuracies[members], num_tokens[members], loss.length_bonus)
    if kl and loss.kl_placement == "reward":
        rewards -= loss.kl_coef * _rollout_kl(prepared, kl, groups)
    advantages = np.zeros_like(rewards)
    estimate = look_up(FUNCTIONS, loss.advantage, "loss.advantage")
    is_over_step = ADVANTAGES[loss.advantage].over_step
    for members in [np.concatenate([np.zeros(0, np.int64), *groups])] if is_over_step else groups:
        advantages[members] = estimate(rewards[members])
    if loss.best_k is not None:
        prepared = leave_out(prepared, _all_but_best(prepared, advantages, groups, loss.best_k), "best_k")
    prepared = _with_token_advantages(prepared, advantages, loss, kl if loss.kl_placement == "advantage" else {})
    return replace(prepared, reference_kl=_mean(kl)) if kl else prepared


def _sampled_rollouts(prepared: PreparedBatch) -> list[np.ndarray]:
    """Of every group, the indices (int64) of its rollouts that count in baselines."""
    not_sampled = {index for index, cause in prepared.masked.items() if cause in _NOT_SAMPLED}
    bounds = list(accumulate(prepared.group_sizes, initial=0))
    return [
        np.array([i for i in range(start, end) if i not in not_sampled], dtype=np.int64)
        for start, end in pairwise(bounds)
    ]


def _with_token_advantages(
    prepared: PreparedBatch, advantages_R: np.ndarray, loss: LossConfig, kl: TokenKl
) -> PreparedBatch:
    sequences = [s for update in prepared.updates for s in update]
    if not sequences:
        return prepared
    lengths = [prepared.sequence_tokens[s.sequence_id] for s in sequences]
    tokens = np.repeat(advantages_R[[prepared.rollout_of[s.sequence_id] for s in sequences]], lengths)
    if kl:
        # A sequence without a KL leaves the loss; its values only have to be finite.
        parts = [kl.get(s.sequence_id, np.zeros(n)) for s, n in zip(sequences, lengths, strict=True)]
        tokens -= loss.kl_coef * np.concatenate(parts)
    if ADVANTAGES[loss.advantage].whitens_tokens:
        tokens = whitened(tokens)
    ends = accumulate(lengths)
    filled = {
        s.sequence_id: replace(s, advantages=_on_trained(s, tokens[end - n : end]))
        for s, n, end in zip(sequences, lengths, ends, strict=True)
    }
    return replace(prepared, updates=tuple(tuple(filled[s.sequence_id] for s in update) for update in prepared.updates))


def _on_trained(sequence: TrainSequence, values: np.ndarray) -> np.ndarray:
    """float32 [T]: ``values`` on the trained tokens, 0 elsewhere."""
    advantages = np.zeros(len(sequence.token_ids), dtype=np.float32)
    advantages[sequence.loss_mask] = values
    return advantages


def _all_but_best(prepared: PreparedBatch, advantages_R: np.ndarray, groups: Sequence[np.ndarray], k: int) -> list[int]:
    """Rollouts that are not among the ``k`` best of their group. Masked ones take none of the ``k`` places.

    The order is that of the advantages, which is also that of the rewards within a group.
    """
    beyond: list[int] = []
    for members in groups:
        candidates = np.array([i for i in members if i not in prepared.masked], dtype=np.int64)
        beyond += candidates[~best(advantages_R[candidates], k)].tolist()
    return beyond


def _token_kl(
    prepared: PreparedBatch, loss: LossConfig, reference_logprobs: Mapping[int, np.ndarray] | None
) -> dict[int, np.ndarray]:
    """Estimates of every sequence's token KL; sequences whose behavior logprobs are not all finite are left out."""
    sequences = [s for update in prepared.updates for s in update]
    if sequences and reference_logprobs is None:
        raise ValueError(f"loss.kl_placement = {loss.kl_placement!r} needs the reference's logprobs, got none")
    reference_logprobs = reference_logprobs or {}
    kl: dict[int, np.ndarray] = {}
    for sequence in sequences:
        behavior = sequence.behavior_logprobs[sequence.loss_mask]
        reference = reference_logprobs[sequence.sequence_id]
        if len(reference) != len(behavior):
            raise ValueError(
                f"sequence {sequence.sequence_id}: expected the reference's logprobs of its {len(behavior)} trained "
                f"tokens, got {len(reference)}"
            )
        if not np.isfinite(reference).all():
            raise TrainingError(
                f"the reference model gave logprobs that are not finite (sequence {sequence.sequence_id} of the step); "
                f"check loss.kl_reference"
            )
        if np.isfinite(behavior).all():
            kl[sequence.sequence_id] = kl_estimates(behavior.astype(np.float64) - reference, loss.kl_estimator)
    return kl


def _rollout_kl(prepared: PreparedBatch, kl: TokenKl, groups: Sequence[np.ndarray]) -> np.ndarray:
    """float64 [R], nats: the sum over each rollout's tokens; the group's mean for one without."""
    sums = np.zeros(len(prepared.rewards))
    scored = np.zeros(len(prepared.rewards), dtype=np.bool_)
    scored[list(prepared.rollout_of.values())] = True
    for sequence_id, rollout in prepared.rollout_of.items():
        if sequence_id in kl:
            sums[rollout] += kl[sequence_id].sum()
        else:
            scored[rollout] = False
    for members in groups:
        known = members[scored[members]]
        sums[members[~scored[members]]] = sums[known].mean() if len(known) else 0.0
    return sums


def _mean(kl: TokenKl) -> float:
    values = np.concatenate(list(kl.values()))
    return float(values.mean()) if len(values) else 0.0
