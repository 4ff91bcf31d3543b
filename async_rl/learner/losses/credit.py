"""Credit for single tokens: on which token a rollout's reward is earned, and what a critic makes of it.

A rollout is one episode of a Markov decision process. Its steps are the tokens that the policy sampled, in order, over
all turns and token sequences; tokens of the prompt and of the environment belong to the states between them. The
episode ends with the last sampled token: its value after that is 0. This holds for an answer that was cut at
``sampling.max_new_tokens``, too: the limit belongs to the task, and the reward function has judged the cut answer, so
nothing is bootstrapped there. (``loss.mask_truncated`` leaves such answers out of policy and critic.)

``advantages.py`` calls this on rank 0. Pure, numpy, float64. Shape letters: n = sampled tokens of a rollout, N = those
of them that are trained, R = rollouts of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from async_rl.config.critic import CriticConfig
from async_rl.learner.data.batch import PreparedBatch
from async_rl.records import Rollout


class Earned(NamedTuple):
    """Where one rollout earned its reward.

    Attributes:
        rewards: float64 [n], reward units, of each sampled token.
        total: the reward of the rollout, their sum.
        is_trained: bool [n], False at tokens that are not trained: all of a masked rollout, and stale ones.
        starts: the places in n where turns, or spans of a process reward, begin. (0,) if the rollout has neither.
    """

    rewards: np.ndarray
    total: float
    is_trained: np.ndarray
    starts: tuple[int, ...]

    @property
    def to_go(self) -> np.ndarray:
        """float64, the reward from each of ``starts`` to the end of the rollout. The first is exactly ``total``."""
        before = np.concatenate([[0.0], np.cumsum(self.rewards)])
        return self.total - before[list(self.starts)]


def earned_rewards(
    prepared: PreparedBatch, rewards_R: np.ndarray, penalties: Mapping[int, np.ndarray]
) -> Iterator[Earned]:
    """Yield for each rollout of the step where it earned its reward.

    The reward of a turn or span is that of its last token, and a token's penalty is subtracted from the token's reward.
    Whatever else is in ``rewards_R`` (other reward parts, a length bonus) is earned with the last token.

    Args:
        prepared: the step.
        rewards_R: float64 [R], the whole reward of each rollout, penalties included.
        penalties: sequence id -> float64 [its trained tokens], reward units, such as a KL.
    """
    of_rollout: dict[int, list[int]] = {}
    for sequence_id, index in prepared.rollout_of.items():
        of_rollout.setdefault(index, []).append(sequence_id)
    trained = {sequence.sequence_id: sequence.loss_mask for sequence in prepared.sequences}
    rollouts = [rollout for item in prepared.groups for rollout in item.group.rollouts]
    for index, (rollout, total) in enumerate(zip(rollouts, rewards_R.tolist(), strict=True)):
        is_trained, rewards = np.zeros(rollout.num_sampled, np.bool_), np.zeros(rollout.num_sampled)
        if ids := of_rollout.get(index):
            masks = [trained[i][sequence.loss_mask] for i, sequence in zip(ids, rollout.sequences, strict=True)]
            is_trained = np.concatenate(masks)
            nothing = [np.zeros(np.count_nonzero(mask)) for mask in masks]
            rewards[is_trained] -= np.concatenate([penalties.get(i, no) for i, no in zip(ids, nothing, strict=True)])
        yield _placed(rollout, total, is_trained, rewards)


def _placed(rollout: Rollout, total: float, is_trained: np.ndarray, rewards: np.ndarray) -> Earned:
    """Add the rewards of turns or spans, and of the end, to a rollout's ``rewards``, which has the penalties."""
    parts, starts = rollout.turns or rollout.spans, (0,)
    ends = np.cumsum([turn.num_tokens for turn in rollout.turns], dtype=np.int64)
    if rollout.spans:
        ends = np.array([span.end for span in rollout.spans], np.int64)
    # Of the rollouts whose turns or spans don't fit their tokens, which are masked as invalid, nothing is used.
    if len(ends) and ends[-1] <= len(rewards) and (np.diff(ends, prepend=0) > 0).all():
        rewards[ends - 1] += [part.reward for part in parts]
        starts = (0, *ends[ends < len(rewards)].tolist())
    if len(rewards):
        rewards[-1] += total - rewards.sum()
    return Earned(rewards, total, is_trained, starts)


