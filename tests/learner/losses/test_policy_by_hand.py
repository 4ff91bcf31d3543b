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


GSPO = {"preset": "gspo", "anchor": "behavior", "importance_cap": 0}
"""With its ratio to the behavior policy: the paper's, where that also started the step."""


def loss_of(ratios: list[float], advantages: list[float], lengths: list[int] | None = None, **changes: Any) -> Run:
    """Under ``changes`` to DAPO's settings."""
    return run(of_ratios(ratios, advantages, lengths), LossConfig(**changes))


def near(expected: list[float] | float) -> Any:
    return pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_on_policy_loss_is_minus_the_sum_of_advantages():
    # Ratio 1 everywhere: loss -(2 - 3 + 0.5), d loss / d logprob = -ratio * advantage.
    out, gradient, _ = loss_of([1.0, 1.0, 1.0], [2.0, -3.0, 0.5])
    assert out.loss_sum.item() == near(0.5)
    assert gradient == near([-2.0, 3.0, -0.5])
    assert out.denominator.item() == 3


def test_positive_advantage_is_clipped_above_only():
    # A = 2, range [0.8, 1.28]. Ratio 1.5: value -1.28 * 2, gradient 0. Ratio 0.5: min takes 0.5 * 2, gradient -1.
    # Ratio 1.2 lies inside: -2.4 both.
    out, gradient, _ = loss_of([1.5, 0.5, 1.2], [2.0, 2.0, 2.0])
    assert out.loss_sum.item() == near(-2.56 - 1.0 - 2.4)
    assert gradient == near([0.0, -1.0, -2.4])
    assert (out.capped_low.tolist(), out.capped_high.tolist()) == ([False] * 3, [True, False, False])


def test_negative_advantage_is_clipped_below_only():
    # A = -2. Ratio 0.5: min(-1, 0.8 * -2) is the clipped one, so +1.6 and no gradient. Ratio 1.5: -(1.5 * -2) = 3.
    out, gradient, _ = loss_of([0.5, 1.5], [-2.0, -2.0])
    assert out.loss_sum.item() == near(1.6 + 3.0)
    assert gradient == near([0.0, 3.0])
    assert (out.capped_low.tolist(), out.capped_high.tolist()) == ([True, False], [False] * 2)


def test_token_exactly_on_a_clip_boundary_keeps_its_gradient():
    # Bounds 1 - 0 and 1 + 0, ratio exactly 1: at the boundary, not beyond it.
    out, gradient, _ = loss_of([1.0, 1.0], [2.0, -2.0], clip_low=0.0, clip_high=0.0)
    assert gradient == near([-2.0, 2.0])
    assert not (out.capped_low | out.capped_high).any()


def test_zero_advantage_is_never_clipped():
    out, gradient, _ = loss_of([5.0, 0.1], [0.0, 0.0])
    assert gradient == near([0.0, 0.0])
    assert not (out.capped_low | out.capped_high).any()


def test_dual_clip_bounds_what_a_negative_advantage_can_cost():
    # c = 3, A = -2. Ratio 5: max(min(-10, 1.2 * -2 = -2.4) = -10, 3 * -2) = -6, so loss 6, gradient 0. Ratio 2.5:
    # -5 > -6, kept, gradient 5. A = 2 at ratio 5 is PPO's own clip, -1.2 * 2.
    out, gradient, _ = loss_of([5.0, 2.5, 5.0], [-2.0, -2.0, 2.0], preset="ppo_clip")
    assert out.loss_sum.item() == near(6.0 + 5.0 - 2.4)
    assert gradient == near([0.0, 5.0, 0.0])
    assert out.capped_high.tolist() == [True, False, True]


def test_one_token_can_not_turn_the_gradient_of_a_batch_by_default():
    # A = -1. The token at ratio 148 would have a gradient of 148; 9 others at ratio 1 have 1 each.
    ratios = [148.0] + [1.0] * 9
    out, gradient, _ = loss_of(ratios, [-1.0] * 10, skip_threshold=0)
    assert out.loss_sum.item() == near(10.0 + 9.0)
    assert gradient == near([0.0] + [1.0] * 9)
    _, unbounded, _ = loss_of(ratios, [-1.0] * 10, skip_threshold=0, dual_clip=0)
    assert unbounded == near([148.0] + [1.0] * 9)


