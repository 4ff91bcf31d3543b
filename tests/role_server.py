"""Starts ``async-rl`` commands without the start of Python: it has imported torch and the roles, and forks.

A whole run starts four programs and more, and each imports for one to six seconds. Forked from here, a role is ready in
milliseconds. ``forked_roles`` is the client. A request is one connection: a JSON object with the descriptors that the
child gets. The replies on the connection are the child's process id and, when it has ended, its status.

The child has the arguments, environment, working directory and descriptors of its request, and no others, in a session
of its own. It leaves the server's loop and runs ``python -m async_rl`` as its main module. So exceptions,
``SystemExit`` and the end of the interpreter are as usual. Three things differ from a program of its own. Its parent is
this server. The kernel shows this server's command line and environment (``harness.processes_of`` looks for an open
file instead). And the modules below are imported, so what they read of the environment when they are imported is read
again here.

The command is ``python -m tests.role_server DESCRIPTOR LIFELINE``: a listening socket, and a pipe that closes when the
server shall end.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

NUMBER = struct.Struct("<i")
MAX_REQUEST_BYTES = 1 << 20
MAX_FDS = 64
_FIRST_SPARE_FD = 256

PRELOADED = (
    "async_rl.cli.main",
    "async_rl.launch.checks.parity",
    "async_rl.launch.checks.table",
    "async_rl.extensions.insight.evaluation.offline",
    "async_rl.extensions.offline.tasks",
    "async_rl.generator.hf.backend",
    "async_rl.generator.start.worker",
    "async_rl.launch.launch",
    "async_rl.learner.engine.fsdp_engine",
    "async_rl.learner.export.model",
    "async_rl.learner.loop.start",
    "async_rl.learner.loop.trainer",
    "async_rl.queue.server.server",
    "transformers.models.auto",
    "transformers.models.qwen2.modeling_qwen2",
)


class Job(NamedTuple):
    """What a child shall become. ``fds`` are the child's numbers of the descriptors, in the order of ``received``."""

    argv: list[str]
    environment: dict[str, str]
    directory: str
    fds: list[int]
    received: list[int]


def read_request(connection: socket.socket) -> Job:
    """Receive one request: its length, the JSON object, and the descriptors that come with the length."""
    header, received, _, _ = socket.recv_fds(connection, NUMBER.size, MAX_FDS, socket.MSG_WAITALL)
    size = NUMBER.unpack(header)[0]
    body = connection.recv(size, socket.MSG_WAITALL)
    return Job(**json.loads(body), received=received)


class Server:
    """Forks a child for each request and reports its end. ``run`` returns None, or in a child its job."""

    def __init__(self, listener: socket.socket, lifeline: int) -> None:
        self._listener, self._lifeline = listener, lifeline
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(lifeline, selectors.EVENT_READ)

    def run(self) -> Job | None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    job = self._accept()
                    if job is not None:
                        return job
                elif key.fileobj == self._lifeline:
                    return None
                else:
                    self._report_end(key.fd, *key.data)

    def _accept(self) -> Job | None:
        connection, _ = self._listener.accept()
        job = read_request(connection)
        pid = os.fork()
        if pid == 0:
            self._forget(connection)
            return job
        for fd in job.received:
            os.close(fd)
        connection.sendall(NUMBER.pack(pid))
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
        return None

    def _forget(self, connection: socket.socket) -> None:
        """In a child: let no object of this server close a descriptor whose number the child may use for another."""
        for key in self._selector.get_map().values():
            if key.data is not None:
                key.data[1].detach()
        self._selector.close()
        connection.detach()
        self._listener.detach()

    def _report_end(self, pidfd: int, pid: int, connection: socket.socket) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):  # who asked for the child may have ended
            connection.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
        connection.close()


def become(job: Job) -> None:
    """Make this forked process the program that ``job`` describes, and run it."""
    # First out of the way of the numbers that they shall have, which may be one another's.
    spare = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_SPARE_FD) for fd in job.received]
    os.closerange(3, _FIRST_SPARE_FD)
    for fd, number in zip(spare, job.fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.setsid()
    os.chdir(job.directory)
    own_path = _split(os.environ.get("PYTHONPATH", ""))
    os.environ.clear()
    os.environ.update(job.environment)
    installed = [path for path in sys.path[1:] if path not in own_path]
    sys.path[:] = [job.directory, *_split(os.environ.get("PYTHONPATH", "")), *installed]
    sys.argv = list(job.argv)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through="PYTHONUNBUFFERED" in os.environ)  # type: ignore[union-attr]
    _read_environment_again()
    runpy.run_module("async_rl", run_name="__main__", alter_sys=True)


def _split(path: str) -> list[str]:
    return [entry for entry in path.split(os.pathsep) if entry]


def _read_environment_again() -> None:
    """Give modules that read the environment when they are imported what this process's environment says."""
    from async_rl.process import fault_points
    from tests import forked_roles

    fault_points._directory = os.environ.get("ASYNC_RL_FAULTS")
    forked_roles.mark_process(os.environ, [sys.executable, "-m", *sys.argv])
    forked_roles.fork_children()


def main() -> None:
    listener, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; this process ends with its lifeline
    for name in PRELOADED:
        importlib.import_module(name)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RuntimeError(f"expected one thread after the imports, got {threads}: a fork would lose the others")
    gc.freeze()
    job = Server(listener, lifeline).run()
    if job is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        become(job)


def encode_request(fields: dict[str, Any]) -> bytes:
    """The body of a request: all fields of ``Job`` but ``received``."""
    return json.dumps(fields).encode()


if __name__ == "__main__":
    main()
