"""The process that mirrors a run, ``python -m async_rl.learner.mirror.process RUN_DIR``, and what others see of it.

At a line on its standard input it copies what is left, and ends; without a parent it ends at once. While the store
fails it tries again with growing pauses, and says so in ``notes.log`` and ``mirror.json``. If the mirror is not this
run's, it ends with the code ``REFUSED``.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from async_rl.config.config import Config
from async_rl.config.loading import load_run_config
from async_rl.config.run import CheckpointConfig
from async_rl.errors import LineageError, RunError, StoreError
from async_rl.learner.mirror.copier import FILES_EVERY_S, Copier
from async_rl.learner.mirror.manifest import behind_steps, read_status, sign_of_life, update_status
from async_rl.learner.mirror.store import Store
from async_rl.process.child import module_command, package_environment
from async_rl.run.directory import RunDir
from async_rl.run.notes import tell
from async_rl.run.progress import duration

logger = logging.getLogger(__name__)

REFUSED = 3
_LOOK_S, _MAX_PAUSE_S, _RESTART_S = 1.0, 60.0, 5.0
_HANGS_S = 300.0
"""Without a sign of life for so many seconds, the process that copies counts as hanging."""


def mirror_run(
    run_dir: RunDir, config: CheckpointConfig, finish: threading.Event, *, files_every_s: float = FILES_EVERY_S
) -> int:
    """Mirror a run until ``finish`` is set and everything is copied. Return the exit code: 0 or ``REFUSED``."""
    assert config.mirror is not None
    store, has_begun, failing_since, pause_s, told = Store(config.mirror), False, 0.0, _LOOK_S, ""
    copier = Copier(run_dir, store, config, files_every_s=files_every_s)
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
                return 0 if has_all else REFUSED
        except FileNotFoundError:
            pass  # a file was moved aside; the next pass sees where
        except (RunError, LineageError) as refusal:
            _note(run_dir, copier, str(refusal))
            tell(run_dir, str(refusal))
            return REFUSED
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
        time.sleep(_LOOK_S) if is_last else finish.wait(pause_s)


def _note(run_dir: RunDir, copier: Copier, error: str) -> None:
    """Write into ``mirror.json`` what the mirror has, and why not all."""
    sign_of_life(run_dir.path).touch()
    latest = copier.latest or read_status(run_dir.path).latest
    update_status(run_dir.path, latest=latest, num_kept=copier.num_kept, error=error)


def mirror_line(run_dir: RunDir) -> str:
    """Return how far the mirror of a run is, in words; empty if it has none."""
    found = read_status(run_dir.path)
    if not found.url:
        return ""
    line = f"{found.url} has {found.latest or 'no checkpoint'}"
    if behind := behind_steps(run_dir, found):
        silent_s = max(0.0, time.time() - sign_of_life(run_dir.path).stat().st_mtime)
        line += f", {behind} steps behind, {duration(silent_s)} after its last sign of life"
    line += f", and keeps {found.num_kept} that the run lost (checkpoint.mirror_may_lose)" if found.num_kept else ""
    return f"{line}; {found.error}" if found.error else line


def is_complete(config: Config) -> bool:
    """Return whether a run that has ended has no mirror, or one with everything."""
    return config.checkpoint.mirror is None or read_status(Path(config.run.dir)).is_complete


@contextmanager
def mirrored(config: Config, run_dir: RunDir, say: Callable[[str], None]) -> Iterator[None]:
    """Mirror the run in the ``with`` block, if ``checkpoint.mirror`` is set. At its end, wait until all is copied.

    The caller has locked the run directory. ``say`` shows a line to the user.
    """
    process = None if config.checkpoint.mirror is None else _MirrorProcess(run_dir)
    try:
        yield
    finally:
        if process is not None:
            process.finish(config.checkpoint.mirror_wait_s, say)


class _MirrorProcess:
    """The process, seen from its parent. It is started again if it is killed."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir, self._ending = run_dir, threading.Event()
        self._process = self._spawn()
        self._thread = threading.Thread(target=self._keep_alive, name="mirror", daemon=True)
        self._thread.start()

    def finish(self, wait_s: float, say: Callable[[str], None]) -> None:
        """Let the process copy what is left, for at most ``wait_s`` seconds, and end it. Ctrl-C ends the wait."""
        self._ending.set()
        self._thread.join()
        if self._process.poll() not in (None, REFUSED):  # it was killed
            self._process = self._spawn()
        if self._process.poll() is None:
            wait = f"waiting up to {duration(wait_s)} for the mirror (checkpoint.mirror_wait_s; Ctrl-C ends this)"
            say(f"{wait}: {mirror_line(self._run_dir)}")
        with suppress(KeyboardInterrupt, subprocess.TimeoutExpired, BrokenPipeError):
            assert self._process.stdin is not None
            os.write(self._process.stdin.fileno(), b"finish\n")
            self._process.wait(wait_s)
        code = self._process.poll()
        self._process.kill()
        self._process.communicate()
        lacks = "mirror: " if code == 0 else "warning: not everything is mirrored: "
        remedy = "" if code in (0, REFUSED) else "; the same command copies the rest"
        say(f"{lacks}{mirror_line(self._run_dir)}{remedy}")

    def _keep_alive(self) -> None:
        path, seen, since = sign_of_life(self._run_dir.path), -1, 0.0
        while not self._ending.wait(_LOOK_S):
            if self._process.poll() not in (None, REFUSED) and not self._ending.wait(_RESTART_S):
                self._process = self._spawn()
            if seen != (now := path.stat().st_mtime_ns if path.exists() else 0):
                seen, since = now, time.monotonic()
            elif self._process.poll() is None and time.monotonic() - since > _HANGS_S:
                tell(self._run_dir, f"the mirror has not answered for a while: {mirror_line(self._run_dir)}")
                since = float("inf")  # say it once

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = module_command("async_rl.learner.mirror.process", str(self._run_dir.path), flags=("-P",))
        with (self._run_dir.logs / "mirror.log").open("ab") as log:
            # In a session of its own, because Ctrl-C is for the parent.
            return subprocess.Popen(
                command,
                env=package_environment(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def main() -> None:
    finish, run_dir = threading.Event(), RunDir(Path(sys.argv[1]))

    def obey() -> None:
        while sys.stdin.readline():
            finish.set()
        os._exit(1)  # the parent is gone

    threading.Thread(target=obey, name="parent", daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    sys.exit(mirror_run(run_dir, load_run_config(run_dir.config).checkpoint, finish))


if __name__ == "__main__":
    main()
