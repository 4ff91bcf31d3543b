"""Lines that a run's processes have for the user, in the file ``notes.log``. ``launch`` shows them as they are written.

They are for what the user should know at once although the run goes on. The log of the process has them too.
"""

from __future__ import annotations

import logging
from pathlib import Path

from async_rl.run.directory import RunDir, appended_lines

logger = logging.getLogger(__name__)


def tell(run_dir: RunDir, line: str) -> None:
    """Log ``line`` as a warning, and show it to the user of ``launch``."""
    logger.warning("%s", line)
    with run_dir.notes.open("a", encoding="utf-8") as file:
        file.write(" ".join(line.split()) + "\n")


class NotesTail:
    """Reads the lines that are appended to ``notes.log`` after this object was constructed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def poll(self) -> list[str]:
        """Return the lines since the last call, without an incomplete last one."""
        if not self._path.exists():
            return []
        lines, self._offset = appended_lines(self._path, self._offset)
        return lines
