"""Plain TCP sockets of the weights' transports: listening, and hanging up. No torch."""

from __future__ import annotations

import contextlib
import socket


def listening_socket(host: str) -> socket.socket:
    """A socket that listens on any free port of ``host``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(1024)
    return listener


def hang_up(connection: socket.socket) -> None:
    """End it for both sides, whoever reads or writes now; its descriptor stays."""
    with contextlib.suppress(OSError):  # it may be closed already, or ended by the other side
        connection.shutdown(socket.SHUT_RDWR)
