"""The critic as a part of the step: values, then value targets (``advantages.py``), then training.

The values that advantages and value targets are made of, and from which the clip of the value loss counts, are those of
the critic before the batch's first update. The critic is trained on the same tokens as the policy, in the same parts
and epochs, before it. The first ``critic.freeze_steps`` steps train only the critic.

Value targets are made of rewards that the *behavior* policy earned, up to ``queue.max_staleness`` versions ago. So
without ``critic.importance_cap`` the critic learns the values of a mixture of the last policies, which lag behind the
trained one: while rewards rise, targets of stale tokens are too low. ``critic/target_error_lag_N`` shows it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from async_rl.config.config import Config
from async_rl.errors import TrainingError
from async_rl.learner.checkpoints.files import TrainerState
from async_rl.learner.data.batch import PreparedBatch, leave_out
from async_rl.learner.interface import Critic, UpdateStats
from async_rl.learner.loop.parts import StepPart
from async_rl.learner.loop.step_result import StepResult, count_skipped
from async_rl.learner.losses.value import CLIP_FRACTION, critic_sequences

logger = logging.getLogger(__name__)

POLICY_FROZEN = "policy_frozen"
"""Why rollouts are masked in steps that train only the critic."""


class CriticPart(StepPart):
    """Scores and trains the critic. ``state.critic_skipped_in_a_row`` is its own."""

    timed_as = "critic"

    def __init__(self, critic: Critic, config: Config, state: TrainerState) -> None:
        self._critic, self._config, self._state = critic, config, state
        self._trained_on: PreparedBatch | None = None
        self._updates: list[UpdateStats] = []

    def score(self, prepared: PreparedBatch) -> PreparedBatch:
        return with_values(prepared, self._critic)

    @property
    def freezes_policy(self) -> bool:
        return self._state.step < self._config.critic.freeze_steps

    def train(self, prepared: PreparedBatch, *, version: int) -> PreparedBatch:
        num_epochs = self._config.learner.epochs_per_batch
        self._updates = train_critic(self._critic, prepared, num_epochs=num_epochs, version=version)
        self._trained_on = prepared
        before = self._state.critic_skipped_in_a_row
        self._state.critic_skipped_in_a_row = count_skipped(before, self._updates or [None])
        return without_policy(prepared) if self.freezes_policy else prepared

    def record(self, result: StepResult) -> Mapping[str, float]:
        assert self._trained_on is not None, "a step trains before it is recorded"
        return critic_metrics(self._trained_on, self._updates, version=result.version)

    @property
    def updates(self) -> Sequence[UpdateStats]:
        return self._updates

    def end(self) -> None:
        most = self._config.experimental.max_skipped_steps
        check_critic_skipped(self._state.critic_skipped_in_a_row, self._updates, most)

    @property
    def has_trained(self) -> bool:
        return self._state.step > 0


def with_values(prepared: PreparedBatch, critic: Critic) -> PreparedBatch:
    """Return the batch with the critic's values of all trained tokens."""
    return replace(prepared, values=critic.score(prepared.sequences) if prepared.sequences else {})


def train_critic(critic: Critic, prepared: PreparedBatch, *, num_epochs: int, version: int) -> list[UpdateStats]:
    """Make the critic's optimizer steps on a batch: one on each mini-batch that has tokens, in every epoch.

    ``version`` is the policy's version before the batch.
    """
    updates: list[UpdateStats] = []
    for sequences in prepared.mini_batches * num_epochs:
        if not sequences:
            continue
        made = critic_sequences(sequences, prepared.value_targets, prepared.values)
        updates.append(critic.update(made, version=version))
        if not updates[-1].stepped:
            logger.warning("an optimizer step of the critic is skipped: %s", updates[-1].reason)
    return updates


def check_critic_skipped(skipped_in_a_row: int, updates: Sequence[UpdateStats], most: int) -> None:
    """Stop the run if ``skipped_in_a_row``, the number of the critic's optimizer steps skipped in a row, is above
    ``most``. ``updates`` are those of the last step, empty if nothing was left to train on.

    Raises:
        TrainingError: the number is above ``most``.
    """
    if skipped_in_a_row <= most:
        return
    last = f"{updates[-1].reason} (gradient norm {updates[-1].grad_norm:.3g})" if updates else "every token was masked"
    raise TrainingError(
        f"{skipped_in_a_row} optimizer steps of the critic in a row were skipped, expected at most {most}. Reason of "
        f"the last one: {last}. If the gradient is not finite, lower critic.lr or check the rewards; "
        f"critic/target_mean in metrics.jsonl is that of the value targets. If nothing is left to train on, masked/* "
        f"has the causes"
    )


def without_policy(prepared: PreparedBatch) -> PreparedBatch:
    """Return the batch with all rollouts masked, so that the policy is not trained on it."""
    return leave_out(prepared, set(prepared.rollout_of.values()), POLICY_FROZEN)


def critic_metrics(prepared: PreparedBatch, updates: Sequence[UpdateStats], *, version: int) -> dict[str, float]:
    """Return the critic's metrics of a step. Empty if it was not trained.

    Args:
        prepared: the batch, with values and value targets, before anything was masked for the policy's sake.
        updates: the critic's optimizer steps.
        version: the policy's version before the batch.
    """
    if not updates:
        return {}
    ids = [s.sequence_id for s in prepared.sequences]
    values = np.concatenate([prepared.values[i] for i in ids]).astype(np.float64)
    targets = np.concatenate([prepared.value_targets[i] for i in ids])
    lag = version - np.concatenate([s.versions[s.loss_mask] for s in prepared.sequences])
    errors, variance = targets - values, float(targets.var())
    weights = np.array([update.tokens_trained for update in updates], np.float64)
    weights /= max(1.0, weights.sum())
    return {
        "critic/loss": float(np.dot(weights, [update.loss for update in updates])),
        "critic/grad_norm": float(np.dot(weights, [update.grad_norm for update in updates])),
        "critic/lr": updates[-1].lr,
        CLIP_FRACTION: float(np.dot(weights, [update.own_metrics.get(CLIP_FRACTION, 0.0) for update in updates])),
        "critic/skipped_steps": sum(not update.stepped for update in updates),
        "critic/value_mean": float(values.mean()),
        "critic/target_mean": float(targets.mean()),
        "critic/explained_variance": 1.0 - float(errors.var()) / variance if variance else float("nan"),
        **{f"critic/target_error_lag_{n}": float(errors[lag == n].mean()) for n in np.unique(lag).tolist()},
    }
