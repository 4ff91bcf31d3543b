"""Measures how much the policy differs from the behavior policy, separately for each lag (age of a token in versions).

At lag 0 the difference is noise between the engines. Staleness makes it grow with the lag. Wrong weights make it large
at every lag. ``diagnostic_sums`` computes a row of sums for each lag, on the device. Rows can be added over
micro-batches, ranks and updates. ``summarise`` turns a row into means. Quantiles of ratios come from a histogram,
because histograms can be added too. Ratios are pi/mu. N = trained tokens, L = lags.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from async_rl.learner.losses.parts import LOG_RATIO_LIMIT
from async_rl.learner.losses.policy import PolicyLoss

COUNTS = ("received", "finite", "kept", "capped_low", "capped_high", "skipped", "after_update")
"""Counts of tokens: all; those with a finite behavior logprob; those in the loss; among these, the ones whose ratio was
cut at the lower and at the upper bound; those in skipped sequences; finite ones sampled after a weight update within
their answer."""
SUMS = ("k1", "k3", "abs_log_ratio", "kept_k3", "kept_ratio", "kept_ratio_square", "after_update_k3")
"""Sums in nats. Three are over finite tokens (skipped ones included), three over kept ones, the last one over tokens
after an update."""

_FINEST = 1e-5
_WIDTH = 0.1
_HALF = math.ceil(math.asinh(LOG_RATIO_LIMIT / _FINEST) / _WIDTH)
NUM_BINS = 2 * _HALF + 1
"""Number of bins. They are 0.1 wide in asinh(log ratio / 1e-5): equally wide near 0, then each 10 % wider."""

_NAMES = (*COUNTS, *SUMS)
COLUMNS = len(_NAMES) + NUM_BINS


@torch.no_grad()
def diagnostic_sums(
    out: PolicyLoss, skipped_N: Tensor, lag_N: Tensor, num_lags: int, *, after_update_N: Tensor | None = None
) -> Tensor:
    """Return a row of sums for each lag, float64 [num_lags, COLUMNS], on the device. The last row also counts older
    tokens.

    Args:
        out: the loss of the micro-batch.
        skipped_N: bool, whether the token's sequence was skipped.
        lag_N: int64, >= 0.
        num_lags: L.
        after_update_N: bool, as ``TrainSequence.after_update``. None: no token was sampled after an update.
    """
    kept_N, d_N = out.kept, out.log_ratio
    received_N = torch.ones_like(kept_N)
    updated_N = torch.zeros_like(kept_N) if after_update_N is None else after_update_N & out.finite
    counts = torch.stack(
        [received_N, out.finite, kept_N, out.capped_low, out.capped_high, skipped_N, updated_N], 1
    ).double()
    # expm1, because for the small d of an on-policy token exp(d) - 1 - d would be rounding noise.
    k3_N = d_N.expm1() - d_N
    kept = counts[:, 2]
    ratio_N = d_N.exp() * kept
    sums = torch.stack([-d_N, k3_N, d_N.abs(), k3_N * kept, ratio_N, ratio_N.square(), k3_N * counts[:, 6]], 1)
    row_N = lag_N.clamp(max=num_lags - 1)
    by_lag = counts.new_zeros(num_lags, counts.shape[1] + sums.shape[1])
    by_lag.index_add_(0, row_N, torch.cat([counts, sums], 1))
    # A NaN in the learner's logprobs makes the step fail later. Here it must not index outside the histogram.
    bin_N = ((d_N / _FINEST).asinh_() / _WIDTH).round_().nan_to_num_().long() + _HALF
    histogram = counts.new_zeros(num_lags * NUM_BINS).index_add_(0, row_N * NUM_BINS + bin_N, kept)
    return torch.cat([by_lag, histogram.view(num_lags, NUM_BINS)], 1)


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of all tokens, or of the tokens of one lag. Ratios are over kept tokens, ``mismatch`` over finite
    ones.

    Attributes:
        tokens: number of tokens.
        kept: number of tokens in the loss.
        mismatch_k1: mean of log mu/pi, nats, an unbiased estimate of KL(mu || pi) (joschu.net/blog/kl-approx.html).
        mismatch_k3: mean of ``r - 1 - log r``, nats, an unbiased estimate of KL(mu || pi) that is never negative.
        mean_abs_log: mean |log pi - log mu|, nats.
        kl: the k3 estimate over kept tokens, nats.
        ratio_mean: mean of pi/mu.
        ratio_max, ratio_p01, ratio_p50, ratio_p99: maximum and quantiles of pi/mu. They come from the histogram, so
            their logarithm is accurate to 5 %.
        clip_low, clip_high: share of kept tokens whose ratio was clipped at the lower and at the upper bound.
        skipped: share of tokens in skipped sequences.
        out_of_range: share of tokens that ``loss.token_range`` left out one by one.
        ess: normalised effective sample size, ``(sum r)^2 / (n sum r^2)``, in (0, 1].
    """

    tokens: int
    kept: int
    mismatch_k1: float
    mismatch_k3: float
    mean_abs_log: float
    kl: float
    ratio_mean: float
    ratio_max: float
    ratio_p01: float
    ratio_p50: float
    ratio_p99: float
    clip_low: float
    clip_high: float
    skipped: float
    out_of_range: float
    ess: float

    @property
    def num_skipped(self) -> int:
        return round(self.skipped * self.tokens)

    @property
    def num_out_of_range(self) -> int:
        return round(self.out_of_range * self.tokens)


