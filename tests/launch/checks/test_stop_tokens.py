"""Stop tokens must be tokens of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.errors import ConfigError
from async_rl.launch.checks.settings import check_stop_tokens


def config_of(directory: Path, *ids: int) -> Config:
    (directory / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 40}')
    model, sampling = {"path": str(directory)}, {"stop_token_ids": list(ids)}
    return parse_config({"run": {"dir": "r"}, "model": model, "sampling": sampling}, "test")


def test_stop_tokens_outside_the_vocabulary_are_refused(tmp_path: Path):
    check_stop_tokens(config_of(tmp_path, 0, 39))
    with pytest.raises(ConfigError, match=r"sampling\.stop_token_ids: expected ids below 40, .* got \[40, 99\]"):
        check_stop_tokens(config_of(tmp_path, 3, 40, 99))
