"""Runs untrusted programs, each in an isolated process. The code reward calls it, from any thread.

A launcher process (see ``launcher``) isolates the programs. This module starts the launcher, sends it programs, and
replaces it if it fails. The first program is always ``PROBE``, which tries to break out of the sandbox and does no
harm. The output that a program should print is never sent to the launcher.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from async_rl.errors import SandboxError, SandboxFailedError
from async_rl.process.cgroup import MemoryKills, limit_text
from async_rl.process.child import PACKAGE_ROOT
from async_rl.process.helper import Helper
from async_rl.sandbox.child import ENVIRONMENT, Limits
from async_rl.sandbox.system import kernel_release

START_LIMIT_S = 60.0
"""Time limit in seconds for the launcher to start and isolate itself on a busy machine."""

GRACE_S = 20.0
"""Seconds after a program's time limit within which the launcher must report how the program ended."""

_OLDEST_KERNEL = (5, 14)
_STDERR_TAIL_BYTES = 2000
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

logger = logging.getLogger(__name__)

PROBE_ANSWER = b"confined\n"

PROBE = """
import os, socket, threading

path = input()

def succeeds(attempt):
    try:
        attempt()
    except (OSError, RuntimeError):
        return False
    return True

def start_too_many_threads():
    release = threading.Event()
    threads = [threading.Thread(target=release.wait, daemon=True) for _ in range(64)]
    try:
        for thread in threads:
            thread.start()
    finally:
        release.set()

attempts = {
    "it can open a socket": lambda: socket.socket(),
    "it can start a process": lambda: os._exit(0) if os.fork() == 0 else None,
    "it can run another program": lambda: os.execv("/usr/bin/true", ["true"]),
    "it sees processes": lambda: os.listdir("/proc"),
    "it sees a file of this machine": lambda: os.stat(path),
    "it sees the configuration of the machine": lambda: os.listdir("/etc"),
    "it can write outside its directory": lambda: open("/probe", "w"),
    "it can start any number of threads": start_too_many_threads,
    "it is not alone in its process namespace": lambda: None if os.getpid() != 1 else os.stat("/nowhere"),
}
found = [what for what, attempt in attempts.items() if succeeds(attempt)]
with open("scratch", "w") as file:
    file.write("x")
print("; ".join(found) or "confined")
"""


Outcome = Literal["ended", "timed_out"]


