"""Numbers on one batch of five tokens: those of golden.md, by the code and by the loop over tokens, and those from the
formulas as other trainers' code computes them, to 1e-7.
"""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.config.loss import LossConfig
from async_rl.config.loss_names import ADVANTAGES, PRESETS
from async_rl.learner.losses.advantages import ADVANTAGE_FUNCTIONS, whitened
from async_rl.learner.losses.objective import sequence_weights
from async_rl.learner.losses.policy import policy_loss
from tests.learner.losses.by_loops import loss_by_loops
from tests.learner.losses.cases import MAX_LENGTH, Case, inputs_of

MU = [-0.9, -2.0, -0.5, -1.2, -0.3]
OLD = [-0.8, -1.9, -0.6, -1.3, -0.35]
PI = [-0.5, -1.5, -0.55, -1.6, -0.9]
REF = [-0.6, -1.7, -0.7, -1.4, -0.8]
OF_TOKENS = [1.0, 1.0, 1.0, -0.5, -0.5]

SAMPLED_BY_OLD = {"behavior": OLD}
"""For losses whose code knows one old policy, which sampled."""

PAGE = Path(__file__).with_name("golden.md").read_text(encoding="utf-8")
ROWS = {keys: numbers.split("|") for keys, numbers in re.findall(r"^\| `([^`]+)` \| (.+) \|$", PAGE, re.MULTILINE)}
CASE = Case(PI, MU, OF_TOKENS, REF, OLD, [0.0] * 5, [1] * 5, [3, 2])


def computed(loss: LossConfig, case: Case = CASE) -> list[float]:
    """The loss and its gradient by log pi."""
    inputs = inputs_of(case)
    out = policy_loss(inputs, loss, max_length=MAX_LENGTH)
    (out.loss_sum / out.denominator).backward()
    assert inputs.logprobs.grad is not None
    return [(out.loss_sum / out.denominator).item(), *inputs.logprobs.grad.tolist()]


@pytest.mark.parametrize("keys", ROWS)
def test_a_row_is_what_the_code_and_the_loop_compute(keys: str):
    loss = LossConfig.model_validate(tomllib.loads(keys.replace("; ", "\n")))
    shown = pytest.approx([float(number) for number in ROWS[keys]], abs=6e-9)
    assert computed(loss) == shown
    loops = loss_by_loops(CASE, loss)
    assert [loops.loss / loops.denominator, *(g / loops.denominator for g in loops.gradient)] == shown


def test_every_preset_has_a_row():
    assert {f'preset = "{name}"' for name in PRESETS} <= set(ROWS)


def test_the_advantages_are_those_of_the_page():
    rewards = np.array([1.0, 0.0, 0.0, 0.5])
    text = " ".join(PAGE.split())
    for name, function in ADVANTAGE_FUNCTIONS.items():
        values = function(rewards)
        digits = 8
        if ADVANTAGES[name].whitens_tokens:
            values, digits = whitened(values), 5
        assert ", ".join(f"{value:.{digits}f}".rstrip("0") for value in values) in text, name


@pytest.mark.parametrize(
    ("settings", "changes", "loss", "gradient"),
    [
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
        ({"preset": "gmpo"}, {**SAMPLED_BY_OLD, "logprobs": [-0.35, *PI[1:]]}, -0.48760178,
         [0, -0.22125793, -0.22125793, 0.08808601, 0]),
        # DeepSeek's weighted KL, alone. Divided by 5, r log(pi/ref): e^0.3 0.1, e^0.4 0.2, e^0.05 0.15, e^-0.3 -0.2,
        # e^-0.55 -0.1.
        ({"kl_coef": 1.0, "kl_placement": "loss", "kl_weighted": True}, {**SAMPLED_BY_OLD, "advantages": [0.0] * 5},
         0.01291375, [0.02699718, 0.05967299, 0.03153813, -0.02963273, -0.01153900]),
    ],
    ids=["opsm", "icepop", "geometric", "sapo", "gmpo", "gmpo_clipped", "weighted_kl"],
)  # fmt: skip
def test_a_loss_equals_that_of_its_peers_in_value_and_gradient(
    settings: dict[str, Any], changes: dict[str, Any], loss: float, gradient: list[float]
):
    config = LossConfig.model_validate({"skip_threshold": 0, **settings})
    assert computed(config, CASE._replace(**changes)) == pytest.approx([loss, *gradient], abs=2e-8)


def test_the_weight_of_a_sequence_is_the_product_of_its_ratios():
    # VCPO's code on this batch: w = 2.33964685, 0.36787944, (sum w)^2 / (2 sum w^2) = 0.65344350.
    inputs = inputs_of(CASE)
    out = policy_loss(inputs, LossConfig(skip_threshold=0), max_length=8)  # pyright: ignore[reportArgumentType]
    number, total, square = torch.stack(sequence_weights(out, inputs.sequence_index, 2)).tolist()
    assert (number, total) == (2.0, pytest.approx(2.33964685 + 0.36787944))
    assert total**2 / (number * square) == pytest.approx(0.65344350)
