"""What a run needs at least of a machine, by hand-worked numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from async_rl.config.config import Config
from async_rl.errors import RunError
from async_rl.launch import capacity
from async_rl.launch.capacity import check_memory, checkpoint_bytes, generator_bytes, learner_bytes, num_parameters


def config_of(path: Path, **sections: object) -> Config:
    model = {"path": str(path), **sections.pop("model", {})}  # type: ignore[dict-item]
    return Config.model_validate({"run": {"dir": str(path / "run")}, "model": model, **sections})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """1,000 parameters in two files."""
    save_file({"a": np.zeros((30, 20), np.float16), "b": np.zeros(300, np.float32)}, tmp_path / "one.safetensors")
    save_file({"c": np.zeros((10, 10), np.float32)}, tmp_path / "two.safetensors")
    return tmp_path


def test_a_run_in_float32_needs_32_bytes_a_parameter_at_the_learner_and_8_at_each_generator(model: Path):
    config = config_of(model, generator={"backend": "transformers"})
    assert num_parameters(config) == 1000
    # Parameters and two moments; with the gradient, the version that is sent and the copy for a checkpoint.
    assert (checkpoint_bytes(config), learner_bytes(config)) == (12_000, 16_000 + 4_000 + 12_000)
    assert learner_bytes(config_of(model, checkpoint={"asynchronous": False})) == 16_000 + 4_000
    assert generator_bytes(config) == 2 * 4_000


def test_adapters_and_bfloat16_need_less_and_a_backend_without_a_model_nothing(model: Path):
    config = config_of(model, model={"dtype": "bfloat16"}, lora={"rank": 4}, generator={"backend": "fake"})
    assert (checkpoint_bytes(config), learner_bytes(config), generator_bytes(config)) == (0, 2_000 + 2_000, 0)
    lora = {"rank": 4, "publish": "adapters"}
    config = config_of(model, model={"dtype": "bfloat16"}, lora=lora, generator={"backend": "transformers"})
    assert (learner_bytes(config), generator_bytes(config)) == (2_000, 2_000)
    config = config_of(model, model={"dtype": "bfloat16"}, lora={"rank": 4, "base_bits": 4})
    assert learner_bytes(config) == 500 + 2_000


def test_ranks_that_sample_need_a_copy_of_the_weights_unless_they_hold_them_whole(model: Path):
    generate = {"generate": True}
    engine = {"backend": "transformers"}
    one = config_of(model, learner=generate, generator=engine)
    assert learner_bytes(one) == 16_000 + 4_000 + 12_000
    two = config_of(model, learner={**generate, "nproc": 2}, generator=engine)
    assert learner_bytes(two) == 16_000 + 4_000 + 12_000 + 2 * 4_000
    assert learner_bytes(config_of(model, learner={**generate, "nproc": 2}, generator={"backend": "fake"})) == 32_000
    adapters = config_of(model, lora={"rank": 4}, learner=generate, generator=engine)
    assert learner_bytes(adapters) == 4_000 + 4_000 + 4_000


def test_ranks_that_sample_with_vllm_need_its_copy_the_version_that_it_loads_and_what_they_do_not_hold(model: Path):
    vllm = {"generate": True, "generate_backend": "vllm"}
    engine = {"backend": "transformers"}
    one = config_of(model, learner=vllm, generator=engine)
    assert learner_bytes(one) == 16_000 + 4_000 + 12_000 + 2 * 4_000
    two = config_of(model, learner=vllm | {"nproc": 2}, generator=engine)
    assert learner_bytes(two) == 16_000 + 4_000 + 12_000 + 2 * 3 * 4_000
    merged = config_of(model, lora={"rank": 4}, learner=vllm, generator=engine)
    assert learner_bytes(merged) == 4_000 + 4_000 + 3 * 4_000
    # A version of the adapters alone is nothing to speak of.
    adapters = config_of(model, lora={"rank": 4, "publish": "adapters"}, learner=vllm, generator=engine)
    assert learner_bytes(adapters) == 4_000 + 4_000


def test_a_critic_has_weights_gradients_and_moments_and_a_checkpoint_of_its_own(model: Path):
    (model / "values").mkdir()
    save_file({"a": np.zeros((10, 50), np.float32)}, model / "values" / "model.safetensors")
    ppo = {"loss": {"preset": "ppo"}, "generator": {"backend": "transformers"}}
    same = config_of(model, **ppo)
    assert (checkpoint_bytes(same), learner_bytes(same)) == (2 * 12_000, 2 * 16_000 + 4_000 + 2 * 12_000)
    smaller = config_of(model, critic={"path": str(model / "values")}, **ppo)
    assert (checkpoint_bytes(smaller), learner_bytes(smaller)) == (18_000, 24_000 + 4_000 + 18_000)
    adapters = config_of(model, lora={"rank": 4, "base_bits": 8}, **ppo)
    assert (checkpoint_bytes(adapters), learner_bytes(adapters)) == (0, 2 * 1_000 + 4_000)
    head, alone = config_of(model, critic={"trunk": "policy"}, **ppo), config_of(model)
    assert (checkpoint_bytes(head), learner_bytes(head)) == (checkpoint_bytes(alone), learner_bytes(alone))


def test_weights_that_a_model_has_twice_count_once(model: Path):
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert num_parameters(config_of(model)) == 900
    save_file({"a": np.zeros(7, np.float32)}, model / "model.safetensors")
    assert num_parameters(config_of(model)) == 7


def test_a_model_on_a_hub_counts_nothing(tmp_path: Path):
    assert learner_bytes(config_of(tmp_path / "nowhere")) == 0


def test_memory_is_enough_to_the_byte(model: Path, monkeypatch: pytest.MonkeyPatch):
    config = config_of(model, generator={"backend": "transformers", "count": 2}, checkpoint={"asynchronous": False})
    monkeypatch.setattr(capacity, "has_gpu", lambda: False)
    monkeypatch.setattr(capacity, "available_memory", lambda with_swap: 36_000)
    check_memory(config)
    monkeypatch.setattr(capacity, "available_memory", lambda with_swap: 35_999)
    with pytest.raises(RunError, match=r"at least 35.2 KiB \(19.5 KiB for the learner, 7.81 KiB for each of"):
        check_memory(config)
    monkeypatch.setattr(capacity, "has_gpu", lambda: True)
    check_memory(config)
