"""Credit for single tokens, by hand: rewards of turns, generalised advantages, V-trace, and baselines for turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from async_rl.config.critic import CriticConfig
from async_rl.learner.data.batch import PreparedBatch
from async_rl.learner.interface import PolicyScores
from async_rl.learner.losses.advantages import whitened, with_advantages
from async_rl.learner.losses.credit import earned_rewards, generalised_advantages
from async_rl.records import Rollout, Turn
from tests.learner.losses.test_advantages import along_tokens, loss, prepare, rollout, token_advantages


def played(turns: Sequence[tuple[int, float]], num_tokens: Sequence[int], extra: float = 0.0) -> Rollout:
    """A rollout with ``turns`` of (tokens, reward) in sequences of ``num_tokens``, and ``extra`` reward at the end."""
    parts = {"environment": sum(reward for _, reward in turns), "extra": extra}
    return msgspec.structs.replace(
        rollout(0.0, num_tokens), reward_parts=parts, turns=tuple(Turn(num, reward, 0.0) for num, reward in turns)
    )


def earned(prepared: PreparedBatch) -> list[list[float]]:
    return [of.rewards.tolist() for of in earned_rewards(prepared, prepared.rewards, {})]


def test_a_turns_reward_is_on_its_last_token_across_sequences_and_the_rest_on_the_last_token():
    # Turns of 2, 1 and 2 tokens; the first sequence has three of the five tokens. 0.5 of the reward is of no turn.
    step = prepare([played([(2, 1.0), (1, -2.0), (2, 4.0)], [3, 2], extra=0.5), rollout(3.0, 2)])
    assert earned(step) == [[0.0, 1.0, -2.0, 0.0, 4.5], [0.0, 3.0]]
    first, second = earned_rewards(step, step.rewards, {})
    assert (first.starts, first.to_go.tolist()) == ((0, 2, 3), [3.5, 2.5, 4.5])
    assert (second.starts, second.to_go.tolist()) == ((0,), [3.0])


def test_a_penalty_is_on_its_token_and_what_it_leaves_of_the_total_on_the_last():
    # Sequence 0 has tokens 0 to 1, sequence 1 token 2. The total 1 has penalties of 0.6, of which 0.1 are not known.
    step = prepare([rollout(1.6, [2, 1])])
    (of,) = earned_rewards(step, np.array([1.0]), {0: np.array([0.2, 0.3])})
    np.testing.assert_allclose(of.rewards, [-0.2, -0.3, 1.5], atol=1e-15)


def test_turns_of_other_tokens_than_were_sampled_make_a_rollout_invalid():
    step = prepare([played([(2, 1.0)], [3]), played([(3, 0.0), (0, 1.0)], [3]), played([(3, 1.0)], [3])])
    assert step.masked == {0: "invalid", 1: "invalid"}


def test_generalised_advantages_by_hand():
    # gamma 0.5, lambda 0.5. Deltas: 1 + 0.5 * 4 - 2 = 1; 0 + 0.5 * 6 - 4 = -1; 8 + 0 - 6 = 2.
    # A: 2; -1 + 0.25 * 2 = -0.5; 1 + 0.25 * -0.5 = 0.875.
    credit = generalised_advantages(np.array([1, 0, 8]), np.array([2, 4, 6]), gamma=0.5, lam=0.5)
    assert credit.advantages.tolist() == [0.875, -0.5, 2.0]
    assert credit.value_targets.tolist() == [2.875, 3.5, 8.0]


def v_trace(rewards: np.ndarray, values: np.ndarray, rho: np.ndarray, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """IMPALA's definition (arXiv:1802.01561 eq. 1), as sums: v_s = V_s + sum_t gamma^(t-s) (prod c) rho_t delta_t."""
    num, after = len(values), np.append(values[1:], 0.0)
    deltas = rho * (rewards + gamma * after - values)
    targets = np.array(
        [values[s] + sum(gamma ** (t - s) * np.prod(rho[s:t]) * deltas[t] for t in range(s, num)) for s in range(num)]
    )
    return targets, rewards + gamma * np.append(targets[1:], 0.0) - values


def test_with_weights_the_targets_and_advantages_are_v_traces():
    rng = np.random.default_rng(0)
    rewards, values, rho = rng.normal(size=5), rng.normal(size=5), rng.uniform(0.0, 1.0, 5)
    got = generalised_advantages(rewards, values, gamma=0.9, lam=1.0, weights=rho)
    targets, advantages = v_trace(rewards, values, rho, 0.9)
    np.testing.assert_allclose(got.value_targets, targets, atol=1e-12)
    np.testing.assert_allclose(got.advantages, advantages, atol=1e-12)


@pytest.mark.parametrize("advantage", ["per_turn_mean", "per_turn_norm"])
def test_turns_are_compared_with_the_same_turn_of_their_group(advantage: str):
    # Rewards to go: [3, 2], [1, 1], [2]. Turn 1: mean 2, so 1, -1, 0, std 1. Turn 2: mean 1.5, so 0.5, -0.5, std
    # sqrt(0.5). Turn 2 of the first rollout begins in the first sequence.
    step = prepare([played([(1, 1), (2, 2)], [2, 1]), played([(2, 0), (1, 1)], [3]), rollout(2, 2)])
    first, second = (1.0, 0.5) if advantage == "per_turn_mean" else (1 / 1.0001, 0.5 / (0.5**0.5 + 1e-4))
    got = token_advantages(with_advantages(step, loss(advantage=advantage)))
    expected = [[first, second], [second], [-first, -first, -second], [0.0, 0.0]]
    assert len(got) == len(expected)
    for values, wanted in zip(got, expected, strict=True):
        np.testing.assert_allclose(values, wanted, atol=1e-6)


