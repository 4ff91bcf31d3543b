"""The launcher process. It isolates itself from the machine, then forks an isolated child process for every program.

``client.Launcher`` starts it with the command ``python -m MODULE SOCKET_FD SETTINGS_JSON``. MODULE calls ``main``, and
gives it what loads modules for programs and what runs a program.

The launcher is two processes. The *outer* process isolates itself from the machine with new namespaces (user, mount,
network, IPC, host name, process ids), a root directory that has only the interpreter's libraries, and an unprivileged
user. It then forks the *inner* process, which is process 1 of the new process namespace and serves the socket. When the
inner process ends, all programs end.

On the socket (SOCK_SEQPACKET) the launcher first sends ``{"ready": true}`` or ``{"refused": step, "error": ...}``. Then
it receives one request for each program: the ``Limits`` as JSON, and five descriptors (program, standard input, output,
standard error, pipe for the reply). On this pipe it sends ``{"ended": ...}``, or ``{"failed": ...}`` if the sandbox
failed. The launcher never reads a program, so that children can't find other programs in the memory that they inherit.

If the setting ``"unsafe"`` is true, nothing is isolated. Programs only get limits and a session each.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from async_rl.process.child import be_killed_first, kill_group
from async_rl.process.sandbox import system
from async_rl.process.sandbox.limits import ENVIRONMENT, Limits, confine, set_limits
from async_rl.process.sandbox.system import build_filter

NOBODY = 65534
"""The user id and group id that programs run with if root starts the launcher."""

NUM_DESCRIPTORS = 5
REQUEST_BYTES = 4096
_ORPHAN_CHECK_S = 1.0


Load = Callable[[Sequence[str]], Any]
"""A function of the names of packages. It imports what programs use, before the launcher isolates itself, and returns
what ``Run`` gets of it. It may raise ImportError."""
Run = Callable[[Sequence[int], Callable[[], None], Any], NoReturn]
"""A function that the process of a program calls. It gets the descriptors of the request, a function that confines the
process, and what ``Load`` returned. It ends the process."""
_Body = Callable[[Sequence[int], Callable[[], None]], NoReturn]


def main(load: Load, run: Run) -> None:
    """Be the launcher: the body of a module that ``client.Launcher`` starts."""
    parent_pid, control, settings = os.getppid(), int(sys.argv[1]), json.loads(sys.argv[2])
    _leave_the_parent()
    steps, isolated = _Steps(control), not settings["unsafe"]
    seccomp_filter = b""
    if isolated:
        with steps("libseccomp"):
            seccomp_filter = build_filter()
    libraries = system.library_paths(with_packages=bool(settings["packages"]))
    visible = system.visible_paths(libraries)
    sys.path[:] = libraries
    with steps("packages"):
        loaded = load(settings["packages"])
    if isolated:
        with steps("namespaces"):
            _isolate(visible, steps)
    inner = os.fork()
    if inner == 0:
        _serve(control, seccomp_filter, lambda fds, confine_here: run(fds, confine_here, loaded))
    os.close(control)
    _wait_for(inner, parent_pid)


def _leave_the_parent() -> None:
    """Take a session and a directory that are not the parent's. Programs must not see its arguments and environment."""
    os.setsid()
    os.chdir("/")
    os.dup2(2, 1)
    sys.argv[:] = ["launcher"]
    for name in list(os.environ):
        if name not in ENVIRONMENT:
            del os.environ[name]


class _Steps:
    """A context manager for the steps of isolating the launcher, as in ``with steps("mounts"): ...``.

    If a step fails, it sends the name of the step and the error to the parent, and ends the launcher.
    """

    def __init__(self, control: int) -> None:
        self._control = control
        self._name = ""

    def __call__(self, name: str) -> _Steps:
        self._name = name
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (OSError, RuntimeError, ImportError)):
            _send(self._control, {"refused": self._name, "error": str(error)})
            os._exit(1)


def _isolate(visible: list[str], steps: _Steps) -> None:
    """Give this process new namespaces, a new root directory with the paths in ``visible``, and an unprivileged user.

    All processes that it starts afterwards inherit these.
    """
    spaces = system.CLONE_NEWNS | system.CLONE_NEWNET | system.CLONE_NEWIPC | system.CLONE_NEWUTS
    spaces |= system.CLONE_NEWCGROUP | system.CLONE_NEWPID
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    be_killed_first()
    if os.geteuid() == 0:
        # Root's limit on processes does not bind, and its files could be read: become nobody. The libraries are
        # mounted before, for their directories may be closed to nobody.
        try:
            system.unshare(system.CLONE_NEWNS)
        except PermissionError:  # a container may forbid this to root
            system.unshare_mapped(system.CLONE_NEWNS)
        steps("mounts")
        system.enter_root(visible)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        system.prctl(system.PR_SET_DUMPABLE, 1)  # or this process may not write its own uid_map
        steps("namespaces")
        system.unshare_with_user(spaces, proc)
    else:
        system.unshare_with_user(spaces, proc)
        steps("mounts")
        system.enter_root(visible)
    os.close(proc)
    socket.sethostname("sandbox")


