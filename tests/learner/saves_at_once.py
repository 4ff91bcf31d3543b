"""For engines of tests: a save in the background that is over at once."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any


class SavesAtOnce:
    """``begin_save`` of an engine that has ``save``."""

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def begin_save(self, directory: Path, extra: Mapping[str, Any]) -> Future[None]:
        done = Future[None]()
        self.save(directory, extra)
        done.set_result(None)
        return done
