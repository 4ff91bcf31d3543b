"""The losses: hand-worked numbers, then a float64 loop over tokens as reference on random ragged inputs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from async_rl.learner.loss import LOG_RATIO_LIMIT, LossOutput, dapo_loss, mismatch_by_lag, nll_loss

CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28, "skip_threshold": 20.0}
NO_SKIP: dict[str, Any] = CLIP | {"skip_threshold": None}
LOW_SKIP: dict[str, Any] = CLIP | {"skip_threshold": 3.0}
ONE_SEQUENCE = torch.zeros(4, dtype=torch.int64)


def dapo_of_ratios(ratios: list[float], advantages: list[float], index: list[int] | None = None, **changes: Any):
    """Loss of tokens with the given pi/mu (mu = e^-1), and the gradient of their logprobs. In float64."""
    behavior = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    logprobs = (behavior + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    places = torch.tensor(index if index is not None else [0] * len(ratios))
    num_sequences = int(places.max()) + 1 if len(places) else 1
    out = dapo_loss(logprobs, behavior, torch.tensor(advantages).double(), places, num_sequences, **(CLIP | changes))
    out.loss_sum.backward()
    assert logprobs.grad is not None
    return out, logprobs.grad


def near(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), rtol=1e-9, atol=1e-9)


def test_on_policy_loss_is_minus_the_sum_of_advantages():
    # Ratio 1 everywhere: loss -(2 - 3 + 0.5), d loss / d logprob = -ratio * advantage.
    out, grad = dapo_of_ratios([1.0, 1.0, 1.0], [2.0, -3.0, 0.5])
    assert out.loss_sum.item() == pytest.approx(0.5)
    near(grad, [-2.0, 3.0, -0.5])
    assert out.num_tokens.item() == 3


def test_positive_advantage_is_clipped_above_only():
    # A = 2, range [0.8, 1.28]. Ratio 1.5: value -1.28 * 2, gradient 0. Ratio 0.5: min takes 0.5 * 2, gradient -1.
    # Ratio 1.2 lies inside: -2.4 both.
    out, grad = dapo_of_ratios([1.5, 0.5, 1.2], [2.0, 2.0, 2.0])
    assert out.loss_sum.item() == pytest.approx(-2.56 - 1.0 - 2.4)
    near(grad, [0.0, -1.0, -2.4])
    assert (out.num_clipped_low.item(), out.num_clipped_high.item(), out.num_tokens.item()) == (0, 1, 3)


def test_negative_advantage_is_clipped_below_only():
    # A = -2. Ratio 0.5: min(-1, 0.8 * -2) is the clipped one, so +1.6 and no gradient. Ratio 1.5: -(1.5 * -2) = 3.
    out, grad = dapo_of_ratios([0.5, 1.5], [-2.0, -2.0])
    assert out.loss_sum.item() == pytest.approx(1.6 + 3.0)
    near(grad, [0.0, 3.0])
    assert (out.num_clipped_low.item(), out.num_clipped_high.item(), out.num_tokens.item()) == (1, 0, 2)


def test_token_exactly_on_a_clip_boundary_keeps_its_gradient():
    # Bounds 1 - 0 and 1 + 0, ratio exactly 1: at the boundary, not beyond it.
    out, grad = dapo_of_ratios([1.0, 1.0], [2.0, -2.0], clip_low=0.0, clip_high=0.0)
    near(grad, [-2.0, 2.0])
    assert (out.num_clipped_low.item(), out.num_clipped_high.item()) == (0, 0)


def test_zero_advantage_is_never_clipped():
    out, grad = dapo_of_ratios([5.0, 0.1], [0.0, 0.0])
    near(grad, [0.0, 0.0])
    assert (out.num_clipped_low.item(), out.num_clipped_high.item(), out.num_tokens.item()) == (0, 0, 2)


def test_sequence_above_the_skip_threshold_leaves_sum_and_denominator():
    # Sequence 0: mean ratio (1 + 5) / 2 = 3 > 2.5. Sequence 1: 1.1, kept.
    out, grad = dapo_of_ratios([1.0, 5.0, 1.1], [1.0, 1.0, 1.0], [0, 0, 1], skip_threshold=2.5)
    assert out.skipped.tolist() == [True, False]
    assert out.nonfinite.tolist() == [False, False]
    assert (out.num_tokens.item(), out.num_skipped_tokens.item()) == (1, 2)
    assert out.loss_sum.item() == pytest.approx(-1.1)
    near(grad, [0.0, 0.0, -1.1])
    assert out.ratio_max.item() == pytest.approx(1.1)


def test_sequence_at_the_skip_threshold_is_kept():
    # Log ratio 0 is exactly ratio 1, whatever the floating point.
    kept, _ = dapo_of_ratios([1.0, 1.0], [1.0, 1.0], skip_threshold=1.0)
    above, _ = dapo_of_ratios([1.0, 1.0], [1.0, 1.0], skip_threshold=math.nextafter(1.0, 0.0))
    assert kept.skipped.tolist() == [False]
    assert above.skipped.tolist() == [True]


def test_skip_threshold_looks_at_the_mean_not_the_largest_ratio():
    # 30 alone is above 20; the mean (30 + 1 + 1) / 3 is not.
    out, _ = dapo_of_ratios([30.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    assert out.skipped.tolist() == [False]


def test_without_a_threshold_no_finite_sequence_is_skipped():
    out, _ = dapo_of_ratios([1e6], [1.0], skip_threshold=None)
    assert out.skipped.tolist() == [False]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_behavior_logprob_skips_its_sequence_and_never_reaches_the_gradient(bad: float):
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    behavior = torch.tensor([bad, -1.0, -1.0])
    index = torch.tensor([0, 0, 1])
    out = dapo_loss(logprobs, behavior, torch.ones(3), index, 2, **NO_SKIP)
    out.loss_sum.backward()
    assert out.skipped.tolist() == out.nonfinite.tolist() == [True, False]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0, -1.0]
    assert out.loss_sum.item() == -1.0
    assert (out.ratio_sum.item(), out.abs_log_ratio_sum.item(), out.num_tokens.item()) == (1.0, 0.0, 1)


def test_nan_advantage_of_a_skipped_sequence_does_not_reach_the_gradient():
    out, grad = dapo_of_ratios([100.0, 1.0], [math.nan, 1.0], [0, 1])
    assert out.loss_sum.item() == pytest.approx(-1.0)
    near(grad, [0.0, -1.0])


def test_nan_of_the_learner_is_not_hidden():
    logprobs = torch.tensor([math.nan, -1.0], requires_grad=True)
    out = dapo_loss(logprobs, torch.full((2,), -1.0), torch.ones(2), torch.tensor([0, 1]), 2, **CLIP)
    assert math.isnan(out.loss_sum.item())


def test_enormous_ratio_stays_finite_in_float32():
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    behavior = torch.tensor([-1e4, 0.0])
    out = dapo_loss(logprobs, behavior, -torch.ones(2), torch.tensor([0, 1]), 2, **NO_SKIP)
    out.loss_sum.backward()
    assert out.ratio_max.item() == pytest.approx(math.exp(LOG_RATIO_LIMIT), rel=1e-5)
    assert all(math.isfinite(value.item()) for value in (out.loss_sum, out.ratio_sum, out.ratio_square_sum))
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_ratio_statistics_are_sums_over_trained_tokens():
    # Ratios 0.5, 1, 2: sum 3.5, squares 0.25 + 1 + 4, |log| 2 ln 2.
    out, _ = dapo_of_ratios([0.5, 1.0, 2.0], [1.0, 1.0, 1.0])
    assert out.ratio_sum.item() == pytest.approx(3.5)
    assert out.ratio_square_sum.item() == pytest.approx(5.25)
    assert out.ratio_max.item() == pytest.approx(2.0)
    assert out.abs_log_ratio_sum.item() == pytest.approx(2 * math.log(2))


def test_no_tokens_give_zeros_that_still_carry_a_gradient():
    hidden = torch.ones(3, requires_grad=True)
    empty = torch.zeros(0)
    out = dapo_loss(hidden[:0] * 2, empty, empty, torch.zeros(0, dtype=torch.int64), 1, **CLIP)
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0.0
    assert (out.num_tokens.item(), out.ratio_max.item(), out.skipped.tolist()) == (0, 0.0, [False])
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [0.0, 0.0, 0.0]


def test_tensors_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"\[4\], \[3\]"):
        dapo_loss(torch.zeros(4), torch.zeros(3), torch.zeros(4), ONE_SEQUENCE, 1, **CLIP)


class Case(NamedTuple):
    logprobs: list[float]
    behavior: list[float]
    advantages: list[float]
    lengths: list[int]


@st.composite
def ragged_cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    n = sum(lengths)
    floats = st.floats(-6, 0, width=32)
    behavior = st.one_of(floats, floats, floats, st.just(math.nan))
    return Case(
        draw(st.lists(floats, min_size=n, max_size=n)),
        draw(st.lists(behavior, min_size=n, max_size=n)),
        draw(st.lists(st.floats(-3, 3, width=32), min_size=n, max_size=n)),
        lengths,
    )


def index_of(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))


def dapo_by_loops(case: Case, threshold: float) -> tuple[float, list[float], int, list[bool]]:
    """Value, gradient, trained tokens and skipped sequences, token by token in Python floats."""
    loss, gradient, num_tokens, skipped, start = 0.0, [], 0, [], 0
    for length in case.lengths:
        part = range(start, start + length)
        start += length
        finite = all(math.isfinite(case.behavior[i]) for i in part)
        ratios = [math.exp(case.logprobs[i] - case.behavior[i]) if finite else math.nan for i in part]
        skip = not finite or (length > 0 and sum(ratios) / length > threshold)
        skipped.append(skip)
        for i, ratio in zip(part, ratios, strict=True):
            advantage = case.advantages[i]
            if skip:
                gradient.append(0.0)
                continue
            num_tokens += 1
            clipped = min(max(ratio, 0.8), 1.28) * advantage
            loss -= min(ratio * advantage, clipped)
            gradient.append(-ratio * advantage if ratio * advantage <= clipped else 0.0)
    return loss, gradient, num_tokens, skipped


@settings(deadline=None)
@given(ragged_cases(), st.sampled_from([1.5, 3.0, 20.0]))
def test_dapo_equals_the_loop_over_tokens_in_value_and_gradient(case: Case, threshold: float):
    loss, gradient, num_tokens, skipped = dapo_by_loops(case, threshold)
    logprobs = torch.tensor(case.logprobs, dtype=torch.float64, requires_grad=True)
    out = dapo_loss(
        logprobs,
        torch.tensor(case.behavior, dtype=torch.float64),
        torch.tensor(case.advantages, dtype=torch.float64),
        index_of(case.lengths),
        len(case.lengths),
        **CLIP | {"skip_threshold": threshold},
    )
    out.loss_sum.backward()
    assert out.skipped.tolist() == skipped
    assert out.num_tokens.item() == num_tokens
    assert out.loss_sum.item() == pytest.approx(loss, abs=1e-6, rel=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(gradient, abs=1e-6, rel=1e-6)


@settings(deadline=None)
@given(ragged_cases(), st.integers(0, 5))
def test_sums_do_not_depend_on_the_cut_into_micro_batches(case: Case, cut: int):
    def run(first: int, last: int) -> LossOutput:
        lengths = case.lengths[first:last]
        at = slice(sum(case.lengths[:first]), sum(case.lengths[:last]))
        logprobs, behavior, advantages = (torch.tensor(v[at], dtype=torch.float64) for v in case[:3])
        return dapo_loss(logprobs, behavior, advantages, index_of(lengths), len(lengths), **LOW_SKIP)

    cut = min(cut, len(case.lengths))
    whole, left, right = run(0, len(case.lengths)), run(0, cut), run(cut, len(case.lengths))
    assert left.skipped.tolist() + right.skipped.tolist() == whole.skipped.tolist()
    for name in ("loss_sum", "num_tokens", "num_clipped_low", "num_clipped_high", "ratio_sum", "abs_log_ratio_sum"):
        assert (getattr(left, name) + getattr(right, name)).item() == pytest.approx(getattr(whole, name).item())
    assert max(left.ratio_max.item(), right.ratio_max.item()) == whole.ratio_max.item()


def test_mismatch_is_the_k3_estimate_summed_by_staleness():
    # d = log pi - log mu = 0, ln 2, -ln 2, ln 4 at lags 0, 1, 1, 5 (the last bucket): 2 - 1 - ln 2 and
    # 1/2 - 1 + ln 2 add up to 1/2; 4 - 1 - ln 4.
    d = torch.tensor([1.0, 2.0, 0.5, 4.0], dtype=torch.float64).log()
    behavior = torch.full((4,), -2.0, dtype=torch.float64)
    out = mismatch_by_lag(behavior + d, behavior, torch.tensor([7, 6, 6, 2], dtype=torch.int32), 7, 2)
    near(out.kl_sum, [0.0, 0.5, 3.0 - math.log(4.0)])
    assert out.num_tokens.tolist() == [1, 2, 1]


def test_mismatch_of_tiny_differences_is_not_rounding_noise():
    # d = 1e-5 in float32: k3 is d^2 / 2 = 5e-11, far below float32's epsilon.
    out = mismatch_by_lag(torch.full((1,), 1e-5), torch.zeros(1), torch.zeros(1, dtype=torch.int32), 0, 0)
    assert out.kl_sum.item() == pytest.approx(5e-11, rel=1e-3)


def test_mismatch_leaves_out_nonfinite_tokens():
    out = mismatch_by_lag(torch.zeros(2), torch.tensor([math.nan, 0.0]), torch.zeros(2, dtype=torch.int32), 0, 1)
    assert out.kl_sum.tolist() == [0.0, 0.0]
    assert out.num_tokens.tolist() == [1, 0]


def test_mismatch_refuses_tokens_from_the_future():
    with pytest.raises(ValueError, match="versions up to the learner's 3, got 4"):
        mismatch_by_lag(torch.zeros(1), torch.zeros(1), torch.tensor([4]), 3, 2)


def test_nll_by_token_counts_every_token_once():
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    out = nll_loss(logprobs, torch.tensor([0, 0, 1]), 2)
    out.loss_sum.backward()
    assert (out.loss_sum.item(), out.weight_sum.item(), out.num_tokens.item()) == (6.0, 3.0, 3)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, -1.0, -1.0]


def test_nll_by_sequence_is_the_sum_of_sequence_means():
    # (1 + 2) / 2 + 3; the third sequence has no tokens and no weight.
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    out = nll_loss(logprobs, torch.tensor([0, 0, 1]), 3, aggregation="sequence")
    out.loss_sum.backward()
    assert (out.loss_sum.item(), out.weight_sum.item(), out.num_tokens.item()) == (4.5, 2.0, 3)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, -0.5, -1.0]


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_nll_of_no_tokens_is_zero_and_carries_a_gradient(aggregation: Any):
    hidden = torch.ones(2, requires_grad=True)
    out = nll_loss(hidden[:0], torch.zeros(0, dtype=torch.int64), 1, aggregation=aggregation)
    out.loss_sum.backward()
    assert (out.loss_sum.item(), out.weight_sum.item()) == (0.0, 0.0)
    assert hidden.grad is not None
