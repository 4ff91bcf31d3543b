"""A helper is a child process that runs a module of async-rl for its parent, with a private socket between the two.

The stream server of the weights, the HTTP front, the sandbox's launcher and fork servers are helpers. The socket has no
name, so no other process can connect. A helper ends when its parent closes the socket or dies.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import weakref
from collections.abc import Mapping, Sequence

from async_rl.process.child import GRACE_S, module_command, package_environment

_CHUNK = 1 << 16


class Helper:
    """A helper, seen from its parent. The constructor starts it.

    Args:
        module: the module that it runs. The arguments are the descriptor of its end of the socket, for
            ``parent_socket``, and then ``arguments``.
        environment: all its environment variables. None: those of this process.
        pass_fds: more descriptors that it inherits.
        kind: ``SOCK_SEQPACKET`` for a socket that keeps messages apart.

    Attributes:
        socket: the parent's end.
    """

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None, pass_fds: Sequence[int] = (),
        kind: socket.SocketKind = socket.SOCK_STREAM,
    ) -> None:  # fmt: skip
        self.socket, theirs = socket.socketpair(type=kind)
        with theirs:
            self._process = subprocess.Popen(
                # -P: no module of the working directory replaces one of async-rl.
                module_command(module, str(theirs.fileno()), *arguments, flags=("-P",)),
                env=package_environment() if environment is None else environment,
                stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), *pass_fds),
            )  # fmt: skip
        # If nobody has stopped it, it may still have processes of its own to end.
        weakref.finalize(self, _stop, self._process, self.socket, GRACE_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the helper's end. Return its exit code; None if it has not ended by then."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, grace_s: float = 0.0) -> int:
        """Close the socket, and kill the helper unless it ends within ``grace_s`` seconds. Return its exit code."""
        return _stop(self._process, self.socket, grace_s)


def _stop(process: subprocess.Popen[bytes], connection: socket.socket, grace_s: float) -> int:
    connection.close()
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def parent_socket(descriptor: str | int) -> socket.socket:
    """Return this helper's end of the socket to its parent. Ctrl-C, which reaches all, is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    return connection


class Channel:
    """A connection that never waits. What could not be sent is ``outgoing``; what came is ``incoming``, to be taken."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.incoming, self.outgoing = bytearray(), bytearray()

    def send(self, data: bytes = b"") -> None:
        """Send ``data`` after what waits. If the peer is gone, all is dropped, and ``receive`` says so."""
        self.outgoing += data
        try:
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing.clear()

    def receive(self) -> bool:
        """Add what has come to ``incoming``. Return False if the peer is gone."""
        try:
            while chunk := self.socket.recv(_CHUNK):
                self.incoming += chunk
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False
