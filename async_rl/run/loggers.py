"""Sends rows of metrics and sampled rollouts to the tools of ``log.to``. No trouble there hurts a run that has begun.

Each tool has a process of its own. ``logger_process`` is the parent's side of it: a queue, a thread, limits and notes
to the user. ``logger_child`` is the program, and ``logger_tools`` what it does with each tool. ``metrics``, the
commands that train on given rows, and ``eval`` call ``start_loggers``.
"""

from __future__ import annotations

import importlib.util
import json
import netrc
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from async_rl.config.config import Config
from async_rl.errors import ConfigError
from async_rl.run.directory import RunDir, write_atomically
from async_rl.run.logger_process import ONLY_FILE, Child, Limits, LoggerProcess, samples_message
from async_rl.run.logger_tools import Settings
from async_rl.run.prometheus import check_prometheus


class Loggers:
    """The loggers of a run. One thread may call its methods, which don't wait, except ``close``."""

    def __init__(self, loggers: Sequence[LoggerProcess]) -> None:
        self._loggers = loggers

    @property
    def places(self) -> dict[str, str]:
        """Where each tool has the run, by the tool's name: a directory, or an address."""
        return {one.name: one.place for one in self._loggers}

    def write(self, row: Mapping[str, Any]) -> None:
        """Send one row, which has the key ``step``. Values that are None are left out."""
        self._send("row", {key: value for key, value in row.items() if value is not None})

    def write_samples(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Send sampled rollouts of ``step``: the lines of its file in ``rollouts/``."""
        if self._loggers:
            self._send("table", samples_message(step, lines))

    def rewind(self, step: int) -> None:
        """Say that the steps after ``step`` are made again."""
        self._send("rewind", step)

    def close(self) -> None:
        """Finish the run everywhere, within the limits."""
        began = time.monotonic()
        for one in self._loggers:
            one.close(began)

    def _send(self, kind: str, content: Any) -> None:
        for one in self._loggers:
            one.send(kind, content)


def start_loggers(
    directory: Path, config: Config, *, name: str, note: Callable[[str], None], limits: Limits | None = None
) -> Loggers:
    """Start to log what ``directory`` records to the tools of ``log.to``.

    The run's id is kept in the file ``logger_id``, so that a resumed run goes on in the same run of each tool. What
    goes to files in place of wandb's server gets an id of its own, because wandb could not add it to that run later.

    Args:
        directory: the run directory, or that of another command. A run has begun if it has rows of metrics.
        name: the name of the run in the tools.
        note: tells the user a line of text. Any thread calls it.

    Raises:
        ConfigError: a package or an API key is missing, or a tool or its server refuses a run that has not begun.
    """
    check_loggers(config)
    if not config.log.to:
        return Loggers(())
    directory, limits = directory.absolute(), limits or Limits()
    metrics, id_file = RunDir(directory).metrics, directory / "logger_id"
    if (older := directory / "wandb_id").exists():  # written by an older version
        id_file = older
    has_begun = metrics.exists() and metrics.stat().st_size > 0
    if not id_file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(id_file, uuid.uuid4().hex[:12])
    settings: Settings = {
        "project": config.log.project, "name": name, "id": id_file.read_text(encoding="utf-8"),
        "directory": str(directory), "mode": config.log.wandb_mode, "config": config.model_dump(mode="json"),
        "limit_s": limits.server_s, "finish_s": limits.finish_s, "stats_pid": os.getpid(),
    }  # fmt: skip
    children = [Child(tool, settings) for tool in config.log.to]  # all at once, because each needs seconds
    found = [child.started(limits) for child in children]
    for tool, one in zip(config.log.to, found, strict=True):
        if one["state"] == "failed" and not one["is_away"] and not has_begun:
            for child in children:
                child.end()
            raise ConfigError(
                f"log.to: {tool} did not start: {one['error']}; correct the cause, or take {json.dumps(tool)} out of "
                f"log.to"
            )
    started = (
        _logger(child, settings, one, note=note, limits=limits) for child, one in zip(children, found, strict=True)
    )
    return Loggers([one for one in started if one is not None])


def _logger(
    child: Child, settings: Settings, found: Mapping[str, Any], *, note: Callable[[str], None], limits: Limits
) -> LoggerProcess | None:
    """Return the logger whose process answered ``found`` at its start. None if the run goes on without it."""
    if found["state"] == "started":
        return LoggerProcess(child, found["place"], note=note, limits=limits)
    tool, cause = child.name, found["error"]
    if tool == "wandb" and settings["mode"] == "online":
        run_id, name = f"{settings['id']}-{uuid.uuid4().hex[:6]}", f"{settings['name']} (offline)"
        child = Child(tool, {**settings, "mode": "offline", "id": run_id, "name": name})
        found = child.started(limits)
        if found["state"] == "started":
            note(
                f"wandb did not start within {limits.server_s:g} s ({cause}); the run goes on, and what it logs goes "
                f"to files; when the server answers again: wandb sync {found['place']}"
            )
            return LoggerProcess(child, found["place"], note=note, limits=limits)
    note(f"{tool} did not start: {cause}; the run goes on without it, and {ONLY_FILE}")
    return None


def check_loggers(config: Config) -> None:
    """Check that the packages for ``log.to`` and ``log.prometheus_port`` are installed, and that wandb has its key.

    Raises:
        ConfigError: a package is missing, or the key; or ``generator.prometheus_port`` is set for all generators.
    """
    if config.generator.prometheus_port is not None:
        raise ConfigError(
            f"generator.prometheus_port: expected it only in --set of `async-rl generator`, because each generator "
            f"needs a port of its own, got {config.generator.prometheus_port} in the run's config; set "
            f"log.prometheus_port, which serves metrics of all processes"
        )
    for tool in config.log.to:
        spec = importlib.util.find_spec(tool)
        if spec is None or spec.origin is None:  # a folder of that name is no package
            package = tool if tool == "wandb" else f"async-rl[{tool}]"
            raise ConfigError(
                f"log.to: {json.dumps(tool)} needs the package {tool}, which is not installed: pip install "
                f"'{package}', or take it out of log.to"
            )
    check_prometheus(config.log.prometheus_port)
    if "wandb" in config.log.to and config.log.wandb_mode == "online":
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
        found = path.exists() and netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError) as error:
        raise ConfigError(
            f'log.wandb_mode = "online" needs an API key, but {path} can\'t be read: {error}; set WANDB_API_KEY, or '
            f"correct that file"
        ) from error
    if not found:
        raise ConfigError(
            f'log.wandb_mode = "online", but there is no API key for {host}: set WANDB_API_KEY, run `wandb login`, or '
            f'set log.wandb_mode = "offline" (synced later with `wandb sync`)'
        )
