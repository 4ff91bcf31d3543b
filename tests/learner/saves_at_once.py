"""For engines of tests: a save in the background that is over at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any


class SavesAtOnce(ABC):
    """``begin_save`` of an engine that has ``save``."""

    @abstractmethod
    def save(self, directory: Path, extra: Mapping[str, Any]) -> None: ...

    def begin_save(self, directory: Path, extra: Mapping[str, Any]) -> Future[None]:
        done = Future[None]()
        self.save(directory, extra)
        done.set_result(None)
        return done
