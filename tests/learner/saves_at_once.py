"""Saves of tests that are over at once: in the background by an engine, and of a whole checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from async_rl.config.run import CheckpointConfig
from async_rl.learner.checkpoints.writer import CheckpointWriter
from async_rl.learner.interface import Engine


class SavesAtOnce(ABC):
    """``begin_save`` of an engine that has ``save``."""

    @abstractmethod
    def save(self, directory: Path, extra: Mapping[str, Any]) -> None: ...

    def begin_save(self, directory: Path, extra: Mapping[str, Any]) -> Future[None]:
        done = Future[None]()
        self.save(directory, extra)
        done.set_result(None)
        return done


def write_checkpoint(
    engine: object, run_dir: Path, step: int, extra: Mapping[str, Any], *, keep_last: int = 1, lineage: str = "l1",
    confirm: Callable[[], None] = lambda: None,
) -> Path:  # fmt: skip
    """Save the engine and ``extra`` as the checkpoint of ``step``, and commit it. Return its directory."""
    config = CheckpointConfig(keep_last=keep_last, asynchronous=False)
    writer = CheckpointWriter(cast(Engine, engine), run_dir, config, lineage=lineage, confirm=confirm)
    with closing(writer):
        writer.begin(step, extra)
        committed = writer.poll()
    assert committed is not None
    return committed.path
