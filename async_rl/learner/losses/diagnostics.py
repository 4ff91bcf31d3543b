"""Measures how much the policy differs from the behavior policy, separately for each lag (age of a token in versions).

At lag 0 the difference is noise between the engines. Staleness makes it grow with the lag. Wrong weights make it large
at every lag. ``diagnostic_sums`` computes a row of sums for each lag, on the device. Rows can be added over
micro-batches, ranks and updates. ``summarise`` turns a row into means. Ratios are pi/mu. N = trained tokens, L = lags.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from async_rl.learner.losses.policy import PolicyLoss

_COUNTS = ("received", "finite", "kept", "capped_low", "capped_high", "skipped", "after_update")
"""Counts of tokens: all; those with a finite behavior logprob; those in the loss; among these, the ones whose ratio was
cut at the lower and at the upper bound; those in skipped sequences; finite ones sampled after a weight update within
their answer."""
_SUMS = ("k1", "k3", "abs_log_ratio", "kept_k3", "kept_ratio", "kept_ratio_square", "after_update_k3")
"""Sums in nats. Three are over finite tokens (skipped ones included), three over kept ones, the last one over tokens
after an update."""

_NAMES = (*_COUNTS, *_SUMS)
COLUMNS = len(_NAMES)


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
        after_update_N: bool, as ``sequences.after_update``. None: no token was sampled after an update.
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
    by_lag = counts.new_zeros(num_lags, COLUMNS)
    return by_lag.index_add_(0, row_N, torch.cat([counts, sums], 1))


def summarise(row: np.ndarray) -> dict[str, float]:
    """Return the statistics of one row of ``diagnostic_sums`` [COLUMNS], or of a sum of rows, by name. Those of ratios
    are over kept tokens, ``mismatch`` over finite ones.

    - ``tokens``, ``kept``: numbers of all tokens, and of those in the loss.
    - ``mismatch_k1``: mean of log mu/pi, nats, an unbiased estimate of KL(mu || pi) (joschu.net/blog/kl-approx.html).
    - ``mismatch_k3``: mean of ``r - 1 - log r``, nats, an unbiased estimate of KL(mu || pi) that is never negative.
    - ``mean_abs_log``: mean |log pi - log mu|, nats.
    - ``kl``: the k3 estimate over kept tokens, nats.
    - ``ratio_mean``: mean of pi/mu.
    - ``clip_low``, ``clip_high``: share of kept tokens whose ratio was clipped at the lower and at the upper bound.
    - ``num_skipped``, ``num_out_of_range``: tokens in skipped sequences, and those that ``loss.token_range`` left out
      one by one. ``skipped`` and ``out_of_range`` are their shares.
    - ``ess``: normalised effective sample size, ``(sum r)^2 / (n sum r^2)``, in (0, 1].

    A row without tokens has those of a policy that equals the behavior policy.
    """
    total = dict(zip(_NAMES, row.tolist(), strict=True))
    received, kept, finite = (max(1.0, total[name]) for name in ("received", "kept", "finite"))
    square, out_of_range = total["kept_ratio_square"], total["received"] - total["skipped"] - total["kept"]
    return {
        "tokens": int(total["received"]),
        "kept": int(total["kept"]),
        "mismatch_k1": total["k1"] / finite,
        "mismatch_k3": total["k3"] / finite,
        "mean_abs_log": total["abs_log_ratio"] / finite,
        "kl": total["kept_k3"] / kept,
        "ratio_mean": total["kept_ratio"] / kept,
        "clip_low": total["capped_low"] / kept,
        "clip_high": total["capped_high"] / kept,
        "num_skipped": int(total["skipped"]),
        "skipped": total["skipped"] / received,
        "num_out_of_range": int(out_of_range),
        "out_of_range": out_of_range / received,
        "ess": total["kept_ratio"] ** 2 / (kept * square) if square > 0 else 1.0,
    }


def update_effect(by_lag: np.ndarray) -> float | None:
    """Return how much larger the k3 estimate is of tokens sampled after a weight update than of other tokens, in nats.

    It is a mean over tokens after an update, each compared with the mean of the others of its lag, so staleness does
    not explain it. None if no lag has tokens of both kinds.

    Args:
        by_lag: rows of ``diagnostic_sums``, or a sum of such.
    """
    surplus = number = 0.0
    for row in by_lag:
        total = dict(zip(_NAMES, row.tolist(), strict=True))
        after, others = total["after_update"], total["finite"] - total["after_update"]
        if after and others:
            surplus += total["after_update_k3"] - after * (total["k3"] - total["after_update_k3"]) / others
            number += after
    return surplus / number if number else None
