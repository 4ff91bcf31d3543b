"""Losses from preferences: value and gradient by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.config.offline import DpoConfig
from async_rl.extensions.offline.preference import PAIR_LOSSES, PairValues, kto_kl, kto_loss, log_odds_ratio


def one_pair(chosen: float, rejected: float) -> tuple[PairValues, Tensor]:
    """A pair with 2 and 4 trained tokens, whose reference has -3 for both; and its sums, which carry grad."""
    sums = torch.tensor([chosen, rejected], dtype=torch.float64, requires_grad=True)
    reference, lengths = torch.full((1,), -3.0).double(), torch.tensor([2.0, 4.0]).double()
    return PairValues(sums[:1], sums[1:], reference, reference, lengths[:1], lengths[1:]), sums


@pytest.mark.parametrize(
    ("settings", "sums", "loss", "slopes"),
    [
        # Log ratios 1 and -1, so the margin is 0.5 * 2 = 1: log(1 + 1/e), and -0.5 sigmoid(-1).
        ({"loss": "sigmoid"}, (-2.0, -4.0), 0.313262, (-0.134471, 0.134471)),
        # 0.9 log(1 + 1/e) + 0.1 log(1 + e), and -0.5 (0.9 sigmoid(-1) - 0.1 sigmoid(1)).
        ({"loss": "sigmoid", "label_smoothing": 0.1}, (-2.0, -4.0), 0.413262, (-0.084471, 0.084471)),
        # Means of the log ratios 1/2 and -1/4, target 1: (-1/4)^2, and 2 (-1/4) / 2 and -2 (-1/4) / 4.
        ({"loss": "ipo"}, (-2.0, -4.0), 0.0625, (-0.25, 0.125)),
        # Mean log-probabilities -1 and -1: log(1 + e^0.5), and -0.5 sigmoid(0.5) / 2 and 0.5 sigmoid(0.5) / 4.
        ({"loss": "simpo"}, (-2.0, -4.0), 0.974077, (-0.155615, 0.077807)),
        ({"loss": "simpo", "gamma": 0.0}, (-2.0, -4.0), math.log(2), (-0.125, 0.0625)),
        # Probabilities 1/2 and 1/4, odds 1 and 1/3: ln 2 + 0.5 log(1 + 1/3). The log odds have slopes 2 and 4/3:
        # (-1 - 0.5 * 1/4 * 2) / 2 and 0.5 * 1/4 * 4/3 / 4.
        ({"loss": "orpo"}, (2 * math.log(0.5), 4 * math.log(0.25)), 0.836988, (-0.625, 1 / 24)),
    ],
)
def test_losses_of_a_pair_by_hand(
    settings: dict[str, Any], sums: tuple[float, float], loss: float, slopes: tuple[float, float]
):
    values, leaf = one_pair(*sums)
    found = PAIR_LOSSES[settings["loss"]](values, DpoConfig(beta=0.5, **settings))
    assert found.shape == (1,)
    found.sum().backward()
    assert found.item() == pytest.approx(loss, abs=1e-6)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx(slopes, abs=1e-6)


def test_odds_of_answers_that_are_nearly_certain_or_impossible_are_exact():
    # p = 1 - 1e-6 and p = e^-100: log odds are 6 ln 10 and -100.
    values, leaf = one_pair(2 * math.log1p(-1e-6), -400.0)
    ratio = log_odds_ratio(values)
    ratio.sum().backward()
    assert ratio.item() == pytest.approx(6 * math.log(10) + 100, rel=1e-6)
    # A certain answer has infinite odds: they are cut, and no NaN appears.
    certain, leaf = one_pair(0.0, -8.0)
    log_odds_ratio(certain).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_kto_by_hand():
    # beta 0.5, reference point 0.5. Good, log ratio 1: 1 - sigmoid(0.25). Bad, log ratio -1, weight 2:
    # 2 (1 - sigmoid(0.75)). Slopes -0.5 s (1 - s) and 2 * 0.5 s (1 - s).
    ratios = torch.tensor([1.0, -1.0], dtype=torch.float64, requires_grad=True)
    config = DpoConfig(loss="kto", beta=0.5, undesirable_weight=2.0)
    loss = kto_loss(ratios, torch.tensor([True, False]), torch.tensor(0.5), config)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([0.437823, 0.641643], abs=1e-6)
    assert ratios.grad is not None
    assert ratios.grad.tolist() == pytest.approx([-0.123067, 0.217895], abs=1e-6)


def test_the_reference_point_of_kto_is_a_mean_that_is_not_negative():
    assert kto_kl(torch.tensor([2.0, -1.0])).item() == 0.5
    assert kto_kl(torch.tensor([1.0, -3.0])).item() == 0.0


@pytest.mark.parametrize(
    "settings",
    [{"gamma": 1.0}, {"label_smoothing": 0.1, "loss": "ipo"}, {"desirable_weight": 2.0}, {"loss": "kto", "gamma": 0.1}],
)
def test_a_key_that_the_loss_does_not_read_is_refused(settings: dict[str, Any]):
    with pytest.raises(ValueError, match="expected no value with loss ="):
        DpoConfig(**settings)
