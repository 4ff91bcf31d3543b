"""Turns the rewards of a batch into advantages as ``[loss]`` says. It runs on rank 0, in numpy.

The trainer calls ``with_advantages`` before the first update of a step. It takes a batch with rewards, and returns the
batch with an advantage for every trained token. The order is fixed:

1. The length bonus and the KL change the *reward*.
2. The estimator, or the user's own function (``own_advantage.py``), turns rewards into advantages.
3. ``best_k`` chooses among the rollouts of a group.
4. The KL changes the *advantage*, token by token.
5. Some estimators (``whitens_tokens``, and a critic's) normalise the advantages over all trained tokens.

A teacher's advantages come last and on the device, because they need the trained policy (``policy.with_teacher``).

To add an estimator, add a function here with an entry in ``ADVANTAGE_FUNCTIONS``, and an entry in the config's
``ADVANTAGES``. Shape letters: n = rollouts of one group (or of a whole step), N = tokens, R = rollouts of the step. All
values are float64. If the rewards say nothing (a group of one, equal rewards), an advantage is exactly 0, never NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import torch

from async_rl.config.critic import CriticConfig
from async_rl.config.loss import LossConfig
from async_rl.config.loss_names import ADVANTAGES
from async_rl.config.reward import RewardConfig
from async_rl.config.section import look_up
from async_rl.errors import TrainingError
from async_rl.learner.data.batch import PreparedBatch, along_tokens, leave_out
from async_rl.learner.losses.credit import Earned, by_critic, earned_rewards
from async_rl.learner.losses.own_advantage import AdvantageInputs, OwnAdvantage
from async_rl.learner.losses.parts import kl_estimate
from async_rl.records import NO_VERSION

STD_FLOOR = 1e-4
"""Added to a standard deviation, in its units, so that nearly equal rewards give no huge advantages."""
_ROUNDING = 1e-9
"""Advantages below this are 0, but for rounding."""

_WITHOUT_REWARD = ("invalid", "unknown_weights", "quarantined", "failed", "unjudged", "truncated")
"""Rollouts masked for these causes enter no baseline: they are not samples of the policy, or their reward says nothing
about an answer. Truncated answers often get a low reward for their length. In a baseline they would give wrong answers
of their group positive advantages."""

TokenKl = Mapping[int, np.ndarray]
"""Sequence id to float64 [its trained tokens], nats: estimates of KL(loss.kl_policy || reference)."""


def with_advantages(
    prepared: PreparedBatch, loss: LossConfig, *, own: OwnAdvantage | None = None, version: int = 0,
    critic: CriticConfig | None = None, reward: RewardConfig | None = None,
) -> PreparedBatch:  # fmt: skip
    """Return ``prepared`` with advantages according to ``loss``. Rollouts that ``loss.best_k`` excludes are masked.

    Baselines include all rollouts except those masked for a cause of ``_WITHOUT_REWARD``. The KL is that of
    ``loss.kl_policy`` to the reference, over trained tokens, which the behavior policy sampled. The reward changes by
    the sum over a rollout (arXiv:1909.08593 section 2, arXiv:2203.02155), a token's advantage by the KL of that token.
    With advantages for turns or tokens, the reward of every token changes by its own KL.
    A rollout has no known KL if it is masked or if its logprobs are not all finite (the loss skips it). It gets its
    group's mean KL instead, so it moves no baseline.

    Args:
        prepared: the batch, scored by the models that KL and baseline need (``batch.with_scores``).
        loss: only the keys ``advantage, best_k, length_bonus, kl_coef, kl_estimator, kl_placement, kl_policy`` are
            read.
        own: the function of ``loss.advantage_function``. None: the estimator of ``loss.advantage``.
        version: the learner's version, for the ages of rollouts that ``own`` gets.
        critic: the section ``[critic]``, for ``advantage = "gae"``. Then ``prepared`` has the critic's values.
        reward: the section ``[reward]``, for the weights of the reward's parts. None: they are 1.

    Raises:
        ValueError: a reward is not finite.
        OwnCodeError: the user's function fails.
        TrainingError: the reference's logprobs are not finite.
    """
    kl = _token_kl(prepared, loss) if loss.is_kl_in_advantages else {}
    groups = _baseline_rollouts(prepared)
    rewards = prepared.rewards.copy()
    if loss.length_bonus:
        num_tokens = np.array(prepared.rollout_tokens)
        for members in groups:
            rewards[members] += length_bonuses(prepared.accuracies[members], num_tokens[members], loss.length_bonus)
    in_reward = kl if loss.kl_placement == "reward" else {}
    if in_reward:
        rewards -= loss.kl_coef * _rollout_kl(prepared, kl, groups)
    penalties = {sequence_id: loss.kl_coef * values for sequence_id, values in in_reward.items()}
    if own is not None:
        advantages = own(_own_inputs(prepared, rewards, groups, loss, version))
    elif loss.has_critic:
        assert critic is not None
        prepared, advantages = by_critic(prepared, list(earned_rewards(prepared, rewards, penalties)), critic)
    elif ADVANTAGES[loss.advantage].per_turn:
        advantages = _of_turns(list(earned_rewards(prepared, rewards, penalties)), groups, loss)
    else:
        if ADVANTAGES[loss.advantage].per_part:
            rewards = _normalised_parts(prepared, groups, reward)
        advantages = _estimated(prepared, rewards, groups, loss)
    if loss.best_k is not None:
        assert isinstance(advantages, np.ndarray)  # the call of the user's function has checked it
        prepared = leave_out(prepared, _all_but_best(prepared, advantages, groups, loss.best_k), "best_k")
    whitens = ADVANTAGES[loss.advantage].whitens_tokens or (loss.has_critic and critic is not None and critic.whiten)
    in_advantages = kl if loss.kl_placement == "advantage" else {}
    prepared = _with_token_advantages(prepared, advantages, loss, in_advantages, whitens=whitens)
    if not kl:
        return prepared
    values = np.concatenate(list(kl.values()))
    return replace(prepared, reference_kl=float(values.mean()) if len(values) else 0.0)


def _estimated(
    prepared: PreparedBatch, rewards_R: np.ndarray, groups: Sequence[np.ndarray], loss: LossConfig
) -> np.ndarray:
    """Return the advantages of ``loss.advantage``, float64 [R]; 0 for rollouts that are in no baseline."""
    advantages = np.zeros_like(rewards_R)
    estimate = look_up(ADVANTAGE_FUNCTIONS, loss.advantage, "loss.advantage")
    row = ADVANTAGES[loss.advantage]
    log_weights = _log_weights(prepared) if row.weighs_rollouts else None
    for members in [np.concatenate([np.zeros(0, np.int64), *groups])] if row.over_step else groups:
        weights = () if log_weights is None else (log_weights[members],)
        advantages[members] = estimate(rewards_R[members], *weights)
    return advantages


def _normalised_parts(prepared: PreparedBatch, groups: Sequence[np.ndarray], reward: RewardConfig | None) -> np.ndarray:
    """Return the weighted sum of each rollout's reward parts, each normalised within its group (GDPO,
    arXiv:2601.05242), float64 [R].

    As in TRL 1.16, a rollout without a part does not count in that part's mean and standard deviation, and gets 0 for
    it. verl 0.9.1 has all parts, and 1e-6 in place of ``STD_FLOOR``. Both normalise values without their weights, which
    our parts contain. The sum is normalised like ``global_norm``: TRL does so too, verl over trained tokens.
    """
    parts = [rollout.reward_parts for item in prepared.groups for rollout in item.group.rollouts]
    sums = np.zeros_like(prepared.rewards)
    for members in groups:
        for name in dict.fromkeys(name for i in members for name in parts[i]):
            having = np.array([i for i in members if name in parts[i]])
            weight = 1.0 if reward is None else reward.weight_of(name)
            sums[having] += weight * group_normalised(np.array([parts[i][name] / weight for i in having]))
    return sums


def _of_turns(earned: Sequence[Earned], groups: Sequence[np.ndarray], loss: LossConfig) -> list[np.ndarray]:
    """Return the advantages of turns, for each rollout float64 [its trained tokens].

    The reward from a turn to the end is compared with that of the group's other rollouts that have this turn. What was
    earned before the turn does not count, because the turn can't change it.
    """
    estimate = look_up(ADVANTAGE_FUNCTIONS, loss.advantage, "loss.advantage")
    tokens, to_go = [np.zeros(len(of.rewards)) for of in earned], [of.to_go for of in earned]
    for members in groups:
        for turn in range(max((len(earned[i].starts) for i in members), default=0)):
            present = [i for i in members if turn < len(earned[i].starts)]
            values = estimate(np.array([to_go[i][turn] for i in present]))
            for i, value in zip(present, values.tolist(), strict=True):
                bounds = (*earned[i].starts, len(tokens[i]))
                tokens[i][bounds[turn] : bounds[turn + 1]] = value
    return [values[of.is_trained] for values, of in zip(tokens, earned, strict=True)]


def _own_inputs(
    prepared: PreparedBatch, rewards_R: np.ndarray, groups: Sequence[np.ndarray], loss: LossConfig, version: int
) -> AdvantageInputs:
    """Return what the user's function gets. ``groups`` has the rollouts that count in baselines."""
    num = len(rewards_R)
    rollouts = [(item, rollout) for item in prepared.groups for rollout in item.group.rollouts]
    oldest = np.array([rollout.oldest_version for _, rollout in rollouts], np.int64)
    trained = np.zeros(num, np.int64)
    for sequence_id, index in prepared.rollout_of.items():
        trained[index] += prepared.sequence_tokens[sequence_id]
    in_baseline = np.zeros(num, np.bool_)
    in_baseline[np.concatenate([np.zeros(0, np.int64), *groups])] = True
    return AdvantageInputs(
        rewards=rewards_R,
        accuracies=prepared.accuracies,
        group_sizes=prepared.group_sizes,
        num_sampled=np.array(prepared.rollout_tokens),
        num_trained=trained,
        lag=np.where(oldest == NO_VERSION, 0, version - oldest),
        masked=tuple(prepared.masked.get(index, "") for index in range(num)),
        in_baseline=in_baseline,
        generator_ids=tuple(item.group.generator_id for item, _ in rollouts),
        rows=np.array([item.prompt.row for item, _ in rollouts]),
        settings=loss,
    )


