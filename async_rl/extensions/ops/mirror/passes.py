"""Mirrors a run, a pass of ``Copier`` after the other, while ``async-rl follow`` goes.

If the store fails it tries again with growing pauses, and says so in ``notes.log`` and ``mirror.json``. If the mirror
is not this run's, it ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from async_rl.config.run import CheckpointConfig
from async_rl.errors import LineageError, RunError, StoreError
from async_rl.extensions.ops.mirror.copier import Copier
from async_rl.extensions.ops.mirror.fetch import bring_back, check_mirror
from async_rl.extensions.ops.mirror.manifest import update_status
from async_rl.extensions.ops.mirror.store import Store
from async_rl.learner.checkpoints.mirror import Mirror, mirror_line, read_status, sign_of_life
from async_rl.run.directory import RunDir
from async_rl.run.figures.progress import duration
from async_rl.run.notes import tell

logger = logging.getLogger(__name__)

_LOOK_S, _MAX_PAUSE_S = 1.0, 60.0
_HANGS_S = 300.0
"""Without a sign of life for so many seconds, the mirror counts as hanging."""


def mirror_run(run_dir: RunDir, config: CheckpointConfig, finish: threading.Event) -> bool:
    """Mirror a run until ``finish`` is set. Return whether everything is copied; else the mirror can't have it."""
    assert config.mirror is not None
    store, has_begun, failing_since, pause_s, told = Store(config.mirror), False, 0.0, _LOOK_S, ""
    copier = Copier(run_dir, store, config)
    update_status(run_dir.path, is_complete=False)
    while True:
        is_last, error = finish.is_set(), ""
        try:
            if not has_begun:
                copier.begin(logger.info)
            has_begun = True
            has_all, pause_s = copier.sync(is_last=is_last), _LOOK_S
            if copier.lacking and copier.lacking != told:
                tell(run_dir, f"the run is not mirrored: {copier.lacking}")
            told = copier.lacking
            if is_last and (has_all or told):
                _note(run_dir, copier, told)
                update_status(run_dir.path, is_complete=has_all)
                return has_all
        except FileNotFoundError:
            pass  # a file was moved aside; the next pass sees where
        except (RunError, LineageError) as refusal:
            _note(run_dir, copier, str(refusal))
            tell(run_dir, str(refusal))
            return False
        except (StoreError, OSError) as failure:
            error, pause_s = str(failure), min(2 * pause_s, _MAX_PAUSE_S)
            logger.warning("%s", error)
            if not failing_since:
                tell(run_dir, f"the mirror fails, and is tried again while the run goes on: {error}")
            failing_since = failing_since or time.time()
        if failing_since and not error:
            tell(run_dir, f"the mirror works again, after {duration(time.time() - failing_since)}")
            failing_since = 0.0
        _note(run_dir, copier, error or copier.lacking)
        if is_last:
            time.sleep(_LOOK_S)  # the owner ends the process when it has waited long enough
        else:
            finish.wait(pause_s)


def _note(run_dir: RunDir, copier: Copier, error: str) -> None:
    """Write into ``mirror.json`` what the mirror has, and why not all."""
    sign_of_life(run_dir.path).touch()
    latest = copier.latest or read_status(run_dir.path).latest
    update_status(run_dir.path, latest=latest, num_kept=copier.num_kept, error=error)


class StoreMirror(Mirror):
    """A thread that makes passes."""

    check, bring_back = staticmethod(check_mirror), staticmethod(bring_back)

    def __init__(self, run_dir: RunDir, config: CheckpointConfig, say: Callable[[str], None]) -> None:
        self._run_dir, self._config, self._say = run_dir, config, say
        self._finish, self._has_all = threading.Event(), False
        self._seen, self._since = -1, 0.0
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def look(self) -> None:
        path = sign_of_life(self._run_dir.path)
        if self._seen != (now := path.stat().st_mtime_ns if path.exists() else 0):
            self._seen, self._since = now, time.monotonic()
        elif self._thread.is_alive() and time.monotonic() - self._since > _HANGS_S:
            tell(self._run_dir, f"the mirror has not answered for a while: {mirror_line(self._run_dir)}")
            self._since = float("inf")  # say it once

    def finish(self) -> bool:
        self._finish.set()
        wait_s = self._config.mirror_wait_s
        if self._thread.is_alive():
            wait = f"waiting up to {duration(wait_s)} for the mirror (checkpoint.mirror_wait_s; Ctrl-C ends this)"
            self._say(f"{wait}: {mirror_line(self._run_dir)}")
        try:
            self._thread.join(wait_s)
        finally:  # Ctrl-C too
            lacks = "mirror: " if self._has_all else "warning: not everything is mirrored: "
            remedy = "; the same command copies the rest" if self._thread.is_alive() else ""
            self._say(f"{lacks}{mirror_line(self._run_dir)}{remedy}")
        return self._has_all

    def _run(self) -> None:
        self._has_all = mirror_run(self._run_dir, self._config, self._finish)
