"""A command as PID 1, as in a container without an init: it ends at SIGTERM, reaps orphans, and gets Ctrl-C once."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys

import pytest

from async_rl.process.child import package_path
from tests.processes import children_of

DEADLINE_S = 60.0
BEGIN = "import os, signal, sys, time\nfrom async_rl.process.pid_one import leave_pid_one\n"

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a process namespace needs root and util-linux"
)


def as_pid_one(script: str, stdin: int | None = None) -> subprocess.Popen[str]:
    """Start ``script`` as PID 1 of a new process namespace."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", BEGIN + script]
    environment = {**os.environ, "PYTHONPATH": package_path({})}
    return subprocess.Popen(
        inside, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True, stdin=stdin
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        out, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, out


def test_sigterm_to_pid_one_ends_a_command_without_a_handler_of_its_own():
    process = as_pid_one("leave_pid_one(); print('ready', flush=True); signal.pause()")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    (pid_one,) = children_of(process.pid)
    os.kill(pid_one, signal.SIGTERM)
    assert finish(process) == (128 + signal.SIGTERM, "")


@pytest.mark.parametrize("code", [0, 7])
def test_pid_one_exits_with_the_code_of_the_command(code: int):
    assert finish(as_pid_one(f"leave_pid_one(); print(os.getpid()); sys.exit({code})")) == (code, "2\n")


def test_orphans_are_reaped_and_none_stays_a_zombie():
    script = """
leave_pid_one()
done, done_write = os.pipe()
for _ in range(20):
    if os.fork() == 0:
        if os.fork() == 0:  # its parent ends first, so that it is PID 1's child
            while os.getppid() != 1:
                time.sleep(0.001)
        os._exit(0)
    os.wait()
os.close(done_write)
os.read(done, 1)  # every orphan has ended: each held the other end
deadline = time.monotonic() + 30
def zombies():
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            stat = open(f"/proc/{pid}/stat").read()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it was reaped between the listing and the look
        if stat.rpartition(")")[2].split()[0] == "Z":
            found.append(stat)
    return found
while zombies() and time.monotonic() < deadline:
    time.sleep(0.01)
print(zombies())
"""
    assert finish(as_pid_one(script)) == (0, "[]\n")


def test_ctrl_c_on_the_terminal_reaches_the_command_once():
    script = """
import fcntl, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # as a container engine starts it with -t
leave_pid_one()
got = []
signal.signal(signal.SIGINT, lambda *_: (got.append("SIGINT"), print("got", flush=True)))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(10 * len(got)))
print("ready", flush=True)
while True:
    signal.pause()
"""
    terminal, stdin = pty.openpty()
    process = as_pid_one(script, stdin=stdin)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.write(terminal, b"\x03")
    assert process.stdout.readline() == "got\n"
    # PID 1 passes on what it got before this signal first, so a second SIGINT would be counted.
    (pid_one,) = children_of(process.pid)
    os.kill(pid_one, signal.SIGTERM)
    assert finish(process) == (10, "")
    os.close(terminal)
    os.close(stdin)
