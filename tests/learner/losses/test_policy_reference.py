"""The vectorised policy loss against loops, and what must not change it. float64, random ragged batches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.learner.losses.policy import PolicyInputs
from tests.examples import examples
from tests.learner.losses.by_loops import loss_by_loops
from tests.learner.losses.cases import SETTINGS, Case, inputs_of, joined, ragged_cases, run, settings

names = st.sampled_from(sorted(SETTINGS))
few = examples(60)


def near(expected: Any) -> Any:
    return pytest.approx(expected, abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("name", sorted(SETTINGS))
@examples(25)
@given(case=ragged_cases())
def test_loss_equals_the_loop_over_tokens_in_value_and_gradient(name: str, case: Case):
    want = loss_by_loops(case, settings(name))
    out, gradient, entropy_gradient = run(inputs_of(case), settings(name))
    assert out.skipped.tolist() == want.skipped
    assert out.kept.tolist() == want.kept
    assert out.denominator.item() == want.denominator
    assert out.loss_sum.item() == near(want.loss)
    assert gradient == near(want.gradient)
    assert entropy_gradient == near(want.entropy_gradient)


@few
@given(ragged_cases(), names, st.integers(0, 3))
def test_a_sequence_that_is_masked_whole_changes_nothing(case: Case, name: str, length: int):
    # Nothing of it is finite, but the learner's own logprobs.
    nan = [math.nan] * length
    masked = Case([-1.0] * length, nan, nan, nan, nan, [0.5] * length, [1] * length, [length])
    alone, beside = run(inputs_of(case), settings(name)), run(inputs_of(joined(case, masked)), settings(name))
    assert beside.out.loss_sum.item() == near(alone.out.loss_sum.item())
    assert beside.out.denominator == alone.out.denominator
    assert beside.gradient == near(alone.gradient + [0.0] * length)
    assert beside.entropy_gradient == near(alone.entropy_gradient + [0.0] * length)
    assert beside.out.skipped.tolist() == [*alone.out.skipped.tolist(), length > 0]


def on_policy(case: Case) -> PolicyInputs:
    """pi = mu = prox = ref, at lag 0."""
    inputs = inputs_of(case._replace(behavior=case.logprobs, reference=case.logprobs, proximal=case.logprobs))
    return replace(inputs, lag=torch.zeros_like(inputs.lag))


@few
@given(ragged_cases(nonfinite=False), names)
def test_at_lag_0_every_correction_is_the_identity(case: Case, name: str):
    # All surrogates have the gradient -A then, all KL gradients are 0, nothing is left out.
    loss = settings(name)
    out, gradient, _ = run(on_policy(case), loss)
    want = []
    for s, length in enumerate(case.lengths):
        weight = {"token": 1.0, "sequence": 1 / max(1, length), "sequence_sum": 1 / 8}[loss.aggregation]
        start = sum(case.lengths[:s])
        want += [-weight * a for a in case.advantages[start : start + length]]
    assert gradient == near(want)
    assert not out.skipped.any()
    assert out.kept.all()
    assert not (out.capped_low | out.capped_high).any()
