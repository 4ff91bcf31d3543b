"""Checks of addresses: that servers can bind theirs, that others reach them, and only those with keys."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from async_rl.config.config import Config
from async_rl.config.queue import QueueConfig
from async_rl.errors import AddressError, naming
from async_rl.launch.checks.finding import Finding
from async_rl.net.address import (
    advertised_address,
    check_address,
    host_towards,
    is_loopback,
    refuse_open_bind,
    why_unbindable,
)
from async_rl.net.keys import ServerKeys, client_keys_of
from async_rl.net.link import why_unreachable
from async_rl.net.streams import listening_socket
from async_rl.queue.server.start import answering_run
from async_rl.run.queue_files import read_record


def check_queue_address(config: Config, *, insecure: bool, may_run: bool = False) -> Iterator[Finding]:
    """Check that a queue server on this machine could bind ``queue.address``; with ``may_run``, or that this run's
    queue server answers there.

    Raises:
        AddressError: the address is in use, belongs to another machine, can't be reached by others, or can be reached
            from the network although there are no keys and ``insecure`` is false.
    """
    address = config.queue.address
    if address is None:
        yield Finding("queue.address", "OK", "unset: any free port on loopback")
        return
    record = read_record(Path(config.run.dir)) if may_run else None
    if record is not None and answering_run(record.address, 2.0, client_keys_of(config.queue.keys)) == record.run_id:
        yield Finding("queue.address", "OK", f"this run's queue server answers at {record.address}")
        return
    check_reachable(config.queue, insecure=insecure)
    try:
        _try_bind(address)
    except AddressError as error:
        raise AddressError(
            f"queue.address: {error}, or leave queue.address out for any free port on loopback"
        ) from None
    yield Finding("queue.address", "OK", f"{address} can be bound")


def _try_bind(address: str) -> None:
    if (error := why_unbindable(*check_address(address))) is not None:
        raise AddressError(
            f"can't bind {address}: {error.strerror or error}; end what listens there (ss -ltnp shows it), or "
            f"choose another port or an address of this machine"
        )


def check_reachable(queue: QueueConfig, *, insecure: bool) -> None:
    """Check that others can reach ``queue.address``, and only those with keys unless ``insecure``. Do nothing if it is
    unset.

    Raises:
        AddressError: they can't, or others can, too.
    """
    if queue.address is not None:
        refuse_open_bind(queue.address, insecure=insecure, has_keys=queue.keys is not None)
        advertised_address(queue.address, queue.advertise)


def serves_here(config: Config) -> bool:
    """Return whether the queue server is, or will be, on this machine: its host is, so that it could be bound here.

    Raises:
        AddressError: the host's name can't be resolved.
    """
    if config.queue.address is None:
        return True
    host, _ = check_address(config.queue.address)
    error = why_unbindable(host, 0)
    if isinstance(error, socket.gaierror):
        raise AddressError(
            f"queue.address: expected a host that this machine can resolve, got {host!r}: {error}; correct the "
            f"host's name"
        )
    return error is None


def others_address(queue: QueueConfig) -> str:
    """Return the address by which learner and generators connect to the queue server of this config.

    Raises:
        AddressError: other machines could not connect to that address.
    """
    return advertised_address(queue.address or "tcp://127.0.0.1:0", queue.advertise)


def check_weights_ports(config: Config) -> Iterator[Finding]:
    """Check that two ports of ``weights.port`` are free on this machine. Do nothing if the key is unset.

    Raises:
        AddressError: fewer than two are free, or this machine has no route to the queue server.
    """
    ports = config.weights.ports
    if ports is not None:
        host = host_towards(others_address(config.queue))
        with listening_socket(host, ports), listening_socket(host, ports):
            yield Finding("weights.port", "OK", "two ports are free")


def check_own_address(address: str, key: str, config: Config, *, insecure: bool) -> None:
    """Check that another server of the run, a scorer or a relay, can bind ``address``.

    Raises:
        AddressError: the address is in use, belongs to another machine, or is open to a network without keys. ``key``
            is named.
    """
    with naming(key, AddressError):
        refuse_open_bind(address, insecure=insecure, has_keys=config.queue.keys is not None)
        _try_bind(address)


def scorers_away(config: Config) -> Iterator[Finding]:
    """Look for the scorers that somebody else must start. Yield a warning for each that can't be reached."""
    for name, scorer in config.scorer.items():
        host, port = check_address(scorer.address)
        if not scorer.launch and (why := why_unreachable(f"the scorer {name}", host, port)):
            yield Finding(f"scorer.{name}", "WARN", why, fix=f"async-rl scorer CONFIG {name}")


def check_keys(config: Config, *, is_server: bool) -> Iterator[Finding]:
    """Check that this process can read the key files in the directory ``queue.keys``: the learner's, and the queue
    server's if ``is_server``.

    Raises:
        KeyFileError: a key file is missing or malformed, or other users can read it.
    """
    client_keys_of(config.queue.keys)
    if config.queue.keys is None:
        text = "queue.keys is unset: nothing is encrypted, so use loopback or a trusted network only"
    else:
        if is_server:
            ServerKeys.load(config.queue.keys)
        names = "the server's and the learner's key" if is_server else "the learner's key"
        text = f"{config.queue.keys}: {names} can be read, by you alone"
    yield Finding("keys", "OK", text)


def check_interfaces(config: Config, connect: str | None = None) -> Iterator[Finding]:
    """Check that this machine has the network interfaces that environment variables (for gloo, NCCL) name.

    Also show the address of this machine over which weights would be sent. ``connect`` is the queue server's address as
    this machine's generators reach it; None on the learner's machine.
    """
    names = {name for _, name in socket.if_nameindex()}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        chosen = os.environ.get(variable, "").lstrip("=^")
        unknown = [name for name in chosen.split(",") if name and not any(n.startswith(name) for n in names)]
        if unknown:
            text = f"{variable}: expected an interface of this machine, got {', '.join(unknown)}"
            fix = f"unset {variable}, or set it to one of {', '.join(sorted(names))}"
            yield Finding("interface", "FAIL", text, fix=fix)
    host = weights_host(config, connect)
    where = f"weights are sent over this address (interfaces: {', '.join(sorted(names))})"
    yield Finding("interface", "OK", f"{host}: {'weights stay on this machine' if is_loopback(host) else where}")


def weights_host(config: Config, connect: str | None = None) -> str:
    """Return the address of this machine over which it would send or receive weights.

    It is the address of the network interface from which the queue server can be reached.

    Raises:
        AddressError: this machine has no route to the queue server, or others can't reach the server's address.
    """
    return host_towards(connect or others_address(config.queue))
