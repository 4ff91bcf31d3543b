"""The parts of a policy loss, as pure functions: ratios, surrogates, corrections, KL estimates, aggregations.

``policy.py`` combines the parts. Parts that ``[loss]`` names are in tables. To add a part, add a function and an entry
in its table here, and an entry of the same name in ``config/loss_names.py``. Ratios compare pi (learner) with mu
(behavior) or with the proximal policy. They are stored as logarithms in nats. Shape letters: N = trained tokens,
S = sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.config.loss import LossConfig
from async_rl.config.section import look_up

LOG_RATIO_LIMIT = 60.0
"""Limit of |log ratio|, in nats, before ``exp``: e^60 is finite in float32, and its square in float64."""


def log_ratio(logprobs_N: Tensor, other_logprobs_N: Tensor, chosen_N: Tensor) -> Tensor:
    """Return log pi/other [N], clamped. Where ``chosen_N`` is False it is 0 with gradient 0, even for NaN inputs."""
    # Not a product with 0, because 0 times NaN is NaN, in the gradient too.
    ratio_N = torch.where(chosen_N, logprobs_N - other_logprobs_N, 0.0)
    return ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_log_ratio(log_ratio_N: Tensor, kept_N: Tensor, sequence_index_N: Tensor, num_sequences: int) -> Tensor:
    """Replace each token's log ratio [N] by the mean over its sequence: the length-normalised ratio of GSPO.

    arXiv:2507.18071 eq. 7, in the form of its eq. 14 (GSPO-token): the *value* is the sequence's mean; the gradient
    flows through this token's logprob with factor 1. If all tokens of a sequence have the same advantage, the mean of
    their objectives has the value and the gradient of eq. 5. The mean is over kept tokens (``kept_N``, bool); the log
    ratio of others is 0.
    """
    counts_S = sum_by(sequence_index_N, kept_N.long(), num_sequences)
    sums_S = sum_by(sequence_index_N, log_ratio_N.detach().double(), num_sequences)
    mean_N = (sums_S / counts_S.clamp(min=1))[sequence_index_N].to(log_ratio_N.dtype)
    return mean_N + (log_ratio_N - log_ratio_N.detach())


def interpolated_proximal(logprobs_N: Tensor, behavior_logprobs_N: Tensor, lag_N: Tensor) -> Tensor:
    """Estimate logprobs [N] of a proximal policy one version behind pi, without a forward pass; detached.

    A-3PO (arXiv:2512.06547): ``log prox = log mu / d + (1 - 1/d) log pi`` for a token of lag d. It interpolates
    log-linearly between the policy d versions ago and the current one. At lag 0 the proximal policy is pi, at lag 1 mu.

    Args:
        lag_N: int64 [N], versions between sampling and now, >= 0.
    """
    weight_N = torch.where(lag_N > 0, 1.0 / lag_N.clamp(min=1), 0.0).to(logprobs_N.dtype)
    return torch.lerp(logprobs_N.detach(), behavior_logprobs_N, weight_N)


def sum_by(index_N: Tensor, values_N: Tensor, size: int) -> Tensor:
    """Sum the values of each index. Return [size], in the values' dtype."""
    return values_N.new_zeros(size).index_add_(0, index_N, values_N)


class SurrogateInputs(NamedTuple):
    """The inputs of a surrogate, float [N]. All are 0 on tokens that are left out.

    Attributes:
        log_ratio: log pi/anchor, clamped, of the token or (``loss.ratio_level``) of its sequence. The anchor is mu or
            the proximal policy (``loss.anchor``). Carries grad.
        logprobs: log pi. Carries grad.
        advantages: the advantages.
        sequence_mean: replaces values [N] by the mean over their sequence, as ``sequence_log_ratio``. Only
            ``geometric_mean`` needs it.
    """

    log_ratio: Tensor
    logprobs: Tensor
    advantages: Tensor
    sequence_mean: Callable[[Tensor], Tensor] | None = None


class TokenObjective(NamedTuple):
    """Each token's term of the objective to maximise, [N]. ``policy.py`` weights, sums and negates it.

    ``capped_low`` and ``capped_high`` (bool [N]) are True where the ratio was clipped at a lower or upper bound.
    """

    objective: Tensor
    capped_low: Tensor
    capped_high: Tensor


