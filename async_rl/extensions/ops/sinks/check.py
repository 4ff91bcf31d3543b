"""Whether the tools of ``log.to`` can be used, without importing them."""

from __future__ import annotations

import importlib.util
import json
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

from async_rl.config.config import Config
from async_rl.errors import ConfigError


def check(name: str, config: Config) -> None:
    """Check that the tool ``name`` is installed, and that wandb has its key.

    Raises:
        ConfigError: it is not, or there is no key.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # a folder of that name is no package
        package = name if name == "wandb" else f"async-rl[{name}]"
        raise ConfigError(
            f"log.to: {json.dumps(name)} needs the package {name}, which is not installed: pip install '{package}', or "
            f"take it out of log.to"
        )
    if name == "wandb" and config.log.wandb_mode == "online":
        _check_key()


def _check_key() -> None:
    """Check that there is an API key for Weights & Biases. Without one, wandb would wait for the user to type it.

    Raises:
        ConfigError: ``WANDB_API_KEY`` is not set, and the netrc file has no key for the server.
    """
    if os.environ.get("WANDB_API_KEY"):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        has_key = path.exists() and netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError) as error:
        raise ConfigError(
            f'log.wandb_mode = "online" needs an API key, but {path} can\'t be read: {error}; set WANDB_API_KEY, or '
            f"correct that file"
        ) from error
    if not has_key:
        raise ConfigError(
            f'log.wandb_mode = "online", but there is no API key for {host}: set WANDB_API_KEY, run `wandb login`, or '
            f'set log.wandb_mode = "offline" (synced later with `wandb sync`)'
        )
