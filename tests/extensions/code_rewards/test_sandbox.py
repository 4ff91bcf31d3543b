"""What programs may do, what limits they have, and what happens when the launcher or its parent dies."""

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.errors import SandboxError, SandboxFailedError
from async_rl.extensions.code_rewards.program import UNUSABLE_EXIT
from async_rl.extensions.code_rewards.sandbox import Program, Sandbox
from async_rl.process.sandbox import client
from async_rl.process.sandbox.client import LauncherLostError, Ran
from async_rl.process.sandbox.limits import Limits
from tests.processes import children_of, wait_until_ended

ROOT = Path(__file__).resolve().parents[3]
LIMITS = Limits(time_s=30.0, memory_bytes=1 << 30, output_bytes=1 << 20, scratch_bytes=4 << 20, max_threads=16)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(packages=["numpy"])
    yield made
    made.close()


def output(sandbox: Sandbox, source: str, stdin: bytes = b"", limits: Limits = LIMITS) -> str:
    ran = sandbox.run(Program(source, stdin=stdin), limits)
    assert ran.exit_code == 0, ran.stderr_tail
    return ran.output.decode()


def running(launcher: int | None) -> tuple[int, list[int]]:
    """The process in which a launcher starts programs, and descriptors of it, the launcher and a program that runs."""
    assert launcher is not None
    (inner,) = children_of(launcher)
    while not (programs := children_of(inner)):
        pass
    return inner, [os.pidfd_open(pid) for pid in (launcher, inner, *programs)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print(int(input()) + int(input()))", "3\n"),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", "3\n"),
        ("print(sum(map(int, open(0).read().split())))", "3\n"),
        ("import sys\nsys.stdout.buffer.write(sys.stdin.buffer.readline())", "1\n"),
        ("import threading as t\nt.stack_size(1 << 27)\nt.Thread(target=lambda: print(input())).start()", "1\n"),
        ("import atexit\natexit.register(lambda: print('bye'))\nprint('hello')", "hello\nbye\n"),
        ("if __name__ == '__main__': print('main')", "main\n"),
        ("def f(n): return n and 1 + f(n - 1)\nprint(f(100000))", "100000\n"),
        ("import numpy as np\nprint(int(np.arange(5).sum()))", "10\n"),
        ("import random\nprint(random.random(), list({'a', 'b', 'c'}), hash('x'))", None),  # whatever it is
        ("import asyncio\nasync def f(): return 7\nprint(asyncio.run(f()))", "7\n"),
        ("import dataclasses, pickle\n@dataclasses.dataclass\nclass A:\n    x: int = 1\n"
         "print(pickle.loads(pickle.dumps(A())))", "A(x=1)\n"),
        ("open('f', 'w').write('kept')\nprint(open('f').read())", "kept\n"),
        ("import tempfile\nwith tempfile.TemporaryFile() as f: print(f.write(b'abc'))", "3\n"),
        ("import resource\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 28, -1))\nprint('ok')", "ok\n"),
        ("import sqlite3, ssl, decimal, zoneinfo, hashlib\nprint(hashlib.md5(b'').hexdigest()[:4])", "d41d\n"),
        ("print('\u00e9\u4e2d')", "\u00e9\u4e2d\n"),
        ("import sys, os\nprint(sys.argv, os.getcwd(), os.environ.get('HOME'))", "['program.py'] /scratch /scratch\n"),
    ],
)  # fmt: skip
def test_ordinary_programs_run(sandbox: Sandbox, source: str, expected: str | None):
    found = output(sandbox, source, b"1\n2\n")
    assert found == (output(sandbox, source) if expected is None else expected)


def test_a_function_is_called_and_what_it_returns_is_serialised(sandbox: Sandbox):
    source = "def f(a, b):\n    print('noise')\n    return (a, [b], {'k': None, 1: 2.5})"
    ran = sandbox.run(Program(source, function="f", arguments='[1, "x"]'), LIMITS)
    assert ran.output == b'[1, ["x"], {"k": null, "1": 2.5}]'
    solution = "class Solution:\n    def f(self, a): return a + 1"
    assert sandbox.run(Program(solution, function="f", arguments="[1]"), LIMITS).output == b"2"


