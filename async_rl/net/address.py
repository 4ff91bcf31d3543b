"""Check network addresses, and refuse those that open a run to a network without keys or ``--insecure``."""

from __future__ import annotations

import ipaddress
import re
import socket

from async_rl.errors import AddressError

_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._*-]+):(?P<port>\d{1,5}|\*)")


def check_address(address: str) -> tuple[str, int]:
    """Return (host, port) of an address ``tcp://HOST:PORT``. Port 0 stands for any free port; ``*`` is read as 0.

    Raises:
        AddressError: the address is malformed.
    """
    match = _ADDRESS.fullmatch(address)
    port = 0 if match and match["port"] == "*" else int(match["port"]) if match else -1
    if match is None or port > 65535:
        raise AddressError(
            f"expected an address tcp://HOST:PORT, such as tcp://127.0.0.1:5555, got {address!r}; correct it"
        )
    return match["host"].strip("[]"), port


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``.

    A name is resolved first. If it can't be resolved, the answer is False.
    """
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


def refuse_open_bind(address: str, *, insecure: bool, has_keys: bool = False) -> None:
    """Refuse to listen without keys on an address that other machines can reach, unless ``insecure`` is set.

    Raises:
        AddressError: the server would be open to a network.
    """
    host, _ = check_address(address)
    if not insecure and not has_keys and not is_loopback(host):
        raise AddressError(
            f"{address} is reachable from the network and messages are not authenticated; make keys (async-rl keys new "
            f'keys) and set queue.keys = "keys", or bind 127.0.0.1, or pass --insecure on a network that you trust'
        )


def refuse_open_connect(address: str, *, insecure: bool, has_keys: bool) -> None:
    """Refuse to connect to a queue on another machine without keys, unless ``insecure`` is set.

    Raises:
        AddressError: the client could not verify that the server is the run's queue.
    """
    host, _ = check_address(address)
    if not insecure and not has_keys and not is_loopback(host):
        raise AddressError(
            f"{address} is on another machine and not authenticated; pass --keys FILE (one of async-rl keys new), or "
            f"--insecure on a network that you trust"
        )


def refuse_open_collectives(host: str, *, is_trusted: bool) -> None:
    """Refuse to send or receive weights by NCCL or gloo at ``host``, except on loopback or on a trusted network.

    Raises:
        AddressError: the collectives would use a network that is not trusted.
    """
    if not is_trusted and not is_loopback(host):
        raise AddressError(
            f"weights would pass the network at {host} by NCCL or gloo, which neither encrypt nor "
            f"authenticate, even with keys; set weights.trusted_network = true (or pass --insecure) on a network that "
            f'you trust, or set weights.transport = "auto" to send them by tcp'
        )


def refuse_open_stream(host: str, *, has_keys: bool, is_trusted: bool) -> None:
    """Refuse to send or receive weights by ``tcp`` at ``host``, unless with keys, on loopback or on a trusted network.

    Raises:
        AddressError: the weights would be sent unencrypted and unauthenticated.
    """
    if not has_keys and not is_trusted and not is_loopback(host):
        raise AddressError(
            f"weights would pass the network at {host} by tcp, neither encrypted nor authenticated; make "
            f'keys (async-rl keys new keys) and set queue.keys = "keys", or set weights.trusted_network = true (or '
            f"pass --insecure) on a network that you trust"
        )


def local_host_towards(address: str) -> str:
    """Return the IP address of this machine from which packets to ``address`` are sent. No packet is sent.

    Raises:
        AddressError: this machine has no route to ``address``.
    """
    host, port = check_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port or 1))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise AddressError(
            f"this machine has no route to {address}: {error}; check the host's name and the network"
        ) from error
