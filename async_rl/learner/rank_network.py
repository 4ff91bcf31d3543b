"""Which network interface the learner's ranks use on several machines, if the user has not said so.

gloo takes the address of the machine's own name, which on Debian and Ubuntu is 127.0.1.1, so that ranks on two machines
can't connect; NCCL takes the first interface that is up. Here both get the interface that leads to the other ranks. The
caller is ``ranks.py``.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import torch.distributed as dist

from async_rl.net.address import host_towards, interface_of, is_loopback, url_host

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@contextlib.contextmanager
def chosen_interface(store: dist.Store, rank: int, world_size: int) -> Iterator[None]:
    """Let gloo, and in the ``with`` block NCCL, use the interface that leads to the ranks on other machines.

    gloo reads its variable for every group, NCCL once, when its first communicator is made. For NCCL it is set no
    longer, because processes that a rank starts may have to take another interface (``weights.collective.nccl``).
    Nothing is set if all ranks are on this machine, and no variable that the user has set is changed.

    Raises:
        AddressError: this machine has no route to another rank.
    """
    own = _own_host(store, rank, world_size)
    name = "" if is_loopback(own) else interface_of(own)
    if name:
        os.environ.setdefault(GLOO, name)
    sets_nccl = bool(name) and NCCL not in os.environ
    if sets_nccl:
        os.environ[NCCL] = f"={name}"
    try:
        yield
    finally:
        if sets_nccl:
            del os.environ[NCCL]


def _own_host(store: dist.Store, rank: int, world_size: int) -> str:
    """Return the IP address of this machine by which ranks on other machines reach it; loopback if there are none."""
    own = _host_towards(os.environ["MASTER_ADDR"])
    store.set(_key(rank), own)
    if not is_loopback(own):
        return own
    # Rank 0's machine, whose own name may lead to loopback. The others have found an address.
    hosts = (store.get(_key(other)).decode() for other in range(world_size))
    far = next((host for host in hosts if not is_loopback(host)), "")
    return _host_towards(far) if far else own


def _host_towards(host: str) -> str:
    number = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    return host_towards(f"tcp://{url_host(str(number))}:1")


def _key(rank: int) -> str:
    return f"async_rl_host/{rank}"
