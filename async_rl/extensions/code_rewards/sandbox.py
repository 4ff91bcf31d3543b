"""Runs untrusted programs, each in an isolated process. The code reward calls it, from any thread.

A launcher process (``process/sandbox/``) isolates the programs, and ``program`` runs them there. This module starts the
launcher, sends it programs, and replaces it if it fails. The first program is always ``PROBE``, which tries to break
out of the sandbox and does no harm.
"""

from __future__ import annotations

import json
import logging
import signal
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from async_rl.errors import SandboxError, SandboxFailedError
from async_rl.process.cgroup import MemoryKills, limit_text
from async_rl.process.sandbox.client import START_LIMIT_S, Launcher, LauncherLostError, Ran
from async_rl.process.sandbox.limits import Limits

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

    @property
    def encoded(self) -> bytes:
        """What ``program`` reads."""
        request = {"source": self.source, "function": self.function, "arguments": self.arguments}
        return json.dumps({**request, "prelude": self.prelude}).encode()


class Sandbox:
    """Runs untrusted programs in isolated processes. Several threads may run programs at the same time.

    A launcher process is started, and its isolation is checked, when a Sandbox is created.

    Args:
        packages: installed packages, such as ``numpy``, that programs may import in addition to the standard library.
        allow_unsafe: if this machine can't isolate programs, log a warning and run them with limits only.
            ``is_isolated`` is False then.

    Raises:
        SandboxError: this machine can't isolate programs, and ``allow_unsafe`` is False. The message says what to do.
    """

    def __init__(self, *, packages: Sequence[str] = (), allow_unsafe: bool = False) -> None:
        self.is_isolated = True
        self._packages = list(packages)
        self._lock = threading.Lock()
        self._launcher: Launcher | None = None
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
            except (LauncherLostError, SandboxFailedError) as error:
                # If memory ran out, the launcher may have been killed without fault: only a second loss counts.
                self._end(launcher)
                if attempt == 2:
                    raise SandboxFailedError(
                        f"the sandbox failed twice on one program: {error}; check that this machine has memory and "
                        f"processes left"
                    ) from error
                logger.warning("the sandbox's launcher process failed and is restarted: %s", error)
                continue
            return ran
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Kill the launcher and all programs. A later call of ``run`` starts a new launcher."""
        with self._lock:
            launcher, self._launcher = self._launcher, None
        if launcher is not None:
            launcher.kill()

    def _running(self) -> Launcher:
        with self._lock:
            if self._launcher is None:
                self._launcher = Launcher(
                    "async_rl.extensions.code_rewards.program", self._packages, isolated=self.is_isolated, remedy=REMEDY
                )
            return self._launcher

    def _end(self, launcher: Launcher) -> None:
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
        except (LauncherLostError, SandboxFailedError) as error:
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
    "reward.code.allow_unsafe = true to run the model's programs without protection (see docs/rewards.md)"
)