def test_gspo_weighs_every_token_by_its_sequences_geometric_mean_ratio():
    # Sequence 0: ratios 2 and 1/2, geometric mean 1. Sequence 1: 1.5 and 1.5 * 1.28^2 / 1.5^2 -> mean 1.28.
    # Clip [0.8, 1.5]. Loss: -(1 * 3 + 1.28 * 2), each a mean over 2 tokens; gradient s A / 2 a token.
    ratios = [2.0, 0.5, 1.5, 1.28**2 / 1.5]
    out, gradient, _ = loss_of(ratios, [3.0, 3.0, 2.0, 2.0], [2, 2], **GSPO | {"clip_low": 0.2, "clip_high": 0.5})
    assert out.loss_sum.item() == near(-3.0 - 2.56)
    assert gradient == near([-1.5, -1.5, -1.28, -1.28])
    assert out.denominator.item() == 2


def test_gspo_clips_the_whole_sequence():
    # Geometric mean sqrt(4 * 1) = 2 > 1.0004, A > 0: both tokens clipped, though one ratio is 1.
    out, gradient, _ = loss_of([4.0, 1.0], [1.0, 1.0], **GSPO)
    assert out.loss_sum.item() == near(-1.0004)
    assert gradient == near([0.0, 0.0])
    assert out.capped_high.tolist() == [True, True]


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    # log pi = log ratio - 1. Weight min(r, 1.5): 1.5, 0.1, and no lower bound. A = 2, -2.
    # Loss -(1.5 * 2 * (ln 4 - 1) + 0.1 * -2 * (ln 0.1 - 1)); gradient -weight * A.
    out, gradient, _ = loss_of([4.0, 0.1], [2.0, -2.0], preset="cispo", clip_high=0.5)
    assert out.loss_sum.item() == near(-3.0 * (math.log(4) - 1) + 0.2 * (math.log(0.1) - 1))
    assert gradient == near([-3.0, 0.2])
    assert out.capped_high.tolist() == [True, False]


def test_cispo_without_a_lower_bound_is_reinforce_with_truncated_weights():
    arguments = [4.0, 0.1, 1.0], [2.0, -2.0, 1.0]
    cispo = loss_of(*arguments, preset="cispo", clip_high=1.0)
    plain = loss_of(*arguments, preset="reinforce", importance_cap=2.0, aggregation="token")
    assert cispo.gradient == near(plain.gradient)
    assert cispo.out.loss_sum.item() == near(plain.out.loss_sum.item())


def test_reinforce_without_weights_does_not_look_at_the_ratio():
    # -A log pi with log pi = ln r - 1.
    out, gradient, _ = loss_of([4.0, 0.5], [2.0, -1.0], preset="reinforce", importance_cap=0, aggregation="token")
    assert out.loss_sum.item() == near(-2.0 * (math.log(4) - 1) + (math.log(0.5) - 1))
    assert gradient == near([-2.0, 1.0])


def test_truncated_importance_weight_is_a_constant_to_the_gradient():
    # min(4, 2) * 2 and min(0.5, 2) * -1.
    out, gradient, _ = loss_of([4.0, 0.5], [2.0, -1.0], preset="reinforce", aggregation="token")
    assert gradient == near([-4.0, 0.5])
    assert out.capped_high.tolist() == [True, False]


def test_decoupled_loss_clips_pi_over_prox_and_weighs_by_prox_over_mu():
    # mu = e^-1; prox/mu = 2, 10, 0.5 capped at 5; pi/mu = 2.2, 20, 0.5, so pi/prox = 1.1, 2, 1. A = 1, clip [0.8, 1.2].
    # Loss -(2 * 1.1 + 5 * 1.2 + 0.5 * 1); gradients 2 * 1.1, 0 (clipped), 0.5.
    proximal = [math.log(r) - 1 for r in (2.0, 10.0, 0.5)]
    inputs = of_ratios([2.2, 20.0, 0.5], [1.0, 1.0, 1.0], proximal_logprobs=proximal)
    out, gradient, _ = run(inputs, LossConfig(preset="decoupled_ppo", skip_threshold=100.0))
    assert out.loss_sum.item() == near(-2.2 - 6.0 - 0.5)
    assert gradient == near([-2.2, 0.0, -0.5])
    assert out.capped_high.tolist() == [False, True, False]


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


def test_token_range_takes_single_tokens_out_of_loss_and_denominator():
    # Range [0.5, 2], bounds included: ratios 0.49 and 2.01 leave, 0.5 and 2 stay (floats of the logs: just inside).
    out, gradient, _ = loss_of(
        [0.49, 0.500001, 1.999999, 2.01], [-1.0] * 4, token_range=[0.5, 2.0], clip_low=0.9, clip_high=9.0
    )
    assert out.kept.tolist() == [False, True, True, False]
    assert out.denominator.item() == 2
    assert gradient == near([0.0, 0.500001, 1.999999, 0.0])
    assert out.skipped.tolist() == [False]


