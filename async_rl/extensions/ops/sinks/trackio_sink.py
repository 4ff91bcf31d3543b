"""Trackio."""

# pyright: reportMissingImports=false
# Trackio is in an environment of its own (``make test-loggers``).

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trackio

from async_rl.run.following.sinks import Row, Settings, Sink


class Trackio(Sink):
    """Trackio's database on this machine, or the Space or server that its environment variables name."""

    def __init__(self, settings: Settings) -> None:
        self.place = str(trackio.TRACKIO_DIR)
        self._run = trackio.init(
            project=settings["project"],
            name=f"{settings['name']}-{settings['id'][:6]}",  # Trackio resumes by name
            config=settings["config"], resume="allow", embed=False, auto_log_cpu=False,
        )  # fmt: skip

    def write(self, row: Row) -> None:
        self._run.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = trackio.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({"rollouts": table}, step=step)

    def finish(self, *, is_failed: bool) -> None:
        trackio.finish()
