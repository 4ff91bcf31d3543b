"""Expert parallelism: which models can be divided, and what ranks that share experts compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.errors import ModelError
from async_rl.learner.layouts.expert_parallel import experts_to_divide
from async_rl.learner.model.policy_model import PolicyModel
from tests.families.catalogue import build
from tests.learner.engine.shared_cases import compare_with_one_process


def test_a_model_without_experts_is_refused_by_name():
    with pytest.raises(
        ModelError, match=r"parallel.experts: .* experts that transformers' plans name, got LlamaForCaus"
    ):
        experts_to_divide(PolicyModel(build("Llama"), "padded"), 2)


def test_experts_that_cannot_be_divided_are_refused_with_the_arithmetic():
    with pytest.raises(ModelError, match=r"parallel.experts: expected a divisor .* a layer, 4, got 3: 4 / 3 = 1.333;"):
        experts_to_divide(PolicyModel(build("Mixtral"), "padded"), 3)


@pytest.mark.slow
def test_routes_recomputation_and_a_rank_without_tokens_compute_the_same_as_alone(tmp_path: Path):
    names = ["replayed routes", "recomputed in part", "one sequence for two ranks"]
    compare_with_one_process(tmp_path, names, {"experts": 2})