class Credit(NamedTuple):
    """What a critic makes of one rollout: float64 [N] each, reward units."""

    advantages: np.ndarray
    value_targets: np.ndarray


def generalised_advantages(
    rewards: np.ndarray, values: np.ndarray, *, gamma: float, lam: float, weights: np.ndarray | None = None
) -> Credit:
    """Return generalised advantage estimates (arXiv:1506.02438 eq. 16) and the value targets ``A + V``.

    ``delta_t = r_t + gamma V_(t+1) - V_t`` and ``A_t = delta_t + gamma lambda A_(t+1)``. The value after the last token
    is 0.

    With ``weights``, rho, the estimates are those for the policy pi although mu sampled (V-trace, arXiv:1802.01561,
    with rho-bar = c-bar = the cap of the weights): ``A_t = delta_t + gamma lambda rho_(t+1) A_(t+1)``, and the value
    targets are V-trace's ``V_t + rho_t A_t``. The token's own rho is left out of its advantage, because the policy's
    loss corrects for it. At lambda = 1 this is V-trace's advantage, too; at lambda < 1 the paper takes
    ``r_t + gamma v_(t+1) - V_t`` instead, which on policy is not GAE. With weights of 1 it is GAE.

    Args:
        rewards: [N], of each token.
        values: [N], of the state before each token.
        gamma: discount for one token, in [0, 1].
        lam: lambda, in [0, 1].
        weights: [N], pi/mu of each token, cut at the cap. None: 1.
    """
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    rho = np.ones_like(values) if weights is None else np.asarray(weights, np.float64)
    decays = gamma * lam * np.append(rho[1:], 0.0)
    advantages, following = np.empty_like(values), 0.0
    for place, delta, decay in zip(range(len(values))[::-1], deltas[::-1].tolist(), decays[::-1].tolist()):
        advantages[place] = following = delta + decay * following
    return Credit(advantages, values + rho * advantages)


def by_critic(
    prepared: PreparedBatch, earned: Sequence[Earned], critic: CriticConfig
) -> tuple[PreparedBatch, list[np.ndarray]]:
    """Return the step with value targets, and each rollout's advantages, float64 [N], not whitened.

    The values are those of the critic before the batch's first update. With ``critic.importance_cap`` the weights are
    those of the policy at that time to the one that sampled; a ratio that is not finite has weight 0.
    """
    of_rollout: dict[int, list[int]] = {}
    for sequence in prepared.sequences:
        of_rollout.setdefault(prepared.rollout_of[sequence.sequence_id], []).append(sequence.sequence_id)
    weights = _weights(prepared, critic.importance_cap) if critic.importance_cap else {}
    advantages: list[np.ndarray] = []
    targets: dict[int, np.ndarray] = {}
    for index, of in enumerate(earned):
        ids = of_rollout.get(index, [])
        if not ids:
            advantages.append(np.zeros(0))
            continue
        values = np.concatenate([prepared.values[i] for i in ids])
        rewards, rho = of.rewards[of.is_trained], np.concatenate([weights[i] for i in ids]) if weights else None
        credit = generalised_advantages(rewards, values, gamma=critic.gamma, lam=critic.lam, weights=rho)
        ends = np.cumsum([prepared.sequence_tokens[i] for i in ids])[:-1]
        targets |= dict(zip(ids, np.split(credit.value_targets, ends), strict=True))
        advantages.append(credit.advantages)
    return replace(prepared, value_targets=targets), advantages


def _weights(prepared: PreparedBatch, cap: float) -> dict[int, np.ndarray]:
    """Return min(pi/mu, cap) of each sequence's trained tokens, float64, by sequence id."""
    weights: dict[int, np.ndarray] = {}
    for sequence in prepared.sequences:
        policy = prepared.policy_scores[sequence.sequence_id].logprobs.astype(np.float64)
        log_ratio = np.minimum(policy - sequence.behavior_logprobs[sequence.loss_mask], np.log(cap))
        weights[sequence.sequence_id] = np.where(np.isfinite(log_ratio), np.exp(log_ratio), 0.0)
    return weights
