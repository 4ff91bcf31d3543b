"""An attacker, as a process: ``python -m tests.hostile KIND HOST:PORT COUNT``. It holds many connections to one port.

``KIND`` names what the port speaks: ``zmtp``, ``weights`` or ``http``. Each connection begins with one of that kind's
``BEGINNINGS`` and then trickles. It prints one line when all connections have been opened. Connections that the port
closes are opened again, up to ``REOPENED_PER_S``. It ends when its input ends.
"""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[1]
REOPENED_PER_S = 500
_TURN_S = 0.1
_TRICKLE = b"\0"


def _greeting(mechanism: bytes) -> bytes:
    """The 64 bytes with which ZMTP 3.1 begins."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def _ready() -> bytes:
    body = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    return bytes([4, len(body)]) + body


def dealer_handshake() -> bytes:
    """What a DEALER socket without keys sends before its first message."""
    return _greeting(b"NULL") + _ready()


_GIANT_COMMAND = b"\x06" + struct.pack(">Q", 1 << 29)
_GIANT_MESSAGE = b"\x02" + struct.pack(">Q", 1 << 29)
_NULL, _CURVE = _greeting(b"NULL"), _greeting(b"CURVE")

BEGINNINGS: dict[str, Sequence[bytes]] = {
    "zmtp": (
        b"", b"\xff", _NULL[:40], _NULL, _CURVE, _NULL + _ready(), _NULL + _ready() + _GIANT_MESSAGE,
        _CURVE + _GIANT_COMMAND + bytes(1 << 16), b"\x01\x00" + bytes(8), b"GET / HTTP/1.1\r\n",
    ),
    "weights": (
        b"", b"A", b"ARW3", b"ARW3" + bytes(32), b"ARW3" + bytes(32) + b"\xff\xff\x0f\0", b"GET / HTTP/1.1\r\n\r\n" * 4,
    ),
    "http": (
        b"", b"P", b"POST /check_correctness HTTP/1.1\r\n",
        b"POST /check_correctness HTTP/1.1\r\nContent-Length: 67108864\r\n\r\n{",
        b"POST /check_correctness HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 60_000,
    ),
}  # fmt: skip


class Attacker:
    """The process. Leave the ``with`` block to end it."""

    def __init__(self, kind: str, host: str, port: int, count: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile", kind, f"{host}:{port}", str(count)], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def wait_until_open(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == "open"

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


class _Connections:
    """The attacker's side. ``poll`` reads and drops what the port sends, and counts what it has closed."""

    def __init__(self, kind: str, address: tuple[str, int]) -> None:
        self._beginnings, self._address, self._number = BEGINNINGS[kind], address, 0
        self._open: dict[int, socket.socket] = {}
        self._poller = select.poll()

    def __len__(self) -> int:
        return len(self._open)

    def open_one(self) -> None:
        beginning = self._beginnings[self._number % len(self._beginnings)]
        self._number += 1
        with contextlib.suppress(OSError):
            connection = socket.create_connection(self._address, 10.0)
            self._open[connection.fileno()] = connection
            self._poller.register(connection, select.POLLIN)
            connection.setblocking(False)
            connection.send(beginning)

    def poll(self, timeout_s: float) -> None:
        for fd, _ in self._poller.poll(timeout_s * 1000):
            connection = self._open[fd]
            try:
                is_open = bool(connection.recv(1 << 16))
            except BlockingIOError:
                continue
            except OSError:
                is_open = False
            if not is_open:
                self._poller.unregister(fd)
                self._open.pop(fd).close()

    def trickle(self) -> None:
        for connection in self._open.values():
            with contextlib.suppress(OSError):
                connection.send(_TRICKLE)


def main(arguments: Sequence[str] | None = None, lines: TextIO = sys.stdin) -> None:
    kind, address, count = arguments or sys.argv[1:]
    host, port = address.rsplit(":", 1)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    connections = _Connections(kind, (host, int(port)))
    for _ in range(int(count)):
        connections.open_one()
    print("open", flush=True)
    for _ in _turns(lines):
        connections.poll(0.0)
        for _ in range(min(int(REOPENED_PER_S * _TURN_S), int(count) - len(connections))):
            connections.open_one()
        connections.trickle()


def _turns(lines: TextIO) -> Iterator[None]:
    """One turn after another until the input ends."""
    while not select.select([lines], [], [], _TURN_S)[0]:
        yield


if __name__ == "__main__":
    main()