def clipped(inputs: SurrogateInputs, loss: LossConfig) -> TokenObjective:
    """Return PPO's ``min(r A, clip(r, 1 - low, 1 + high) A)`` (arXiv:1707.06347 eq. 7; two bounds: arXiv:2503.14476 eq.
    8).

    With ``loss.dual_clip = c`` and A < 0 the value is at least ``c A`` (arXiv:1912.09729). Otherwise it would be
    unbounded as r grows. A clipped token has gradient 0. A token exactly on a bound keeps its gradient.
    """
    ratio_N = inputs.log_ratio.exp()
    low_N, high_N = _clipped_sides(ratio_N, inputs.advantages, loss)
    # Not min(), because for equal arguments min() splits the gradient between them.
    effective_N = ratio_N.masked_fill(low_N, 1 - loss.clip_low).masked_fill(high_N, 1 + loss.clip_high)
    return _dual_clipped(effective_N, inputs.advantages, low_N, high_N, loss)


def _clipped_sides(ratio_N: Tensor, advantages_N: Tensor, loss: LossConfig) -> tuple[Tensor, Tensor]:
    """Return where PPO clips the ratio at its lower and at its upper bound, bool [N] each."""
    low_N = (advantages_N < 0) & (ratio_N < 1 - loss.clip_low)
    return low_N, (advantages_N > 0) & (ratio_N > 1 + loss.clip_high)


def _dual_clipped(
    ratio_N: Tensor, advantages_N: Tensor, low_N: Tensor, high_N: Tensor, loss: LossConfig
) -> TokenObjective:
    """Return the ratio times the advantage, with ``loss.dual_clip`` as bound of the ratio at A < 0."""
    if loss.dual_clip is not None:
        dual_N = (advantages_N < 0) & (ratio_N > loss.dual_clip)
        ratio_N = ratio_N.masked_fill(dual_N, loss.dual_clip)
        high_N = high_N | dual_N
    return TokenObjective(ratio_N * advantages_N, low_N, high_N)


def clipped_weight(inputs: SurrogateInputs, loss: LossConfig) -> TokenObjective:
    """Return CISPO's ``sg(clip(r, 1 - low, 1 + high)) A log pi`` (arXiv:2506.13585 eq. 4, 5). Every token keeps a
    gradient.

    The paper uses no lower bound, which is ``clip_low = 1``. The upper bound is 1 + clip_high. For papers that state
    the bound itself (ScaleRL's eps_max), set clip_high one lower. The value can't be compared with that of ``clipped``.
    """
    ratio_N = inputs.log_ratio.detach().exp()
    low, high = 1 - loss.clip_low, 1 + loss.clip_high
    weight_N = ratio_N.clamp(low, high)
    return TokenObjective(weight_N * inputs.advantages * inputs.logprobs, ratio_N < low, ratio_N > high)


def plain(inputs: SurrogateInputs, loss: LossConfig) -> TokenObjective:
    """Return REINFORCE's ``A log pi``. ``policy.py`` multiplies it by a weight if ``loss.importance_cap`` is set."""
    nothing_N = torch.zeros_like(inputs.logprobs, dtype=torch.bool)
    return TokenObjective(inputs.advantages * inputs.logprobs, nothing_N, nothing_N)


def soft_gate(inputs: SurrogateInputs, loss: LossConfig) -> TokenObjective:
    """Return SAPO's ``4 / tau sigmoid(tau (r - 1)) A`` (arXiv:2511.20347). tau is ``sapo_positive`` where A > 0, else
    ``sapo_negative``.

    At r = 1 its gradient is A, and it fades on both sides instead of ending at a bound.
    """
    tau_N = torch.full_like(inputs.advantages, loss.sapo_negative).masked_fill(
        inputs.advantages > 0, loss.sapo_positive
    )
    gate_N = 4 / tau_N * torch.sigmoid(tau_N * (inputs.log_ratio.exp() - 1))
    nothing_N = torch.zeros_like(inputs.logprobs, dtype=torch.bool)
    return TokenObjective(gate_N * inputs.advantages, nothing_N, nothing_N)


def geometric_mean(inputs: SurrogateInputs, loss: LossConfig) -> TokenObjective:
    """Return GMPO's ``A exp(mean_t clip(log r))``, the same for each token of a sequence (arXiv:2507.20673 eq. 4).

    The clip is by token and, as PPO's, on the side that the advantage favours. A clipped token has gradient 0, but its
    bound counts in the mean. The paper clips log r at -0.4 and 0.4, which the preset says as bounds of r. It has no
    bound at A < 0; ``loss.dual_clip`` is one, for the mean.
    """
    assert inputs.sequence_mean is not None
    low_N, high_N = _clipped_sides(inputs.log_ratio.detach().exp(), inputs.advantages, loss)
    clipped_N = inputs.log_ratio.masked_fill(high_N, math.log1p(loss.clip_high))
    if loss.clip_low < 1:
        clipped_N = clipped_N.masked_fill(low_N, math.log1p(-loss.clip_low))
    return _dual_clipped(inputs.sequence_mean(clipped_N).exp(), inputs.advantages, low_N, high_N, loss)


