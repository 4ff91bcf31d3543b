"""What a scorer with vLLM refuses before vLLM starts. tests/vllm/test_scorer.py has its scores."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForSequenceClassification

from async_rl.config.scorer import ScorerConfig
from async_rl.errors import ModelError
from async_rl.scorer import reward_model
from async_rl.scorer.vllm_engine import check_model
from tests.end_to_end.harness import write_config
from tests.refusal import refusal
from tests.scorer.test_reward_model import asked, write_reward_model


def test_without_vllm_the_command_says_how_to_install_it_and_exits_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # vLLM's variables stay here
    table = {"model": str(tmp_path), "address": "tcp://127.0.0.1:1", "backend": "vllm"}
    config = write_config(tmp_path / "run.toml", {
        "run": {"dir": str(tmp_path / "run")}, "model": {"path": "m"}, "queue": {"filter_range": []},
        "reward": {"type": "model", "model": "judge"}, "scorer": {"judge": table},
    })  # fmt: skip
    message = refusal(capsys, "scorer", str(config))
    assert 'async-rl: scorer.judge.backend = "vllm" needs vllm 0.32, which can\'t be imported here' in message
    assert 'pip install "async-rl[vllm]"' in message
    assert 'or set scorer.judge.backend = "transformers"' in message


def test_a_whole_model_with_one_label_passes(tmp_path: Path):
    check_model(write_reward_model(tmp_path), torch.float32)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"one label .* got 2 labels"):
        check_model(write_reward_model(tmp_path, num_labels=2), torch.float32)


def test_a_model_that_lacks_weights_is_refused_because_vllm_would_run_it(tmp_path: Path):
    path, name = write_reward_model(tmp_path) / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    weights = load_file(path)
    del weights[name]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"got no {name}"):
        check_model(tmp_path, torch.float32)


def test_a_model_that_pools_in_its_own_way_is_refused(tmp_path: Path):
    any_config: Any = BertConfig  # its stubs lack num_labels
    config = any_config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_labels=1
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"got a BertForSequenceClassification, .* set backend = .transformers"):
        check_model(tmp_path, torch.float32)


class ShortEngine:
    """Scores texts of at most 6 tokens by their lengths."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def why_too_long(self, num_tokens: int) -> str:
        return f"{num_tokens} tokens are too many" if num_tokens > 6 else ""

    def score(self, texts: Sequence[np.ndarray]) -> list[float]:
        return [float(len(text)) for text in texts]


def test_a_text_that_the_engine_cant_hold_is_an_error_of_that_question_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reward_model, "VllmEngine", ShortEngine)
    directory = write_reward_model(tmp_path)
    config = ScorerConfig(model=str(directory), address="tcp://127.0.0.1:1", backend="vllm")
    model = reward_model.RewardModel(directory, config, device=torch.device("cpu"), dtype=torch.float32)
    # The prompt has three tokens.
    too_long, fits = asked(model, "1234", "123")
    assert too_long == "7 tokens are too many"
    assert fits[0] == [6.0]
