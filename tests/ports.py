"""Ports of this machine at which nobody listens."""

from __future__ import annotations

import socket


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def free_address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"