def _wait_for(inner: int, parent_pid: int) -> None:
    """Wait until the inner process, whose id is ``inner``, has ended. Kill it when the parent dies."""
    pidfd = os.pidfd_open(inner)
    while not select.select([pidfd], [], [], _ORPHAN_CHECK_S)[0]:
        if os.getppid() != parent_pid:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _serve(control: int, seccomp_filter: bytes, run: _Body) -> NoReturn:
    """Run programs in the inner process until the other end of the socket ``control`` is closed."""
    system.prctl(system.PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.collect()
    gc.freeze()  # garbage collections skip these objects, so children go on sharing their pages
    _send(control, {"ready": True})
    if seccomp_filter:
        _Server(control, _Isolation(seccomp_filter), run).serve()
    else:
        with tempfile.TemporaryDirectory(prefix="async-rl-unsafe-", ignore_cleanup_errors=True) as directory:
            _Server(control, _Unprotected(directory), run).serve()
    os._exit(0)


class _Isolation:
    """Forks and isolates the processes of programs. ``_Unprotected`` has the same methods, without isolation."""

    def __init__(self, seccomp_filter: bytes) -> None:
        self._filter = seccomp_filter
        # A pidfd of this process identifies its process namespace, and needs no /proc.
        self._own_namespace = os.pidfd_open(os.getpid())

    def fork(self) -> int:
        """Fork a process like ``os.fork``. The child is process 1 of a new process namespace.

        When the child ends, the kernel kills all processes in this namespace.
        """
        system.unshare(system.CLONE_NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                system.setns(self._own_namespace, system.CLONE_NEWPID)
        return pid

    def confine(self, limits: Limits) -> None:
        confine(limits, self._filter)

    def clean_up(self, pid: int) -> None:
        """Do nothing, because the kernel removes a program's namespaces and files when the program ends."""


class _Unprotected:
    """Forks the processes of programs without isolation, for ``reward.code.allow_unsafe``.

    Each program gets limits, a directory below ``directory``, and a session.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def fork(self) -> int:
        return os.fork()

    def confine(self, limits: Limits) -> None:
        scratch = self._scratch(os.getpid())
        os.mkdir(scratch)
        os.chdir(scratch)
        tempfile.tempdir = scratch
        os.setsid()
        set_limits(limits)

    def clean_up(self, pid: int) -> None:
        kill_group(pid, signal.SIGKILL)
        shutil.rmtree(self._scratch(pid), ignore_errors=True)

    def _scratch(self, pid: int) -> str:
        return os.path.join(self._directory, str(pid))


@dataclass(slots=True)
class _Running:
    """A running program: the id of its process, the descriptor for its reply, and its deadline.

    ``killed`` is True after the program was killed at its deadline.
    """

    pid: int
    reply: int
    deadline_s: float
    killed: bool = False


class _Server:
    """Receives requests on the socket ``control``, starts their programs, and kills programs at their deadlines."""

    def __init__(self, control: int, mode: _Isolation | _Unprotected, run: _Body) -> None:
        self._control = control
        self._mode = mode
        self._run = run
        self._running: dict[int, _Running] = {}
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)

    def serve(self) -> None:
        while True:
            for fd, _ in self._poller.poll(self._timeout_ms()):
                if fd != self._control:
                    self._finish(fd)
                elif not self._start_next():
                    return
            self._kill_overdue()

    def _timeout_ms(self) -> float | None:
        deadlines = [program.deadline_s for program in self._running.values() if not program.killed]
        return max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1 if deadlines else None

    def _start_next(self) -> bool:
        """Receive the next request and start its program. Return False if the socket was closed."""
        request, descriptors = receive(self._control)
        if not request:
            return False
        limits = Limits(**json.loads(request))
        reply = descriptors[-1]
        deadline_s = time.monotonic() + limits.time_s
        try:
            pid = self._mode.fork()
        except OSError as error:
            write_record(reply, {"failed": f"the sandbox can't start a process for a program: {error}"})
            os.close(reply)
        else:
            if pid == 0:
                self._run(descriptors, lambda: self._mode.confine(limits))
            pidfd = os.pidfd_open(pid)
            self._running[pidfd] = _Running(pid, reply, deadline_s)
            self._poller.register(pidfd, select.POLLIN)
        for fd in descriptors[:-1]:
            os.close(fd)
        return True

    def _finish(self, pidfd: int) -> None:
        program = self._running.pop(pidfd)
        self._poller.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(program.pid, 0)
        self._mode.clean_up(program.pid)
        ended = {"exit_code": os.waitstatus_to_exitcode(status), "timed_out": program.killed}
        write_record(program.reply, {"ended": ended})
        os.close(program.reply)

    def _kill_overdue(self) -> None:
        now_s = time.monotonic()
        for pidfd, program in self._running.items():
            if not program.killed and now_s >= program.deadline_s:
                program.killed = True
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def receive(control: int) -> tuple[bytes, list[int]]:
    """Receive the next message on the socket ``control``. Return its bytes and the descriptors that came with it.

    Both are empty if the other end of the socket was closed.
    """
    with socket.socket(fileno=os.dup(control)) as end:
        message, descriptors, _, _ = socket.recv_fds(end, REQUEST_BYTES, NUM_DESCRIPTORS)
    return message, descriptors


def _send(control: int, record: dict[str, Any]) -> None:
    os.write(control, json.dumps(record).encode())


def write_record(fd: int, record: dict[str, Any]) -> None:
    """Write ``record`` as a line of JSON to the pipe ``fd``. Do nothing if nobody reads from the pipe any more."""
    with contextlib.suppress(BrokenPipeError):
        os.write(fd, json.dumps(record).encode() + b"\n")
