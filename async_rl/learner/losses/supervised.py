"""The loss of supervised training, as a sum and its denominator. N = trained tokens, S = sequences."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from async_rl.learner.losses.aggregation import aggregate
from async_rl.learner.losses.ratio import check_shapes


class NllOutput(NamedTuple):
    """Sums over one micro-batch; the step's loss is the sum of ``loss_sum`` over that of ``weight_sum``."""

    loss_sum: Tensor  # [], float64, carries grad
    weight_sum: Tensor  # [], float64: tokens, or sequences that have any
    num_tokens: Tensor  # [], int64


def nll_loss(
    logprobs_N: Tensor,
    sequence_index_N: Tensor,
    num_sequences: int,
    *,
    aggregation: Literal["token", "sequence"] = "token",
) -> NllOutput:
    """Negative log-likelihood for supervised training.

    ``token``: every token weighs 1. ``sequence``: every sequence weighs 1, spread evenly over its tokens, so the
    step's loss is the mean over sequences of their mean token loss.

    Raises:
        ValueError: the two tensors are not both [N].
    """
    check_shapes(logprobs_N, sequence_index_N)
    all_N = torch.ones_like(sequence_index_N, dtype=torch.bool)
    weights = aggregate(all_N, sequence_index_N, num_sequences, aggregation, max_length=1)
    loss_sum = -(weights.weight * logprobs_N).sum(dtype=torch.float64)
    return NllOutput(loss_sum, weights.denominator.double(), all_N.sum())
