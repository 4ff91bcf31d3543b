"""Losses that learn from preferences: pure functions of the summed log-probabilities of answers.

``dpo.py`` calls them with the values of a whole step, and trains with their slopes (``slopes.py``). Shape letters: P =
pairs of a chosen and a rejected answer, A = single answers. Log-probabilities are in nats, summed over the trained
tokens of an answer. Each function returns one loss per pair or answer; the loss of a step is their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from async_rl.config.offline import DpoConfig

_NEVER_CERTAIN = -1e-7
"""The odds of an answer whose every token is certain are infinite, so mean log-probabilities are at most this."""


class PairValues(NamedTuple):
    """What the losses read of pairs, float [P] each.

    Attributes:
        chosen, rejected: summed log-probabilities under the policy; carry grad.
        reference_chosen, reference_rejected: the same under the reference model; 0 where a loss has none.
        chosen_length, rejected_length: numbers of trained tokens.
    """

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_length: Tensor
    rejected_length: Tensor

    @property
    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """``log pi/ref`` of the chosen and of the rejected answers."""
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """The mean log-probabilities of the tokens of the chosen and of the rejected answers."""
        return self.chosen / self.chosen_length, self.rejected / self.rejected_length


def sigmoid_loss(values: PairValues, config: DpoConfig) -> Tensor:
    """DPO, arXiv:2305.18290 eq. 7: ``-log sigmoid(beta (log pi/ref(chosen) - log pi/ref(rejected)))``.

    With ``label_smoothing`` e, each label counts as wrong with probability e, as in conservative DPO (E. Mitchell, "A
    note on DPO with noisy preferences"): ``(1 - e) loss(margin) + e loss(-margin)``.
    """
    chosen_P, rejected_P = values.log_ratios
    margin_P = config.beta * (chosen_P - rejected_P)
    smoothing = config.label_smoothing
    return -(1 - smoothing) * logsigmoid(margin_P) - smoothing * logsigmoid(-margin_P)


def ipo_loss(values: PairValues, config: DpoConfig) -> Tensor:
    """IPO, arXiv:2310.12036 eq. 17: ``(log pi/ref(chosen) - log pi/ref(rejected) - 1 / (2 beta))^2``; tau is ``beta``.

    Unlike there, log ratios are means over an answer's tokens, so that the target does not depend on lengths. TRL does
    the same.
    """
    chosen_P, rejected_P = values.log_ratios
    difference_P = chosen_P / values.chosen_length - rejected_P / values.rejected_length
    return (difference_P - 1 / (2 * config.beta)).square()


def simpo_loss(values: PairValues, config: DpoConfig) -> Tensor:
    """SimPO, arXiv:2405.14734 eq. 6: ``-log sigmoid(beta (mean log pi(chosen) - mean log pi(rejected)) - gamma)``."""
    chosen_P, rejected_P = values.means
    return -logsigmoid(config.beta * (chosen_P - rejected_P) - config.target_margin)


def orpo_loss(values: PairValues, config: DpoConfig) -> Tensor:
    """ORPO, arXiv:2403.07691 eqs. 6 and 7: the mean negative log-likelihood of the chosen answer, plus ``beta`` times
    ``-log sigmoid(log odds ratio)``. The likelihood of an answer is the exponential of its mean log-probability.

    The likelihood is that of the answer alone.
    """
    return -values.means[0] - config.beta * logsigmoid(log_odds_ratio(values))


def log_odds_ratio(values: PairValues) -> Tensor:
    """Return ``log(odds(chosen) / odds(rejected))`` with ``odds = p / (1 - p)``, p as in ``orpo_loss``, [P]."""
    chosen_P, rejected_P = (mean_P.clamp(max=_NEVER_CERTAIN) for mean_P in values.means)
    return chosen_P - rejected_P - (_log_one_minus_exp(chosen_P) - _log_one_minus_exp(rejected_P))


def _log_one_minus_exp(values: Tensor) -> Tensor:
    """Return ``log(1 - exp(x))`` for x < 0, without cancellation at either end."""
    near = values > -math.log(2)
    # Each branch gets values that it can take: a NaN in the other one would reach the gradient.
    close, far = torch.where(near, values, -1.0), torch.where(near, -1.0, values)
    return torch.where(near, (-close.expm1()).log(), (-far.exp()).log1p())


PAIR_LOSSES: Mapping[str, Callable[[PairValues, DpoConfig], Tensor]] = {
    "sigmoid": sigmoid_loss,
    "ipo": ipo_loss,
    "simpo": simpo_loss,
    "orpo": orpo_loss,
}
"""``dpo.loss`` -> its function, of those that compare pairs."""


def kto_loss(log_ratios_A: Tensor, is_good_A: Tensor, kl: Tensor, config: DpoConfig) -> Tensor:
    """KTO, arXiv:2402.01306: the weight of the label times ``1 - sigmoid(beta (log pi/ref - kl))`` for
    a good answer, and times ``1 - sigmoid(beta (kl - log pi/ref))`` for a bad one.

    Args:
        log_ratios_A: ``log pi/ref`` of each answer; carries grad.
        is_good_A: bool, the label of each answer.
        kl: [], the reference point (``kto_kl``); without grad.
        config: the section ``dpo``.
    """
    sign_A = torch.where(is_good_A, 1.0, -1.0).to(log_ratios_A)
    weight_A = torch.where(is_good_A, config.desirable_weight, config.undesirable_weight).to(log_ratios_A)
    return weight_A * (1 - torch.sigmoid(config.beta * sign_A * (log_ratios_A - kl)))


def kto_kl(mismatched_log_ratios_A: Tensor) -> Tensor:
    """Return KTO's reference point, an estimate of KL(pi || ref), [], without grad.

    It is the mean of ``log pi/ref`` over prompts with an answer to another prompt, at least 0 (arXiv:2402.01306).
    """
    return mismatched_log_ratios_A.detach().mean().clamp(min=0)
