"""Client of ``role_server``: starts ``python -m async_rl`` as a fork of it, with the methods of ``subprocess.Popen``.

``start`` is for tests. In a forked role ``fork_children`` has the same done for the role's own children: whatever it
starts by ``subprocess.Popen`` as ``python -m async_rl`` is forked as well. Other commands are started as always.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests.role_server import NUMBER, encode_request

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = "ASYNC_RL_TEST_ROLE_SERVER"
"""The environment variable with the path of the server's socket, which forked roles inherit."""
COMMAND_LINE = "async-rl-command-line"
_REAL_POPEN = subprocess.Popen


class _Server(NamedTuple):
    process: subprocess.Popen[bytes]
    address: str
    lifeline: int


class ForkedRole:
    """A forked ``async-rl`` command: what ``subprocess.Popen`` has of it, without pipes."""

    def __init__(self, args: Sequence[str], connection: socket.socket) -> None:
        self.args, self._connection = args, connection
        self.stdin = self.stdout = self.stderr = None
        self.pid: int = NUMBER.unpack(connection.recv(NUMBER.size, socket.MSG_WAITALL))[0]
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._await(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._await(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _await(self, timeout_s: float | None) -> int | None:
        with self._lock:
            if self.returncode is None:
                poller = select.poll()
                poller.register(self._connection, select.POLLIN)
                if poller.poll(None if timeout_s is None else timeout_s * 1000):
                    self.returncode = NUMBER.unpack(self._connection.recv(NUMBER.size, socket.MSG_WAITALL))[0]
                    self._connection.close()
            return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    directory: Path,
    stdin: int,
    stdout: int,
    stderr: int,
    pass_fds: Sequence[int] = (),
) -> ForkedRole:
    """Fork ``python -m async_rl ARGV`` in a session of its own.

    The descriptors are this process's. ``pass_fds`` keep their numbers.
    """
    fields = {
        "argv": ["async_rl", *argv],
        "environment": {**environment, ADDRESS: _address()},
        "directory": str(directory),
        "fds": [0, 1, 2, *pass_fds],
    }
    body = encode_request(fields)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_address())
    socket.send_fds(connection, [NUMBER.pack(len(body))], [stdin, stdout, stderr, *pass_fds])
    connection.sendall(body)
    return ForkedRole(("async_rl", *argv), connection)


_server: _Server | None = None


def _address() -> str:
    """The path of the server's socket. The server is started if there is none yet."""
    global _server
    inherited = os.environ.get(ADDRESS)
    if inherited is not None:
        return inherited
    if _server is None:
        directory = tempfile.mkdtemp(prefix="async-rl-roles-")
        address = f"{directory}/socket"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen(64)
        read_end, lifeline = os.pipe()
        process = _REAL_POPEN(
            [sys.executable, "-m", "tests.role_server", str(listener.fileno()), str(read_end)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=(listener.fileno(), read_end),
            start_new_session=True,
        )
        os.close(read_end)
        listener.close()
        _server = _Server(process, address, lifeline)
        atexit.register(_end, _server, Path(directory))
    return _server.address


def _end(server: _Server, directory: Path) -> None:
    os.close(server.lifeline)
    server.process.wait(30)
    Path(server.address).unlink()
    directory.rmdir()


def mark_of(marker: str) -> str:
    """The name of the open file by which ``harness.processes_of`` finds forked processes with ``marker``."""
    return f"async-rl-{hashlib.sha256(marker.encode()).hexdigest()[:32]}"


def mark_process(environment: Mapping[str, str], argv: Sequence[str]) -> None:
    """Open files that tell what the kernel would show of a program: this process's command line and test variables.

    Forks of this process inherit them, as they would its command line; programs that it starts don't.
    """
    os.write(os.memfd_create(COMMAND_LINE), "\0".join(argv).encode())
    for name, value in environment.items():
        if name.startswith("ASYNC_RL_TEST") and name != ADDRESS:
            os.memfd_create(mark_of(f"{name}={value}"))


def open_files(pid: int) -> dict[str, Path]:
    """The open files of a process: what the kernel says of each, and its path under ``/proc``.

    Raises:
        OSError: the process has ended.
    """
    found = dict[str, Path]()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed between the listing and the look
            found[os.readlink(file)] = file
    return found


def command_line(pid: int) -> list[str]:
    """The words of a process's command line, of a forked role too.

    Raises:
        OSError: the process has ended.
    """
    own = next((path for link, path in open_files(pid).items() if COMMAND_LINE in link), Path(f"/proc/{pid}/cmdline"))
    return own.read_text().split("\0")


def fork_children() -> None:
    """Let this process fork the ``async-rl`` commands that it starts by ``subprocess.Popen``."""
    subprocess.Popen = _ForkOrExec  # type: ignore[assignment,misc]


class _ForkOrExec(_REAL_POPEN):  # type: ignore[type-arg]
    """``subprocess.Popen`` that forks ``python -m async_rl``, always in a session of its own.

    A command with other options than those of roles, or with a pipe, is started as always.
    """

    def __new__(cls, args: Any, **options: Any) -> Any:
        is_role = isinstance(args, list | tuple) and list(args[:3]) == [sys.executable, "-m", "async_rl"]
        streams = [options.get(name) for name in ("stdin", "stdout", "stderr")]
        if not is_role or subprocess.PIPE in streams or not options.keys() <= _FORKED_OPTIONS:
            return super().__new__(cls)
        with open(os.devnull, "r+b", buffering=0) as nothing:
            stdin, stdout, stderr = (_number(stream, own, nothing) for own, stream in enumerate(streams))
            return start(
                list(args[3:]),
                environment=options.get("env") or os.environ,
                directory=Path(options.get("cwd") or Path.cwd()),
                stdin=stdin,
                stdout=stdout,
                stderr=stdout if options.get("stderr") == subprocess.STDOUT else stderr,
                pass_fds=options.get("pass_fds", ()),
            )


_FORKED_OPTIONS = {"env", "cwd", "stdin", "stdout", "stderr", "pass_fds", "start_new_session"}


def _number(stream: Any, own: int, nothing: IO[bytes]) -> int:
    """The descriptor that ``subprocess`` means by ``stream``: a file, a number, DEVNULL, or None for ``own``."""
    if stream is None:
        return own
    if stream == subprocess.DEVNULL:
        return nothing.fileno()
    return stream if isinstance(stream, int) else stream.fileno()
