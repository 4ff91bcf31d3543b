"""Keys of one engine, and keys beyond what a backend can do, are refused by name with who reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from async_rl.config.config import Config
from async_rl.config.generator import BACKENDS, ENGINE_KEYS
from async_rl.config.loading import apply_override, parse_config
from async_rl.errors import ConfigError
from async_rl.launch.checks.settings import check_engine_keys

REFUSED_BY_CAPABILITY: dict[str, Any] = {
    "generator.tensor_parallel_size": 2,
    "generator.kv_after_update": "recompute",
    "sampling.deterministic": True,
    "sampling.top_p": 0.5,
    "sampling.top_k": 3,
    "sampling.min_p": 0.5,
    "sampling.stop_token_ids": [3],
}
"""Keys that ``check_capabilities`` refuses, each with a value that asks for something."""


CHANGED = {
    "generator.memory_fraction": 0.5,
    "generator.double_buffer": False,
    "generator.engine": {"kv_cache_dtype": "fp8"},
    "experimental.vllm.kv_cache_bytes": 1 << 30,
    "experimental.vllm.enforce_eager": True,
    "experimental.vllm.model_runner": "v2",
}


def config_with(key: str, value: Any, backend: str) -> Config:
    raw: dict[str, Any] = {"run": {"dir": "r"}, "model": {"path": "m"}, "generator": {"backend": backend}}
    apply_override(raw, f"{key}={json.dumps(value)}")
    return parse_config(raw, "test")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("key", ENGINE_KEYS)
def test_a_key_of_another_engine_is_refused_by_name(key: str, backend: str):
    config = config_with(key, CHANGED[key], backend)
    if backend in ENGINE_KEYS[key]:
        check_engine_keys(config)
        return
    with pytest.raises(
        ConfigError, match=rf"{key}: expected no value with generator\.backend {backend}, .* \(only vllm"
    ):
        check_engine_keys(config)


@pytest.mark.parametrize("key", REFUSED_BY_CAPABILITY)
def test_a_key_beyond_what_a_backend_can_do_is_refused_or_carried_out(key: str):
    name = {"generator.kv_after_update": "recomputes_kv", "generator.tensor_parallel_size": "splits_model",
            "sampling.top_p": "reports_sampling_mask", "sampling.top_k": "reports_sampling_mask"}  # fmt: skip
    attribute = name.get(key, key.rpartition(".")[2])
    for backend, able in BACKENDS.items():
        if getattr(able, attribute):
            assert config_with(key, REFUSED_BY_CAPABILITY[key], backend)
        else:
            with pytest.raises(ConfigError, match=key):
                config_with(key, REFUSED_BY_CAPABILITY[key], backend)