@dataclass(frozen=True, slots=True)
class Program:
    """A Python program and the input of one run.

    Attributes:
        source: the text of the program.
        stdin: the bytes on standard input, if the program is run as a script.
        function: the name of the function to call, which may be a method of the program's class ``Solution``. The
            output is its return value as JSON. If None, the program is run as a script.
        arguments: a JSON list of the arguments of ``function``.
        prelude: whether the program can use the names of common modules without an import.
    """

    source: str
    stdin: bytes = b""
    function: str | None = None
    arguments: str = "[]"
    prelude: bool = False


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of one run of a program.

    Attributes:
        outcome: ``timed_out`` if the program was killed at its time limit, else ``ended``.
        exit_code: the program's exit code. 0 means no error, -N that signal N killed the program. A hostile program can
            choose it.
        output: what the program printed, or the JSON of what its function returned, up to ``Limits.output_bytes``.
        stderr_tail: the end of the program's standard error, for people.
        wall_s: wall-clock seconds from the program's start to its end.
        cpu_s: processor seconds that the program used.
    """

    outcome: Outcome
    exit_code: int
    output: bytes
    stderr_tail: str
    wall_s: float
    cpu_s: float


class Sandbox:
    """Runs untrusted programs in isolated processes. Several threads may run programs at the same time.

    A launcher process is started, and its isolation is checked, when a Sandbox is created. ``counts`` has the number of
    ``programs`` that were run, of those that ``timed_out``, and of ``launchers`` that were started.

    Args:
        packages: installed packages, such as ``numpy``, that programs may import in addition to the standard library.
        allow_unsafe: if this machine can't isolate programs, log a warning and run them with limits only.
            ``is_isolated`` is False then.

    Raises:
        SandboxError: this machine can't isolate programs, and ``allow_unsafe`` is False. The message says what to do.
    """

    def __init__(self, *, packages: Sequence[str] = (), allow_unsafe: bool = False) -> None:
        self.counts = {"programs": 0, "timed_out": 0, "launchers": 0}
        self.is_isolated = True
        self._packages = list(packages)
        self._lock = threading.Lock()
        self._launcher: _Launcher | None = None
        self._memory_kills = MemoryKills()
        try:
            self._start_checked()
        except SandboxError as error:
            if not allow_unsafe:
                raise
            logger.warning("reward.code.allow_unsafe: running the model's programs UNPROTECTED: %s", error)
            self.is_isolated = False
            self._running()

    @property
    def launcher_pid(self) -> int | None:
        """The process id of the launcher. None if no launcher runs, for example after ``close``."""
        return None if self._launcher is None else self._launcher.pid

    def run(self, program: Program, limits: Limits) -> Ran:
        """Run ``program`` once, wait until it has ended, and return the result.

        The program is killed after ``limits.time_s`` seconds. If memory runs out, the kernel kills programs before
        other processes, whoever took the memory. So a program that was killed then is run a second time.

        Raises:
            SandboxFailedError: the sandbox itself failed twice. A program can't cause this error.
        """
        for attempt in (1, 2):
            launcher = self._running()
            num_kills = self._memory_kills.num_anywhere
            try:
                ran = launcher.run(program, limits)
                if ran.exit_code == -signal.SIGKILL and self._memory_kills.num_anywhere > num_kills:
                    how = "it is run again" if attempt == 1 else "the second time, so it counts as failed"
                    logger.warning("memory ran out (%s), and the kernel killed a program: %s", limit_text(), how)
                    if attempt == 1:
                        continue
            except (_LauncherLostError, SandboxFailedError) as error:
                # If memory ran out, the launcher may have been killed without fault: only a second loss counts.
                self._end(launcher)
                if attempt == 2:
                    raise SandboxFailedError(
                        f"the sandbox failed twice on one program: {error}; check that this machine has memory and "
                        f"processes left"
                    ) from error
                logger.warning("the sandbox's launcher process failed and is restarted: %s", error)
                continue
            with self._lock:
                self.counts["programs"] += 1
                self.counts["timed_out"] += ran.outcome == "timed_out"
            return ran
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Kill the launcher and all programs. A later call of ``run`` starts a new launcher."""
        with self._lock:
            launcher, self._launcher = self._launcher, None
        if launcher is not None:
            launcher.kill()

    def _running(self) -> _Launcher:
        with self._lock:
            if self._launcher is None:
                self._launcher = _Launcher(self._packages, isolated=self.is_isolated)
                self.counts["launchers"] += 1
            return self._launcher

    def _end(self, launcher: _Launcher) -> None:
        with self._lock:
            if self._launcher is launcher:
                self._launcher = None
        launcher.kill()

    def _start_checked(self) -> None:
        """Start the first launcher, and check that the program ``PROBE`` can't break out.

        Raises:
            SandboxError: the launcher does not start, or ``PROBE`` could break out.
        """
        launcher = self._running()
        limits = Limits(
            time_s=START_LIMIT_S, memory_bytes=1 << 30, output_bytes=1 << 16, scratch_bytes=1 << 16,
            max_threads=4,
        )  # fmt: skip
        try:
            # The program gets the path of this file, and must not find the file.
            with tempfile.NamedTemporaryFile() as secret:
                ran = launcher.run(Program(PROBE, stdin=secret.name.encode()), limits)
        except (_LauncherLostError, SandboxFailedError) as error:
            self._end(launcher)
            raise SandboxError(f"programs can't be isolated on this machine: {error}; {REMEDY}") from error
        if ran.output != PROBE_ANSWER:
            self._end(launcher)
            printed = (ran.output or ran.stderr_tail.encode()).decode(errors="replace").strip()
            raise SandboxError(
                f"the sandbox does not isolate programs on this machine: its test program should print "
                f"{PROBE_ANSWER.decode().strip()!r}, but the result was: {printed or ran}; {REMEDY}"
            )


REMEDY = (
    "set reward.code.endpoint to the address of an `async-rl verifier` on a machine that can isolate programs, or set "
    "reward.code.allow_unsafe = true to run the model's programs without protection (see docs/code_reward.md)"
)

_ADVICE = {
    "libseccomp": "install libseccomp (Debian, Ubuntu: apt install libseccomp2; Fedora: dnf install libseccomp)",
    "namespaces": "allow user namespaces (sysctl user.max_user_namespaces; on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container --security-opt seccomp=unconfined)",
    "mounts": "allow mounts inside user namespaces (on Ubuntu sysctl kernel.apparmor_restrict_unprivileged_userns=0; "
    "in a container --security-opt seccomp=unconfined --security-opt apparmor=unconfined)",
    "packages": "install the package where async-rl is installed, or change reward.code.packages",
}


class _LauncherLostError(Exception):
    """The launcher process has ended or does not answer."""


