"""What a token is worth to the policy, as a function of its ratio and advantage. Pure; N = trained tokens.

Every function gives an *objective*, to be maximised, with its gradient; ``policy.py`` weighs, adds up and negates.
Inputs off the mask are already neutral: log ratio, logprob and advantage 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenObjective(NamedTuple):
    """All [N]. ``capped_low`` and ``capped_high`` (bool): the ratio was cut at a lower or upper bound."""

    objective: Tensor
    capped_low: Tensor
    capped_high: Tensor


def clipped(
    log_ratio_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenObjective:
    """PPO's ``min(r A, clip(r, 1 - low, 1 + high) A)`` (arXiv:1707.06347 eq. 7; two bounds: arXiv:2503.14476 eq. 8).

    With ``dual_clip = c``, at A < 0 no less than ``c A`` (arXiv:1912.09729), since the minimum alone has no
    bound there as r grows. A token that is cut has gradient 0; one exactly on a bound keeps its own.

    Args:
        log_ratio_N: log pi/anchor, carries grad.
        advantages_N: of the log ratio's dtype.
        clip_low: in [0, 1].
        clip_high: >= 0.
        dual_clip: > 1, or None.
    """
    ratio_N = log_ratio_N.exp()
    low_N = (advantages_N < 0) & (ratio_N < 1 - clip_low)
    high_N = (advantages_N > 0) & (ratio_N > 1 + clip_high)
    # Chosen, not min(): at equal arguments min() splits the gradient between them.
    effective_N = ratio_N.masked_fill(low_N, 1 - clip_low).masked_fill(high_N, 1 + clip_high)
    if dual_clip is not None:
        dual_N = (advantages_N < 0) & (ratio_N > dual_clip)
        effective_N = effective_N.masked_fill(dual_N, dual_clip)
        high_N = high_N | dual_N
    return TokenObjective(effective_N * advantages_N, low_N, high_N)


def clipped_weight(
    log_ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float
) -> TokenObjective:
    """CISPO: ``sg(clip(r, 1 - low, 1 + high)) A log pi`` (arXiv:2506.13585 eq. 4 and 5); every token keeps a gradient.

    The paper sets no lower bound: ``clip_low = 1``. Its bound is 1 + clip_high; where others give the bound itself
    (ScaleRL's eps_max), clip_high is one less. The value is not comparable to that of ``clipped``.
    """
    ratio_N = log_ratio_N.detach().exp()
    weight_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return TokenObjective(weight_N * advantages_N * logprobs_N, ratio_N < 1 - clip_low, ratio_N > 1 + clip_high)


def plain(logprobs_N: Tensor, advantages_N: Tensor) -> TokenObjective:
    """REINFORCE: ``A log pi``. Importance weights, if any, come on top."""
    nothing_N = torch.zeros_like(logprobs_N, dtype=torch.bool)
    return TokenObjective(advantages_N * logprobs_N, nothing_N, nothing_N)