def group_normalised(rewards: np.ndarray) -> np.ndarray:
    """Return GRPO's advantage (arXiv:2402.03300): ``(r - mean) / (std + 1e-4)``, with the unbiased std (n - 1).

    Mean and std are over one group. ``global_norm`` calls this with all rollouts of a step. The paper does not define
    the advantage for a group of one or for equal rewards. It is 0 here.

    Args:
        rewards: float [n], reward units, one per rollout.

    Returns:
        float64 [n], in standard deviations.

    Raises:
        ValueError: ``rewards`` holds NaN or infinity.
    """
    centred = group_centred(rewards)
    if not centred.any():
        return centred
    return centred / (np.sqrt(np.dot(centred, centred) / (len(centred) - 1)) + STD_FLOOR)


def group_centred(rewards: np.ndarray) -> np.ndarray:
    """Return Dr. GRPO's advantage (arXiv:2503.20783): ``r - mean``, float64 [n], reward units.

    Raises:
        ValueError: ``rewards`` holds NaN or infinity.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"expected finite rewards, got {values.tolist()}; fix the reward function")
    return _centred(values)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Return RLOO's advantage (arXiv:2402.14740): ``r`` minus the mean of the *other* rewards of its group.

    It is computed as ``(r - mean) n / (n - 1)``, which is the same. The result is float64 [n], in reward units.

    Raises:
        ValueError: ``rewards`` holds NaN or infinity.
    """
    centred = group_centred(rewards)
    return centred * (len(centred) / max(1, len(centred) - 1))


