import os
import threading
import time

import pytest
import torch

from async_rl.errors import ConfigError, WeightsError
from async_rl.weights.collective import nccl
from async_rl.weights.collective.library import SUBSTITUTE, Communicator, Endpoint, make_library
from async_rl.weights.collective.nccl import choose_interface

LOOPBACK = Endpoint("127.0.0.1", "127.0.0.1", "127.0.0.1")


def two_ranks(stall_s: float) -> list[Communicator]:
    """Both ranks in this process: a rank that does not take part looks frozen to the other."""
    libraries = [make_library("gloo", LOOPBACK) for _ in range(2)]
    unique_id = libraries[0].unique_id()
    ranks: dict[int, Communicator] = {}

    def connect(rank: int) -> None:
        ranks[rank] = Communicator.connect(libraries[rank], unique_id, rank=rank, size=2, stall_s=stall_s)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [ranks[0], ranks[1]]


def test_a_broadcast_brings_the_bytes_chunk_by_chunk():
    ranks = two_ranks(30)
    sent, got = torch.arange(100_000).to(torch.uint8), torch.zeros(100_000, dtype=torch.uint8)
    deadline = time.monotonic() + 30
    receive = threading.Thread(
        target=ranks[1].broadcast, args=(got,), kwargs={"chunk_bytes": 7001, "deadline": deadline}
    )
    receive.start()
    ranks[0].broadcast(sent, chunk_bytes=7001, deadline=deadline)
    receive.join()
    assert torch.equal(got, sent)
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_peer_costs_a_collective_no_more_than_its_deadline(rank: int):
    ranks = two_ranks(30)
    bucket = torch.zeros(32 << 20, dtype=torch.uint8)
    start = time.monotonic()
    with pytest.raises(WeightsError, match="broadcast"):
        ranks[rank].broadcast(bucket, chunk_bytes=64 << 20, deadline=start + 0.5)
    assert 0.4 < time.monotonic() - start < 5
    for each in ranks:
        each.close()


def test_connecting_to_a_peer_that_never_comes_ends_in_time():
    start = time.monotonic()
    library = make_library("gloo", LOOPBACK)
    with pytest.raises(WeightsError, match="rank 0 of 2 could not connect to the others"):
        Communicator.connect(library, library.unique_id(), rank=0, size=2, stall_s=0.5)
    assert time.monotonic() - start < 5


def test_an_unknown_collective_is_refused():
    with pytest.raises(WeightsError, match=r"\['nccl', 'gloo'\], got 'mpi'"):
        make_library("mpi", LOOPBACK)


def test_a_library_for_tests_is_refused_outside_of_tests(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SUBSTITUTE, "tests.weights.faulty_library:FaultyLibrary")
    monkeypatch.delenv("ASYNC_RL_FAULTS", raising=False)
    with pytest.raises(ConfigError, match=f"{SUBSTITUTE} is for async-rl's own tests"):
        make_library("gloo", LOOPBACK)


def test_nccl_without_its_package_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nccl, "_PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(WeightsError, match=r"pip install 'async-rl\[nccl\]'"):
        make_library("nccl", LOOPBACK)


def test_nccl_uses_the_interface_of_the_advertised_address_unless_the_user_chose_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(nccl, "interface_of", {"10.0.0.1": "ib0", "10.0.0.2": "eth1"}.__getitem__)
    choose_interface("127.0.0.1")
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    choose_interface("10.0.0.1")
    choose_interface("10.0.0.2")
    assert os.environ.pop("NCCL_SOCKET_IFNAME") == "=ib0"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "bond0")
    choose_interface("10.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "bond0"
