"""Objectives: sums of a micro-batch, statistics of a step, the limits that skip a step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.config.loss import LossConfig
from async_rl.learner.data.packing import pack
from async_rl.learner.losses.batch import TokenLogprobs
from async_rl.learner.losses.diagnostics import summarise
from async_rl.learner.losses.objective import PolicyObjective, StepOutcome, policy_objective, update_stats
from async_rl.learner.model.policy_model import DeviceBatch, to_device
from async_rl.learner.sequences import TrainSequence
from tests.learner.tiny import tiny_config

STEPPED = StepOutcome("", 1.0, 1e-6)


def a_batch(ratios: list[float], *, versions: list[int] | None = None) -> tuple[DeviceBatch, TokenLogprobs]:
    """One sequence, its first token a prompt; behavior logprobs -1, advantages 1."""
    n = len(ratios)
    sequence = TrainSequence(
        sequence_id=7, token_ids=np.arange(n + 1, dtype=np.int32), loss_mask=np.arange(n + 1) > 0,
        behavior_logprobs=np.full(n + 1, -1.0, dtype=np.float32), temperature=1.0,
        versions=np.array([-1, *(versions or [3] * n)], dtype=np.int32), advantages=np.ones(n + 1, dtype=np.float32),
    )  # fmt: skip
    batch = to_device(pack([sequence], max_tokens=64, num_ranks=1)[0][0], torch.device("cpu"))
    logprobs = (torch.tensor(ratios).log() - 1.0).requires_grad_()
    return batch, TokenLogprobs(logprobs, torch.full((n,), 0.5))


def sums_of(ratios: list[float], loss: LossConfig, **changes: Any) -> Tensor:
    return PolicyObjective(loss, max_lag=2, max_length=8)(*a_batch(ratios, **changes), version=3).sums


def test_statistics_of_a_step_by_hand():
    # Ratios 1, 2 and 1/2 at lags 0, 1, 1: mean 3.5 / 3, ESS 3.5^2 / (3 * 5.25), clipped above: 2. Loss: (-1 - 1.28 -
    # 0.5) / 3. k3 at lag 1: 2 - 1 - ln 2 + 1/2 - 1 + ln 2.
    objective = PolicyObjective(LossConfig(), 2, 8)
    result = objective(*a_batch([1.0, 2.0, 0.5], versions=[3, 2, 2]), version=3)
    stats = update_stats(result.sums, float(result.ratio_max), [4], STEPPED, objective=objective)
    assert (stats.stepped, stats.tokens_trained, stats.skipped_sequence_ids) == (True, 3, (4,))
    assert stats.loss == pytest.approx(-2.78 / 3)
    assert (stats.ratio_mean, stats.ratio_max) == pytest.approx((3.5 / 3, 2.0), rel=1e-6)
    assert stats.ess == pytest.approx(3.5**2 / (3 * 5.25))
    assert (stats.clip_fraction, stats.entropy) == pytest.approx((1 / 3, 0.5))
    assert stats.mean_abs_log_ratio == pytest.approx(2 * math.log(2) / 3)
    assert summarise(stats.by_lag[1])["mismatch_k3"] == pytest.approx(0.25)
    assert stats.by_lag.shape[0] == 3


def test_kl_to_the_reference_is_a_mean_over_trained_tokens():
    batch, scored = a_batch([1.0, 1.0])
    loss = LossConfig(kl_coef=0.1, kl_placement="loss", kl_estimator="k2")
    batch = replace(batch, reference_logprobs=torch.tensor([-3.0, -1.0]))
    objective = PolicyObjective(loss, 0, 8)
    result = objective(batch, scored, version=3)
    # d = 2 and 0: 2^2 / 2 over two tokens.
    assert update_stats(result.sums, 1.0, [], STEPPED, objective=objective).reference_kl == pytest.approx(1.0)
    without = PolicyObjective(LossConfig(), 0, 8)
    assert update_stats(result.sums, 1.0, [], STEPPED, objective=without).reference_kl is None


def test_objective_of_a_config_knows_its_longest_answer_and_oldest_token(tmp_path: Any):
    config = tiny_config(tmp_path, "m", queue={"max_staleness": 6}, sampling={"max_new_tokens": 99})
    objective = policy_objective(config)
    assert (objective.max_lag, objective.max_length, objective.needs_entropy_grad) == (6, 99, False)
    assert PolicyObjective(LossConfig(entropy_coef=0.1), 0, 1).needs_entropy_grad


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        # Ratios 4 and 1: ESS 25 / (2 * 17) = 0.735, k3 (4 - 1 - ln 4) / 2 = 0.807.
        ({"min_ess": 0.74}, "is 0.735, beyond loss.min_ess = 0.74"),
        ({"min_ess": 0.73}, ""),
        ({"max_kl": 0.80}, "is 0.807, beyond loss.max_kl = 0.8"),
        ({"max_kl": 0.81}, ""),
        # The sequence is skipped: nothing is left that could be too far.
        ({"skip_threshold": 2.0, "max_kl": 0.1, "min_ess": 0.9}, ""),
    ],
)
def test_a_step_past_its_limits_says_why_it_is_skipped(limit: dict[str, Any], reason: str):
    loss = LossConfig(**limit)
    got = PolicyObjective(loss, 2, 8).why_skip(sums_of([4.0, 1.0], loss))
    assert reason in got
    assert bool(got) == bool(reason)
