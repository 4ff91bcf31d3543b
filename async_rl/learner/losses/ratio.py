"""Ratios of probabilities, as logarithms: pi (learner) to mu (behavior) or to the proximal policy. Pure.

Shape letters: N = trained tokens, S = sequences. Called by ``policy.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 60.0
"""|log ratio| is clamped here, in nats, before ``exp``: e^60 is finite in float32, and its square in float64."""


def log_ratio(logprobs_N: Tensor, other_logprobs_N: Tensor, chosen_N: Tensor) -> Tensor:
    """log pi/other [N], clamped; 0 with gradient 0 where ``chosen_N`` is False, even if the inputs are NaN there."""
    # torch.where, not a product with 0: 0 times NaN is NaN, in the gradient too.
    ratio_N = torch.where(chosen_N, logprobs_N - other_logprobs_N, 0.0)
    return ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_log_ratio(log_ratio_N: Tensor, sequence_index_N: Tensor, num_sequences: int) -> Tensor:
    """Every token's log ratio [N] becomes the mean of its sequence's: the length-normalised ratio of GSPO.

    arXiv:2507.18071 eq. 7, in the form of its eq. 14 (GSPO-token): the *value* is the sequence's; the gradient flows
    through the token's own logprob with factor 1. If all tokens of a sequence have one advantage, their mean has the
    value and the gradient of eq. 5.
    """
    counts_S = sum_by(sequence_index_N, torch.ones_like(sequence_index_N), num_sequences)
    sums_S = sum_by(sequence_index_N, log_ratio_N.detach().double(), num_sequences)
    mean_N = (sums_S / counts_S.clamp(min=1))[sequence_index_N].to(log_ratio_N.dtype)
    return mean_N + (log_ratio_N - log_ratio_N.detach())


def interpolated_proximal(logprobs_N: Tensor, behavior_logprobs_N: Tensor, lag_N: Tensor) -> Tensor:
    """Logprobs [N] of a proximal policy one version behind pi, without a forward pass; detached.

    A-3PO (arXiv:2512.06547): ``log prox = log mu / d + (1 - 1/d) log pi`` for a token of lag d, log-linear between the
    policies of d versions ago and of now. At lag 0 pi itself is the proximal policy, at lag 1 it is mu.

    Args:
        lag_N: int64 [N], versions between sampling and now, >= 0.
    """
    weight_N = torch.where(lag_N > 0, 1.0 / lag_N.clamp(min=1), 0.0).to(logprobs_N.dtype)
    return torch.lerp(logprobs_N.detach(), behavior_logprobs_N, weight_N)


def sum_by(index_N: Tensor, values_N: Tensor, size: int) -> Tensor:
    """[size]: the values of each index, added up in the values' dtype."""
    return values_N.new_zeros(size).index_add_(0, index_N, values_N)


def check_shapes(*tensors: Tensor) -> None:
    """Raises ValueError unless all are [N]."""
    if any(t.ndim != 1 or t.shape != tensors[0].shape for t in tensors):
        raise ValueError(f"expected tensors of one shape [N], got {[list(t.shape) for t in tensors]}")
