"""A loss of the user's own: what the function gets, what becomes of its result, and how its mistakes are named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import own_loss
import pytest
import torch

from async_rl.config.loss import LossConfig
from async_rl.errors import OwnCodeError
from async_rl.learner.losses.own import LossInputs, LossOutput, OwnLoss, called, loss_inputs
from tests.learner.losses.cases import of_ratios

Function = Callable[[LossInputs], Any]


def own(function: Function, masks: tuple[str, ...] = (), metrics: tuple[str, ...] = ()) -> OwnLoss:
    return OwnLoss("mine.py:loss", function, masks, metrics)


def reinforce(inputs: LossInputs) -> LossOutput:
    return LossOutput(-(inputs.advantages * inputs.logprobs).sum(), torch.tensor(len(inputs.logprobs)))


def without_old(inputs: LossInputs) -> LossOutput:
    """REINFORCE on tokens of lag 0; the ratio's sum is a metric; ratios above 1.5 count as capped."""
    old = inputs.lag > 0
    ratio = (inputs.logprobs - inputs.behavior_logprobs).detach().exp()
    loss = -(inputs.advantages * inputs.logprobs).masked_fill(old, 0.0)
    strange = inputs.advantages > 100
    return LossOutput(
        loss.sum(),
        (~old).sum(),
        masks={"old": old, "strange": strange},
        capped_high=ratio > 1.5,
        metrics={"ratio": ratio.masked_fill(old, 0.0).sum()},
    )


def test_the_result_has_the_form_of_the_built_in_loss():
    # Ratios 1, 2 and 2, mu = e^-1, so logprobs -1, ln 2 - 1, ln 2 - 1. Advantages 2, 1, -1; the second is old.
    inputs = of_ratios([1.0, 2.0, 2.0], [2.0, 1.0, -1.0], [2, 1], lag=[0, 1, 0])
    out, counts = own(without_old, ("old", "strange"), ("ratio",))(inputs, LossConfig(), max_length=8)
    # -(2 * -1) + (ln 2 - 1)
    assert out.loss_sum.item() == pytest.approx(2.0 + math.log(2) - 1.0)
    out.loss_sum.backward()
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == [-2.0, 0.0, 1.0]
    assert (out.denominator.item(), out.kept.tolist()) == (2, [True, False, True])
    assert (out.capped_low.tolist(), out.capped_high.tolist()) == ([False] * 3, [False, False, True])
    assert (out.skipped.tolist(), out.finite.tolist()) == ([False, False], [True] * 3)
    assert out.log_ratio.tolist() == pytest.approx([0.0, math.log(2), math.log(2)])
    assert counts.tolist() == pytest.approx([1, 0, 3.0])  # old; strange; ratios 1 + 2


def test_a_token_under_two_masks_counts_under_the_first():
    def masked(inputs: LossInputs) -> LossOutput:
        first, second = inputs.lag >= 1, inputs.lag >= 0
        return LossOutput((inputs.logprobs * 0).sum(), torch.tensor(0), {"old": first, "all": second})

    inputs = of_ratios([1.0, 1.0, 1.0], [1.0] * 3, lag=[0, 1, 2])
    out, counts = own(masked, ("old", "all"))(inputs, LossConfig(), max_length=8)
    assert (counts.tolist(), out.skipped.tolist(), out.kept.any().item()) == ([2, 1], [True], False)


def test_a_sequence_with_a_behavior_logprob_that_is_not_finite_is_skipped_before_the_function():
    def loss(inputs: LossInputs) -> LossOutput:
        assert inputs.behavior_logprobs.isfinite().all()
        assert (inputs.sequence_index.tolist(), inputs.num_sequences) == ([0, 0], 2)
        return replace(reinforce(inputs), capped_low=torch.tensor([True, False]))

    inputs = of_ratios([1.0] * 4, [1.0, 2.0, 3.0, 4.0], [2, 2], behavior_logprobs=[-1.0, -1.0, -1.0, math.nan])
    out, _ = own(loss)(inputs, LossConfig(), max_length=8)
    out.loss_sum.backward()
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == [-1.0, -2.0, 0.0, 0.0]
    assert (out.skipped.tolist(), out.kept.tolist()) == ([False, True], [True, True, False, False])
    assert (out.capped_low.tolist(), out.denominator.item()) == ([True, False, False, False], 2)


@pytest.mark.parametrize("ratios", [[], [math.nan]])
def test_a_micro_batch_without_tokens_is_a_sum_of_nothing_with_a_gradient(ratios: list[float]):
    def loss(inputs: LossInputs) -> LossOutput:
        raise AssertionError("not called")

    inputs = of_ratios([1.0] * len(ratios), [1.0] * len(ratios), behavior_logprobs=ratios)
    out, counts = own(loss, ("old",), ("ratio",))(inputs, LossConfig(), max_length=8)
    out.loss_sum.backward()
    assert (out.loss_sum.item(), out.denominator.item(), counts.tolist()) == (0.0, 0.0, [0.0, 0.0])
    assert inputs.logprobs.grad is not None
    assert not inputs.logprobs.grad.any()


