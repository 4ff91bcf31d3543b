"""Pools for tests, which allow the code that they name."""

from __future__ import annotations

from typing import Any

from async_rl.config.generator import EnvironmentConfig
from async_rl.environments.pool import EnvironmentPool


def pool_of(config: EnvironmentConfig, *, digest: str | None = None, **settings: Any) -> EnvironmentPool:
    """``digest``: none: the code may be any."""
    return EnvironmentPool(config, allowed=[config.name.partition(":")[0]], digest=digest, **settings)
