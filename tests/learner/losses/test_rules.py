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


def test_a_token_that_became_certain_has_an_infinite_binary_kl_unless_it_was_certain():
    rule = {"level": "token", "statistic": "binary_kl", "above": 100.0}
    # pi = 1: the other tokens, which mu would sample, are gone.
    assert gradients([math.e], [1.0], rule).out.kept.tolist() == [False]
    certain = of_ratios([1.0], [1.0], behavior_logprobs=[0.0], logprobs=[0.0])
    certain.logprobs.requires_grad_()
    assert run(certain, with_rules(rule)).out.kept.tolist() == [True]


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
        ([{"level": "token", "statistic": "ratio"}], "set above or below"),
        ([{**TOKEN, "above": 1.0}], "above to exceed"),
        ([{"level": "token", "statistic": "ratio", "below": 1.0}], "below to be less"),
        ([{"level": "token", "statistic": "k3", "below": -0.5}], "below to exceed"),
        ([{**TOKEN, "action": "skip"}], "action"),
        ([{**TOKEN, "level": "micro_batch", "action": "clip"}], "action"),
        ([{**TOKEN, "level": "step", "below": 0.5, "action": "clip"}], "no below"),
        ([{**TOKEN, "level": "micro_batch", "when": "positive"}], "when"),
        ([{"level": "token", "statistic": "ess", "below": 0.5}], 'level = "step"'),
        ([{**TOKEN, "reduce": "max"}], "reduce"),
        ([TOKEN, TOKEN], "'token_ratio' again"),
        ([{**TOKEN, "name": "token_range"}], "other than skip_threshold, token_range"),
        ([{**TOKEN, "policy": "anchor"}], "policy"),
        ([{**TOKEN, "statistic": "kl"}], "binary_kl"),
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
