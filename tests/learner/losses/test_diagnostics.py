"""Diagnostics by lag: by hand, against loops, and merged from parts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from async_rl.config.loss import LossConfig
from async_rl.learner.losses.diagnostics import COLUMNS, Summary, diagnostic_sums, k3_sum_and_tokens, summarise
from async_rl.learner.losses.policy import PolicyInputs, policy_loss
from tests.examples import examples
from tests.learner.losses.cases import Case, inputs_of, of_ratios, ragged_cases

LOSS = LossConfig(skip_threshold=3.0, token_range=(0.3, 2.5))


def rows_of(inputs: PolicyInputs, loss: LossConfig = LOSS, num_lags: int = 3) -> np.ndarray:
    out = policy_loss(inputs, loss, max_length=8)
    return diagnostic_sums(out, out.skipped[inputs.sequence_index], inputs.lag, num_lags).numpy()


def near(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_what_is_left_out_and_what_is_clipped_is_counted_by_lag():
    # Lag 1: ratios 2 and 1/2, below 0.8 at A < 0; k3 (2 - 1 - ln 2 + 1/2 - 1 + ln 2) / 2. Lag 4, in the last row with
    # lag 2: ratio 4 in a sequence of its own, skipped, and 1.5 clipped at A > 0.
    inputs = of_ratios([1.0, 2.0, 0.5, 1.5, 4.0], [1.0, -1.0, -1.0, 1.0, 1.0], [4, 1], lag=[0, 1, 1, 2, 4])
    rows = rows_of(inputs)
    _, lag_1, last = (summarise(row) for row in rows)
    assert (lag_1.kl, lag_1.clip_low, lag_1.clip_high, lag_1.skipped) == near((0.25, 0.5, 0.0, 0.0))
    assert (last.tokens, last.kept, last.skipped, last.out_of_range, last.clip_high) == (2, 1, 0.5, 0.0, 1.0)
    assert k3_sum_and_tokens(rows[2]) == near((0.5 - math.log(1.5) + 3 - math.log(4), 2))


def test_tokens_out_of_range_and_not_finite_are_told_apart():
    # Sequence 0: a NaN, so skipped with its 2 tokens. Sequence 1: ratio 0.2 is out of range, 1 is kept.
    inputs = of_ratios([1.0, 1.0, 0.2, 1.0], [1.0] * 4, [2, 2], behavior_logprobs=[math.nan, -1.0, -1.0, -1.0])
    inputs = replace(inputs, lag=torch.zeros(4, dtype=torch.int64))
    total = summarise(rows_of(inputs)[0])
    assert (total.tokens, total.kept, total.num_skipped, total.num_out_of_range) == (4, 1, 2, 1)
    # The mismatch is over the 3 finite ones.
    assert total.mismatch_k1 == near(-math.log(0.2) / 3)


def test_a_nan_of_the_learner_does_not_break_the_histogram_and_without_tokens_everything_is_on_policy():
    inputs = of_ratios([1.0, 1.0], [1.0, 1.0], [1, 1])
    inputs = replace(inputs, logprobs=torch.tensor([math.nan, -1.0], dtype=torch.float64))
    assert math.isnan(summarise(rows_of(inputs, LossConfig()).sum(0)).ratio_mean)
    nothing = summarise(np.zeros(COLUMNS))
    assert (nothing.tokens, nothing.ess, nothing.ratio_max, nothing.ratio_p50, nothing.mismatch_k3) == (0, 1, 1, 1, 0)


def test_quantiles_come_out_of_the_histogram_within_5_percent_of_their_logarithm():
    torch.manual_seed(0)
    d = torch.randn(20_000, dtype=torch.float64) * 0.02
    got = summarise(rows_of(of_ratios(d.exp().tolist(), [0.0] * len(d)), LossConfig())[0])
    for share, found in ((0.01, got.ratio_p01), (0.99, got.ratio_p99), (1.0, got.ratio_max)):
        exact = torch.quantile(d, share, interpolation="lower").item()
        assert math.log(found) == pytest.approx(exact, rel=0.06)
    # Every size of ratio has its bin.
    for log_ratio in (1e-7, 1e-3, 1.0, 60.0, -1e-4, -60.0):
        one = replace(of_ratios([1.0], [1.0]), logprobs=torch.tensor([log_ratio - 1.0], dtype=torch.float64))
        found = math.log(summarise(rows_of(one, LossConfig(skip_threshold=0))[0]).ratio_p50)
        assert found == pytest.approx(log_ratio, rel=0.06, abs=1e-6)


@examples(60)
@given(ragged_cases())
def test_summary_equals_the_loop_over_tokens(case: Case):
    inputs = inputs_of(case)
    kept = policy_loss(inputs, LOSS, max_length=8).kept.tolist()
    rows = rows_of(inputs, num_lags=5)
    for lag in range(5):
        tokens = [t for t, at in enumerate(case.lags) if at == lag]
        finite = [t for t in tokens if math.isfinite(case.behavior[t])]
        got = summarise(rows[lag])
        assert (got.tokens, got.kept) == (len(tokens), sum(kept[t] for t in tokens))
        d = [case.logprobs[t] - case.behavior[t] for t in finite]
        assert_mean(got.mismatch_k1, [-x for x in d])
        assert_mean(got.mismatch_k3, [math.exp(x) - 1 - x for x in d])
        assert_mean(got.mean_abs_log, [abs(x) for x in d])
        check_ratios(got, [math.exp(case.logprobs[t] - case.behavior[t]) for t in tokens if kept[t]])


def assert_mean(got: float, values: list[float]) -> None:
    assert got == pytest.approx(sum(values) / max(1, len(values)), rel=1e-6, abs=1e-6)


def check_ratios(got: Summary, ratios: list[float]) -> None:
    if not ratios:
        return
    assert_mean(got.ratio_mean, ratios)
    assert got.ess == pytest.approx(sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios)))
    assert math.log(got.ratio_max) == pytest.approx(math.log(max(ratios)), rel=0.06, abs=1e-6)
