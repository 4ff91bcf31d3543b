"""The critic's loss by hand: squared errors, and where the clip takes over."""

from __future__ import annotations

import torch

from async_rl.learner.losses.value import value_loss


def losses(values: list[float], targets: list[float], old: list[float], clip: float) -> tuple[list, list, list]:
    leaf = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    each, clipped = value_loss(leaf, torch.tensor(targets), torch.tensor(old), clip)
    each.sum().backward()
    assert leaf.grad is not None
    return each.tolist(), clipped.tolist(), leaf.grad.tolist()


def test_a_value_that_went_far_towards_its_target_gets_no_gradient_and_one_that_went_away_keeps_it():
    # Old value 0, clip 0.5. V = 1 to target 2: clipped 0.5, error 1.5 instead of 1: 1.125, no gradient.
    # V = 1 to target -1: the plain error 2 is the larger: 2, gradient 2. V = 0.25 is within the clip: equal errors.
    each, clipped, gradient = losses([1.0, 1.0, 0.25], [2.0, -1.0, 1.25], [0.0, 0.0, 0.0], 0.5)
    assert each == [1.125, 2.0, 0.5]
    assert clipped == [True, False, False]
    assert gradient == [0.0, 2.0, -1.0]
