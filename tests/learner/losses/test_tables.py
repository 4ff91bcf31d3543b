"""Every name that ``[loss]`` takes has a function, and what the config says of it is true; KL estimators on average."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.loss import LossConfig
from async_rl.config.loss_names import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, SURROGATES
from async_rl.config.rules import STATISTICS
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


def alone(values: torch.Tensor) -> torch.Tensor:
    """The mean over a sequence of one token."""
    return values


def objective(name: str, log_ratio: float, advantage: float, **keys: Any) -> float:
    """That of one token with log pi = log ratio - 1."""
    logprobs = torch.tensor([log_ratio - 1.0], dtype=torch.float64)
    inputs = parts.SurrogateInputs(logprobs + 1.0, logprobs, torch.tensor([advantage], dtype=torch.float64), alone)
    return parts.SURROGATE_FUNCTIONS[name](inputs, LossConfig(**{"surrogate": name, **keys})).objective.item()


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
    assert [objective(name, math.log(50.0), -1.0, dual_clip=c) for c in (0, 3.0)] == pytest.approx([-50.0, -3.0])


@pytest.mark.parametrize("name", STATISTIC_FUNCTIONS)
def test_a_statistic_has_the_value_on_policy_and_the_lowest_that_its_row_says(name: str):
    behavior = torch.tensor([-0.1, -1.0, -3.0], dtype=torch.float64)
    same = token_statistic(name, torch.zeros(3, dtype=torch.float64), behavior)
    assert same.tolist() == pytest.approx([STATISTICS[name].on_policy] * 3, abs=1e-12)
    apart = torch.cat([token_statistic(name, torch.tensor([d] * 3).double(), behavior) for d in (-3.0, 0.1, 5.0)])
    assert apart.min() >= STATISTICS[name].lowest
    assert not torch.isclose(apart, same.mean()).any()


def test_tiny_differences_are_not_rounding_noise():
    # d = 1e-5 in float32: k3 is d^2 / 2 = 5e-11, far below float32's epsilon.
    assert parts.kl_estimate(torch.tensor([1e-5]), "k3").item() == pytest.approx(5e-11, rel=1e-3)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_what_each_gradient_is_on_average(estimator: Any):
    # Over all outcomes of a distribution of four: the mean of a loss's gradient on samples of pi is that of KL(pi ||
    # ref) for k2, of KL(ref || pi) for k3, and 0 for k1, which is why k1 is refused in the loss.
    logits = torch.tensor([0.3, -1.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    logprobs = logits.log_softmax(-1)
    expected_loss = (logprobs.detach().exp() * parts.kl_estimate(logprobs - reference, estimator)).sum()
    (got,) = torch.autograd.grad(expected_loss, logits, retain_graph=True)
    want = {
        "k1": 0.0 * logprobs.sum(),
        "k2": (logprobs.exp() * (logprobs - reference)).sum(),
        "k3": (reference.exp() * (reference - logprobs)).sum(),
    }[estimator]
    torch.testing.assert_close(got, torch.autograd.grad(want, logits)[0])


@given(st.floats(-1e4, 1e4, width=32))
def test_k3_is_finite_and_never_negative(d: float):
    assert 0 <= parts.kl_estimate(torch.tensor([d], dtype=torch.float64), "k3").item() < math.inf
