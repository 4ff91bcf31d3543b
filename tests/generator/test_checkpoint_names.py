"""Tensors of a version become those of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from async_rl.generator.vllm.checkpoint_names import CheckpointNames
from tests.vllm.families import make_family


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "qwen3 moe", "gpt-oss", "granite 4 hybrid", "mamba 2"])
def test_names_and_tensors_are_those_that_save_pretrained_writes(tmp_path: Path, family: str):
    model = make_family(family, 0, vocab_size=46)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    named = dict(model.named_parameters())
    converted = dict(CheckpointNames(tmp_path).convert(named))
    assert converted.keys() == written.keys()
    for name, tensor in converted.items():
        torch.testing.assert_close(tensor.detach(), written[name], rtol=0, atol=0)
