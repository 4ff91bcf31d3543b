"""The loss of a critic: the squared error of its values, as an objective of the engine. N = trained tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from async_rl.learner.data.batch import along_tokens
from async_rl.learner.losses.batch import LossBatch, TokenLogprobs
from async_rl.learner.losses.objective import METRIC, MicroBatchResult, Objective
from async_rl.learner.sequences import TrainSequence, no_optional_columns

CLIP_FRACTION = "critic/clip_fraction"


def value_loss(values_N: Tensor, targets_N: Tensor, old_values_N: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return the loss of each token and whether the clip decided it: float64 [N] and bool [N].

    The loss is ``1/2 max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2)``, as in the code of PPO (arXiv:2005.12729
    section 3): a value that has moved by more than c towards its target gets no gradient any more. RL2 leaves out the
    factor 1/2.

    Args:
        values_N: V, the critic's values, reward units, with grad.
        targets_N: G, the value targets.
        old_values_N: V_old, before the batch's first update.
        clip: c, reward units. 0: the plain squared error.
    """
    values_N, targets_N, old_values_N = values_N.double(), targets_N.double(), old_values_N.double()
    plain_N = (values_N - targets_N).square() / 2
    if not clip:
        return plain_N, torch.zeros_like(plain_N, dtype=torch.bool)
    clipped_N = (values_N.clamp(old_values_N - clip, old_values_N + clip) - targets_N).square() / 2
    return torch.maximum(plain_N, clipped_N), clipped_N.detach() > plain_N.detach()


@dataclass(frozen=True, slots=True)
class ValueObjective(Objective):
    """The mean of ``value_loss`` over all trained tokens of the step.

    Attributes:
        clip: the value of ``critic.value_clip``.
    """

    clip: float

    @property
    def own_metric_keys(self) -> tuple[str, ...]:
        return (CLIP_FRACTION,)

    def __call__(self, batch: LossBatch, scored: TokenLogprobs, *, version: int) -> MicroBatchResult:
        losses_N, clipped_N = value_loss(scored.logprobs, batch.value_targets, batch.old_values, self.clip)
        loss_sum = losses_N.sum()
        num_tokens = torch.full_like(loss_sum.detach(), len(losses_N))
        clipped = {f"{METRIC}{CLIP_FRACTION}": clipped_N.sum()}
        sums = self.statistics.flat({"denominator": num_tokens, "loss": loss_sum, "tokens": num_tokens, **clipped})
        nothing = torch.zeros(batch.num_sequences, dtype=torch.bool, device=sums.device)
        return MicroBatchResult(loss_sum, sums, nothing, sums.new_zeros(()))


def critic_sequences(
    sequences: Iterable[TrainSequence], targets: Mapping[int, np.ndarray], values: Mapping[int, np.ndarray]
) -> list[TrainSequence]:
    """Return ``sequences`` for the critic's update: with value targets and old values, both by sequence id, [N], and
    without what only the policy's loss needs.
    """
    return [
        replace(
            s,
            sampling_mask=None,
            **no_optional_columns()
            | {"value_targets": along_tokens(s, targets[s.sequence_id])}
            | {"old_values": along_tokens(s, values[s.sequence_id])},
        )
        for s in sequences
    ]