def test_reference_and_proximal_logprobs_are_there_if_the_settings_ask_for_them():
    seen: list[LossInputs] = []

    def loss(inputs: LossInputs) -> LossOutput:
        seen.append(inputs)
        return reinforce(inputs)

    scored = of_ratios([1.0], [1.0], reference_logprobs=[-3.0], proximal_logprobs=[-2.0])
    first_update = replace(scored, proximal_logprobs=torch.zeros(0, dtype=torch.float64))
    asks = LossConfig(kl_coef=0.1, kl_placement="loss", kl_estimator="k2", anchor="proximal")
    # The metric kl/reference is computed as for the built-in loss: d = -1 + 3, k2 = 2.
    assert own(loss)(scored, asks, max_length=8)[0].kl_sum.item() == pytest.approx(2.0)
    own(loss)(first_update, asks, max_length=8)
    own(loss)(scored, LossConfig(), max_length=9)
    found = [[None if t is None else t.item() for t in (i.reference_logprobs, i.proximal_logprobs)] for i in seen]
    assert found == [[-3.0, -2.0], [-3.0, -1.0], [None, None]]
    assert [inputs.max_length for inputs in seen] == [8, 8, 9]


def test_an_exception_is_named_with_file_line_and_source():
    def loss(inputs: LossInputs) -> LossOutput:
        raise KeyError("no such thing")

    with pytest.raises(
        OwnCodeError, match=rf"KeyError: 'no such thing' \({__file__}, line \d+, in loss: raise KeyError"
    ):
        own(loss)(of_ratios([1.0], [1.0]), LossConfig(), max_length=8)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (lambda i: reinforce(i).loss_sum, "a LossOutput, got Tensor"),
        (lambda i: LossOutput(-i.logprobs, torch.tensor(1)), r"loss_sum .* \[\], got float64 \[3\]"),
        (lambda i: LossOutput(i.advantages.sum(), torch.tensor(1)), "loss_sum with a gradient"),
        (lambda i: LossOutput(i.logprobs.sum(), cast(Any, 1)), "denominator .* got int"),
        (lambda i: LossOutput(i.logprobs.sum(), i.logprobs.exp().sum()), "a denominator without a gradient"),
        (lambda i: replace(reinforce(i), masks={"old": i.lag}), r"mask old .* got int64 \[3\]"),
        (lambda i: replace(reinforce(i), capped_low=torch.tensor(True)), r"capped_low .* got bool \[\]"),
        (lambda i: replace(reinforce(i), metrics={"r": i.lag}), "metric r"),
        (lambda i: replace(reinforce(i), metrics={"R/r": i.lag.sum()}), "names of lower-case .*, got 'R/r'"),
    ],
)
def test_a_result_of_another_form_is_refused_with_what_it_is(result: Function, expected: str):
    inputs = loss_inputs(of_ratios([1.0] * 3, [1.0] * 3), torch.ones(3, dtype=torch.bool), LossConfig(), 8)
    with pytest.raises(OwnCodeError, match=rf"loss\.function: mine\.py:loss: expected {expected}"):
        called("mine.py:loss", result, inputs)


def test_names_that_change_during_a_run_are_refused():
    with pytest.raises(OwnCodeError, match=r"expected masks \['old'\], as in the trial at the start, got \[\]"):
        own(reinforce, ("old",))(of_ratios([1.0], [1.0]), LossConfig(), max_length=8)


def test_the_example_of_a_soft_clip_fades_where_the_policy_moved_as_asked_and_only_there():
    # c = 0.28. r = 1.28 with A = 1 and r = 0.72 with A = -1: values 1 + c tanh 1 and -(1 - c tanh 1), gradient of the
    # ratio 1 - tanh^2 1 = 0.42, times r A. The other way nothing fades: r = 0.72 with A = 1, and r = 20 with A = -1,
    # which counts as 10, without a gradient.
    inputs = of_ratios([1.28, 0.72, 0.72, 20.0, 1.0], [1.0, -1.0, 1.0, -1.0, 2.0])
    out, counts = own(own_loss.soft_clip, (), ("gradient_left",))(inputs, LossConfig(), max_length=8)
    tanh = math.tanh(1)
    assert out.loss_sum.item() == pytest.approx(-(1 + 0.28 * tanh) + (1 - 0.28 * tanh) - 0.72 + 10 - 2)
    out.loss_sum.backward()
    assert inputs.logprobs.grad is not None
    left = 1 - tanh**2
    assert inputs.logprobs.grad.tolist() == pytest.approx([-1.28 * left, 0.72 * left, -0.72, 0.0, -2.0])
    assert counts.tolist() == pytest.approx([2 * left + 3])
