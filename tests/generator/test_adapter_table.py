"""Versions of adapters alone: what the generator makes of them is what the learner would have merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.config.config import Config
from async_rl.errors import ConfigError, ModelError
from async_rl.generator.hf.backend import TransformersBackend
from async_rl.generator.start.backends import build_backend
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.ranks import init_ranks
from async_rl.weights.adapters import ADAPTER_BASE, BaseWeights
from tests.learner.rank_scenarios import adapted_config, batch_for, with_reference
from tests.learner.tiny import tiny_model

ADAPTERS: dict[str, Any] = {"rank": 4, "alpha": 8.0, "publish": "adapters"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    tiny_model(root / "model")
    return root


@pytest.fixture
def scratch(root: Path, tmp_path: Path) -> Path:
    """What a generator gets of the model: all files but the weights, and the weights' digest."""
    for file in (root / "model").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / ADAPTER_BASE).write_bytes(BaseWeights.of(str(root / "model")).to_json())
    return tmp_path


def config_of(root: Path, publish: str = "adapters", backend: str = "transformers") -> Config:
    config = adapted_config(root, {"generator": {"backend": backend, "num_threads": 1}})
    return config.model_copy(update={"lora": config.lora.model_copy(update={"publish": publish})})


def trained(root: Path, publish: str) -> dict[str, Tensor]:
    """The version that a learner publishes after an optimizer step."""
    config = config_of(root, publish)
    engine = FsdpEngine(config, init_ranks(config))
    engine.update(with_reference(engine, batch_for(0)), version=0)
    return {name: tensor.clone() for name, tensor in engine.gather()}


def test_a_generator_merges_adapters_to_the_bits_of_the_learners_merged_version(root: Path, scratch: Path):
    backend = build_backend(config_of(root), scratch)
    assert isinstance(backend, TransformersBackend)
    merged, adapters = trained(root, "merged"), trained(root, "adapters")
    # Two layers of seven projections, A and B each; a version is as large as its adapters.
    assert len(adapters) == 2 * 7 * 2
    assert sum(t.nbytes for t in adapters.values()) < sum(t.nbytes for t in merged.values()) / 2
    before = dict(backend.digests())
    for version in (1, 2):  # the second is not merged on top of the first
        backend.activate(version, adapters)
        held = backend._model.state_dict()
        assert all(torch.equal(held[name], tensor) for name, tensor in merged.items())
    assert {n.rpartition(".")[0].rpartition(".")[2] for n, d in backend.digests().items() if d != before[n]} == {
        *config_of(root).lora.targets
    }


def test_frozen_weights_that_are_not_the_learners_are_refused(root: Path, scratch: Path, tmp_path: Path):
    other = tiny_model(tmp_path / "other", seed=1)
    config = config_of(root)
    wrong = config.model_copy(update={"model": config.model.model_copy(update={"path": str(other)})})
    with pytest.raises(
        ModelError, match=r"other on this machine are not those that the learner froze: expected digest"
    ):
        build_backend(wrong, scratch)
    (scratch / ADAPTER_BASE).unlink()
    with pytest.raises(ModelError, match=r"expected adapter_base.json from the learner"):
        build_backend(config, scratch)


def test_adapters_can_be_published_only_to_backends_that_apply_them(tmp_path: Path):
    own = Path(__file__).resolve().parents[2] / "examples" / "uniform_backend.py"
    name = f"{own}:UniformBackend"
    config = config_of(tmp_path, backend=name)
    allowed = config.model_copy(update={"generator": config.generator.model_copy(update={"allow_code": (str(own),)})})
    with pytest.raises(ConfigError, match=r'lora\.publish: expected "merged" with generator\.backend'):
        build_backend(allowed, tmp_path)
