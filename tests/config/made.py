"""Configs of a few sections, and why others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.config.config import Config
from async_rl.config.loading import config_from_toml, config_to_toml, parse_config
from async_rl.errors import ConfigError


def a_config(directory: Path | str = "r", /, **sections: Any) -> Config:
    """A config of these sections and of what every config needs; the run's directory is ``directory``."""
    needed = {"run": {"dir": str(directory)}, "model": {"path": "m"}}
    merged = {name: keys | sections.get(name, {}) for name, keys in needed.items()}
    return parse_config({**sections, **merged}, "test")


def refusal(**sections: Any) -> str:
    """Why the config of these sections is refused."""
    with pytest.raises(ConfigError) as refused:
        a_config(**sections)
    return str(refused.value)


def copy_of(config: Config) -> Config:
    """The config as a run writes it and reads it again."""
    return config_from_toml(config_to_toml(config), "the copy")
