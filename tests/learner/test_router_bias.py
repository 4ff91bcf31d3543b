"""A router's selection bias, a float32 buffer, goes from the learner to generators, checkpoints and exports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import asdict
from safetensors.torch import load_file

from async_rl.config.generator import GeneratorConfig
from async_rl.generator.hf.backend import TransformersBackend
from async_rl.learner.checkpoints.digests import write_manifest
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.export.model import export_checkpoint
from async_rl.learner.ranks import init_ranks
from async_rl.weights.manifest import digest_bytes, manifest_from_fields
from async_rl.weights.receive_buffers import tensor_views
from async_rl.weights.staging import Staging
from tests.learner.moe import moe_model
from tests.learner.tiny import tiny_config

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
EXPECTED = 1 + torch.arange(8) * 2.0**-12


def engine_of(root: Path, **sections: Any) -> FsdpEngine:
    config = tiny_config(root, "model", **sections)
    return FsdpEngine(config, init_ranks(config))


LORA = pytest.mark.parametrize("lora", [{}, {"rank": 2, "targets": ["o_proj"]}])


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
@LORA
def test_the_bias_reaches_a_bfloat16_generator_in_float32(tmp_path: Path, model_type: str, lora: dict[str, Any]):
    moe_model(tmp_path / "model", model_type)
    engine = engine_of(tmp_path, model={"dtype": "bfloat16"}, lora=lora)
    staged = Staging(None, 1 << 16).stage("l", 3, engine.gather())
    manifest = manifest_from_fields(asdict(staged.manifest))
    dtypes = {spec.name: spec.dtype for spec in manifest.tensors}
    assert dtypes[BIAS] == "float32"
    assert {dtype for name, dtype in dtypes.items() if "e_score_correction_bias" not in name} == {"bfloat16"}
    backend = TransformersBackend.from_files(tmp_path / "model", GeneratorConfig(), dtype="bfloat16")
    backend.activate(3, tensor_views(manifest, staged.buckets))
    held = backend._model.state_dict()[BIAS]
    assert held.dtype == torch.float32
    assert torch.equal(held, EXPECTED)
    assert backend.digests()[BIAS] == digest_bytes(EXPECTED.numpy().data.cast("B"))
    engine.close()


@LORA
def test_checkpoint_and_export_keep_the_bias_in_float32(tmp_path: Path, lora: dict[str, Any]):
    path = moe_model(tmp_path / "model", "glm4_moe") / "config.json"
    path.write_text(path.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    engine = engine_of(tmp_path, lora=lora)
    (tmp_path / "checkpoint").mkdir()
    engine.save(tmp_path / "checkpoint", {})
    engine.close()
    write_manifest(tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert torch.equal(exported[BIAS], EXPECTED)
    assert exported["model.layers.1.self_attn.o_proj.weight"].dtype == torch.bfloat16
