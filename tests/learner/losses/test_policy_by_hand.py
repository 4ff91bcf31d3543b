"""The policy loss, formula by formula, against numbers worked by hand. pi/mu are given; mu = e^-1 everywhere."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from async_rl.config.loss import LossConfig
from async_rl.learner.losses.parts import LOG_RATIO_LIMIT
from async_rl.learner.losses.policy import policy_loss
from tests.learner.losses.cases import Run, of_ratios, run

DAPO = LossConfig()
NAN = math.nan
LN4, LN10 = math.log(4), math.log(10)


def loss_of(ratios: list[float], advantages: list[float], lengths: list[int] | None = None, **changes: Any) -> Run:
    """Under ``changes`` to DAPO's settings."""
    return run(of_ratios(ratios, advantages, lengths), LossConfig(**changes))


def near(expected: list[float] | float) -> Any:
    return pytest.approx(expected, rel=1e-9, abs=1e-9)


REINFORCE = {"preset": "reinforce", "aggregation": "token"}
GSPO = {"preset": "gspo", "anchor": "behavior", "importance_cap": 0}
"""With its ratio to the behavior policy: the paper's, where that also started the step."""

BY_HAND: dict[str, tuple[list[float], list[float], list[int] | None, dict[str, Any], float, list[float]]] = {
    # The loss is -(2 - 3 + 0.5), and its derivative by a logprob -ratio * A.
    "on policy": ([1.0] * 3, [2.0, -3.0, 0.5], None, {}, 0.5, [-2.0, 3.0, -0.5]),
    # A = 2, range [0.8, 1.28]. Ratio 1.5: -1.28 * 2, gradient 0. Ratio 0.5: min takes 0.5 * 2, gradient -1. Ratio 1.2
    # lies inside: -2.4 both.
    "clipped above": ([1.5, 0.5, 1.2], [2.0] * 3, None, {}, -2.56 - 1.0 - 2.4, [0.0, -1.0, -2.4]),
    # A = -2. Ratio 0.5: min(-1, 0.8 * -2) is the clipped one, so +1.6 and no gradient. Ratio 1.5: -(1.5 * -2) = 3.
    "clipped below": ([0.5, 1.5], [-2.0, -2.0], None, {}, 1.6 + 3.0, [0.0, 3.0]),
    # A = -1. By default the token at ratio 148 can't turn the gradient of a batch: 9 others at ratio 1 have 1 each.
    "dual clip": (
        [148.0, *[1.0] * 9], [-1.0] * 10, None, {"skip_threshold": 0}, 10.0 + 9.0, [0.0, *[1.0] * 9],
    ),
    # Sequence 0: ratios 2 and 1/2, geometric mean 1. Sequence 1: 1.5 and 1.28^2 / 1.5 -> mean 1.28. Clip [0.8, 1.5].
    # Loss: -(1 * 3 + 1.28 * 2), each a mean over 2 tokens; gradient s A / 2 a token.
    "gspo": (
        [2.0, 0.5, 1.5, 1.28**2 / 1.5], [3.0, 3.0, 2.0, 2.0], [2, 2], GSPO | {"clip_low": 0.2, "clip_high": 0.5},
        -3.0 - 2.56, [-1.5, -1.5, -1.28, -1.28],
    ),
    # log pi = log ratio - 1. Weight min(r, 1.5): 1.5, 0.1, and no lower bound. A = 2, -2.
    "cispo": (
        [4.0, 0.1], [2.0, -2.0], None, {"preset": "cispo", "clip_high": 0.5},
        -3.0 * (LN4 - 1) + 0.2 * (-LN10 - 1), [-3.0, 0.2],
    ),
    # min(4, 2) * 2 and min(0.5, 2) * -1: the weight is a constant to the gradient.
    "truncated weight": (
        [4.0, 0.5], [2.0, -1.0], None, REINFORCE, -4.0 * (LN4 - 1) + 0.5 * (-LN4 / 2 - 1), [-4.0, 0.5],
    ),
    # Ratio 1, A = 1, -2, 4 in sequences of 2 and 1, the third empty. Token: -(1 - 2 + 4), over 3 tokens. Sequence:
    # -((1 - 2) / 2 + 4), over 2. Sum: -(1 - 2 + 4) / 8 (the longest there can be), over 2.
    "by token": ([1.0] * 3, [1.0, -2.0, 4.0], [2, 1, 0], {"aggregation": "token"}, -3.0, [-1.0, 2.0, -4.0]),
    "by sequence": ([1.0] * 3, [1.0, -2.0, 4.0], [2, 1, 0], {"aggregation": "sequence"}, -3.5, [-0.5, 1.0, -4.0]),
    "by sum": (
        [1.0] * 3, [1.0, -2.0, 4.0], [2, 1, 0], {"aggregation": "sequence_sum"}, -0.375, [-0.125, 0.25, -0.5],
    ),
}  # fmt: skip
"""Name -> ratios, advantages, lengths of the sequences, settings; loss before the division, its gradient by log pi."""
DENOMINATORS = {"gspo": 2, "by sequence": 2, "by sum": 2}
CAPPED = {
    "clipped above": ([], [0]), "clipped below": ([0], []), "cispo": ([], [0]), "dual clip": ([], [0]),
    "truncated weight": ([], [0]),
}  # fmt: skip
"""Name -> the tokens that count as capped below and above."""