@pytest.mark.parametrize("advantage", ["per_turn_mean", "per_turn_norm"])
def test_a_turn_without_a_comparison_gets_exactly_0(advantage: str):
    # Equal totals from unequal tenths, and a second turn that only one rollout has.
    step = prepare([played([(1, 0.1), (1, 0.2), (1, 0.7)], [3]), rollout(1.0)])
    assert token_advantages(with_advantages(step, loss(advantage=advantage))) == [[0.0, 0.0, 0.0], [0.0]]


def test_a_kl_in_the_reward_counts_in_the_turns_up_to_its_token():
    # Rewards 1, 0; KL k1 = log mu - log ref = 1 at the first rollout's tokens, 0 at the others'; coefficient 0.1.
    # To go: [1 - 0.2, 1 - 0.1], [0, 0]; means 0.4, 0.45.
    step = prepare([played([(1, 0.0), (1, 1.0)], [2]), played([(1, 0.0), (1, 0.0)], [2])])
    step = step.with_sequences(
        replace(s, reference_logprobs=along_tokens(s, np.full(2, -2.0 + s.sequence_id))) for s in step.sequences
    )
    keys: dict[str, Any] = {"kl_coef": 0.1, "kl_placement": "reward", "advantage": "per_turn_mean"}
    got = token_advantages(with_advantages(step, loss(**keys)))
    np.testing.assert_allclose(got, [[0.4, 0.45], [-0.4, -0.45]], atol=1e-7)


def test_stale_tokens_have_no_advantage_and_their_turns_reward_still_belongs_to_them():
    # The first turn is stale. To go at turn 2: 2 and 0.
    step = prepare([played([(1, 5.0), (1, 2.0)], [2]), played([(1, 0.0), (1, 0.0)], [2])])
    young = [replace(s, loss_mask=s.loss_mask & (np.arange(4) != 2)) for s in step.sequences]
    step = replace(step.with_sequences(young), sequence_tokens={0: 1, 1: 1})
    got = token_advantages(with_advantages(step, loss(advantage="per_turn_mean")))
    assert got == [[1.0], [-1.0]]


def valued(step: PreparedBatch, *values: Sequence[float]) -> PreparedBatch:
    return replace(step, values={i: np.array(of, np.float32) for i, of in enumerate(values)})


GAE = loss(advantage="gae", mask_truncated=True)


def test_a_critic_gives_credit_across_turns_and_sequences():
    # Rewards 1 after two tokens, 4 at the end, gamma = lambda = 0.5; values 2, 4 | 6. The deltas are
    # 0 + 2 - 2 = 0, 1 + 3 - 4 = 0, 4 - 6 = -2, so A: -2, -0.5, -0.125, and value targets 1.875, 3.5, 4.
    step = valued(prepare([played([(2, 1.0), (1, 4.0)], [2, 1])]), [2, 4], [6])
    got = with_advantages(step, GAE, critic=CriticConfig(gamma=0.5, lam=0.5, whiten=False))
    assert token_advantages(got) == [[-0.125, -0.5], [-2.0]]
    assert {i: of.tolist() for i, of in got.value_targets.items()} == {0: [1.875, 3.5], 1: [4.0]}


def test_advantages_are_whitened_over_the_step_and_value_targets_are_not_and_masked_rollouts_have_neither():
    step = prepare([rollout(1, 2)], [rollout(0, 1), rollout(3, 1), rollout(5, 1, "length")])
    got = with_advantages(valued(step, [0, 0], [1], [1]), GAE, critic=CriticConfig())
    np.testing.assert_allclose(
        np.concatenate(token_advantages(got)), whitened(np.array([1.0, 1.0, -1.0, 2.0])), atol=1e-6
    )
    assert {i: of.tolist() for i, of in got.value_targets.items()} == {0: [1.0, 1.0], 1: [0.0], 2: [3.0]}


def test_importance_weights_correct_the_targets_of_stale_rollouts():
    # pi/mu: e (cut at 1), 0.5, and a logprob that is not finite (0). Rewards 0, 0, 8; values 2, 4, 6; lambda 1.
    # Deltas 2, 2, 2. A: 2, 2 + 0 * 2, 2 + 0.5 * 2 = 3. Targets: 2 + 1 * 3, 4 + 0.5 * 2, 6 + 0.
    step = valued(prepare([rollout(8, 3)]), [2, 4, 6])
    logprobs = np.array([0.0, -1.0 + np.log(0.5), np.nan], np.float32)
    step = replace(step, policy_scores={0: PolicyScores(logprobs, logprobs)})
    got = with_advantages(step, GAE, critic=CriticConfig(importance_cap=1.0, whiten=False))
    np.testing.assert_allclose(token_advantages(got), [[3.0, 2.0, 2.0]], rtol=1e-6)
    np.testing.assert_allclose(got.value_targets[0], [5.0, 5.0, 6.0], rtol=1e-6)
