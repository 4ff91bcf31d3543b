"""An export shard by shard has the bytes of transformers' own, for every family; and it never holds the whole model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from async_rl.learner.checkpoints.digests import write_manifest
from async_rl.learner.checkpoints.files import write_extra, write_model_files
from async_rl.learner.checkpoints.stored_tensors import TrainingState, read_batches, write_training_state
from async_rl.learner.export import model as export
from async_rl.learner.export import shards
from async_rl.learner.export.model import export_checkpoint
from async_rl.learner.export.shards import write_shards
from async_rl.learner.model.policy_model import PolicyModel
from async_rl.learner.ranks import Place, Ranks
from tests.families.catalogue import FAMILIES, build

RANKS = Ranks(Place(0, 0, 1), torch.device("cpu"), None)
LIMIT = 20_000
"""Bytes of a shard and of a batch of reads. Most of the tiny models have 10 times as many."""

WHOLE = {"HRM"}
"""Families that can't be written tensor by tensor."""

SOME = ("Llama", "GPT-2", "BLOOM", "Mixtral", "DBRX", "Qwen 3 MoE", "Jamba", "Gemma 2", "HRM")
ALL = [pytest.param(name, marks=pytest.mark.slow if name in SOME else pytest.mark.long) for name in FAMILIES]


def write_checkpoint_of(model: Any, directory: Path, config: bytes) -> Path:
    """A checkpoint with the weights of ``model``, as the engine writes it."""
    directory.mkdir(parents=True)
    state = model.state_dict()
    names = PolicyModel(model, "padded").tensor_names()
    training_state = TrainingState.of({n: state[n] for n in names}, {}, num_updates=0, ranks=RANKS)
    write_training_state(directory, training_state, RANKS)
    write_extra(directory, {})
    write_model_files(directory, {"config.json": config})
    write_manifest(directory)
    return directory


def tensors_in(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", ALL)
def test_an_export_has_the_tensors_that_save_pretrained_writes(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    model: Any = build(name)
    model.save_pretrained(tmp_path / "expected")
    config = (tmp_path / "expected" / "config.json").read_bytes()
    checkpoint = write_checkpoint_of(model, tmp_path / "checkpoint", config)
    monkeypatch.setattr(export, "write_shards", partial(write_shards, max_shard_bytes=LIMIT))
    sizes = {kind: list[int]() for kind in ("read", "written")}
    largest = max(parameter.nbytes for parameter in model.state_dict().values())

    def measured_save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        sizes["written"].append(sum(tensor.nbytes for tensor in tensors.values()))
        save_file(tensors, path, metadata)

    def measured_read(*arguments: Any, **options: Any) -> Iterator[dict[str, Tensor]]:
        for batch in read_batches(*arguments, **options):
            sizes["read"].append(sum(tensor.nbytes for tensor in batch.values()))
            yield batch

    monkeypatch.setattr(shards, "save_file", measured_save)
    monkeypatch.setattr(shards, "read_batches", measured_read)
    export_checkpoint(checkpoint, tmp_path / "out")
    expected, got = tensors_in(tmp_path / "expected"), tensors_in(tmp_path / "out")
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(got[key], tensor), key
        assert got[key].dtype == tensor.dtype, key
    of_config = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("expected", "out")]
    # A config within the config may say its dtype too.
    plain = [{k: v for k, v in config.items() if not isinstance(v, dict)} for config in of_config]
    assert plain[0] == plain[1]
    # A batch of reads and a shard are all that is held at a time.
    assert (not sizes["written"]) == (name in WHOLE)
    assert max(sizes["read"] + sizes["written"], default=0) <= max(LIMIT, largest)
    if name not in WHOLE:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
        assert index["weight_map"].keys() == expected.keys()
        assert set(index["weight_map"].values()) == {file.name for file in (tmp_path / "out").glob("*.safetensors")}
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