SURROGATE_FUNCTIONS: Mapping[str, Callable[[SurrogateInputs, LossConfig], TokenObjective]] = {
    "clip": clipped,
    "cispo": clipped_weight,
    "plain": plain,
    "sapo": soft_gate,
    "gmpo": geometric_mean,
}
"""``loss.surrogate`` -> its function. The row of the same name in ``config.loss_names.SURROGATES`` lists its inputs."""


def importance_weights(log_ratio_N: Tensor, cap: float) -> Tensor:
    """Return ``min(ratio, cap)`` [N], detached: truncated importance sampling (IMPALA's rho, arXiv:1802.01561 eq.
    1).
    """
    return log_ratio_N.detach().exp().clamp(max=cap)


def kl_estimate(log_ratio_N: Tensor, estimator: str) -> Tensor:
    """Return each token's estimate of KL(pi || reference), nats [N], from ``d = log pi - log reference``.
    Differentiable.

    The estimators are Schulman's (joschu.net/blog/kl-approx.html).
    """
    return look_up(KL_FUNCTIONS, estimator, "loss.kl_estimator")(log_ratio_N)


def k1(log_ratio_N: Tensor) -> Tensor:
    """Return ``d``, which is unbiased. It is useless as a loss: its gradient is that of log pi, which is 0 on
    average.
    """
    return log_ratio_N


def k2(log_ratio_N: Tensor) -> Tensor:
    """Return ``d^2 / 2``. On samples of pi, its gradient is an unbiased estimate of the gradient of KL(pi || ref)."""
    return log_ratio_N.square() / 2


def k3(log_ratio_N: Tensor) -> Tensor:
    """Return ``e^-d - 1 + d``, which is unbiased and never negative (GRPO, arXiv:2402.03300 eq. 4).

    Its gradient is that of KL(ref || pi).
    """
    # expm1, because for small d exp(-d) - 1 + d would be rounding noise.
    return torch.expm1((-log_ratio_N).clamp(max=LOG_RATIO_LIMIT)) + log_ratio_N


KL_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""``loss.kl_estimator`` -> its function of d."""


class Weights(NamedTuple):
    """The step's loss is the sum of ``weight * token loss`` divided by the sum of ``denominator``.

    Both sums are over all micro-batches and ranks, so they are known only after the last one. A weight must therefore
    depend only on its sequence, which is never split over micro-batches.
    """

    weight: Tensor | float  # float64 [N], or one for all
    denominator: Tensor  # [], int64


def aggregate(
    kept_N: Tensor, sequence_index_N: Tensor, num_sequences: int, aggregation: str, *, max_length: int
) -> Weights:
    """Return the weights of the kept tokens (``kept_N``, bool) under ``aggregation``.

    Sequences without a kept token do not count in the denominator.
    """
    function = look_up(AGGREGATION_FUNCTIONS, aggregation, "loss.aggregation")
    return function(kept_N, sequence_index_N, num_sequences, max_length)


def token_mean(kept_N: Tensor, sequence_index_N: Tensor, num_sequences: int, max_length: int) -> Weights:
    """Return the weights for the mean over all kept tokens of the step (DAPO, arXiv:2503.14476 eq. 8)."""
    return Weights(1.0, kept_N.sum())


def sequence_mean(kept_N: Tensor, sequence_index_N: Tensor, num_sequences: int, max_length: int) -> Weights:
    """Return the weights for the mean over sequences of the mean over their kept tokens (GRPO, arXiv:2402.03300
    eq. 3).
    """
    counts_S = sum_by(sequence_index_N, kept_N.long(), num_sequences)
    return Weights(1.0 / counts_S.clamp(min=1)[sequence_index_N].double(), (counts_S > 0).sum())


def sequence_sum(kept_N: Tensor, sequence_index_N: Tensor, num_sequences: int, max_length: int) -> Weights:
    """Return the weights for the mean over sequences of their token sums, divided by the constant ``max_length``.

    Dr. GRPO (arXiv:2503.20783). RLOO's sum (arXiv:2402.14740) is the same without the constant.
    """
    counts_S = sum_by(sequence_index_N, kept_N.long(), num_sequences)
    return Weights(1.0 / max_length, (counts_S > 0).sum())


AGGREGATION_FUNCTIONS: Mapping[str, Callable[[Tensor, Tensor, int, int], Weights]] = {
    "token": token_mean,
    "sequence": sequence_mean,
    "sequence_sum": sequence_sum,
}
"""``loss.aggregation`` -> its function: kept [N], sequence index [N], number of sequences, ``sampling.max_new_tokens``.
"""
