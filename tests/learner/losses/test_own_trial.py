"""The trial of the user's own loss: right functions pass it; each mistake is refused by name, with its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from async_rl.config.loss import LossConfig
from async_rl.errors import ConfigError
from async_rl.learner.losses.own import LossInputs, LossOutput, OwnLoss
from async_rl.learner.losses.own_trial import try_loss
from async_rl.learner.losses.parts import SurrogateInputs as Surrogate
from async_rl.learner.losses.parts import aggregate, clipped, kl_estimate, log_ratio, sum_by
from tests.learner.losses.test_own import reinforce


def trial(function: Callable[[LossInputs], LossOutput], *, max_lag: int = 4, **settings: Any) -> OwnLoss:
    return try_loss("mine.py:loss", function, LossConfig(**settings), max_length=8, max_lag=max_lag)


def of_parts(inputs: LossInputs) -> LossOutput:
    """PPO's clip by the settings, aggregated by them, with a KL and an entropy bonus if they are set."""
    settings, all_N = inputs.settings, torch.ones_like(inputs.lag, dtype=torch.bool)
    ratio_N = log_ratio(inputs.logprobs, inputs.behavior_logprobs, all_N)
    tokens = clipped(Surrogate(ratio_N, inputs.logprobs, inputs.advantages), settings)
    loss_N = -tokens.objective - settings.entropy_coef * inputs.entropies
    if settings.is_kl_in_loss and inputs.reference_logprobs is not None:
        distance_N = log_ratio(inputs.logprobs, inputs.reference_logprobs, all_N)
        loss_N = loss_N + settings.kl_coef * kl_estimate(distance_N, settings.kl_estimator)
    weights = aggregate(
        all_N, inputs.sequence_index, inputs.num_sequences, settings.aggregation, max_length=inputs.max_length
    )
    return LossOutput((loss_N * weights.weight).sum(dtype=torch.float64), weights.denominator)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_high": 0.5, "dual_clip": 3.0, "aggregation": "sequence"},
        {"aggregation": "sequence_sum", "entropy_coef": 0.1},
        {"preset": "grpo"},
        {"kl_coef": 0.1, "kl_placement": "reward"},
    ],
)
def test_a_loss_of_the_built_in_parts_passes_with_every_key_that_it_reads(settings: dict[str, Any]):
    assert trial(of_parts, **settings).metric_keys == ()


def test_names_of_masks_and_metrics_are_taken_from_the_trial_and_no_token_is_older_than_it_can_be():
    seen: list[int] = []

    def loss(inputs: LossInputs) -> LossOutput:
        seen.append(int(inputs.lag.max()))
        old = inputs.lag > 1
        out = (inputs.advantages * inputs.logprobs).masked_fill(old, 0.0)
        return LossOutput(-out.sum(), (~old).sum(), {"old": old}, metrics={"lag": inputs.lag[~old].sum()})

    assert trial(loss, max_lag=2).metric_keys == ("loss_mask/old", "loss_metric/lag")
    assert max(seen) == 2


def mean(inputs: LossInputs) -> LossOutput:
    return LossOutput(-(inputs.advantages * inputs.logprobs).mean(), torch.tensor(1))


def of_centred(inputs: LossInputs) -> LossOutput:
    advantages = inputs.advantages - inputs.advantages.mean()
    return LossOutput(-(advantages * inputs.logprobs).sum(), torch.tensor(len(advantages)))


def centred_loss(inputs: LossInputs) -> LossOutput:
    """The value does not depend on the cut, because what is subtracted has the value 0; the gradient does."""
    weight = inputs.advantages.abs().max() * (inputs.logprobs - inputs.logprobs.detach())
    return LossOutput((-inputs.advantages * inputs.logprobs + weight).sum(), torch.tensor(len(weight)))


def longest(inputs: LossInputs) -> LossOutput:
    """Marks the tokens of the longest sequence of the micro-batch as capped."""
    counts = sum_by(inputs.sequence_index, torch.ones_like(inputs.lag), inputs.num_sequences)
    return replace(reinforce(inputs), capped_low=counts[inputs.sequence_index] == counts.max())


def doubling(inputs: LossInputs) -> LossOutput:
    inputs.advantages.mul_(2.0)
    return reinforce(inputs)


def shifting(inputs: LossInputs) -> LossOutput:
    inputs.logprobs.sub_(1.0)
    return reinforce(inputs)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (mean, r"the same loss however .*, got 0\.3\d+ = 0\.3\d+ / 1 in one piece and 0\.4\d+ = 0\.9\d+ / 2 in two"),
        (of_centred, "the same loss however .* cut after sequence 1 of 5"),
        (centred_loss, "the same gradient however .* for token"),
        (longest, r"the same masks and capped tokens however .*, got \[7, 0\] tokens in one piece and \[12, 0\]"),
        (lambda i: replace(reinforce(i), metrics={"lag": i.lag.double().mean()}), "metrics that are sums over tokens"),
        (lambda i: replace(reinforce(i), denominator=torch.tensor(0)), "a denominator above 0"),
        (lambda i: LossOutput(i.logprobs.log().sum(), torch.tensor(1)), "a finite loss_sum .*, got nan"),
        (
            lambda i: LossOutput(torch.where(i.lag > 0, i.logprobs, i.logprobs.sqrt() * 0).nansum(), torch.tensor(1)),
            "a finite gradient, got NaN or infinity for 22 of 22 tokens",
        ),
        (lambda i: replace(reinforce(i), metrics={"x": i.lag.sum() / 0}), "a finite metric x, got inf"),
        (lambda i: LossOutput((0 * i.logprobs).sum(), torch.tensor(1)), "a gradient to logprobs, got 0"),
        (lambda i: replace(reinforce(i), masks={"old": i.lag > 2}), "no gradient for tokens under the mask old"),
        (doubling, "changes its input advantages"),
        (shifting, "changes its input logprobs"),
    ],
)
def test_a_loss_that_breaks_a_rule_is_refused_with_the_figures(function: Any, expected: str):
    with pytest.raises(ConfigError, match=rf"mine\.py:loss(: expected)? {expected}"):
        trial(function)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"clip_high": 0.3}, "clip_high"),
        ({"preset": "grpo"}, "kl_coef"),
        ({"preset": "dr_grpo"}, "aggregation"),
        ({"anchor": "proximal"}, "anchor"),
        ({"skip_threshold": 0}, "skip_threshold"),
        ({"entropy_coef": 0.1}, "entropy_coef"),
    ],
)
def test_a_key_that_is_set_and_that_the_loss_does_not_read_is_refused(settings: dict[str, Any], key: str):
    with pytest.raises(ConfigError, match=rf"mine\.py:loss does not read loss\.{key}, but it is set to"):
        trial(reinforce, **settings)


def test_keys_of_the_advantages_and_limits_of_a_step_stay_what_they_are():
    trial(reinforce, advantage="group_mean", best_k=2, length_bonus=0.1, min_ess=0.5, max_kl=1.0, mask_truncated=False)
