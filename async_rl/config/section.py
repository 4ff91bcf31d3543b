"""The base of every config section. ``config.py`` and the sections in modules of their own build on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from async_rl.errors import ConfigError

T = TypeVar("T")


class Section(BaseModel):
    """One TOML section: frozen, strict about types, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def look_up(table: Mapping[str, T], name: str, key: str) -> T:
    """Return the row of ``table`` that the config key ``key`` names.

    Raises:
        ConfigError: there is no such row; the message lists the known names.
    """
    if name not in table:
        raise ConfigError(f"{key}: expected one of {', '.join(table)}, got {name!r}")
    return table[name]
