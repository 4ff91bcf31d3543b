"""Off-policy corrections: tokens too far from the behavior policy leave the loss or get a weight. Pure, no gradients.

Skips leave out whole sequences (or the whole micro-batch), the token range leaves out single tokens, the importance
weight scales tokens. Called by ``policy.py``. Shape letters: N = trained tokens, S = sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from async_rl.config.loss import LossConfig
from async_rl.config.section import look_up
from async_rl.learner.losses.ratio import sum_by


@torch.no_grad()
def skipped_sequences(
    log_ratio_N: Tensor, finite_N: Tensor, sequence_index_N: Tensor, num_sequences: int, loss: LossConfig
) -> Tensor:
    """bool [S]: sequences that leave the loss and its denominator.

    A sequence is skipped if ``loss.skip_statistic`` of its tokens' pi/mu is *above* ``loss.skip_threshold``, or if one
    of its behavior logprobs is not finite. ``skip_unit = "micro_batch"`` is the rule of Colossal-RL's first version:
    the statistic over all tokens of the micro-batch decides about all of it, so the result depends on the cut. Its
    padding counted with ratio 1; here there is no padding.

    Args:
        log_ratio_N: log pi/mu, float64, nats; 0 where not finite.
        finite_N: bool, the behavior logprob is finite.
        sequence_index_N: int64, in [0, num_sequences).
        num_sequences: S.
        loss: of it the ``skip_*`` keys.
    """
    nonfinite_S = sum_by(sequence_index_N, (~finite_N).long(), num_sequences) > 0
    if loss.skip_threshold is None:
        return nonfinite_S
    statistic_of = look_up(SKIP_STATISTIC_FUNCTIONS, loss.skip_statistic, "loss.skip_statistic")
    if loss.skip_unit == "sequence":
        statistic_S = statistic_of(log_ratio_N, sequence_index_N, num_sequences)
        return nonfinite_S | (statistic_S > loss.skip_threshold)
    # Tokens that are not finite have ratio 1. They form a unit of their own, so that they don't dilute the statistic.
    statistic = statistic_of(log_ratio_N, (~finite_N).long(), 2)[0]
    has_tokens_S = sum_by(sequence_index_N, torch.ones_like(sequence_index_N), num_sequences) > 0
    return nonfinite_S | (has_tokens_S & (statistic > loss.skip_threshold))


def _mean_by(unit_N: Tensor, values_N: Tensor, num_units: int) -> Tensor:
    counts = sum_by(unit_N, torch.ones_like(unit_N), num_units)
    return sum_by(unit_N, values_N, num_units) / counts.clamp(min=1)


def _mean_ratio(log_ratio_N: Tensor, unit_N: Tensor, num_units: int) -> Tensor:
    return _mean_by(unit_N, log_ratio_N.exp(), num_units)


def _largest_ratio(log_ratio_N: Tensor, unit_N: Tensor, num_units: int) -> Tensor:
    ratio_N = log_ratio_N.exp()
    return ratio_N.new_zeros(num_units).scatter_reduce_(0, unit_N, ratio_N, "amax")


def _geometric_mean_ratio(log_ratio_N: Tensor, unit_N: Tensor, num_units: int) -> Tensor:
    return _mean_by(unit_N, log_ratio_N, num_units).exp()


def _mean_k3(log_ratio_N: Tensor, unit_N: Tensor, num_units: int) -> Tensor:
    return _mean_by(unit_N, log_ratio_N.expm1() - log_ratio_N, num_units)


SKIP_STATISTIC_FUNCTIONS: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "mean": _mean_ratio,
    "max": _largest_ratio,
    "geometric": _geometric_mean_ratio,
    "k3": _mean_k3,
}
"""``loss.skip_statistic`` -> log ratios [N], the unit of each [N], the number of units -> float64 [units].

A unit without tokens gets 0 (geometric: 1).
"""


def in_range(log_ratio_N: Tensor, token_range: tuple[float, float]) -> Tensor:
    """bool [N]: tokens whose ratio lies in ``token_range``, bounds included.

    The token mask of IcePop (arXiv:2510.18855), there on the ratio of the training engine's old policy to the
    inference engine's. IcePop keeps masked tokens in its denominator; here they leave it, like all masked tokens.
    """
    low, high = token_range
    ratio_N = log_ratio_N.detach().double().exp()
    return (ratio_N >= low) & (ratio_N <= high)


def importance_weights(log_ratio_N: Tensor, cap: float) -> Tensor:
    """``min(ratio, cap)`` [N], detached: truncated importance sampling (IMPALA's rho, arXiv:1802.01561 eq. 1)."""
    return log_ratio_N.detach().exp().clamp(max=cap)