def off_policy_optimal(rewards: np.ndarray, log_weights: np.ndarray | None = None) -> np.ndarray:
    """Return ``r - b``, where b is VCPO's baseline (arXiv:2602.17616): ``sum w^2 n r / sum w^2 n`` over the group.

    It has the lowest variance of the gradient under importance weights w = pi/mu of whole answers, where n is the
    squared norm of the gradient of log pi(answer). Here n is the number of the answer's trained tokens, as in OPO
    (arXiv:2505.23585), which is exact if the gradients of tokens are orthogonal and of equal norm: exact norms need one
    backward pass per answer. On policy this is OPO's mean weighted by length. Only ratios of weights matter, so they
    are scaled by the largest and nothing is clamped.

    Args:
        rewards: float [n], reward units, one per rollout.
        log_weights: float64 [n], ``log(w^2 n)``; -inf leaves a rollout out of the baseline. None: equal weights.

    Returns:
        float64 [n], reward units. Zeros if no rollout has a weight.

    Raises:
        ValueError: ``rewards`` holds NaN or infinity.
    """
    centred = group_centred(rewards)
    if not centred.any() or log_weights is None:
        return centred
    highest = log_weights.max()
    if highest == -np.inf:
        return np.zeros_like(centred)
    weights = np.exp(log_weights - highest)
    return centred - np.dot(weights, centred) / weights.sum()


ADVANTAGE_FUNCTIONS: Mapping[str, Callable[..., np.ndarray]] = {
    "group_norm": group_normalised,
    "group_mean": group_centred,
    "leave_one_out": leave_one_out,
    "global_norm": group_normalised,
    "per_part_norm": group_normalised,
    "reinforce_pp": group_centred,
    "off_policy_optimal": off_policy_optimal,
    "per_turn_mean": group_centred,
    "per_turn_norm": group_normalised,
}
"""``loss.advantage`` -> rewards [n] -> advantages, float64 [n].

The row of the same name in ``config.loss_names.ADVANTAGES`` says whether n is a group, the whole step, or the rollouts
of a group that have a certain turn, and whether the function also takes ``log_weights`` [n].
"""


