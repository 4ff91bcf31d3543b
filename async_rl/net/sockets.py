"""Listen on, and shut down, plain TCP sockets. Called by the transports of the weights and by doctor. No torch."""

from __future__ import annotations

import contextlib
import socket


def listening_socket(host: str) -> socket.socket:
    """Return a socket that listens on any free port of ``host``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(1024)
    return listener


def shut_down(connection: socket.socket) -> None:
    """End a connection for both sides, even during a read or write. Its descriptor stays open."""
    with contextlib.suppress(OSError):  # it may be closed already, by either side
        connection.shutdown(socket.SHUT_RDWR)
