"""The Weights & Biases run that mirrors ``metrics.jsonl``, if ``log.wandb`` is on. Called by ``metrics``."""

from __future__ import annotations

import netrc
import os
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from async_rl.config.config import Config
from async_rl.errors import ConfigError
from async_rl.run.directory import write_atomically


def check_wandb(config: Config) -> None:
    """Refuse ``log.wandb = "online"`` without an API key, instead of prompting for one.

    Raises:
        ConfigError: there is neither ``WANDB_API_KEY`` nor an entry in the netrc file.
    """
    if config.log.wandb != "online" or os.environ.get("WANDB_API_KEY"):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        found = path.exists() and netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError) as error:
        raise ConfigError(f'log.wandb = "online": can\'t read {path}: {error}') from error
    if not found:
        raise ConfigError(
            f'log.wandb = "online", but there is no API key for {host}: set WANDB_API_KEY, run `wandb login`, or set '
            f'log.wandb = "offline" (synced later with `wandb sync`)'
        )


def start_wandb(run_dir: Path, config: Config) -> Any:
    """Start it, under the same id when the run is resumed; None when ``log.wandb`` is off."""
    check_wandb(config)
    mode = config.log.wandb
    if mode == "off":
        return None
    import wandb

    id_file = run_dir / "wandb_id"
    if not id_file.exists():
        write_atomically(id_file, uuid.uuid4().hex[:12])
    try:
        run = wandb.init(
            project=config.log.project,
            name=config.run.name or run_dir.name,
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            dir=run_dir,
            mode=mode,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True),
        )
    except wandb.Error as error:
        raise ConfigError(f'log.wandb = "{config.log.wandb}": wandb did not start: {error}') from error
    # Rows carry their own step: wandb's own counter rejects the smaller steps that follow a rollback.
    run.define_metric("*", step_metric="step")
    return run
