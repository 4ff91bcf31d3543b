"""What a model's config says of its routes is what its modules are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from async_rl.errors import ModelError
from async_rl.routes import FAMILIES, RoutingShape, routers_of, routing_shape
from tests.learner.moe import moe_model
from tests.learner.tiny import tiny_model

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2
}  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_config_of_every_family_states_the_shape_of_its_routers(tmp_path: Path, model_type: str):
    directory = moe_model(tmp_path, model_type)
    shape = routing_shape(json.loads((directory / "config.json").read_text()))
    routers = routers_of(AutoModelForCausalLM.from_pretrained(directory), model_type)
    assert {RoutingShape(len(routers), router.num_experts, router.top_k) for router in routers} == {shape}
    dense = 1 if model_type in ("deepseek_v3", "glm4_moe") else 0
    assert shape == RoutingShape(3 - dense, 8, 2)


def test_dense_layers_have_no_routes(tmp_path: Path):
    directory = moe_model(tmp_path, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    shape = routing_shape(json.loads((directory / "config.json").read_text()))
    # Every second layer has experts: 1, 3 and 5; but 3 is dense.
    assert shape.num_layers == 2
    assert len(routers_of(AutoModelForCausalLM.from_pretrained(directory), "qwen3_moe")) == 2


def test_an_expert_takes_a_byte_up_to_256_experts():
    assert RoutingShape(58, 256, 8).dtype == np.uint8
    assert RoutingShape(58, 256, 8).bytes_per_token == 464
    assert RoutingShape(48, 257, 8).bytes_per_token == 768


def test_other_models_and_incomplete_configs_are_refused_by_the_key(tmp_path: Path):
    dense = json.loads((tiny_model(tmp_path) / "config.json").read_text())
    with pytest.raises(ModelError, match=r"model.routing_replay: expected a model with experts .*, got 'qwen2'"):
        routing_shape(dense)
    with pytest.raises(ModelError, match=r"num_experts_per_tok and one of num_experts, .* got 32, None and 8"):
        routing_shape({**MIXTRAL, "num_experts_per_tok": None})
    with pytest.raises(ModelError, match=r"expected routers of the class MixtralTopKRouter in Qwen2ForCausalLM"):
        routers_of(AutoModelForCausalLM.from_pretrained(tmp_path), "mixtral")
