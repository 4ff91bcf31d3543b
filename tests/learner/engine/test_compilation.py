"""Compiled layers compute what they compute uncompiled, however the engine is set up."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from async_rl.errors import ConfigError, ModelError
from async_rl.launch.checks.machine import check_compiler
from async_rl.learner.engine import compilation
from tests.learner.model.reference import engine_of
from tests.learner.moe import moe_model
from tests.learner.rank_scenarios import PLAIN, batch_for, with_reference
from tests.learner.tiny import tiny_config, tiny_model

RECOMPUTED = {"gradient_checkpointing": "full"}
SETTINGS: dict[str, dict[str, Any]] = {
    "padded and recomputed": {"learner": {"packing": "padded"}, "model": RECOMPUTED},
    "adapters": {"lora": {"rank": 2}, "loss": {"preset": "grpo", "kl_coef": 0.1}},
    "experts": {"model": RECOMPUTED},
}


def gradients_of(directory: Path, *, is_compiled: bool, **sections: Any) -> dict[str, Tensor]:
    """Those of a step in several micro-batches."""
    learner = {"compile": is_compiled, "max_tokens": 64} | sections.get("learner", {})
    engine = engine_of(tiny_config(directory, "model", **(PLAIN | sections | {"learner": learner})))
    sequences = batch_for(0)
    if "loss" in sections:
        sequences = with_reference(engine, sequences)
    assert engine.update(sequences, version=0).stepped
    return {name: tensor for name, tensor in engine.policy.optimizer.tensors().items() if name.startswith("exp_avg.")}


def assert_same_compiled(directory: Path, **sections: Any) -> None:
    compiled, plain = (gradients_of(directory, is_compiled=is_compiled, **sections) for is_compiled in (True, False))
    torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=1e-5)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide and trace the layers as torch.compile does, but run what it finds without generated code."""
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")


@pytest.mark.slow
def test_gradients_are_those_of_uncompiled_layers(tmp_path: Path):
    tiny_model(tmp_path / "model")
    assert_same_compiled(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    "name", ["padded and recomputed", *(pytest.param(n, marks=pytest.mark.long) for n in ("adapters", "experts"))]
)
def test_so_they_are_in_every_setting_of_the_engine(tmp_path: Path, name: str):
    (moe_model if name == "experts" else tiny_model)(tmp_path / "model")
    assert_same_compiled(tmp_path, **SETTINGS[name])


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
def test_micro_batches_of_other_lengths_need_no_further_graph(tmp_path: Path):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # other tests have compiled such layers
    counters.clear()
    tiny_model(tmp_path / "model")
    engine = engine_of(tiny_config(tmp_path, "model", learner={"compile": True, "max_tokens": 64}))
    engine.update(batch_for(0), version=0)
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs > 0
    for step in (1, 2):
        engine.update(batch_for(step), version=0)
    assert counters["stats"]["unique_graphs"] == num_graphs


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
def test_the_self_test_refuses_layers_that_compute_other_values_when_compiled(tmp_path: Path):
    tiny_model(tmp_path / "model")
    engine = engine_of(tiny_config(tmp_path, "model", learner={"compile": True}))
    layer = cast(nn.Module, engine.policy.model.decoder_layers[0])

    def double(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output * 2 if torch.compiler.is_compiling() else output

    layer.register_forward_hook(double)
    with pytest.raises(ModelError, match=r"learner\.compile: compiled layers of Qwen2ForCausalLM compute other values"):
        engine.self_test()


def test_a_machine_without_a_compiler_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    list(check_compiler(tiny_config(tmp_path, "model")))
    with pytest.raises(ConfigError, match=r"learner\.compile: expected a C\+\+ compiler"):
        list(check_compiler(tiny_config(tmp_path, "model", learner={"compile": True})))
