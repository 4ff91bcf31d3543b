"""`launch` as in a hardened container: PID 1, a read-only root, no ``/dev/shm``, no home, one volume to write to."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.process.child import package_path
from tests.end_to_end.harness import check_ledger, metrics, processes_of, wait_until, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.processes import children_of

SCRIPT = """
set -e
volume=$1; shift
mount --make-rprivate /
mount --bind "$volume" "$volume"
dev=$(mktemp -d -p "$volume")
mount -t tmpfs -o size=1m none "$dev"
for name in null zero full random urandom tty; do : > "$dev/$name"; mount --bind /dev/$name "$dev/$name"; done
ln -s /proc/self/fd "$dev/fd"
mount -o remount,ro "$dev"
mount --rbind "$dev" /dev
mount -o remount,bind,ro /
if [ -e /dev/shm ] || touch /no-such-file 2> /dev/null; then echo "the root can be written" >&2; exit 99; fi
cd "$volume"
exec "$@"
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="namespaces need root and util-linux"
    ),
]


def contained(volume: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start an ``async-rl`` command as PID 1 of a process namespace in which only ``volume`` can be written."""
    (volume / "tmp").mkdir(exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": package_path({}),
        "HOME": "/home/nobody-has-this",
        "TMPDIR": str(volume / "tmp"),
        "OMP_NUM_THREADS": "1",
        "ASYNC_RL_TEST": str(volume),
    }
    inside = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", SCRIPT, "sh"]
    with (volume / "launch.log").open("ab") as log:
        return subprocess.Popen(
            [*inside, str(volume), sys.executable, "-m", "async_rl", *arguments],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def logs(volume: Path) -> str:
    """All that the processes of the run said."""
    files = [volume / "launch.log", *sorted((volume / "run/logs").glob("*.log"))]
    return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')}" for file in files)


def test_a_run_needs_a_volume_alone_and_sigterm_to_pid_one_saves_its_last_step(tmp_path: Path):
    raw = tiny_config(tmp_path, write_tiny_task(tmp_path), learner={"steps": 10_000}, checkpoint={"every": 0})
    config = write_config(tmp_path / "config.toml", raw)

    def last_step() -> int:
        return [0, *(row["step"] for row in metrics(tmp_path / "run") if "version" in row)][-1]

    launch = contained(tmp_path, "launch", str(config))
    try:
        wait_until("two steps", lambda: launch.poll() is not None or last_step() >= 2)
        assert launch.poll() is None, logs(tmp_path)
        (pid_one,) = children_of(launch.pid)
        os.kill(pid_one, signal.SIGTERM)
        assert launch.wait(60) == 128 + signal.SIGTERM, logs(tmp_path)
    finally:
        launch.kill()
    step = last_step()
    assert (tmp_path / "run/checkpoints/latest").read_text().strip() == f"step-{step:06d}"
    assert processes_of(f"ASYNC_RL_TEST={tmp_path}") == []
    again = contained(tmp_path, "launch", str(config), "--set", f"learner.steps={step + 2}")
    try:
        assert again.wait(600) == 0, logs(tmp_path)
    finally:
        again.kill()
    said = logs(tmp_path)
    assert check_ledger(tmp_path / "run")["groups"]["trained"] == (step + 2) * 4
    assert (tmp_path / "run/curve.png").exists(), said
    for trouble in ("Read-only file system", "Traceback", "Warning", "Permission denied", "No such file", "MPLCONFIG"):
        assert trouble not in said, said
