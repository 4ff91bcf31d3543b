"""Models that can't be packed are trained in padded rows: their steps equal those of each sequence alone.

``tests/families`` takes the same step with every family.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.errors import ModelError
from async_rl.extensions.offline.sft import SupervisedObjective
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.losses.objective import Objective
from async_rl.learner.model.packing_choice import choose_packing
from async_rl.learner.model.policy_model import PolicyModel
from async_rl.learner.sequences import TrainSequence
from tests.families.catalogue import LONGROPE, build
from tests.learner.model.reference import Tensors, assert_near, engine_of, gradients, plain_step
from tests.learner.rank_scenarios import padded_config, save, sequences_with_a_group, with_reference
from tests.learner.tiny import tiny_model


def make_engine(root: Path, objective: Objective | None = None, **sections: Any) -> FsdpEngine:
    config = padded_config(root, sections)
    return engine_of(config, objective=objective)


def gradient_of(engine: FsdpEngine, sequences: list[TrainSequence], directory: Path) -> Tensors:
    """The gradient of one step."""
    stats = engine.update(sequences, version=0)
    assert stats.stepped
    assert (stats.padded_cost is not None) == (engine.policy.model.packing == "padded")
    save(engine, directory, 1)
    return gradients(directory)


@pytest.mark.parametrize("name", ["Qwen 3 Next", "Mamba 2", "LFM 2", "GPT-OSS", "Gemma 2", "Zamba 2"])
def test_a_step_in_padded_rows_equals_that_of_each_sequence_alone(tmp_path: Path, name: str):
    tiny_model(tmp_path / "model")
    build(name).save_pretrained(tmp_path / "model")
    sequences = sequences_with_a_group()
    engine = make_engine(tmp_path)
    engine.self_test()
    scores, expected = plain_step(tmp_path / "model", sequences)
    found = engine.score(sequences, of="policy")
    for sequence_id, logprobs in scores.items():
        np.testing.assert_allclose(found[sequence_id], logprobs, rtol=1e-5)
    assert_near(gradient_of(engine, sequences, tmp_path / "ours"), expected)
    recomputed = make_engine(tmp_path, model={"gradient_checkpointing": "full"}, learner={"max_tokens": 4096})
    assert_near(gradient_of(recomputed, sequences, tmp_path / "recomputed"), expected)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"model": {"gradient_checkpointing": "full"}},
    "recomputed in part": {"model": {"gradient_checkpointing": "selective"}},
    "adapters": {"lora": {"rank": 4}, "loss": {"preset": "grpo", "kl_coef": 0.1}},
    "reference": {"loss": {"kl_coef": 0.1, "kl_placement": "loss"}},
    "supervised": {"sft": {"max_length": 64}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_ordinary_model_takes_the_same_step_packed_and_padded(tmp_path: Path, variant: str):
    tiny_model(tmp_path / "model")
    objective = SupervisedObjective() if variant == "supervised" else None
    found: list[Tensors] = []
    for packing in ("packed", "padded"):
        engine = make_engine(tmp_path, objective, **VARIANTS[variant], learner={"packing": packing})
        sequences = sequences_with_a_group()
        if "loss" in VARIANTS[variant]:
            sequences = with_reference(engine, sequences)
        found.append(gradient_of(engine, sequences, tmp_path / packing))
    assert_near(*found)


def test_auto_prefers_packed_rows_and_says_why_it_pads(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "async_rl")
    assert choose_packing(PolicyModel(build("Llama"), "padded"), "auto", max_length=64) == "packed"
    assert not caplog.records
    policy = PolicyModel(build("LFM 2"), "padded")
    assert choose_packing(policy, "auto", max_length=64) == policy.packing == "padded"
    assert "Lfm2ForCausalLM can't be trained on packed rows: the output of layers.0.conv" in caplog.text


@pytest.mark.parametrize("name", ["LFM 2", "Mamba 2"])
def test_packed_rows_refuse_and_name_padded_rows_where_these_would_do(name: str):
    with pytest.raises(ModelError, match=r'or set learner\.packing = "padded"'):
        choose_packing(PolicyModel(build(name), "padded"), "packed", max_length=64)


@pytest.mark.parametrize("setting", ["auto", "packed"])
def test_a_model_that_fits_neither_is_refused_with_both_reasons(setting: Any):
    policy = PolicyModel(build("Phi 3", **LONGROPE), "padded")
    with pytest.raises(ModelError, match=r"on packed rows: its longrope .* on padded rows: its longrope"):
        choose_packing(policy, setting, max_length=64)
