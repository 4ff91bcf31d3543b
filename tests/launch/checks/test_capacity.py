"""What a run needs at least of a machine, by hand-worked numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from async_rl.config.config import Config
from async_rl.launch.checks import capacity
from async_rl.launch.checks.capacity import (
    check_memory,
    checkpoint_bytes,
    generator_bytes,
    learner_bytes,
    num_parameters,
    scorer_bytes,
)
from async_rl.launch.checks.finding import Finding


def memory_of(config: Config) -> Finding:
    (finding,) = check_memory(config)
    return finding


def config_of(path: Path, **sections: object) -> Config:
    model = {"path": str(path), **sections.pop("model", {})}  # type: ignore[dict-item]
    return Config.model_validate({"run": {"dir": str(path / "run")}, "model": model, **sections})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """1,000 parameters in two files."""
    save_file({"a": np.zeros((30, 20), np.float16), "b": np.zeros(300, np.float32)}, tmp_path / "one.safetensors")
    save_file({"c": np.zeros((10, 10), np.float32)}, tmp_path / "two.safetensors")
    return tmp_path


ENGINE: dict[str, Any] = {"generator": {"backend": "transformers"}}
FAKE: dict[str, Any] = {"generator": {"backend": "fake"}}
HALF: dict[str, Any] = {"model": {"dtype": "bfloat16"}, **ENGINE}
VLLM = {"generate": True, "generate_backend": "vllm"}
ADAPTERS = {"rank": 4, "publish": "adapters"}
NEEDS: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    # Parameters and two moments; with the gradient, the two versions that are staged and the copy for a checkpoint.
    "float32": (ENGINE, (12_000, 16_000 + 8_000 + 12_000, 2 * 4_000)),
    "checkpoints while the run waits": ({"checkpoint": {"asynchronous": False}, **ENGINE}, (12_000, 24_000, 8_000)),
    "adapters in bfloat16, no model to sample": (
        {**HALF, **FAKE, "lora": {"rank": 4}}, (0, 2_000 + 4_000, 0)
    ),
    "versions of adapters": ({**HALF, "lora": ADAPTERS}, (0, 2_000, 2_000)),
    "a base of 4 bits": ({**HALF, "lora": {"rank": 4, "base_bits": 4}}, (0, 500 + 4_000, 4_000)),
    # Ranks that sample need a copy of the weights unless they hold them whole.
    "one rank samples": ({"learner": {"generate": True}, **ENGINE}, (12_000, 36_000, 8_000)),
    "two ranks sample": ({"learner": {"generate": True, "nproc": 2}, **ENGINE}, (12_000, 36_000 + 2 * 4_000, 8_000)),
    "one rank samples with adapters": (
        {"learner": {"generate": True}, "lora": {"rank": 4}, **ENGINE}, (0, 4_000 + 8_000 + 4_000, 8_000)
    ),
    # With vLLM its copy, the version that it loads, and what the rank does not hold.
    "vLLM in one rank": ({"learner": VLLM, **ENGINE}, (12_000, 36_000 + 2 * 4_000, 8_000)),
    "vLLM in two ranks": ({"learner": VLLM | {"nproc": 2}, **ENGINE}, (12_000, 36_000 + 2 * 3 * 4_000, 8_000)),
    "vLLM with merged adapters": (
        {"learner": VLLM, "lora": {"rank": 4}, **ENGINE}, (0, 4_000 + 8_000 + 3 * 4_000, 8_000)
    ),
    "vLLM with adapters": ({"learner": VLLM, "lora": ADAPTERS, **ENGINE}, (0, 4_000 + 4_000, 4_000)),
    # 4 for the parameter, 4 for the gradient; state of 4, and of 2 and 8/64.
    "adamw_bf16": ({"optimizer": {"name": "adamw_bf16"}, **ENGINE}, (8_000, 20_000 + 2 * 4_000, 8_000)),
    "adamw_8bit": ({"optimizer": {"name": "adamw_8bit"}, **ENGINE}, (6_125, 20_000 + 2 * 2_125, 8_000)),
    # Three versions where generators pull them, one where no more fit what may be staged.
    "tcp": ({"weights": {"transport": "tcp"}, **ENGINE}, (12_000, 28_000 + 3 * 4_000, 8_000)),
    "a chosen port": ({"weights": {"port": 5556}, **ENGINE}, (12_000, 28_000 + 3 * 4_000, 8_000)),
    "little room to stage": ({"weights": {"staging_bytes": 7_999}, **ENGINE}, (12_000, 28_000 + 4_000, 8_000)),
    # A critic has weights, gradients and moments, and a checkpoint of its own; half of the parameters in "values".
    "a reference that moves": (
        {"loss": {"preset": "grpo", "reference_every": 2}, **ENGINE}, (16_000, 16_000 + 8_000 + 16_000, 8_000)
    ),
    "a critic": ({"loss": {"preset": "ppo"}, **ENGINE}, (24_000, 2 * 16_000 + 8_000 + 24_000, 8_000)),
    "a smaller critic": (
        {"loss": {"preset": "ppo"}, "critic": {"path": "values"}, **ENGINE}, (18_000, 24_000 + 8_000 + 18_000, 8_000)
    ),
    "a critic of adapters": (
        {"loss": {"preset": "ppo"}, "lora": {"rank": 4, "base_bits": 8}, **ENGINE}, (0, 2 * 1_000 + 8_000, 8_000)
    ),
}  # fmt: skip
"""What a run is -> bytes of a checkpoint, of the learner, and of each generator."""


@pytest.mark.parametrize("run", NEEDS)
def test_what_a_run_on_a_cpu_needs(model: Path, run: str):
    sections, needed = NEEDS[run]
    if run == "a smaller critic":
        (model / "values").mkdir()
        save_file({"a": np.zeros((10, 50), np.float32)}, model / "values" / "model.safetensors")
        sections = sections | {"critic": {"path": str(model / "values")}}
    config = config_of(model, **sections)
    assert (checkpoint_bytes(config), learner_bytes(config), generator_bytes(config)) == needed


def test_weights_that_a_model_has_twice_count_once(model: Path):
    assert num_parameters(str(model)) == 1000
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert num_parameters(str(model)) == 900
    save_file({"a": np.zeros(7, np.float32)}, model / "model.safetensors")
    assert num_parameters(str(model)) == 7


def test_memory_is_enough_to_the_byte(model: Path, monkeypatch: pytest.MonkeyPatch):
    config = config_of(model, generator={"backend": "transformers", "count": 2}, checkpoint={"asynchronous": False})
    monkeypatch.setattr(capacity, "has_gpu", lambda: False)
    monkeypatch.setattr(capacity, "available_memory", lambda with_swap: 40_000)
    assert memory_of(config).state == "WARN"  # for the processes themselves
    monkeypatch.setattr(capacity, "available_memory", lambda with_swap: 39_999)
    short = memory_of(config)
    assert (short.state, "at least 39.1 KiB (23.4 KiB for the learner, 7.81 KiB for each of" in short.found) == (
        "FAIL",
        True,
    )


def test_beside_a_gpu_the_host_keeps_copies_versions_and_what_is_offloaded(model: Path):
    def learner(**sections: Any) -> int:
        return learner_bytes(config_of(model, **sections), "cuda")

    # Two versions in bfloat16, and the copy for a checkpoint.
    assert learner() == 2 * 2_000 + 12_000
    assert learner(checkpoint={"asynchronous": False}) == 2 * 2_000
    assert learner(learner={"offload": "all"}) == 2 * 2_000 + 12_000 + 16_000
    reference = {"loss": {"kl_coef": 0.1}, "learner": {"offload": "reference"}}
    assert learner(**reference) == 2 * 2_000 + 12_000 + 4_000
    assert learner(lora={"rank": 4, "publish": "adapters"}, generator={"backend": "vllm"}) == 0
    # Each rank has a version that arrived, and one from which its vLLM loads.
    vllm = {"generate": True, "generate_backend": "vllm", "nproc": 2}
    assert learner(learner=vllm) == 2 * 2_000 + 12_000 + 2 * 2 * 2_000


def test_generators_on_a_gpu_keep_versions_on_the_host_unless_vllms_workers_receive_them(model: Path):
    def generator(**keys: Any) -> int:
        return generator_bytes(config_of(model, generator=keys), "cuda")

    assert generator(backend="transformers") == 2 * 2_000
    assert generator(backend="vllm") == 0
    assert generator(backend="vllm", double_buffer=False) == generator(backend="vllm", tensor_parallel_size=2) == 6_000
    assert generator(backend="fake") == 0


def test_scorers_of_a_cpu_are_counted_too(model: Path):
    address = "tcp://127.0.0.1:5570"
    scorer: dict[str, dict[str, Any]] = {"teacher": {"model": str(model), "address": address}}
    config = config_of(model, scorer=scorer, distill={"teacher": "teacher"})
    assert scorer_bytes(config) == 4_000
    scorer["teacher"] |= {"dtype": "bfloat16"}
    assert scorer_bytes(config_of(model, scorer=scorer, distill={"teacher": "teacher"})) == 2_000
    scorer["teacher"] |= {"launch": False}
    assert scorer_bytes(config_of(model, scorer=scorer, distill={"teacher": "teacher"})) == 0


def test_32b_is_refused_beside_gpus_in_the_words_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(capacity, "num_parameters", lambda path: 32_762_757_120)
    learner, generator = {"nproc": 8}, {"count": 4, "tensor_parallel_size": 2, "backend": "vllm"}
    config = config_of(tmp_path, learner=learner, generator=generator)
    found: dict[bool, str] = {}
    for gpu in (False, True):
        monkeypatch.setattr(capacity, "has_gpu", lambda gpu=gpu: gpu)
        # Pinned memory can't be swapped out.
        monkeypatch.setattr(capacity, "available_memory", lambda with_swap: 64 << 30 if with_swap else 63 << 30)
        found[gpu] = memory_of(config).message
    # On the GPU's host 2 x 2 + 12 bytes a parameter, and 3 x 2 for each generator.
    assert "at least 1.19 TiB (488 GiB for the learner, 183 GiB for each of generator.count = 4 gen" in found[True]
    assert "got 63 GiB available of" in found[True]
    # On a CPU 16 + 2 x 4 + 12, and 2 x 4.
    assert "at least 2.03 TiB (1.07 TiB for the learner, 244 GiB for each of generator.count = 4 gen" in found[False]
    assert found[True].split("; ")[1] == found[False].split("; ")[1]
    offloaded = config_of(tmp_path, learner=learner | {"offload": "all"}, generator=generator)
    assert 'set lora.rank, learner.offload = "none" or checkpoint.asynchronous = false' in memory_of(offloaded).fix


def test_a_gpu_that_is_hidden_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "exists", lambda self: str(self) == "/dev/nvidiactl")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert capacity.has_gpu()
    for value, is_there in (("0", True), ("", False), ("-1", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert capacity.has_gpu() is is_there
