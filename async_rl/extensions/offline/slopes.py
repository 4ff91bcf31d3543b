"""Losses over whole sequences, pairs of sequences or a whole batch, trained by the slopes of their tokens.

Such a loss does not separate by token: its gradient needs values of sequences that may lie in other micro-batches or on
other ranks. It is trained in two passes. ``Engine.score_policy`` returns the values v of all trained tokens. A plain
function of them is the loss L, and autograd gives the *slopes* dL/dv (``sequence_slopes``). ``Engine.update`` with
``SlopeObjective`` then backpropagates the sum of slope times value. Its gradient is that of L, because the weights do
not change in between. It does not depend on packing, micro-batches, ranks or layout. The cost is one more forward pass:
about 4/3 of a step.

Slopes travel in the column ``slopes``. The sign is that of a loss, which is minimised: a positive slope lowers
the token's value, whereas a positive advantage raises it. Shape letters: S = sequences, T = tokens of a sequence, N =
trained tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from async_rl.learner.data.batch import along_tokens
from async_rl.learner.interface import PolicyScores
from async_rl.learner.losses.batch import IndexedSlopeFunction, LossBatch, Slopes, TokenLogprobs
from async_rl.learner.losses.objective import MicroBatchResult, Objective
from async_rl.learner.sequences import TrainSequence


class LinearObjective(Objective):
    """A sum over trained tokens of a slope, known beforehand, times the token's value."""

    @abstractmethod
    def slopes(self, batch: LossBatch) -> Tensor:
        """Return the slopes of the trained tokens, float32 [N]."""

    def __call__(self, batch: LossBatch, scored: TokenLogprobs, *, version: int) -> MicroBatchResult:
        slopes_N = self.slopes(batch)
        assert scored.logprobs.shape == slopes_N.shape  # one value and none would multiply to none
        loss_sum = (scored.logprobs * slopes_N).sum(dtype=torch.float64)
        entropy = scored.entropies.detach().sum(dtype=torch.float64)
        num_tokens = torch.full_like(entropy, len(scored.logprobs))
        sums = self.statistics.flat(
            {"denominator": num_tokens, "loss": loss_sum, "tokens": num_tokens, "entropy": entropy}
        )
        nothing = torch.zeros(batch.num_sequences, dtype=torch.bool, device=sums.device)
        return MicroBatchResult(loss_sum, sums, nothing, sums.new_zeros(()))

    def predict_slopes(self, batch: LossBatch, *, version: int) -> IndexedSlopeFunction:
        """Return the slopes themselves: the prediction is exact."""
        slopes_N = self.slopes(batch)
        return lambda place, _: Slopes(slopes_N[place])


class SlopeObjective(LinearObjective):
    """The sum over trained tokens of slope times value, divided by nothing.

    The value is what the model computes for the token (``TokenLogprobs.logprobs``): its log-probability, or the output
    of another head. The slopes are the batch's column ``slopes``. The loss in ``UpdateStats`` is this sum, which is not
    the loss that the slopes are of: the caller knows that one. A step without tokens is skipped.
    """

    def slopes(self, batch: LossBatch) -> Tensor:
        return batch.slopes

    def denominator(self, sums: Tensor) -> float:
        return 1.0 if self.statistics.value(sums, "tokens") else 0.0


def sequence_sums(sequences: Sequence[TrainSequence], scores: Mapping[int, PolicyScores]) -> Tensor:
    """Return the sum of the values of each sequence's trained tokens, float64 [S], in the order of ``sequences``."""
    return torch.tensor([scores[s.sequence_id].logprobs.sum(dtype=np.float64) for s in sequences], dtype=torch.float64)


def with_slopes(sequence: TrainSequence, slopes: float | np.ndarray) -> TrainSequence:
    """Return ``sequence`` with the slopes of its trained tokens: one for all, or one for each [N]."""
    return replace(sequence, slopes=along_tokens(sequence, slopes))


def sequence_slopes(
    sequences: Sequence[TrainSequence], sums_S: Tensor, loss: Callable[[Tensor], Tensor]
) -> tuple[float, list[TrainSequence]]:
    """Return the value of a loss of the sequences' sums, and the sequences with its slopes.

    Args:
        sequences: those of the step.
        sums_S: the sums of their trained tokens' values (``sequence_sums``).
        loss: a differentiable function of ``sums_S``, float64 [S] to [].
    """
    leaf_S = sums_S.detach().requires_grad_()
    value = loss(leaf_S)
    (slopes_S,) = torch.autograd.grad(value, leaf_S)
    return value.item(), [with_slopes(s, slope) for s, slope in zip(sequences, slopes_S.tolist(), strict=True)]
