"""What a run is logged to: the sinks of ``log.to``, and whether they can be used.

Extensions and other packages offer a sink as NAME = MODULE:FACTORY of the kind ``async_rl.sinks`` (docs/watching.md),
which is imported when the sink is opened. What can be said before, without importing its tool, is a function of the
kind ``async_rl.sink_checks`` under the same name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from async_rl.config.config import Config
from async_rl.errors import ConfigError
from async_rl.registry import find_offer, load, offers
from async_rl.run.records.prometheus import check_prometheus

Row = Mapping[str, Any]

MAX_TABLE_ROWS = 32
_MAX_CELL_CHARACTERS = 2000
_COLUMNS = ("step", "row", "prompt", "response", "reward", "accuracy", "num_tokens", "finish_reason")


class Settings(TypedDict):
    """What a sink is opened with.

    Attributes:
        project: the name that groups runs.
        name: the run's name on the screen.
        id: stays the same when the run is resumed.
        directory: absolute path of the directory whose rows are logged.
        mode: of wandb, ``"online"`` or ``"offline"``.
        config: the run's config, as JSON data.
        limit_s: seconds to wait for a server at the start.
        finish_s: seconds to wait for it at the end.
        stats_pid: the process whose load is measured.
    """

    project: str
    name: str
    id: str
    directory: str
    mode: str
    config: dict[str, Any]
    limit_s: float
    finish_s: float
    stats_pid: int


class Sink:
    """An open sink, which has ``write`` at least. Any method may raise, and blocks no other sink.

    Attributes:
        place: where the run is: a directory, or an address.
        remedy: the command that sends what the sink's own files have; empty if there are none.
    """

    place: str = ""
    remedy: str = ""

    def write(self, row: Row) -> None:
        """Log one row of metrics, which has the key ``step`` and no None."""
        raise NotImplementedError

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log sampled rollouts as a table."""

    def rewind(self, step: int) -> None:
        """Expect rows for the steps after ``step`` again. Forget the old ones, if the sink can."""

    def finish(self, *, is_failed: bool) -> None:
        """Send what is left. Raise TimeoutError if that takes too long and the sink's files have the rest."""


SinkFactory = Callable[[Settings], Sink]
"""What is offered of the kind ``async_rl.sinks``: it opens the sink, and may raise."""
SinkCheck = Callable[[str, Config], None]
"""What is offered of the kind ``async_rl.sink_checks``: it gets the sink's name, and raises ConfigError."""


def sink_factory(name: str) -> SinkFactory:
    """Import what offers the sink ``name``, and return what opens it. Raises whatever the import raises."""
    offer = find_offer("async_rl.sinks", name)
    assert offer is not None, f"check_sinks lets no {name} pass"
    return offer.load()


def check_sinks(config: Config) -> None:
    """Check that there are the sinks of ``log.to``, what they need, and what ``log.prometheus_port`` needs.

    Raises:
        ConfigError: something is missing, or ``generator.prometheus_port`` is set for all generators.
    """
    if config.generator.prometheus_port is not None:
        raise ConfigError(
            f"generator.prometheus_port: expected it only in --set of `async-rl generator`, because each generator "
            f"needs a port of its own, got {config.generator.prometheus_port} in the run's config; set "
            f"log.prometheus_port, which serves metrics of all processes"
        )
    for name in config.log.to:
        if find_offer("async_rl.sinks", name) is None:
            raise ConfigError(
                f"log.to: expected {', '.join(sorted(offers('async_rl.sinks')))}, got {json.dumps(name)}; correct it, "
                f"or install the package that offers it (an entry point of the group async_rl.sinks)"
            )
        if offer := find_offer("async_rl.sink_checks", name):
            check: SinkCheck = load(offer)
            check(name, config)
    check_prometheus(config.log.prometheus_port)


def samples_table(step: int, lines: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
    """Return columns and rows of a table of at most 32 rollouts: the ``lines`` of ``rollouts/step-NNNNNN.jsonl``.

    Texts are cut after 2,000 characters.
    """
    rows: list[list[Any]] = []
    for line in lines[:MAX_TABLE_ROWS]:
        prompt = "\n".join(f"{message.get('role')}: {message.get('content')}" for message in line["messages"])
        cells = {"step": step, **line, "prompt": prompt}
        rows.append([_cut(cells.get(column)) for column in _COLUMNS])
    return _COLUMNS, rows


def _cut(cell: Any) -> Any:
    is_long = isinstance(cell, str) and len(cell) > _MAX_CELL_CHARACTERS
    return f"{cell[:_MAX_CELL_CHARACTERS]}... ({len(cell)} characters)" if is_long else cell


def numbers(row: Row) -> dict[str, float]:
    """Return the numbers of a row without its step, for tools that take nothing else."""
    return {key: float(value) for key, value in row.items() if isinstance(value, int | float) and key != "step"}