def _log_weights(prepared: PreparedBatch) -> np.ndarray:
    """Return ``log(w^2 n)`` of each rollout (``off_policy_optimal``), float64 [R].

    It is -inf for a rollout that is masked, has no trained token, or has logprobs that are not finite: the loss leaves
    all of these out.
    """
    log_ratios, tokens = np.zeros(len(prepared.rewards)), np.zeros(len(prepared.rewards))
    for sequence in prepared.sequences:
        rollout = prepared.rollout_of[sequence.sequence_id]
        policy = prepared.policy_scores[sequence.sequence_id].logprobs.astype(np.float64)
        log_ratios[rollout] += (policy - sequence.behavior_logprobs[sequence.loss_mask]).sum()
        tokens[rollout] += len(policy)
    known = np.isfinite(log_ratios) & (tokens > 0)
    log_weights = np.full(len(tokens), -np.inf)
    log_weights[known] = 2 * log_ratios[known] + np.log(tokens[known])
    return log_weights


def whitened(values: np.ndarray) -> np.ndarray:
    """Normalise over tokens as REINFORCE++ does (arXiv:2501.03262): ``(v - mean) / (std + 1e-4)``, std with 1 / N.

    Args:
        values: float64 [N].

    Returns:
        float64 [N]. Zeros if all values are equal.
    """
    centred = _centred(values)
    if not centred.any():
        return centred
    return centred / (np.sqrt(np.dot(centred, centred) / len(centred)) + STD_FLOOR)


def _centred(values: np.ndarray) -> np.ndarray:
    # Compare the values themselves: the rounded mean of equal floats may differ from them.
    if len(values) < 2 or values.min() == values.max():
        return np.zeros_like(values)
    return values - values.sum() / len(values)


def length_bonuses(accuracies: np.ndarray, num_tokens: np.ndarray, bonus: float) -> np.ndarray:
    """Return AGPO's extra reward for short right answers (arXiv:2503.15952v1): ``bonus (1 - (l - min) / (max - min))``.

    Only right answers (accuracy 1) get a bonus. l is the length of the answer; min and max are over the lengths of the
    group's right answers. No answer gets a bonus if all or none are right, because the bonus would reward only length.
    The same holds if all right answers have the same length (0 / 0).

    Args:
        accuracies: float [n], of one group.
        num_tokens: int [n], sampled tokens of each answer.
        bonus: the bonus of the shortest right answer, reward units.

    Returns:
        float64 [n], reward units.
    """
    bonuses = np.zeros(len(accuracies))
    right = accuracies >= 1.0
    if right.all() or not right.any():
        return bonuses
    lengths = num_tokens[right].astype(np.float64)
    span = lengths.max() - lengths.min()
    if span:
        bonuses[right] = bonus * (1.0 - (lengths - lengths.min()) / span)
    return bonuses


def best(values: np.ndarray, k: int) -> np.ndarray:
    """Return bool [n], True for the ``k`` highest values. Of equal values the earlier ones are chosen."""
    chosen = np.zeros(len(values), dtype=np.bool_)
    chosen[np.argsort(-values, kind="stable")[:k]] = True
    return chosen


def _all_but_best(prepared: PreparedBatch, advantages_R: np.ndarray, groups: Sequence[np.ndarray], k: int) -> list[int]:
    """Return the indices of rollouts that are not among the ``k`` best of their group. Masked rollouts are left out.

    The best rollouts are those with the highest advantage, which within a group is also the order of the rewards.
    """
    beyond: list[int] = []
    for members in groups:
        candidates = np.array([i for i in members if i not in prepared.masked], dtype=np.int64)
        beyond += candidates[~best(advantages_R[candidates], k)].tolist()
    return beyond


def agreement(prepared: PreparedBatch) -> float | None:
    """Return whether more accurate answers get higher advantages: 1 if always, 0 if by chance, -1 if always lower ones.

    It is Goodman and Kruskal's gamma over the pairs of answers to one prompt that differ in both. An answer's advantage
    is the mean over its trained tokens. None without such a pair.
    """
    of_rollout: dict[int, list[np.ndarray]] = {}
    for sequence in prepared.sequences:
        of_rollout.setdefault(prepared.rollout_of[sequence.sequence_id], []).append(
            sequence.advantages[sequence.loss_mask]
        )
    means = np.full(len(prepared.rewards), np.nan)
    for index, parts in of_rollout.items():
        if tokens := sum(map(len, parts)):
            means[index] = sum(float(part.sum(dtype=np.float64)) for part in parts) / tokens
    signs = np.zeros(0)
    for start, end in pairwise(accumulate(prepared.group_sizes, initial=0)):
        advantages, accuracies = means[start:end], prepared.accuracies[start:end]
        pairs = np.sign(np.subtract.outer(advantages, advantages) * np.subtract.outer(accuracies, accuracies))
        signs = np.append(signs, pairs[np.isfinite(pairs) & (pairs != 0)])
    return float(signs.mean()) if len(signs) else None