def test_token_range_of_the_decoupled_loss_looks_at_prox_over_mu():
    # IcePop: prox/mu = 1 and 6, range [0.5, 5]; pi/mu = 6 and 1 do not matter.
    inputs = of_ratios([6.0, 1.0], [-1.0, -1.0], proximal_logprobs=[-1.0, math.log(6) - 1])
    out, _, _ = run(inputs, LossConfig(preset="decoupled_ppo", token_range=(0.5, 5.0)))
    assert out.kept.tolist() == [True, False]


def test_sequence_without_a_token_in_range_is_skipped_whole():
    out, _, _ = loss_of([3.0, 3.0, 1.0], [1.0] * 3, [2, 1], token_range=[0.5, 2.0], aggregation="sequence")
    assert out.skipped.tolist() == [True, False]
    assert out.denominator.item() == 1


def test_sequence_above_the_skip_threshold_leaves_sum_and_denominator():
    # Sequence 0: mean ratio (1 + 5) / 2 = 3 > 2.5. Sequence 1: 1.1, kept.
    out, gradient, _ = loss_of([1.0, 5.0, 1.1], [1.0, 1.0, 1.0], [2, 1], skip_threshold=2.5)
    assert out.skipped.tolist() == [True, False]
    assert out.denominator.item() == 1
    assert out.loss_sum.item() == near(-1.1)
    assert gradient == near([0.0, 0.0, -1.1])


@pytest.mark.parametrize(
    ("statistic", "below", "above"),
    [
        # Ratios 4, 1/2, 1: mean 5.5 / 3, largest 4, geometric mean 2^(1/3), k3 (3 - ln 4 - 1/2 + ln 2 + 0) / 3.
        ("mean", 5.49 / 3, 5.51 / 3),
        ("max", 3.999, 4.001),
        ("geometric", 2 ** (1 / 3) - 1e-3, 2 ** (1 / 3) + 1e-3),
        ("k3", (2.5 - math.log(2)) / 3 - 1e-6, (2.5 - math.log(2)) / 3 + 1e-6),
    ],
)
def test_skip_statistics_by_hand(statistic: str, below: float, above: float):
    for threshold, skipped in ((below, True), (above, False)):
        changes: dict[str, Any] = {"skip_statistic": statistic, "skip_threshold": threshold, "clip_high": 0.1}
        out, _, _ = loss_of([4.0, 0.5, 1.0], [1.0] * 3, **changes)
        assert out.skipped.tolist() == [skipped], threshold


def test_historic_rule_skips_the_whole_micro_batch_by_its_mean():
    # (5 + 1 + 1) / 3 = 2.33: by sequence only the first is above 2; by micro-batch all are.
    arguments = [5.0, 1.0, 1.0], [1.0] * 3, [1, 1, 1]
    by_sequence = loss_of(*arguments, skip_threshold=2.0).out
    by_batch = loss_of(*arguments, skip_threshold=2.0, skip_unit="micro_batch").out
    assert by_sequence.skipped.tolist() == [True, False, False]
    assert by_batch.skipped.tolist() == [True, True, True]
    assert by_batch.denominator.item() == 0


def test_skip_threshold_looks_at_the_mean_not_the_largest_ratio():
    # 30 alone is above 20; the mean (30 + 1 + 1) / 3 is not.
    assert loss_of([30.0, 1.0, 1.0], [1.0] * 3).out.skipped.tolist() == [False]


def test_without_a_threshold_no_finite_sequence_is_skipped():
    assert loss_of([1e6], [1.0], skip_threshold=0).out.skipped.tolist() == [False]


@pytest.mark.parametrize(
    ("aggregation", "loss", "gradient", "denominator"),
    [
        # Ratio 1, A = 1, -2, 4 in sequences of 2 and 1, the third empty. Token: -(1 - 2 + 4), over 3 tokens. Sequence:
        # -((1 - 2) / 2 + 4), over 2. Sum: -(1 - 2 + 4) / 8 (the longest there can be), over 2.
        ("token", -3.0, [-1.0, 2.0, -4.0], 3),
        ("sequence", -3.5, [-0.5, 1.0, -4.0], 2),
        ("sequence_sum", -0.375, [-0.125, 0.25, -0.5], 2),
    ],
)
def test_aggregations_by_hand(aggregation: Any, loss: float, gradient: list[float], denominator: int):
    got = loss_of([1.0] * 3, [1.0, -2.0, 4.0], [2, 1, 0], aggregation=aggregation)
    assert got.out.loss_sum.item() == near(loss)
    assert got.gradient == near(gradient)
    assert got.out.denominator.item() == denominator


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        # d = log pi - log ref = ln 2. k2: d^2 / 2, slope d. k3: 1/2 - 1 + ln 2, slope 1 - 1/2.
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", math.log(2) - 0.5, 0.5),
    ],
)
def test_kl_in_the_loss_is_differentiated(estimator: Any, value: float, slope: float):
    inputs = of_ratios([1.0, 1.0], [0.0, 0.0], reference_logprobs=[-1.0 - math.log(2), -1.0])
    out, gradient, _ = run(inputs, LossConfig(kl_coef=0.1, kl_placement="loss", kl_estimator=estimator))
    assert out.loss_sum.item() == near(0.1 * value)
    assert gradient == near([0.1 * slope, 0.0])
    assert out.kl_sum.item() == near(value)


