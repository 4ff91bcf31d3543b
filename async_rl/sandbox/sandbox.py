"""Runs untrusted programs, each of them isolated. Called by the code reward, from any thread.

The launcher process isolates them (``launcher``). This side starts it, gives it one program at a time from each thread,
and kills and replaces it if it fails. A program's expected output never leaves this side. Before any other program the
sandbox runs ``PROBE``, a harmless program that tries to break out.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from async_rl.errors import SandboxError, SandboxFailedError
from async_rl.process.child import PACKAGE_ROOT, module_command
from async_rl.sandbox.child import ENVIRONMENT, Limits
from async_rl.sandbox.system import kernel_release

START_LIMIT_S = 60.0
"""Time limit for the launcher to start and isolate itself on a loaded machine."""

GRACE_S = 20.0
"""Extra time, beyond a program's limit, for the launcher to report how the program ended."""

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

    With ``function``, the program is run as a module, then its function of that name (or the method of its class
    ``Solution``) is called with ``arguments``, a JSON list; what it returns is the output, as JSON. Without, it is run
    as a script that reads ``stdin``. ``prelude`` gives it the names of common modules without an import.
    """

    source: str
    stdin: bytes = b""
    function: str | None = None
    arguments: str = "[]"
    prelude: bool = False


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of one run.

    Attributes:
        outcome: ``timed_out`` if it was killed at its time limit.
        exit_code: 0 if all went well; negative: killed by that signal. The program can choose it.
        output: standard output, or the JSON of what was returned; cut at ``output_bytes``.
        stderr_tail: the end of standard error, for people.
        wall_s: seconds from the request to its end.
        cpu_s: processor seconds.
    """

    outcome: Outcome
    exit_code: int
    output: bytes
    stderr_tail: str
    wall_s: float
    cpu_s: float


class Sandbox:
    """Runs programs with one launcher, which is started and checked at once. Any number of threads may run programs.

    ``counts`` has ``programs``, ``timed_out``, and ``launchers`` (started).

    Args:
        packages: installed packages that programs may import beyond the standard library, such as ``numpy``.
        allow_unsafe: if programs can't be isolated, run them with limits only, and log a warning. ``is_isolated`` says
            whether they are.

    Raises:
        SandboxError: this machine can't isolate programs; the message says what to do.
    """

    def __init__(self, *, packages: Sequence[str] = (), allow_unsafe: bool = False) -> None:
        self.counts = {"programs": 0, "timed_out": 0, "launchers": 0}
        self.is_isolated = True
        self._packages = list(packages)
        self._lock = threading.Lock()
        self._launcher: _Launcher | None = None
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
        """Process id of the running launcher; None after ``close``."""
        return None if self._launcher is None else self._launcher.process.pid

    def run(self, program: Program, limits: Limits) -> Ran:
        """Run ``program`` once and wait for its end, at most ``limits.time_s`` (and ``GRACE_S`` if the launcher hangs).

        Raises:
            SandboxFailedError: the sandbox itself failed twice. A program can't cause it.
        """
        for attempt in (1, 2):
            launcher = self._running()
            try:
                ran = launcher.run(program, limits)
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
        """Kill the launcher and every program; the next ``run`` would start it again."""
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
        """Start the launcher for the first time, and check that ``PROBE`` can't break out."""
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
            raise SandboxError(f"programs can't be isolated here: {error}; {REMEDY}") from error
        if ran.output != PROBE_ANSWER:
            self._end(launcher)
            found = (ran.output or ran.stderr_tail.encode()).decode(errors="replace").strip()
            raise SandboxError(f"the sandbox does not isolate programs on this machine: {found or ran}; {REMEDY}")


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
    """The launcher ended or does not answer."""


class _Launcher:
    """The parent's end of a running launcher process."""

    def __init__(self, packages: list[str], *, isolated: bool) -> None:
        if isolated and kernel_release() < _OLDEST_KERNEL:
            needed, found = (".".join(map(str, version)) for version in (_OLDEST_KERNEL, kernel_release()))
            raise SandboxError(f"the sandbox needs Linux {needed} or newer, got {found}; {REMEDY}")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = _start_process(theirs.fileno(), {"packages": packages, "unsafe": not isolated})
        self._finalizer = weakref.finalize(self, _kill, self.process, self._socket)
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
            raise SandboxError(f"programs can't be isolated here ({step}): {cause}; {remedy}")

    def run(self, program: Program, limits: Limits) -> Ran:
        """Run one program. Raises ``_LauncherLostError`` or ``SandboxFailedError``; a new launcher may succeed."""
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
            ended = _read_reply(reply, time.monotonic() + limits.time_s + GRACE_S)
            return Ran(
                outcome="timed_out" if ended["timed_out"] else "ended",
                exit_code=ended["exit_code"],
                output=os.pread(output, limits.output_bytes, 0),
                stderr_tail=_tail(errors),
                wall_s=ended["wall_s"],
                cpu_s=ended["cpu_s"],
            )

    def kill(self) -> None:
        """End the launcher, and with it every program."""
        self._finalizer()


def _start_process(control: int, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    # -P and the package's own root: the launcher must find this async_rl, and no module of the working directory.
    return subprocess.Popen(
        module_command("async_rl.sandbox.launcher", str(control), json.dumps(settings), flags=("-P", "-s", "-B")),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**ENVIRONMENT, **_loader_environment(), "PYTHONPATH": PACKAGE_ROOT},
        pass_fds=(control,),
        start_new_session=True,
        cwd="/",
    )


def _loader_environment() -> dict[str, str]:
    """Keep ``LD_LIBRARY_PATH``: some interpreters need it to find their own shared library."""
    return {"LD_LIBRARY_PATH": path} if (path := os.environ.get("LD_LIBRARY_PATH")) else {}


def _kill(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()  # the kernel then kills the inner process, and that kills all programs
    process.wait()


def _encoded(program: Program) -> bytes:
    request = {"source": program.source, "function": program.function, "arguments": program.arguments}
    return json.dumps({**request, "prelude": program.prelude}).encode()


@contextmanager
def _memory_file(content: bytes | None) -> Iterator[int]:
    """A file in memory without a name: ``content``, sealed, at its start; or an empty one to be written."""
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


def _read_reply(reply: int, deadline_s: float) -> dict[str, Any]:
    """Read the launcher's report.

    Raises:
        _LauncherLostError: no complete report came by ``deadline_s``.
        SandboxFailedError: the launcher could not run the program.
    """
    data = b""
    poller = select.poll()
    poller.register(reply, select.POLLIN)
    while b"\n" not in data:
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0 or not poller.poll(remaining_s * 1000):
            raise _LauncherLostError(
                f"the sandbox's launcher process did not report a program's result within {GRACE_S:g} s after its limit"
            )
        chunk = os.read(reply, 1 << 16)
        if not chunk:
            raise _LauncherLostError("the sandbox's launcher process ended while a program ran")
        data += chunk
    report = json.loads(data.split(b"\n", 1)[0])
    if "failed" in report:
        raise SandboxFailedError(report["failed"])
    return report["ended"]


def _tail(fd: int) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, _STDERR_TAIL_BYTES, max(0, size - _STDERR_TAIL_BYTES)).decode(errors="replace")
