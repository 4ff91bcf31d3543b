"""Surrogates: what a token adds to the objective, as a function of its ratio and advantage. Pure; N = trained tokens.

Every function gives an *objective*, which is maximised, with its gradient; ``policy.py`` weighs, adds up and negates.
Tokens that are left out have a log ratio, logprob and advantage of 0. A new surrogate is a function here with a row in
``FUNCTIONS``, and a row in ``config.loss.SURROGATES`` that says what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.config.loss import LossConfig


class SurrogateInputs(NamedTuple):
    """All float [N]; the first two carry grad.

    ``log_ratio`` is log pi/anchor, clamped, of the token or (``loss.ratio_level``) of its sequence. The anchor is mu,
    or prox with ``loss.anchor = "proximal"``. ``logprobs`` is log pi.
    """

    log_ratio: Tensor
    logprobs: Tensor
    advantages: Tensor


class TokenObjective(NamedTuple):
    """All [N]. ``capped_low`` and ``capped_high`` (bool): the ratio was cut at a lower or upper bound.

    All False for a surrogate that cuts nothing.
    """

    objective: Tensor
    capped_low: Tensor
    capped_high: Tensor


def clipped(inputs: SurrogateInputs, loss: LossConfig) -> TokenObjective:
    """PPO's ``min(r A, clip(r, 1 - low, 1 + high) A)`` (arXiv:1707.06347 eq. 7; two bounds: arXiv:2503.14476 eq. 8).

    With ``loss.dual_clip = c``, at A < 0 no less than ``c A`` (arXiv:1912.09729), since the minimum alone has no bound
    there as r grows. A token that is cut has gradient 0; one exactly on a bound keeps its own.
    """
    advantages_N = inputs.advantages
    ratio_N = inputs.log_ratio.exp()
    low_N = (advantages_N < 0) & (ratio_N < 1 - loss.clip_low)
    high_N = (advantages_N > 0) & (ratio_N > 1 + loss.clip_high)
    # Chosen, not min(): at equal arguments min() splits the gradient between them.
    effective_N = ratio_N.masked_fill(low_N, 1 - loss.clip_low).masked_fill(high_N, 1 + loss.clip_high)
    if loss.dual_clip is not None:
        dual_N = (advantages_N < 0) & (ratio_N > loss.dual_clip)
        effective_N = effective_N.masked_fill(dual_N, loss.dual_clip)
        high_N = high_N | dual_N
    return TokenObjective(effective_N * advantages_N, low_N, high_N)


def clipped_weight(inputs: SurrogateInputs, loss: LossConfig) -> TokenObjective:
    """CISPO: ``sg(clip(r, 1 - low, 1 + high)) A log pi`` (arXiv:2506.13585 eq. 4 and 5); every token keeps a gradient.

    The paper sets no lower bound: ``clip_low = 1``. Its upper bound is 1 + clip_high; where others give the bound
    itself (ScaleRL's eps_max), clip_high is one less. The value is not comparable to that of ``clipped``.
    """
    ratio_N = inputs.log_ratio.detach().exp()
    low, high = 1 - loss.clip_low, 1 + loss.clip_high
    weight_N = ratio_N.clamp(low, high)
    return TokenObjective(weight_N * inputs.advantages * inputs.logprobs, ratio_N < low, ratio_N > high)


def plain(inputs: SurrogateInputs, loss: LossConfig) -> TokenObjective:
    """REINFORCE: ``A log pi``. ``policy.py`` multiplies by the importance weight if ``loss.importance_cap`` is set."""
    nothing_N = torch.zeros_like(inputs.logprobs, dtype=torch.bool)
    return TokenObjective(inputs.advantages * inputs.logprobs, nothing_N, nothing_N)


FUNCTIONS: Mapping[str, Callable[[SurrogateInputs, LossConfig], TokenObjective]] = {
    "clip": clipped,
    "cispo": clipped_weight,
    "plain": plain,
}
"""``loss.surrogate`` -> its function."""
