"""The mirror of a run (``checkpoint.mirror``), as others see it: what copies, and ``mirror.json``, which says how far.

An extension copies: the core asks it before a start, and ``async-rl follow`` lets it work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from async_rl.config.config import Config
from async_rl.config.run import CheckpointConfig
from async_rl.registry import find_offer, load
from async_rl.run.directory import RunDir, step_of
from async_rl.run.figures.progress import duration


class Mirror(Protocol):
    """A class that is offered of the kind ``async_rl.mirrors``. An instance mirrors a run, in threads of its own."""

    def __init__(self, run_dir: RunDir, config: CheckpointConfig, say: Callable[[str], None]) -> None:
        """Begin to mirror a run whose directory this process has locked. ``say`` shows the user a line."""
        ...

    def look(self) -> None:
        """Tell the user, once, if nothing goes on for a while. It is called every second."""
        ...

    def finish(self) -> bool:
        """Copy what is left, for at most ``checkpoint.mirror_wait_s``. Return whether everything is copied."""
        ...

    @staticmethod
    def check(config: Config) -> str:
        """Check before a start that the run of ``config`` can be mirrored. Return a warning, or an empty text.

        Raises UserError: the run must not start.
        """
        ...

    @staticmethod
    def bring_back(config: Config, *, fresh: bool, is_fork: bool, show: Callable[[str], None]) -> list[str]:
        """Check that the run of ``config`` may use its mirror. If ``run.dir`` has no run and the mirror has, fetch
        that. ``show`` gets the progress. Return lines for the user.

        Raises UserError: it may not, or it can't be fetched.
        """
        ...


def mirror_of(config: Config) -> type[Mirror] | None:
    """Import and return what mirrors the run of ``config``: what is offered under the protocol of the URL, else under
    ``fsspec``. None if the run has no mirror.
    """
    if config.checkpoint.mirror is None:
        return None
    protocol = config.checkpoint.mirror.partition("://")[0]
    offer = find_offer("async_rl.mirrors", protocol) or find_offer("async_rl.mirrors", "fsspec")
    assert offer is not None
    return load(offer)


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``mirror.json`` of a run directory, which the mirror writes.

    Attributes:
        url: the mirror's; empty if the run has none.
        directory: an id of the directory, which a copy of it has, too.
        place: where the directory was when it got this id. A copy is elsewhere.
        fetched: what the run goes on from here, after nobody was seen to write to the mirror.
        latest: the newest checkpoint that the mirror has.
        num_kept: checkpoints in the mirror that are no part of the run any more.
        error: why the mirror is behind.
        is_complete: whether the run has ended and the mirror has all.
    """

    url: str = ""
    directory: str = ""
    place: str = ""
    fetched: str = ""
    latest: str | None = None
    num_kept: int = 0
    error: str = ""
    is_complete: bool = False


def sign_of_life(run_dir: Path) -> Path:
    """Return the path of ``mirror.json``, whose time the process that copies renews while the store answers."""
    return run_dir / "mirror.json"


def read_status(run_dir: Path) -> Status:
    """Return the content of ``mirror.json``; an empty status if there is none, or it is damaged."""
    try:
        return msgspec.json.decode(sign_of_life(run_dir).read_bytes(), type=Status)
    except (OSError, ValueError, RecursionError):
        return Status()


def behind_steps(run_dir: RunDir, status: Status) -> int:
    """Return by how many steps the run's newest checkpoint is newer than that of its mirror."""
    return max(0, max(0, step_of(run_dir.latest_checkpoint)) - max(0, step_of(status.latest)))


def mirror_line(run_dir: RunDir) -> str:
    """Return how far the mirror of a run is, in words; empty if it has none."""
    status = read_status(run_dir.path)
    if not status.url:
        return ""
    line = f"{status.url} has {status.latest or 'no checkpoint'}"
    if behind := behind_steps(run_dir, status):
        silent_s = max(0.0, time.time() - sign_of_life(run_dir.path).stat().st_mtime)
        line += f", {behind} steps behind, {duration(silent_s)} after its last sign of life"
    line += f", and keeps {status.num_kept} that the run lost (checkpoint.mirror_may_lose)" if status.num_kept else ""
    return f"{line}; {status.error}" if status.error else line


def is_complete(config: Config) -> bool:
    """Return whether a run that has ended has no mirror, or one with everything."""
    return config.checkpoint.mirror is None or read_status(Path(config.run.dir)).is_complete
