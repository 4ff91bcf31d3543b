"""Check network addresses, and refuse those that others can't reach or that open a run to a network without keys."""

from __future__ import annotations

import ipaddress
import re
import socket

import psutil

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


def url_host(host: str) -> str:
    """Return ``host`` as it is written before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def is_wildcard(host: str) -> bool:
    """Return whether ``host`` stands for all addresses of a machine, so that nobody can connect to it."""
    try:
        return host == "*" or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


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


def advertised_address(bind: str, advertise: str | None) -> str:
    """Return the address that others connect to, for a server that binds ``bind``. Its port is 0 if any port is bound.

    Raises:
        AddressError: other machines could not connect to that address, although the server is bound beyond loopback.
    """
    host, port = check_address(bind)
    if advertise is None:
        if is_wildcard(host):
            raise AddressError(
                f"queue.address: {bind} stands for all interfaces of this machine, so other machines can't connect to "
                f'it; set queue.advertise = "{_suggestion(host, port)}", the address by which they reach this machine'
            )
        return f"tcp://{url_host(host)}:{port}"
    shown_host, shown_port = check_address(advertise)
    if is_wildcard(shown_host) or (is_loopback(shown_host) and not is_loopback(host)):
        reason = "all interfaces" if is_wildcard(shown_host) else "loopback, which only this machine reaches"
        raise AddressError(
            f"queue.advertise: expected an address by which other machines reach this machine, got {advertise}, which "
            f'stands for {reason}; set queue.advertise = "{_suggestion(host, shown_port or port)}"'
        )
    return f"tcp://{url_host(shown_host)}:{shown_port or port}"


def own_address(*, is_ipv6: bool = False) -> str:
    """Return an address of this machine that other machines can reach; loopback if there is none."""
    try:
        # Addresses reserved for documentation: the kernel looks up the route and sends nothing.
        return local_host_towards("tcp://[2001:db8::1]:9" if is_ipv6 else "tcp://192.0.2.1:9")
    except AddressError:
        return "::1" if is_ipv6 else "127.0.0.1"


def _suggestion(host: str, port: int) -> str:
    own = own_address(is_ipv6=":" in host)
    shown = "HOST" if is_loopback(own) else url_host(own)
    return f"tcp://{shown}:{port or 5555}"


def host_towards(address: str) -> str:
    """Return the IP address of this machine by which the machine of ``address`` reaches it; loopback within a machine.

    Raises:
        AddressError: this machine has no route to ``address``.
    """
    return "127.0.0.1" if is_loopback(check_address(address)[0]) else local_host_towards(address)


def why_unbindable(host: str, port: int) -> OSError | None:
    """Return why no server on this machine could bind this TCP port now, 0 for any; None if one could.

    ``host`` may be ``*`` for all interfaces, or the name of an interface, whose port is not tried.
    """
    if host in {name for _, name in socket.if_nameindex()}:
        return None
    try:
        family, *_, place = socket.getaddrinfo("0.0.0.0" if host == "*" else host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        return error
    return None


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


def interface_of(host: str) -> str:
    """Return the name of this machine's network interface that has the IP address ``host``.

    Raises:
        AddressError: no interface has it.
    """
    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        # An IPv6 address of a link ends with its interface, as in fe80::1%eth0.
        if any(address.address.partition("%")[0] == host.partition("%")[0] for address in addresses):
            return name
    raise AddressError(
        f"expected an address of one of this machine's network interfaces ({', '.join(interfaces)}), got {host}; "
        f"correct queue.address or queue.advertise"
    )
