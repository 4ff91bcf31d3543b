"""TensorBoard."""

# pyright: reportAttributeAccessIssue=false
# Its messages are classes that protobuf makes.

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from async_rl.run.following.sinks import Row, Settings, Sink, numbers


class TensorBoard(Sink):
    """Event files in the folder ``tensorboard`` of the directory. TensorBoard hides what a rollback makes void."""

    def __init__(self, settings: Settings) -> None:
        self.place = str(Path(settings["directory"]) / "tensorboard")
        self._writer = EventFileWriter(self.place, flush_secs=10)
        self._add_text("config", 0, ["```\n" + json.dumps(settings["config"], indent=1) + "\n```"])

    def write(self, row: Row) -> None:
        values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers(row).items()]
        self._add(row["step"], Summary(value=values))

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._add_text("rollouts", step, [list(columns), *([str(cell) for cell in row] for row in rows)])

    def rewind(self, step: int) -> None:
        log = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=log))

    def finish(self, *, is_failed: bool) -> None:
        self._writer.close()

    def _add_text(self, tag: str, step: int, text: Sequence[Any]) -> None:
        """Add a text, or a table if each item of ``text`` is a row of cells."""
        tensor, metadata = make_tensor_proto(text, dtype="string"), create_summary_metadata(tag, description="")
        self._add(step, Summary(value=[Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)]))

    def _add(self, step: int, summary: Any) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