def test_the_prelude_gives_common_names_and_hides_no_builtin(sandbox: Sandbox):
    source = (
        "print(sqrt(4), Counter('aab')['a'], math.pi > 3, pow(2, 3, 5), heapq.nsmallest(1, [2, 1]), List is not None)"
    )
    assert sandbox.run(Program(source, prelude=True), LIMITS).output == b"2.0 2 True 3 [1] True\n"
    ran = sandbox.run(Program(source), LIMITS)
    assert ran.exit_code != 0
    assert "NameError" in ran.stderr_tail


@pytest.mark.parametrize(
    ("program", "exit_code", "told"),
    [
        (Program("def"), UNUSABLE_EXIT, "SyntaxError"),
        (Program("x = 1", function="f"), UNUSABLE_EXIT, "a function f, got none"),
        (Program("x = 1\ny = x / 0"), 1, 'File "program.py", line 2'),
    ],
)
def test_what_is_wrong_with_a_program_is_told(sandbox: Sandbox, program: Program, exit_code: int, told: str):
    ran = sandbox.run(program, LIMITS)
    assert ran.exit_code == exit_code
    assert told in ran.stderr_tail


def test_threads_are_counted_and_processes_refused(sandbox: Sandbox):
    assert "PermissionError" in sandbox.run(Program("import os\nos.fork()"), LIMITS).stderr_tail
    count = """
import threading
release, made = threading.Event(), 0
try:
    while True:
        threading.Thread(target=release.wait).start()
        made += 1
except RuntimeError:
    print(made)
release.set()
"""
    # Sixteen threads, of which the program's own is one.
    assert output(sandbox, count) == "15\n"


def test_output_and_files_are_cut_at_their_limits(sandbox: Sandbox):
    ran = sandbox.run(Program("print('x' * (2 << 20))"), LIMITS)
    assert ran.exit_code != 0
    assert len(ran.output) <= LIMITS.output_bytes
    assert "File too large" in sandbox.run(Program("open('f', 'w').write('x' * (2 << 20))"), LIMITS).stderr_tail
    many = "for i in range(9):\n    open(str(i), 'w').write('x' * (1 << 19))"
    assert "No space left" in sandbox.run(Program(many), LIMITS).stderr_tail


def test_a_large_input_arrives_whole_and_can_not_be_changed(sandbox: Sandbox):
    data = b"0123456789" * 1_000_000
    assert output(sandbox, "import sys\nprint(len(sys.stdin.read()))", data) == "10000000\n"
    assert "not permitted" in sandbox.run(Program("import os\nos.write(0, b'x')", stdin=b"abc"), LIMITS).stderr_tail


def test_a_launcher_that_is_killed_is_replaced_and_the_program_run_again():
    with contextlib.closing(Sandbox()) as sandbox, concurrent.futures.ThreadPoolExecutor(1) as pool:
        ran = pool.submit(sandbox.run, Program("import time\ntime.sleep(1)\nprint('done')"), LIMITS)
        os.kill(running(sandbox.launcher_pid)[0], signal.SIGKILL)
        assert ran.result().output == b"done\n"


class KilledPrograms:
    """A launcher whose first ``num_killed`` programs are killed by SIGKILL."""

    def __init__(self, launcher: Any, num_killed: int, kills: Any) -> None:
        self._launcher, self._num_left, self._kills = launcher, num_killed, kills
        self.num_runs = 0

    def run(self, program: Program, limits: Limits) -> Ran:
        self.num_runs += 1
        ran = self._launcher.run(program, limits)
        if self.num_runs > self._num_left:
            return ran
        self._kills.num_anywhere += self._kills.step
        return replace(ran, exit_code=-signal.SIGKILL)


@pytest.mark.parametrize(
    ("num_killed", "is_counted", "runs", "exit_code"), [(1, True, 2, 0), (2, True, 2, -9), (1, False, 1, -9)]
)
def test_a_program_that_is_killed_when_memory_runs_out_is_run_once_more(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, num_killed: int, is_counted: bool, runs: int, exit_code: int
):
    kills = SimpleNamespace(num_anywhere=5, step=int(is_counted))
    launcher = KilledPrograms(sandbox._running(), num_killed, kills)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(sandbox, "_memory_kills", kills)
    monkeypatch.setattr(sandbox, "_running", lambda: launcher)
    assert sandbox.run(Program("print(1)"), LIMITS).exit_code == exit_code
    assert launcher.num_runs == runs


