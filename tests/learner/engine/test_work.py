"""The work of attention and head by hand, from a model's shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.config.learner import ModelConfig
from async_rl.learner.balance import Work
from async_rl.learner.engine.model import load_model
from async_rl.learner.engine.work import work_of
from tests.families.catalogue import build
from tests.learner.tiny import tiny_model


@pytest.mark.parametrize("tied", [True, False])
def test_attention_and_head_count_in_units_of_a_token_s_products_in_the_layers(tmp_path: Path, tied: bool):
    # A layer: 16 x 16 + 16, twice 16 x 8 + 8, and 16 x 16 for attention, 3 x 16 x 32 for the MLP, 2 norms of 16: 2,368.
    # Two of them and a norm: 4,752. The head: 45 tokens of 16. Attention: 2 layers of 2 heads of 8, twice.
    model = load_model(ModelConfig(path=str(tiny_model(tmp_path, tied=tied))))
    assert model.config.vocab_size == 45
    assert work_of(model) == Work(prediction=45 * 16 / 4752, pair=2 * 2 * 16 / 4752)


def test_layers_with_a_window_have_no_work_that_grows_with_the_square():
    # One of the two layers has a window; all else is alike.
    whole, half = work_of(build("Qwen 2")), work_of(build("Qwen 2, windows"))
    assert half.prediction == whole.prediction
    assert half.pair == whole.pair / 2


def test_only_the_experts_that_a_token_uses_count():
    model = build("Mixtral")
    names = dict(model.base_model.named_parameters())
    experts = sum(p.numel() for name, p in names.items() if ".experts." in name)
    others = sum(p.numel() for name, p in names.items() if ".experts." not in name and "embed" not in name)
    assert experts > 0
    # 2 of 4 experts.
    assert work_of(model).prediction == pytest.approx(model.lm_head.weight.numel() / (others + experts / 2))


@pytest.mark.parametrize("name", ["Gemma 4", "GPT-2", "Mamba", "Nemotron-H"])
def test_models_of_other_shapes_have_a_finite_work(name: str):
    assert 0 < sum(work_of(build(name))) < 1
