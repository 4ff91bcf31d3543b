"""Estimates of KL(pi || reference) from sampled tokens, differentiable. Pure; called by ``policy.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.config.loss import KlEstimator
from async_rl.learner.losses.ratio import LOG_RATIO_LIMIT


def kl_estimate(log_ratio_N: Tensor, estimator: KlEstimator) -> Tensor:
    """Schulman's estimators (joschu.net/blog/kl-approx.html) with ``d = log pi - log ref``, nats, [N] to [N].

    - k1: ``d``. Unbiased; as a loss without effect, for its gradient, that of log pi, is 0 on average.
    - k2: ``d^2 / 2``. Its gradient is the unbiased one of KL(pi || ref) on samples of pi.
    - k3: ``e^-d - 1 + d``. Unbiased and never negative (GRPO's, arXiv:2402.03300 eq. 4); its gradient is that of
      KL(ref || pi).
    """
    if estimator == "k1":
        return log_ratio_N
    if estimator == "k2":
        return log_ratio_N.square() / 2
    # expm1: for small d, exp(-d) - 1 + d would be rounding noise.
    return torch.expm1((-log_ratio_N).clamp(max=LOG_RATIO_LIMIT)) + log_ratio_N