class _Launcher:
    """A launcher process, as its parent sees it.

    Raises:
        SandboxError: the launcher did not start, or can't isolate itself. The message says what to do.
    """

    def __init__(self, packages: list[str], *, isolated: bool) -> None:
        if isolated and kernel_release() < _OLDEST_KERNEL:
            needed, actual = (".".join(map(str, version)) for version in (_OLDEST_KERNEL, kernel_release()))
            raise SandboxError(f"the sandbox needs Linux {needed} or newer, got {actual}; {REMEDY}")
        settings = json.dumps({"packages": packages, "unsafe": not isolated})
        self._helper = Helper(
            "async_rl.sandbox.launcher", settings, environment=_environment(), kind=socket.SOCK_SEQPACKET
        )
        self._socket = self._helper.socket
        self._heard_s = 0.0
        self._socket.settimeout(START_LIMIT_S)
        try:
            first = json.loads(self._socket.recv(1 << 16) or b"{}")
        except (OSError, ValueError) as error:
            self.kill()
            raise SandboxError(
                f"the sandbox's launcher process sent no answer: {error}; see its output above, or {REMEDY}"
            ) from error
        self._socket.settimeout(None)
        if "ready" not in first:
            self.kill()
            step = first.get("refused", "start")
            cause = first.get("error", "the launcher process ended at once; see its output above")
            advice = _ADVICE.get(step)
            remedy = f"{advice}, or {REMEDY}" if advice else REMEDY
            raise SandboxError(f"programs can't be isolated on this machine (step: {step}): {cause}; {remedy}")

    @property
    def pid(self) -> int:
        return self._helper.pid

    def run(self, program: Program, limits: Limits) -> Ran:
        """Run one program, wait until it has ended, and return the result.

        Raises:
            _LauncherLostError: the launcher ended or does not answer.
            SandboxFailedError: the launcher could not run the program.
        """
        with ExitStack() as stack:
            files = [stack.enter_context(_memory_file(data)) for data in (_encoded(program), program.stdin)]
            output, errors = (stack.enter_context(_memory_file(None)) for _ in range(2))
            reply, their_reply = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, reply)
            try:
                socket.send_fds(
                    self._socket, [json.dumps(limits.to_record()).encode()], [*files, output, errors, their_reply]
                )
            except OSError as error:
                raise _LauncherLostError(f"can't reach the sandbox's launcher process: {error}") from error
            finally:
                os.close(their_reply)
            ended = self._read_reply(reply, limits.time_s + GRACE_S, asked_s=time.monotonic())
            return Ran(
                outcome="timed_out" if ended["timed_out"] else "ended",
                exit_code=ended["exit_code"],
                output=os.pread(output, limits.output_bytes, 0),
                stderr_tail=_tail(errors),
                wall_s=ended["wall_s"],
                cpu_s=ended["cpu_s"],
            )

    def _read_reply(self, reply: int, limit_s: float, *, asked_s: float) -> dict[str, Any]:
        """Read the launcher's report on a program from the pipe ``reply``, and return the values under ``ended``.

        It was asked for the program at ``asked_s`` (``time.monotonic``). Others may be started first, so reports on
        them are signs of life, too.

        Raises:
            _LauncherLostError: for ``limit_s`` seconds, it has reported on no program.
            SandboxFailedError: the launcher could not run the program.
        """
        data = b""
        poller = select.poll()
        poller.register(reply, select.POLLIN)
        while b"\n" not in data:
            remaining_s = max(asked_s, self._heard_s) + limit_s - time.monotonic()
            if remaining_s <= 0:
                raise _LauncherLostError(
                    f"the sandbox's launcher process did not report the result of any program for {limit_s:g} s, "
                    f"{GRACE_S:g} s more than the program's time limit"
                )
            if not poller.poll(remaining_s * 1000):
                continue
            chunk = os.read(reply, 1 << 16)
            if not chunk:
                raise _LauncherLostError("the sandbox's launcher process ended while a program ran")
            data += chunk
        self._heard_s = time.monotonic()
        report = json.loads(data.split(b"\n", 1)[0])
        if "failed" in report:
            raise SandboxFailedError(report["failed"])
        return report["ended"]

    def kill(self) -> None:
        """Kill the launcher. The kernel then kills the inner process, and that kills all programs."""
        self._helper.stop()


def _environment() -> dict[str, str]:
    """Return the launcher's environment: that of programs, and what its interpreter needs to find this async_rl only.

    Some interpreters don't start without ``LD_LIBRARY_PATH``.
    """
    loader = {"LD_LIBRARY_PATH": path} if (path := os.environ.get("LD_LIBRARY_PATH")) else {}
    own = {"PYTHONPATH": PACKAGE_ROOT, "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**ENVIRONMENT, **loader, **own}


def _encoded(program: Program) -> bytes:
    request = {"source": program.source, "function": program.function, "arguments": program.arguments}
    return json.dumps({**request, "prelude": program.prelude}).encode()


@contextmanager
def _memory_file(content: bytes | None) -> Iterator[int]:
    """Make a file in memory without a name, yield its descriptor, and close it.

    With ``content``, the file contains ``content``, is at its start, and can't be changed (it is sealed). If
    ``content`` is None, the file is empty and can be written.
    """
    fd = os.memfd_create("program", os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if content is not None else 0))
    try:
        if content is not None:
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
            os.lseek(fd, 0, os.SEEK_SET)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        yield fd
    finally:
        os.close(fd)


def _tail(fd: int) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, _STDERR_TAIL_BYTES, max(0, size - _STDERR_TAIL_BYTES)).decode(errors="replace")
