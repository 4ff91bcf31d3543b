"""Losses of the trained tokens. Pure: tensors in, tensors out. Shape letters: N = trained tokens, S = sequences.

Every loss here is a *sum*, with its denominator beside it. The denominator of a step (tokens that are trained on,
over all micro-batches and ranks) is known only when the last micro-batch has run, since skipped sequences leave it.
Gradients are linear in 1 / denominator: the engine backpropagates the sums, adds up the counts over all ranks, and
multiplies the gradients once by 1 / count (times the data-parallel size where FSDP has averaged). So the result is the
same for any cut into micro-batches and any number of ranks. A sequence is never cut, which makes the skip rule exact
too.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 60.0
"""|log pi/mu| is clamped here, in nats, before ``exp``: e^60 is finite in float32, and its square in float64."""


class LossOutput(NamedTuple):
    """Sums over one micro-batch, to be added up (``ratio_max``: the maximum taken) over micro-batches and ranks.

    Counts and ratios are over trained tokens, those of kept sequences. Everything but ``loss_sum`` is detached.
    """

    loss_sum: Tensor  # [], float64, carries grad
    num_tokens: Tensor  # [], int64, trained tokens: the denominator
    skipped: Tensor  # bool [S], left out: mean ratio above the threshold, or nonfinite
    nonfinite: Tensor  # bool [S], of those: a behavior logprob was NaN or infinite
    num_skipped_tokens: Tensor  # [], int64
    num_clipped_low: Tensor  # [], int64, A < 0 and ratio < 1 - clip_low
    num_clipped_high: Tensor  # [], int64, A > 0 and ratio > 1 + clip_high
    ratio_sum: Tensor  # [], float64, pi / mu
    ratio_square_sum: Tensor  # [], float64; ESS = ratio_sum ** 2 / (num_tokens * ratio_square_sum)
    ratio_max: Tensor  # [], float64; 0 without tokens
    abs_log_ratio_sum: Tensor  # [], float64, nats


def dapo_loss(
    logprobs_N: Tensor,
    behavior_logprobs_N: Tensor,
    advantages_N: Tensor,
    sequence_index_N: Tensor,
    num_sequences: int,
    *,
    clip_low: float,
    clip_high: float,
    skip_threshold: float | None,
) -> LossOutput:
    """DAPO's token-level loss (arXiv:2503.14476 eq. 8): the sum of ``-min(rho A, clip(rho, 1 - low, 1 + high) A)``.

    ``rho = pi / mu`` is taken against the behavior policy, so the clip also bounds staleness. A sequence whose mean
    ratio over its tokens is *above* ``skip_threshold`` leaves the sum and the denominator, as does one with a
    non-finite behavior logprob; both are counted. A NaN in such a sequence does not reach the gradient of the others
    (the log ratio is replaced, not the product multiplied by 0). A token that is clipped has gradient 0 and counts in
    the denominator. A non-finite *learner* logprob is left in: the step must fail, not hide it.

    Args:
        logprobs_N: learner's log-probabilities, nats, float, carries grad.
        behavior_logprobs_N: the generator's, at sampling time and temperature.
        advantages_N: finite, one a token.
        sequence_index_N: int64, in [0, num_sequences).
        num_sequences: S.
        clip_low: in [0, 1).
        clip_high: >= 0.
        skip_threshold: > 1; None keeps every finite sequence.

    Raises:
        ValueError: the four tensors are not all [N].
    """
    _check_shapes(logprobs_N, behavior_logprobs_N, advantages_N, sequence_index_N)
    counts_S = _sum_by(sequence_index_N, torch.ones_like(sequence_index_N), num_sequences)
    finite_N = behavior_logprobs_N.isfinite()
    nonfinite_S = _sum_by(sequence_index_N, (~finite_N).long(), num_sequences) > 0
    with torch.no_grad():
        ratio_N = _log_ratio(logprobs_N, behavior_logprobs_N, finite_N).double().exp()
        mean_S = _sum_by(sequence_index_N, ratio_N, num_sequences) / counts_S.clamp(min=1)
    skipped_S = nonfinite_S if skip_threshold is None else nonfinite_S | (mean_S > skip_threshold)
    kept_N = ~skipped_S[sequence_index_N]

    log_ratio_N = _log_ratio(logprobs_N, behavior_logprobs_N, kept_N)
    rho_N = log_ratio_N.exp()
    clipped_low_N = kept_N & (advantages_N < 0) & (rho_N < 1 - clip_low)
    clipped_high_N = kept_N & (advantages_N > 0) & (rho_N > 1 + clip_high)
    # Chosen, not min(): at equal arguments min() splits the gradient between them.
    effective_N = rho_N.masked_fill(clipped_low_N, 1 - clip_low).masked_fill(clipped_high_N, 1 + clip_high)
    coefficient_N = advantages_N.masked_fill(~kept_N, 0.0)
    kept_ratio_N = rho_N.detach().double().masked_fill(~kept_N, 0.0)
    return LossOutput(
        loss_sum=-(effective_N * coefficient_N).sum(dtype=torch.float64),
        num_tokens=kept_N.sum(),
        skipped=skipped_S,
        nonfinite=nonfinite_S,
        num_skipped_tokens=(~kept_N).sum(),
        num_clipped_low=clipped_low_N.sum(),
        num_clipped_high=clipped_high_N.sum(),
        ratio_sum=kept_ratio_N.sum(),
        ratio_square_sum=kept_ratio_N.square().sum(),
        ratio_max=torch.cat([kept_ratio_N, kept_ratio_N.new_zeros(1)]).max(),
        abs_log_ratio_sum=log_ratio_N.detach().abs().sum(dtype=torch.float64),
    )


class MismatchByLag(NamedTuple):
    """Sums by staleness bucket 0 .. max_lag; ``kl_sum / num_tokens`` estimates KL(mu || pi) of that staleness."""

    kl_sum: Tensor  # float64 [max_lag + 1], nats
    num_tokens: Tensor  # int64 [max_lag + 1]


@torch.no_grad()
def mismatch_by_lag(
    logprobs_N: Tensor, behavior_logprobs_N: Tensor, versions_N: Tensor, version: int, max_lag: int
) -> MismatchByLag:
    """How far the learner's distribution is from the one that sampled, by staleness of the token.

    Schulman's k3 estimate (joschu.net/blog/kl-approx.html) of KL(mu || pi) from samples of mu: ``exp(d) - 1 - d`` with
    ``d = log pi - log mu``, never negative. At staleness 0 it measures the two engines' numerical mismatch alone. Over
    *all* tokens with a finite behavior logprob, sequences that the loss skips included. The last bucket also takes
    what is older.

    Args:
        logprobs_N, behavior_logprobs_N: nats.
        versions_N: int, the version that sampled each token.
        version: the learner's, before the step.
        max_lag: the last bucket, in versions.

    Raises:
        ValueError: a shape is not [N], or a token's version is newer than the learner's.
    """
    _check_shapes(logprobs_N, behavior_logprobs_N, versions_N)
    lag_N = version - versions_N.long()
    if bool((lag_N < 0).any()):
        raise ValueError(f"expected tokens of versions up to the learner's {version}, got {int(versions_N.max())}")
    finite_N = behavior_logprobs_N.isfinite()
    d_N = _log_ratio(logprobs_N, behavior_logprobs_N, finite_N).double()
    # expm1: for the small d of an on-policy token, exp(d) - 1 - d would be rounding noise.
    k3_N = d_N.expm1() - d_N
    bucket_N = lag_N.clamp(max=max_lag)
    return MismatchByLag(_sum_by(bucket_N, k3_N, max_lag + 1), _sum_by(bucket_N, finite_N.long(), max_lag + 1))


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
    _check_shapes(logprobs_N, sequence_index_N)
    num_tokens = torch.tensor(len(logprobs_N), device=logprobs_N.device)
    if aggregation == "token":
        return NllOutput(-logprobs_N.sum(dtype=torch.float64), num_tokens.double(), num_tokens)
    counts_S = _sum_by(sequence_index_N, torch.ones_like(sequence_index_N), num_sequences)
    weights_N = 1.0 / counts_S[sequence_index_N].double()
    return NllOutput(-(weights_N * logprobs_N).sum(), (counts_S > 0).sum().double(), num_tokens)


def _log_ratio(logprobs_N: Tensor, behavior_logprobs_N: Tensor, chosen_N: Tensor) -> Tensor:
    """log pi/mu, clamped; 0 with gradient 0 where not chosen, whatever stands there."""
    log_ratio_N = torch.where(chosen_N, logprobs_N - behavior_logprobs_N, 0.0)
    return log_ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _sum_by(index_N: Tensor, values_N: Tensor, size: int) -> Tensor:
    """[size]: the values of each index, added up in the values' dtype."""
    return values_N.new_zeros(size).index_add_(0, index_N, values_N)


def _check_shapes(*tensors: Tensor) -> None:
    shapes = [list(t.shape) for t in tensors]
    if any(t.ndim != 1 or t.shape != tensors[0].shape for t in tensors):
        raise ValueError(f"expected tensors of one shape [N], got {shapes}")