def summarise(row: np.ndarray) -> Summary:
    """Return the statistics of one row of ``diagnostic_sums`` [COLUMNS], or of a sum of rows.

    For a row without tokens, return those of a policy that equals the behavior policy.
    """
    total = dict(zip(_NAMES, row[: len(_NAMES)].tolist(), strict=True))
    received, kept, finite = max(1.0, total["received"]), max(1.0, total["kept"]), max(1.0, total["finite"])
    square = total["kept_ratio_square"]
    cumulated = row[len(_NAMES) :].cumsum()
    return Summary(
        tokens=int(total["received"]),
        kept=int(total["kept"]),
        mismatch_k1=total["k1"] / finite,
        mismatch_k3=total["k3"] / finite,
        mean_abs_log=total["abs_log_ratio"] / finite,
        kl=total["kept_k3"] / kept,
        ratio_mean=total["kept_ratio"] / kept,
        ratio_max=_quantile(cumulated, 1.0),
        ratio_p01=_quantile(cumulated, 0.01),
        ratio_p50=_quantile(cumulated, 0.5),
        ratio_p99=_quantile(cumulated, 0.99),
        clip_low=total["capped_low"] / kept,
        clip_high=total["capped_high"] / kept,
        skipped=total["skipped"] / received,
        out_of_range=(total["received"] - total["skipped"] - total["kept"]) / received,
        ess=total["kept_ratio"] ** 2 / (kept * square) if square > 0 else 1.0,
    )


def update_effect(by_lag: np.ndarray) -> dict[int, tuple[int, float, float]]:
    """Compare tokens sampled after a weight update with other tokens of the same lag.

    Return for each lag (number of tokens after an update, their mean k3, mean k3 of the other tokens), in nats. Both
    means are at the same lag, so staleness does not explain their difference. Lags without tokens of both kinds are
    left out.

    Args:
        by_lag: rows of ``diagnostic_sums``, or a sum of such.
    """
    found: dict[int, tuple[int, float, float]] = {}
    for lag, row in enumerate(by_lag):
        total = dict(zip(_NAMES, row[: len(_NAMES)].tolist(), strict=True))
        others = total["finite"] - total["after_update"]
        if total["after_update"] and others:
            after = total["after_update_k3"] / total["after_update"]
            found[lag] = int(total["after_update"]), after, (total["k3"] - total["after_update_k3"]) / others
    return found


def k3_sum_and_tokens(row: np.ndarray) -> tuple[float, int]:
    """Return the sum of the k3 estimates of one row, nats, and the number of its finite tokens."""
    return float(row[_NAMES.index("k3")]), int(row[_NAMES.index("finite")])


def _quantile(cumulated: np.ndarray, share: float) -> float:
    """Return the quantile ``share`` of the ratios from the bins' cumulated counts. 1 if there are no tokens."""
    if not cumulated[-1]:
        return 1.0
    position = int(cumulated.searchsorted(share * cumulated[-1]))
    return math.exp(_FINEST * math.sinh((position - _HALF) * _WIDTH))
