"""Diagnostics by lag, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.config.loss import LossConfig
from async_rl.learner.losses.diagnostics import COLUMNS, diagnostic_sums, summarise
from async_rl.learner.losses.policy import PolicyInputs, policy_loss
from tests.learner.losses.cases import of_ratios

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
    assert lag_1.items() >= {"clip_low": 0.5, "clip_high": 0.0, "skipped": 0.0}.items()
    assert lag_1["kl"] == near(0.25)
    assert last.items() >= {"tokens": 2, "kept": 1, "skipped": 0.5, "out_of_range": 0.0, "clip_high": 1.0}.items()
    assert last["mismatch_k3"] == near((0.5 - math.log(1.5) + 3 - math.log(4)) / 2)
    assert [last[name] for name in ("ratio_mean", "ess", "kl")] == near([1.5, 1.0, 0.5 - math.log(1.5)])


def test_tokens_out_of_range_and_not_finite_are_told_apart():
    # Sequence 0: a NaN, so skipped with its 2 tokens. Sequence 1: ratio 0.2 is out of range, 1 is kept.
    inputs = of_ratios([1.0, 1.0, 0.2, 1.0], [1.0] * 4, [2, 2], behavior_logprobs=[math.nan, -1.0, -1.0, -1.0])
    inputs = replace(inputs, lag=torch.zeros(4, dtype=torch.int64))
    total = summarise(rows_of(inputs)[0])
    assert total.items() >= {"tokens": 4, "kept": 1, "num_skipped": 2, "num_out_of_range": 1}.items()
    # The mismatch is over the 3 finite ones.
    means = [total[name] for name in ("mismatch_k1", "mismatch_k3", "mean_abs_log")]
    assert means == near([math.log(5) / 3, (math.log(5) - 0.8) / 3, math.log(5) / 3])


def test_a_nan_of_the_learner_is_shown_and_without_tokens_everything_is_on_policy():
    inputs = of_ratios([1.0, 1.0], [1.0, 1.0], [1, 1])
    inputs = replace(inputs, logprobs=torch.tensor([math.nan, -1.0], dtype=torch.float64))
    assert math.isnan(summarise(rows_of(inputs, LossConfig()).sum(0))["ratio_mean"])
    nothing = summarise(np.zeros(COLUMNS))
    assert nothing.items() >= {"tokens": 0, "ess": 1.0, "mismatch_k3": 0.0}.items()
