"""``async-rl follow``: feeds the sinks of a run, draws its curve and mirrors it, from the files in its directory.

Whoever starts a run starts this process too, and lends it the lock of the run directory (``follower`` of ``run``).
Started by hand, it follows a run that has ended. Each sink has a thread of its own, and so has the mirror.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from async_rl.config.loading import load_run_config
from async_rl.errors import ConfigError, RunError
from async_rl.learner.checkpoints.mirror import mirror_of
from async_rl.registry import load, our_offers
from async_rl.run.directory import RunDir, write_atomically
from async_rl.run.following.feeds import LOOK_S, Sinks
from async_rl.run.following.follower import FAILED, INCOMPLETE, has_begun
from async_rl.run.following.sinks import check_sinks
from async_rl.run.lock import RunLock, acquire


def follow(
    run_dir: RunDir, overrides: Sequence[str], *, is_attached: bool, note: Callable[[str], None],
    say: Callable[[str], None],
) -> int:  # fmt: skip
    """Follow a run until it has ended, and everything is logged, drawn and copied. Return the exit code.

    The caller ends the process at once then, because sinks would wait for their servers once more.

    Args:
        overrides: ``--set`` options.
        is_attached: whether the process that started the run has started this one.
        note: tells the user of trouble.
        say: shows the user a line.

    Raises:
        ConfigError: a sink can't be used; of a run that has begun only if not attached.
        RunError: there is no run, or it goes on.
        SystemExit: the process that started the run has died.
    """
    threading.excepthook = _end_with_thread
    os.environ.pop("WANDB_SERVICE", None)  # of a notebook, say, which needs it longer than this process
    config_path = run_dir.follow / "config.toml"  # of what is no run, such as the directory of ``sft``
    is_run = not config_path.exists()
    config_path = run_dir.config if is_run else config_path
    if not config_path.exists():
        raise RunError(f"expected the directory of a run, got {run_dir.path}, which has no config.toml; correct it")
    config = load_run_config(config_path, overrides)
    check_sinks(config)
    lock = RunLock.inherit(run_dir, "follow") or acquire(run_dir, "follow")
    run_dir.follow.mkdir(exist_ok=True)
    refuses, pid = not (is_attached and has_begun(run_dir)), os.getppid() if is_attached else os.getpid()
    try:
        sinks = Sinks(config, run_dir, note, refuses=refuses, stats_pid=pid)
    except ConfigError as refusal:
        write_atomically(run_dir.follow / "start", str(refusal))
        raise
    write_atomically(run_dir.follow / "start", "")
    drawn = our_offers("async_rl.pictures").values() if is_run else ()
    pictures = [load(offer)(run_dir, lock, note) for offer in drawn]
    mirror_class = mirror_of(config) if is_run else None
    mirrors = [] if mirror_class is None else [mirror_class(run_dir, config.checkpoint, say)]
    try:
        while (is_failed := _has_failed(run_dir, lock, is_attached=is_attached)) is None:
            time.sleep(LOOK_S)
            for part in (*pictures, *mirrors):
                part.look()
    except SystemExit:
        sinks.finish(is_failed=True)
        raise
    for picture in pictures:
        picture.draw()
    is_complete = sinks.finish(is_failed=is_failed)
    for mirror in mirrors:
        is_complete &= mirror.finish()
    for name, place in () if is_attached else sinks.places.items():
        say(f"{name}: {place or 'not open'}")
    return 0 if is_complete else INCOMPLETE


def _has_failed(run_dir: RunDir, lock: RunLock, *, is_attached: bool) -> bool | None:
    """Return whether the run has failed; None while it goes on."""
    end = run_dir.follow / "end"
    if end.exists():
        return end.read_text(encoding="utf-8") == FAILED
    return None if is_attached and lock.is_current else not run_dir.is_finished


def _end_with_thread(failure: Any) -> None:
    """End this process, which is started again, because one of its threads has failed by a bug."""
    threading.__excepthook__(failure)
    os._exit(1)
