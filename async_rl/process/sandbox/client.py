"""Starts a launcher process (``launcher``), and sends it what shall run isolated. Output and exit code come back.

Never send it what only the caller may know, such as the output that a program should print.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from async_rl.errors import SandboxError, SandboxFailedError
from async_rl.process.child import PACKAGE_ROOT
from async_rl.process.helper import Helper
from async_rl.process.sandbox.limits import ENVIRONMENT, Limits
from async_rl.process.sandbox.system import ADVICE, kernel_release

START_LIMIT_S = 60.0
"""Time limit in seconds for the launcher to start and isolate itself on a busy machine."""

GRACE_S = 20.0
"""Seconds after a program's time limit within which the launcher must report how the program ended."""

_OLDEST_KERNEL = (5, 14)
_STDERR_TAIL_BYTES = 2000
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

Outcome = Literal["ended", "timed_out"]


class Request(Protocol):
    """What shall run once. The module of the launcher's process reads it in the process that it forks for the run.

    ``encoded`` are the bytes of the first descriptor, at most some megabytes; ``stdin`` are those on standard input.
    """

    @property
    def encoded(self) -> bytes: ...

    @property
    def stdin(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of one run of a program.

    Attributes:
        outcome: ``timed_out`` if the program was killed at its time limit, else ``ended``.
        exit_code: the program's exit code. 0 means no error, -N that signal N killed the program. A hostile program can
            choose it.
        output: what the program printed, or the JSON of what its function returned, up to ``Limits.output_bytes``.
        stderr_tail: the end of the program's standard error, for people.
    """

    outcome: Outcome
    exit_code: int
    output: bytes
    stderr_tail: str


class LauncherLostError(Exception):
    """The launcher process has ended or does not answer."""


class Launcher:
    """A launcher process, as its parent sees it.

    Args:
        module: the module that it runs, which calls ``launcher.main``.
        packages: installed packages that it imports for programs. Without any, they get the standard library alone.
        isolated: whether programs are isolated. If not, they have limits only.
        remedy: what to do on a machine that can't isolate them, for messages.

    Raises:
        SandboxError: the launcher did not start, or can't isolate itself. The message says what to do.
    """

    def __init__(self, module: str, packages: Sequence[str], *, isolated: bool, remedy: str) -> None:
        if isolated and kernel_release() < _OLDEST_KERNEL:
            needed, actual = (".".join(map(str, version)) for version in (_OLDEST_KERNEL, kernel_release()))
            raise SandboxError(f"the sandbox needs Linux {needed} or newer, got {actual}; {remedy}")
        settings = json.dumps({"packages": list(packages), "unsafe": not isolated})
        self._helper = Helper(module, settings, environment=_environment(), kind=socket.SOCK_SEQPACKET)
        self._socket = self._helper.socket
        self._heard_s = 0.0
        self._socket.settimeout(START_LIMIT_S)
        try:
            first = json.loads(self._socket.recv(1 << 16) or b"{}")
        except (OSError, ValueError) as error:
            self.kill()
            raise SandboxError(
                f"the sandbox's launcher process sent no answer: {error}; see its output above, or {remedy}"
            ) from error
        self._socket.settimeout(None)
        if "ready" not in first:
            self.kill()
            step = first.get("refused", "start")
            cause = first.get("error", "the launcher process ended at once; see its output above")
            advice = ADVICE.get(step)
            fix = f"{advice}, or {remedy}" if advice else remedy
            raise SandboxError(f"programs can't be isolated on this machine (step: {step}): {cause}; {fix}")

    @property
    def pid(self) -> int:
        return self._helper.pid

    def run(self, request: Request, limits: Limits) -> Ran:
        """Run one program, wait until it has ended, and return the result.

        Raises:
            LauncherLostError: the launcher ended or does not answer.
            SandboxFailedError: the launcher could not run the program.
        """
        with ExitStack() as stack:
            files = [stack.enter_context(_memory_file(data)) for data in (request.encoded, request.stdin)]
            output, errors = (stack.enter_context(_memory_file(None)) for _ in range(2))
            reply, their_reply = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, reply)
            try:
                socket.send_fds(
                    self._socket, [json.dumps(asdict(limits)).encode()], [*files, output, errors, their_reply]
                )
            except OSError as error:
                raise LauncherLostError(f"can't reach the sandbox's launcher process: {error}") from error
            finally:
                os.close(their_reply)
            ended = self._read_reply(reply, limits.time_s + GRACE_S, asked_s=time.monotonic())
            return Ran(
                outcome="timed_out" if ended["timed_out"] else "ended",
                exit_code=ended["exit_code"],
                output=os.pread(output, limits.output_bytes, 0),
                stderr_tail=_tail(errors),
            )

    def _read_reply(self, reply: int, limit_s: float, *, asked_s: float) -> dict[str, Any]:
        """Read the launcher's report on a program from the pipe ``reply``, and return the values under ``ended``.

        It was asked for the program at ``asked_s`` (``time.monotonic``). Others may be started first, so reports on
        them are signs of life, too.

        Raises:
            LauncherLostError: for ``limit_s`` seconds, it has reported on no program.
            SandboxFailedError: the launcher could not run the program.
        """
        data = b""
        poller = select.poll()
        poller.register(reply, select.POLLIN)
        while b"\n" not in data:
            remaining_s = max(asked_s, self._heard_s) + limit_s - time.monotonic()
            if remaining_s <= 0:
                raise LauncherLostError(
                    f"the sandbox's launcher process did not report the result of any program for {limit_s:g} s, "
                    f"{GRACE_S:g} s more than the program's time limit"
                )
            if not poller.poll(remaining_s * 1000):
                continue
            chunk = os.read(reply, 1 << 16)
            if not chunk:
                raise LauncherLostError("the sandbox's launcher process ended while a program ran")
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
