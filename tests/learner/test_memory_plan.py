"""The predicted peak memory against the tensors that a step has alive, and parameters by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.config import Config
from async_rl.config.parallel import Layout
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.memory_plan import MemoryPlan, ModelShape, UnknownShapeError, plan_memory
from async_rl.learner.ranks import init_ranks
from tests.learner.engine.live_bytes import LiveBytes, local_bytes
from tests.learner.moe import moe_model
from tests.learner.tiny import random_sequences, tiny_config, tiny_model

SHAPE: Mapping[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS: Mapping[str, Any] = {**SHAPE, "num_hidden_layers": 3, "head_dim": 16, "moe_intermediate_size": 48}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model and one with experts, with activations that take as much as weights."""
    root = tmp_path_factory.mktemp("memory")
    tiny_model(root / "model", intermediate_size=160, **SHAPE)
    moe_model(root / "experts", "qwen3_moe", **EXPERTS)
    return root


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's buffers of 80 MB would be all that these models take."""
    monkeypatch.setattr("async_rl.learner.memory_plan.CHUNK_BYTES", {"cpu": (1 << 16, 1 << 16)})


def shape_of(directory: Path) -> ModelShape:
    return ModelShape.of(json.loads((directory / "config.json").read_text()))


def measured_config(directory: Path, model: str, sections: dict[str, Any]) -> Config:
    learner = {"max_tokens": 256} | sections.get("learner", {})
    return tiny_config(directory, model, **(sections | {"learner": learner}))


def peak_of_step(config: Config) -> int:
    """The bytes of weights and state, and of what is alive at once in steps of three micro-batches. There are three
    steps, so that what a step leaves alive would count again.
    """
    engine = FsdpEngine(config, init_ranks(config))
    kept = local_bytes([*engine.policy.model.parameters(), *engine.policy.optimizer.tensors().values()])
    with LiveBytes() as live:
        sequences = random_sequences(12, config.longest_sequence // 4)
        for _ in range(3):
            engine.update(sequences, version=0)
    return kept + live.peak


def predicted(directory: Path, model: str, sections: dict[str, Any]) -> float:
    config = measured_config(directory, model, sections)
    return plan_memory(shape_of(directory / model), config, Layout(), device="cpu").total


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing recomputed": ("model", {}),
    "recomputed": ("model", {"model": {"gradient_checkpointing": "full"}, "learner": {"max_tokens": 512}}),
    "recomputed in part": ("model", {"model": {"gradient_checkpointing": "selective"}}),
    "attention kept": ("model", {"model": {"gradient_checkpointing": "attention"}, "learner": {"max_tokens": 512}}),
    "bfloat16 state": ("model", {"optimizer": {"name": "adamw_bf16"}, "learner": {"max_tokens": 32}}),
    "8-bit state": ("model", {"optimizer": {"name": "adamw_8bit"}, "learner": {"max_tokens": 32}}),
    "muon": ("model", {"optimizer": {"name": "muon"}, "learner": {"max_tokens": 32}}),
    "adapters": ("model", {"lora": {"rank": 4}}),
    "experts": ("experts", {}),
}
LESS_OFTEN = ("recomputed in part", "attention kept", "bfloat16 state", "muon")
"""Of the slow tests."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LESS_OFTEN else name for name in SETTINGS]
)
def test_the_peak_is_predicted_within_15_percent(directory: Path, name: str):
    model, sections = SETTINGS[name]
    measured = peak_of_step(measured_config(directory, model, sections))
    assert predicted(directory, model, sections) == pytest.approx(measured, rel=0.15)


def test_parameters_are_those_of_the_model():
    # Qwen2.5-0.5B: 24 * (2 * 896 * (896 + 128) + 2 * 896 + 3 * 896 * 4864) + 151936 * 896; its biases are left out.
    shape = ModelShape(896, 4864, 24, 896, 128, 151936, is_tied=True)
    assert shape.num_parameters == 24 * (1835008 + 1792 + 13074432) + 136134656 == 494004224
    # Qwen3-30B-A3B has 30.5 billion.
    experts = ModelShape(2048, 768, 48, 4096, 512, 151936, is_tied=False, num_experts=128, experts_per_token=8)
    assert experts.num_parameters == pytest.approx(30.53e9, rel=0.001)


def test_layouts_divide_weights_over_shards_and_layers_over_tensor_and_pipeline(directory: Path):
    shape, config = shape_of(directory / "model"), measured_config(directory, "model", {})

    def of(**sizes: int) -> tuple[float, float]:
        plan = plan_memory(shape, config, Layout(**sizes), device="cpu")
        return plan.optimizer, plan.activations

    state, activations = of()
    assert of(shards=4) == (state / 4, activations)
    assert of(replicas=2, shards=2, sequence=2) == (state / 4, activations)
    assert of(tensor=2)[0] == state / 2
    assert activations / 2 < of(tensor=2)[1] < activations  # norms are whole on every rank
    # Half of the layers and the table; the first stage has two micro-batches under way.
    layer = shape.attention_parameters + shape.mlp_parameters
    assert of(pipeline=2) == (8 * (2 * layer + shape.table_parameters), activations)


def test_a_micro_batch_has_no_more_tokens_than_the_step(directory: Path):
    shape = shape_of(directory / "model")
    sampling = {"group_size": 4, "max_prompt_tokens": 256, "max_new_tokens": 128}

    def of(learner: dict[str, int], sizes: Layout | None = None, **sections: Any) -> MemoryPlan:
        raw = {"sampling": sampling, **sections, "learner": {"groups_per_step": 4, "max_tokens": 16384} | learner}
        return plan_memory(shape, measured_config(directory, "model", raw), sizes or Layout(), device="cpu")

    # 4 groups of 4 rollouts of 384 tokens are 6,144; each of 2 updates has 2 groups; of 3 ranks one has 6
    # of 16 rollouts; 2 ranks share a micro-batch.
    assert of({}) == of({"max_tokens": 6144}) != of({"max_tokens": 6143})
    assert of({"updates_per_batch": 2}) == of({"max_tokens": 2 * 4 * 384})
    for sizes, tokens in ((Layout(replicas=3), 6 * 384), (Layout(shards=3), 6 * 384), (Layout(sequence=2), 3072)):
        assert of({}, sizes) == of({"max_tokens": tokens}, sizes) != of({"max_tokens": tokens - 1}, sizes)
    # An environment's rollouts are as long as they are.
    environment = {"environment": {"name": "mine.py"}, "generator": {"allow_code": ["mine.py"]}}
    assert of({}, **environment) != of({"max_tokens": 6144}, **environment)


def test_a_critic_adds_weights_and_optimizer_state_but_no_gradients(directory: Path):
    shape = ModelShape.of(json.loads((directory / "model" / "config.json").read_text()))
    alone, beside = (
        plan_memory(shape, measured_config(directory, "model", sections), Layout(), device="cpu")
        for sections in ({}, {"loss": {"advantage": "gae"}})
    )
    assert (beside.weights, beside.optimizer) == (2 * alone.weights, 2 * alone.optimizer)
    assert (beside.gradients, beside.activations) == (alone.gradients, alone.activations)


def test_an_unknown_kind_of_model_is_named():
    with pytest.raises(UnknownShapeError, match="no hidden_size, intermediate_size"):
        ModelShape.of({"d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10})
    dense = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10,
    }  # fmt: skip
    assert ModelShape.of(dense).num_experts == 0
    with pytest.raises(UnknownShapeError, match="kv_lora_rank"):
        ModelShape.of(dense | {"kv_lora_rank": 8})
