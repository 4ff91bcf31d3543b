"""The numbers of golden.md: every row, by the code and by the loop over tokens."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from async_rl.config.loss import LossConfig
from async_rl.config.loss_names import ADVANTAGES, PRESETS
from async_rl.learner.losses.advantages import ADVANTAGE_FUNCTIONS, whitened
from async_rl.learner.losses.policy import policy_loss
from tests.learner.losses.by_loops import loss_by_loops
from tests.learner.losses.cases import MAX_LENGTH, Case, inputs_of
from tests.learner.losses.test_peers import ADVANTAGES as CASE_ADVANTAGES
from tests.learner.losses.test_peers import MU, OLD, PI, REF

PAGE = Path(__file__).with_name("golden.md").read_text(encoding="utf-8")
ROWS = {keys: numbers.split("|") for keys, numbers in re.findall(r"^\| `([^`]+)` \| (.+) \|$", PAGE, re.MULTILINE)}
CASE = Case(PI, MU, CASE_ADVANTAGES, REF, OLD, [0.0] * 5, [1] * 5, [3, 2])


@pytest.mark.parametrize("keys", ROWS)
def test_a_row_is_what_the_code_and_the_loop_compute(keys: str):
    loss = LossConfig.model_validate(tomllib.loads(keys.replace("; ", "\n")))
    inputs = inputs_of(CASE)
    out = policy_loss(inputs, loss, max_length=MAX_LENGTH)
    (out.loss_sum / out.denominator).backward()
    assert inputs.logprobs.grad is not None
    shown = pytest.approx([float(number) for number in ROWS[keys]], abs=6e-9)
    assert [(out.loss_sum / out.denominator).item(), *inputs.logprobs.grad.tolist()] == shown
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
