"""The fault points, found in the source: those of a run, of one with agents in addition, and of given rows."""

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "async_rl"


def found_in(*paths: Path) -> list[str]:
    """The names of the points in the files and folders ``paths``, as often as they are there."""
    files = sorted(file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path]))
    return [name for file in files for name in re.findall(r'fault_point\("([a-z._]+)"\)', file.read_text("utf-8"))]


EXTENSIONS = PACKAGE / "extensions"
AGENT_FAULT_POINTS = tuple(found_in(EXTENSIONS / "agents", PACKAGE / "process" / "fork_server.py"))
OFFLINE_FAULT_POINTS = tuple(found_in(EXTENSIONS / "offline"))
FAULT_POINTS = tuple(sorted({*found_in(PACKAGE)} - {*found_in(EXTENSIONS), *AGENT_FAULT_POINTS}))
