"""The process ``async-rl follow`` of a run, seen from whoever starts the run.

It reads the run's directory, and writes what it has for the user into ``notes.log``, and into the file of that name in
the folder ``follow`` what is only shown. There, ``start`` says that its sinks are open, or why one refuses a run that
has not begun; and ``end`` tells it how the run has ended.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from async_rl.config.config import Config
from async_rl.config.loading import config_to_toml
from async_rl.errors import ConfigError, StoppedError
from async_rl.process.child import GRACE_S, ParentWatch, module_command, package_environment
from async_rl.run.directory import RunDir, write_atomically
from async_rl.run.following.feeds import FINISH_S, LOAD_S, LOOK_S, MARGIN_S, SERVER_S
from async_rl.run.lock import LOCK_FD, RunLock
from async_rl.run.notes import NotesTail

REFUSED, INCOMPLETE = 2, 3
"""Exit codes: a sink refused a run that has not begun; a sink or the mirror lacks something at the end."""
FAILED = "failed"
"""What ``follow/end`` says of a run that has failed."""
_RESTART_S, _DRAWING_S = 5.0, 30.0


class Follower:
    """The process. It is started again if it is killed.

    Attributes:
        is_failed: whether the run has failed, as ``finish`` tells the process.
    """

    def __init__(self, run_dir: RunDir, lock: RunLock, say: Callable[[str], None], *, shows_notes: bool) -> None:
        """Start the process.

        Args:
            say: shows the user a line. A thread calls it.
            shows_notes: whether to show new lines of ``notes.log`` before the end, too.
        """
        self.is_failed, self._is_last = False, False
        self._run_dir, self._lock, self._say, self._shows_notes = run_dir, lock, say, shows_notes
        self._watch, self._ending = ParentWatch(), threading.Event()
        self._notes, self._lines = NotesTail(run_dir.notes), NotesTail(RunDir(run_dir.follow).notes)
        for name in ("start", "end"):
            (run_dir.follow / name).unlink(missing_ok=True)
        self._process = self._spawn()
        self._thread = threading.Thread(target=self._keep_alive, name="follower", daemon=True)
        self._thread.start()

    def await_start(self) -> None:
        """Wait until the sinks are open or left out. Raises ConfigError if one refuses the run."""
        start, deadline = self._run_dir.follow / "start", time.monotonic() + LOAD_S + SERVER_S + 2 * MARGIN_S
        while not start.exists() and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        for line in () if self._shows_notes else self._notes.poll():  # before there is somebody else who shows them
            self._say(line)
        if refusal := start.read_text(encoding="utf-8") if start.exists() else "":
            raise ConfigError(refusal)

    def finish(self, wait_s: float) -> None:
        """Let the process do what is left, for at most ``wait_s`` seconds, and end it. Ctrl-C ends the wait."""
        self._ending.set()
        if not self._shows_notes:  # somebody else has shown those before
            self._notes = NotesTail(self._run_dir.notes)
            self._shows_notes = True
        if self._lock.is_current:  # else the file is that of another learner's process, and this one ends by itself
            write_atomically(self._run_dir.follow / "end", FAILED if self.is_failed else "ended")
        with suppress(KeyboardInterrupt):
            self._thread.join(wait_s)
        self._is_last = True
        self._watch.close()  # a process that is still there ends
        self._thread.join(2 * GRACE_S)
        self._process.kill()
        self._thread.join()

    def _keep_alive(self) -> None:
        while (code := self._process.poll()) is None or (code not in (0, REFUSED, INCOMPLETE) and self._is_again()):
            self._show()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LOOK_S)
        self._show()

    def _is_again(self) -> bool:
        """Start the process again, after a pause; once more if the run has ended. Return False if that was before."""
        if self._is_last:
            self._say(f"async-rl follow was ended; async-rl follow {self._run_dir.path} does what is left")
            return False
        self._is_last = self._ending.wait(_RESTART_S)
        self._process = self._spawn()
        return True

    def _show(self) -> None:
        for line in [*(self._notes.poll() if self._shows_notes else ()), *self._lines.poll()]:
            self._say(line)

    def _spawn(self) -> subprocess.Popen[bytes]:
        # No folder where the user is hides a package.
        environment = package_environment() | {LOCK_FD: str(self._lock.fd), "PYTHONSAFEPATH": "1"}
        self._run_dir.logs.mkdir(exist_ok=True)
        command = module_command("async_rl", "follow", str(self._run_dir.path))
        log = self._run_dir.logs / "follow.log"
        return self._watch.spawn(command, environment=environment, log=log, pass_fds=(self._lock.fd,))


def has_begun(run_dir: RunDir) -> bool:
    """Return whether a run has rows of metrics. Before, a sink that can't be opened is an error."""
    return run_dir.metrics.exists() and run_dir.metrics.stat().st_size > 0


@contextmanager
def followed(
    config: Config, run_dir: RunDir, lock: RunLock, say: Callable[[str], None], *, part: str = "",
    shows_notes: bool = True,
) -> Iterator[Follower]:  # fmt: skip
    """Let a process follow ``run_dir`` in the ``with`` block. At its end, wait until everything is logged and copied.

    Args:
        lock: the lock of ``run_dir``, which the process inherits.
        say: shows the user a line.
        part: the name in the sinks of a directory that is not ``run.dir``, such as that of ``sft``.
        shows_notes: False if somebody else shows ``notes.log`` in the ``with`` block.

    Raises:
        ConfigError: a sink of ``log.to`` refuses a run that has not begun.
    """
    run_dir.follow.mkdir(exist_ok=True)
    if part:
        named = config.model_copy(update={"run": config.run.model_copy(update={"name": part})})
        write_atomically(run_dir.follow / "config.toml", config_to_toml(named))
    follower = Follower(run_dir, lock, say, shows_notes=shows_notes)
    mirror_s = config.checkpoint.mirror_wait_s if config.checkpoint.mirror is not None else 0.0
    try:
        if config.log.to and not has_begun(run_dir):
            follower.await_start()
        yield follower
    except Exception as error:
        follower.is_failed = not isinstance(error, StoppedError)
        raise
    finally:
        follower.finish(FINISH_S + MARGIN_S + _DRAWING_S + mirror_s)
