"""Losses on one small batch, against numbers from the formulas as other trainers' code computes them, to 1e-7.

Five tokens in two sequences. The numbers are the loss and its gradient by log pi, divided by the denominator that
``docs/algorithms.md`` names for each.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from async_rl.config.loss import LossConfig
from async_rl.learner.losses.objective import sequence_weights
from async_rl.learner.losses.policy import policy_loss
from tests.learner.losses.cases import Case, inputs_of

MU = [-0.9, -2.0, -0.5, -1.2, -0.3]
OLD = [-0.8, -1.9, -0.6, -1.3, -0.35]
PI = [-0.5, -1.5, -0.55, -1.6, -0.9]
REF = [-0.6, -1.7, -0.7, -1.4, -0.8]
ADVANTAGES = [1.0, 1.0, 1.0, -0.5, -0.5]

SAMPLED_BY_OLD = {"behavior": OLD}
"""For losses whose code knows one old policy, which sampled."""


def compute(settings: dict[str, Any], behavior: list[float], pi: list[float]) -> tuple[float, list[float]]:
    inputs = inputs_of(Case(pi, behavior, ADVANTAGES, REF, OLD, [0.0] * 5, [1] * 5, [3, 2]))
    out = policy_loss(inputs, LossConfig(**{"skip_threshold": 0, **settings}), max_length=8)
    (out.loss_sum / out.denominator).backward()
    assert inputs.logprobs.grad is not None
    return (out.loss_sum / out.denominator).item(), inputs.logprobs.grad.tolist()


@pytest.mark.parametrize(
    ("settings", "changes", "loss", "gradient"),
    [
        # verl's dppo_tv and dppo_kl with limits of 0.15 and 0.05.
        ({"preset": "dppo_tv"}, {}, 0.49200041, [0, -0.32974425, -0.19024588, 0.06703200, 0]),
        ({"preset": "dppo_kl"}, {}, 0.49200041, [0, -0.32974425, -0.19024588, 0.06703200, 0]),
        # slime's and TRL's off-policy sequence mask with delta = 0.3, on PPO's clip.
        (
            {"rules": [{"level": "sequence", "statistic": "k1", "above": 0.3, "when": "negative", "action": "clip"}],
             "clip_high": 0.2},
            {}, -0.67024588, [0, 0, -0.19024588, 0, 0],
        ),
        # verl's rollout weights "0.9_1.11" by token, on PPO's clip against the old policy.
        (
            {"anchor": "proximal", "importance_cap": 1.11, "clip_high": 0.2, "rules": [
                {"level": "token", "statistic": "ratio", "below": 0.9, "above": 1.11, "policy": "anchor",
                 "action": "clip"}]},
            {}, -0.57224258, [0, 0, -0.19024588, 0, 0],
        ),
        # verl's rejection by seq_mean_k1 beyond 1.05, whose denominator is that of the kept tokens.
        (
            {"anchor": "proximal", "clip_high": 0.2, "rules": [
                {"level": "sequence", "statistic": "k1", "above": math.log(1.05), "below": -math.log(1.05),
                 "policy": "anchor"}]},
            {}, -1.15042370, [0, 0, -0.35042370, 0, 0],
        ),
        # verl's and TRL's SAPO and GMPO.
        ({"preset": "sapo"}, SAMPLED_BY_OLD, -0.75466033,
         [-0.21823017, -0.23418766, -0.17509675, 0.09090867, 0.06867499]),
        ({"preset": "gmpo"}, SAMPLED_BY_OLD, -0.46584069, [-0.21400424, -0.21400424, -0.21400424, 0.08808601, 0]),
        ({"preset": "gmpo"}, {**SAMPLED_BY_OLD, "pi": [-0.35, *PI[1:]]}, -0.48760178,
         [0, -0.22125793, -0.22125793, 0.08808601, 0]),
    ],
    ids=["dppo_tv", "dppo_kl", "opsm", "icepop", "geometric", "sapo", "gmpo", "gmpo_clipped"],
)  # fmt: skip
def test_a_loss_equals_that_of_its_peers_in_value_and_gradient(
    settings: dict[str, Any], changes: dict[str, Any], loss: float, gradient: list[float]
):
    got, slope = compute(settings, changes.get("behavior", MU), changes.get("pi", PI))
    assert got == pytest.approx(loss, abs=2e-8)
    assert slope == pytest.approx(gradient, abs=2e-8)


@pytest.mark.parametrize(
    ("weighted", "loss", "gradient"),
    [
        (False, 0.01216996, [0.01903252, 0.03625385, 0.02785840, -0.04428055, -0.02103418]),
        # Divided by 5, r log(pi/ref): e^0.3 0.1, e^0.4 0.2, e^0.05 0.15, e^-0.3 -0.2, e^-0.55 -0.1.
        (True, 0.01291375, [0.02699718, 0.05967299, 0.03153813, -0.02963273, -0.01153900]),
    ],
)
def test_a_weighted_kl_is_deepseek_s_and_its_gradient_that_of_the_kl(
    weighted: bool, loss: float, gradient: list[float]
):
    # No advantage, so the loss is the KL alone.
    settings = {"kl_coef": 1.0, "kl_placement": "loss", "kl_weighted": weighted, "skip_threshold": 0}
    inputs = inputs_of(Case(PI, OLD, [0.0] * 5, REF, [], [0.0] * 5, [1] * 5, [3, 2]))
    out = policy_loss(inputs, LossConfig(**settings), max_length=8)
    (out.loss_sum / out.denominator).backward()
    assert (out.loss_sum / out.denominator).item() == pytest.approx(loss, abs=1e-8)
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == pytest.approx(gradient, abs=1e-8)


def test_the_weight_of_a_sequence_is_the_product_of_its_ratios():
    # VCPO's code on this batch: w = 2.33964685, 0.36787944, (sum w)^2 / (2 sum w^2) = 0.65344350.
    inputs = inputs_of(Case(PI, MU, ADVANTAGES, [], [], [0.0] * 5, [1] * 5, [3, 2]))
    out = policy_loss(inputs, LossConfig(skip_threshold=0), max_length=8)  # pyright: ignore[reportArgumentType]
    number, total, square = torch.stack(sequence_weights(out, inputs.sequence_index, 2)).tolist()
    assert (number, total) == (2.0, pytest.approx(2.33964685 + 0.36787944))
    assert total**2 / (number * square) == pytest.approx(0.65344350)