def test_kl_elsewhere_is_not_in_the_loss():
    inputs = of_ratios([1.0], [0.0], reference_logprobs=[-3.0])
    assert run(inputs, LossConfig(kl_coef=0.1, kl_placement="advantage")).out.loss_sum.item() == 0.0


def test_entropy_is_subtracted_with_the_tokens_weight():
    # Two tokens of one sequence, entropies 1 and 3: -0.1 * (1 + 3) / 2; slope -0.1 / 2 each.
    inputs = of_ratios([1.0, 1.0], [0.0, 0.0])
    inputs = replace(inputs, entropies=torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True))
    out, _, gradient = run(inputs, LossConfig(entropy_coef=0.1, aggregation="sequence"))
    assert out.loss_sum.item() == near(-0.2)
    assert gradient == near([-0.05, -0.05])


def test_entropies_without_a_gradient_are_refused_where_they_need_one():
    inputs = of_ratios([1.0], [1.0])
    inputs = replace(inputs, entropies=inputs.entropies.detach())
    with pytest.raises(ValueError, match="entropies with a gradient"):
        policy_loss(inputs, LossConfig(entropy_coef=0.1), max_length=1)
    policy_loss(inputs, DAPO, max_length=1)


def test_missing_reference_logprobs_are_refused():
    with pytest.raises(ValueError, match=r"one shape \[N\]"):
        policy_loss(of_ratios([1.0], [1.0]), LossConfig(preset="grpo"), max_length=1)


def test_decoupled_ppo_at_the_first_update_of_a_batch_is_truncated_importance_sampling():
    # pi/mu is 0.5, 1, 8, whose cap is 5; prox is pi, so nothing is clipped: d loss/d logp = -min(pi/mu, 5) A, over 3.
    ratios, advantages = [0.5, 1.0, 8.0], [1.0, -1.0, 2.0]
    loss = LossConfig(preset="decoupled_ppo")
    out, gradient, _ = run(of_ratios(ratios, advantages), loss)
    assert gradient == near([-0.5, 1.0, -10.0])
    recomputed = of_ratios(ratios, advantages)
    recomputed = replace(recomputed, proximal_logprobs=recomputed.logprobs.detach())
    same, same_gradient, _ = run(recomputed, loss)
    assert (gradient, out.loss_sum.item()) == (same_gradient, same.loss_sum.item())
    truncated = LossConfig(preset="reinforce", importance_cap=5.0, aggregation=loss.aggregation)
    assert gradient == near(run(of_ratios(ratios, advantages), truncated)[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_behavior_logprob_skips_its_sequence_and_never_reaches_the_gradient(bad: float):
    inputs = of_ratios([1.0] * 3, [1.0] * 3, [2, 1], behavior_logprobs=[bad, -1.0, -1.0])
    out, gradient, _ = run(inputs, LossConfig(skip_threshold=0))
    assert out.skipped.tolist() == [True, False]
    assert gradient == [0.0, 0.0, -1.0]
    assert out.loss_sum.item() == -1.0
    assert out.finite.tolist() == [False, True, True]


def test_nan_advantage_of_a_skipped_sequence_does_not_reach_the_gradient():
    out, gradient, _ = loss_of([100.0, 1.0], [NAN, 1.0], [1, 1])
    assert out.loss_sum.item() == near(-1.0)
    assert gradient == near([0.0, -1.0])


def test_nan_of_the_learner_is_not_hidden():
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


def test_tensors_of_different_lengths_are_refused():
    inputs = of_ratios([1.0] * 4, [1.0] * 4)
    with pytest.raises(ValueError, match=r"\[4\], \[3\]"):
        policy_loss(replace(inputs, behavior_logprobs=torch.zeros(3)), DAPO, max_length=1)
