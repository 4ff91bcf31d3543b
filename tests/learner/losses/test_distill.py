"""The teacher's terms, against numbers worked by hand: values and gradients of every form."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.config.distill import DistillConfig
from async_rl.config.loss import LossConfig
from async_rl.learner.losses.policy import PolicyInputs, policy_loss
from tests.learner.losses.cases import Case, inputs_of

LOG2, LOG3 = math.log(2.0), math.log(3.0)
PLAIN = LossConfig.model_validate({"surrogate": "plain", "importance_cap": 0, "skip_threshold": 0})


def log(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def near(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-9, abs=1e-9)


def inputs(policy: Tensor, behavior: Tensor, teacher: Tensor, advantages: list[float], **more: Any) -> PolicyInputs:
    """Those of one sequence at lag 0."""
    n = len(policy)
    case = Case(policy.tolist(), behavior.tolist(), advantages, [], [], [0.0] * n, [0] * n, [n])
    return replace(inputs_of(case), logprobs=policy.requires_grad_(), teacher_logprobs=teacher, **more)


def loss_and_gradient(given: PolicyInputs, loss: LossConfig = PLAIN, **distill: Any) -> tuple[float, list[float]]:
    out = policy_loss(given, loss, max_length=9, distill=DistillConfig(teacher="t", **distill))
    (gradient,) = torch.autograd.grad(out.loss_sum, given.logprobs)
    return out.loss_sum.item(), gradient.tolist()


def test_the_advantage_is_that_of_the_reward_and_the_teachers_log_ratio_times_the_coefficient():
    # pi = [1/2, 1/4], T = [1/4, 1/2]: log T - log pi = [-log 2, log 2]. coef 2, rewards 1: A = 1 -+ 2 log 2.
    # plain without weights: the gradient of -A log pi by log pi is -A.
    given = inputs(log(0.5, 0.25), log(0.5, 0.25), log(0.25, 0.5), [1.0, 1.0])
    assert loss_and_gradient(given, coef=2.0)[1] == near([-(1 - 2 * LOG2), -(1 + 2 * LOG2)])
    assert loss_and_gradient(given, coef=2.0, rewards=False)[1] == near([2 * LOG2, -2 * LOG2])


def test_stale_samples_get_the_log_ratio_of_the_trained_policy_and_the_importance_weight():
    # mu = 1/4, pi = 1/2, T = 1/4: A = log T - log pi = -log 2 (with mu it would be 0); weight pi/mu = 2.
    given = inputs(log(0.5), log(0.25), log(0.25), [0.0])
    weighted = PLAIN.model_copy(update={"importance_cap": 5.0})
    assert loss_and_gradient(given, weighted)[1] == near([2 * LOG2])
    # PPO's clip knows the teacher's sign: A < 0 at ratio 2 is not clipped, and its gradient is -ratio A.
    assert loss_and_gradient(given, LossConfig(skip_threshold=None))[1] == near([2 * LOG2])


def test_the_estimated_kl_is_the_weighted_k3_and_its_gradient_the_weighted_log_ratio():
    # mu = 1/4, pi = 1/2, T = 1/6: d = log 3, k3 = e^-d - 1 + d = 1/3 - 1 + log 3, weight 2. Gradient of w k3 by log pi:
    # w (1 - e^-d) + w k3 = w d, by hand 2 log 3.
    given = inputs(log(0.5), log(0.25), log(1 / 6), [7.0])
    value, gradient = loss_and_gradient(given, form="loss", rewards=False, coef=0.5)
    assert value == near(0.5 * 2 * (LOG3 - 2 / 3))
    assert gradient == near([0.5 * 2 * LOG3])
    # With rewards: -A more, of the plain surrogate.
    assert loss_and_gradient(given, form="loss", coef=0.5)[1] == near([LOG3 - 7.0])


def test_the_loss_over_the_likeliest_tokens_has_no_importance_weight_and_skips_masked_tokens():
    # The token of ratio 100 is masked by token_range, and its NaN reaches no gradient.
    top = torch.cat([log(0.25, 0.25)[None], torch.full((1, 2), math.nan, dtype=torch.float64)]).requires_grad_()
    teacher_top = log(0.5, 0.25)[None].repeat(2, 1)
    given = inputs(
        log(0.5, 0.5), log(0.25, 0.005), log(0.5, 0.5), [0.0, 0.0], top_logprobs=top, teacher_top_logprobs=teacher_top
    )
    loss = PLAIN.model_copy(update={"token_range": (0.1, 10.0)})
    out = policy_loss(given, loss, max_length=9, distill=DistillConfig(teacher="t", form="loss", top_k=2, coef=3.0))
    assert out.kept.tolist() == [True, False]
    assert out.loss_sum.item() == near(3 * LOG2 / 4)
    (gradient,) = torch.autograd.grad(out.loss_sum, top)
    assert gradient.tolist() == [near([-3 * LOG2 / 2, -3 * LOG2 / 4]), [0.0, 0.0]]
