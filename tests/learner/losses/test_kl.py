"""The KL estimators, by hand, and what their gradients are on average."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.learner.losses.parts import kl_estimate


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    # d = ln 4: d; d^2 / 2, slope d; 1/4 - 1 + ln 4, slope 1 - 1/4.
    [("k1", math.log(4), 1.0), ("k2", math.log(4) ** 2 / 2, math.log(4)), ("k3", math.log(4) - 0.75, 0.75)],
)
def test_estimators_by_hand(estimator: Any, value: float, slope: float):
    d = torch.tensor([math.log(4)], dtype=torch.float64, requires_grad=True)
    out = kl_estimate(d, estimator)
    out.sum().backward()
    assert out.item() == pytest.approx(value)
    assert d.grad is not None
    assert d.grad.item() == pytest.approx(slope)


def test_tiny_differences_are_not_rounding_noise():
    # d = 1e-5 in float32: k3 is d^2 / 2 = 5e-11, far below float32's epsilon.
    assert kl_estimate(torch.tensor([1e-5]), "k3").item() == pytest.approx(5e-11, rel=1e-3)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_what_each_gradient_is_on_average(estimator: Any):
    # Over all outcomes of a distribution of four: the mean of a loss's gradient on samples of pi is that of KL(pi ||
    # ref) for k2, of KL(ref || pi) for k3, and 0 for k1, which is why k1 is refused in the loss.
    logits = torch.tensor([0.3, -1.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    logprobs = logits.log_softmax(-1)
    expected_loss = (logprobs.detach().exp() * kl_estimate(logprobs - reference, estimator)).sum()
    (got,) = torch.autograd.grad(expected_loss, logits, retain_graph=True)
    want = {
        "k1": 0.0 * logprobs.sum(),
        "k2": (logprobs.exp() * (logprobs - reference)).sum(),
        "k3": (reference.exp() * (reference - logprobs)).sum(),
    }[estimator]
    torch.testing.assert_close(got, torch.autograd.grad(want, logits)[0])


@given(st.floats(-1e4, 1e4, width=32))
def test_k3_is_finite_and_never_negative(d: float):
    assert 0 <= kl_estimate(torch.tensor([d], dtype=torch.float64), "k3").item() < math.inf


def test_estimates_agree_with_the_true_kl_in_the_mean():
    # KL([0.5, 0.5] || [0.8, 0.2]) = 0.5 ln(0.5 / 0.8) + 0.5 ln(0.5 / 0.2) = 0.22314; k2 alone is biased.
    d = torch.tensor([0.5 / 0.8, 0.5 / 0.2], dtype=torch.float64).log()
    assert kl_estimate(d, "k1").mean().item() == pytest.approx(0.22314, abs=1e-5)
    assert kl_estimate(d, "k3").mean().item() == pytest.approx(0.22314, abs=1e-5)
