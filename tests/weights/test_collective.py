import os
import threading
import time

import pytest
import torch

from async_rl.errors import WeightsError
from async_rl.net.streams import listening_socket
from async_rl.weights import collective
from async_rl.weights.collective import Communicator, choose_nccl_interface


def two_groups(stall_s: float) -> list[Communicator]:
    """Both ranks in this process: a rank that does not take part looks frozen to the other."""
    listener = listening_socket("127.0.0.1")
    port = listener.getsockname()[1]
    groups: dict[int, Communicator] = {}

    def create(rank: int) -> None:
        groups[rank] = Communicator.create(
            "gloo", store_host="127.0.0.1", store_port=port, rank=rank, size=2, stall_s=stall_s,
            local_host="127.0.0.1", listener=listener if rank == 0 else None,
        )  # fmt: skip

    threads = [threading.Thread(target=create, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[0], groups[1]]


def test_a_broadcast_brings_the_bytes_chunk_by_chunk():
    groups = two_groups(30)
    sent, got = torch.arange(100_000).to(torch.uint8), torch.zeros(100_000, dtype=torch.uint8)
    deadline = time.monotonic() + 30
    receive = threading.Thread(
        target=groups[1].broadcast, args=(got,), kwargs={"chunk_bytes": 7001, "deadline": deadline}
    )
    receive.start()
    groups[0].broadcast(sent, chunk_bytes=7001, deadline=deadline)
    receive.join()
    assert torch.equal(got, sent)
    for group in groups:
        group.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_peer_costs_a_collective_no_more_than_its_deadline(rank: int):
    groups = two_groups(30)
    bucket = torch.zeros(32 << 20, dtype=torch.uint8)
    start = time.monotonic()
    with pytest.raises(WeightsError, match="broadcast"):
        groups[rank].broadcast(bucket, chunk_bytes=64 << 20, deadline=start + 0.5)
    assert 0.4 < time.monotonic() - start < 5
    for group in groups:
        group.close()


def test_connecting_to_a_peer_that_never_comes_ends_in_time():
    start = time.monotonic()
    listener = listening_socket("127.0.0.1")
    with pytest.raises(WeightsError, match="rank 0 of 2 could not connect to the others"):
        Communicator.create(
            "gloo", store_host="127.0.0.1", store_port=listener.getsockname()[1], rank=0, size=2, stall_s=0.5,
            local_host="127.0.0.1", listener=listener,
        )  # fmt: skip
    assert time.monotonic() - start < 5


def test_an_unknown_transport_is_refused():
    listener = listening_socket("127.0.0.1")
    with pytest.raises(WeightsError, match="'gloo' or 'nccl'"):
        Communicator.create(
            "mpi", store_host="127.0.0.1", store_port=listener.getsockname()[1], rank=0, size=1, stall_s=1,
            local_host="127.0.0.1", listener=listener,
        )  # fmt: skip


def test_nccl_uses_the_interface_of_the_advertised_address_unless_the_user_chose_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(collective, "interface_of", {"10.0.0.1": "ib0", "10.0.0.2": "eth1"}.__getitem__)
    choose_nccl_interface("127.0.0.1")
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    choose_nccl_interface("10.0.0.1")
    choose_nccl_interface("10.0.0.2")
    assert os.environ.pop("NCCL_SOCKET_IFNAME") == "=ib0"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "bond0")
    choose_nccl_interface("10.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "bond0"
