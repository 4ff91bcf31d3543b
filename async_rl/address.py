"""ZeroMQ addresses: checked at once, and refused when they open the run to a network without saying so."""

from __future__ import annotations

import ipaddress
import re
import socket

from async_rl.errors import AddressError

_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._*-]+):(?P<port>\d{1,5}|\*)")


def check_address(address: str) -> tuple[str, int]:
    """Host and port of ``tcp://HOST:PORT``; port 0 (or ``*``) is any free one.

    Raises:
        AddressError: it is malformed.
    """
    match = _ADDRESS.fullmatch(address)
    port = 0 if match and match["port"] == "*" else int(match["port"]) if match else -1
    if match is None or port > 65535:
        raise AddressError(f"expected an address like tcp://127.0.0.1:5555, got {address!r}")
    return match["host"].strip("[]"), port


def is_loopback(host: str) -> bool:
    """Whether ``host`` is reachable from this machine only. Names are resolved; one that can't be is not loopback."""
    if host == "*":
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False


def refuse_open_bind(address: str, *, insecure: bool) -> None:
    """Refuse to bind beyond loopback unless the user said ``--insecure``.

    Raises:
        AddressError: the address is open to a network.
    """
    host, _ = check_address(address)
    if not insecure and not is_loopback(host):
        raise AddressError(
            f"{address} is reachable from the network and messages are not authenticated; bind 127.0.0.1, or pass "
            f"--insecure on a network that you trust"
        )


def local_host_towards(address: str) -> str:
    """The address of this machine's interface from which ``address`` is reached (no packet is sent).

    Raises:
        AddressError: there is no route to it.
    """
    host, port = check_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port or 1))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise AddressError(f"no route from this machine to {address}: {error}") from error