@pytest.mark.parametrize("name", BY_HAND)
def test_loss_and_gradient_by_hand(name: str):
    ratios, advantages, lengths, changes, loss, expected = BY_HAND[name]
    out, gradient, _ = loss_of(ratios, advantages, lengths, **changes)
    assert out.loss_sum.item() == near(loss)
    assert gradient == near(expected)
    assert out.denominator.item() == DENOMINATORS.get(name, len(ratios))
    capped = tuple([i for i, is_in in enumerate(of.tolist()) if is_in] for of in (out.capped_low, out.capped_high))
    assert capped == CAPPED.get(name, ([], []))


def test_interpolated_proximal_policy_is_one_version_behind():
    # pi/mu = 16. Lag 0: prox = pi. Lag 1: prox = mu. Lag 4: log prox is 1/4 mu's and 3/4 pi's, so pi/prox = 2 and
    # prox/mu = 8. Clip [0, 11], cap 100, A = 1: weight * ratio is 16 * 1, 1 * 11 (clipped), 8 * 2.
    inputs = of_ratios([16.0] * 3, [1.0] * 3, lag=[0, 1, 4])
    loss = LossConfig(
        preset="decoupled_ppo", anchor="interpolated", clip_high=10.0, importance_cap=100.0, skip_threshold=0
    )
    out, gradient, _ = run(inputs, loss)
    assert out.loss_sum.item() == near(-16.0 - 11.0 - 16.0)
    assert gradient == near([-16.0, 0.0, -16.0])


def test_decoupled_ppo_at_the_first_update_of_a_batch_is_truncated_importance_sampling():
    # pi/mu is 0.5, 1, 8, whose cap is 5; prox is pi, so nothing is clipped: d loss/d logp = -min(pi/mu, 5) A.
    first = of_ratios([0.5, 1.0, 8.0], [1.0, -1.0, 2.0])
    recomputed = replace(first, proximal_logprobs=first.logprobs.detach())
    for inputs in (first, recomputed):
        inputs.logprobs.grad = None
        assert run(inputs, LossConfig(preset="decoupled_ppo")).gradient == near([-0.5, 1.0, -10.0])


def test_historic_rule_skips_the_whole_micro_batch_by_its_mean():
    # (5 + 1 + 1) / 3 = 2.33: by sequence only the first is above 2; by micro-batch all are.
    out = loss_of([5.0, 1.0, 1.0], [1.0] * 3, [1, 1, 1], skip_threshold=2.0, skip_unit="micro_batch").out
    assert (out.skipped.tolist(), out.denominator.item()) == ([True, True, True], 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_behavior_logprob_skips_its_sequence_and_never_reaches_the_gradient(bad: float):
    inputs = of_ratios([1.0] * 3, [1.0] * 3, [2, 1], behavior_logprobs=[bad, -1.0, -1.0])
    out, gradient, _ = run(inputs, LossConfig(skip_threshold=0))
    assert (out.skipped.tolist(), out.finite.tolist()) == ([True, False], [False, True, True])
    assert (gradient, out.loss_sum.item()) == ([0.0, 0.0, -1.0], -1.0)


def test_nan_advantage_of_a_skipped_sequence_does_not_reach_the_gradient_and_one_of_the_learner_is_not_hidden():
    out, gradient, _ = loss_of([100.0, 1.0], [NAN, 1.0], [1, 1])
    assert (out.loss_sum.item(), gradient) == (near(-1.0), near([0.0, -1.0]))
    inputs = of_ratios([1.0, 1.0], [1.0, 1.0], [1, 1])
    inputs = replace(inputs, logprobs=torch.tensor([NAN, -1.0], dtype=torch.float64, requires_grad=True))
    assert math.isnan(run(inputs, DAPO).out.loss_sum.item())


def test_enormous_ratio_stays_finite_in_float32():
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    inputs = of_ratios([1.0, 1.0], [1.0, 1.0], [1, 1])
    inputs = replace(inputs, logprobs=logprobs, behavior_logprobs=torch.tensor([-1e4, 0.0]), advantages=-torch.ones(2))
    out, gradient, _ = run(inputs, LossConfig(skip_threshold=0, dual_clip=0))  # pyright: ignore[reportArgumentType]
    assert out.loss_sum.item() == pytest.approx(math.exp(LOG_RATIO_LIMIT), rel=1e-5)
    assert all(math.isfinite(g) for g in gradient)


@pytest.mark.parametrize("preset", ["dapo", "gspo", "cispo", "reinforce"])
def test_no_tokens_give_zeros_that_still_carry_a_gradient(preset: Any):
    hidden = torch.ones(3, requires_grad=True)
    inputs = replace(of_ratios([], [], [0]), logprobs=hidden[:0] * 2)
    out = policy_loss(inputs, LossConfig(preset=preset), max_length=8)
    out.loss_sum.backward()
    assert (out.loss_sum.item(), out.denominator.item(), out.skipped.tolist()) == (0.0, 0, [False])
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [0.0, 0.0, 0.0]
