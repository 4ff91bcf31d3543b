"""The entries of ``loss.rules`` by hand: what each masks, clips, skips and counts, and which rules are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from async_rl.config.loss import LossConfig
from async_rl.learner.losses.objective import PolicyObjective
from tests.learner.losses.cases import Run, of_ratios, run
from tests.learner.losses.test_objective import sums_of

ALONE = {"surrogate": "plain", "skip_threshold": 0}
"""REINFORCE: the gradient of a token by log pi is -A, so a rule shows in it at once."""


def with_rules(*rules: dict[str, Any], **keys: Any) -> LossConfig:
    return LossConfig(**{**ALONE, **keys, "rules": list(rules)})


def gradients(ratios: list[float], advantages: list[float], *rules: dict[str, Any], **keys: Any) -> Run:
    return run(of_ratios(ratios, advantages, **keys), with_rules(*rules))


def test_a_masked_token_leaves_the_denominator_and_a_clipped_one_stays():
    rule = {"level": "token", "statistic": "ratio", "above": 2.0}
    masked = gradients([1.0, 3.0, 0.5], [1.0, 1.0, 1.0], rule)
    clipped = gradients([1.0, 3.0, 0.5], [1.0, 1.0, 1.0], {**rule, "action": "clip"})
    assert masked.gradient == clipped.gradient == [-1.0, 0.0, -1.0]
    assert (int(masked.out.denominator), int(clipped.out.denominator)) == (2, 3)
    assert clipped.out.capped_high.tolist() == [False, True, False]
    assert masked.out.rule_counts.tolist() == clipped.out.rule_counts.tolist() == [1.0]


def test_deepseek_s_sequence_mask_leaves_out_wrong_answers_that_became_unlikely():
    # arXiv:2512.02556 eq. 9: A < 0 and the mean of log mu/pi above delta. Means: ln 2, ln 2, 0, -ln 2.
    rule = {"level": "sequence", "statistic": "k1", "above": 0.5, "when": "negative"}
    got = gradients(
        [0.5, 0.5, 0.5, 0.5, 2.0, 0.5, 2.0, 2.0], [-1, -1, 1, 1, -1, -1, -1, -1], rule, lengths=[2, 2, 2, 2]
    )
    assert got.gradient == [0.0, 0.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0]
    assert got.out.skipped.tolist() == [True, False, False, False]
    assert int(got.out.denominator) == 6


@pytest.mark.parametrize(
    ("statistic", "limit"),
    # mu = e^-1 = 0.368. pi = 1.5 mu = 0.552: |pi - mu| = 0.184, KL = 0.0684. pi = 0.5 mu: 0.184, KL = 0.0750.
    [("tv", 0.18), ("binary_kl", 0.068)],
)
def test_dppo_stops_a_token_only_on_its_way_out(statistic: str, limit: float):
    # arXiv:2602.04879: A > 0 and r > 1, or A < 0 and r < 1, beyond the divergence.
    rule = {"level": "token", "statistic": statistic, "above": limit, "when": "outward", "action": "clip"}
    got = gradients([1.5, 1.5, 0.5, 0.5, 1.2], [1.0, -1.0, 1.0, -1.0, 1.0], rule)
    assert got.gradient == [0.0, 1.0, -1.0, 0.0, -1.0]
    assert int(got.out.denominator) == 5


def test_binary_kl_by_hand():
    # 0.3679 ln(1/1.5) + 0.6321 ln(0.6321 / 0.4482).
    rule = {"level": "token", "statistic": "binary_kl", "action": "mask"}
    mu, pi = math.exp(-1), 1.5 * math.exp(-1)
    value = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    assert value == pytest.approx(0.068213, abs=1e-5)
    assert gradients([1.5], [1.0], {**rule, "above": value * 0.999}).out.kept.tolist() == [False]
    assert gradients([1.5], [1.0], {**rule, "above": value * 1.001}).out.kept.tolist() == [True]


def test_a_token_that_became_certain_has_an_infinite_binary_kl_unless_it_was_certain():
    rule = {"level": "token", "statistic": "binary_kl", "above": 100.0}
    # pi = 1: the other tokens, which mu would sample, are gone.
    assert gradients([math.e], [1.0], rule).out.kept.tolist() == [False]
    certain = of_ratios([1.0], [1.0], behavior_logprobs=[0.0], logprobs=[0.0])
    certain.logprobs.requires_grad_()
    assert run(certain, with_rules(rule)).out.kept.tolist() == [True]


def test_a_two_sided_geometric_mask_is_one_of_k1():
    # Geometric means 2, 1, 1/2; allowed: 1 / 1.5 to 1.5.
    rule = {"level": "sequence", "statistic": "k1", "above": math.log(1.5), "below": -math.log(1.5)}
    got = gradients([4.0, 1.0, 3.0, 1 / 3, 0.25, 1.0], [1.0] * 6, rule, lengths=[2, 2, 2])
    assert got.out.skipped.tolist() == [True, False, True]


def test_a_maximum_over_a_sequence_sees_one_token():
    rule = {"level": "sequence", "statistic": "abs_log_ratio", "reduce": "max", "above": 1.0}
    got = gradients([1.0, 0.2, 1.0, 0.5], [1.0] * 4, rule, lengths=[2, 2])
    assert got.out.skipped.tolist() == [True, False]


def test_a_sum_over_a_sequence_is_the_product_of_its_ratios():
    # Products 4 and 2.25; the limit is 3.
    rule = {"level": "sequence", "statistic": "k1", "reduce": "sum", "below": -math.log(3.0)}
    got = gradients([2.0, 2.0, 1.5, 1.5], [1.0] * 4, rule, lengths=[2, 2])
    assert got.out.skipped.tolist() == [True, False]


def test_a_sequence_goes_outward_by_its_geometric_mean():
    # Means of the ratios are above 1 in both, geometric means 0.8 and 1.25: only the second grows with A > 0.
    rule = {"level": "sequence", "statistic": "abs_log_ratio", "above": 0.1, "when": "outward"}
    got = gradients([4.0, 0.16, 0.25, 6.25], [1.0] * 4, rule, lengths=[2, 2])
    assert got.out.skipped.tolist() == [False, True]


def test_a_rule_on_the_anchor_compares_the_proximal_policy_with_the_sampling_one():
    rule = {"level": "token", "statistic": "ratio", "above": 2.0, "below": 0.5, "policy": "anchor"}
    loss = LossConfig.model_validate({"preset": "decoupled_ppo", "rules": [rule]})
    # prox/mu is 3, 1, 0.4, while pi/mu is 1 throughout.
    inputs = of_ratios([1.0] * 3, [1.0] * 3, proximal_logprobs=[-1 + math.log(r) for r in (3.0, 1.0, 0.4)])
    assert run(inputs, loss).out.kept.tolist() == [False, True, False]


def test_rules_do_not_depend_on_their_order_and_each_counts_its_own_tokens():
    high = {"level": "token", "statistic": "ratio", "above": 2.0}
    away = {"level": "token", "statistic": "k2", "above": 0.2, "action": "clip"}
    # Log ratios of 3, 1 and 0.5: k2 = 0.60, 0, 0.24.
    first = gradients([3.0, 1.0, 0.5], [1.0] * 3, high, away)
    second = gradients([3.0, 1.0, 0.5], [1.0] * 3, away, high)
    assert first.gradient == second.gradient == [0.0, -1.0, 0.0]
    assert int(first.out.denominator) == int(second.out.denominator) == 2
    assert (first.out.rule_counts.tolist(), second.out.rule_counts.tolist()) == ([1.0, 2.0], [2.0, 1.0])


def test_a_rule_skips_the_step_by_the_mean_over_the_tokens_that_are_left():
    # |log r| of 4 and 1: mean 0.693.
    for limit, skips in ((0.69, True), (0.70, False)):
        loss = with_rules({"level": "step", "statistic": "abs_log_ratio", "above": limit, "action": "skip"})
        reason = PolicyObjective(loss, 2, 8).why_skip(sums_of([4.0, 1.0], loss))
        assert bool(reason) == skips
        if skips:
            assert "the mean abs_log_ratio is 0.693, beyond above = 0.69 of the rule 'step_abs_log_ratio'" in reason


TOKEN = {"level": "token", "statistic": "ratio", "above": 2.0}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"level": "token", "statistic": "ratio"}], "expected a limit: set above or below"),
        ([{**TOKEN, "above": 1.0}], "above to exceed the statistic's value on policy"),
        ([{"level": "token", "statistic": "ratio", "below": 1.0}], "below to be less than the statistic's value"),
        ([{"level": "token", "statistic": "k3", "below": -0.5}], "below to exceed the statistic's lowest value"),
        ([{**TOKEN, "action": "skip"}], 'level = "step" with action = "skip"'),
        ([{**TOKEN, "level": "micro_batch", "action": "clip"}], 'level "token", "sequence" or "step" with action'),
        ([{**TOKEN, "level": "step", "below": 0.5, "action": "clip"}], 'above, no below, and policy = "trained"'),
        ([{**TOKEN, "level": "micro_batch", "when": "positive"}], 'when = "always" with level = "micro_batch"'),
        ([{"level": "token", "statistic": "ess", "below": 0.5}], 'level = "step" and action = "skip"'),
        ([{**TOKEN, "reduce": "max"}], 'reduce = "mean" with level "token" or "step"'),
        ([TOKEN, TOKEN], "a name of its own for every rule.*'token_ratio' again"),
        ([{**TOKEN, "name": "token_range"}], "other than skip_threshold, token_range"),
        ([{**TOKEN, "policy": "anchor"}], "expected policy = \"trained\" in the rule 'token_ratio'"),
        ([{**TOKEN, "statistic": "kl"}], "ratio.*abs_log_ratio.*binary_kl"),
        ([{**TOKEN, "side": "above"}], "side"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(rules: list[dict[str, Any]], message: str):
    with pytest.raises(ValueError, match=message):
        LossConfig.model_validate({"rules": rules})


def test_the_short_keys_are_rules():
    loss = LossConfig(skip_threshold=3.0, skip_statistic="geometric", token_range=(0.0, 5.0), min_ess=0.3, max_kl=0.1)
    labels = [rule.label for rule in loss.all_rules]
    assert labels == ["skip_threshold", "token_range", "min_ess", "max_kl"]
    geometric, in_range, *_ = loss.all_rules
    assert (geometric.statistic, geometric.below) == ("k1", -math.log(3.0))
    assert (in_range.below, in_range.above) == (None, 5.0)