def test_a_sandbox_that_fails_twice_says_so_and_judges_nothing(monkeypatch: pytest.MonkeyPatch):
    sandbox = Sandbox()
    monkeypatch.setattr(client, "GRACE_S", -29.5)  # answers are given up on before they can come
    with pytest.raises(SandboxFailedError, match="failed twice"):
        sandbox.run(Program("import time\ntime.sleep(20)"), LIMITS)
    sandbox.close()


@pytest.mark.parametrize("since_report_s", [0.0, 60.0])
def test_a_launcher_that_reports_on_other_programs_is_not_given_up_on(since_report_s: float):
    """A program whose own limit of 30 s is over, because others had to be started first."""
    with contextlib.closing(Sandbox()) as sandbox:
        launcher = sandbox._running()  # pyright: ignore[reportPrivateUsage]
        launcher._heard_s = time.monotonic() - since_report_s  # pyright: ignore[reportPrivateUsage]
        reply, theirs = os.pipe()
        os.write(theirs, b'{"ended": {"exit_code": 0}}\n')
        os.close(theirs)
        is_lost = pytest.raises(LauncherLostError, match="any program")
        with is_lost if since_report_s else contextlib.nullcontext():
            assert launcher._read_reply(reply, 30.0, asked_s=time.monotonic() - 40.0) == {"exit_code": 0}
        os.close(reply)


def test_close_ends_the_launcher_and_the_programs_that_run():
    sandbox = Sandbox()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        ran = pool.submit(sandbox.run, Program("import time\ntime.sleep(20)"), LIMITS)
        inner, pidfds = running(sandbox.launcher_pid)
        os.kill(inner, signal.SIGSTOP)  # even one that does not answer
        sandbox.close()
        assert all(wait_until_ended(pidfd) for pidfd in pidfds)
        # The run starts a launcher of its own for its second try.
        while sandbox.launcher_pid is None:
            assert not ran.done()
        sandbox.close()
        with pytest.raises(SandboxFailedError):
            ran.result()
    assert sandbox.launcher_pid is None


def test_everything_ends_when_the_parent_is_killed():
    program = (
        "import sys, threading, time; from async_rl.extensions.code_rewards.sandbox import *\n"
        "sandbox = Sandbox(); limits = Limits(60.0, 1 << 29, 1 << 20, 1 << 20, 8)\n"
        "sleep = Program('import time; time.sleep(50)')\n"
        "threading.Thread(target=sandbox.run, args=(sleep, limits), daemon=True).start()\n"
        "print(sandbox.launcher_pid, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        _, pidfds = running(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        assert all(wait_until_ended(pidfd) for pidfd in pidfds)


def test_only_packages_that_are_named_can_be_imported_and_a_missing_one_is_refused_by_name():
    with pytest.raises(SandboxError, match=r"No module named 'no_such_package'.*reward\.code\.packages"):
        Sandbox(packages=["no_such_package"])
    with contextlib.closing(Sandbox()) as sandbox:
        assert "No module named 'numpy'" in sandbox.run(Program("import numpy"), LIMITS).stderr_tail
        assert "No module named 'pydantic'" in sandbox.run(Program("import pydantic"), LIMITS).stderr_tail


def test_an_old_kernel_is_refused_or_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(client, "kernel_release", lambda: (5, 10))
    with pytest.raises(SandboxError, match=r"needs Linux 5\.14.*reward\.code\.endpoint.*allow_unsafe"):
        Sandbox()
    sandbox = Sandbox(allow_unsafe=True)
    assert not sandbox.is_isolated
    assert "UNPROTECTED" in caplog.text
    assert output(sandbox, "import os\nopen('f', 'w')\nprint(os.listdir('.'))") == "['f']\n"
    limits = replace(LIMITS, time_s=0.5)
    assert sandbox.run(Program("while True: pass"), limits).outcome == "timed_out"
    assert "MemoryError" in sandbox.run(Program("x = b'a' * (1 << 40)"), LIMITS).stderr_tail
    sandbox.close()
