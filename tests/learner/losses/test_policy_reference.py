"""The vectorised policy loss against loops, and what must not change it. float64, random ragged batches."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.learner.losses.policy import PolicyInputs
from tests.examples import examples
from tests.learner.losses.by_loops import loss_by_loops
from tests.learner.losses.cases import SETTINGS, Case, inputs_of, joined, part_of, ragged_cases, run, settings

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
@given(ragged_cases(), names, st.integers(0, 5))
def test_gradient_is_the_same_for_any_cut_between_sequences(case: Case, name: str, cut: int):
    count = len(case.lengths)
    cut = min(cut, count)
    whole = run(inputs_of(case), settings(name))
    left = run(inputs_of(part_of(case, range(cut))), settings(name))
    right = run(inputs_of(part_of(case, range(cut, count))), settings(name))
    assert left.gradient + right.gradient == near(whole.gradient)
    assert (left.out.loss_sum + right.out.loss_sum).item() == near(whole.out.loss_sum.item())
    assert left.out.denominator + right.out.denominator == whole.out.denominator
    assert left.out.skipped.tolist() + right.out.skipped.tolist() == whole.out.skipped.tolist()


@few
@given(ragged_cases(), names, st.randoms(use_true_random=False))
def test_gradient_is_the_same_in_any_order_of_sequences(case: Case, name: str, random: Random):
    order = list(range(len(case.lengths)))
    random.shuffle(order)
    straight, shuffled = run(inputs_of(case), settings(name)), run(inputs_of(part_of(case, order)), settings(name))
    starts = [sum(case.lengths[:s]) for s in range(len(order))]
    places = [t for s in order for t in range(starts[s], starts[s] + case.lengths[s])]
    assert shuffled.gradient == near([straight.gradient[t] for t in places])
    assert shuffled.out.loss_sum.item() == near(straight.out.loss_sum.item())


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


@few
@given(ragged_cases(), st.floats(1.05, 4.0))
def test_the_historic_rule_is_the_sequence_rule_with_the_micro_batch_as_one_sequence(case: Case, threshold: float):
    loss = settings("skip_mean").model_copy(update={"skip_threshold": threshold, "clip_high": 0.0})
    historic = run(inputs_of(case), loss.model_copy(update={"skip_unit": "micro_batch"})).out
    finite = [not math.isnan(b) for b in case.behavior]
    ratios = [math.exp(p - b) for p, b, ok in zip(case.logprobs, case.behavior, finite, strict=True) if ok]
    gone = bool(ratios) and sum(ratios) / len(ratios) > threshold
    starts = [sum(case.lengths[:s]) for s in range(len(case.lengths))]
    assert historic.skipped.tolist() == [
        length > 0 and (gone or not all(finite[start : start + length]))
        for start, length in zip(starts, case.lengths, strict=True)
    ]
