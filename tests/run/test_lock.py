"""One run directory, several processes: one of them wins, the others are told who has it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from async_rl.errors import LineageError, RunError
from async_rl.process.child import ParentWatch
from async_rl.queue.client.clients import LearnerQueue
from async_rl.run import lock as lock_module
from async_rl.run.directory import RunDir
from async_rl.run.lock import LOCK_FD, RunLock, locked_run_dir
from tests.config.made import a_config
from tests.end_to_end.harness import wait_until
from tests.forked import Forked, preload

preload("async_rl.run.lock")
DEADLINE_S = 60.0


def contend(directory: Path, fresh: bool, notes: Path, hold: str = "") -> None:
    """Try to own ``directory``; write how that went to ``notes``. Stop before the function ``hold``, until SIGCONT."""
    if hold:
        held = getattr(lock_module, hold)

        def stop_first(*arguments: object, **options: object) -> object:
            signal.raise_signal(signal.SIGSTOP)
            return held(*arguments, **options)

        setattr(lock_module, hold, stop_first)
    lock_module.ENDING_S = 5.0
    try:
        with locked_run_dir(a_config(directory), role="launch", fresh=fresh) as (run_dir, lock):
            run_id = run_dir.run_id
            (notes / f"{os.getpid()}.won").write_text(run_id)
            wait_until("the end", (notes / "end").exists)
            assert (run_dir.run_id, lock.is_current) == (run_id, True)
    except RunError as error:
        (notes / f"{os.getpid()}.lost").write_text(str(error))


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def outcome(notes: Path, process: Forked) -> str | None:
    return next((p.suffix for p in notes.glob(f"{process.pid}.*")), None)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


@pytest.mark.parametrize("hold", ["acquire", "move_aside", "prepare_run_dir"])
def test_of_two_launches_one_wins_wherever_the_other_is_held(tmp_path: Path, notes: Path, hold: str):
    directory = tmp_path / "run"
    with locked_run_dir(a_config(directory), role="launch", fresh=False) as (run_dir, _):
        old = run_dir.run_id
    first = Forked(contend, directory, True, notes, hold)
    wait_until("the first launch", lambda: is_stopped(first.pid))
    second = Forked(contend, directory, True, notes)
    wait_until("the second launch", lambda: outcome(notes, second))
    first.send_signal(signal.SIGCONT)
    wait_until("the first launch", lambda: outcome(notes, first))
    winner, loser = (second, first) if hold == "acquire" else (first, second)
    assert (outcome(notes, winner), outcome(notes, loser)) == (".won", ".lost")
    assert f"process {winner.pid} (async-rl launch) uses" in (notes / f"{loser.pid}.lost").read_text()
    (notes / "end").touch()
    assert (first.wait(DEADLINE_S), second.wait(DEADLINE_S)) == (0, 0)
    assert (tmp_path / "run.old-1" / "run_id").read_text().strip() == old
    assert not (tmp_path / "run.old-2").exists()
    assert (directory / "run_id").read_text().strip() == (notes / f"{winner.pid}.won").read_text()


def test_a_takeover_supersedes_a_holder_which_then_knows(tmp_path: Path):
    config = a_config(tmp_path / "run")
    with locked_run_dir(config, role="learner", fresh=False) as (_, old):
        with pytest.raises(RunError, match=rf"process {os.getpid()} \(async-rl learner\)"):
            lock_module.acquire(RunDir(tmp_path / "run"), "learner")
        with locked_run_dir(config, role="learner", fresh=False, takeover=True) as (_, new):
            assert (old.is_current, new.is_current) == (False, True)
            with pytest.raises(LineageError, match="has taken over"):
                old.check()
            with pytest.raises(RunError, match="uses"):
                lock_module.acquire(RunDir(tmp_path / "run"), "launch")
    with locked_run_dir(config, role="launch", fresh=False):
        pass


def test_a_learner_whose_lock_was_taken_over_writes_nothing_whatever_its_queue_says(tmp_path: Path):
    run_dir = RunDir(tmp_path / "run")
    older = lock_module.acquire(run_dir, "launch")
    newer = lock_module.acquire(run_dir, "launch", takeover=True)
    queue = LearnerQueue("tcp://127.0.0.1:1", check_lock=older.check)  # nobody answers there
    with pytest.raises(LineageError, match="has taken over"):
        queue.confirm("line-a")
    queue.close()
    for lock in (older, newer):
        lock.close()


def test_a_launch_waits_for_the_learner_of_a_launch_that_was_killed_and_else_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_dir = RunDir(tmp_path / "run")
    with learner_of_a_dead_launch(run_dir, tmp_path / "log") as learner:
        with monkeypatch.context() as patch:
            patch.setattr(lock_module, "ENDING_S", 0.0)
            with pytest.raises(RunError, match=rf"process {learner.pid} \(async-rl learner\)"):
                lock_module.acquire(run_dir, "launch")
        # The first look finds the learner alive, and it ends before the second one.
        monkeypatch.setattr(lock_module.time, "sleep", lambda _: (learner.kill(), learner.wait()))
        lock_module.acquire(run_dir, "launch").close()


@contextmanager
def learner_of_a_dead_launch(run_dir: RunDir, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that inherited the lock of the run directory from a launch that is dead."""
    lock = lock_module.acquire(run_dir, "launch")
    child = (
        "import sys, signal\nfrom pathlib import Path\nfrom async_rl.run.directory import RunDir\n"
        "from async_rl.run.lock import RunLock\nlock = RunLock.inherit(RunDir(Path(sys.argv[1])), 'learner')\n"
        "print('inherited', lock is not None, flush=True)\nsignal.pause()\n"
    )
    watch = ParentWatch()
    process = watch.spawn(
        [sys.executable, "-c", child, str(run_dir.path)],
        environment={**os.environ, LOCK_FD: str(lock.fd)}, log=log, pass_fds=[lock.fd],
    )  # fmt: skip
    try:
        wait_until("the child", lambda: "inherited True" in log.read_text())
        # As if launch had died: its name is the first in the file.
        lines = run_dir.lock.read_text().replace(f'"pid":{os.getpid()}', '"pid":999999999').encode()
        os.pwrite(lock.fd, lines, 0)
        lock.close()
        yield process
    finally:
        process.kill()
        process.wait()
        watch.close()


def test_a_learner_whose_launch_was_superseded_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_dir = RunDir(tmp_path / "run")
    lock = lock_module.acquire(run_dir, "launch")
    newer = lock_module.acquire(run_dir, "learner", takeover=True)
    monkeypatch.setenv(LOCK_FD, str(lock.fd))
    with pytest.raises(RunError, match=rf"process {os.getpid()} \(async-rl learner\) has taken over"):
        RunLock.inherit(run_dir, "learner")
    lock.close()
    newer.close()
