"""The work of attention and head by which ranks are balanced, from a model's shape."""

from __future__ import annotations

import pytest

from async_rl.learner.data.balance import Work
from async_rl.learner.engine.flops import StepFlops
from tests.families.catalogue import build


def work_of(name: str) -> Work:
    return StepFlops.of_model(build(name)).work


def test_attention_and_head_count_in_units_of_a_tokens_products_in_the_layers():
    costs = StepFlops(per_token=400.0, per_prediction=100.0, per_pair=((None, 8.0), (16, 80.0)))
    assert costs.work == Work(prediction=0.25, pair=0.02)


def test_layers_with_a_window_have_no_work_that_grows_with_the_square():
    # One of the two layers has a window; all else is alike.
    whole, half = work_of("Qwen 2"), work_of("Qwen 2, windows")
    assert half.prediction == whole.prediction
    assert half.pair == whole.pair / 2


@pytest.mark.parametrize("name", ["Gemma 4", "GPT-2", "Mamba", "Nemotron-H"])
def test_models_of_other_shapes_have_a_finite_work(name: str):
    assert 0 < sum(work_of(name)) < 1
