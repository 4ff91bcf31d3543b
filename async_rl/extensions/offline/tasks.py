"""What each command trains: the table of tasks, which the commands and the doctor read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from async_rl.config.config import Config
from async_rl.extensions.offline.dpo import preferences
from async_rl.extensions.offline.rm import RewardModel
from async_rl.extensions.offline.run import OfflineTask, run_offline
from async_rl.extensions.offline.sft import Supervised

TASKS: Mapping[str, Callable[[Config], OfflineTask[Any]]] = {"sft": Supervised, "rm": RewardModel, "dpo": preferences}
"""Command -> what makes its task from a config."""


def train(command: str, config: Config) -> None:
    """Train ``model.path`` on the data of ``command`` and export the trained model, as ``run_offline`` says."""
    run_offline(TASKS[command](config))
