"""Every name that ``[loss]`` takes has a function, and every function is named; what the config says of it is true."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.config.loss import LossConfig
from async_rl.config.loss_names import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, SKIP_STATISTICS, SURROGATES
from async_rl.config.rules import STATISTICS
from async_rl.config.section import look_up
from async_rl.errors import ConfigError
from async_rl.learner.losses import parts
from async_rl.learner.losses.advantages import ADVANTAGE_FUNCTIONS
from async_rl.learner.losses.rules import STATISTIC_FUNCTIONS, token_statistic
from tests.learner.losses.cases import SETTINGS, settings


@pytest.mark.parametrize(
    ("names", "functions"),
    [
        (SURROGATES, parts.SURROGATE_FUNCTIONS),
        (AGGREGATIONS, parts.AGGREGATION_FUNCTIONS),
        ([name for name, row in STATISTICS.items() if not row.of_step], STATISTIC_FUNCTIONS),
        (KL_ESTIMATORS, parts.KL_FUNCTIONS),
        ([name for name, row in ADVANTAGES.items() if not row.has_critic], ADVANTAGE_FUNCTIONS),
    ],
    ids=["surrogate", "aggregation", "statistic", "kl_estimator", "advantage"],
)
def test_config_and_learner_know_the_same_names_in_the_same_order(names: Mapping[str, Any], functions: Any):
    assert list(names) == list(functions)


def test_every_surrogate_is_compared_with_a_plain_loop():
    assert {settings(name).surrogate for name in SETTINGS} == set(SURROGATES)


def test_an_unknown_name_is_refused_where_it_is_looked_up_with_the_known_ones():
    known = ", ".join(SURROGATES)
    with pytest.raises(ConfigError, match=rf"loss\.surrogate: expected one of {known}, got 'ppo'"):
        look_up(parts.SURROGATE_FUNCTIONS, "ppo", "loss.surrogate")


def alone(values: torch.Tensor) -> torch.Tensor:
    """The mean over a sequence of one token."""
    return values


def objective(name: str, log_ratio: float, advantage: float, **keys: Any) -> tuple[float, float]:
    """The objective of one token with log pi = log ratio - 1, and its derivative by log pi."""
    logprobs = torch.tensor([log_ratio - 1.0], dtype=torch.float64, requires_grad=True)
    inputs = parts.SurrogateInputs(logprobs + 1.0, logprobs, torch.tensor([advantage], dtype=torch.float64), alone)
    value = parts.SURROGATE_FUNCTIONS[name](inputs, LossConfig(**{"surrogate": name, **keys})).objective
    value.sum().backward()
    assert logprobs.grad is not None
    return value.item(), logprobs.grad.item()


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 3.0])
def test_every_surrogate_is_the_policy_gradient_on_policy(name: str, advantage: float):
    # At ratio 1 nothing is cut, and d objective / d log pi = A.
    value, gradient = objective(name, 0.0, advantage)
    assert gradient == pytest.approx(advantage)
    assert math.isfinite(value)


@pytest.mark.parametrize("name", SURROGATES)
def test_a_surrogate_that_says_it_has_a_ratio_depends_on_it_and_no_other_does(name: str):
    # log pi is -1 both times: the tokens differ only in their ratio, which lies inside every clip range.
    held = torch.tensor([-1.0], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    run = parts.SURROGATE_FUNCTIONS[name]
    values = [
        run(parts.SurrogateInputs(ratio.log(), held, one, alone), LossConfig(surrogate=name)).objective.item()
        for ratio in (one, one * 1.1)
    ]
    assert (values[0] != values[1]) == SURROGATES[name].has_ratio


@pytest.mark.parametrize("name", SURROGATES)
def test_a_surrogate_that_says_it_has_a_dual_clip_is_bounded_by_it(name: str):
    if not SURROGATES[name].has_dual_clip:
        with pytest.raises(ValueError, match="dual_clip"):
            LossConfig(surrogate=name, dual_clip=3.0)
        return
    free, _ = objective(name, math.log(50.0), -1.0, dual_clip=0)
    bounded, _ = objective(name, math.log(50.0), -1.0, dual_clip=3.0)
    assert (free, bounded) == (pytest.approx(-50.0), pytest.approx(-3.0))


@pytest.mark.parametrize("name", STATISTIC_FUNCTIONS)
def test_a_statistic_has_the_value_on_policy_and_the_lowest_that_its_row_says(name: str):
    behavior = torch.tensor([-0.1, -1.0, -3.0], dtype=torch.float64)
    same = token_statistic(name, torch.zeros(3, dtype=torch.float64), behavior)
    assert same.tolist() == pytest.approx([STATISTICS[name].on_policy] * 3, abs=1e-12)
    apart = torch.cat([token_statistic(name, torch.tensor([d] * 3).double(), behavior) for d in (-3.0, 0.1, 5.0)])
    assert apart.min() >= STATISTICS[name].lowest
    assert not torch.isclose(apart, same.mean()).any()


@pytest.mark.parametrize("name", SKIP_STATISTICS)
def test_a_skip_statistic_of_ratios_is_one_of_the_statistics(name: str):
    row = SKIP_STATISTICS[name]
    assert row.of in STATISTICS
    assert row.is_ratio == (row.of in ("ratio", "k1"))


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_a_kl_estimator_that_may_be_a_loss_pulls_to_the_reference(name: str):
    d = np.array([-1.5, -0.2, 0.0, 0.3, 2.0])
    log_ratio = torch.tensor(d, requires_grad=True)
    parts.KL_FUNCTIONS[name](log_ratio).sum().backward()
    assert log_ratio.grad is not None
    assert np.array_equal(np.sign(log_ratio.grad.numpy()), np.sign(d)) == KL_ESTIMATORS[name].is_loss


@pytest.mark.parametrize("name", ADVANTAGE_FUNCTIONS)
def test_an_advantage_is_0_on_average_and_without_a_contrast(name: str):
    estimate = ADVANTAGE_FUNCTIONS[name]
    assert estimate(np.array([1.0, 0.0, 0.0, 0.5])).sum() == pytest.approx(0.0)
    assert not estimate(np.ones(4)).any()
    assert not estimate(np.ones(1)).any()
