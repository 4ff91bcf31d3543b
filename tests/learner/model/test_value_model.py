"""Models with a value head: their values and gradients are those of transformers' sequence classification models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.config.config import Config
from async_rl.errors import ModelError
from async_rl.extensions.offline.slopes import SlopeObjective
from async_rl.learner.checkpoints.digests import write_manifest
from async_rl.learner.checkpoints.stored_tensors import OPTIMIZER, load_tensors
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.export.model import export_adapter, export_checkpoint
from async_rl.learner.model.loading import load_policy, open_model, read_first_layers
from async_rl.learner.ranks import init_ranks
from async_rl.learner.sequences import TrainSequence
from tests.learner.rank_layouts import (
    assert_same,
    case_directory,
    layout_config,
    layout_model,
    run_values,
    value_sequences,
)
from tests.learner.rank_scenarios import save
from tests.learner.ranks import run_ranks
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
    return FsdpEngine(config, init_ranks(config), objective=SlopeObjective(), head="value")


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
    moments = load_tensors(tmp_path / "saved", OPTIMIZER)  # beta1 is 0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(moments[f"exp_avg.{name}"], parameter.grad, atol=1e-5, rtol=1e-5)


def test_the_value_of_a_token_does_not_depend_on_the_token(directory: Path):
    # So a token that is appended under the loss mask stands for the whole sequence before it.
    engine = make_engine(layout_config(directory, "values", {}, lora=False))
    (sequence,) = value_sequences()[-1:]
    changed = sequence.token_ids.copy()
    changed[-1] = 5 if changed[-1] != 5 else 6
    other = replace(sequence, token_ids=changed)
    one, two = (engine.score([s], of="policy")[s.sequence_id] for s in (sequence, other))
    np.testing.assert_array_equal(one, two)
    with torch.no_grad():
        whole = classifier(directory / "values", pad_token_id=None)(torch.from_numpy(changed[None, :-1]).long()).logits
    assert one[-1] == pytest.approx(whole.item(), abs=1e-5)


def test_a_causal_lm_gets_a_head_of_zeros_that_one_step_moves(directory: Path, tmp_path: Path):
    engine = make_engine(layout_config(directory, "qwen2", {}, lora=False))
    sequences = value_sequences()
    assert all((scores.logprobs == 0).all() for scores in engine.score_policy(sequences).values())
    engine.update(sequences, version=0)
    expected = engine.score(sequences, of="policy")[0]
    assert (expected != 0).all()
    save(engine, tmp_path / "saved", 1)
    write_manifest(tmp_path / "saved")
    again = make_engine(layout_config(directory, "qwen2", {}, lora=False))
    again.load(tmp_path / "saved")
    np.testing.assert_array_equal(again.score(sequences, of="policy")[0], expected)
    export_checkpoint(tmp_path / "saved", tmp_path / "out")
    values = plain_values(classifier(tmp_path / "out"), sequences[0])
    np.testing.assert_allclose(expected, values.detach(), atol=1e-5, rtol=1e-5)


def test_adapters_train_with_the_whole_head_and_are_exported_merged_or_alone(directory: Path, tmp_path: Path):
    from peft import PeftModel

    engine = make_engine(layout_config(directory, "qwen2", {}, lora=True))
    sequences = value_sequences()
    for _ in range(2):  # the adapters have no gradient while the head is 0
        engine.update(sequences, version=0)
    expected = torch.from_numpy(engine.score(sequences, of="policy")[0])
    save(engine, tmp_path / "saved", 1)
    write_manifest(tmp_path / "saved")
    stored = load_tensors(tmp_path / "saved")
    assert "score.weight" in stored
    assert all(bool(tensor.any()) for tensor in stored.values())
    export_checkpoint(tmp_path / "saved", tmp_path / "merged")
    merged = classifier(tmp_path / "merged")
    torch.testing.assert_close(plain_values(merged, sequences[0]).detach(), expected, atol=1e-5, rtol=1e-5)
    export_adapter(tmp_path / "saved", tmp_path / "adapter")
    base = classifier(directory / "qwen2", num_labels=1)
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")(input_ids=IDS).logits
        torch.testing.assert_close(adapted, merged(input_ids=IDS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_two_ranks_compute_the_values_and_steps_of_one(tmp_path: Path):
    compare_with_one_process(tmp_path, [("sequence 2", "qwen2", True)])


@pytest.mark.long
def test_two_ranks_compute_the_values_and_steps_of_one_under_every_layout(tmp_path: Path):
    compare_with_one_process(
        tmp_path,
        [
            ("shards 2", "qwen2", True),
            ("sequence 2", "qwen3", False),
            ("pipeline 2", "qwen2", False),
            ("pipeline 2", "llama", True),
            ("tensor 2", "llama", True),
            ("tensor 2", "qwen3", False),
            ("experts 2", "qwen3_moe", False),
        ],
    )


def compare_with_one_process(tmp_path: Path, cases: list[tuple[str, str, bool]]) -> None:
    """Compare steps of two ranks with those of one. A case has a layout, a model, and whether it has adapters."""
    for model in {"qwen2", *(model for _, model, _ in cases)}:
        layout_model(tmp_path / model, model)
        value_weights(tmp_path / model)
    alone = init_ranks(tiny_config(tmp_path, "qwen2"))
    for model, lora in {(model, lora) for _, model, lora in cases}:
        run_values(tmp_path, alone, "alone", model, lora=lora)
    (tmp_path / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    run_ranks("valued", tmp_path)
    for name, model, lora in cases:
        assert_same(*(case_directory(tmp_path, layout, model, lora=lora) for layout in (name, "alone")))


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
    from transformers import GraniteConfig, GraniteForCausalLM

    tiny_model(tmp_path / "labels")
    value_weights(tmp_path / "labels", num_labels=3)
    with pytest.raises(ModelError, match="one label, which is the value, got 3 labels"):
        open_model(tiny_config(tmp_path, "labels").model, "value")
    shape: Any = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    GraniteForCausalLM(GraniteConfig(vocab_size=8, pad_token_id=0, **shape)).save_pretrained(tmp_path / "granite")
    with pytest.raises(ModelError, match="has a SequenceClassification class"):
        open_model(tiny_config(tmp_path, "granite").model, "value")