def zero_groups(prepared: PreparedBatch) -> float | None:
    """Return the share of the groups whose trained tokens all have the advantage 0. None without trained tokens."""
    group_of = np.repeat(np.arange(len(prepared.group_sizes)), prepared.group_sizes)
    largest: dict[int, float] = {}
    for sequence in prepared.sequences:
        group, advantages = int(group_of[prepared.rollout_of[sequence.sequence_id]]), sequence.advantages
        highest = float(np.abs(advantages[sequence.loss_mask]).max(initial=0.0))
        largest[group] = max(largest.get(group, 0.0), highest)
    return sum(value < _ROUNDING for value in largest.values()) / len(largest) if largest else None


def _baseline_rollouts(prepared: PreparedBatch) -> list[np.ndarray]:
    """Return, for each group, the indices (int64) of the rollouts that count in the group's baseline."""
    left_out = {index for index, cause in prepared.masked.items() if cause in _WITHOUT_REWARD}
    bounds = list(accumulate(prepared.group_sizes, initial=0))
    return [
        np.array([i for i in range(start, end) if i not in left_out], dtype=np.int64) for start, end in pairwise(bounds)
    ]


def _with_token_advantages(
    prepared: PreparedBatch, advantages: np.ndarray | Sequence[np.ndarray], loss: LossConfig, kl: TokenKl, *,
    whitens: bool,
) -> PreparedBatch:  # fmt: skip
    """Give every trained token its advantage. ``advantages`` has one for each rollout, [R], or for each trained token
    of each rollout, whose sequences are in order.
    """
    sequences = prepared.sequences
    if not sequences:
        return prepared
    lengths = [prepared.sequence_tokens[s.sequence_id] for s in sequences]
    if isinstance(advantages, np.ndarray):
        tokens = np.repeat(advantages[[prepared.rollout_of[s.sequence_id] for s in sequences]], lengths)
    else:
        # Sequences are in the order of the rollouts, so their tokens are too.
        tokens = np.concatenate(
            [advantages[i] for i in dict.fromkeys(prepared.rollout_of[s.sequence_id] for s in sequences)]
        )
    if kl:
        # The loss skips a sequence that has no KL, so any finite advantages will do.
        values = [kl.get(s.sequence_id, np.zeros(n)) for s, n in zip(sequences, lengths, strict=True)]
        tokens -= loss.kl_coef * np.concatenate(values)
    if whitens:
        tokens = whitened(tokens)
    parts = np.split(tokens, np.cumsum(lengths)[:-1])
    return prepared.with_sequences(
        replace(s, advantages=along_tokens(s, part)) for s, part in zip(sequences, parts, strict=True)
    )


def _token_kl(prepared: PreparedBatch, loss: LossConfig) -> dict[int, np.ndarray]:
    """Return the KL estimates of each sequence's trained tokens, by sequence id.

    Sequences whose logprobs of ``loss.kl_policy`` are not all finite are left out.
    """
    kl: dict[int, np.ndarray] = {}
    for sequence in prepared.sequences:
        logprobs = sequence.behavior_logprobs[sequence.loss_mask]
        if loss.kl_policy == "trained":
            logprobs = prepared.policy_scores[sequence.sequence_id].logprobs
        reference = sequence.reference_logprobs[sequence.loss_mask]
        if not np.isfinite(reference).all():
            raise TrainingError(
                f"expected finite log-probabilities from the reference model, got NaN or infinity for sequence "
                f"{sequence.sequence_id} of the step; check the model of loss.kl_reference (if unset, model.path)"
            )
        if np.isfinite(logprobs).all():
            log_ratio = torch.from_numpy(logprobs.astype(np.float64) - reference)
            kl[sequence.sequence_id] = kl_estimate(log_ratio, loss.kl_estimator).numpy()
    return kl


def _rollout_kl(prepared: PreparedBatch, kl: TokenKl, groups: Sequence[np.ndarray]) -> np.ndarray:
    """Return each rollout's KL, summed over its tokens, float64 [R], nats. A rollout without one gets its group's
    mean.
    """
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
