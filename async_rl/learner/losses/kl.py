"""Estimates of KL(pi || reference) from sampled tokens, differentiable. Pure; called by ``policy.py``.

Schulman's estimators (joschu.net/blog/kl-approx.html) with ``d = log pi - log ref`` in nats, [N] to [N].
``advantages/estimators.py`` has the same estimates as plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from async_rl.config.section import look_up
from async_rl.learner.losses.ratio import LOG_RATIO_LIMIT


def kl_estimate(log_ratio_N: Tensor, estimator: str) -> Tensor:
    """The estimate of the name ``estimator`` for each token, nats."""
    return look_up(FUNCTIONS, estimator, "loss.kl_estimator")(log_ratio_N)


def k1(log_ratio_N: Tensor) -> Tensor:
    """``d``. Unbiased; as a loss it has no effect, for its gradient, that of log pi, is 0 on average."""
    return log_ratio_N


def k2(log_ratio_N: Tensor) -> Tensor:
    """``d^2 / 2``. Its gradient is the unbiased one of KL(pi || ref) on samples of pi."""
    return log_ratio_N.square() / 2


def k3(log_ratio_N: Tensor) -> Tensor:
    """``e^-d - 1 + d``. Unbiased and never negative (GRPO, arXiv:2402.03300 eq. 4).

    Its gradient is that of KL(ref || pi).
    """
    # expm1: for small d, exp(-d) - 1 + d would be rounding noise.
    return torch.expm1((-log_ratio_N).clamp(max=LOG_RATIO_LIMIT)) + log_ratio_N


FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""``loss.kl_estimator`` -> its function."""
