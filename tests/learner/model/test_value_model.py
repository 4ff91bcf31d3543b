"""Models with a value head: their values and gradients are those of transformers' sequence classification models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.config.config import Config
from async_rl.errors import ModelError
from async_rl.extensions.offline.slopes import SlopeObjective
from async_rl.learner.checkpoints.stored_tensors import load_tensors
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.export.model import export_adapter, export_checkpoint
from async_rl.learner.model.loading import load_policy, open_model, read_first_layers
from async_rl.learner.sequences import TrainSequence
from tests.families.catalogue import build
from tests.learner.model.reference import engine_of, gradients, saved
from tests.learner.rank_layouts import compare_layouts, layout_config, layout_model, value_sequences
from tests.learner.rank_scenarios import save
from tests.learner.tiny import tiny_config, tiny_model

IDS = torch.arange(4, 20)[None]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models: the causal LM ``qwen2``, and the model ``values`` with its decoder and a random head."""
    root = tmp_path_factory.mktemp("values")
    layout_model(root / "qwen2", "qwen2")
    layout_model(root / "values", "qwen2")
    value_weights(root / "values")
    return root


def value_weights(directory: Path, num_labels: int = 1) -> None:
    """Make the causal LM in ``directory`` a sequence classification model."""
    torch.manual_seed(1)
    classifier(directory, num_labels=num_labels).save_pretrained(directory)


def classifier(directory: Path, **settings: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32, **settings).eval()


def make_engine(config: Config) -> FsdpEngine:
    return engine_of(config, objective=SlopeObjective(), head="value")


def plain_values(model: Any, sequence: TrainSequence) -> Tensor:
    """The output of ``score`` at the tokens before trained ones."""
    hidden = model.model(input_ids=torch.from_numpy(sequence.token_ids).long()[None]).last_hidden_state[0]
    return model.score(hidden)[:-1, 0][torch.from_numpy(sequence.loss_mask[1:])]


def test_values_and_gradients_are_those_of_transformers_one_sequence_at_a_time(directory: Path, tmp_path: Path):
    sequences = value_sequences()  # in micro-batches of 40 tokens, three with one prompt
    engine = make_engine(layout_config(directory, "values", {}, lora=False))
    engine.self_test()
    scores = engine.score_policy(sequences)
    engine.update(sequences, version=0)
    save(engine, tmp_path / "saved", 1)
    model = classifier(directory / "values")
    for sequence in sequences:
        values = plain_values(model, sequence)
        np.testing.assert_allclose(scores[sequence.sequence_id].logprobs, values.detach(), atol=1e-5, rtol=1e-5)
        (values * torch.from_numpy(sequence.slopes[sequence.loss_mask])).sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(gradients(tmp_path / "saved"), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapters"])
def test_a_causal_lm_gets_a_head_of_zeros_which_is_trained_restored_and_exported(
    directory: Path, tmp_path: Path, lora: bool
):
    from peft import PeftModel

    config, sequences = layout_config(directory, "qwen2", {}, lora=lora), value_sequences()
    engine, again = make_engine(config), make_engine(config)
    assert all((scores.logprobs == 0).all() for scores in engine.score_policy(sequences).values())
    for _ in range(2):  # the decoder has no gradient while the head is 0
        engine.update(sequences, version=0)
    expected = torch.from_numpy(engine.score(sequences, of="policy")[0])
    assert bool((expected != 0).all())
    saved(engine, tmp_path / "saved")
    stored = load_tensors(tmp_path / "saved")
    assert "score.weight" in stored
    assert all(bool(tensor.any()) for tensor in stored.values())
    again.load(tmp_path / "saved")
    np.testing.assert_array_equal(again.score(sequences, of="policy")[0], expected)
    export_checkpoint(tmp_path / "saved", tmp_path / "merged")
    merged = classifier(tmp_path / "merged")
    torch.testing.assert_close(plain_values(merged, sequences[0]).detach(), expected, atol=1e-5, rtol=1e-5)
    if lora:
        export_adapter(tmp_path / "saved", tmp_path / "adapter")
        base = classifier(directory / "qwen2", num_labels=1)
        adapted: Any = PeftModel.from_pretrained(base, tmp_path / "adapter")
        torch.testing.assert_close(adapted(input_ids=IDS).logits, merged(input_ids=IDS).logits, atol=1e-5, rtol=1e-5)


CASES = [("shards 2", "qwen2", False), ("sequence 2", "qwen2", True), ("pipeline 2", "llama", True),
         ("tensor 2", "qwen3", False)]  # fmt: skip
"""Layout, model, and whether it has adapters."""


@pytest.mark.slow
def test_two_ranks_compute_the_values_and_steps_of_one(tmp_path: Path):
    for model in {model for _, model, _ in CASES}:
        layout_model(tmp_path / model, model)
        value_weights(tmp_path / model)
    compare_layouts(tmp_path, CASES, of_values=True)


@pytest.mark.parametrize("model", ["qwen2", "values"])
def test_a_model_without_memory_is_filled_and_a_new_head_is_zero(directory: Path, model: str):
    section = tiny_config(directory, model).model
    policy, weights = load_policy(section, "padded", is_sharded=True, head="value")
    assert weights is not None
    first = read_first_layers(section, weights, "padded", "value")
    weights.fill(policy, torch.device("cpu"))
    expected = classifier(directory / model, num_labels=1).state_dict()
    if model == "qwen2":
        expected["score.weight"] = torch.zeros_like(expected["score.weight"])
    for one in (policy, first):
        for name, tensor in one.causal_lm.state_dict().items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


def test_several_labels_and_families_without_a_class_are_refused(tmp_path: Path):
    tiny_model(tmp_path / "labels")
    value_weights(tmp_path / "labels", num_labels=3)
    with pytest.raises(ModelError, match="one label, which is the value, got 3 labels"):
        open_model(tiny_config(tmp_path, "labels").model, "value")
    build("Granite").save_pretrained(tmp_path / "granite")
    with pytest.raises(ModelError, match="has a SequenceClassification class"):
        open_model(tiny_config(tmp_path, "granite").model, "value")
